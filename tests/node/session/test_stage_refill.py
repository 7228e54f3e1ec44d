"""An endorsement is a promise, kept over restarts: one seat of a number, and none of a lower one."""

from __future__ import annotations

import asyncio

from node.membership.hello import SeatBase, StageSeat
from node.session.stage_refill import COMING_SECONDS, Promises
from protocols.aio import loop_time
from protocols.base import Member
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
