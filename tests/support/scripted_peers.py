"""Peers over averagers that follow a script: one with replicated state, and one with its own state."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Protocol, TypeVar

import torch

from node.outer.independent_loop import IndependentOuterLoop
from node.outer.noloco import NoLoCo
from node.outer.replicated_loop import ReplicatedOuterLoop
from node.outer.round_history import LocalHistory
from node.outer.sketch import Sketch
from node.outer.state import OuterSGD, OuterState
from node.reporting.report import RoundReport
from protocols.base import (
    ALL,
    AveragingResult,
    AveragingSession,
    Contribution,
    Head,
    LocalProgress,
    Member,
    Outcome,
    PeerId,
    RoundKey,
    Vector,
)
from protocols.consensus.record import Kind, Record
from protocols.history.chain import UNSETTLED, Chain
from protocols.sync.snapshot import Snapshots
from protocols.wire import ChunkSpan, PartDigest
from tests.sim import loop as simloop
from tests.sim.host import SimClock, SimCompute
from tests.support.fake_rounds import certified
from tests.support.inline_trainer import ELEMENTS, STEP, InlineTrainer, LinearLearner

T = TypeVar("T")
SessionType = TypeVar("SessionType", bound=AveragingSession, covariant=True)

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

    def session(self, seen: Seen) -> ScriptedSession:
        return ScriptedSession(self, seen)


@dataclass
class Seen:
    head: Head
    limit_seconds: float
    since: float | None = None
    offers: list[LocalProgress] = field(default_factory=list)
    brought: list[Vector] = field(init=False)
    work: LocalProgress = field(init=False)
    closed: bool = False

    @property
    def key(self) -> RoundKey:
        return self.head.key

    @property
    def mine(self) -> Vector:
        return self.brought[0]


class Scripted(Protocol[SessionType]):
    """`Script` or `Exchange`."""

    cut_seconds: float

    def session(self, seen: Seen) -> SessionType: ...


class ScriptedAverager(Generic[SessionType]):
    """Its sessions follow one script each; `seen` is what they received."""

    me = ME

    def __init__(self, *scripts: Scripted[SessionType]) -> None:
        self.scripts = list(scripts)
        self.seen: list[Seen] = []

    @asynccontextmanager
    async def enter(self, head: Head, deadline: float, since: float | None = None) -> AsyncIterator[SessionType]:
        loop, script = asyncio.get_running_loop(), self.scripts.pop(0)
        seen = Seen(head, deadline - loop.time(), since)
        assert seen.limit_seconds > 0
        self.seen.append(seen)
        session = script.session(seen)
        timer = loop.call_at(min(deadline, loop.time() + script.cut_seconds), session.cut.set)
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
        seen.brought, seen.work = [mine[0].clone()], work
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
    def __init__(self, fragments: int) -> None:
        super().__init__(LinearLearner(), inner_steps=2, step_seconds=STEP_SECONDS, fragments=fragments)
        self.written: list[Vector] = []

    @property
    def local(self) -> Vector:
        return self.local_training.learner.vector

    async def write(self, source: Vector, anchor: Vector | None = None, tokens: int = 0, part: slice = ALL) -> None:
        self.written.append(source.clone())
        await super().write(source, anchor, tokens, part)


class Peer:
    """An outer loop over a scripted averager; `rounds` runs all rounds of the script."""

    def __init__(
        self,
        *scripts: Script,
        roster: tuple[Member, ...] = (ME, OTHER),
        root: bytes = UNSETTLED,
        outer: OuterSGD | None = None,
        overlaps: bool = False,
        fragments: int = 1,
    ) -> None:
        self.averager, self.trainer = ScriptedAverager(*scripts), WatchedTrainer(fragments)
        self.chain = Chain(RUN, "run", roster, root, fragments=fragments)
        self.outer = outer or OuterSGD(0.5, 0.5)
        self.outer_loop = ReplicatedOuterLoop(
            self.chain,
            self.averager,
            state=OuterState(torch.ones(ELEMENTS), self.outer, SimCompute()),
            trainer=self.trainer,
            wall=SimClock().wall,
            overlaps=overlaps,
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
    return Script(end=AveragingResult(Outcome.COMMITTED, weights={ME.peer: weight}), **changes)


def skipped(**changes: Any) -> Script:
    return Script(outcome=Outcome.SKIPPED, kind=Kind.SKIP, **changes)


# -- a peer with its own state -----------------------------------------------------------------------------------------

KEY = RoundKey(b"r" * 32, "run", bytes(32), 0)
STEPS = 4
OUTER = OuterSGD(0.5, 0.5, rounds=2, decay=0.5)  # sums of eighths stay exact; the second step is a plain mean
FROM_BERT = {"bert": Contribution(1, 1, ("bert/7",))}


@dataclass
class Exchange:
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
    cut_seconds: float = math.inf

    def session(self, seen: Seen) -> ExchangeSession:
        return ExchangeSession(self, seen)


class ExchangeSession:
    def __init__(self, script: Exchange, seen: Seen) -> None:
        self.cut, self.round, self.group = asyncio.Event(), seen.key.round + script.rounds, "g" * script.rounds
        self.half_exchanges, self.mass_drift = 2, 0.25
        self._seen, self._script = seen, script
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
        self._seen.brought, self._seen.work = [each.clone() for each in mine], work
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
    def __init__(
        self,
        *scripts: Exchange,
        snapshots: Snapshots | None = None,
        rule: NoLoCo | None = None,
        compare: Callable[[Sketch], Mapping[PeerId, Sketch]] = lambda sketch: {},
    ) -> None:
        self.learner = LinearLearner()
        self.trainer = InlineTrainer(self.learner, STEPS, 0.5)
        self.averager = ScriptedAverager(*scripts)
        self.outer_loop = IndependentOuterLoop(
            LocalHistory(ME, KEY),
            self.averager,
            state=OuterState(torch.ones(ELEMENTS), rule or OUTER, SimCompute()),
            trainer=self.trainer,
            wall=SimClock().wall,
            snapshots=snapshots,
            compare=compare,
        )

    @property
    def seen(self) -> list[Seen]:
        return self.averager.seen

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
