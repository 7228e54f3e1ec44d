"""A peer's ties to clusters from round to round: it serves those that ask for a place, and asks for one itself.

The decisions are in `protocols.butterfly.attachment`. What is asked and answered goes over a stream of its own each:
its end shows whether the voter has heard. Places outlive rounds; a peer searches only while it is in a round.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress

from protocols import wire
from protocols.aio import Notifier, loop_time, task_group
from protocols.base import BadPayload, Deadline, Head, Member, PeerError, PeerGone, PeerId, PeerSilent, Stream
from protocols.butterfly.attachment import Attach, AttachReply, ClusterBook, LeadSearch, LineageOf, PlaceRequest
from protocols.streams.endpoint import ProtocolEndpoint

ATTACH = "starling/butterfly/attach/1"
ANSWER_SECONDS = 3.0
"""A voter that has not answered by then counts as silent. In a large run a peer has to meet it first."""
AGAIN_SECONDS = 0.25  # until a voter is asked again that does not see this peer yet
REPLY_BYTES = 512


class Attachment:
    """`book`: the places in this peer's cluster while it votes. `search`: for a place elsewhere while it does not."""

    def __init__(self, endpoint: ProtocolEndpoint, full: int, lineage_of: LineageOf) -> None:
        """`full`: size of a roster that admits nobody. `lineage_of`: see `attachment.LineageOf`."""
        self.book, self.search = ClusterBook(endpoint.me), LeadSearch(endpoint.me)
        self.rests = False  # whether this peer brings nothing for now, as it tells voters that it asks
        self.partners: tuple[PeerId, ...] = ()  # this peer's cluster in the latest plan
        self.on_change: Callable[[], None] = lambda: None  # called after every new or lost place
        self._changed = Notifier()
        self._endpoint, self._full, self._lineage_of = endpoint, full, lineage_of
        self._head: Head | None = None
        self._events = 0
        endpoint.serve(ATTACH, Attach, self._on_attach)

    def begin(self, head: Head) -> None:
        """Begin a round, or another attempt at it."""
        self._head = head
        self.book.begin(head.key, head.roster, self._endpoint.host.members.met())
        self.search.begin(head.key, head.roster, self._full, self._lineage_of)
        self._notify()

    def leads(self) -> tuple[PeerId, ...]:
        """This peer's lead, then its standby, as far as it has them."""
        return tuple(held.peer for held in (self.search.lead, self.search.standby) if held)

    def ties(self) -> tuple[PeerId, ...]:
        """The peers that this one has to see because of its places: an associate its lead, its standby and the voters
        that it asks; a lead its associates; both the others of their cluster in the latest plan.
        """
        associates = (member.peer for member in self.book.associates())
        peers = dict.fromkeys((*self.search.wanted(), *associates, *self.partners))
        return tuple(peer for peer in peers if peer != self._endpoint.me.peer)

    def is_full(self, roster: Collection[Member]) -> bool:
        return len(roster) >= self._full

    def followers(self, of_lost_leads: bool = False) -> tuple[PeerId, ...]:
        """The associates of other leads that this voter stands by for; of all these leads, or of those that it has lost
        sight of.
        """
        live = {member.peer for member in self._endpoint.host.members.live()} if of_lost_leads else ()
        return tuple(member.peer for member, lead in self.book.stands_by().items() if lead not in live)

    def take_refusal(self, peer: PeerId, reply: AttachReply) -> None:
        """A voter says unasked that this peer has no place in its cluster, in which it has offered work."""
        if self._head and reply.key == self._head.key and not reply.accepted:
            self.search.refused_by(peer)
            self._notify()

    def count(self, counted: bool, aggregators: Collection[PeerId] | None = None) -> None:
        """Note whether most of this peer's work, which its cluster had whole, counted in a round. A lead also says who
        aggregated it.
        """
        if aggregators is None:
            self.search.count(counted)
        else:
            self.book.count(counted, aggregators)
        self._notify()

    async def run(self, deadline: Deadline) -> None:
        """Search for a lead and a standby as long as this peer has none, and notice when they or associates die."""
        async with task_group() as group:
            group.create_task(self._watch_members(deadline))
            while (now := loop_time()) < deadline:
                for ask in self.search.due(now):
                    group.create_task(self._ask(ask, deadline))
                seen = self._events
                until = min(deadline, self.search.wakes_at())
                await self._changed.reached(lambda: self._events != seen, until)  # noqa: B023 - awaited here

    async def _watch_members(self, deadline: Deadline) -> None:
        members = self._endpoint.host.members
        while loop_time() < deadline:
            version, live = members.version, set(members.live())
            if self._head:
                self.book.meet(members.met(), self._head.key.round)
            if self.book.lose(live) | self.search.see(live):
                self._notify()
            await members.changed(version, deadline)

    async def _ask(self, ask: PlaceRequest, deadline: Deadline) -> None:
        """Ask a voter for a place. That one is given up is said once: a place that is not used ends anyway."""
        until = min(deadline, loop_time() + ANSWER_SECONDS)
        if not ask.lead:
            if self._seen(ask.voter):
                with suppress(PeerError, BadPayload):
                    await self._reply(ask, until)
            return
        answer = await self._answer(ask, until)
        if answer:
            self.search.answered(ask, *answer)
        else:
            self.search.failed(ask)
        self._notify()

    async def _answer(self, ask: PlaceRequest, deadline: Deadline) -> tuple[Member, AttachReply] | None:
        """Ask a voter once this peer sees it, and again while it does not see this peer; None if it is gone or silent.

        In a large run both see each other only because this peer is to ask (`ties`).
        """
        members = self._endpoint.host.members
        while loop_time() < deadline:
            version, voter = members.version, self._seen(ask.voter)
            try:
                if voter:
                    return voter, await self._reply(ask, deadline)
            except (PeerGone, BadPayload):  # `counting` has named the peer
                return None
            except PeerSilent:
                pass
            await members.changed(version, min(deadline, loop_time() + AGAIN_SECONDS))
        return None

    def _seen(self, peer: PeerId) -> Member | None:
        return next((member for member in self._endpoint.host.members.live() if member.peer == peer), None)

    async def _reply(self, ask: PlaceRequest, deadline: Deadline) -> AttachReply:
        assert self._head is not None
        attach = Attach(self._head.key, self._endpoint.me, ask.lead, self.search.known_since, self.rests)
        async with self._endpoint.open(ask.voter, ATTACH, deadline) as stream:
            await stream.send(attach)
            reply = wire.expect(await stream.receive(REPLY_BYTES), AttachReply)
            if reply.key != attach.key:
                raise BadPayload("answers a request of another round")
            return reply

    async def _on_attach(self, stream: Stream, attach: Attach) -> None:
        reply = self.book.take(attach, self._lineage_of)
        self._notify()
        await stream.send(reply)

    def _notify(self) -> None:
        self._events += 1
        self._changed.notify()
        self.on_change()
