"""Gossip or push-sum between given states, without trainers, under faults."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Collection, Coroutine
from dataclasses import dataclass, field
from typing import Any

import torch

from protocols.base import AveragingResult, Contribution, Head, LocalProgress, PeerId, RoundKey, Settings, Vector
from protocols.pairwise.gossip import Gossip
from tests.sim.swarm import SimSwarm, T

RUN = bytes(range(32))
ROUND_SECONDS = 100.0
GRACE_SECONDS = 120.0
DONE = LocalProgress(1, 0.0, 1.0, 0.0, complete=True)


def states(count: int, elements: int, seed: int = 0) -> list[list[Vector]]:
    """Parameters and momentum of each peer, drawn around 1 so that peers differ."""
    generator = torch.Generator().manual_seed(seed)
    return [[torch.randn(size, generator=generator) + 1.0 for size in (elements, elements)] for _ in range(count)]


def flat(state: list[Vector]) -> torch.Tensor:
    return torch.cat(state).double()


def head(number: int, run: bytes = RUN) -> Head:
    return Head(RoundKey(run, "run", bytes(32), number), (), bytes(32), bytes(32))


@dataclass
class RoundResult:
    mean: AveragingResult
    early: dict[PeerId, Contribution]
    half_exchanges: int
    mass_drift: float
    began: float
    asked: float
    ended: float


@dataclass
class GossipHarness(SimSwarm):
    """Peers p0, p1, … on a network of their own. `run` checks that no task or stream is left over."""

    count: int
    elements: int = 24
    codec: str = "fp32"
    chunk_elements: int = 16
    schedule: str = "random"
    uplink: float = 1e6
    jitter: int | None = None
    seed: int = 0
    disguises: dict[int, Callable[..., Any]] = field(default_factory=dict)
    protocol: Any = Gossip

    def __post_init__(self) -> None:
        jitter = random.Random(f"jitter/{self.jitter}") if self.jitter is not None else None
        super().__init__(jitter=jitter)
        self.names = [f"p{index}" for index in range(self.count)]
        self.state = states(self.count, self.elements, self.seed)
        self.first = [flat(each) for each in self.state]
        self.results: list[list[RoundResult]] = [[] for _ in self.names]
        self.gossips: list[Any] = []
        for index, name in enumerate(self.names):
            host = self.join(name, self.uplink)
            if index in self.disguises:
                self.network.transports[name].disguise = self.disguises[index]
            settings = Settings(self.codec, (self.elements,), self.chunk_elements, self.uplink, schedule=self.schedule)
            self.gossips.append(self.protocol(host, settings))

    async def round(self, index: int, number: int = 0, train_seconds: float = 1.0) -> RoundResult:
        """One round of a peer whose training changes nothing."""
        loop, state = asyncio.get_running_loop(), self.state[index]
        began = loop.time()
        async with self.gossips[index].enter(head(number), began + ROUND_SECONDS) as session:
            session.share(state)
            session.offer(DONE)
            await session.cut.wait()
            await asyncio.sleep(train_seconds)
            early, asked = dict(await session.reclaim()), loop.time()
            into = [torch.full_like(each, torch.nan) for each in state]
            before = [each.clone() for each in state]
            mean = await session.average(state, DONE, into)
            assert all(torch.equal(one, other) for one, other in zip(state, before, strict=True)), "lent, unchanged"
            if mean.outcome == "committed":
                self.state[index] = into
        result = RoundResult(mean, early, session.half_exchanges, session.mass_drift, began, asked, loop.time())
        self.results[index].append(result)
        return result

    async def close(self, index: int, here: Collection[int] | None = None, number: int = 9) -> int:
        """The closing exchanges of a peer, with all peers or those in `here`; returns how many succeeded."""
        loop, state = asyncio.get_running_loop(), self.state[index]
        began, others = loop.time(), range(self.count) if here is None else here
        async with self.gossips[index].enter(head(number), began + ROUND_SECONDS) as session:
            into = [torch.full_like(each, torch.nan) for each in state]
            mean = await session.close(state, into, [self.names[other] for other in others if other != index])
            if mean.outcome == "committed":
                self.state[index] = into
        result = RoundResult(mean, {}, session.half_exchanges, session.mass_drift, began, began, loop.time())
        self.results[index].append(result)
        return int(session.closing_exchanges)

    async def lending(self, index: int, seconds: float) -> None:
        """A peer that trains for `seconds`, and shares its state meanwhile."""
        loop = asyncio.get_running_loop()
        async with self.gossips[index].enter(head(0), loop.time() + ROUND_SECONDS) as session:
            session.share(self.state[index])
            await asyncio.sleep(seconds)
            early = dict(await session.reclaim())
        now = loop.time()
        mean = AveragingResult("skipped")  # type: ignore[arg-type]
        self.results[index].append(RoundResult(mean, early, session.half_exchanges, session.mass_drift, 0.0, now, now))

    def start(self, index: int, job: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        return self.spawn(self.names[index], job)

    async def settle(self, seconds: float = GRACE_SECONDS) -> None:
        for source, target in list(self.network.links):
            self.network.heal(source, target)
        await asyncio.sleep(seconds)

    def run(self, play: Callable[[], Awaitable[None]], grace_seconds: float = GRACE_SECONDS) -> float:
        """Run `play`, settle, and check that nothing is left; returns when `play` ended."""

        async def main() -> float:
            await play()
            over = self.now
            await self.settle(grace_seconds)
            return over

        return self.play(main)

    async def finish(self) -> None:
        self.assert_nothing_left()

    def rounds(self, count: int = 1, stagger_seconds: float = 0.0, train_seconds: float = 1.0) -> float:
        """Let all peers run `count` rounds; returns the time at which the last one ended."""

        async def run_peer(index: int) -> None:
            await asyncio.sleep(index * stagger_seconds)
            for number in range(count):
                await self.round(index, number, train_seconds)

        async def play() -> None:
            await asyncio.wait([self.start(index, run_peer(index)) for index in range(self.count)])

        return self.run(play)

    # -- results ------------------------------------------------------------------------------------------------------

    def moved(self, index: int) -> bool:
        return not torch.equal(flat(self.state[index]), self.first[index])

    def messages(self, index: int) -> list[str]:
        results = self.results[index]
        whole = [part for each in results for part in (*each.early.values(), *each.mean.contributions.values())]
        return [name for part in whole for name in part.messages]

    def drift(self) -> float:
        """The largest change of any element of the mean over all peers."""
        now = torch.stack([flat(each) for each in self.state]).mean(0)
        return float((now - torch.stack(self.first).mean(0)).abs().max())

    def spread(self) -> float:
        now = torch.stack([flat(each) for each in self.state])
        return float((now - now.mean(0)).norm())
