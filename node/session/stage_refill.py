"""Stages that have lost all their members, with their disks: they begin again from a backup, with a new seat.

A holder of the newest backup proposes itself (`protocols.pipeline.backups`), and asks peers of other stages to endorse
its seat. Each endorses one seat of a number, if it has seen no member of the stage for a while, and writes that down
before it answers. With the endorsements of most of them the holder moves there, as `move` does, and starts the stage's
chain anew: in a scope of its own, from the backup, with the number of training rounds that the run has by now.

Peers that were apart may know different seats of a stage. The one counts that most live drivers show: heartbeats
and refusals say it. A peer of a seat that does not count leaves its stage, and asks for one again.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from node.membership.hello import (
    MAX_ELECTORS,
    MAX_ENDORSEMENTS,
    MAX_SEATS,
    SEAT_METHOD,
    SHOWN_BYTES,
    Endorsed,
    Endorsement,
    HelloRejected,
    ReseatRefused,
    ReseatRequest,
    SeatBase,
    SeatsView,
    StageSeat,
)
from node.membership.membership import Membership
from node.membership.peer_record import PeerRecord
from node.membership.seats import Seats
from node.reporting.status import short
from node.session.stage_mover import MoveRefused
from node.storage.statedir import StateError
from protocols import wire
from protocols.aio import loop_time, peer_timeout, task_group
from protocols.base import BadPayload, Member, PeerError, PeerId, Stream, Transport

if TYPE_CHECKING:  # only runs with stages load its code
    from protocols.pipeline.balance import Placements

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
ASK_SECONDS = 10.0
SETTLE_SECONDS = 5.0
"""Drivers have to show a seat for so long before others follow: what is seen at a meeting changes soon."""
COMING_SECONDS = 90.0  # for which an endorsed member may take to come, before another is endorsed
NEW_SECONDS = 120.0  # for which a live peer of a lost stage that is not a member yet may fork, or be admitted
LAST_SECONDS = 120.0  # before a stage's last member is lost: who leaves in this time counts as one of the last ones
REFUSAL_SECONDS = 90.0  # for which a refusal says which seat counts for the peer that refuses
NUMBERS_AHEAD = 16  # of a seat that is endorsed, beyond the highest that this peer knows
TRAINED_APART = 2  # training rounds of stage 0 by which two peers' views may differ


class Promises:
    """The latest seat that a peer has endorsed in each stage. `keep` writes to the disk."""

    def __init__(self, kept: bytes, keep: Callable[[bytes], Awaitable[None]]) -> None:
        self._keep, self._lock = keep, asyncio.Lock()
        self._made: dict[str, tuple[int, str]] = {}
        self._made_at: dict[int, float] = {}
        with suppress(ValueError, TypeError, AttributeError):  # empty, or damaged
            self._made = {str(stage): (int(number), str(name)) for stage, (number, name) in json.loads(kept).items()}

    def highest(self, stage: int) -> int:
        return self._made.get(str(stage), (0, ""))[0]

    def is_fresh(self, stage: int) -> bool:
        """Whether the member of an endorsed seat may still be on its way."""
        return loop_time() < self._made_at.get(stage, -math.inf) + COMING_SECONDS

    async def make(self, seat: StageSeat, name: str) -> bool:
        """Promise to endorse no other seat of this number, and none of a lower one. Returns whether that is promised:
        not if another promise stands against it, or it cannot be written down.
        """
        async with self._lock:
            before = self._made.get(str(seat.stage), (0, ""))
            if before != (seat.number, name) and before[0] >= seat.number:
                return False
            after = self._made | {str(seat.stage): (seat.number, name)}
            try:
                await self._keep(json.dumps(after).encode())
            except StateError as error:
                log.warning("a seat of stage %d is not endorsed: %s", seat.stage, error)
                return False
            self._made, self._made_at[seat.stage] = after, loop_time()
            return True


class StageRefill:
    """One peer's part in the refilling of stages: it watches them, endorses seats, and goes itself when it is due."""

    def __init__(
        self,
        me: Member,
        stage: int,
        *,
        seats: Seats,
        membership: Membership,
        transport: Transport,
        promises: Promises,
        view: Callable[[], Placements],
        clock: Callable[[], int],
        held: Callable[[], Mapping[int, int]],
        base: Callable[[int], Awaitable[SeatBase | None]],
        move: Callable[[int, Callable[[int], Awaitable[None]]], object],
        begin: Callable[[StageSeat], Awaitable[None]],
        say: Callable[[str], None],
    ) -> None:
        """`view` is what this peer sees now, `clock` the training rounds of the run, `held` this peer's own backups.

        `base` reads what is in a backup, with the rounds of the run; None if it is damaged. `move` asks for a move to a
        stage, and calls the function when the peer may go; it raises `MoveRefused`. `begin` prepares the directory of a
        stage that begins again.
        """
        self._me, self._stage, self._seats, self._membership = me, stage, seats, membership
        self._transport, self._promises, self._view, self._held = transport, promises, view, held
        self._clock = clock
        self._base, self._move, self._begin, self._say = base, move, begin, say
        self._empty_since: dict[int, float] = {}
        self._away: set[int] = set()  # stages without a live member, of which one has left as its user wished
        self._votes: dict[int, tuple[dict[bytes, int], float]] = {}  # of each stage, and since when they are so
        self._known: dict[int, bytes] = {}  # digests of seats with a base that were told of
        self._tried_at: dict[int, float] = {}
        self.problems: dict[int, str] = {}  # why this peer's latest proposal came to nothing
        seats.accepts = self._accepts
        transport.serve(SEAT_METHOD, self._serve)

    # -- which stages are lost ----------------------------------------------------------------------------------------

    def _has_state(self, each: PeerRecord, stage: int) -> bool:
        """Whether a peer is a member of a stage, or may become one of the members that were lost.

        One that has rounds and is not admitted for long is stranded: the last members are gone, and it cannot prove
        that it has their state.
        """
        if each.stage != stage or each.hello is None or not self._seats.counts(each.hello.seats[0]):
            return False
        if each.placement.member or each.member == each.hello.seats[0].member:
            return True
        is_new = not each.live or loop_time() < each.lost_at + NEW_SECONDS
        return each.said.round > 0 and is_new

    def _note_lost(self) -> None:
        now, contacts = loop_time(), self._membership.contacts()
        for stage in range(self._seats.stages):
            members = [each for each in contacts if self._has_state(each, stage)]
            if stage == self._stage or any(each.live or each.unwatched for each in members):
                self._empty_since.pop(stage, None)
                self._away.discard(stage)
                continue
            since = self._empty_since.setdefault(stage, now)
            if any(each.left and each.lost_at > since - LAST_SECONDS for each in members):
                self._away.add(stage)  # also when its record is forgotten

    def lost_seconds(self, stage: int) -> float:
        """For how long a stage has had no live member; 0 if it has one, or one is away as its user wishes."""
        since = self._empty_since.get(stage)
        return 0.0 if since is None or stage in self._away else loop_time() - since

    def _newest(self, stage: int) -> dict[PeerId, int]:
        """The live holders of a stage's backup, and the training rounds in it."""
        here = [each for each in self._membership.contacts() if each.here]
        found = {each.peer: each.backups[stage] for each in here if stage in each.backups}
        mine = self._held().get(stage)
        return found if mine is None else {**found, self._me.peer: mine}

    # -- what others ask ----------------------------------------------------------------------------------------------

    async def _serve(self, peer: PeerId, stream: Stream) -> None:
        async with peer_timeout(ASK_SECONDS, peer, "it asks"):
            request = wire.expect(await stream.receive(wire.MAX_HEADER_BYTES), ReseatRequest)
        why = self._objection(peer, request) or await self._difference(request.seat)
        seat, known = request.seat, self._seats.known.get(request.seat.stage)
        if not why and await self._promises.make(seat, self._seats.digest(seat).hex()):
            return await stream.send(Endorsed(self._seats.endorse(seat)))
        number = max(known.number if known else 0, self._promises.highest(seat.stage))
        await stream.send(ReseatRefused(why or "another seat of this number, or a higher one, is endorsed", number))

    def _objection(self, peer: PeerId, request: ReseatRequest) -> str:
        """Why a seat is not endorsed; empty if nothing is against it."""
        from protocols.pipeline.backups import AGREE_SECONDS, LOST_SECONDS, TURN_SECONDS

        seat = request.seat
        if request.run != self._seats.run or seat.stage >= self._seats.stages or not seat.base or seat.endorsed:
            raise BadPayload("asks for a seat of another run, or one that needs no endorsement")
        if seat.member.peer != peer:
            raise BadPayload(f"asks for a seat in the name of {seat.member.peer}")
        contact = self._membership.contact(peer)
        if contact is None or not contact.here:
            return "its peer is not live here"
        known, base, lost_seconds = self._seats.known.get(seat.stage), seat.base[0], self.lost_seconds(seat.stage)
        if known is None or seat.stage == self._stage or lost_seconds < AGREE_SECONDS:
            return f"stage {seat.stage} has not been without a member for {AGREE_SECONDS:g} s"
        if self._promises.is_fresh(seat.stage):
            return "another peer has just been endorsed"
        highest = max(known.number, self._promises.highest(seat.stage))
        if not known.number < seat.number <= highest + NUMBERS_AHEAD:
            return "the seat has another number than the one that is due"
        if abs(base.trained - self._clock()) > TRAINED_APART or base.base_trained > base.trained:
            return f"the run is after {self._clock()} rounds"
        newest = max(self._newest(seat.stage).values(), default=0)
        if base.base_trained < newest and lost_seconds < LOST_SECONDS + 2 * TURN_SECONDS:
            return f"another peer has a newer backup, after {newest} rounds"
        return ""

    async def _difference(self, seat: StageSeat) -> str:
        """Whether this peer's own backup, of the same round, is another state; empty if it is not."""
        mine = await self._base(seat.stage) if seat.stage in self._held() else None
        if mine is None or mine.base_trained != seat.base[0].base_trained:
            return ""
        same = replace(mine, trained=seat.base[0].trained) == seat.base[0]
        return "" if same else "this peer's backup of the same round is another state"

    # -- going there --------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Watch the stages for ever."""
        while True:
            self._note_lost()
            for stage in range(self._seats.stages):
                self._settle(stage)
                if stage != self._stage:
                    self._consider(stage)
            self._tell()
            await asyncio.sleep(LOOK_SECONDS)

    def _consider(self, stage: int) -> None:
        """Ask for this peer's move to a lost stage if it is its turn."""
        from protocols.pipeline.backups import LOST_SECONDS, TURN_SECONDS, proposers

        view, lost_seconds, known = self._view(), self.lost_seconds(stage), self._seats.known.get(stage)
        if known is None or not view.round or lost_seconds < LOST_SECONDS or stage not in self._held():
            return
        if self._promises.is_fresh(stage):
            return
        order = proposers(view, stage, known.number + 1, self._newest(stage))
        if self._me.peer not in order:
            return
        due = lost_seconds >= LOST_SECONDS + TURN_SECONDS * order.index(self._me.peer)
        if due and loop_time() >= self._tried_at.get(stage, 0.0) + TURN_SECONDS * bool(self._tried_at.get(stage)):
            self._tried_at[stage] = loop_time()
            try:
                self._move(stage, self._propose)
            except MoveRefused as error:
                self.problems[stage] = str(error)

    async def _propose(self, stage: int) -> None:
        """Have a seat endorsed, and prepare to take it. Raises `MoveRefused`."""
        from protocols.pipeline.backups import electors, is_majority

        base, known = await self._base(stage), self._seats.known[stage]
        if base is None:
            raise MoveRefused(f"the backup of stage {stage} cannot be read")
        number = max(known.number, self._promises.highest(stage)) + 1
        following = replace(self._me, incarnation=self._me.incarnation + 1)
        seat = self._seats.make_again(stage, following, base, min(number, MAX_SEATS))
        asked = electors(self._seats.run, stage, seat.number, self._outside(stage), MAX_ELECTORS)
        endorsed, refused = await self._ask_all(seat, asked)
        if not is_majority([each.peer for each in endorsed], asked):
            if refused:  # the next try has a number that they can endorse
                highest = max(each.number for each in refused.values())
                await self._promises.make(replace(seat, number=min(highest, MAX_SEATS)), "passed over")
            why = next((each.why for each in refused.values()), "no answer in time")
            raise MoveRefused(f"{len(endorsed)} of {len(asked)} peers have endorsed it ({why})")
        seat = replace(seat, endorsed=tuple(sorted(endorsed, key=lambda each: each.peer))[:MAX_ENDORSEMENTS])
        await self._begin(seat)

    def _outside(self, stage: int) -> list[PeerId]:
        """The live peers of other stages."""
        outside = [each.peer for each in self._membership.contacts() if each.here and each.stage != stage]
        if stage != self._stage:
            outside.append(self._me.peer)
        return outside

    async def _ask_all(
        self, seat: StageSeat, asked: list[PeerId]
    ) -> tuple[list[Endorsement], dict[PeerId, ReseatRefused]]:
        endorsed: list[Endorsement] = []
        refused: dict[PeerId, ReseatRefused] = {}

        async def one(peer: PeerId) -> None:
            if peer == self._me.peer:
                if await self._promises.make(seat, self._seats.digest(seat).hex()):
                    endorsed.append(Endorsement(peer, self._seats.endorse(seat)))
                return
            try:
                answer = await self._ask(peer, seat)
            except (PeerError, BadPayload):
                return
            if isinstance(answer, ReseatRefused):
                refused[peer] = answer
            elif self._seats.is_endorsed(seat, given := Endorsement(peer, answer.signature)):
                endorsed.append(given)

        async with task_group() as group:
            for peer in asked:
                group.create_task(one(peer))
        return endorsed, refused

    async def _ask(self, peer: PeerId, seat: StageSeat) -> Endorsed | ReseatRefused:
        async with self._transport.open(peer, SEAT_METHOD, loop_time() + ASK_SECONDS) as stream:
            await stream.send(ReseatRequest(self._seats.run, seat))
            answer = await stream.receive(wire.MAX_HEADER_BYTES)
        return answer if isinstance(answer, ReseatRefused) else wire.expect(answer, Endorsed)

    # -- which seat counts --------------------------------------------------------------------------------------------

    def _accepts(self, seat: StageSeat) -> bool:
        """Whether a seat with a base counts at once."""
        from protocols.pipeline.backups import AGREE_SECONDS

        outside = self._outside(seat.stage)
        known = {each.peer for each in seat.endorsed} & {*outside}
        is_lost = seat.stage != self._stage and self.lost_seconds(seat.stage) >= AGREE_SECONDS
        return is_lost and 2 * len(known) > min(len(outside), MAX_ELECTORS)

    def _settle(self, stage: int) -> None:
        """Follow most drivers, once they have shown the same for a while."""
        if not self._seats.has_rivals(stage):
            self._votes.pop(stage, None)
            return
        votes, now = dict(self._count(stage)), loop_time()
        before, since = self._votes.get(stage, ({}, now))
        self._votes[stage] = votes, since if votes == before else now
        if votes == before and now >= since + SETTLE_SECONDS and self._seats.settle(stage, votes):
            self._membership.drop_unseated()

    def _count(self, stage: int) -> Counter[bytes]:
        """How many drivers show which seat of a stage; of stage 0, how many peers of others.

        If there are none, how many peers have refused this one for it.
        """
        votes: Counter[bytes] = Counter()
        for view in self._views():
            if (view.stage == 0) == (stage != 0):
                votes[next((shown.digest for shown in view.seats if shown.stage == stage), b"")] += 1
        return votes or self._refusals(stage)

    def _views(self) -> Iterator[SeatsView]:
        """What this peer shows, the peers that are live here, and those that refuse it: peers that know other seats
        refuse each other, and no side may count itself alone.
        """
        yield SeatsView(self._stage, self._seats.shown())
        for each in self._membership.contacts():
            if each.here and each.stage is not None:
                yield SeatsView(each.stage, each.said.seats)
        for refusal in self._latest_refusals():
            yield from refusal.view

    def _latest_refusals(self) -> list[HelloRejected]:
        latest = loop_time() - REFUSAL_SECONDS
        found = [each.refusal for each in self._membership.contacts() if each.refusal and not each.live]
        return [refusal for refusal, when in found if when > latest]

    def _refusals(self, stage: int) -> Counter[bytes]:
        seats = [refusal.seats[0] for refusal in self._latest_refusals() if refusal.seats]
        of_stage = [seat for seat in seats if seat.stage == stage]
        return Counter(self._seats.digest(seat)[:SHOWN_BYTES] if seat.base else b"" for seat in of_stage)

    # -- what the user sees -------------------------------------------------------------------------------------------

    def _tell(self) -> None:
        """Say which stages have begun again, and what that has cost."""
        for stage, seat in self._seats.known.items():
            digest = self._seats.digest(seat)
            if self._known.get(stage) not in (None, digest) and seat.base:
                self._say(
                    f"stage {stage} {self._begins(seat)} at {short(seat.member.peer)} from a backup, because all its "
                    f"members were gone: {self._seats.lost_rounds()[stage]} rounds of it are lost"
                )
            self._known[stage] = digest

    def _begins(self, seat: StageSeat) -> str:
        """The verb of a stage that begins again: its first member may still be ending its last round elsewhere."""
        first, contact = seat.member, self._membership.contact(seat.member.peer)
        seen = self._me if first.peer == self._me.peer else contact.member if contact else None
        return "begins again" if seen and seen.incarnation < first.incarnation else "began again"

    def describe(self) -> str:
        """Which stages are lost, and which begin or began again after how many lost rounds; empty if there are none."""
        from protocols.pipeline.backups import LOST_SECONDS

        known = self._seats.known
        again = [
            f"stage {stage} {self._begins(known[stage])} after {known[stage].base[0].trained} rounds: {rounds} lost"
            for stage, rounds in self._seats.lost_rounds().items()
        ]
        lost = [
            f"stage {stage} has had no member for {seconds:.0f} s: {self._prospect(stage)}"
            for stage in range(self._seats.stages)
            if (seconds := self.lost_seconds(stage)) >= LOST_SECONDS / 4
        ]
        return "; ".join([*lost, *again])

    def _prospect(self, stage: int) -> str:
        """What becomes of a lost stage."""
        from protocols.pipeline.backups import proposers

        holders, known = self._newest(stage), self._seats.known.get(stage)
        if not holders:
            return "no live peer has a backup, so the run waits for one of its members"
        if known and not proposers(self._view(), stage, known.number + 1, holders):
            return (
                "no peer with a backup of it may go there: each was given its stage, or is the last one there; "
                f"start one without --stage ({', '.join(map(short, sorted(holders)))}), or let more peers join"
            )
        problem = f"; {self.problems[stage]}" if stage in self.problems else ""
        return f"it begins again from a backup after {max(holders.values())} rounds{problem}"
