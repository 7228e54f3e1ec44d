"""Which stage a joiner works in. A stage without a first member gets one: the joiner, by a seat that it is given.

Seats are given by the founder of the run. If it has not been live for `FOUNDER_SECONDS`, the live first member of the
lowest stage gives them, until the run has begun: then each stage has decided a round, and its seat is final. A seat is
on the disk of the peer that gives it before another peer hears of it. If its member does not come, or is away for long
before the run has begun, another gets it, with a higher number.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from node.membership.hello import (
    ANY_STAGE,
    BOOTSTRAP_METHOD,
    NO_STAGE,
    STAYS,
    UNPLACED,
    VERSION,
    Heartbeat,
    StageRejected,
    StageReply,
    StageSeat,
    WantStage,
    WantStageBefore,
)
from node.membership.membership import Membership
from node.membership.seats import Seats
from node.outer.activity import Activity
from protocols import wire
from protocols.aio import loop_time
from protocols.base import BadPayload, Deadline, Member, PeerError, PeerId, Transport

if TYPE_CHECKING:  # only runs with stages load its code
    from protocols.pipeline.balance import Placements

log = logging.getLogger(__name__)

RESERVED_SECONDS = 60.0  # a peer that was assigned a stage counts there for so long, although it is not live yet
MAX_RESERVED = 256
TEAM_FRESH_SECONDS = 15.0  # for so long it counts what a peer has said of its stage
INTENT_SECONDS = 300.0
RELAY_SECONDS = 10.0
FOUNDER_SECONDS = 30.0
"""If the founder is away for longer before the run has begun, others give seats, and that of stage 0 as well."""
SEAT_SECONDS = 120.0
"""The same of another peer's seat: it is given to another peer."""
RETURNED = "the founder has just restarted, and first hears which stages have their first member"
UPDATE = f"the peers of this run speak protocol {VERSION}, this peer another one: update the older one"


class StageAssigner:
    """Answers joiners that ask for a stage, and gives seats if that is this peer's part."""

    def __init__(
        self,
        me: Member,
        seats: Seats,
        membership: Membership,
        transport: Transport,
        *,
        keep: Callable[[Iterable[StageSeat]], Awaitable[None]],
        has_begun: Callable[[], bool],
    ) -> None:
        """`keep` writes seats to the disk. `has_begun`: whether this peer's stage has ever decided a round."""
        self._me, self._founder, self._seats = me, seats.founder, seats
        self._membership, self._transport, self._keep = membership, transport, keep
        self._has_begun, self._began = has_begun, loop_time()
        self._reserved: dict[PeerId, tuple[int, float]] = {}  # peer: its stage, and until when it counts there
        self._noted: dict[bytes, float] = {}  # digest of a seat that counts: since when this peer has known it
        self._lock = asyncio.Lock()

    async def assign(self, peer: PeerId, request: WantStage | WantStageBefore) -> StageReply | StageRejected:
        """Answer `peer`, which may pass on another's request. `NO_STAGE` changes nothing, and is not passed on."""
        if isinstance(request, WantStageBefore) or request.version != VERSION:
            return StageRejected(UPDATE)
        passed_on = request.sender.peer != peer
        if passed_on and peer not in {member.peer for member in self._membership.live()}:
            raise BadPayload(f"asks for a stage in the name of {request.sender.peer}")
        self._learn()
        wanted = request.wanted
        if wanted == NO_STAGE:
            return StageReply(self._membership.stage_of(self._me.peer) or 0, self._seats.told())
        if wanted != ANY_STAGE and wanted >= self._seats.stages:
            return StageRejected(f"the run has the stages 0 to {self._seats.stages - 1}, and no stage {wanted}")
        stage, giver = self._choice(request), self._giver()
        if stage not in self.vacant():
            return self._reply(request.sender, stage)
        if giver == self._me.peer:
            return StageRejected(RETURNED) if self._has_returned() else await self._give(request)
        if passed_on:
            return StageRejected(f"the seat of stage {stage} is for another peer to give")
        return await self._relay(giver, request)

    def _learn(self) -> None:
        """Take in the seats in the greetings of contacts. Forged ones are not the fault of the peer that asks now."""
        for contact in self._membership.contacts():
            try:
                self._seats.add(contact.hello.seats if contact.hello else ())
            except BadPayload as error:
                log.debug("refused from %s: %s", contact.peer, error)
        known = [self._seats.digest(seat) for seat in self._seats.known.values()]
        self._noted = {digest: self._noted.get(digest, loop_time()) for digest in known}

    def _has_returned(self) -> bool:
        """Whether this is a founder that restarted, which may not know the seats that were given meanwhile."""
        restarted = self._me.peer == self._founder and self._me.incarnation > self._seats.founded
        return restarted and not self._has_begun() and loop_time() - self._began < FOUNDER_SECONDS

    # -- who gives seats, and which -----------------------------------------------------------------------------------

    def _away_seconds(self, peer: PeerId) -> float:
        """How long a peer has not been live, as far as this one has seen; 0 if it is."""
        contact = self._membership.contact(peer)
        if peer == self._me.peer or (contact and contact.live):
            return 0.0
        return loop_time() - max(self._began, contact.lost_at if contact else 0.0)

    def _giver(self) -> PeerId:
        """The peer that gives seats now."""
        if self._away_seconds(self._founder) < FOUNDER_SECONDS or self._has_begun():
            return self._founder
        firsts = (seat.member.peer for seat in self._seats.known.values())
        return next((peer for peer in firsts if not self._away_seconds(peer)), self._founder)

    def vacant(self) -> tuple[int, ...]:
        """Stages without a first member, and those whose first member is away for long before the run has begun.

        Then nothing has been trained. Afterwards a stage's state is at its members alone.
        """
        if self._has_begun():
            return self._seats.missing
        late = [stage for stage, seat in self._seats.known.items() if self._is_late(seat)]
        return (*self._seats.missing, *late)

    def _is_late(self, seat: StageSeat) -> bool:
        peer = seat.member.peer
        limit_seconds = FOUNDER_SECONDS if peer == self._founder else SEAT_SECONDS
        known_seconds = loop_time() - self._noted.get(self._seats.digest(seat), loop_time())
        return not self._seats.is_final(seat) and min(known_seconds, self._away_seconds(peer)) > limit_seconds

    def needed(self) -> tuple[int, ...]:
        """Stages that lack a first member, by the greetings of all contacts."""
        self._learn()
        return self.vacant()

    async def _give(self, request: WantStage) -> StageReply | StageRejected:
        async with self._lock:
            stage, known = self._choice(request), self._seats.known
            if stage in self.vacant():
                own = [each.stage for each in known.values() if each.member.peer == request.sender.peer]
                if own and own[0] != stage:
                    return StageRejected(f"this peer is the first of stage {own[0]} already: ask for that one")
                mine = next((each for each in known.values() if each.member.peer == self._me.peer), None)
                seat = self._seats.make(stage, request.sender, None if self._me.peer == self._founder else mine)
                line = (seat,) if mine is None or not seat.by else (seat, *self._seats.line(mine.stage))
                await self._keep([seat, *self._seats.told()])
                self._seats.add(line)  # no other peer hears of it before it is on the disk
            return self._reply(request.sender, stage)

    async def _relay(self, giver: PeerId, request: WantStage) -> StageReply | StageRejected:
        try:
            answer = await ask_stage(self._transport, giver, request, loop_time() + RELAY_SECONDS)
            self._seats.add(answer.seats if isinstance(answer, StageReply) else ())
        except BadPayload as error:
            return StageRejected(f"the peer that gives seats answers badly: {error}"[:200])
        except PeerError as error:
            lacking = ", ".join(map(str, self.vacant()))
            return StageRejected(
                f"no peer is known in stage {lacking}, and the peer that gives its seat is away: {error.why}"[:200]
            )
        return answer

    # -- which stage --------------------------------------------------------------------------------------------------

    def _choice(self, request: WantStage) -> int:
        """The wanted stage, the one of the joiner's own seat, one without a first member, or that which gains most."""
        if request.wanted != ANY_STAGE:
            return request.wanted
        own = [stage for stage, seat in self._seats.known.items() if seat.member.peer == request.sender.peer]
        if own or (vacant := self.vacant()):
            return own[0] if own else vacant[0]
        self._purge()
        from protocols.pipeline.balance import joins  # only runs with stages load its code

        reserved = {peer: stage for peer, (stage, _) in self._reserved.items()}
        return joins(placements(self._seats, self._membership, self._me.peer, 0, reserved, whole=True))

    def _reply(self, joiner: Member, stage: int) -> StageReply:
        self._purge()
        if len(self._reserved) < MAX_RESERVED:
            self._reserved[joiner.peer] = stage, loop_time() + RESERVED_SECONDS
        return StageReply(stage, self._seats.told())

    def _purge(self) -> None:
        now = loop_time()
        self._reserved = {peer: each for peer, each in self._reserved.items() if each[1] > now}


def placements(
    seats: Seats, membership: Membership, me: PeerId, now: int, reserved: Mapping[PeerId, int], whole: bool = False
) -> Placements:
    """Who works where, as this peer sees it. An intent to move is believed for `INTENT_SECONDS`.

    A mover that leaves its stage, and has yet to greet from the other one, counts there as one that has just come. It
    is away while its worker starts, and without it the others would send another peer after it.

    Args:
        now: training rounds of the run.
        reserved: the stages of peers that may not be live yet.
        whole: whether peers count, too, of which this one only knows how many they are in their stage.
    """
    from protocols.pipeline.balance import PlacedPeer, Placements, unseen  # only runs with stages load its code

    def placed(peer: PeerId, stage: int, said: Heartbeat, moving: int | None) -> PlacedPeer:
        place = said.placement[0] if said.placement else UNPLACED
        if moving is not None and said.leaving:
            rate = said.rate * seats.costs[stage] / seats.costs[moving]
            return PlacedPeer(peer, moving, rate, place.pinned, True, moving, place.holds, max(1, now))
        works = said.idle == Activity.WORK and not said.leaving
        return PlacedPeer(peer, stage, said.rate, place.pinned, works, moving, place.holds, place.arrived)

    latest, pulse, mine = loop_time() - INTENT_SECONDS, membership.pulse(), membership.stage_of(me)
    fresh = loop_time() - TEAM_FRESH_SECONDS
    found = {peer: PlacedPeer(peer, stage) for peer, stage in reserved.items()}
    for each in membership.contacts():
        moving = each.moving if each.moving_since > latest else None
        is_here = each.live or (each.left and moving is not None)
        if is_here and each.stage is not None and each.stage < seats.stages:
            found[each.peer] = placed(each.peer, each.stage, each.said, moving)
    if mine is not None:
        goes = pulse.placement[0].moving if pulse.placement else STAYS
        found[me] = placed(me, mine, pulse, None if goes in (STAYS, mine) else goes)
    peers, contacts = list(found.values()), membership.contacts() if whole else ()
    for stage in {*range(seats.stages)} - {mine}:
        teams = [(each.team.peers, each.team.rate) for each in contacts
                 if each.live and each.stage == stage and each.team and each.team_at > fresh]  # fmt: skip
        peers += unseen(stage, peers, teams)
    return Placements(seats.run, now, seats.costs, tuple(peers))


async def ask_stage(
    transport: Transport, peer: PeerId, request: WantStage, deadline: Deadline
) -> StageReply | StageRejected:
    """Ask a peer for a stage. The seats in the answer are not verified here."""
    async with transport.open(peer, BOOTSTRAP_METHOD, deadline) as stream:
        await stream.send(request)
        answer = await stream.receive(wire.MAX_HEADER_BYTES)
    return answer if isinstance(answer, StageRejected) else wire.expect(answer, StageReply)


async def ask_seats(transport: Transport, peer: PeerId, me: Member, deadline: Deadline) -> StageReply:
    """Ask a peer for its own stage and for the seats that it knows, not verified here. It changes nothing."""
    answer = await ask_stage(transport, peer, WantStage(VERSION, me, NO_STAGE), deadline)
    if isinstance(answer, StageRejected):
        raise BadPayload("does not tell the first members of the stages")
    return answer
