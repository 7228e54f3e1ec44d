"""`python -m tests.sim.refilling`: a stage loses all its peers and disks, once for each message at which another dies.

The peers are those of `tests.sim.moving`, two in each of three stages, with backups. Both peers of stage 1 are killed
for good. A holder of its backup goes there with a new seat. In one play for each message it is killed on its way, and
comes back. In others former members come back with their disks, or peers are apart for a while, so that a side may have
nobody of stage 1.

one-seat    of the seats of one number in a stage most peers of a side have endorsed at most one (I13)
agree       some time after all is healed, all live peers know the same seats (I13)
refilled    after a refill all members of the stage are on the seat that counts, and have its state (I14)
lost        as many rounds are reported as lost as the seat says, and no more than a backup may be old (I14)
The last line of output is one JSON object.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

from node.joining.stages import placements
from node.membership.hello import StageSeat
from node.membership.membership import Membership
from node.membership.seats import seat_of
from node.session.stage_backups import StageBackups
from node.session.stage_entrance import StageEntrance, home_name
from node.session.stage_mover import MoveRefused
from node.session.stage_refill import Promises, StageRefill
from protocols.base import PeerId
from protocols.pipeline.backups import LOST_SECONDS, RENEW_ROUNDS
from protocols.sync.snapshot_download import StateUnavailable
from tests.sim.arguments import Parser, at_least_one
from tests.sim.founding import Disk, look
from tests.sim.moving import MovingWorld
from tests.sim.process import prepare
from tests.support.checkers import Violation

LOST_STAGE = 1
ROUND_SECONDS = 10.0
COPY_SECONDS = 0.5
REFILL_SECONDS = 300.0  # from the loss until all is well again, as is promised
SETTLED_SECONDS = 60.0
AWAY_SECONDS = 10.0
BACKUP_ROUNDS_OLD = RENEW_ROUNDS + 2
STRIDE = 7
PARTITIONS = 20


class StagesDisk(Disk):
    """A state directory with the states of stages: the name of a stage's directory -> training rounds in it."""

    def __init__(self, identity: Any) -> None:
        super().__init__(identity)
        self.states: dict[str, int] = {}
        self.promises = b""
        self.begun_without_base = False  # as the first member of a seat

    @property
    def home(self) -> str:
        seat = seat_of(self.stage())
        return home_name(seat) if seat else ""

    @property
    def has_begun(self) -> bool:
        return self.home in self.states

    @has_begun.setter
    def has_begun(self, value: bool) -> None:
        if value:
            self.states[self.home] = 0
            seat = seat_of(self.stage())
            if seat and seat.base and seat.member.peer == self.identity.peer_id:
                self.begun_without_base = True

    def stage_home(self, name: int | str) -> Path:
        return Path(str(name))

    def stage_homes(self, stage: int) -> list[Path]:
        return [Path(name) for name in self.states if name.partition("-")[0] == str(stage) and name != self.home]

    def leave_stage(self) -> None:
        self.states.pop(self.home, None)
        super().leave_stage()


class SimEntrance(StageEntrance):
    """With states that are numbers of rounds."""

    async def _backup(self, seat: StageSeat) -> Any:
        disk: Any = self._state
        rounds = disk.states.get(home_name(seat))
        root = str(rounds).encode().ljust(32)
        index = SimpleNamespace(parameters_root=root, velocity_root=root)
        return None if rounds is None else (rounds, SimpleNamespace(index=index))

    async def drop(self, stage: int, kept: str = "") -> None:
        disk: Any = self._state
        async with self._turns[stage]:
            for home in disk.stage_homes(stage):
                if home.name != kept:
                    del disk.states[home.name]

    def _install(self, seat: StageSeat, backup: Any, home: Path) -> None:
        disk: Any = self._state
        disk.states[home.name] = seat.base[0].base_trained


class RefillingWorld(MovingWorld):
    """Two peers in each of three stages."""

    entrance_type = SimEntrance

    def __init__(self, dies_at: int = 0, seed: int = 0) -> None:
        super().__init__(dies_at, joiners=5)
        self.wanted = {peer: number % self.stages for number, peer in enumerate(self.peers)}
        self.disks = {peer: StagesDisk(SimpleNamespace(peer_id=peer)) for peer in self.peers}
        self.random = random.Random(f"refilling/{seed}")
        self.refills: dict[PeerId, StageRefill] = {}
        self.backups: dict[PeerId, StageBackups] = {}
        self.made: list[tuple[PeerId, StageSeat]] = []  # seats that were endorsed by most, and by whom they were taken
        self.lost_at: float | None = None
        self.well_at = 0.0
        self.side: set[PeerId] = set()  # the peers that are apart from the others
        self.first: PeerId | None = None  # that proposed itself first

    def round(self) -> int:
        """Training rounds of the run. While a stage is lost, nothing is trained."""
        if self.lost_at is not None and not self.well_at and self.is_well():
            self.well_at = self.now
        until = self.now if self.lost_at is None else self.lost_at + (self.now - self.well_at if self.well_at else 0.0)
        return int(until / ROUND_SECONDS)

    def roster(self, stage: int) -> Any:
        return [member for member in super().roster(stage) if self.disks[member.peer].has_begun]

    def _leave(self, peer: PeerId, membership: Membership, target: asyncio.Future[int], to: int) -> None:
        """At the end of the round, which takes long where a stage is lost."""
        leave = partial(super()._leave, peer, membership, target, to)
        asyncio.get_running_loop().call_later(3 * ROUND_SECONDS, lambda: target.cancelled() or leave())

    def _watch(self, peer: PeerId, number: int, way: str, other: PeerId) -> None:
        if self.asked_at is None or peer != self.first:
            return
        self.messages = number - self.asked_at
        if self.messages == self.strikes_at and not self.struck:
            self.struck = True
            self.network.kill(peer)
            asyncio.get_running_loop().call_later(AWAY_SECONDS, self._start, peer)

    # -- a peer -------------------------------------------------------------------------------------------------------

    def beside(self, peer: PeerId) -> list[Coroutine[Any, Any, None]]:
        entrance, membership = self.entrances[peer], self.members[peer]
        disk: Any = self.disks[peer]
        seats, stage = entrance.seats, entrance.seat.stage
        view = lambda: placements(seats, membership, peer, self.round() if disk.has_begun else 0, {})  # noqa: E731

        async def fetch(wanted: int, after: int) -> int:
            await asyncio.sleep(COPY_SECONDS)
            live = [each.peer for each in membership.contacts() if each.live and each.stage == wanted]
            rounds = max((self.state(each) for each in live), default=-1)
            if rounds <= after:
                raise StateUnavailable("no peer has it")
            disk.states[home_name(seats.known[wanted])] = rounds
            return rounds

        backups = self.backups[peer] = StageBackups(
            peer,
            stage,
            sizes=[1] * self.stages,
            limit_bytes=1000,
            view=view,
            seat=lambda each: seats.digest(seats.known[each]) if each in seats.known else None,
            find=entrance.backed_up,
            fetch=fetch,
            drop=entrance.drop,
            is_target=lambda each: peer in self.movers and self.movers[peer].target == each,
            announce=lambda held: membership.announce_placement(held=held),
            say=lambda line: None,
        )

        async def keep(promises: bytes) -> None:
            await disk.run(lambda: setattr(disk, "promises", promises), 0)

        async def begin(seat: StageSeat) -> None:
            self.note_endorsed(peer, seat)
            await entrance.begin_again(seat)

        def move(target: int, prepare_: Any) -> None:
            if peer not in self.movers or not disk.has_begun:
                raise MoveRefused("it has just come")
            self.movers[peer].refill(target, prepare_)
            if self.first is None:
                self.first, self.asked_at = peer, self.network.nodes[peer].messages

        refill = self.refills[peer] = StageRefill(
            self.network.nodes[peer].member,
            stage,
            seats=seats,
            membership=membership,
            transport=self.network.transports[peer],
            promises=Promises(disk.promises, keep),
            view=view,
            clock=self.round,
            held=lambda: backups.held,
            base=lambda each: entrance.base(each, self.round()),
            move=move,
            begin=begin,
            say=lambda line: None,
        )
        return [backups.run(), refill.run()]

    def state(self, peer: PeerId) -> int:
        """Training rounds in a peer's state: the latest snapshot of its stage; -1 if it has none."""
        return self.round() // RENEW_ROUNDS * RENEW_ROUNDS if self.disks[peer].has_begun else -1

    def note_endorsed(self, peer: PeerId, seat: StageSeat) -> None:
        for other, made in self.made:
            same = (made.stage, made.number) == (seat.stage, seat.number)
            if same and made != seat and (other in self.side) == (peer in self.side):
                self.wrong.append(Violation("one-seat", peer, 0, f"{seat.stage}/{seat.number} is {other}'s, too"))
        self.made.append((peer, seat))

    # -- the play -----------------------------------------------------------------------------------------------------

    async def begun(self) -> None:
        await self.arrive()
        await look(lambda: {*self.movers} == {*self.peers}, 90.0)
        assert [self.stage_of(peer) for peer in self.peers] == [0, 1, 2] * 2
        await look(lambda: self.held_by(LOST_STAGE) >= 2 and self.round() >= RENEW_ROUNDS + 2, 120.0)

    def held_by(self, stage: int) -> int:
        return sum(stage in each.held for each in self.backups.values())

    def lose(self) -> list[PeerId]:
        """Kill all peers of a stage."""
        lost = [peer for peer in self.alive() if self.stage_of(peer) == LOST_STAGE]
        self.lost_at = self.now
        for peer in lost:
            self.network.kill(peer)
        return lost

    def is_well(self) -> bool:
        """Whether each stage has a live peer with its state on the seat that counts, which all live peers know."""
        alive = self.alive()
        begun = [peer for peer in alive if peer in self.entrances and self.disks[peer].has_begun]
        stages = {self.stage_of(peer) for peer in begun if self.entrances[peer].seats.counts(self.entrances[peer].seat)}
        return len(stages) == self.stages and len({self.known(peer) for peer in alive}) == 1

    async def refill(self) -> None:
        """A stage is lost, and begins again."""
        await self.begun()
        self.lose()
        await look(lambda: self.is_well() and (self.struck or not self.strikes_at), REFILL_SECONDS)
        self.judge_refill(REFILL_SECONDS)
        await asyncio.sleep(SETTLED_SECONDS)
        self.judge_agreement()
        self.end()

    async def come_back(self, after_seconds: float) -> None:
        """The former members come back with their disks, before or after the stage has begun again."""
        await self.begun()
        lost = self.lose()
        await asyncio.sleep(after_seconds)
        for peer in lost:
            self._start(peer)
        await asyncio.sleep(REFILL_SECONDS + SETTLED_SECONDS)
        self.judge_agreement()
        if after_seconds < LOST_SECONDS and self.made:
            self.wrong.append(Violation("refilled", "", 0, "a stage whose members are back has begun again"))
        self.end()

    async def apart(self) -> None:
        """Peers are apart for a while; the stage is on one side, or partly killed meanwhile."""
        await self.begun()
        others = [peer for peer in self.peers if self.stage_of(peer) != LOST_STAGE]
        side = self.random.sample(others, self.random.randint(2, 4))
        if self.random.random() < 0.25:
            side = self.random.sample(self.peers, self.random.randint(1, 5))
        rest = [peer for peer in self.peers if peer not in side]
        self.cut(side, rest)
        self.side = {*side}
        await asyncio.sleep(self.random.uniform(60.0, 400.0))
        self.heal(side, rest)
        self.side = set()
        await asyncio.sleep(4 * SETTLED_SECONDS)
        self.judge_agreement()
        self.end()

    def judge_refill(self, limit_seconds: float) -> None:
        if not self.is_well():
            known = {peer: self.known(peer) for peer in self.alive()}
            said = {peer: self.refills[peer].describe() for peer in self.alive()}
            self.wrong.append(Violation("refilled", "", 0, f"not in {limit_seconds:g} s: {known} {said}"))
            return
        seat = self.entrances[self.alive()[0]].seats.known[LOST_STAGE]
        assert self.lost_at is not None
        lost = seat.base[0].trained - seat.base[0].base_trained
        at_the_loss = int(self.lost_at / ROUND_SECONDS)
        if lost > BACKUP_ROUNDS_OLD or seat.base[0].trained != at_the_loss:
            self.wrong.append(Violation("lost", "", 0, f"{lost} rounds; the stage was lost in round {at_the_loss}"))
        for peer in self.alive():
            if f"{lost} lost" not in self.refills[peer].describe():
                self.wrong.append(Violation("lost", peer, 0, f"says {self.refills[peer].describe()!r}, not {lost}"))

    def judge_agreement(self) -> None:
        for peer, disk in self.disks.items():
            if isinstance(disk, StagesDisk) and disk.begun_without_base:
                self.wrong.append(Violation("base", peer, 0, "began its stage again without the state of the backup"))
        alive = self.alive()
        if len(known := {self.known(peer) for peer in alive}) > 1:
            self.wrong.append(Violation("agree", "", 0, f"peers know different seats: {known}"))
        for peer in alive:
            entrance = self.entrances[peer]
            if not entrance.seats.counts(entrance.seat) or not self.disks[peer].has_begun:
                self.wrong.append(Violation("refilled", peer, 0, f"is on {entrance.seat} of {entrance.seats.known}"))


Play: TypeAlias = Callable[[], RefillingWorld]


def refill(dies_at: int = 0) -> RefillingWorld:
    world = RefillingWorld(dies_at)
    world.play(world.refill)
    if dies_at and not world.struck:
        world.wrong.append(Violation("missed", "", 0, "the refill has fewer messages"))
    return world


def come_back(after_seconds: float) -> RefillingWorld:
    world = RefillingWorld()
    world.play(lambda: world.come_back(after_seconds))
    return world


def apart(seed: int) -> RefillingWorld:
    world = RefillingWorld(seed=seed)
    world.play(world.apart)
    return world


RETURNS_SECONDS = (5.0, 60.0, 100.0, 118.0, 121.0, 124.0, 130.0, 200.0)


def plays(every: int, partitions: int, stride: int = STRIDE, messages: int = 1) -> Iterator[tuple[str, Play]]:
    """Each with its name. `messages` from which on a peer dies."""
    whole = refill()
    yield "nobody dies", lambda: whole
    deaths = range(messages, whole.messages, stride * every)
    yield from ((f"death at message {number}", partial(refill, number)) for number in deaths)
    returns = RETURNS_SECONDS[::every]
    yield from ((f"back after {seconds:g} s", partial(come_back, seconds)) for seconds in returns)
    yield from ((f"apart, seed {seed}", partial(apart, seed)) for seed in range(partitions))


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(prog="python -m tests.sim.refilling", description="Deaths while a lost stage begins again.")
    parser.add_argument("--every", type=at_least_one, default=1, help="play every N-th of the plays only")
    parser.add_argument("--stride", type=at_least_one, default=STRIDE, help="of the messages at which a peer dies")
    parser.add_argument("--from-message", type=at_least_one, default=1, help="the first one at which a peer dies")
    parser.add_argument("--partitions", type=int, default=PARTITIONS, help="seeds of partitions")
    options = parser.parse_args(arguments)
    began, found, total, seats = time.monotonic(), 0, 0, 0
    for name, play in plays(options.every, options.partitions, options.stride, options.from_message):
        world = play()
        total, seats, found = total + 1, seats + len(world.made), found + len(world.wrong)
        wrong = [f"{each.invariant}: {each.detail}" for each in world.wrong]
        print(json.dumps({"play": name, "seats": len(world.made), "violations": wrong}), flush=True)
    seconds = round(time.monotonic() - began, 1)
    print(json.dumps({"plays": total, "violations": found, "seats": seats, "real_seconds": seconds}))
    return 1 if found else 0


if __name__ == "__main__":
    prepare()
    raise SystemExit(main())
