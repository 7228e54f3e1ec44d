"""Peers that average given vectors, without trainers: rounds of independent protocols, and a round of the butterfly."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from protocols.base import (
    AveragingResult,
    Contribution,
    Head,
    Host,
    LocalProgress,
    Member,
    Outcome,
    PeerId,
    RoundKey,
    Settings,
    Vector,
)
from protocols.history.chain import genesis
from protocols.registry import load_averager
from protocols.streams.framing import FramedStream
from protocols.vectors.views import norm
from protocols.wire import Plan
from tests.sim.byzantine.contributors import VOTERS_LIES, ByzantineContributorStream
from tests.sim.byzantine.voters import ByzantineVoterStream
from tests.sim.host import SimSigner
from tests.sim.network import SimNetwork
from tests.sim.pipe import SimPipe
from tests.sim.swarm import SimSwarm
from tests.support.disguises import Disguise

RUN = bytes(range(32))
FP32 = Settings("fp32", (), 256)


def at_message(peer: PeerId, number: int, fault: Callable[[SimNetwork], None]) -> Callable[[SimNetwork], None]:
    """Set up a network so that the fault strikes when the peer sends or receives this message, counted from 1."""

    def set_up(network: SimNetwork) -> None:
        def watch(mover: PeerId, message: int, way: str, other: PeerId) -> None:
            if (mover, message) == (peer, number):
                fault(network)

        network.watch = watch

    return set_up


def killing(peer: PeerId, number: int) -> Callable[[SimNetwork], None]:
    return at_message(peer, number, lambda network: network.kill(peer))


def head(number: int, *roster: Member) -> Head:
    return Head(RoundKey(RUN, "run", bytes(32), number), roster, bytes(32), bytes(32))


def flat(state: Sequence[Vector]) -> torch.Tensor:
    return torch.cat(list(state)).double()


@dataclass(frozen=True, slots=True)
class RoundResult:
    """One peer's round. It began at round `number` and ended in `round`; `asked`: when its averaging began."""

    number: int
    round: int
    group: str
    mean: AveragingResult
    early: Mapping[PeerId, Contribution]  # counted while the state was lent
    half_exchanges: int
    mass_drift: float
    began: float
    asked: float
    ended: float
    state: list[Vector]  # a copy of the state after the round

    @property
    def seconds(self) -> float:
        return self.ended - self.began


class AveragingSwarm(SimSwarm):
    """Peers that share no anchor, each with a state of its own, and the results of their rounds, by peer.

    A test may change every attribute before it calls `average`.
    """

    grace_seconds = 120.0  # handlers that still serve others end

    def __init__(
        self,
        make: Callable[[Host, Settings], Any],
        states: list[list[Vector]],
        *,
        tokens: Sequence[int] = (),
        uplinks: Sequence[float] = (),  # bytes/s of each peer, also what it claims
        settings: Settings = FP32,
        digits: int = 2,
        jitter: int | None = None,
        disguises: Mapping[int, Disguise] | None = None,
        dress: Callable[[Host], Host] = lambda host: host,
        joins: Mapping[int, float] | None = None,  # peer -> when it joins, if not at the beginning
    ) -> None:
        super().__init__(jitter=None if jitter is None else random.Random(f"jitter/{jitter}"))
        self.make, self.states, self.settings, self.dress = make, states, settings, dress
        self.count, self.first = len(states), [flat(state) for state in states]
        self.names = [f"p{index:0{digits}}" for index in range(self.count)]
        self.tokens, self.uplinks, self.claims = tokens or [1] * self.count, uplinks, uplinks
        self.disguises, self.joins = disguises or {}, joins or {}
        self.starts: Sequence[int] = [0] * self.count  # the first round of each peer
        self.train_seconds: Sequence[float] = [1.0] * self.count
        self.round_seconds = 600.0
        self.step: Callable[[int, int, list[Vector]], None] = lambda index, number, state: None  # changes the state
        self.before: Callable[[SimNetwork], None] = lambda network: None  # called when all have joined
        self.averagers: dict[PeerId, Any] = {}
        self.results: list[list[RoundResult]] = [[] for _ in self.names]
        self.ended = 0.0  # when all rounds were over
        for index in range(self.count):
            if index not in self.joins:
                self.enter(index)

    def enter(self, index: int) -> None:
        name = self.names[index]
        host = self.dress(self.join(name, self.uplinks[index] if self.uplinks else None))
        if index in self.disguises:
            self.network.transports[name].disguise = self.disguises[index]
        claim = self.claims[index] if self.claims else self.settings.bandwidth
        elements = (len(self.states[index][0]),)
        self.averagers[name] = self.make(host, replace(self.settings, elements=elements, bandwidth=claim))

    def average(self, rounds: int = 1) -> dict[PeerId, list[RoundResult]]:
        """Let all peers run until this round."""
        self.play(lambda: self._average(rounds))
        return self.histories

    @property
    def histories(self) -> dict[PeerId, list[RoundResult]]:
        return dict(zip(self.names, self.results, strict=True))

    async def _average(self, rounds: int) -> None:
        for index in range(self.count):
            if index not in self.joins:
                self.spawn(self.names[index], self._rounds(index, rounds))
        self.before(self.network)
        for index, at in sorted(self.joins.items(), key=lambda item: item[1]):
            await asyncio.sleep(at - self.now)
            self.enter(index)
            self.spawn(self.names[index], self._rounds(index, rounds))
        await asyncio.wait(self.running)
        self.ended = self.now

    async def _rounds(self, index: int, rounds: int) -> None:
        number = self.starts[index]
        while number < rounds:
            number = (await self.round(index, number, self.train_seconds[index])).round + 1

    async def round(self, index: int, number: int = 0, train_seconds: float = 1.0) -> RoundResult:
        state, averager, began = self.states[index], self.averagers[self.names[index]], self.now
        async with averager.enter(head(number, averager.me), began + self.round_seconds) as session:
            session.share(state)
            work = await self._train(index, session, train_seconds)
            early, asked = dict(await session.reclaim()), self.now
            self.step(index, number, state)
            into, before = [torch.full_like(each, torch.nan) for each in state], [each.clone() for each in state]
            mean = await session.average(state, work, into)
            assert all(map(torch.equal, state, before)), "lent, unchanged"
            if mean.outcome is Outcome.COMMITTED:
                self.states[index] = into
        return self.add(index, number, session, mean, early, began, asked)

    def add(
        self,
        index: int,
        number: int,
        session: Any,
        mean: AveragingResult,
        early: Mapping[PeerId, Contribution],
        began: float,
        asked: float,
    ) -> RoundResult:
        counts, copied = (session.half_exchanges, session.mass_drift), [each.clone() for each in self.states[index]]
        result = RoundResult(number, session.round, session.group, mean, early, *counts, began, asked, self.now, copied)
        self.results[index].append(result)
        return result

    async def _train(self, index: int, session: Any, seconds: float) -> LocalProgress:
        session.offer(work := LocalProgress(0, 0.0, 1.0, 1.0))
        work = replace(work, tokens=self.tokens[index])
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await session.cut.wait()
            return work
        session.offer(work := replace(work, complete=True))
        await session.cut.wait()
        return work


def random_swarm(
    make: Callable[[Host, Settings], Any],
    count: int,
    elements: int = 1001,
    *,
    settings: Settings = FP32,
    joins: Mapping[int, float] | None = None,
    **attributes: object,
) -> AveragingSwarm:
    """Peers with different states and tokens, whose rounds last a minute at most."""
    draw = torch.Generator().manual_seed(count)
    states = [[torch.randn(elements, generator=draw) for _ in range(2)] for _ in range(count)]
    tokens = [1000 + 100 * index for index in range(count)]
    swarm = AveragingSwarm(make, states, tokens=tokens, settings=settings, joins=joins)
    vars(swarm).update({"round_seconds": 60.0, "train_seconds": [0.0] * count, **attributes})
    return swarm


@dataclass(slots=True)
class Averaged:
    """The results of a round of the butterfly, in the order of the vectors."""

    means: list[AveragingResult]
    results: list[Vector]
    sent_bytes: list[int]
    seconds: float
    peers: tuple[PeerId, ...]


class ButterflyHarness(AveragingSwarm):
    """A group of peers, each with a vector and its claims about that vector, that average once.

    A liar (`tests.sim.byzantine`) that sends two versions sends the second to the last of the other peers.
    """

    grace_seconds = 60.0

    def __init__(
        self,
        vectors: Sequence[Vector],
        tokens: Sequence[int],
        bandwidths: Sequence[float],
        *,
        codec: str = "fp32",
        chunk_elements: int = 1 << 18,
        protocol: str = "butterfly",
        robust: str = "mean",
        declared: Mapping[int, float] | None = None,  # norm that a peer declares, where it is not that of its vector
        lies: Mapping[int, str] | None = None,
        before: Callable[[SimNetwork], None] = lambda network: None,
    ) -> None:
        settings = Settings(codec, (), chunk_elements, robust=robust)
        states = [[vector] for vector in vectors]
        super().__init__(load_averager(protocol), states, tokens=tokens, uplinks=bandwidths, settings=settings)
        self.declared, self.before = declared or {}, before
        for index, lie in (lies or {}).items():
            self.network.transports[self.names[index]].disguise = self._disguise(index, lie)

    def average(self) -> Averaged:  # type: ignore[override]
        averaged = self.play(self._once)
        averaged.sent_bytes = [self.network.nodes[peer].sent_bytes for peer in self.names]
        return averaged

    async def _once(self) -> Averaged:
        self.before(self.network)
        members, count = [Member(peer) for peer in self.names], range(self.count)
        first = genesis(RUN, "run", tuple(members), bytes(32))
        into = [torch.full_like(vector, torch.nan) for (vector,) in self.states]
        deadline = self.now + self.round_seconds
        means = await asyncio.gather(*(self._member(index, first, into[index], deadline) for index in count))
        return Averaged(list(means), into, [], self.now, tuple(self.names))

    async def _member(self, index: int, first: Head, into: Vector, deadline: float) -> AveragingResult:
        (vector,), tokens = self.states[index], self.tokens[index]
        size = self.declared.get(index, norm([vector]))
        work = LocalProgress(tokens, 0.0, 1.0, size if tokens else 0.0, complete=True)
        async with self.averagers[self.names[index]].enter(first, deadline) as session:
            session.offer(work)
            await session.cut.wait()
            mean: AveragingResult = await session.average([vector], work, [into])
            return mean

    def _disguise(self, index: int, lie: str) -> Disguise:
        me, plans = self.names[index], dict[bytes, Plan]()
        dupes, signer = [peer for peer in self.names if peer != me][-1:], SimSigner(me, self.seed)

        def disguise(method: str, stream: FramedStream, pipe: SimPipe) -> Any:
            if lie in VOTERS_LIES:
                return ByzantineVoterStream(stream, lie, signer, dupes, plans)
            return ByzantineContributorStream(stream, pipe, lie, signer)

        return disguise
