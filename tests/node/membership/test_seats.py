"""Seats of stages that begin again: they need endorsements, and most drivers decide between several."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from node.membership.hello import SHOWN_BYTES, VERSION, Endorsement, Hello, SeatBase, StageSeat
from node.membership.seats import Seats, seat_of, seat_to_bytes
from protocols.base import BadPayload, Member
from tests.sim.host import SimSigner

MANIFEST: Any = SimpleNamespace(stages=(None,) * 3, costs=(1.0,) * 3, run_id=bytes(32).hex(), founder=Member("founder"))
BASE = SeatBase(12, 10, b"p" * 32, b"v" * 32)
STAGE = 1


def seats(peer: str) -> Seats:
    return Seats(MANIFEST, SimSigner(peer, 0))


def first() -> StageSeat:
    return seats("founder").make(STAGE, Member("a"))


def again(peer: str = "b", endorsers: Iterable[str] = ("c", "d"), number: int = 1, base: SeatBase = BASE) -> StageSeat:
    seat = seats(peer).make_again(STAGE, Member(peer, 2), base, number)
    return replace(seat, endorsed=tuple(Endorsement(each, seats(each).endorse(seat)) for each in endorsers))


def shown(seat: StageSeat) -> bytes:
    return seats("x").digest(seat)[:SHOWN_BYTES] if seat.base else b""


def greeting(seat: StageSeat) -> Hello:
    return Hello(VERSION, bytes(32), seat.member, 1, seat.member.peer, (), STAGE, (seat,), b"")


def test_seat_survives_its_file() -> None:
    assert seat_of(seat_to_bytes(again())) == again() and seat_of(seat_to_bytes(first())) == first()


@pytest.mark.parametrize(
    "forged",
    [
        again(endorsers=()),
        again(endorsers=("c", "c")),
        replace(again(), number=2),
        replace(again(), member=Member("e", 2)),
        replace(again(), base=(replace(BASE, base_trained=11),)),
        replace(again(), endorsed=(Endorsement("c", b"x"),)),
        again(base=replace(BASE, base_trained=13)),
    ],
)
def test_seat_without_the_signatures_that_it_needs_is_refused(forged: StageSeat) -> None:
    with pytest.raises(BadPayload, match="without the signatures"):
        seats("x").add([forged])


def test_seat_that_most_drivers_show_counts() -> None:
    mine = seats("x")
    for seat in (first(), again(), again("e", number=2)):
        mine.add([seat])
    assert mine.known[STAGE] == first() and mine.has_rivals(STAGE), "another seat does not count by itself"
    assert not mine.settle(STAGE, {}) and not mine.settle(STAGE, {b"unknown!": 3})
    assert mine.settle(STAGE, {shown(first()): 1, shown(again()): 2}) and mine.known[STAGE] == again()
    assert mine.settle(STAGE, {shown(again()): 1, shown(again("e", number=2)): 1}), "of equally many the higher number"
    assert mine.known[STAGE].number == 2 and mine.lost_rounds() == {STAGE: 2}
    assert mine.settle(STAGE, {b"": 3}) and mine.known[STAGE] == first() and not mine.lost_rounds()


def test_seat_of_a_lost_stage_counts_at_once() -> None:
    mine = seats("x")
    mine.add([first()])
    with pytest.raises(BadPayload, match="the first member of its stage"):
        mine.judge(greeting(again()))
    mine.accepts = lambda seat: True
    mine.judge(greeting(again()))
    assert mine.known[STAGE] == again() and mine.is_final(again())
    with pytest.raises(BadPayload, match="the first member of its stage"):
        mine.judge(greeting(first()))
