"""One round of averaging over given vectors, without trainers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from protocols.base import AveragingResult, Deadline, Head, Host, LocalProgress, Member, PeerId, Settings, Vector
from protocols.history.chain import genesis
from protocols.registry import load_averager
from protocols.streams.framing import FramedStream
from protocols.vectors.views import norm
from protocols.wire import Plan
from tests.sim.byzantine.contributors import VOTERS_LIES, ByzantineContributorStream
from tests.sim.byzantine.voters import ByzantineVoterStream
from tests.sim.network import SimNetwork
from tests.sim.pipe import SimPipe
from tests.sim.swarm import SimSwarm

RUN = bytes(32)


@dataclass(slots=True)
class Averaged:
    means: list[AveragingResult]
    results: list[Vector]
    sent_bytes: list[int]
    seconds: float
    peers: tuple[PeerId, ...]


@dataclass(slots=True)
class ButterflyHarness:
    """A group of peers, each with a vector and its claims about that vector.

    Attributes:
        tokens, bandwidths: of each peer.
        lies: peer index -> lie (`tests.sim.byzantine.contributors`). A liar that sends two versions sends the second to
            the last of the other peers.
        declared: peer index -> norm that the peer declares, where it is not that of its vector.
        before: called with the network when all peers have joined.
    """

    vectors: Sequence[Vector]
    tokens: Sequence[int]
    bandwidths: Sequence[float]
    codec: str = "fp32"
    chunk_elements: int = 1 << 18
    protocol: str = "butterfly"
    robust: str = "mean"
    declared: dict[int, float] = field(default_factory=dict)
    lies: dict[int, str] = field(default_factory=dict)
    before: Callable[[SimNetwork], None] = lambda network: None

    def average(self) -> Averaged:
        swarm = SimSwarm()
        return swarm.play(lambda: self._run(swarm))

    async def _run(self, swarm: SimSwarm) -> Averaged:
        network, peers = swarm.network, tuple(f"p{index:02}" for index in range(len(self.vectors)))
        hosts = [swarm.join(peer, self.bandwidths[index]) for index, peer in enumerate(peers)]
        for index in self.lies:
            network.transports[peers[index]].disguise = self._disguise(index, peers, hosts[index])
        self.before(network)
        head = genesis(RUN, "run", tuple(Member(peer) for peer in peers), bytes(32))
        results = [torch.full_like(vector, torch.nan) for vector in self.vectors]
        jobs = [self._member(index, host, head, results[index], swarm.now + 600.0) for index, host in enumerate(hosts)]
        means = await asyncio.gather(*jobs)
        seconds = swarm.now
        await asyncio.sleep(60.0)  # handlers that still serve others end
        return Averaged(list(means), results, [network.nodes[peer].sent_bytes for peer in peers], seconds, peers)

    def _disguise(self, index: int, peers: Sequence[PeerId], host: Host) -> Callable[..., Any]:
        lie, dupes = self.lies[index], [peer for peer in peers if peer != host.me][-1:]

        plans: dict[bytes, Plan] = {}

        def disguise(
            method: str, stream: FramedStream, pipe: SimPipe
        ) -> ByzantineContributorStream | ByzantineVoterStream:
            if lie in VOTERS_LIES:
                return ByzantineVoterStream(stream, lie, host.signer, dupes, plans)
            return ByzantineContributorStream(stream, pipe, lie, host.signer)

        return disguise

    async def _member(self, index: int, host: Host, head: Head, into: Vector, deadline: Deadline) -> AveragingResult:
        vector = self.vectors[index]
        settings = Settings(
            self.codec,
            (len(vector),),
            self.chunk_elements,
            self.bandwidths[index],
            robust=self.robust,
        )
        averager = load_averager(self.protocol)(host, settings)
        tokens = self.tokens[index]
        size = self.declared.get(index, norm([vector]))
        work = LocalProgress(tokens, 0.0, 1.0, size if tokens else 0.0, complete=True)
        async with averager.enter(head, deadline) as session:
            session.offer(work)
            await session.cut.wait()
            return await session.average([vector], work, [into])
