"""A fault at one message of the closing exchanges of a run, and what must hold afterwards.

Every live peer ends its run within the time limit, and no contribution counts twice. Push-sum creates no mass, and
loses only that of dead peers.
"""

from __future__ import annotations

from collections.abc import Iterator

from protocols.base import PeerId
from protocols.pairwise.push_sum import PushSum
from tests.sim.independent_world import SPREAD_BOUND, IndependentWorld
from tests.sim.message_fault import LIMIT_SECONDS, MessageFault, Recording
from tests.sim.scenario import Scenario
from tests.support.checkers import Violation

ENDS_SECONDS = 120.0
"""In these runs, whose rounds take 3 s: two waits of 20 s, and three closing steps of about 7 s, with some margin."""
FAR = 1e-9
"""Tolerance of sums of weights, which are sums of powers of 1/2."""


class RecordingEnd(Recording):
    """Records the messages of each peer after its last round."""

    def _watch(self, peer: PeerId, number: int, way: str, other: PeerId) -> None:
        outer_loop = self.replicas.get(peer)
        if outer_loop is not None and outer_loop.key.round >= self.scenario.rounds:  # type: ignore[attr-defined]
            self.record(peer, number, way, other)


class StruckEnd(MessageFault, IndependentWorld):
    """A run with a fault in its closing exchanges, until all live peers have ended it."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        self.endless = False

    def satisfied(self) -> bool:
        return all(self.ended(peer) for peer in self.able())

    def ended(self, peer: PeerId) -> bool:
        history = self.histories[peer]
        return bool(history) and history[-1]["round"] >= self.scenario.rounds - 1

    def judge(self) -> Iterator[Violation]:
        last = self.scenario.rounds - 1
        if not self.injector.struck:
            yield Violation("missed", "", last, "the fault never happened: the run differs from the one without it")
        for peer in self.able():
            if not self.ended(peer):
                yield Violation("ends", peer, last, f"its run is not over {LIMIT_SECONDS:g} s after all began")
            elif (seconds := self.histories[peer][-1]["seconds_average"]) > ENDS_SECONDS:
                yield Violation("ends", peer, last, f"it ends {seconds:.0f} s after its last training")
        if (spread := self.spread()) > SPREAD_BOUND:
            yield Violation("spread", "", last, f"{spread:.3f} at the end, not at most {SPREAD_BOUND}")
        yield from self._conserved()

    def spread(self) -> float:
        dead = {peer for peer in self.peers if not self.network.nodes[peer].process.alive}
        kept, self.replicas = self.replicas, {peer: each for peer, each in self.replicas.items() if peer not in dead}
        try:
            return super().spread()
        finally:
            self.replicas = kept

    def _conserved(self) -> Iterator[Violation]:
        """The weights at the peers are at most their number; with those in transit, at least."""
        held = [outer_loop.averager for outer_loop in self.replicas.values()]
        books = [averager.masses for averager in held if isinstance(averager, PushSum)]
        if books:
            here, whole = sum(masses.weight for masses in books), sum(masses.mass for masses in books)
            if not here - FAR <= len(books) <= whole + FAR:
                what = f"weights of {here} are here, {whole} with what is on its way, and {len(books)} there were"
                yield Violation("conserved", "", self.scenario.rounds - 1, what)
