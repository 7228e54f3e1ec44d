"""The data phase of one clustered round, without a vote: peers on a simulated network, and a coordinator that always
knows which voters are dead.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from protocols.allreduce import clustered_plan as clustered
from protocols.allreduce.all_reduce import DATA
from protocols.allreduce.clustered_all_reduce import ClusteredAllReduce
from protocols.allreduce.clustered_messages import (
    ClusteredPlan,
    ClusterOffer,
    ClusterReady,
    ContributePartial,
    OfferToLead,
)
from protocols.allreduce.clustered_plan import ResolvedClusters
from protocols.allreduce.parts import ChunkPool, DataPhase, PartFormat, ReducedPart
from protocols.allreduce.plan import PlanInputs
from protocols.base import BadPayload, Member, PeerFault, PeerId, RoundKey, Settings, Stream, Vector
from protocols.streams.endpoint import ProtocolEndpoint
from protocols.vectors.codec import codec
from protocols.vectors.coding import carry
from protocols.vectors.views import VectorView, chunk_count
from protocols.wire import Contribute, Offer
from tests.sim.host import SimSigner
from tests.sim.swarm import SimSwarm
from tests.support.disguises import Disguise

KEY = RoundKey(bytes(32), "run", b"l" * 32, 7)
ROOT = b"r" * 32
NORM = 100.0  # declared by all, so that no claim is clipped
MAX_WEIGHT = 1.5  # some members count less than their tokens
LOOK_SECONDS = 0.1
PATIENCE_SECONDS = 2.0


@dataclass
class ClusterPeer:
    exchange: ClusteredAllReduce
    mine: Vector
    into: Vector


class ClusteredSwarm(SimSwarm):
    """Clusters of these sizes, each led by its first peer: "v0" leads "v0.1", "v0.2", …"""

    def __init__(
        self,
        *sizes: int,
        elements: int = 600,
        chunk: int = 50,
        codec_name: str = "fp32",
        robust: str = "mean",
        seed: int = 1,
        idle: Sequence[PeerId] = (),
    ) -> None:
        super().__init__(latency_seconds=0.02, bytes_per_second=1e6)
        self.settings = Settings(codec_name, (elements,), chunk, robust=robust, max_weight=MAX_WEIGHT)
        self.draw = random.Random(seed)
        leads, digits = [f"v{g:0{len(str(len(sizes) - 1))}}" for g in range(len(sizes))], len(str(max(sizes) - 1))
        self.clusters = [
            [f"{lead}.{i:0{digits}}" if i else lead for i in range(size)]
            for lead, size in zip(leads, sizes, strict=True)
        ]
        self.names = [name for each in self.clusters for name in each]
        self.idle, self.peers, self.versions = idle, dict[PeerId, ClusterPeer](), list[ResolvedClusters]()
        self.offers, self.offered = list[tuple[Offer, ...]](), list[ClusterOffer]()
        self.moved = dict[PeerId, int]()  # members that have offered their work to another cluster, too
        self.tokens: Sequence[int] = (64, 128, 256)  # each peer that is not idle has trained one of these numbers
        self.norms = dict[PeerId, float]()  # declared by peers instead of `NORM`
        self.slow = dict[PeerId, float]()  # bytes/s of peers with slow lines
        self.late = dict[PeerId, float]()  # seconds after which peers begin their data phase
        self.disguises = dict[PeerId, Disguise]()
        # any two sets of contributors have different means
        self.vectors = {
            name: torch.randn(elements, generator=torch.Generator().manual_seed(100 * seed + index))
            for index, name in enumerate(self.names)
        }
        for vector in self.vectors.values() if codec_name == "topk" else ():
            carry(codec(codec_name), vector)  # what others get of it

    # -- the round ----------------------------------------------------------------------------------------------------

    def inputs(self) -> PlanInputs:
        one = codec(self.settings.codec)
        return PlanInputs(
            KEY,
            self.settings.elements[0],
            one.encoded_bytes(1 << 20) / (1 << 20),
            robust=self.settings.robust,
            max_weight=self.settings.max_weight,
            grain=one.grain,
            growth=lambda members: one.reduced(members).encoded_bytes(1 << 20) / one.encoded_bytes(1 << 20),
        )

    def _offer(self, name: PeerId, lead: PeerId) -> Offer:
        tokens = 0 if name in self.idle else self.draw.choice(self.tokens)
        made = Offer(Member(name), tokens, self.norms.get(name, NORM), 1.0, True, False, 1e6, ROOT, b"")
        return replace(made, signature=SimSigner(name, self.seed).sign(OfferToLead(KEY, lead, made).signed()))

    def offer(self) -> ClusteredPlan:
        """Let all members and leads offer their work. Returns the plan for all of them."""
        inputs = self.inputs()
        joined = [sorted((*each, *self._moved_to(g))) for g, each in enumerate(self.clusters)]
        self.offers = [tuple(self._offer(name, self.clusters[g][0]) for name in each) for g, each in enumerate(joined)]
        for names, each in zip(self.clusters, self.offers, strict=True):
            made = clustered.make_cluster_offer(inputs, Member(names[0]), each, True)
            signature = SimSigner(made.lead.peer, self.seed).sign(ClusterReady(KEY, made).signed())
            self.offered.append(replace(made, signature=signature))
        plan = clustered.make_clustered_plan(inputs, self.offered, 5.0)
        self.roster = [each.lead for each in self.offered]
        self.versions.append(clustered.resolve_clusters(plan, inputs, self.roster))
        self.inner = [clustered.resolve_cluster(self.versions[0], g, each) for g, each in enumerate(self.offers)]
        return plan

    def _moved_to(self, cluster: int) -> list[PeerId]:
        return [name for name, to in self.moved.items() if to == cluster]

    def begin(self) -> None:
        """Let all peers begin the data phase."""
        plan = self.offer()
        clustered.check_clustered_plan(plan, self.inputs(), self.roster, SimSigner("", self.seed).verify)
        for g, names in enumerate(self.clusters):
            for name in names:
                self._join(name, g, self._as_known_to(name))

    def _join(self, name: PeerId, cluster: int, whole: ResolvedClusters) -> None:
        host = self.join(name, self.slow.get(name))
        if name in self.disguises:
            self.network.transports[name].disguise = self.disguises[name]
        endpoint, into = ProtocolEndpoint(host, self.settings), torch.full_like(self.vectors[name], torch.nan)
        task = DataPhase(
            key=KEY,
            resolved=self.inner[cluster],
            host=host,
            mine=VectorView([self.vectors[name]]),
            into=VectorView([into]),
            format=PartFormat.of(self.settings, codec(self.settings.codec), ChunkPool()),
            silent=self.now + PATIENCE_SECONDS,
            patience_seconds=PATIENCE_SECONDS,
            deadline=self.now + whole.plan.budget_seconds,
            progress=lambda: None,
            clusters=whole,
            cluster=cluster,
        )
        exchange = ClusteredAllReduce(task, endpoint.accounting, lambda part: None)
        self.peers[name] = ClusterPeer(exchange, self.vectors[name], into)

        async def serve(stream: Stream, opening: Contribute | ContributePartial) -> None:
            try:
                await exchange.serve(stream.peer, stream, opening)
            except BadPayload as error:
                exchange.lose(stream.peer, str(error))
                raise

        endpoint.serve(DATA, Contribute, serve)
        endpoint.serve(DATA, ContributePartial, serve)
        self.spawn(name, self._run(name, exchange))
        self.spawn(name, self._watch(exchange))

    async def _run(self, name: PeerId, exchange: ClusteredAllReduce) -> None:
        await asyncio.sleep(self.late.get(name, 0.0))
        await exchange.run()

    async def _watch(self, exchange: ClusteredAllReduce) -> None:
        """Notice members that are lost, as a round does."""
        host = exchange.task.host
        while self.now < exchange.task.deadline:
            version = host.members.version
            live = {member.peer for member in host.members.live()}
            for name in self.names:
                if name not in live:
                    exchange.lose(name, "gone")
            await host.members.changed(version, self.now + LOOK_SECONDS)

    def repair(self, without: Sequence[PeerId]) -> None:
        """What the coordinator does: give the parts of voters that it takes for lost to itself."""
        whole = self.versions[-1]
        leads = [each[0] for each in self.clusters]
        me = next(g for g, lead in enumerate(leads) if lead not in without and self.alive(lead))
        live = {member.peer for member in self.network.contacts.views[leads[me]].live()}
        given = tuple(g if leads[g] in live else me for g in whole.plan.reducers)
        if given != whole.plan.reducers:
            self.reassign(given)

    def reassign(self, reducers: tuple[int, ...]) -> None:
        plan = replace(self.plan, version=self.plan.version + 1, reducers=reducers)
        self.versions.append(clustered.resolve_clusters(plan, self.inputs(), self.roster))
        for name, peer in self.peers.items():
            if self.alive(name):
                peer.exchange.assign(self._as_known_to(name))

    @property
    def plan(self) -> ClusteredPlan:
        """The latest version, as voters have it."""
        plan = self.versions[-1].plan
        assert isinstance(plan, ClusteredPlan)
        return plan

    def _as_known_to(self, name: PeerId) -> ResolvedClusters:
        """The latest version: members of clusters have its outline."""
        whole = self.versions[-1]
        return whole if name in whole.peers else clustered.resolve_outline(whole.outline, self.inputs(), self.roster)

    def alive(self, name: PeerId) -> bool:
        return self.network.nodes[name].process.alive

    async def whole(self, without: Sequence[PeerId] = ()) -> list[PeerId]:
        """Run until all peers that are alive, but for these, hold all parts, or the budget ends. Returns those that do
        not.
        """
        deadline = self.now + self.versions[0].plan.budget_seconds
        needed = [name for name in self.names if name not in without]
        while self.now < deadline - LOOK_SECONDS:
            self.repair(without)
            left = [name for name in needed if self.alive(name) and not self.peers[name].exchange.complete]
            if not left:
                break
            await asyncio.sleep(LOOK_SECONDS)
        return left

    # -- what must hold -----------------------------------------------------------------------------------------------

    @property
    def chunks(self) -> int:
        low_high = zip(self.versions[0].plan.bounds, self.versions[0].plan.bounds[1:], strict=False)
        return sum(chunk_count(high - low, self.settings.chunk_elements) for low, high in low_high)

    def aggregated_chunks(self, name: PeerId) -> int:
        """How many chunks a peer aggregates for its cluster."""
        bounds, size = self.versions[0].plan.bounds, self.settings.chunk_elements
        return sum(
            chunk_count(bounds[part + 1] - bounds[part], size)
            for inner in self.inner
            for part in range(len(inner.plan.reducers))
            if inner.reducer(part) == name
        )

    def named(self, name: PeerId) -> Sequence[PeerFault]:
        """Whom a peer blames."""
        return self.peers[name].exchange._accounting.take()[0]

    def parts(self, name: PeerId) -> list[ReducedPart]:
        held = self.peers[name].exchange.parts
        return [held[index] for index in sorted(held)]

    def check(self, names: Sequence[PeerId]) -> dict[PeerId, int]:
        """Check that these peers hold one mean, which is that of its masks. Returns how many chunks hold whom.

        A peer that had a part before its reducer was lost may hold another result. It would be decided against, and
        fetched by its digest.
        """
        first = self.parts(next(each[0] for each in self.clusters if each[0] in names))
        counted, before = dict.fromkeys(self.names, 0), self.versions[0].plan.reducers
        decoded = [torch.full_like(self.vectors[self.names[0]], torch.nan) for _ in range(2)]
        for name in names:
            pairs = list(zip(first, self.parts(name), strict=True))
            same = [mine.result == theirs.result and mine.members == theirs.members for mine, theirs in pairs]
            for index, (_, theirs) in enumerate(pairs):
                moved = self.versions[-1].plan.reducers[index] != before[index]
                by_former = moved and theirs.done is not None and theirs.done.reducer == before[index]
                assert same[index] or by_former, f"{name}, part {index}"
            if not all(same):
                continue
            for part in self.parts(name):
                part.decode(VectorView([decoded[0]]))
            for part in first:
                part.decode(VectorView([decoded[1]]))
            assert torch.equal(*decoded), f"{name} holds other bits"
            exchange = self.peers[name].exchange
            if not exchange.restarted:
                assert torch.equal(self.peers[name].into, decoded[0]), f"{name} decoded other bits"
        for part in first:
            earlier = b""
            for index, (mask, members) in enumerate(zip(part.masks, part.members, strict=True)):
                self.versions[0].check_chunk(mask, members, earlier)
                earlier = members
                self.check_chunk(part, index, clustered.member_masks(members), decoded[1], counted)
        return counted

    def check_chunk(
        self, part: ReducedPart, index: int, masks: Sequence[int], mean: Vector, counted: dict[PeerId, int]
    ) -> None:
        low, high = part.elements(index)
        weights, held = dict[PeerId, float](), list[PeerId]()
        for inner, mask in zip(self.inner, masks, strict=True):
            for bit, name in enumerate(inner.peers):
                if mask >> bit & 1:
                    weights[name], counted[name] = inner.weights[bit], counted[name] + 1
                    held.append(name)
        if self.settings.robust != "mean":
            return
        total = math.fsum(weights.values())
        wanted = sum((self.vectors[name][low:high].double() * (weights[name] / total) for name in held), torch.zeros(1))
        got, scale = mean[low:high].double(), float(wanted.abs().max()) if held else 1.0
        tolerance = 1e-5 if self.settings.codec == "fp32" else 0.05
        assert float((got - wanted).abs().max()) <= tolerance * scale, f"chunk {index} of [{part.low}, {part.high})"
