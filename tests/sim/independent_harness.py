"""Rounds of peers that share no anchor, over given states, without trainers."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from protocols.base import (
    AveragingResult,
    Head,
    Host,
    IndependentAverager,
    LocalProgress,
    Outcome,
    RoundKey,
    Settings,
    Vector,
)
from tests.sim.network import SimNetwork
from tests.sim.swarm import SimSwarm

RUN = bytes(32)
Step = Callable[[int, int, list[Vector]], None]
"""Changes a peer's state in place, as its training would: (peer, round, state)."""


def nothing(index: int, number: int, state: list[Vector]) -> None:
    """Training that changes nothing."""


@dataclass(frozen=True, slots=True)
class Came:
    """The result of one peer's round."""

    mean: AveragingResult
    state: list[Vector]
    round: int
    half_exchanges: int


@dataclass
class IndependentHarness(SimSwarm):
    """Peers, each with a state of its own, and the results of their rounds.

    Attributes:
        starts: peer -> its first round, 0 by default.
        work_seconds: peer -> how long it trains in each round.
        joins: peer -> the time at which it joins, 0 by default.
        came: peer -> the results of its rounds.
        ended: the time at which all rounds were over.
    """

    count: int
    make: Callable[[Host, Settings], IndependentAverager]
    elements: int = 1001
    codec: str = "fp32"
    chunk_elements: int = 256
    rounds: int = 1
    deadline_seconds: float = 60.0
    step: Step = nothing
    starts: dict[int, int] = field(default_factory=dict)
    work_seconds: Callable[[int], float] = lambda index: 0.0
    joins: dict[int, float] = field(default_factory=dict)
    came: dict[int, list[Came]] = field(default_factory=lambda: defaultdict(list))
    averagers: dict[int, IndependentAverager] = field(default_factory=dict)
    ended: float = 0.0

    def __post_init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(self.count)
        self.states = [[torch.randn(self.elements, generator=draw) for _ in range(2)] for _ in range(self.count)]
        self.tokens = [1000 + 100 * index for index in range(self.count)]

    def play(self, strike: Callable[[SimNetwork], None] = lambda network: None) -> IndependentHarness:  # type: ignore[override]
        """Run all rounds of all peers; fails on an error in their code, or if tasks or streams are left over."""
        super().play(lambda: self._run(strike))
        return self

    async def finish(self) -> None:
        self.assert_nothing_left()

    async def _run(self, strike: Callable[[SimNetwork], None]) -> None:
        for index in range(self.count):
            if index not in self.joins:
                self._start(index)
        strike(self.network)
        for index, at in sorted(self.joins.items(), key=lambda item: item[1]):
            await asyncio.sleep(at - self.now)
            self._start(index)
        await asyncio.wait(self.running)
        self.ended = self.now
        await asyncio.sleep(self.deadline_seconds + 15.0)

    def _start(self, index: int) -> None:
        host = self.join(f"p{index:02}")
        averager = self.averagers[index] = self.make(host, Settings(self.codec, (self.elements,), self.chunk_elements))
        self.spawn(host.me, self._peer(index, averager))

    async def _peer(self, index: int, averager: IndependentAverager) -> None:
        loop, state = asyncio.get_running_loop(), self.states[index]
        number = self.starts.get(index, 0)
        for _ in range(self.rounds):
            key = RoundKey(RUN, "run", index.to_bytes(32, "big"), number)
            into = [torch.full((self.elements,), torch.nan) for _ in range(2)]
            head, deadline = Head(key, (averager.me,), bytes(32), bytes(32)), loop.time() + self.deadline_seconds
            async with averager.enter(head, deadline) as session:
                session.share(state)
                await asyncio.sleep(self.work_seconds(index))
                session.offer(work := LocalProgress(self.tokens[index], 1.0, 1.0, 1.0, complete=True))
                await session.cut.wait()
                await session.reclaim()
                self.step(index, number, state)
                mean = await session.average(state, work, into)
            if mean.outcome is Outcome.COMMITTED:
                state = into
            number = session.round + 1
            copied = [each.clone() for each in state]
            self.came[index].append(Came(mean, copied, session.round, session.half_exchanges))
