"""Moshpit averaging (Ryabinin et al. 2021, arXiv 2103.03239).

In each round a peer averages in small groups, one along each axis of a grid. There is no vote and no barrier, and a
failure in one group does not affect the others. A round of one peer:

1. It announces its position (`protocols.moshpit.peer_tracker`) and takes a cell (`protocols.moshpit.grid`).
2. It trains until, by its own view, the round should be called.
3. It averages once along each axis with the peers that come to its line (`protocols.moshpit.matchmaker`,
   `protocols.moshpit.group_allreduce`). Without a group, it keeps its state.

A peer announces its position to all live members, if there are at most `ANNOUNCE_TO_ALL_LIMIT`. In a larger swarm,
peers find the members of their group in the directory, under the group's name, and each keeps its own coordinates.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from protocols import wire
from protocols.aio import loop_time, task_group
from protocols.allreduce.plan import offer_message
from protocols.base import BadPayload, Deadline, Head, Header, Host, PeerId, PeerSilent, Settings, Stream
from protocols.moshpit.grid import GROUP_MOST
from protocols.moshpit.group_allreduce import DATA, PART, GroupAllReduce
from protocols.moshpit.peer_tracker import PositionAnnouncement, check
from protocols.moshpit.session import MoshpitSession
from protocols.moshpit.state import MoshpitState
from protocols.streams.endpoint import ProtocolEndpoint

CONTROL = "starling/moshpit/control/1"
ANNOUNCE_TO_ALL_LIMIT = 64
"""With more live members than this, a peer talks only to the peers of its line, and to a few acquaintances."""
ENTER_SECONDS = 10.0
"""How long a data stream waits for its group: its opener may have received the plan earlier than this peer."""


class Moshpit:
    """The `IndependentAverager` of the Moshpit protocol."""

    def __init__(
        self, host: Host, settings: Settings, most: int = GROUP_MOST, announce_limit: int = ANNOUNCE_TO_ALL_LIMIT
    ) -> None:
        """`most` is the largest group size, the same at all peers. `announce_limit`: see `ANNOUNCE_TO_ALL_LIMIT`."""
        self.host = host
        self._endpoint = ProtocolEndpoint(host, settings, is_acquainted=self._is_acquainted)
        self.me, self.accounting = self._endpoint.me, self._endpoint.accounting
        self._moshpit = MoshpitState(self._endpoint, CONTROL, most, announce_limit)
        self._session: MoshpitSession | None = None
        self._endpoint.listen(CONTROL, [PositionAnnouncement], self._hear)
        self._endpoint.listen(CONTROL, [wire.Plan], self._on_plan)
        self._endpoint.serve(DATA, wire.Contribute, self._on_data)
        self._endpoint.serve(PART, wire.Contribute, self._on_part)

    @asynccontextmanager
    async def enter(self, head: Head, deadline: Deadline) -> AsyncIterator[MoshpitSession]:
        session = self._session = MoshpitSession(self._moshpit, head, deadline)
        self._endpoint.bind(head.key)
        self._moshpit.format.pool.next_round()
        self._moshpit.post.on_gone = session.gone
        try:
            async with task_group() as group, self._moshpit.post.run(group, deadline, [*self._moshpit.in_sight()]):
                search = self._moshpit.search(deadline, session.found)
                background = [group.create_task(each) for each in (session.live(), session.watch(), search)]
                try:
                    yield session
                finally:
                    for each in background:
                        each.cancel()
        finally:
            session.close()

    async def _is_acquainted(self, stream: Stream, header: Header) -> bool:
        return stream.peer in self._moshpit.found

    # -- messages from other peers ------------------------------------------------------------------------------------

    def _hear(self, peer: PeerId, announcement: PositionAnnouncement) -> None:
        check(announcement, peer)
        for offer in announcement.offer:
            signed = offer_message(announcement.key(announcement.axis), offer)
            if not self.host.signer.verify(peer, signed, offer.signature):
                raise BadPayload("an offer with a forged signature")
        if self._moshpit.hear(announcement) and self._session:
            self._session.heard(announcement)

    def _on_plan(self, peer: PeerId, plan: wire.Plan) -> None:
        if self._session:
            self._session.on_plan(peer, plan)

    # -- data ---------------------------------------------------------------------------------------------------------

    async def _on_data(self, stream: Stream, opening: wire.Contribute) -> None:
        await (await self._data_phase_for(stream, opening)).serve(stream.peer, stream, opening)

    async def _on_part(self, stream: Stream, opening: wire.Contribute) -> None:
        await (await self._data_phase_for(stream, opening)).serve_part(stream.peer, stream, opening)

    async def _data_phase_for(self, stream: Stream, opening: wire.Contribute) -> GroupAllReduce:
        """Wait for the group that a stream belongs to."""
        key, moshpit = opening.key, self._moshpit
        if self._session and not moshpit.data_phases.get(opening.plan) and key.round < self._session.round:
            raise BadPayload(f"a stale contribution, to round {key.round}")
        until = loop_time() + ENTER_SECONDS
        data_phase: GroupAllReduce | None = await moshpit.data_phases.wait_for(
            opening.plan, stream, lambda: key.lineage in moshpit.closed, until
        )
        if data_phase is None:
            raise PeerSilent(stream.peer, "this peer is not in that group")
        if key != data_phase.key:
            data_phase.lose(stream.peer, "refused: a contribution to another group")
            raise BadPayload("a contribution to another group than its plan's")
        return data_phase
