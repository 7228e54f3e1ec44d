"""A peer makes, renews and drops backups of other stages as others come and go, and says so."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from node.session.stage_backups import COMPLAIN_SECONDS, StageBackups
from node.storage.statedir import StateError
from protocols.aio import task_group
from protocols.pipeline.backups import PASS_SECONDS, order
from protocols.pipeline.balance import PlacedPeer, Placements
from protocols.sync.snapshot_download import StateUnavailable
from tests.support.simulated import on_virtual_time

SIZE = 1000


class Swarm:
    """A peer of stage 0 whose backups are of stage 1, and what it sees of the others. `newest`: what stage 1 offers."""

    def __init__(self, outside: int, limit_bytes: float = 10 * SIZE) -> None:
        self.round = self.newest = 3
        self.seat = "first"
        self.failure: Exception | None = None
        self.peers = [PlacedPeer("m", 1), *(PlacedPeer(f"p{number}", 0) for number in range(outside))]
        self.kept: dict[int, int] = {}
        self.target: int | None = None
        self.fetched: list[int] = []
        self.said: list[str] = []
        self.holds = 0
        self.me = order(self.view(), 1)[-1].peer
        self.backups = StageBackups(
            self.me,
            0,
            sizes=(SIZE, SIZE),
            limit_bytes=limit_bytes,
            view=self.view,
            seat=lambda stage: self.seat,
            find=self.find,
            fetch=self.fetch,
            drop=self.drop,
            is_target=lambda stage: stage == self.target,
            announce=self.announce,
            say=self.said.append,
        )

    def view(self) -> Placements:
        return Placements(bytes(32), self.round, (1.0, 1.0), self.peers)

    async def find(self, stage: int) -> int | None:
        assert stage != self.target, "it would delete what was prepared for another seat"
        return self.kept.get(stage)

    async def fetch(self, stage: int, after: int) -> int:
        self.fetched.append(self.round)
        if self.failure:
            raise self.failure
        self.kept[stage] = max(after, self.newest)
        return self.kept[stage]

    async def drop(self, stage: int) -> None:
        self.kept.pop(stage, None)

    def announce(self, held: Mapping[int, int]) -> None:
        self.holds = sum(1 << stage for stage in held)
        self.hold(self.me, self.holds)

    def hold(self, peer: str, holds: int) -> None:
        self.peers = [replace(each, holds=holds) if each.peer == peer else each for each in self.peers]

    async def play(self, *acts: tuple[float, object]) -> None:
        """Run for these seconds, each time after an act."""
        async with task_group() as group:
            running = group.create_task(self.backups.run())
            for seconds, act in acts:
                if callable(act):
                    act()
                await asyncio.sleep(seconds)
            running.cancel()


@on_virtual_time
async def test_backup_is_renewed_every_five_rounds() -> None:
    swarm = Swarm(2)

    def go_on(rounds: int) -> None:
        swarm.round = swarm.newest = rounds

    await swarm.play((5.0, None), *((5.0, partial(go_on, rounds)) for rounds in range(4, 15)))
    assert swarm.fetched == [3, 8, 13] and swarm.holds == 0b10
    assert swarm.backups.describe() == "stage 0 is at 0 other peers; here: stage 1 after 13 rounds"


@on_virtual_time
async def test_backup_on_the_disk_counts_after_a_restart() -> None:
    swarm = Swarm(2)
    swarm.kept[1] = 2
    await swarm.play((5.0, None))
    assert not swarm.fetched and swarm.holds == 0b10


@on_virtual_time
async def test_third_peer_takes_over_and_drops_it_when_two_others_have_it() -> None:
    swarm = Swarm(3)
    first, second = [each.peer for each in order(swarm.view(), 1)][:2]

    def both(holds: int) -> None:
        for peer in (first, second):
            swarm.hold(peer, holds)

    await swarm.play((PASS_SECONDS - 5.0, None))
    assert not swarm.fetched
    await swarm.play((PASS_SECONDS + 5.0, None))
    assert swarm.fetched and swarm.kept == {1: 3}
    await swarm.play((5.0, lambda: both(0b10)))
    assert not swarm.kept and swarm.holds == 0


@on_virtual_time
async def test_stage_that_the_peer_moves_to_is_left_alone_whichever_seat_counts() -> None:
    """Drivers that have not heard of a stage's new seat make the old one count again for a while."""
    swarm = Swarm(2)
    swarm.kept[1] = 2
    await swarm.play((5.0, None))

    def move(seat: str, target: int | None) -> None:
        swarm.seat, swarm.target, swarm.round, swarm.newest = seat, target, 9, 9

    await swarm.play((5.0, partial(move, "second", 1)), (5.0, partial(move, "first", 1)))
    assert swarm.kept == {1: 2} and not swarm.fetched
    await swarm.play((5.0, partial(move, "first", None)))
    assert swarm.fetched == [9]


@on_virtual_time
async def test_failed_download_is_tried_again_and_the_former_backup_stays() -> None:
    swarm = Swarm(2)
    swarm.kept[1], swarm.round = 1, 6
    swarm.failure = StateUnavailable("nobody sends it")
    await swarm.play((10.0, None))
    assert swarm.fetched == [6] and swarm.holds == 0b10 and not swarm.said
    swarm.failure = StateError("cannot write x (No space left on device): free space there")
    await swarm.play((130.0, None))
    assert len(swarm.fetched) == 3 and len(swarm.said) == 1 and "free space there" in swarm.said[0]


@on_virtual_time
async def test_peer_without_room_holds_nothing_and_the_stage_says_so_once() -> None:
    swarm = Swarm(2, limit_bytes=2 * SIZE - 1)
    swarm.peers.append(PlacedPeer("q", 1))
    await swarm.play((2 * COMPLAIN_SECONDS, None))
    assert not swarm.fetched and swarm.holds == 0
    (line,) = swarm.said
    assert "a backup of stage 0" in line and "--backup-bytes" in line
