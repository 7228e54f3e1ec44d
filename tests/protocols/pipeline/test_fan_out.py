"""In a large run a driver uses a few replicas of each stage, and its drivers together use all of them."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

from protocols.base import Member
from protocols.pipeline.admission import StepAdmission
from protocols.pipeline.fan_out import FAN_OUT, FanOut
from protocols.pipeline.leases import LeaseQueue
from protocols.pipeline.messages import StageRequest
from protocols.pipeline.routing import ReplicaRouter
from tests.support.simulated import on_virtual_time

REPLICAS = tuple(f"replica {number}" for number in range(32))


def test_drivers_use_few_replicas_and_all_are_used() -> None:
    """Each of 32 drivers uses 8 of 32; one that leaves changes the choice of its own drivers only, by one replica."""
    fan_outs = {f"driver {number}": FanOut(f"driver {number}") for number in range(32)}
    before = {driver: set(each.of(REPLICAS, lambda peer: False)) for driver, each in fan_outs.items()}
    used = Counter(peer for each in before.values() for peer in each)
    assert {len(each) for each in before.values()} == {FAN_OUT}
    assert set(used) == set(REPLICAS) and max(used.values()) <= 2 * FAN_OUT, used
    for driver, each in fan_outs.items():
        after = set(each.of(REPLICAS[1:], lambda peer: False))
        assert len(before[driver] - after) == (REPLICAS[0] in before[driver])


def test_few_replicas_are_all_used() -> None:
    assert FanOut("driver").of(REPLICAS[:FAN_OUT], lambda peer: True) == REPLICAS[:FAN_OUT]


def test_replica_that_fails_gives_its_place_to_another() -> None:
    """While it is left alone after several failures in a row; then it is tried again."""
    fan_out, router = FanOut("driver"), ReplicaRouter(random.Random(0))

    def used(now: float) -> tuple[str, ...]:
        return fan_out.of(REPLICAS, lambda peer: router.is_given_up(peer, now))

    first = used(0.0)
    for _ in range(2):
        router.failed(first[0], 0.0)
    assert used(0.0) == first
    router.failed(first[0], 0.0)
    assert first[0] not in used(0.0) and len({*used(0.0)} - {*first}) == 1
    assert used(60.0) == first


@on_virtual_time
async def test_places_are_shared_among_the_drivers_that_ask() -> None:
    """Of 64 live drivers 8 use this replica: each may hold two places of a step of 8, not one."""
    admission = StepAdmission(8, lambda kind, lease: None)
    admission.open()
    queue = LeaseQueue(admission, lambda: 64)
    driver = Member("driver")
    requests = [StageRequest(bytes(32), "stage", driver, Member("me"), number, 0) for number in (1, 2)]
    assert all([await queue.granted(request) for request in requests])
    assert await asyncio.wait_for(queue.granted(requests[0]), 60.0) is None
