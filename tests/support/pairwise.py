"""Gossip or push-sum between given states: with lending peers, with faults, and beside a peer without honest code."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import torch

from protocols.base import AveragingResult, LocalProgress, Outcome, Settings, Stream, Vector
from protocols.pairwise.gossip import Gossip
from protocols.pairwise.push_sum import PushSum
from tests.sim.averaging import AveragingSwarm, flat, head
from tests.sim.faults import Faults
from tests.sim.host import DirectoryFaults
from tests.sim.injection import Injector
from tests.sim.swarm import T
from tests.support.disguises import Disguise

ROUND_SECONDS = 100.0
GRACE_SECONDS = 120.0
DONE = LocalProgress(1, 0.0, 1.0, 0.0, complete=True)


def states(count: int, elements: int, seed: int = 0) -> list[list[Vector]]:
    """Parameters and momentum of each peer, drawn around 1 so that peers differ."""
    generator = torch.Generator().manual_seed(seed)
    return [[torch.randn(size, generator=generator) + 1.0 for size in (elements, elements)] for _ in range(count)]


class PairwiseSwarm(AveragingSwarm):
    """Peers p0, p1, … whose training changes nothing. `run` checks that no task or stream is left over."""

    grace_seconds = 0.0

    def __init__(
        self,
        count: int,
        elements: int = 24,
        codec: str = "fp32",
        *,
        chunk_elements: int = 16,
        schedule: str = "random",
        jitter: int | None = None,
        seed: int = 0,
        disguises: Mapping[int, Disguise] | None = None,
        protocol: Any = Gossip,
    ) -> None:
        super().__init__(
            protocol,
            states(count, elements, seed),
            uplinks=[1e6] * count,
            settings=Settings(codec, (), chunk_elements, schedule=schedule),
            digits=1,
            jitter=jitter,
            disguises=disguises,
        )
        self.round_seconds = ROUND_SECONDS
        self.gossips = list(self.averagers.values())

    async def close(self, index: int, here: Collection[int] | None = None, number: int = 9) -> int:
        """The closing exchanges of a peer, with all peers or those in `here`; returns how many succeeded."""
        state, began, others = self.states[index], self.now, range(self.count) if here is None else here
        async with self.gossips[index].enter(head(number), began + ROUND_SECONDS) as session:
            into = [torch.full_like(each, torch.nan) for each in state]
            mean = await session.close(state, into, [self.names[other] for other in others if other != index])
            if mean.outcome is Outcome.COMMITTED:
                self.states[index] = into
        self.add(index, number, session, mean, {}, began, began)
        return int(session.closing_exchanges)

    async def lending(self, index: int, seconds: float) -> None:
        """A peer that trains for `seconds`, and shares its state meanwhile."""
        async with self.gossips[index].enter(head(0), self.now + ROUND_SECONDS) as session:
            session.share(self.states[index])
            await asyncio.sleep(seconds)
            early = dict(await session.reclaim())
        self.add(index, 0, session, AveragingResult(Outcome.SKIPPED), early, 0.0, self.now)

    @asynccontextmanager
    async def beside_lenders(self, *lenders: int, seconds: float = 60.0) -> AsyncIterator[None]:
        """Inside, these peers train and lend their states; waits at the end until their time is over."""
        tasks = [self.start(index, self.lending(index, seconds)) for index in lenders]
        yield
        await asyncio.gather(*tasks)

    def start(self, index: int, job: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        return self.spawn(self.names[index], job)

    async def settle(self, seconds: float = GRACE_SECONDS) -> None:
        for source, target in list(self.network.links):
            self.network.heal(source, target)
        await asyncio.sleep(seconds)

    async def finish(self) -> None:
        self.assert_nothing_left()

    # -- plays --------------------------------------------------------------------------------------------------------

    def run(self, play: Callable[[], Awaitable[None]], grace_seconds: float = GRACE_SECONDS) -> float:
        """Run `play`, settle, and check that nothing is left; returns when `play` ended."""

        async def main() -> float:
            await play()
            over = self.now
            await self.settle(grace_seconds)
            return over

        return self.play(main)

    def rounds(self, count: int = 1, stagger_seconds: float = 0.0, train_seconds: float = 1.0) -> float:
        """Let all peers run `count` rounds; returns the time at which the last one ended."""

        async def run_peer(index: int) -> None:
            await asyncio.sleep(index * stagger_seconds)
            await self.play_rounds(index, count, train_seconds)

        async def play() -> None:
            await asyncio.wait([self.start(index, run_peer(index)) for index in range(self.count)])

        return self.run(play)

    async def play_rounds(self, index: int, count: int, train_seconds: float = 1.0, first: int = 0) -> None:
        for number in range(first, first + count):
            await self.round(index, number, train_seconds)

    def run_round(self, index: int, *lenders: int, seconds: float = 60.0) -> None:
        """One round of a peer while these lend their states; the others are busy."""

        async def main() -> None:
            async with self.beside_lenders(*lenders, seconds=seconds):
                await self.start(index, self.round(index))

        self.run(main)

    def run_with_faults(
        self, faults: Faults, rounds: int = 1, afterwards: Callable[[Injector], Awaitable[None]] | None = None
    ) -> None:
        """This many rounds of every peer with these faults, then what comes `afterwards`."""

        async def main() -> None:
            injector = Injector(faults, self.network, DirectoryFaults(), lambda peer: None)
            injector.start()
            await asyncio.wait([self.start(index, self.play_rounds(index, rounds)) for index in range(self.count)])
            await asyncio.sleep(5.0)
            if afterwards:
                await afterwards(injector)

        self.run(main)

    @asynccontextmanager
    async def opened(self, method: str, seconds: float = 500.0) -> AsyncIterator[Stream]:
        """A stream from p1 to p0, on which the test plays p1 without any honest code."""
        async with self.network.transports["p1"].open("p0", method, self.now + seconds) as stream:
            yield stream

    # -- results ------------------------------------------------------------------------------------------------------

    def moved(self, index: int) -> bool:
        return not torch.equal(flat(self.states[index]), self.first[index])

    def messages(self, index: int) -> list[str]:
        results = self.results[index]
        whole = [part for each in results for part in (*each.early.values(), *each.mean.contributions.values())]
        return [name for part in whole for name in part.messages]

    def drift(self) -> float:
        """The largest change of any element of the mean over all peers."""
        now = torch.stack([flat(each) for each in self.states]).mean(0)
        return float((now - torch.stack(self.first).mean(0)).abs().max())

    def spread(self) -> float:
        now = torch.stack([flat(each) for each in self.states])
        return float((now - now.mean(0)).norm())

    def weights(self) -> list[float]:
        """Of push-sum."""
        return [each.masses.weight for each in self.gossips]

    def is_conserved(self) -> bool:
        """Of push-sum: whether no share is in transit, and Σw and Σw·z over all peers are what they were."""
        assert not any(each.share_sender.kept for each in self.gossips)
        mass = torch.stack([w * flat(state) for w, state in zip(self.weights(), self.states, strict=True)]).sum(0)
        error = float((mass - torch.stack(self.first).sum(0)).abs().max())
        return abs(sum(self.weights()) - self.count) < 1e-12 and error < 1e-5 * self.count


push_sum_swarm = partial(PairwiseSwarm, protocol=PushSum)
