"""Rounds of Moshpit over given vectors, without trainers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from protocols.base import AveragingResult, Head, Host, LocalProgress, Member, PeerId, RoundKey, Settings, Vector
from protocols.moshpit.averager import Moshpit
from protocols.moshpit.session import MoshpitSession
from tests.sim.network import SimNetwork
from tests.sim.swarm import SimSwarm
from tests.support.disguises import lying

RUN = bytes(range(32))


@dataclass(slots=True)
class RoundResult:
    began: int
    round: int
    group: str
    mean: AveragingResult
    half_exchanges: int
    seconds: float
    states: list[Vector]


@dataclass(slots=True)
class MoshpitHarness:
    """A swarm of Moshpit peers.

    Attributes:
        states: the vectors of each peer, changed in place by its rounds.
        tokens: of each peer, in every round.
        train_seconds: how long each peer trains until its work is complete; 1 by default.
        starts: the first round of each peer; 0 by default.
        codec, chunk_elements, most, announce_limit: as of `Moshpit`.
        claims: the bandwidth in bytes/s that each peer claims; 12.5e6 by default.
        lies: peer index -> lie (`tests.sim.byzantine.contributors`).
        before: called with the network when all peers have joined.
        dress: changes a peer's host.
    """

    states: Sequence[list[Vector]]
    tokens: Sequence[int]
    train_seconds: Sequence[float] = ()
    starts: Sequence[int] = ()
    codec: str = "fp32"
    chunk_elements: int = 1 << 10
    most: int = 8
    announce_limit: int = 64
    claims: Sequence[float] = ()
    lies: dict[int, str] = field(default_factory=dict)
    before: Callable[[SimNetwork], None] = lambda network: None
    dress: Callable[[Host], Host] = lambda host: host
    round_seconds: float = 600.0
    robust: str = "mean"
    histories: dict[PeerId, list[RoundResult]] = field(default_factory=dict)
    network: SimNetwork = field(init=False)
    averagers: dict[PeerId, Moshpit] = field(default_factory=dict)

    @property
    def peers(self) -> list[PeerId]:
        return [f"p{index:02}" for index in range(len(self.states))]

    def play(self, rounds: int = 1) -> dict[PeerId, list[RoundResult]]:
        """Let all peers run `rounds` rounds; returns their results."""
        swarm = SimSwarm()
        self.network = swarm.network
        swarm.play(lambda: self._play(swarm, rounds))
        return self.histories

    async def _play(self, swarm: SimSwarm, rounds: int) -> None:
        hosts = [self.dress(swarm.join(peer)) for peer in self.peers]
        for index, lie in self.lies.items():
            swarm.network.transports[self.peers[index]].disguise = lying(lie, hosts[index].signer)
        for index, host in enumerate(hosts):
            swarm.spawn(host.me, self._peer(index, host, rounds))
        self.before(self.network)
        await asyncio.wait(swarm.running)
        await asyncio.sleep(120.0)  # handlers that still serve others end

    async def _peer(self, index: int, host: Host, rounds: int) -> None:
        loop, peer = asyncio.get_running_loop(), self.peers[index]
        state = self.states[index]
        claim = self.claims[index] if self.claims else 12.5e6
        settings = Settings(self.codec, (len(state[0]),), self.chunk_elements, bandwidth=claim, robust=self.robust)
        averager = self.averagers[peer] = Moshpit(host, settings, self.most, self.announce_limit)
        history = self.histories.setdefault(peer, [])
        number = self.starts[index] if self.starts else 0
        while number < rounds:
            began = loop.time()
            key = RoundKey(RUN, "run", bytes(32), number)
            head = Head(key, (Member(peer),), bytes(32), bytes(32))
            async with averager.enter(head, began + self.round_seconds) as session:
                work = LocalProgress(0, 0.0, 1.0, 1.0)
                session.offer(work)
                work = await self._train(index, session, work)
                into = [torch.full_like(vector, torch.nan) for vector in state]
                mean = await session.average(state, work, into)
                if mean.outcome == "committed":
                    for vector, new in zip(state, into, strict=True):
                        vector.copy_(new)
            result = RoundResult(
                number, session.round, session.group, mean, session.half_exchanges, loop.time() - began, []
            )
            history.append(replace(result, states=[vector.clone() for vector in state]))
            number = session.round + 1

    async def _train(self, index: int, session: MoshpitSession, work: LocalProgress) -> LocalProgress:
        seconds = self.train_seconds[index] if self.train_seconds else 1.0
        try:
            async with asyncio.timeout(seconds):
                await session.cut.wait()
        except TimeoutError:
            work = replace(work, tokens=self.tokens[index], complete=True)
            session.offer(work)
            await session.cut.wait()
            return work
        return replace(work, tokens=self.tokens[index])
