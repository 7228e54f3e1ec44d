"""A simulated swarm of peers that share no anchor, with the same scenarios, faults and seeds as `tests.sim.world`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any

import torch

from node.outer.independent_loop import IndependentOuterLoop
from node.outer.noloco import NoLoCo
from node.outer.round_history import LocalHistory
from node.outer.sketch import Sketch
from node.outer.state import OuterSGD, OuterState
from node.tasks.base import Step
from node.tasks.paced import Paced
from protocols.base import (
    AveragingResult,
    Deadline,
    Host,
    IndependentAverager,
    IndependentSession,
    LocalProgress,
    Member,
    PeerId,
    RoundKey,
    Settings,
    Trainer,
    Vector,
)
from protocols.moshpit.averager import Moshpit
from protocols.registry import INDEPENDENT_PROTOCOLS, load_averager
from protocols.sync.independent_sync import IndependentStateSync
from protocols.sync.snapshot import Snapshots
from tests.sim.account import Head
from tests.sim.byzantine.independent import ByzantinePeer
from tests.sim.network import SimNetwork
from tests.sim.scenario import OUTER_MOMENTUM, OUTER_RATE, Scenario
from tests.sim.transport import SimTransport
from tests.sim.world import HEALED_SECONDS, RUN, World
from tests.support import checkers
from tests.support import independent_checkers as checkers_loose

STEP_SIZE = 1 / 32
SPREAD_BOUND = 0.25
"""Peers that mix stay well below it; peers that do not exceed it after about twenty rounds."""
SPREAD_LIMIT = 0.05
HEALED_ROUNDS = 10
"""The rounds that all peers must commit after the healing: enough to see whether the spread falls."""
LIARS_ROUNDS = 12
"""The chance that a draw picks the one liar of four in each of these rounds is two in a million."""
SELDOM = 0.2
"""The least share of its possible rounds in which a peer must mix; a slow peer often finds the others busy."""
ENDLESS = 10
"""A peer that reports this many times the run's rounds is stopped: it makes no progress."""


class Wander(Paced):
    """Walks at random without a fixed point, so that only mixing keeps peers near each other."""

    def __init__(self, elements: int, seed: int, tokens_per_step: int) -> None:
        super().__init__(elements, seed, tokens_per_step)
        self._generator = torch.Generator()
        self.vector.mul_(0.5).add_(1.0)

    def step(self, round_number: int, step: int) -> Step:
        vector = self.vector
        # A generator takes a seed of 64 bits.
        self._generator.manual_seed(((self._seed * 1_000_003 + round_number) * 1_000_003 + step) % (1 << 64))
        noise = torch.rand(len(vector), generator=self._generator)
        vector.add_(noise.sub_(0.5).mul_(2 * STEP_SIZE))
        return Step(float(vector.square().mean()), self._tokens)


class IndependentAccount:
    """Accounts of each peer's rounds: in how many it could have met another peer, and in how many it did."""

    def __init__(self, network: SimNetwork, liars: tuple[PeerId, ...]) -> None:
        self._network, self._liars = network, liars
        self._began: dict[PeerId, float] = {}
        self._committed: dict[PeerId, list[float]] = {}
        self.could: Counter[PeerId] = Counter()
        self.did: Counter[PeerId] = Counter()

    def entered(self, peer: PeerId, head: Head, now: float) -> None:
        self._began[peer] = now

    def reported(self, report: dict[str, Any], now: float) -> None:
        peer, committed = report["peer"], report["outcome"] == "committed"
        if report["outcome"] == "superseded" or peer in self._liars:
            return
        here = [node.member for peer, node in self._network.nodes.items() if peer not in self._liars]
        could = self._network.contacts.outages.connected(here, 2, self._began[peer], now, peer)
        self.could[peer] += could
        self.did[peer] += could and committed
        if committed:
            self._committed.setdefault(peer, []).append(now)

    def shares(self) -> tuple[int, int]:
        """(rounds of peers in which another peer was in touch all the time, rounds of these that they committed)."""
        return self.could.total(), self.did.total()

    def whole(self, peers: tuple[PeerId, ...], since: float) -> int:
        """The smallest number of rounds that one of these peers has committed since then."""
        return min(sum(each >= since for each in self._committed.get(peer, ())) for peer in peers)


class IndependentWorld(World):
    CLOSES = True
    replicas: dict[PeerId, IndependentOuterLoop]  # type: ignore[assignment]
    account: IndependentAccount  # type: ignore[assignment]

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        self.account = IndependentAccount(self.network, self.liars)
        self.endless = scenario.breaks
        self.sketches: dict[PeerId, Sketch] = {}
        self.byzantine_peers: dict[PeerId, ByzantinePeer] = {}

    def learner(self, index: int) -> Paced:
        assert self.scenario.elements
        return Wander(self.scenario.elements, self.scenario.seed * 1000 + index, 256)

    def met_since(self, peer: PeerId, number: int) -> bool:
        reports, nodes = self.histories[peer], self.network.nodes
        alone = not any(
            nodes[other].process.alive and self.network.contacts.open(peer, other)
            for other in self.peers
            if other != peer
        )
        return alone or any(each["outcome"] == "committed" and each["round"] >= number for each in reports)

    def outer(self) -> OuterSGD:
        """It does not decay, so that in each round the peers' own steps take them as far from each other."""
        return OuterSGD(OUTER_RATE, OUTER_MOMENTUM)

    def _own_outer(self) -> OuterSGD | NoLoCo:
        outer, pull = self.outer(), self.scenario.pull
        return NoLoCo(outer.momentum, outer.learning_rate, pull) if pull else outer

    def averager(self, host: Host, settings: Settings) -> IndependentAverager:
        averager = self._averager(host, settings)
        averager.enter = partial(_enter_blank, averager.enter)  # type: ignore[method-assign]
        return averager

    def _averager(self, host: Host, settings: Settings) -> IndependentAverager:
        if self.scenario.directory:
            return Moshpit(host, settings, most=2, announce_limit=0)
        return load_averager(self.scenario.protocol)(host, settings)

    def stack(self, index: int, host: Host, settings: Settings, trainer: Trainer, anchor: Vector) -> tuple[Any, Any]:
        me, averager, snapshots = host.me, self.averager(host, settings), Snapshots()
        newcomer = averager.me.incarnation > 0
        course = LocalHistory(averager.me, RoundKey(RUN, "run", bytes(32), 0), lacks_state=newcomer)
        outer_loop = IndependentOuterLoop(
            course,
            averager,
            state=OuterState(anchor, self._own_outer(), host.compute),
            trainer=trainer,
            wall=host.clock.wall,
            snapshots=snapshots,
            compare=lambda mine: self._compare(me, mine, host.members.live()),
            spread_limit=SPREAD_LIMIT,
            run_rounds=self.scenario.rounds if self.CLOSES and not self.endless else None,
            rounds_of_others=lambda: self.rounds(me),
        )
        whole = lambda: not outer_loop.seeks_state  # noqa: E731
        sync = IndependentStateSync(
            host,
            settings,
            snapshots=snapshots,
            key=lambda: outer_loop.key,
            hints=lambda: self.peers,
            has_state=whole,
        )
        return outer_loop, sync

    def _host(self, transport: SimTransport) -> Host:
        host, (me, scenario) = super()._host(transport), (transport.me, self.scenario)
        if me in self.liars:
            assert scenario.codec and scenario.lie
            liar = ByzantinePeer(scenario.protocol, scenario.lie, scenario.codec, scenario.chunk_elements)
            self.byzantine_peers[me], transport.disguise = liar, liar.disguise
        return host

    def goes_on(self, peer: PeerId) -> bool:
        """Whether a peer begins another round; one whose rounds go back is stopped after `ENDLESS` times as many."""
        rounds, had = self.scenario.rounds, len(self.histories[peer])
        return self.endless or (self.replicas[peer].key.round < rounds and had < ENDLESS * rounds)

    def _compare(self, me: PeerId, mine: Sketch, live: tuple[Member, ...]) -> Mapping[PeerId, Sketch]:
        """The latest sketches of the live peers, exchanged without messages."""
        self.sketches[me] = mine
        near = [member.peer for member in live if member.peer != me]
        return {peer: self.sketches[peer] for peer in near if peer in self.sketches}

    def rounds(self, me: PeerId) -> dict[PeerId, int]:
        """The rounds of connected peers that are not away, as heartbeats would carry them."""
        nodes, contacts = self.network.nodes, self.network.contacts
        here = {member.peer for member in contacts.views[me].live()}
        near = [peer for peer in self.replicas if peer != me and nodes[peer].process.alive and contacts.open(me, peer)]
        return {peer: self.replicas[peer].key.round for peer in near if peer in here}

    # -- judging ------------------------------------------------------------------------------------------------------

    def spread(self) -> float:
        """max ‖θ_i − mean‖ / ‖mean‖ over the honest peers, exactly."""
        states = [outer_loop.anchor for peer, outer_loop in self.replicas.items() if peer not in self.liars]
        mean = torch.stack(states).mean(dim=0)
        return max(float((state - mean).norm() / mean.norm()) for state in states)

    def satisfied(self) -> bool:
        return self.healed_at is not None and self._rounds_since() >= HEALED_ROUNDS and self.spread() <= SPREAD_BOUND

    def _rounds_since(self) -> int:
        """Rounds that all peers have committed since the healing; the rounds of a single peer."""
        if len(self.peers) == 1:
            return len(self.histories[self.peers[0]])
        return self.account.whole(self.peers, self.healed_at or 0.0)

    def check(self, histories: dict[PeerId, list[checkers.Report]]) -> list[checkers.Violation]:
        return checkers_loose.check(histories, self.scenario.protocol)

    def _healed(self, honest: dict[PeerId, list[checkers.Report]]) -> list[checkers.Violation]:
        found, rounds = [], self._rounds_since()
        if rounds < HEALED_ROUNDS:
            what = f"{rounds} rounds of all peers in {HEALED_SECONDS:g} s after all was healed, not {HEALED_ROUNDS}"
            found.append(checkers.Violation("progress", "", 0, what))
        return found + self._together()

    def _undisturbed(self, honest: dict[PeerId, list[checkers.Report]]) -> list[checkers.Violation]:
        found = []
        for peer, history in honest.items():
            if not history or history[-1]["round"] < self.scenario.rounds - 1:
                found.append(checkers.Violation("progress", peer, len(history), "it does not come to the end"))
            could, did = self.account.could[peer], self.account.did[peer]
            seldom = self.scenario.fault != "slow" and did < SELDOM * could
            if could > self._bad_luck() and (seldom or not did):
                what = f"it could mix in {could} rounds, and did so in {did}"
                found.append(checkers.Violation("progress", peer, len(history), what))
            if self.scenario.fault == "none" and len(history) < self.scenario.rounds / 2:  # no peer is that slow here
                found.append(checkers.Violation("progress", peer, len(history), "it leaves most rounds out"))
            if len(self.peers) > 2 and any(report["round"] >= self.scenario.rounds for report in history):
                found.append(checkers.Violation("clock", peer, len(history), "a round that no peer has reached"))
        return found + self._unnamed(honest) + self._together()

    def _bad_luck(self) -> int:
        """Rounds in which a peer may fail to mix: in push-sum, more if it is drawn for a liar."""
        return LIARS_ROUNDS if self.scenario.protocol == "push_sum" and self.liars else 2

    def _unnamed(self, honest: dict[PeerId, list[checkers.Report]]) -> list[checkers.Violation]:
        blamed = {peer for history in honest.values() for report in history for peer in report["blamed"]}
        found = []
        for peer, liar in self.byzantine_peers.items():
            if liar.refused and liar.lies and peer not in blamed:
                found.append(checkers.Violation("named", peer, 0, f"no peer named the lie {liar.lie!r}"))
        return found

    def _together(self) -> list[checkers.Violation]:
        if any(liar.parts for liar in self.byzantine_peers.values()) or (spread := self.spread()) <= SPREAD_BOUND:
            return []
        return [checkers.Violation("spread", "", 0, f"{spread:.3f} at the end, not at most {SPREAD_BOUND}")]


@asynccontextmanager
async def _enter_blank(
    enter: Callable[[Any, Deadline], AbstractAsyncContextManager[IndependentSession]], head: Any, deadline: Deadline
) -> AsyncIterator[IndependentSession]:
    async with enter(head, deadline) as session:
        average = session.average

        async def into_blank(mine: Sequence[Vector], work: LocalProgress, into: Sequence[Vector]) -> AveragingResult:
            for each in into:
                each.fill_(math.nan)
            return await average(mine, work, into)

        session.average = into_blank  # type: ignore[method-assign]
        yield session


def world_of(protocol: str, stages: int = 1) -> type[World]:
    """The world of a protocol: whether its peers share an anchor, and each holds all of it, decides what must hold."""
    if stages > 1:
        from tests.sim.pipeline_world import PipelineWorld  # nothing else loads pipelines

        return PipelineWorld
    return IndependentWorld if protocol in INDEPENDENT_PROTOCOLS else World
