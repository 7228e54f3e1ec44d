"""Push-sum between peers: each round a peer gives a share of its state away, one way, and waits for no other peer.

It suits links that are much faster in one direction, and peers that should not pause for others. The cost is slower
mixing: two shares bring two peers as close as one exchange does. A peer keeps each share, encoded, until the receiver
says that it has counted it. If the receiver has not been seen for two minutes, the share returns, and may then count
twice; this is reported, as half exchanges are.

A state stands for x / w (`protocols.pairwise.mass_ledger`). A peer's own step moves x / w, so it counts by the peer's
weight at that moment, which is 1 on average. Sources: Kempe et al. 2003; Assran et al. 2019 (SGP).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from functools import partial

from protocols.aio import loop_time, raise_when_gone, run_with_helper, task_group
from protocols.allreduce.parts import ReducedPart, send_encoded
from protocols.base import BadPayload, Deadline, Host, Member, PeerError, PeerId, Settings, Stream
from protocols.pairwise import matching
from protocols.pairwise.closing import STEP_POLL_SECONDS, ClosingExchanges
from protocols.pairwise.mass_ledger import Share
from protocols.pairwise.shared_state import SharedStateSession
from protocols.pairwise.shares import (
    PUSH,
    PushShare,
    RecallShare,
    ShareReceiver,
    ShareStatus,
    WeightedAverager,
    split_share,
)
from protocols.pairwise.state_swap import hear
from protocols.peers.timeouts import CHEAP_SECONDS
from protocols.vectors.views import VectorView

RETURN_SECONDS = 120.0
"""After this many seconds without an answer, a share returns to the sender, whether its receiver is live or not."""
MAX_KEPT = 2  # Limit of shares with an unknown outcome. At this limit a peer gives no more until outcomes are known.


class PushSum(WeightedAverager):
    def __init__(self, host: Host, settings: Settings) -> None:
        super().__init__(host, settings, "push-sum")
        self.share_sender = ShareSender(self)
        ShareReceiver(self, settings.upload_bandwidth())
        self._steps = ClosingExchanges(self.endpoint, self.timeouts)

    async def mix(self, session: SharedStateSession, state: VectorView) -> None:
        """Settle earlier shares, then give one to each peer that the schedule names; give declined shares to others."""
        await self.share_sender.reclaim(session)
        timeouts = self.timeouts
        size_bytes = self.codec.encoded_bytes(state.size)
        live = self.others()
        named = self.named(session, live)
        others = self.rng.sample(sorted(set(live) - set(named)), len(live) - len(named))
        due = len(named)
        awake = [peer for peer in (*named, *others) if not timeouts.resting(peer, loop_time())]
        if not awake or not await self.is_finite(state):
            return
        until = min(session.deadline, loop_time() + timeouts.timeout_seconds(awake[0], size_bytes))
        for peer in awake:
            if not due or len(self.share_sender.kept) >= MAX_KEPT or loop_time() >= until:
                break
            if session.has_time(timeouts.expected_seconds(peer, size_bytes), until):
                its_own = loop_time() + timeouts.timeout_seconds(peer, size_bytes)
                due -= await self.share_sender.give(session, live[peer], min(until, its_own))

    async def close(self, session: SharedStateSession, state: VectorView, here: Collection[PeerId]) -> None:
        """In each step, give half of the mass to the peer a distance ahead, and wait for a share from as far behind."""
        everybody = sorted({*here, self.me.peer})
        place, count = everybody.index(self.me.peer), len(everybody)
        size_bytes = self.codec.encoded_bytes(state.size)
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
        if await self.is_finite(state):
            await self._steps.run(session, size_bytes, steps, step)
        if not session.cut.is_set():
            await self.share_sender.reclaim(session)

    async def _is_given(self, session: SharedStateSession, giver: Member, before: int, until: Deadline) -> bool:
        while session.counted(giver.peer) == before and await self._steps.meets(giver, until):
            again = min(until, loop_time() + STEP_POLL_SECONDS)
            await session.notifier.reached(lambda: session.counted(giver.peer) > before, again)
        return session.counted(giver.peer) > before


class ShareSender:
    def __init__(self, weighted: WeightedAverager) -> None:
        self.kept: dict[tuple[Member, int], tuple[Share, ReducedPart]] = {}
        self._weighted = weighted
        self._unanswered_since: dict[tuple[Member, int], float] = {}

    async def give(
        self,
        session: SharedStateSession,
        to: Member,
        until: Deadline,
        ready: Callable[[], Awaitable[bool]] | None = None,
    ) -> bool:
        """Give half of the mass, as it is before `ready` is asked; False if the share has returned."""
        weighted = self._weighted
        async with weighted.turn:
            state = session.state
            share = weighted.masses.give(to) if state else None
            if share is None or state is None:
                return False
            part = weighted.part(state.size)
            self.kept[to, share.sequence] = share, part
            await weighted.host.compute.run(partial(split_share, state, part), 16 * state.size)
        weighted.partners = (to.peer,)
        try:
            counted = await self._send(session, share, part, until) if ready is None or await ready() else False
        finally:
            weighted.partners = ()
        if counted is not None:
            await self._answered(session, share, counted)
        return counted is not False

    async def _send(self, session: SharedStateSession, share: Share, part: ReducedPart, until: Deadline) -> bool | None:
        weighted, peer = self._weighted, share.to.peer
        timeouts, began = weighted.timeouts, loop_time()
        elements, name = part.high - part.low, part.codec.name
        give = PushShare(session.key, weighted.me, share.sequence, share.to, share.weight, elements, name)
        answer_by, reached = min(until, began + timeouts.answer_seconds(peer)), False
        try:
            async with asyncio.timeout_at(answer_by) as limit, weighted.endpoint.open(peer, PUSH, until) as stream:
                limit.reschedule(None)  # from here on the transfer is watched
                timeouts.answered(peer, 2 * (loop_time() - began))
                reached = True
                watching = raise_when_gone(weighted.host.members, share.to, until)
                counted = await run_with_helper(_deliver(stream, give, part), watching)
        except (PeerError, BadPayload, TimeoutError):
            now = loop_time()
            why = "it did not say whether it has counted the share" if reached else "it was not reached"
            weighted.accounting.name(peer, f"no share: {why}")
            if reached:  # the share may have arrived: avoid this peer for a while
                timeouts.late(peer, now, max(CHEAP_SECONDS, now - began), slow=now >= until)
                return None
            timeouts.failed(peer, began, now, answer_by, slow=False)
            return False
        if counted:
            timeouts.took(peer, part.size_bytes, loop_time(), loop_time() - began)
        return counted

    async def _answered(self, session: SharedStateSession, share: Share, counted: bool) -> None:
        masses = self._weighted.masses
        async with self._weighted.turn:
            _, part = self.kept.pop((share.to, share.sequence))
            before = masses.weight
            masses.answered(share.to, share.sequence, counted)
            if not counted and session.state:
                await self._weighted.blend(session.state, part, share.weight / (before + share.weight))

    # -- shares without an answer -------------------------------------------------------------------------------------

    async def reclaim(self, session: SharedStateSession) -> None:
        """Settle shares without an answer: ask their receivers, or decide without those that are gone."""
        now, masses, me = loop_time(), self._weighted.masses, self._weighted.me
        live = {member.peer: member for member in self._weighted.host.members.live()}
        self._unanswered_since = {key: self._unanswered_since.get(key, now) for key in self.kept}
        for share, _ in list(self.kept.values()):
            to, counted = share.to, None
            if live.get(to.peer) == to:
                counted = await self._recall(session, share)
            elif to.peer in live:
                counted = False  # given to an earlier incarnation, which has ended
            if counted is None and now - self._unanswered_since[to, share.sequence] >= RETURN_SECONDS:
                counted = False
                self._weighted.count_half(share.weight / (masses.weight + share.weight))
            if counted is not None:
                await self._answered(session, share, counted)
            if counted is False:  # our own state of an earlier round is merged into our state again
                name = f"{me.peer}.{me.incarnation}/{share.sequence} from {to.peer}.{to.incarnation}"
                session.count(me.peer, 1, name, share.weight / masses.weight)

    async def _recall(self, session: SharedStateSession, share: Share) -> bool | None:
        weighted, peer, began = self._weighted, share.to.peer, loop_time()
        if began >= session.deadline or weighted.timeouts.resting(peer, began):
            return None
        answer_by = began + weighted.timeouts.answer_seconds(peer)
        deadline = min(session.deadline, answer_by)
        recall = RecallShare(session.key, weighted.me, share.sequence, share.to)
        try:
            async with weighted.endpoint.open(peer, PUSH, deadline) as stream:
                await stream.send(recall)
                return (await hear(stream, ShareStatus, recall)).counted
        except (PeerError, BadPayload):
            now = loop_time()
            weighted.timeouts.late(peer, now, max(CHEAP_SECONDS, now - began), slow=False)
            return None


async def _deliver(stream: Stream, give: PushShare, part: ReducedPart) -> bool:
    """Send a share and return whether it is counted. A receiver that cannot use it says so before it has all of it."""

    async def send() -> None:
        with suppress(PeerError):  # an answer may have arrived before the end: `hear` reads it
            await stream.send(give)
            await send_encoded(stream, part)

    async with task_group() as group:
        sending = group.create_task(send())
        counted = (await hear(stream, ShareStatus, give)).counted
        sending.cancel()
    return counted
