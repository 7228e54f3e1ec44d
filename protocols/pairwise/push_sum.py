"""Push-sum between peers: each round a peer gives a share of its state away, one way, and waits for no other peer.

It suits links that are much faster in one direction, and peers that should not pause for others. The cost is slower
mixing: two shares bring two peers as close as one exchange does. A peer keeps each share, encoded, until the receiver
says that it has counted it. If the receiver has not been seen for two minutes, the share returns, and may then count
twice; this is reported, as half exchanges are.

A state stands for x / w (`protocols.pairwise.mass_ledger`). A peer's own step moves x / w, so it counts by the peer's
weight at that moment, which is 1 on average. Sources: Kempe et al. 2003; Assran et al. 2019 (SGP).
"""

# ruff: noqa: RUF009 - a field's bound is its default

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import torch

from protocols.aio import loop_time, raise_when_gone, run_with_helper, task_group
from protocols.allreduce.parts import ReducedPart, send_encoded
from protocols.base import BadPayload, Deadline, Host, Member, PeerError, PeerId, PeerSilent, Settings, Stream
from protocols.pairwise import matching
from protocols.pairwise.closing import STEP_POLL_SECONDS, ClosingExchanges
from protocols.pairwise.mass_ledger import MassLedger, Share
from protocols.pairwise.shared_state import PairwiseAverager, SharedStateSession
from protocols.pairwise.state_swap import ExchangeMessage, StateReceiver, hear, state_norm
from protocols.peers.timeouts import CHEAP_SECONDS, PeerTimeouts
from protocols.vectors.views import VectorView
from protocols.wire import flag, one, real, register, text, uint

PUSH = "starling/push-sum/share/1"
MAX_TAKING = 4  # peers whose shares are received at once, one share each; others are declined
MOST_SHARE = 64.0
"""Limit of a share's weight, as a multiple of a peer's initial weight. A peer that would exceed twice this accepts
no share, so that it never gives more than others accept."""
RETURN_SECONDS = 120.0
"""After this many seconds without an answer, a share returns to the sender, whether its receiver is live or not."""
MAX_KEPT = 2  # Limit of shares with an unknown outcome. At this limit a peer gives no more until outcomes are known.


@dataclass(frozen=True, slots=True)
class PushShare(ExchangeMessage):
    """A share for one incarnation of the receiver; its chunks follow. `sequence` counts the shares given to it."""

    to: Member = one(Member)
    weight: float = real(1e-280, 1e9)
    elements: int = uint(1 << 48)
    codec: str = text(16)


@dataclass(frozen=True, slots=True)
class RecallShare(ExchangeMessage):
    """Asks whether that share has been counted. If not, the receiver must not count it any more."""

    to: Member = one(Member)


@dataclass(frozen=True, slots=True)
class ShareStatus(ExchangeMessage):
    """Whether the share is counted; if not, it never will be."""

    counted: bool = flag()


register(72, (PushShare, RecallShare, ShareStatus))


def split_share(state: VectorView, part: ReducedPart) -> None:
    """Encode `state` into `part`, then correct `state` so that the mean of what leaves and what stays is as before."""
    for index, low, high, (scratch, sent) in part.pieces(2):
        mine = state.read(low, high, scratch)
        part.codec.encode(mine, part.chunk(index))
        part.codec.decode(part.chunk(index), sent)
        state.write(low, torch.sub(mine, sent, out=sent).add_(mine))


class PushSum(PairwiseAverager):
    """A peer's state, and in `masses` its weights. No task waits for another peer while it holds `turn`."""

    def __init__(self, host: Host, settings: Settings) -> None:
        super().__init__(host, settings, "push-sum")
        self.masses, self.turn = MassLedger(self.me), asyncio.Lock()
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

    # -- the state -----------------------------------------------------------------------------------------------------

    async def close_round(self) -> None:
        await super().close_round()
        await self.at_rest()

    async def at_rest(self) -> None:
        async with self.turn:
            pass

    async def is_finite(self, state: VectorView) -> bool:
        part = self.part(state.size)
        async with self.turn:
            return math.isfinite(await self.host.compute.run(partial(state_norm, state, part), 4 * state.size))

    async def blend(self, state: VectorView, part: ReducedPart, share: float) -> None:
        """Average an encoded state into `state`, with this weight, between 0 and 1. The caller holds `turn`."""

        def merge() -> None:
            for index, low, high, (scratch, theirs) in part.pieces(2):
                part.codec.decode(part.chunk(index), theirs)
                mine = state.read(low, high, scratch)
                state.write(low, theirs.mul_(share).add_(torch.mul(mine, 1 - share)))

        await self.host.compute.run(merge, 16 * state.size)


class ShareSender:
    def __init__(self, averager: PushSum) -> None:
        self.kept: dict[tuple[Member, int], tuple[Share, ReducedPart]] = {}
        self._averager = averager
        self._unanswered_since: dict[tuple[Member, int], float] = {}

    async def give(
        self,
        session: SharedStateSession,
        to: Member,
        until: Deadline,
        ready: Callable[[], Awaitable[bool]] | None = None,
    ) -> bool:
        """Give half of the mass, as it is before `ready` is asked; False if the share has returned."""
        averager = self._averager
        async with averager.turn:
            state = session.state
            share = averager.masses.give(to) if state else None
            if share is None or state is None:
                return False
            part = averager.part(state.size)
            self.kept[to, share.sequence] = share, part
            await averager.host.compute.run(partial(split_share, state, part), 16 * state.size)
        averager.partners = (to.peer,)
        try:
            counted = await self._send(session, share, part, until) if ready is None or await ready() else False
        finally:
            averager.partners = ()
        if counted is not None:
            await self._answered(session, share, counted)
        return counted is not False

    async def _send(self, session: SharedStateSession, share: Share, part: ReducedPart, until: Deadline) -> bool | None:
        averager, peer = self._averager, share.to.peer
        timeouts, began = averager.timeouts, loop_time()
        elements, name = part.high - part.low, part.codec.name
        give = PushShare(session.key, averager.me, share.sequence, share.to, share.weight, elements, name)
        answer_by, reached = min(until, began + timeouts.answer_seconds(peer)), False
        try:
            async with asyncio.timeout_at(answer_by) as limit, averager.endpoint.open(peer, PUSH, until) as stream:
                limit.reschedule(None)  # from here on the transfer is watched
                timeouts.answered(peer, 2 * (loop_time() - began))
                reached = True
                watching = raise_when_gone(averager.host.members, share.to, until)
                counted = await run_with_helper(_deliver(stream, give, part), watching)
        except (PeerError, BadPayload, TimeoutError):
            now = loop_time()
            why = "it did not say whether it has counted the share" if reached else "it was not reached"
            averager.accounting.name(peer, f"no share: {why}")
            if reached:  # the share may have arrived: avoid this peer for a while
                timeouts.late(peer, now, max(CHEAP_SECONDS, now - began), slow=now >= until)
                return None
            timeouts.failed(peer, began, now, answer_by, slow=False)
            return False
        if counted:
            timeouts.took(peer, part.size_bytes, loop_time(), loop_time() - began)
        return counted

    async def _answered(self, session: SharedStateSession, share: Share, counted: bool) -> None:
        masses = self._averager.masses
        async with self._averager.turn:
            _, part = self.kept.pop((share.to, share.sequence))
            before = masses.weight
            masses.answered(share.to, share.sequence, counted)
            if not counted and session.state:
                await self._averager.blend(session.state, part, share.weight / (before + share.weight))

    # -- shares without an answer -------------------------------------------------------------------------------------

    async def reclaim(self, session: SharedStateSession) -> None:
        """Settle shares without an answer: ask their receivers, or decide without those that are gone."""
        now, masses, me = loop_time(), self._averager.masses, self._averager.me
        live = {member.peer: member for member in self._averager.host.members.live()}
        self._unanswered_since = {key: self._unanswered_since.get(key, now) for key in self.kept}
        for share, _ in list(self.kept.values()):
            to, counted = share.to, None
            if live.get(to.peer) == to:
                counted = await self._recall(session, share)
            elif to.peer in live:
                counted = False  # given to an earlier incarnation, which has ended
            if counted is None and now - self._unanswered_since[to, share.sequence] >= RETURN_SECONDS:
                counted = False
                self._averager.count_half(share.weight / (masses.weight + share.weight))
            if counted is not None:
                await self._answered(session, share, counted)
            if counted is False:  # our own state of an earlier round is merged into our state again
                name = f"{me.peer}.{me.incarnation}/{share.sequence} from {to.peer}.{to.incarnation}"
                session.count(me.peer, 1, name, share.weight / masses.weight)

    async def _recall(self, session: SharedStateSession, share: Share) -> bool | None:
        averager, peer, began = self._averager, share.to.peer, loop_time()
        if began >= session.deadline or averager.timeouts.resting(peer, began):
            return None
        answer_by = began + averager.timeouts.answer_seconds(peer)
        deadline = min(session.deadline, answer_by)
        recall = RecallShare(session.key, averager.me, share.sequence, share.to)
        try:
            async with averager.endpoint.open(peer, PUSH, deadline) as stream:
                await stream.send(recall)
                return (await hear(stream, ShareStatus, recall)).counted
        except (PeerError, BadPayload):
            now = loop_time()
            averager.timeouts.late(peer, now, max(CHEAP_SECONDS, now - began), slow=False)
            return None


class ShareReceiver:
    def __init__(self, averager: PushSum, bandwidth: float) -> None:
        self._averager = averager
        self._timeouts = PeerTimeouts(bandwidth)  # of the links in this direction
        self._taking: set[PeerId] = set()
        averager.endpoint.serve(PUSH, PushShare, self._serve)
        averager.endpoint.serve(PUSH, RecallShare, self._send_status)

    async def _serve(self, stream: Stream, give: PushShare) -> None:
        averager, state, peer = self._averager, self._averager.state, stream.peer
        if give.codec != averager.codec.name:
            raise BadPayload(f"codec {give.codec!r} where the run uses {averager.codec.name}")
        if give.weight > MOST_SHARE:
            raise BadPayload(f"a share of weight {give.weight:g}, more than {MOST_SHARE:g}")
        averager.estimator.hear(give.sender.peer, give.key.round)
        busy = peer in self._taking or len(self._taking) >= MAX_TAKING or self._timeouts.resting(peer, loop_time())
        if state is None or busy or averager.masses.mass + give.weight > 2 * MOST_SHARE:
            return await self._send_status(stream, give)
        self._taking.add(peer)
        try:
            counted = await self._take(state, give, stream)
        except BadPayload:  # a share given to this sender would be lost to us as well
            for timeouts in (self._timeouts, averager.timeouts):
                timeouts.distrust(peer, loop_time())
            raise
        finally:
            self._taking.remove(peer)
        await stream.send(ShareStatus(give.key, averager.me, give.sequence, counted))

    async def _send_status(self, stream: Stream, share: PushShare | RecallShare) -> None:
        counted = self._averager.masses.recalled(share.sender, share.sequence)
        await stream.send(ShareStatus(share.key, self._averager.me, share.sequence, counted))

    async def _take(self, state: VectorView, give: PushShare, stream: Stream) -> bool:
        averager = self._averager
        if give.elements != state.size:
            raise BadPayload(f"a state of {give.elements} elements; the run's have {state.size}")
        theirs = StateReceiver(averager.part(state.size), averager.host.compute)
        async with averager.turn:
            await theirs.measure(stream, state)
        await self._receive(theirs, give, stream)
        while True:
            try:
                await averager.notifier.until(lambda: averager.state is not None, stream.deadline)
            except TimeoutError:
                raise PeerSilent(stream.peer, "no state to count it in") from None
            async with averager.turn:
                if averager.session and averager.session.state:
                    return await self._count(averager.session, averager.session.state, give, theirs.part)

    async def _receive(self, theirs: StateReceiver, give: PushShare, stream: Stream) -> None:
        timeouts, peer = self._timeouts, stream.peer
        began, size_bytes = loop_time(), theirs.part.size_bytes
        deadline = min(stream.deadline, began + timeouts.timeout_seconds(peer, size_bytes))
        try:
            await run_with_helper(
                theirs.take(stream), raise_when_gone(self._averager.host.members, give.sender, deadline)
            )
        except PeerSilent as error:
            now = loop_time()
            if now >= min(deadline, began + CHEAP_SECONDS):
                self._averager.accounting.name(peer, f"no share: {error.why}")
            timeouts.failed(peer, began, now, deadline, theirs.begun)
            raise
        timeouts.took(peer, size_bytes, loop_time(), loop_time() - began)

    async def _count(self, session: SharedStateSession, state: VectorView, give: PushShare, part: ReducedPart) -> bool:
        masses = self._averager.masses
        before = masses.weight
        counted = masses.take(Share(give.sender, give.to, give.sequence, give.weight))
        if masses.weight == before:
            return counted  # recalled, or counted earlier
        part_of_us = give.weight / masses.weight
        try:
            await self._averager.blend(state, part, part_of_us)
        finally:
            name = f"{give.name} to {give.to.peer}.{give.to.incarnation}"  # never used twice
            session.count(give.sender.peer, part.chunks, name, part_of_us)
        return counted


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
