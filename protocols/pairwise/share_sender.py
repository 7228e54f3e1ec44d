"""The giver's end of shares: each is kept, encoded, until it is known what became of it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial

from protocols.aio import run_with_helper, task_group
from protocols.allreduce.parts import ReducedPart
from protocols.base import BadPayload, Deadline, Member, PeerError, PeerId, Stream
from protocols.chunks import send_encoded
from protocols.pairwise.mass_ledger import Share
from protocols.pairwise.peer_timeouts import CHEAP_SECONDS
from protocols.pairwise.shared_state import SharedStateSession
from protocols.pairwise.shares import PUSH, PushShare, RecallShare, ShareStatus, split_share
from protocols.pairwise.state_swap import hear, watch
from protocols.pairwise.weighted_state import WeightedState

BURIAL_SECONDS = 120.0
"""A share of which there has been no word for so long comes home, whether its receiver is there or not."""
MAX_KEPT = 2
"""Shares of which nobody knows what became of them: who has so many gives no more until that is known."""


class ShareSender:
    """Gives one share at a time.

    Attributes:
        kept: shares that their receivers have not answered for.
        giving: to whom it gives at this moment.
        half_exchanges: shares that came home without their receivers' word, since this peer began.
    """

    def __init__(self, weighted: WeightedState) -> None:
        self.kept: dict[tuple[Member, int], tuple[Share[float], ReducedPart]] = {}
        self.giving: tuple[PeerId, ...] = ()
        self.half_exchanges = 0
        self._weighted = weighted
        self._untold: dict[tuple[Member, int], float] = {}  # since when there is no word of a share

    async def give(
        self,
        session: SharedStateSession,
        to: Member,
        until: Deadline,
        ready: Callable[[], Awaitable[bool]] | None = None,
    ) -> bool:
        """Give half of what is here; False: it is home again, and somebody else may have it.

        Args:
            ready: whether the receiver may have it, asked when it has been set apart: what comes in from then on is
                not in it.
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
        self.giving = (to.peer,)
        try:
            counted = await self._send(session, share, part, until) if ready is None or await ready() else False
        finally:
            self.giving = ()
        if counted is not None:
            await self._answered(session, share, counted)
        return counted is not False

    async def _send(
        self, session: SharedStateSession, share: Share[float], part: ReducedPart, until: Deadline
    ) -> bool | None:
        """Whether it was counted; None: nobody knows."""
        weighted, peer, loop = self._weighted, share.to.peer, asyncio.get_running_loop()
        patience, began = weighted.patience, loop.time()
        elements = part.high - part.low
        give = PushShare(
            session.key, self._weighted.me, share.sequence, share.to, share.weight, elements, part.codec.name
        )
        answer_by, told = min(until, began + patience.answer_seconds(peer)), False
        try:
            async with (
                asyncio.timeout_at(answer_by) as limit,
                weighted.endpoint.open(peer, PUSH, until) as stream,
            ):
                limit.reschedule(None)  # from here on it is watched
                patience.answered(peer, 2 * (loop.time() - began))
                told = True
                watching = watch(weighted.host.members, share.to, until)
                counted = await run_with_helper(_deliver(stream, give, part), watching)
        except (PeerError, BadPayload, TimeoutError):
            now = loop.time()
            weighted.accounting.name(
                peer, f"no share: {'no word of what became of it' if told else 'it was not reached'}"
            )
            if told:  # ours is with it, and we know nothing: nothing more, for a while
                patience.late(peer, now, max(CHEAP_SECONDS, now - began), slow=now >= until)
                return None
            patience.failed(peer, began, now, answer_by, slow=False)
            return False
        if counted:
            patience.took(peer, part.size_bytes, loop.time(), loop.time() - began)
        return counted

    async def _answered(self, session: SharedStateSession, share: Share[float], counted: bool) -> None:
        """It is known what became of a share: it is its receiver's, or ours again."""
        masses = self._weighted.masses
        async with self._weighted.turn:
            _, part = self.kept.pop((share.to, share.sequence))
            before = masses.weight
            masses.answered(share.to, share.sequence, counted)
            if not counted and session.state:
                await self._weighted.blend(session.state, part, share.weight / (before + share.weight))

    # -- what became of those that nobody answered for ----------------------------------------------------------------

    async def reclaim(self, session: SharedStateSession) -> None:
        """Settle them: by their receivers' word, or without it where those are gone."""
        now, masses, me = asyncio.get_running_loop().time(), self._weighted.masses, self._weighted.me
        live = {member.peer: member for member in self._weighted.host.members.live()}
        self._untold = {key: self._untold.get(key, now) for key in self.kept}
        for share, _ in list(self.kept.values()):
            to, counted = share.to, None
            if live.get(to.peer) == to:
                counted = await self._recall(session, share)
            elif to.peer in live:
                counted = False  # of an earlier life: it is over
            if counted is None and now - self._untold[to, share.sequence] >= BURIAL_SECONDS:
                counted = False
                self.half_exchanges += 1
                session.count_half(share.weight / (masses.weight + share.weight))
            if counted is not None:
                await self._answered(session, share, counted)
            if counted is False:  # a state of ours of an earlier round is in ours again
                name = f"{me.peer}.{me.incarnation}/{share.sequence} from {to.peer}.{to.incarnation}"
                session.count(me.peer, 1, name, share.weight / masses.weight)

    async def _recall(self, session: SharedStateSession, share: Share[float]) -> bool | None:
        """Whether it was counted; None: nobody knows."""
        weighted, peer, began = self._weighted, share.to.peer, asyncio.get_running_loop().time()
        if began >= session.deadline or weighted.patience.resting(peer, began):
            return None
        answer_by = began + weighted.patience.answer_seconds(peer)
        deadline = min(session.deadline, answer_by)
        recall = RecallShare(session.key, weighted.me, share.sequence, share.to)
        try:
            async with weighted.endpoint.open(peer, PUSH, deadline) as stream:
                await stream.send(recall)
                return (await hear(stream, ShareStatus, recall)).counted
        except (PeerError, BadPayload):
            now = asyncio.get_running_loop().time()
            weighted.patience.late(peer, now, max(CHEAP_SECONDS, now - began), slow=False)
            return None


async def _deliver(stream: Stream, give: PushShare, part: ReducedPart) -> bool:
    """Send a share, and hear whether it is counted: who has no use for it says so before it has all of it."""
    async with task_group() as group:
        sending = group.create_task(_send_all(stream, give, part))
        counted = (await hear(stream, ShareStatus, give)).counted
        sending.cancel()
    return counted


async def _send_all(stream: Stream, give: PushShare, part: ReducedPart) -> None:
    with suppress(PeerError):  # there may be an answer that came before the end: `hear` knows
        await stream.send(give)
        await send_encoded(stream, part)
