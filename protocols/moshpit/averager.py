"""Moshpit (Ryabinin et al. 2021, arXiv 2103.03239): small groups along the axes of a grid, one after the other, in each
round; no vote, no barrier, and what befalls a group stays in it.

A peer says where it stands (`protocols.moshpit.peer_tracker`), sits down on the grid (`protocols.moshpit.grid`), trains
until by its own view the round should be called, and then averages once along each axis with whoever comes to its line
(`protocols.moshpit.matchmaker`, `protocols.moshpit.group_allreduce`). Its state counts for its tokens in the first
group; in the next one for those of the group whose mean it holds. Where a group fails, or nobody comes, a peer goes on
with what it has.

To whom it says so: to all live members, up to `TOLD`. Where there are more, peers find those of their line in the
directory, under the group's own name, and keep coordinates of their own.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from protocols import wire
from protocols.aio import Notifier, task_group
from protocols.allreduce.plan import offer_message
from protocols.base import BadPayload, Deadline, Head, Header, Host, Member, PeerId, PeerSilent, Settings, Stream
from protocols.codec import state_codec
from protocols.control_channel import ControlChannel, RoundAccounting, first_frame, serve_control_stream
from protocols.moshpit.grid import GROUP_MOST
from protocols.moshpit.group_allreduce import DATA, PART, GroupAllReduce
from protocols.moshpit.matchmaker import MoshpitContext
from protocols.moshpit.peer_tracker import PeerTracker, PositionAnnouncement, check
from protocols.moshpit.session import MoshpitSession
from protocols.moshpit.state import MoshpitState

CONTROL = "starling/moshpit/control/1"
TOLD = 64
"""Where more are live, a peer speaks with those of its line only."""
ENTER_SECONDS = 10.0
"""Who was called opens streams to others that may not have heard of it yet."""


class Moshpit:
    """`protocols.base.LooseAverager`."""

    shares_anchor = False

    def __init__(self, host: Host, settings: Settings, most: int = GROUP_MOST, told: int = TOLD) -> None:
        """
        Args:
            most: peers in a group, at most; the same for all peers of a run.
            told: whom a peer tells where it stands, at most.
        """
        self.host, self.settings = host, settings
        self.me = Member(host.me, settings.incarnation)
        self.accounting = RoundAccounting()
        self._post = ControlChannel(host, CONTROL, self.accounting)
        used, tracker = state_codec(settings.codec), PeerTracker(self.me)
        context = MoshpitContext(host, settings, used, self.me, self.accounting, self._post, tracker, Notifier())
        self._moshpit = MoshpitState(context, most, told)
        self._session: MoshpitSession | None = None
        host.transport.serve(CONTROL, self._on_control)
        host.transport.serve(DATA, self._on_data)
        host.transport.serve(PART, self._on_part)

    @asynccontextmanager
    async def enter(self, head: Head, deadline: Deadline) -> AsyncIterator[MoshpitSession]:
        session = self._session = MoshpitSession(self._moshpit, head, deadline)
        self._post.on_gone = session.gone
        try:
            async with task_group() as group, self._post.run(group, deadline, [*self._moshpit.in_sight()]):
                background = [group.create_task(each) for each in (session.live(), session.watch(), session.search())]
                try:
                    yield session
                finally:
                    for each in background:
                        each.cancel()
        finally:
            session.close()

    # -- what others say ----------------------------------------------------------------------------------------------

    async def _on_control(self, peer: PeerId, stream: Stream) -> None:
        await serve_control_stream(self.host, self.accounting, stream, partial(self._take, peer), self._moshpit.found)

    def _take(self, peer: PeerId, message: Header) -> None:
        """A message; what is wrong with one is held against its sender, who may say better ones.

        Raises:
            BadPayload: of another kind or run.
        """
        if not isinstance(message, PositionAnnouncement | wire.Plan):
            raise BadPayload(f"{type(message).__name__} on a control stream")
        if self._session is None:
            if isinstance(message, PositionAnnouncement):
                self._hear(peer, message)
            return
        here = self._session.head.key
        run, scope = (
            (message.run, message.scope)
            if isinstance(message, PositionAnnouncement)
            else (message.key.run, message.key.scope)
        )
        if (run, scope) != (here.run, here.scope):
            raise BadPayload("a frame of another run or scope")
        try:
            if isinstance(message, PositionAnnouncement):
                self._hear(peer, message)
            else:
                self._session.on_plan(peer, message)
        except BadPayload as error:
            self.accounting.name(peer, f"refused: {error}")

    def _hear(self, peer: PeerId, here: PositionAnnouncement) -> None:
        check(here, peer)
        for offer in here.offer:
            if not self.host.signer.verify(peer, offer_message(here.key(here.axis), offer), offer.signature):
                raise BadPayload("an offer with a forged signature")
        if self._moshpit.hear(here) and self._session:
            self._session.heard(here)

    # -- data ---------------------------------------------------------------------------------------------------------

    async def _on_data(self, peer: PeerId, stream: Stream) -> None:
        async with self.accounting.counting(stream):
            mixing, opening = await self._mixing_for(peer, stream)
            await mixing.serve(peer, stream, opening)

    async def _on_part(self, peer: PeerId, stream: Stream) -> None:
        async with self.accounting.counting(stream):
            mixing, opening = await self._mixing_for(peer, stream)
            await mixing.serve_part(peer, stream, opening)

    async def _mixing_for(self, peer: PeerId, stream: Stream) -> tuple[GroupAllReduce, wire.Contribute]:
        """The group that a stream is for, which its opener may have heard of before us.

        Raises:
            BadPayload: of another run, or a stale group.
            PeerSilent: we are in another group, or did not hear of this one in time.
        """
        opening = wire.expect(await first_frame(self.host, stream, self._moshpit.found), wire.Contribute)
        key, moshpit = opening.key, self._moshpit
        here = self._session.head.key if self._session else None
        if here and (key.run, key.scope) != (here.run, here.scope):
            raise BadPayload("a contribution to another run or scope")
        if self._session and opening.plan not in moshpit.mixings and key.round < self._session.round:
            raise BadPayload(f"a stale contribution, to round {key.round}")
        until = min(stream.deadline, asyncio.get_running_loop().time() + ENTER_SECONDS)
        try:
            await moshpit.context.entered.until(
                lambda: opening.plan in moshpit.mixings or key.lineage in moshpit.closed, until
            )
        except TimeoutError:
            raise PeerSilent(peer, "its group did not begin here") from None
        if opening.plan not in moshpit.mixings:
            raise PeerSilent(peer, "this peer is not in that group")
        mixing = moshpit.mixings[opening.plan]
        if key != mixing.key:
            mixing.lose(peer, "refused: a contribution to another group")
            raise BadPayload("a contribution to another group than its plan's")
        return mixing, opening
