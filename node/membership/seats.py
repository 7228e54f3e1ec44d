"""Seats: which peer is the first member of each stage, and who may say so.

Each stage has a chain of rounds of its own, and so needs a first roster. The founder signs a seat for the first member
of each stage. While it is away, a peer that holds a seat may sign others: a seat is valid if the founder has signed it,
or the holder of a valid seat. It names its signer by the digest of that seat, so each seat has one line of signers, of
at most as many seats as there are stages.

Of two valid seats in one stage, one counts, the same at all peers that know both: the one that has been used; else the
higher number; else the shorter line of signers; else the lower digest. Once a stage has decided a round, its seat is
final for all peers that know that round.

A stage that has lost all its members gets a seat with a base (`node.session.stage_refill`). Its member signs it, and
other peers endorse it. Of several seats, one that most drivers show counts then (`Seats.settle`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeAlias

import msgpack

from node.membership.hello import MAX_SEATS, SHOWN_BYTES, Endorsement, Hello, SeatBase, ShownSeat, StageSeat
from protocols.base import MAX_STAGES, BadPayload, Member, PeerId, Signer

SeatLine: TypeAlias = tuple[StageSeat, ...]
"""A seat, then its signer's, and so on; the last one is signed by the founder."""

MAX_SEATS_TOLD = 2 * MAX_STAGES
MAX_ENDORSEMENTS_TOLD = 320  # some 40 kB, of the 64 of a message
_SEAT_TAG, _USED_TAG = b"starling seat 1\n", b"starling seat used 1\n"
_ENDORSED_TAG = b"starling seat endorsed 1\n"
MAX_RIVALS = 8


def _plain(seat: StageSeat) -> dict[str, object]:
    found = {
        "stage": seat.stage,
        "first": seat.member.peer,
        "incarnation": seat.member.incarnation,
        "number": seat.number,
        "signature": seat.signature.hex(),
    }
    found |= {name: value.hex() for name, value in (("by", seat.by), ("used", seat.used)) if value}
    for base in seat.base:
        roots = {"parameters_root": base.parameters_root.hex(), "velocity_root": base.velocity_root.hex()}
        found["base"] = {"trained": base.trained, "base_trained": base.base_trained} | roots
    if seat.endorsed:
        found["endorsed"] = {each.peer: each.signature.hex() for each in seat.endorsed}
    return found


def _base_of(plain: dict[str, Any]) -> SeatBase:
    roots = bytes.fromhex(plain["parameters_root"]), bytes.fromhex(plain["velocity_root"])
    return SeatBase(int(plain["trained"]), int(plain["base_trained"]), *roots)


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
                (_base_of(each["base"]),) if "base" in each else (),
                tuple(Endorsement(peer, bytes.fromhex(by)) for peer, by in each.get("endorsed", {}).items()),
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
        self._rivals: dict[int, dict[bytes, SeatLine]] = {}  # stage -> other lines, if one of them has a base
        # whether a seat with a base counts at once: its stage is lost, and most peers have endorsed it
        self.accepts: Callable[[StageSeat], bool] = lambda seat: False
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
            endorsements = sum(len(seat.endorsed) for seat in more.values())
            fits = len(more) <= MAX_SEATS_TOLD and endorsements <= MAX_ENDORSEMENTS_TOLD
            found = more if fits else found
        return tuple(found.values())

    def digest(self, seat: StageSeat) -> bytes:
        return hashlib.sha256(self._signed(seat)).digest()

    def _signed(self, seat: StageSeat) -> bytes:
        fields = [seat.stage, seat.member.peer, seat.member.incarnation, seat.number, *([seat.by] if seat.by else [])]
        for base in seat.base:
            fields += [base.trained, base.base_trained, base.parameters_root, base.velocity_root]
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

    def make_again(self, stage: int, member: Member, base: SeatBase, number: int) -> StageSeat:
        """Sign a seat for oneself, in a stage that has lost all its members. It still has to be endorsed."""
        seat = StageSeat(stage, member, number, b"", b"", b"", (base,))
        return replace(seat, signature=self._signer.sign(self._signed(seat)))

    def endorse(self, seat: StageSeat) -> bytes:
        return self._signer.sign(_ENDORSED_TAG + self.digest(seat))

    def is_endorsed(self, seat: StageSeat, endorsement: Endorsement) -> bool:
        return self._signer.verify(endorsement.peer, _ENDORSED_TAG + self.digest(seat), endorsement.signature)

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
        sound |= {line[0] for rivals in self._rivals.values() for line in rivals.values()}
        for seat in given:
            self._weigh(self._proved(seat, pool, sound))

    def _is_sound_base(self, seat: StageSeat, sound: set[StageSeat]) -> bool:
        """Whether a seat with a base has its member's signature, and those of its endorsers."""
        base, endorsers = seat.base[0], {each.peer for each in seat.endorsed}
        fits = seat.stage < self.stages and seat.number > 0 and not seat.by and base.base_trained <= base.trained
        if not fits or not endorsers or len(endorsers) < len(seat.endorsed):
            return False
        if seat not in sound and not all(self.is_endorsed(seat, each) for each in seat.endorsed):
            return False
        return self._is_sound(seat, seat.member.peer, sound)

    def _proved(self, seat: StageSeat, pool: Mapping[bytes, StageSeat], sound: set[StageSeat]) -> SeatLine:
        """The seat's line. `sound` are the seats whose signatures have been verified."""
        if seat.base:
            if not self._is_sound_base(seat, sound):
                raise BadPayload(f"a seat in stage {seat.stage} with a base, without the signatures that it needs")
            return (seat,)
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
        if known and not self.is_same(seat, known[0]) and (seat.base or known[0].base):
            return self._keep_rival(line)
        wins = not known or (self._rank(line) > self._rank(known) and not self.is_final(known[0]))
        if wins or (seat.used and self.is_same(seat, known[0])):  # the same seat, used by now
            self._lines[seat.stage] = line

    def _keep_rival(self, line: SeatLine) -> None:
        rivals = self._rivals.setdefault(line[0].stage, {})
        rivals[self.digest(line[0])] = line
        for digest in sorted(rivals, key=lambda each: (rivals[each][0].number, each))[:-MAX_RIVALS]:
            del rivals[digest]

    def let_count(self, seat: StageSeat) -> None:
        """Of the valid seats of a stage, let this one count."""
        before, rivals = self._lines[seat.stage], self._rivals.get(seat.stage, {})
        if line := rivals.pop(self.digest(seat), None):
            self._lines[seat.stage] = line
            self._keep_rival(before)

    def settle(self, stage: int, votes: Mapping[bytes, int]) -> bool:
        """Let the seat count that most peers show, the one of the higher number if they are equally many.

        `votes` are numbers of peers by what `shown` says of a seat; b"" stands for a seat without a base. Without votes
        nothing changes. Returns whether something has.
        """
        rivals = [*self._rivals.get(stage, {}).values()]
        if not rivals or not any(votes.values()):
            return False

        def rank(line: SeatLine) -> tuple[int, int, bytes]:
            name = self.digest(line[0])[:SHOWN_BYTES] if line[0].base else b""
            return votes.get(name, 0), line[0].number, self.digest(line[0])

        best = max([self._lines[stage], *rivals], key=rank)
        if best is self._lines[stage] or not rank(best)[0]:
            return False
        self.let_count(best[0])
        return True

    def shown(self) -> tuple[ShownSeat, ...]:
        """The seats with a base that count for this peer, as heartbeats show them."""
        return tuple(
            ShownSeat(stage, self.digest(seat)[:SHOWN_BYTES]) for stage, seat in self.known.items() if seat.base
        )

    def lost_rounds(self) -> dict[int, int]:
        """Stages that have begun again -> the training rounds that were lost by that."""
        return {stage: base.trained - base.base_trained for stage, seat in self.known.items() for base in seat.base}

    def has_rivals(self, stage: int) -> bool:
        return bool(self._rivals.get(stage))

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
        return bool(seat.used or seat.base) or self.digest(seat) in self._final

    def hear(self, peer: PeerId, seats: SeatLine) -> None:
        """Note that a peer that shows this line has decided rounds: it is believed if the seat is its own."""
        if seats and peer == seats[0].member.peer and self.counts(seats[0]) and seats[0].stage in self._lines:
            self._final.add(self.digest(seats[0]))

    def judge(self, hello: Hello) -> None:
        """Check the seat in a greeting, and take it in. `BadPayload` also if another peer has the seat by now."""
        if not hello.seats or hello.seats[0].stage != hello.stage:
            raise BadPayload("greets without the first member of its stage")
        self.add(hello.seats)
        seat, known = hello.seats[0], self.known[hello.seats[0].stage]
        if seat.base and seat.number > known.number and self.accepts(seat):
            self.let_count(seat)
        if not self.counts(hello.seats[0]):
            raise BadPayload(
                f"the first member of its stage, {hello.stage}, is another one by now: unless it asks for a stage by "
                "itself, start it with another --state-dir"
            )
