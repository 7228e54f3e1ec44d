"""Stages of a run: its founding, the first member of each stage, and which stage a joiner works in.

Each stage has a chain of rounds of its own, and so needs a first roster. The founder is the first member of stage 0. It
signs a seat for the first joiner of every other stage, and writes it to its disk before it hands it out. If that joiner
does not come, another gets the seat later, with a higher number. Peers pass seats on in their greetings, and refuse a
peer with a seat that is not valid any more.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import replace
from statistics import median

import msgpack

from node.config.manifest import Manifest
from node.membership.hello import (
    ANY_STAGE,
    BOOTSTRAP_METHOD,
    NO_STAGE,
    Hello,
    StageRejected,
    StageReply,
    StageSeat,
    WantStage,
)
from node.membership.membership import Membership
from node.membership.peer_record import PeerRecord
from protocols import wire
from protocols.aio import loop_time
from protocols.base import BadPayload, Deadline, Member, PeerError, PeerId, Signer, Transport

log = logging.getLogger(__name__)

RESERVED_SECONDS = 60.0  # a peer that was assigned a stage counts there for so long, although it is not live yet
MAX_RESERVED = 256
RELAY_SECONDS = 10.0
SEAT_SECONDS = 120.0
"""A peer that was seated, and has not greeted as a member of its stage within this time, loses its seat to another."""
_SEAT_TAG = b"starling seat 1\n"


def _plain(seat: StageSeat) -> dict[str, object]:
    return {
        "stage": seat.stage,
        "first": seat.member.peer,
        "incarnation": seat.member.incarnation,
        "number": seat.number,
        "signature": seat.signature.hex(),
    }


def seat_to_bytes(seat: StageSeat) -> bytes:
    """As the state directory of a peer of the stage keeps it: JSON."""
    return json.dumps(_plain(seat), indent=1).encode()


def seat_of(data: bytes) -> StageSeat | None:
    """Read what `seat_to_bytes` wrote; None if it is empty or damaged."""
    try:
        (seat,) = seats_of(b"[" + data + b"]")
    except ValueError:
        return None
    return seat


def seats_to_bytes(seats: Iterable[StageSeat]) -> bytes:
    return json.dumps([_plain(seat) for seat in seats], indent=1).encode()


def seats_of(data: bytes) -> tuple[StageSeat, ...]:
    """Read what `seats_to_bytes` wrote; ValueError if it is damaged."""
    try:
        return tuple(
            StageSeat(
                int(each["stage"]),
                Member(str(each["first"]), int(each["incarnation"])),
                int(each["number"]),
                bytes.fromhex(each["signature"]),
            )
            for each in json.loads(data)
        )
    except (TypeError, KeyError, OverflowError, RecursionError) as error:
        raise ValueError(f"not a list of seats: {error}") from None


def _signed(run: bytes, seat: StageSeat) -> bytes:
    packed: bytes = msgpack.packb([seat.stage, seat.member.peer, seat.member.incarnation, seat.number])
    return _SEAT_TAG + run + packed


class Seats:
    def __init__(self, manifest: Manifest, signer: Signer) -> None:
        assert manifest.stages
        self.stages = len(manifest.stages)
        self.known: dict[int, StageSeat] = {}  # stage -> its first member
        self.came: set[StageSeat] = set()  # those whose peer has greeted as a member of the stage
        self._run, self._founder, self._signer = bytes.fromhex(manifest.run_id), manifest.founder, signer

    def make(self, stage: int, member: Member) -> StageSeat:
        """Sign a seat for the first member of a stage. Only the founder may. It still has to be added."""
        seat = StageSeat(stage, member, self.known[stage].number + 1 if stage in self.known else 0, b"")
        return replace(seat, signature=self._signer.sign(_signed(self._run, seat)))

    def add(self, seats: Iterable[StageSeat]) -> None:
        """Take in seats that others passed on; of two seats in a stage, the later one is valid. Raises `BadPayload`."""
        for seat in seats:
            known = self.known.get(seat.stage)
            if known == seat:
                continue
            genuine = self._signer.verify(self._founder.peer, _signed(self._run, seat), seat.signature)
            if seat.stage >= self.stages or not genuine:
                raise BadPayload(f"a seat in stage {seat.stage} that the run's founder has not signed")
            if known is None or known.number < seat.number:
                self.known[seat.stage] = seat

    def judge(self, hello: Hello) -> None:
        """Check the seat in a greeting, and take it in. `BadPayload` also if another peer has the seat by now."""
        if len(hello.seats) != 1 or hello.seats[0].stage != hello.stage:
            raise BadPayload("greets without the first member of its stage")
        self.add(hello.seats)
        seat = self.known[hello.stage]
        if hello.seats[0] != seat:
            raise BadPayload("the first member of its stage is another one by now: start it with another --state-dir")
        if hello.member.peer == seat.member.peer:
            self.came.add(seat)

    @property
    def missing(self) -> tuple[int, ...]:
        return tuple(stage for stage in range(self.stages) if stage not in self.known)


class StageAssigner:
    """Answers joiners that ask for a stage. Where a seat is needed, it asks the founder, or is the founder."""

    def __init__(
        self,
        me: Member,
        manifest: Manifest,
        seats: Seats,
        membership: Membership,
        transport: Transport,
        keep: Callable[[Iterable[StageSeat]], Awaitable[None]],
    ) -> None:
        self._me, self._founder, self._seats = me, manifest.founder.peer, seats
        self._membership, self._transport, self._keep = membership, transport, keep
        self._reserved: dict[PeerId, tuple[int, float]] = {}  # peer: its stage, and until when it counts there
        self._seated: dict[int, float] = {}  # stage: when this founder gave its seat, since it was started
        self._lock = asyncio.Lock()

    async def assign(self, peer: PeerId, request: WantStage) -> StageReply | StageRejected:
        """Answer `peer`, which may pass on another's request. `NO_STAGE` changes nothing, and is not passed on."""
        live = {member.peer for member in self._membership.live()}
        if request.sender.peer != peer and peer not in live:
            raise BadPayload(f"asks for a stage in the name of {request.sender.peer}")
        self._learn()
        wanted = request.wanted
        if wanted == NO_STAGE:
            return StageReply(self._membership.stage_of(self._me.peer) or 0, tuple(self._seats.known.values()))
        if wanted != ANY_STAGE and wanted >= self._seats.stages:
            return StageRejected(f"the run has the stages 0 to {self._seats.stages - 1}, and no stage {wanted}")
        if self._me.peer == self._founder:
            return await self._decide(request)
        if self._seats.missing:
            return await self._relay(request)
        return self._reply(request.sender, self._choice(request))

    def _learn(self) -> None:
        """Take in the seats in the greetings of contacts. Forged ones are not the fault of the peer that asks now."""
        for contact in self._membership.contacts():
            try:
                self._seats.add(contact.hello.seats if contact.hello else ())
            except BadPayload as error:
                log.debug("refused from %s: %s", contact.peer, error)

    async def _decide(self, request: WantStage) -> StageReply | StageRejected:
        """The founder's answer: it seats the joiner if the stage has no first member, or one that never came."""
        async with self._lock:
            stage = self._choice(request)
            if stage in self._open():
                own = [each for each in self._seats.known.values() if each.member.peer == request.sender.peer]
                if own and own[0].stage != stage:
                    return StageRejected(f"this peer is the first of stage {own[0].stage} already: ask for that one")
                seat = self._seats.make(stage, request.sender)
                await self._keep([*(each for each in self._seats.known.values() if each.stage != stage), seat])
                self._seats.add([seat])  # no other peer hears of it before it is on the disk
                self._seated[stage] = loop_time()
            return self._reply(request.sender, stage)

    def _open(self) -> tuple[int, ...]:
        """Stages whose seat this founder may give: those without one, and those whose peer has not come in time."""
        late = [
            stage
            for stage, since in self._seated.items()
            if loop_time() > since + SEAT_SECONDS and self._seats.known[stage] not in self._seats.came
        ]
        return (*self._seats.missing, *late)

    async def _relay(self, request: WantStage) -> StageReply | StageRejected:
        try:
            answer = await ask_stage(self._transport, self._founder, request, loop_time() + RELAY_SECONDS)
            self._seats.add(answer.seats if isinstance(answer, StageReply) else ())
        except BadPayload as error:
            return StageRejected(f"the run's founder answers badly: {error}"[:200])
        except PeerError as error:
            lacking = ", ".join(map(str, self._seats.missing))
            return StageRejected(
                f"no peer is known in stage {lacking}, and the run's founder is away: {error.why}"[:200]
            )
        return answer

    def _choice(self, request: WantStage) -> int:
        """The wanted stage, the joiner's own if it has a seat, one without a first member, or the weakest."""
        if request.wanted != ANY_STAGE:
            return request.wanted
        own = [stage for stage, seat in self._seats.known.items() if seat.member.peer == request.sender.peer]
        if own or self._open():
            return (own or list(self._open()))[0]
        self._purge()
        here = [contact for contact in self._membership.contacts() if contact.live]
        reserved = {peer: stage for peer, (stage, _) in self._reserved.items()}
        capacity = capacities(self._seats.stages, here, reserved, self._membership.stage_of(self._me.peer))
        return min(range(self._seats.stages), key=lambda stage: (capacity[stage], stage))

    def _reply(self, joiner: Member, stage: int) -> StageReply:
        self._purge()
        if len(self._reserved) < MAX_RESERVED:
            self._reserved[joiner.peer] = stage, loop_time() + RESERVED_SECONDS
        return StageReply(stage, tuple(self._seats.known.values()))

    def _purge(self) -> None:
        now = loop_time()
        self._reserved = {peer: each for peer, each in self._reserved.items() if each[1] > now}


def capacities(
    stages: int, live: Iterable[PeerRecord], reserved: Mapping[PeerId, int], mine: int | None
) -> dict[int, float]:
    """Microbatches/s of each stage, by what its live peers say. Peers whose rate is not known have a usual one.

    `reserved`: the stages of peers that may not be live yet.
    """
    rates = {contact.peer: (contact.stage or 0, contact.said.rate) for contact in live}
    rates = {**{peer: (stage, 0.0) for peer, stage in reserved.items()}, **rates}
    usual = median([rate for _, rate in rates.values() if rate] or [1.0])
    found = dict.fromkeys(range(stages), 0.0)
    for stage, rate in rates.values():
        if stage in found:
            found[stage] += rate or usual
    if mine is not None:
        found[mine] += usual
    return found


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
    answer = await ask_stage(transport, peer, WantStage(me, NO_STAGE), deadline)
    if isinstance(answer, StageRejected):
        raise BadPayload("does not tell the first members of the stages")
    return answer
