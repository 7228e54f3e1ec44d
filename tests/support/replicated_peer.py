"""A peer with replicated state, over an averager that follows a script."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch

from node.outer.replicated_loop import ReplicatedOuterLoop
from node.outer.sgd import OuterSGD
from node.outer.state import OuterState
from node.reporting.report import RoundReport
from protocols.base import AveragingResult, Head, LocalProgress, Member, Outcome, PeerId, RoundKey, Vector
from protocols.consensus.record import Kind, Record
from protocols.history.chain import Chain
from protocols.wire import ChunkSpan, PartDigest
from tests.sim import loop as simloop
from tests.sim.host import SimClock, SimCompute
from tests.support.fake_rounds import certified
from tests.support.inline_trainer import InlineTrainer
from tests.support.linear_learner import ELEMENTS, LinearLearner

T = TypeVar("T")

ME, OTHER = Member("anna"), Member("bert", 4)
RUN = b"r" * 32
STEP_SECONDS = 0.5
PLAN = bytes(31) + b"p"
"""Digest of every plan: only a round in which nobody worked has none."""


@dataclass
class Script:
    """The course of one round.

    Attributes:
        cut_seconds: when the round is called.
        mean_seconds: the time that averaging takes.
        average: writes the mean, from this peer's vector; by default the mean is this peer's vector.
        end: the result without its record.
        state_root: the record's, where it differs from this peer's.
    """

    outcome: Outcome = Outcome.COMMITTED
    cut_seconds: float = 2.0
    mean_seconds: float = 1.0
    average: Callable[[Vector, Vector], object] = lambda mine, into: into.copy_(mine)
    end: AveragingResult = field(default_factory=lambda: AveragingResult(Outcome.COMMITTED))
    roster: tuple[Member, ...] = (ME, OTHER)
    kind: Kind = Kind.MEAN
    state_root: bytes | None = None


@dataclass
class Seen:
    head: Head
    limit_seconds: float
    offers: list[LocalProgress] = field(default_factory=list)
    mine: Vector = field(init=False)
    work: LocalProgress = field(init=False)
    closed: bool = False

    @property
    def key(self) -> RoundKey:
        return self.head.key


class ScriptedAverager:
    me = ME

    def __init__(self, *scripts: Script) -> None:
        self.scripts = list(scripts)
        self.seen: list[Seen] = []

    @asynccontextmanager
    async def enter(self, head: Head, deadline: float) -> AsyncIterator[ScriptedSession]:
        loop = asyncio.get_running_loop()
        seen = Seen(head, deadline - loop.time())
        self.seen.append(seen)
        session = ScriptedSession(self.scripts.pop(0), seen)
        timer = loop.call_later(session.script.cut_seconds, session.cut.set)
        try:
            yield session
        finally:
            timer.cancel()
            seen.closed = True


class ScriptedSession:
    def __init__(self, script: Script, seen: Seen) -> None:
        self.cut = asyncio.Event()
        self.script, self.seen = script, seen

    def waiting_for(self) -> tuple[PeerId, ...]:
        return ()

    def offer(self, work: LocalProgress) -> None:
        self.seen.offers.append(work)

    async def average(self, mine: Sequence[Vector], work: LocalProgress, into: Sequence[Vector]) -> AveragingResult:
        script, seen = self.script, self.seen
        seen.mine, seen.work = mine[0].clone(), work
        await asyncio.sleep(script.mean_seconds)
        into[0].fill_(math.nan)
        if script.outcome not in (Outcome.COMMITTED, Outcome.SKIPPED):
            return replace(script.end, outcome=script.outcome)
        averaged = script.outcome is Outcome.COMMITTED
        if averaged:
            script.average(mine[0], into[0])
        parts = (PartDigest(bytes(32), (ChunkSpan(1, 1),)),) if averaged else ()
        key, root = seen.key, script.state_root or work.state_root
        record = Record(key.lineage, root, key.round, script.kind, PLAN, parts, script.roster)
        certificate = certified(seen.head, record)
        return replace(script.end, outcome=script.outcome, record=record, certificate=certificate)


class WatchedTrainer(InlineTrainer):
    def __init__(self) -> None:
        super().__init__(LinearLearner(), inner_steps=2, step_seconds=STEP_SECONDS)
        self.written: list[Vector] = []

    @property
    def local(self) -> Vector:
        return self.local_training.learner.vector

    async def write(self, source: Vector, anchor: Vector | None = None, tokens: int = 0) -> None:
        self.written.append(source.clone())
        await super().write(source, anchor, tokens)


class Peer:
    """An outer loop over a scripted averager; `rounds` runs all rounds of the script."""

    def __init__(
        self, *scripts: Script, roster: tuple[Member, ...] = (ME, OTHER), outer: OuterSGD | None = None
    ) -> None:
        self.averager, self.trainer = ScriptedAverager(*scripts), WatchedTrainer()
        self.chain = Chain(RUN, "run", roster, bytes(32))
        self.outer = outer or OuterSGD(0.5, 0.5)
        self.outer_loop = ReplicatedOuterLoop(
            self.chain,
            self.averager,
            state=OuterState(torch.ones(ELEMENTS), self.outer, SimCompute()),
            trainer=self.trainer,
            wall=SimClock().wall,
        )

    async def rounds(self) -> list[RoundReport]:
        await self.outer_loop.settle()
        return [await self.outer_loop.run_round() for _ in list(self.averager.scripts)]

    @property
    def seen(self) -> list[Seen]:
        return self.averager.seen

    @property
    def offered_tokens(self) -> list[int]:
        """Tokens of each round's first offer: the work left over from the rounds before."""
        return [seen.offers[0].tokens for seen in self.seen]

    @property
    def averaged_tokens(self) -> list[int]:
        """Tokens of the work that this peer brought to each round's averaging."""
        return [seen.work.tokens for seen in self.seen]

    def state_roots(self, round_index: int) -> set[bytes]:
        """The state roots in everything that this peer offered and brought in that round."""
        seen = self.seen[round_index]
        return {work.state_root for work in (*seen.offers, seen.work)}


def play(main: Coroutine[Any, Any, T]) -> T:
    return simloop.run(main)


def play_rounds(*scripts: Script) -> tuple[Peer, list[RoundReport]]:
    peer = Peer(*scripts)
    return peer, play(peer.rounds())


def committed(**changes: Any) -> Script:
    return Script(**changes)


def lost(outcome: Outcome = Outcome.UNDECIDED, **changes: Any) -> Script:
    return Script(outcome=outcome, **changes)


def weighed(weight: float, **changes: Any) -> Script:
    """A committed round whose plan gave this peer that weight."""
    return Script(end=AveragingResult(Outcome.COMMITTED, weights={ME.peer: weight}), **changes)


def skipped(**changes: Any) -> Script:
    return Script(outcome=Outcome.SKIPPED, kind=Kind.SKIP, **changes)
