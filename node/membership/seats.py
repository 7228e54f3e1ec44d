"""Seats: which peer is the first member of each stage, and who may say so.

Each stage has a chain of rounds of its own, and so needs a first roster. The founder signs a seat for the first member
of each stage. While it is away, a peer that holds a seat may sign others: a seat is valid if the founder has signed it,
or the holder of a valid seat. It names its signer by the digest of that seat, so each seat has one line of signers, of
at most as many seats as there are stages.

Of two valid seats in one stage, one counts, the same at all peers that know both: the one that has been used; else the
higher number; else the shorter line of signers; else the lower digest. Once a stage has decided a round, its seat is
final for all peers that know that round.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol, TypeAlias

import msgpack

from node.membership.hello import MAX_SEATS, Hello, StageSeat
from protocols.base import MAX_STAGES, BadPayload, Member, PeerId, Signer

SeatLine: TypeAlias = tuple[StageSeat, ...]
"""A seat, then its signer's, and so on; the last one is signed by the founder."""

MAX_SEATS_TOLD = 2 * MAX_STAGES
_SEAT_TAG, _USED_TAG = b"starling seat 1\n", b"starling seat used 1\n"


def _plain(seat: StageSeat) -> dict[str, object]:
    found = {
        "stage": seat.stage,
        "first": seat.member.peer,
        "incarnation": seat.member.incarnation,
        "number": seat.number,
        "signature": seat.signature.hex(),
    }
    return found | {name: value.hex() for name, value in (("by", seat.by), ("used", seat.used)) if value}


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
    """Read what `seats_to_bytes` wrote; ValueError if it is damaged. Seats of older versions are the founder's."""
    try:
        return tuple(
            StageSeat(
                int(each["stage"]),
                Member(str(each["first"]), int(each["incarnation"])),
                int(each["number"]),
                bytes.fromhex(each.get("by", "")),
                bytes.fromhex(each["signature"]),
                bytes.fromhex(each.get("used", "")),
            )
            for each in json.loads(data)
        )
    except (TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"not a list of seats: {error}") from None


class StagedRun(Protocol):
    """What seats need of a manifest."""

    @property
    def run_id(self) -> str: ...

    @property
    def founder(self) -> Member: ...

    @property
    def stages(self) -> Sequence[object] | None: ...
    @property
    def costs(self) -> Sequence[float]: ...


class Seats:
    """The valid seats that one peer knows."""

    def __init__(self, run: StagedRun, signer: Signer) -> None:
        assert run.stages
        self._staged, self.stages = run, len(run.stages)
        self._lines: dict[int, SeatLine] = {}  # stage -> the line of the seat that counts
        self._final: set[bytes] = set()  # digests of seats whose stage has decided a round, as their member says
        self.run, self.founder, self._signer = bytes.fromhex(run.run_id), run.founder.peer, signer
        self.founded = run.founder.incarnation  # in which the founder started the run

    @property
    def costs(self) -> Sequence[float]:
        """Of a microbatch in each stage, in any unit."""
        return self._staged.costs

    @property
    def known(self) -> Mapping[int, StageSeat]:
        """The seat that counts in each stage that has one."""
        return {stage: line[0] for stage, line in sorted(self._lines.items())}

    @property
    def missing(self) -> tuple[int, ...]:
        return tuple(stage for stage in range(self.stages) if stage not in self._lines)

    def line(self, stage: int) -> SeatLine:
        """The seat that counts, and those of its signers; empty if none is known."""
        return self._lines.get(stage, ())

    def told(self) -> tuple[StageSeat, ...]:
        """All seats that count, with those of their signers; without the longest lines if there are too many."""
        latest = {self.digest(seat): seat for seat in self.known.values()}  # in a line one may be as it was before use
        found: dict[bytes, StageSeat] = {}
        for line in sorted(self._lines.values(), key=len):
            more = found | {digest: latest.get(digest, seat) for seat in line for digest in [self.digest(seat)]}
            found = more if len(more) <= MAX_SEATS_TOLD else found
        return tuple(found.values())

    def digest(self, seat: StageSeat) -> bytes:
        return hashlib.sha256(self._signed(seat)).digest()

    def _signed(self, seat: StageSeat) -> bytes:
        fields = [seat.stage, seat.member.peer, seat.member.incarnation, seat.number, *([seat.by] if seat.by else [])]
        packed: bytes = msgpack.packb(fields)
        return _SEAT_TAG + self.run + packed

    # -- signing ------------------------------------------------------------------------------------------------------

    def make(self, stage: int, member: Member, by: StageSeat | None = None) -> StageSeat:
        """Sign a seat for the first member of a stage, as the founder or as the holder of a seat.

        It still has to be added.
        """
        before = self.known.get(stage)
        number = min(before.number + 1, MAX_SEATS) if before else 0  # a first member may lie about it
        seat = StageSeat(stage, member, number, self.digest(by) if by else b"", b"", b"")
        return replace(seat, signature=self._signer.sign(self._signed(seat)))

    def begun(self, me: PeerId, line: SeatLine) -> SeatLine:
        """Note that the stage of this line has decided a round at this peer. Returns it, signed if the seat is its own.

        Then all peers that see the seat know that it is final.
        """
        seat = line[0]
        if seat.member.peer == me and not seat.used:
            seat = replace(seat, used=self._signer.sign(_USED_TAG + self.digest(seat)))
        self.hear(seat.member.peer, line)
        self.add((seat, *line[1:]))
        return (seat, *line[1:])

    # -- judging ------------------------------------------------------------------------------------------------------

    def add(self, seats: Iterable[StageSeat]) -> None:
        """Take in seats that others passed on, in any order. Raises `BadPayload` if one is not valid."""
        given = tuple(seats)
        pool = {self.digest(each): each for each in (*(each for line in self._lines.values() for each in line), *given)}
        sound: set[StageSeat] = {each for line in self._lines.values() for each in line}
        for seat in given:
            self._weigh(self._proved(seat, pool, sound))

    def _proved(self, seat: StageSeat, pool: Mapping[bytes, StageSeat], sound: set[StageSeat]) -> SeatLine:
        """The seat's line. `sound` are the seats whose signatures have been verified."""
        line: list[StageSeat] = []
        while True:
            signer = pool.get(seat.by) if seat.by else None
            peer = signer.member.peer if signer else self.founder
            has_signer = signer is not None or not seat.by
            fits = len(line) < self.stages and seat.stage < self.stages
            if not (fits and has_signer and self._is_sound(seat, peer, sound)):
                stage = line[0].stage if line else seat.stage
                raise BadPayload(f"a seat in stage {stage} that neither the founder nor a first member has signed")
            line.append(seat)
            if signer is None:
                return tuple(line)
            seat = signer

    def _is_sound(self, seat: StageSeat, signer: PeerId, sound: set[StageSeat]) -> bool:
        verify = self._signer.verify
        if seat not in sound and verify(signer, self._signed(seat), seat.signature):
            used = _USED_TAG + self.digest(seat)
            if not seat.used or verify(seat.member.peer, used, seat.used):
                sound.add(seat)
        return seat in sound

    def _weigh(self, line: SeatLine) -> None:
        seat, known = line[0], self.line(line[0].stage)
        wins = not known or (self._rank(line) > self._rank(known) and not self.is_final(known[0]))
        if wins or (seat.used and self.is_same(seat, known[0])):  # the same seat, used by now
            self._lines[seat.stage] = line

    def _rank(self, line: SeatLine) -> tuple[bool, int, int, bytes]:
        seat = line[0]
        inverted = bytes(255 - byte for byte in self.digest(seat))
        return bool(seat.used), seat.number, -len(line), inverted

    def is_same(self, one: StageSeat, other: StageSeat) -> bool:
        return self.digest(one) == self.digest(other)

    def counts(self, seat: StageSeat) -> bool:
        """Whether no other seat of the stage counts instead."""
        known = self.known.get(seat.stage)
        return known is None or self.is_same(seat, known)

    def is_final(self, seat: StageSeat) -> bool:
        return bool(seat.used) or self.digest(seat) in self._final

    def hear(self, peer: PeerId, seats: SeatLine) -> None:
        """Note that a peer that shows this line has decided rounds: it is believed if the seat is its own."""
        if seats and peer == seats[0].member.peer and self.counts(seats[0]) and seats[0].stage in self._lines:
            self._final.add(self.digest(seats[0]))

    def judge(self, hello: Hello) -> None:
        """Check the seat in a greeting, and take it in. `BadPayload` also if another peer has the seat by now."""
        if not hello.seats or hello.seats[0].stage != hello.stage:
            raise BadPayload("greets without the first member of its stage")
        self.add(hello.seats)
        if not self.counts(hello.seats[0]):
            raise BadPayload(
                f"the first member of its stage, {hello.stage}, is another one by now: unless it asks for a stage by "
                "itself, start it with another --state-dir"
            )
