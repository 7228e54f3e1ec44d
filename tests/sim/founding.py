"""`python -m tests.sim.founding`: the founding of a run in stages, once for each message at which its founder dies.

The peers are those of a node up to their rounds: they greet, ask for stages, give seats and lose them, with disks that
outlive them. The run begins once a first member of stage 0 sees one of each other stage. In one play for each message
the founder stays dead, in another it comes back after a minute.

Each seat that was used is the only one of its stage, all peers know the same seats, and the run begins by itself within
`BEGINS_SECONDS` of the death. If no other peer had a seat yet, nothing begins before the founder comes back.
The last line of output is one JSON object.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from node.joining.bootstrap import BootstrapServer, RunInfo
from node.joining.stages import StageAssigner
from node.membership.handshake import LocalPeer, LocalStage
from node.membership.hello import StageSeat
from node.membership.membership import Membership
from node.session.stage_entrance import StageEntrance
from protocols.aio import task_group
from protocols.base import PeerId
from tests.sim.arguments import Parser, at_least_one
from tests.sim.host import SimClock, SimSigner
from tests.sim.process import prepare
from tests.sim.swarm import SimSwarm
from tests.sim.transport import SimTransport
from tests.support.checkers import Violation
from tests.support.waiting import now

FOUNDER = "p0"
JOIN_SECONDS = 0.5  # between two joiners
DISK_SECONDS = 0.02
LOOK_SECONDS = 0.25
RETURN_SECONDS = 60.0
BEGINS_SECONDS = 90.0
SETTLED_SECONDS = 20.0
"""After the last peer has begun: peers that lost their stage meanwhile come back in another."""


@dataclass(slots=True)
class Disk:
    """A state directory, as far as stages are concerned."""

    identity: Any
    path: Path = Path("disk")
    kept: dict[str, bytes] = field(default_factory=dict)
    has_begun: bool = False

    def stage(self) -> bytes:
        return self.kept.get("stage", b"")

    def seats(self) -> bytes:
        return self.kept.get("seats", b"")

    def prepare_stage(self, stage: int | str, seat: bytes) -> Path:
        self.kept[f"stage {stage}"] = seat
        return self.path / str(stage)

    def enter_stage(self, stage: int | str, seat: bytes) -> None:
        self.kept["stage"] = seat

    def keep_seats(self, seats: bytes) -> None:
        self.kept["seats"] = seats

    def remember(self, peers: Any) -> None:
        """Of this world, all peers know all others."""

    def leave_stage(self) -> None:
        del self.kept["stage"]

    async def run(self, work: Any, cost_bytes: int) -> Any:
        await asyncio.sleep(DISK_SECONDS)
        result = work()
        await asyncio.sleep(DISK_SECONDS)
        return result


async def look(condition: Callable[[], bool], seconds: float = math.inf) -> None:
    """Wait until a condition holds, or the time is over."""
    end = now() + seconds
    while now() < end and not condition():  # noqa: ASYNC110 - there is no event to wait for
        await asyncio.sleep(LOOK_SECONDS)


class FoundingWorld(SimSwarm):
    """A founder and its joiners. `dies_at`: the founder's message at which it is killed."""

    start_seconds = 1.0  # until a peer's worker runs
    entrance_type = StageEntrance

    def __init__(self, stages: int = 3, joiners: int = 3, dies_at: int = 0, returns: bool = False) -> None:
        super().__init__()
        self.stages, self.dies_at, self.returns = stages, dies_at, returns
        self.peers = tuple(f"p{index}" for index in range(joiners + 1))
        member = SimpleNamespace(peer=FOUNDER, incarnation=0)
        self.manifest: Any = SimpleNamespace(
            stages=(None,) * stages, costs=(1.0,) * stages, run_id=bytes(32).hex(), founder=member
        )
        self.disks = {peer: Disk(SimpleNamespace(peer_id=peer)) for peer in self.peers}
        self.entrances: dict[PeerId, StageEntrance] = {}
        self.members: dict[PeerId, Membership] = {}
        self.used: dict[int, set[bytes]] = {}  # stage -> the seats on which a peer of it has trained
        self.restarts = 0
        self.wanted: dict[PeerId, int] = {}  # the stage that a peer asks for
        self.died_at: float | None = None
        self.founded_by: int | None = None  # the founder's messages when it began its first round
        self.seated_then = False  # whether a joiner was in a stage when the founder died
        self.network.watch = self._watch

    def _watch(self, peer: PeerId, number: int, way: str, other: PeerId) -> None:
        if peer == FOUNDER and number == self.dies_at and self.died_at is None:
            self.died_at = self.now
            self.seated_then = any(self.disks[each].stage() for each in self.peers[1:])
            self.network.kill(FOUNDER)
            if self.returns:
                asyncio.get_running_loop().call_later(RETURN_SECONDS, self._start, FOUNDER)

    def _start(self, peer: PeerId) -> None:
        known = peer in self.network.nodes
        transport = self.network.restart(peer) if known else self.network.join(peer)
        self.spawn(peer, self._life(peer, transport))

    def _again(self, peer: PeerId) -> None:
        self.restarts += 1
        self.network.kill(peer)
        self._start(peer)

    # -- a peer -------------------------------------------------------------------------------------------------------

    async def _life(self, peer: PeerId, transport: SimTransport) -> None:
        me, disk, signer = transport.node.member, self.disks[peer], SimSigner(peer, 0)
        entrance = self.entrance_type(self.manifest, disk, disk, signer)  # type: ignore[arg-type]
        if peer == FOUNDER and not disk.seats():
            await entrance.found(me)
        elif not entrance.kept(None):
            others = [each for each in self.peers if each != peer]
            await entrance.enter(me, self.wanted.get(peer), transport, lambda: others, lambda line: None)
        await asyncio.sleep(self.start_seconds)
        has_begun = lambda: disk.has_begun  # noqa: E731
        stage = LocalStage(entrance.line, entrance.seats, has_begun, has_begun)
        membership = self._membership(peer, transport, stage)
        assigner = StageAssigner(me, entrance.seats, membership, transport, keep=entrance.keep, has_begun=has_begun)
        BootstrapServer(transport, RunInfo(b"", b""), dict, assigner.assign)
        self.entrances[peer], self.members[peer] = entrance, membership
        async with task_group() as group:
            group.create_task(membership.run())
            group.create_task(self._train(peer))
            for each in self.beside(peer):
                group.create_task(each)
            await entrance.until_lost(has_begun, assigner.needed)
            await entrance.leave({})
            asyncio.get_running_loop().call_soon(self._again, peer)
            await asyncio.sleep(1.0)

    def beside(self, peer: PeerId) -> list[Coroutine[Any, Any, None]]:
        """What runs beside a peer's rounds."""
        return []

    def _membership(self, peer: PeerId, transport: SimTransport, stage: LocalStage) -> Membership:
        disk = self.disks[peer]
        me, rounds = transport.node.member, lambda: int(disk.has_begun)
        local = LocalPeer(me, bytes(32), me.incarnation, peer, tuple, rounds, stage)
        others = tuple(each for each in self.peers if each != peer)
        return Membership(transport, local, clock=SimClock(), signer=SimSigner(peer, 0), wanted=lambda: others)

    async def _train(self, peer: PeerId) -> None:
        """Begin once there is a first member of each stage, or once that of stage 0 has begun."""
        seat = self.entrances[peer].seat
        await look(lambda: self._is_due(peer, seat))
        if not self.disks[peer].has_begun:
            self.disks[peer].has_begun = True
            self.used.setdefault(seat.stage, set()).add(self.entrances[peer].seats.digest(seat))
            if peer == FOUNDER and self.founded_by is None:
                self.founded_by = self.network.nodes[peer].messages

    def _is_due(self, peer: PeerId, seat: StageSeat) -> bool:
        first = seat.member.peer == peer
        live = [each for each in self.members[peer].contacts() if each.live and each.hello]
        if seat.stage == 0 and first:
            firsts = {each.stage for each in live if each.hello and each.hello.seats[0].member.peer == each.peer}
            return firsts | {0} == set(range(self.stages))
        began = {each.peer for each in live if each.said.round}
        if not first:
            return seat.member.peer in began
        return any(each.stage == 0 and each.peer in began for each in live)

    # -- the play -----------------------------------------------------------------------------------------------------

    def alive(self) -> list[PeerId]:
        return [peer for peer in self.peers if peer in self.network.nodes and self.network.nodes[peer].process.alive]

    def has_begun(self) -> bool:
        struck = not self.dies_at or self.died_at is not None
        return struck and all(self.disks[peer].has_begun for peer in self.alive())

    async def arrive(self) -> None:
        for peer in self.peers:
            self._start(peer)
            await asyncio.sleep(JOIN_SECONDS)

    async def found(self) -> float:
        """Play until all live peers have begun. Returns how long it took since the founder's death."""
        await self.arrive()
        limit_seconds = BEGINS_SECONDS + (RETURN_SECONDS if self.returns else 0.0)
        await look(self.has_begun, limit_seconds)
        began = self.now
        if self.has_begun() and self.died_at is not None:
            if self.returns:
                await asyncio.sleep(max(0.0, self.died_at + RETURN_SECONDS - self.now))
            await asyncio.sleep(SETTLED_SECONDS)
        self.end()
        return began - (self.died_at or 0.0)

    def end(self) -> None:
        for peer in self.alive():
            self.network.kill(peer)

    def violations(self, seconds: float) -> Iterator[Violation]:
        """`seconds` passed from the founder's death until all others had begun."""
        where = f"the founder died at its message {self.dies_at}" + (" and came back" if self.returns else "")
        if self.dies_at and self.died_at is None:
            yield Violation("missed", "", 0, "the founding has fewer messages")
        for stage, seats in self.used.items():
            if len(seats) > 1:
                yield Violation("one-seat", "", 0, f"stage {stage} has trained on {len(seats)} seats: {where}")
        if not (self.seated_then or self.returns or not self.dies_at):
            if self.used:
                yield Violation("early", "", 0, f"it has begun without a seat: {where}")
            return
        expected = self.peers if self.returns or not self.dies_at else self.peers[1:]
        limit_seconds = BEGINS_SECONDS + (RETURN_SECONDS if self.returns and not self.seated_then else 0.0)
        waits = [peer for peer in expected if not self.disks[peer].has_begun]
        if waits or seconds > limit_seconds:
            yield Violation("progress", "", 0, f"{', '.join(waits)} had not begun after {seconds:.0f} s: {where}")
        elif len({self.known(peer) for peer in expected}) > 1:
            yield Violation("agree", "", 0, f"peers know different seats: {where}")

    def known(self, peer: PeerId) -> tuple[tuple[int, PeerId, int], ...]:
        """The seats that count for a peer: stage, first member, number."""
        seats = self.entrances[peer].seats.known
        return tuple((stage, seat.member.peer, seat.number) for stage, seat in seats.items())


def play(dies_at: int = 0, returns: bool = False) -> tuple[list[Violation], FoundingWorld]:
    world = FoundingWorld(dies_at=dies_at, returns=returns)
    seconds = world.play(world.found)
    return list(world.violations(seconds)), world


def messages() -> int:
    """How many messages the founder sends and receives before its first round."""
    violations, world = play()
    assert not violations and world.founded_by, violations
    return world.founded_by


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(prog="python -m tests.sim.founding", description="The founder's death at every message.")
    parser.add_argument("--every", type=at_least_one, default=1, help="play every N-th message only")
    options = parser.parse_args(arguments)
    began, count, found, restarts = time.monotonic(), messages(), list[str](), 0
    points = range(1, count + 1, options.every)
    for returns in (False, True):
        for number in points:
            violations, world = play(number, returns)
            found += [each.detail for each in violations]
            restarts += world.restarts
    for line in found[:20]:
        print(line)
    seconds = round(time.monotonic() - began, 1)
    print(json.dumps({"messages": count, "plays": 2 * len(points), "violations": len(found), "asked_again": restarts,
                      "real_seconds": seconds}))  # fmt: skip
    return 1 if found else 0


if __name__ == "__main__":
    prepare()
    raise SystemExit(main())
