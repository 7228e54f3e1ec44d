"""Push-sum between peers: each round a peer gives a share of its state away, one way, and is held up by nobody.

A protocol of its own, which a run chooses by its name, and not what gossip falls back to: shares carry weights, and all
peers of a run count them, or none. It is for lines that carry much one way and little the other, and for peers that
should not hold still for others: to give costs one upload, to take one download, and neither waits for the other. What
it costs: news flows one way, so that two shares bring two peers as near as one exchange does, and who is given nothing
learns nothing in that round.

A link that carries nothing at all in one direction carries no stream either. What remains is to give to others, and to
take back what was given: a share is kept, encoded, until its receiver says that it has counted it. Where no answer came
it is recalled in later rounds; if its receiver is in another life, it comes home. If its receiver has not been seen for
two minutes it comes home, too, and may then count twice: that is told, as half exchanges are.

A state stands for x / w, the weights are in `protocols.pairwise.mass_ledger.Book`; what travels is x / w, with the
weight of the share. A peer's own step moves x / w, so that it counts by the peer's weight at that moment, which is 1 on
average. In memory are, besides the state, at most two shares that are kept and four that come in, each an encoded
state.
Sources: Kempe et al. 2003; Assran et al. 2019 (SGP).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager, suppress

from protocols.aio import set_at
from protocols.base import Deadline, Head, Host, Member, PeerId, Settings
from protocols.pairwise import matching
from protocols.pairwise.closing import STEP_POLL_SECONDS, ClosingExchanges
from protocols.pairwise.share_receiver import ShareReceiver
from protocols.pairwise.share_sender import MAX_KEPT, ShareSender
from protocols.pairwise.shared_state import SharedStateSession
from protocols.pairwise.weighted_state import WeightedState
from protocols.vectors import VectorView


class PushSum:
    """`protocols.base.ClosingAverager`.

    Attributes:
        weighted: this peer's state and its weight.
        share_sender: of its shares.
        schedule: whom it gives to (`protocols.pairwise.matching`).
    """

    shares_anchor = False
    closes = True

    def __init__(self, host: Host, settings: Settings) -> None:
        """
        Raises:
            ValueError: there is no such schedule, or no such codec.
        """
        self.host, self.schedule, self.rng = host, matching.known(settings.schedule), host.rng("push-sum")
        self.weighted = WeightedState(host, settings)
        self.me, self.accounting, self.estimator = self.weighted.me, self.weighted.accounting, self.weighted.estimator
        self.share_sender = ShareSender(self.weighted)
        ShareReceiver(self.weighted, settings.bandwidth)
        self._steps = ClosingExchanges(self.weighted.endpoint, self.weighted.patience)

    @property
    def half_exchanges(self) -> int:
        """Shares that came home without their receivers' word, since this peer began."""
        return self.share_sender.half_exchanges

    @asynccontextmanager
    async def enter(self, head: Head, deadline: Deadline) -> AsyncIterator[SharedStateSession]:
        self.weighted.session = session = SharedStateSession(self, head, deadline)
        self.weighted.endpoint.bind(head.key)
        try:
            async with set_at(session.cut, deadline):
                yield session
        finally:
            session.state, self.weighted.session = None, None
            await self.at_rest()

    # -- what a session asks for --------------------------------------------------------------------------------------

    def partners(self) -> tuple[PeerId, ...]:
        return self.share_sender.giving

    def opened(self) -> None:
        self.weighted.notifier.notify()

    async def at_rest(self) -> None:
        async with self.weighted.turn:
            pass

    async def mix(self, session: SharedStateSession, state: VectorView) -> None:
        """Settle earlier shares, then give one to each that the schedule names; what they do not take, to others.

        To give takes what one share may take, at most: who is late or dead is not waited for twice.
        """
        await self.share_sender.reclaim(session)
        loop, patience = asyncio.get_running_loop(), self.weighted.patience
        size_bytes = self.weighted.codec.encoded_bytes(state.size)
        live = {member.peer: member for member in self.host.members.live() if member.peer != self.me.peer}
        seed = f"{session.key.run.hex()}/{session.key.scope}"
        named = matching.select_partners(self.schedule, tuple(live), self.me.peer, session.round, seed)
        others = self.rng.sample(sorted(set(live) - set(named)), len(live) - len(named))
        due = len(named)
        awake = [peer for peer in (*named, *others) if not patience.resting(peer, loop.time())]
        if not awake or not await self.weighted.is_finite(state):
            return
        until = min(session.deadline, loop.time() + patience.timeout_seconds(awake[0], size_bytes))
        for peer in awake:
            if not due or len(self.share_sender.kept) >= MAX_KEPT or loop.time() >= until:
                break
            if session.has_time(patience.expected_seconds(peer, size_bytes), until):
                its_own = loop.time() + patience.timeout_seconds(peer, size_bytes)
                due -= await self.share_sender.give(session, live[peer], min(until, its_own))

    async def close(self, session: SharedStateSession, state: VectorView, here: Collection[PeerId]) -> None:
        """In each step half of what is here goes one distance on, and a share of as far back is waited for."""
        everybody = sorted({*here, self.me.peer})
        place, count = everybody.index(self.me.peer), len(everybody)
        size_bytes = self.weighted.codec.encoded_bytes(state.size)
        steps = [
            (everybody[(place + hop) % count], everybody[(place - hop) % count])
            for hop in matching.closing_hops(count)
        ]  # fmt: skip

        async def step(there: tuple[Member | None, ...], until: Deadline) -> None:
            to, giver = there
            before = session.counted(giver.peer) if giver else 0
            if to and len(self.share_sender.kept) < MAX_KEPT:
                await self.share_sender.give(session, to, until, lambda: self._steps.meets(to, until))
            if giver:
                session.closing_exchanges += await self._is_given(session, giver, before, until)

        if not session.cut.is_set():
            await self.share_sender.reclaim(session)
        if await self.weighted.is_finite(state):
            await self._steps.run(session, size_bytes, steps, step)
        if not session.cut.is_set():
            await self.share_sender.reclaim(session)

    async def _is_given(self, session: SharedStateSession, giver: Member, before: int, until: Deadline) -> bool:
        """Wait for a share of a peer that is at our step, too; whether it is counted."""
        while session.counted(giver.peer) == before and await self._steps.meets(giver, until):
            with suppress(TimeoutError):
                again = min(until, asyncio.get_running_loop().time() + STEP_POLL_SECONDS)
                await session.notifier.until(lambda: session.counted(giver.peer) > before, again)
        return session.counted(giver.peer) > before
