"""A peer with its own state, whose averaging sessions follow a script."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import torch

from node.outer.independent_loop import IndependentOuterLoop
from node.outer.noloco import NoLoCo
from node.outer.round_history import LocalHistory
from node.outer.sgd import OuterSGD
from node.outer.sketch import Sketch
from node.outer.state import OuterState
from node.reporting.report import RoundReport
from protocols.base import (
    AveragingResult,
    Contribution,
    Deadline,
    Head,
    LocalProgress,
    Member,
    Outcome,
    PeerId,
    RoundKey,
    Vector,
)
from protocols.sync.snapshot import Snapshots
from tests.sim import loop as simloop
from tests.sim.host import SimClock, SimCompute
from tests.support.inline_trainer import InlineTrainer
from tests.support.linear_learner import ELEMENTS, STEP, LinearLearner

ME = Member("anna", 2)
KEY = RoundKey(b"r" * 32, "run", bytes(32), 0)
STEPS = 4
OUTER = OuterSGD(0.5, 0.5, rounds=2, decay=0.5)  # sums of eighths stay exact; the second step is a plain mean
FROM_BERT = {"bert": Contribution(1, 1, ("bert/7",))}


@dataclass
class Script:
    """What happens in one round.

    Attributes:
        meanwhile: changes the state while it is lent; returns the contributions that it then holds.
        average: writes the mean, from this peer's vectors; None: there is no other peer.
        rounds: how many rounds the others are ahead.
        hurried: the others call the round after this peer's first step.
    """

    meanwhile: Callable[[Sequence[Vector]], Mapping[PeerId, Contribution]] = lambda state: {}
    average: Callable[[Sequence[Vector], Sequence[Vector]], object] | None = None
    rounds: int = 0
    hurried: bool = False


@dataclass
class ScriptedAverager:
    """An averager, and each of its sessions."""

    scripts: list[Script]
    me: Member = ME
    heads: list[Head] = field(default_factory=list)
    works: list[LocalProgress] = field(default_factory=list)
    brought: list[list[Vector]] = field(default_factory=list)
    limits_seconds: list[float] = field(default_factory=list)

    @asynccontextmanager
    async def enter(self, head: Head, deadline: Deadline) -> AsyncIterator[ScriptedSession]:
        loop = asyncio.get_running_loop()
        assert deadline > loop.time()
        self.limits_seconds.append(deadline - loop.time())
        self.heads.append(head)
        session = ScriptedSession(self, self.scripts.pop(0), head.key.round)
        late = loop.call_at(deadline, session.cut.set)
        yield session
        late.cancel()


class ScriptedSession:
    def __init__(self, averager: ScriptedAverager, script: Script, number: int) -> None:
        self.cut, self.round, self.group = asyncio.Event(), number + script.rounds, "g" * script.rounds
        self.half_exchanges, self.mass_drift = 2, 0.25
        self._averager, self._script = averager, script
        self._lent: Sequence[Vector] = ()
        self._averaged_early = False

    def offer(self, work: LocalProgress) -> None:
        if work.complete or (self._script.hurried and work.tokens):
            self.cut.set()

    def waiting_for(self) -> tuple[PeerId, ...]:
        return ()

    def share(self, state: Sequence[Vector]) -> None:
        self._lent = state

    async def reclaim(self) -> Mapping[PeerId, Contribution]:
        assert self.cut.is_set(), "it is lent as long as its peer trains"
        lent, self._lent = self._lent, ()
        held = self._script.meanwhile(lent)
        self._averaged_early = bool(held)
        return held

    async def average(self, mine: Sequence[Vector], work: LocalProgress, into: Sequence[Vector]) -> AveragingResult:
        self._averager.works.append(work)
        self._averager.brought.append([each.clone() for each in mine])
        if self._script.average is None:
            for each in into:
                each.fill_(math.nan)  # undefined
            # A real session also counts what was averaged while the state was lent.
            return AveragingResult(
                Outcome.COMMITTED if self._averaged_early else Outcome.SKIPPED,
                weights={"bert": 0.5} if self._averaged_early else {},
            )
        self._script.average(mine, into)
        return AveragingResult(Outcome.COMMITTED, contributions={"cora": Contribution(1, 1, ("cora/1",))}, bytes_sent=7)


class IndependentPeer:
    """A peer with its learner, averager and outer loop."""

    def __init__(
        self,
        *scripts: Script,
        snapshots: Snapshots | None = None,
        rule: NoLoCo | None = None,
        compare: Callable[[Sketch], Mapping[PeerId, Sketch]] = lambda sketch: {},
    ) -> None:
        self.learner = LinearLearner()
        self.trainer = InlineTrainer(self.learner, STEPS, 0.5)
        self.averager = ScriptedAverager(list(scripts))
        self.outer_loop = IndependentOuterLoop(
            LocalHistory(ME, KEY),
            self.averager,
            state=OuterState(torch.ones(ELEMENTS), rule or OUTER, SimCompute()),
            trainer=self.trainer,
            wall=SimClock().wall,
            snapshots=snapshots,
            compare=compare,
        )

    async def rounds(self, count: int = 1) -> list[RoundReport]:
        await self.outer_loop.settle()
        return [await self.outer_loop.run_round() for _ in range(count)]

    def play(self, rounds: int = 1) -> list[RoundReport]:
        return simloop.run(self.rounds(rounds))


def stepped(rounds: int, start: float = 1.0) -> tuple[float, float]:
    """A parameter and its momentum after this many rounds alone."""
    theta, velocity = torch.full((1,), start), torch.zeros(1)
    for number in range(rounds):
        OUTER.at(number).step(theta, velocity, torch.full((1,), STEPS * STEP))
    return float(theta), float(velocity)


def holds(vector: Vector, value: float) -> bool:
    return bool((vector == value).all())


def half(mine: Sequence[Vector], into: Sequence[Vector]) -> None:
    """Average with a partner whose state is zero."""
    for source, target in zip(mine, into, strict=True):
        torch.mul(source, 0.5, out=target)
