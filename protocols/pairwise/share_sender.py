"""The sending end of shares: each share is kept, encoded, until its outcome is known."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial

from protocols.aio import loop_time, run_with_helper, task_group
from protocols.allreduce.parts import ReducedPart, send_encoded
from protocols.base import BadPayload, Deadline, Member, PeerError, Stream
from protocols.pairwise.mass_ledger import Share
from protocols.pairwise.shared_state import SharedStateSession
from protocols.pairwise.shares import PUSH, PushShare, RecallShare, ShareStatus, split_share
from protocols.pairwise.state_swap import hear, watch
from protocols.pairwise.weighted_state import WeightedState
from protocols.peers.timeouts import CHEAP_SECONDS

RETURN_SECONDS = 120.0
"""After this many seconds without an answer, a share returns to the sender, whether its receiver is live or not."""
MAX_KEPT = 2
"""Limit of shares with an unknown outcome. At this limit a peer gives no more until outcomes are known."""


class ShareSender:
    """Gives one share at a time.

    Attributes:
        kept: shares that their receivers have not answered for.
    """

    def __init__(self, weighted: WeightedState) -> None:
        self.kept: dict[tuple[Member, int], tuple[Share[float], ReducedPart]] = {}
        self._weighted = weighted
        self._unanswered_since: dict[
            tuple[Member, int], float
        ] = {}  # when each share without an answer was first missed

    async def give(
        self,
        session: SharedStateSession,
        to: Member,
        until: Deadline,
        ready: Callable[[], Awaitable[bool]] | None = None,
    ) -> bool:
        """Give half of the mass; False if the share has returned and may go to another peer.

        Args:
            ready: whether the receiver may have it. Asked after the share is set apart: mass that arrives later is not
                in it.
        """
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

    async def _send(
        self, session: SharedStateSession, share: Share[float], part: ReducedPart, until: Deadline
    ) -> bool | None:
        """Send a share; return whether it was counted, or None if that is unknown."""
        weighted, peer = self._weighted, share.to.peer
        timeouts, began = weighted.timeouts, loop_time()
        elements = part.high - part.low
        give = PushShare(
            session.key, self._weighted.me, share.sequence, share.to, share.weight, elements, part.codec.name
        )
        answer_by, reached = min(until, began + timeouts.answer_seconds(peer)), False
        try:
            async with asyncio.timeout_at(answer_by) as limit, weighted.endpoint.open(peer, PUSH, until) as stream:
                limit.reschedule(None)  # from here on the transfer is watched
                timeouts.answered(peer, 2 * (loop_time() - began))
                reached = True
                watching = watch(weighted.host.members, share.to, until)
                counted = await run_with_helper(_deliver(stream, give, part), watching)
        except (PeerError, BadPayload, TimeoutError):
            now = loop_time()
            weighted.accounting.name(
                peer,
                f"no share: {'it did not say whether it has counted the share' if reached else 'it was not reached'}",
            )
            if reached:  # the share may have arrived: avoid this peer for a while
                timeouts.late(peer, now, max(CHEAP_SECONDS, now - began), slow=now >= until)
                return None
            timeouts.failed(peer, began, now, answer_by, slow=False)
            return False
        if counted:
            timeouts.took(peer, part.size_bytes, loop_time(), loop_time() - began)
        return counted

    async def _answered(self, session: SharedStateSession, share: Share[float], counted: bool) -> None:
        """Record the outcome of a share: it is the receiver's, or ours again."""
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
                self._weighted.half_exchanges += 1
                session.count_half(share.weight / (masses.weight + share.weight))
            if counted is not None:
                await self._answered(session, share, counted)
            if counted is False:  # our own state of an earlier round is merged into our state again
                name = f"{me.peer}.{me.incarnation}/{share.sequence} from {to.peer}.{to.incarnation}"
                session.count(me.peer, 1, name, share.weight / masses.weight)

    async def _recall(self, session: SharedStateSession, share: Share[float]) -> bool | None:
        """Recall a share; return whether it was counted, or None if that is unknown."""
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
    async with task_group() as group:
        sending = group.create_task(_send_all(stream, give, part))
        counted = (await hear(stream, ShareStatus, give)).counted
        sending.cancel()
    return counted


async def _send_all(stream: Stream, give: PushShare, part: ReducedPart) -> None:
    with suppress(PeerError):  # an answer may have arrived before the end: `hear` reads it
        await stream.send(give)
        await send_encoded(stream, part)
