"""`python -m tests.sim.moving`: moves between stages, once for each message at which the mover dies.

The peers are those of `tests.sim.founding`, whose run has begun: they greet, and each is in a stage, with a disk that
outlives it. One is asked to move, fetches the other stage's state from a peer there, and goes at the end of a round. In
one play for each message it is killed, and started again ten seconds later. In further plays both peers of a stage are
asked to move at the same time, with each delay of the second request. In the last plays the pipeline trains, and the
mover is killed at every fifth of its messages: its rounds and microbatches are judged as those of all pipelines.

No move empties a stage. The mover ends in its old or its new stage, greets all others there, and moves if nothing
happens to it. Of two that would empty a stage, one moves. The last line of output is one JSON object.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator

from node.joining.stages import ask_seats, placements
from node.membership.membership import Membership
from node.membership.seats import seat_to_bytes
from node.session.stage_mover import MoveRefused, Rebalancer, StageMover
from protocols.aio import loop_time
from protocols.base import Member, PeerError, PeerId
from tests.sim.arguments import Parser, at_least_one
from tests.sim.founding import FoundingWorld, look
from tests.sim.pipeline_runner import MovingRunner
from tests.sim.process import prepare
from tests.support.checkers import Violation

MOVER, PARTNER = "p3", "p0"  # the peers of stage 0
TARGET = 1
FETCH_REQUESTS, FETCH_SECONDS = 4, 0.5
ROUND_SECONDS = 2.0  # until a leaving peer's round has ended
BEGUN_SECONDS, MOVED_SECONDS, SETTLED_SECONDS = 90.0, 40.0, 20.0
AWAY_SECONDS = 10.0
RULE_ROUND_SECONDS, BALANCED_SECONDS, LEVEL_SECONDS = 30.0, 300.0, 150.0
ROUND_STRIDE = 5  # of the messages of a move with rounds: most of them are of microbatches


class MovingWorld(FoundingWorld):
    """Peers in three stages, all but two of them in stage 0.

    Args:
        dies_at: the mover's message, counted from its request.
        rebalances: whether peers move by the rule.
    """

    def __init__(self, dies_at: int = 0, joiners: int = 3, rebalances: bool = False) -> None:
        super().__init__(joiners=joiners)
        self.strikes_at, self.rebalances = dies_at, rebalances
        self.wanted = {peer: number if number < self.stages else 0 for number, peer in enumerate(self.peers)}
        self.movers: dict[PeerId, StageMover] = {}
        self.wrong: list[Violation] = []
        self.asked_at: int | None = None  # messages of the mover when it was asked
        self.struck = False
        self.moves = self.messages = 0
        self.leaving: set[PeerId] = set()

    def stage_of(self, peer: PeerId) -> int:
        return self.entrances[peer].seat.stage

    def roster(self, stage: int) -> list[Member]:
        """All live peers of a stage: each has been admitted by now."""
        return [self.network.nodes[peer].member for peer in self.alive() if self.stage_of(peer) == stage]

    def _watch(self, peer: PeerId, number: int, way: str, other: PeerId) -> None:
        if peer != MOVER or self.asked_at is None:
            return
        self.messages = number - self.asked_at
        if self.messages == self.strikes_at and not self.struck:
            self.struck = True
            self.network.kill(MOVER)
            asyncio.get_running_loop().call_later(AWAY_SECONDS, self._start, MOVER)

    # -- a peer -------------------------------------------------------------------------------------------------------

    async def _train(self, peer: PeerId) -> None:
        """As in the founding, and move when asked to."""
        await super()._train(peer)
        self.leaving.discard(peer)
        entrance, membership, stage = self.entrances[peer], self.members[peer], self.stage_of(peer)
        target = asyncio.get_running_loop().create_future()
        self.movers[peer] = mover = StageMover(
            self.network.nodes[peer].member,
            stage,
            seats=entrance.seats,
            membership=membership,
            roster=lambda: self.roster(stage),
            is_busy=lambda: "",
            fetch=lambda to: self._fetch(peer, membership, to),
            leave=lambda to: self._leave(peer, membership, target, to),
            say=lambda line: None,
        )
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(mover.run())]
            if self.rebalances:
                view = lambda: placements(entrance.seats, membership, peer, self.round(), {})  # noqa: E731
                rebalancer = Rebalancer(peer, mover, view=view, say=lambda line: None)
                running.append(group.create_task(rebalancer.run()))
            to = await target
            for each in running:
                each.cancel()
        await asyncio.sleep(ROUND_SECONDS)
        disk = self.disks[peer]
        name = entrance.prepared.get(to, to)
        await disk.run(lambda: disk.enter_stage(name, disk.kept[f"stage {name}"]), 0)
        self.moves += 1
        asyncio.get_running_loop().call_soon(self._again, peer)
        await asyncio.sleep(1.0)

    def round(self) -> int:
        """The training round that has ended last."""
        return int(self.now / RULE_ROUND_SECONDS)

    async def _fetch(self, peer: PeerId, membership: Membership, stage: int) -> None:
        entrance, disk = self.entrances[peer], self.disks[peer]
        seat = entrance.seats.known[stage]
        await entrance.keep(entrance.seats.told())
        for _ in range(FETCH_REQUESTS):
            donors = [each.peer for each in membership.contacts() if each.live and each.stage == stage]
            if not donors:
                raise MoveRefused("no peer is left there")
            try:
                member = self.network.nodes[peer].member
                await ask_seats(self.network.transports[peer], donors[0], member, loop_time() + FETCH_SECONDS)
            except PeerError as error:
                raise MoveRefused(error.why) from None
            await asyncio.sleep(FETCH_SECONDS)
        disk.prepare_stage(stage, seat_to_bytes(seat))

    def _leave(self, peer: PeerId, membership: Membership, target: asyncio.Future[int], to: int) -> None:
        stage = self.stage_of(peer)
        self.leaving.add(peer)
        if not [each for each in self.roster(stage) if each.peer not in self.leaving]:
            self.wrong.append(Violation("emptied", peer, 0, f"the last peer of stage {stage} moves"))
        membership.goodbye()
        target.set_result(to)

    # -- the play -----------------------------------------------------------------------------------------------------

    async def begun(self) -> None:
        await self.arrive()
        await look(lambda: set(self.movers) == set(self.peers), BEGUN_SECONDS)
        assert [self.stage_of(peer) for peer in self.peers] == [0, 1, 2, 0]
        await asyncio.sleep(2.0)

    async def move(self) -> None:
        """One peer moves."""
        await self.begun()
        self.asked_at = self.network.nodes[MOVER].messages
        self.movers[MOVER].request(TARGET)
        await look(lambda: self.struck or bool(self.moves), MOVED_SECONDS)
        await asyncio.sleep(SETTLED_SECONDS)
        self.judge({PARTNER})
        self.end()

    async def balance(self) -> None:
        """Peers move by the rule until no stage needs one, and then no more."""
        least = len(self.peers) // self.stages
        await self.arrive()
        await look(
            lambda: len(self.entrances) == len(self.peers) and min(self.counts()) >= least,
            MOVED_SECONDS + BALANCED_SECONDS,
        )
        await asyncio.sleep(LEVEL_SECONDS)  # five times as long as the rule waits between two looks
        if min(self.counts()) < least or self.moves != 2 * (least - 1):
            self.wrong.append(Violation("balance", "", 0, f"{self.counts()} in the stages after {self.moves} moves"))
        self.end()

    def counts(self) -> list[int]:
        """Peers in each stage."""
        stages = [self.stage_of(peer) for peer in self.entrances]
        return [stages.count(stage) for stage in range(self.stages)]

    async def cross(self, delay_seconds: float) -> None:
        """Both peers of a stage are asked to leave it, the second one a moment later."""
        await self.begun()
        self.movers[MOVER].request(TARGET)
        await asyncio.sleep(delay_seconds)
        try:
            self.movers[PARTNER].request(2)
        except MoveRefused as error:
            assert "would be empty" in str(error)
        await asyncio.sleep(MOVED_SECONDS + SETTLED_SECONDS)
        if self.moves != 1:
            self.wrong.append(Violation("one-moves", "", 0, f"{self.moves} of two peers of a stage have moved"))
        self.judge({MOVER, PARTNER})
        self.end()

    def judge(self, stays: set[PeerId]) -> None:
        """`stays` may be in stage 0: one of them has to be."""
        stages = {peer: self.stage_of(peer) for peer in self.peers}
        if not any(stages[peer] == 0 for peer in stays):
            self.wrong.append(Violation("emptied", "", 0, "stage 0 has no peer"))
        if stages[MOVER] not in (0, TARGET) or (not self.struck and self.strikes_at == 0 and not self.moves):
            self.wrong.append(Violation("moves", MOVER, 0, f"it is in stage {stages[MOVER]} after {self.moves} moves"))
        for peer in self.alive():
            seen = {each.peer: each.stage for each in self.members[peer].contacts() if each.live} | {peer: stages[peer]}
            if seen != stages:
                self.wrong.append(Violation("agree", peer, 0, f"sees {seen}, and there is {stages}"))


def play(dies_at: int = 0) -> MovingWorld:
    world = MovingWorld(dies_at)
    world.play(world.move)
    if dies_at and not world.struck:
        world.wrong.append(Violation("missed", MOVER, 0, "the move has fewer messages"))
    return world


def balance(joiners: int, start_seconds: float) -> MovingWorld:
    world = MovingWorld(joiners=joiners, rebalances=True)
    world.start_seconds = start_seconds
    world.play(world.balance)
    return world


def cross(delay_seconds: float) -> MovingWorld:
    world = MovingWorld()
    world.play(lambda: world.cross(delay_seconds))
    return world


def messages() -> int:
    """How many messages the mover sends and receives from the request on until it is in its new stage."""
    world = MovingWorld()
    counts: list[int] = []

    async def move() -> None:
        await world.begun()
        world.asked_at = world.network.nodes[MOVER].messages
        world.movers[MOVER].request(TARGET)
        await look(lambda: bool(world.moves) and world.stage_of(MOVER) == TARGET, MOVED_SECONDS)
        counts.append(world.messages)
        world.end()

    world.play(move)
    return counts[0]


def killed_in_rounds(number: int) -> bool:
    """The same with the rounds and the microbatches of a pipeline. Returns whether the move has so many messages.

    Raises AssertionError if an invariant does not hold, or training does not go on.
    """
    run = MovingRunner((0, 0, 1, 1))
    return run.play(lambda: run.killed_in_move(MOVER, 0, number))


DELAYS_SECONDS = tuple(each / 4 for each in range(25))


def plays(count: int, every: int) -> Iterator[MovingWorld]:
    yield from (play(number) for number in range(1, count + 1, every))
    yield from (cross(delay_seconds) for delay_seconds in DELAYS_SECONDS[::every])


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(prog="python -m tests.sim.moving", description="The mover's death at every message of a move.")
    parser.add_argument("--every", type=at_least_one, default=1, help="play every N-th message only")
    options = parser.parse_args(arguments)
    began, count, found, total, moves = time.monotonic(), messages(), list[str](), 0, 0
    for world in plays(count, options.every):
        total, moves = total + 1, moves + world.moves
        found += [each.detail for each in world.wrong]
    in_rounds = 1
    while killed_in_rounds(in_rounds):
        in_rounds += ROUND_STRIDE * options.every
    for line in found[:20]:
        print(line)
    seconds = round(time.monotonic() - began, 1)
    print(json.dumps({"messages": count, "plays": total, "violations": len(found), "moves": moves,
                      "messages_with_rounds": in_rounds, "real_seconds": seconds}))  # fmt: skip
    return 1 if found else 0


if __name__ == "__main__":
    prepare()
    raise SystemExit(main())
