"""Which stages are lost; and an endorsement is a promise, kept over restarts: of each number one, of no lower one."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from node.membership.hello import (
    UNPLACED,
    VERSION,
    Hello,
    HelloRejected,
    SeatBase,
    SeatsView,
    ShownSeat,
    StageSeat,
)
from node.membership.peer_record import NOTHING_SAID, PeerRecord
from node.session.stage_refill import COMING_SECONDS, NEW_SECONDS, REFUSAL_SECONDS, Promises, StageRefill
from protocols.aio import loop_time
from protocols.base import Member
from protocols.pipeline.balance import PlacedPeer, Placements
from tests.support.simulated import on_virtual_time


def seat(number: int, stage: int = 1) -> StageSeat:
    return StageSeat(stage, Member("a"), number, b"", b"", b"", (SeatBase(5, 5, bytes(32), bytes(32)),))


@on_virtual_time
async def test_promise_is_kept_over_a_restart() -> None:
    disk = [b""]

    async def keep(data: bytes) -> None:
        disk[0] = data

    promises = Promises(b"", keep)
    assert await promises.make(seat(3), "one") and await promises.make(seat(3), "one"), "the same one again"
    for restarted in (promises, Promises(disk[0], keep)):
        assert restarted.highest(1) == 3 and restarted.highest(0) == 0
        assert not await restarted.make(seat(3), "other") and not await restarted.make(seat(2), "one")
    assert await Promises(disk[0], keep).make(seat(4), "other")
    assert await promises.make(seat(1, stage=0), "of another stage")


@on_virtual_time
async def test_another_seat_waits_for_the_member_of_an_endorsed_one() -> None:
    async def keep(data: bytes) -> None:
        await asyncio.sleep(0.0)

    promises, began = Promises(b"damaged", keep), loop_time()
    assert not promises.is_fresh(1)
    await promises.make(seat(1), "one")
    assert promises.is_fresh(1) and not promises.is_fresh(0)
    await asyncio.sleep(COMING_SECONDS)
    assert not promises.is_fresh(1) and loop_time() > began


def refill(*contacts: PeerRecord) -> StageRefill:
    """Of a peer of stage 0 that sees these."""
    seats: Any = SimpleNamespace(stages=2, counts=lambda seat: True, accepts=None)
    membership: Any = SimpleNamespace(contacts=lambda: contacts)
    nothing: Any = None
    return StageRefill(
        Member("x"),
        0,
        seats=seats,
        membership=membership,
        transport=cast("Any", SimpleNamespace(serve=lambda method, handler: None)),
        promises=nothing,
        view=nothing,
        clock=nothing,
        held=nothing,
        base=nothing,
        move=nothing,
        begin=nothing,
        say=nothing,
    )


def contact(live: bool, member: bool, rounds: int = 3, leaving: bool = False) -> PeerRecord:
    hello = Hello(VERSION, bytes(32), Member("a", 4), 1, "a", (), 1, (seat(0),), b"")
    said = replace(NOTHING_SAID, round=rounds, leaving=leaving, placement=(replace(UNPLACED, member=member),))
    return PeerRecord("a", hello=hello, live=live, said=said, lost_at=loop_time())


@pytest.mark.parametrize(
    ("live", "member", "rounds", "leaving", "lost"),
    [
        (True, True, 3, False, False),
        (True, False, 3, False, True),  # it has their rounds, and cannot become a member
        (True, False, 0, False, True),  # a joiner
        (False, True, 3, False, True),
        (False, True, 3, True, False),  # away by its own wish
    ],
)
@on_virtual_time
async def test_stage_without_a_member_is_lost(live: bool, member: bool, rounds: int, leaving: bool, lost: bool) -> None:
    watch = refill(contact(live, member, rounds, leaving))
    watch._note_lost()
    assert watch.lost_seconds(1) == 0.0
    await asyncio.sleep(NEW_SECONDS + 1.0)
    watch._note_lost()
    await asyncio.sleep(100.0)
    assert (watch.lost_seconds(1) >= 100.0) == lost and watch.lost_seconds(0) == 0.0


@pytest.mark.parametrize(
    ("pinned", "replicas", "said"), ((False, 2, "from a backup after 7"), (True, 2, "no peer"), (False, 1, "no peer"))
)
@on_virtual_time
async def test_lost_stage_waits_if_no_holder_of_its_backup_may_go(pinned: bool, replicas: int, said: str) -> None:
    """Peers that were given their stage stay, such as those of `swarm`; the last one of a stage stays, too."""
    watch = refill(contact(live=False, member=True))
    others = [
        PlacedPeer("x", 0, pinned=pinned),
        *(PlacedPeer(str(each), 0, pinned=True) for each in range(replicas - 1)),
    ]
    watch._seats.known = {1: seat(0)}  # type: ignore[misc]
    watch._seats.lost_rounds = dict  # type: ignore[method-assign]
    watch._view = lambda: Placements(bytes(32), 9, (1.0, 1.0), others)
    watch._held = lambda: {1: 7}
    watch._note_lost()
    await asyncio.sleep(100.0)
    assert said in watch.describe()


@pytest.mark.parametrize(
    ("first", "known", "begun"), (("x", 0, "begins"), ("a", 4, "begins"), ("a", 5, "began"), ("b", 0, "began"))
)
@on_virtual_time
async def test_stage_began_again_once_its_first_member_is_there(first: str, known: int, begun: str) -> None:
    """Until then that peer, perhaps the one that says so, ends its last round in another stage."""
    watching = refill(contact(live=True, member=True))
    again = replace(seat(1), member=Member(first, 5))
    seats: Any = watching._seats
    membership: Any = watching._membership
    seats.known, seats.lost_rounds = {1: again}, lambda: {1: 2}
    record = SimpleNamespace(member=Member("a", known))
    membership.contact = lambda peer: record if peer == "a" else None
    assert watching.describe() == f"stage 1 {begun} again after 5 rounds: 2 lost"


@on_virtual_time
async def test_peers_that_refuse_this_one_vote_on_seats() -> None:
    """Drivers vote on the seats of other stages, and the peers of these on the drivers' seat."""
    shown = (ShownSeat(0, b"0 again"), ShownSeat(1, b"1 again"))
    here = contact(live=True, member=True)  # in stage 1, and shows no seat that began again
    refusing = [
        PeerRecord(str(stage), refusal=(HelloRejected("", view=(SeatsView(stage, shown),)), loop_time()))
        for stage in (0, 1, 1)
    ]
    watching = refill(here, *refusing)
    seats: Any = watching._seats
    seats.shown = lambda: ()
    assert watching._count(0) == {b"": 1, b"0 again": 2}
    assert watching._count(1) == {b"": 1, b"1 again": 1}
    await asyncio.sleep(REFUSAL_SECONDS + 1.0)
    assert watching._count(0) == watching._count(1) == {b"": 1}
