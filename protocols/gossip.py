"""Gossip: pairs of peers put their whole states at their mean; no group, no barrier, no vote.

In each round a peer asks one other (or a few: `protocols.matching`) for an exchange of states, parameters and momentum
alike (`protocols.swap`). Who is asked answers at once, while it trains, too: yes, or that it is busy, being in another
exchange or between two rounds. This is randomised pairwise averaging (Boyd et al. 2006) of states
after an outer step, without waiting for the partner to finish its work, as in AD-PSGD (Lian et al. 2018).

Who finds its partner busy or gone asks others. All of this together costs a peer at most what one exchange may take
(`protocols.patience`), however many are slow or dead, and nobody else anything: who is asked meanwhile says that it is
busy.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial

from protocols import matching
from protocols.answering import Answerer
from protocols.asking import Asker, Verdict
from protocols.base import Contribution, Deadline, Head, Host, Mean, Member, Outcome, PeerId, Settings, Vector, Work
from protocols.pairing import Pairing
from protocols.post import Ledger
from protocols.vectors import Flat

OTHERS = 2
"""Who finds its partners busy asks so many more before it pauses."""
TRIES = 3
"""A partner that the schedule names is asked so often while it is busy."""
PAUSE_SECONDS = 0.25
"""A question to somebody who is busy takes two round trips: so much longer, or twice that, it waits for the next."""


class Gossip:
    """`protocols.base.LooseAverager`.

    Attributes:
        pairing: this peer's exchanges, one at a time.
        schedule: whom it asks (`protocols.matching`).
    """

    shares_anchor = False

    def __init__(self, host: Host, settings: Settings, schedule: str = "random") -> None:
        """
        Raises:
            ValueError: there is no such schedule, or no such codec.
        """
        if schedule not in matching.SCHEDULES:
            raise ValueError(f"unknown schedule {schedule[:40]!r}: there are {', '.join(matching.SCHEDULES)}")
        self.host, self.schedule = host, schedule
        self.me = Member(host.me, settings.incarnation)
        self.ledger, self.rng = Ledger(), host.rng("gossip")
        self.pairing = Pairing(host, settings, self.me, self.ledger)
        self.asker = Asker(self.pairing)
        self._answerer = Answerer(self.pairing, self.asker)

    @property
    def half_exchanges(self) -> int:
        """That one end may have moved alone in, since this peer began."""
        return self.pairing.half_exchanges

    @asynccontextmanager
    async def enter(self, head: Head, deadline: Deadline) -> AsyncIterator[GossipSession]:
        session = GossipSession(self, head, deadline)
        self.pairing.open(session)
        timer = asyncio.get_running_loop().call_at(deadline, session.cut.set)
        try:
            yield session
        finally:
            timer.cancel()
            await self.pairing.close()


class GossipSession:
    """`protocols.base.LooseSession`.

    Attributes:
        key: of this peer's round.
        deadline: of the round.
        state: what others may average with; None: nothing, at the moment.
        held: of whom the state holds something, since it was lent or given to `mean`.
        weights: how much of the state each peer's makes up, by halves, of all exchanges of this round.
    """

    group = ""

    def __init__(self, averager: Gossip, head: Head, deadline: Deadline) -> None:
        self.cut = asyncio.Event()
        self.key, self.deadline, self.round = head.key, deadline, head.key.round
        self.half_exchanges, self.mass_drift = 0, 0.0
        self.state: Flat | None = None
        self.held: dict[PeerId, Contribution] = {}
        self.weights = {averager.me.peer: 1.0}
        self._averager = averager

    # -- the contract -------------------------------------------------------------------------------------------------

    def ready(self, work: Work) -> None:
        if work.complete or work.leaving:
            self.cut.set()

    def awaited(self) -> tuple[PeerId, ...]:
        exchange = self._averager.pairing.exchange
        return (exchange.partner.peer,) if exchange else ()

    def lend(self, state: Sequence[Vector]) -> None:
        self.state, self.held = Flat(state), {}

    async def take_back(self) -> Mapping[PeerId, Contribution]:
        self.state = None
        if exchange := self._averager.pairing.exchange:
            await exchange.done.wait()
        return self.held

    async def mean(self, mine: Sequence[Vector], work: Work, into: Sequence[Vector]) -> Mean:
        """As the contract has it. Others may ask meanwhile: they average with `into`, where `mine` is copied first.

        Raises:
            ValueError: the sizes of `mine` and `into` differ.
        """
        if [len(each) for each in mine] != [len(each) for each in into]:
            raise ValueError(f"{[len(each) for each in mine]} elements into {[len(each) for each in into]}")
        early = await self.take_back()
        target = Flat(into)
        await self._averager.host.compute.run(partial(_copy, mine, into), 8 * target.size)
        self.state, self.held = target, {}
        try:
            await self._ask_around(target)
        finally:
            held = await self.take_back()
        names, sent, received = self._averager.ledger.take()
        outcome = Outcome.COMMITTED if held or early else Outcome.SKIPPED
        weights = self.weights if outcome is Outcome.COMMITTED else {}
        return Mean(
            outcome, contributions=held, weights=weights, blamed=names, bytes_sent=sent, bytes_received=received
        )

    # -- whom to ask --------------------------------------------------------------------------------------------------

    async def _ask_around(self, state: Flat) -> None:
        """Ask each partner that the schedule names; where that comes to nothing, others, as long as there is time.

        All of it takes what one exchange may take, at most: who is late or dead is not waited for twice.
        """
        averager, loop = self._averager, asyncio.get_running_loop()
        pairing, size_bytes = averager.pairing, averager.pairing.codec.encoded_bytes(state.size)
        due, others = self._candidates()
        if not due:
            return
        until = min(self.deadline, loop.time() + pairing.patience.timeout_seconds(due[0].peer, size_bytes))
        tries = 0
        while (due and tries < TRIES) or (others and not self.held):
            tries += 1
            for partner in [*due, *averager.rng.sample(others, min(OTHERS, len(others)))]:
                await self._free()
                if self.held and (partner not in due or partner.peer in self.held):
                    verdict = Verdict.HELD  # somebody has asked us
                elif loop.time() + pairing.patience.expected_seconds(partner.peer, size_bytes) >= until:
                    return
                else:
                    verdict = await averager.asker.ask(self, partner, until)
                if verdict in (Verdict.HELD, Verdict.FAILED):
                    due, others = ([each for each in group if each != partner] for group in (due, others))
            if self.held and (tries == TRIES or not due):
                return
            pause_seconds = averager.rng.uniform(PAUSE_SECONDS, 2 * PAUSE_SECONDS)
            with suppress(TimeoutError):
                await pairing.bell.until(lambda: bool(self.held), min(until, loop.time() + pause_seconds))

    def _candidates(self) -> tuple[list[Member], list[Member]]:
        """Those whom the schedule names, and the others; without those who cost us a timeout of late."""
        averager, now = self._averager, asyncio.get_running_loop().time()
        live = {member.peer: member for member in averager.host.members.live() if member != averager.me}
        seed = f"{self.key.run.hex()}/{self.key.scope}"
        named = matching.partners(averager.schedule, tuple(live), averager.me.peer, self.round, seed)
        up = [member for member in live.values() if not averager.pairing.patience.resting(member.peer, now)]
        due = [member for member in up if member.peer in named]
        others = [member for member in up if member.peer not in named]
        return due or averager.rng.sample(others, min(1, len(others))), others

    async def _free(self) -> None:
        """Wait for the exchange under way, which somebody else began."""
        while exchange := self._averager.pairing.exchange:
            await exchange.done.wait()

    # -- what came of it ----------------------------------------------------------------------------------------------

    def count(self, peer: PeerId, chunks: int, name: str) -> None:
        """Our state is half our own and half this peer's now."""
        before = self.held.get(peer)
        self.held[peer] = Contribution(chunks, chunks, (*(before.messages if before else ()), name))
        self.weights = {each: weight / 2 for each, weight in self.weights.items()}
        self.weights[peer] = self.weights.get(peer, 0.0) + 0.5

    def count_half(self, drift: float) -> None:
        self.half_exchanges += 1
        self.mass_drift += drift


def _copy(source: Sequence[Vector], into: Sequence[Vector]) -> None:
    for each, target in zip(source, into, strict=True):
        target.copy_(each)
