"""Peers with a chain, a state and state sync on a simulated network, and made-up rounds for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from node.outer.outer_loop import RoundResult
from node.outer.overlap import Overlap
from node.outer.replicated_loop import ReplicatedOuterLoop
from node.outer.state import OuterSGD, OuterState
from node.reporting.report import RoundReport
from node.tasks.paced import Paced
from protocols import wire
from protocols.aio import Gate
from protocols.allreduce.parts import ReducedPart
from protocols.base import (
    RUN_SCOPE,
    AveragingResult,
    BadPayload,
    Contribution,
    Deadline,
    Host,
    LocalProgress,
    Member,
    Outcome,
    PeerError,
    PeerGone,
    PeerId,
    Settings,
    Vector,
)
from protocols.blobs.parts import PartCache, PartDownload, PartStore
from protocols.consensus.record import ClusterDigest, Kind, Record
from protocols.history.chain import UNSETTLED, Chain, DecidedRound, follow
from protocols.history.fork_choice import Branch
from protocols.streams.endpoint import RoundAccounting
from protocols.sync.chain_sync import ChainSync
from protocols.sync.snapshot import MemoryBuffer, Snapshots
from protocols.vectors.codec import codec
from protocols.vectors.views import VectorView
from tests.sim.host import sim_host
from tests.sim.swarm import SimSwarm
from tests.support.disguises import Send, sending
from tests.support.fake_rounds import RUN, SEED, certified
from tests.support.inline_trainer import InlineTrainer

CODEC = "int8"
TOKENS = 100
OUTER = OuterSGD(0.7, 0.9, rounds=8, decay=1.0)


class Observer:
    """An averager that only has a member id."""

    def __init__(self, me: Member) -> None:
        self.me = me


class SyncPeer:
    """One peer. It starts from `anchor`; a newcomer has no anchor."""

    def __init__(self, swarm: SyncCluster, name: PeerId, anchor: Vector | None, incarnation: int = 0) -> None:
        self.swarm, self.me = swarm, Member(name, incarnation)
        self.transport = swarm.network.join(name)
        self.host = sim_host(swarm.network, self.transport, SEED, {})
        self.settings = Settings(CODEC, (swarm.elements,), swarm.chunk_elements, incarnation=incarnation)
        self.chain = Chain(swarm.run, swarm.scope, swarm.founders, swarm.root)
        gate, rounds, store = Gate(), swarm.store_rounds, None
        if rounds:
            store = PartStore(MemoryBuffer, self.host.compute, gate, most_rounds=rounds, least_rounds=1)
        self.part_cache, self.snapshots = PartCache(self.host, store, gate), Snapshots(swarm.every_rounds)
        self.held: list[bytes] = []
        self.trainer = InlineTrainer(Paced(swarm.elements, SEED), 10, 0.1)
        self.on_better: Callable[[Branch], None] = lambda branch: None
        self.sync = ChainSync(
            self.host,
            self.settings,
            chain=self.chain,
            snapshots=self.snapshots,
            part_cache=self.part_cache,
            hints=lambda: swarm.hints,
            on_better=lambda branch: self.on_better(branch),
        )
        vector = torch.zeros(swarm.elements) if anchor is None else anchor.clone()
        self.outer_loop = ReplicatedOuterLoop(
            self.chain,
            Observer(self.me),  # type: ignore[arg-type]
            state=OuterState(vector, OUTER, self.host.compute),
            trainer=self.trainer,
            wall=self.host.clock.wall,
            snapshots=self.snapshots,
        )

    @property
    def round(self) -> int:
        return self.chain.head.key.round

    def disguise(self, send: Send) -> None:
        """From now on, all that the peer sends goes through `send`."""
        self.transport.disguise = sending(send)

    async def keep(self, parts: Sequence[ReducedPart], record: Record) -> None:
        """Put the parts of a round into the part cache, and drop those of old rounds or move them to the store."""
        for part in parts:
            self.part_cache.put(record.parent, part)
        self.part_cache.decided(record.parent, {part.digest for part in record.parts})
        await self.part_cache.save()
        self.held = [*self.held, record.parent][-self.swarm.keep_rounds :]
        self.part_cache.keep(self.held, self.held[-2:])

    async def catch_up(self, seconds: float = 600.0) -> RoundReport:
        return await self.outer_loop.catch_up(self.sync, asyncio.get_running_loop().time() + seconds)


class SyncCluster(SimSwarm):
    """A network, and the rounds that its peers decide. All start from the state of the founders."""

    def __init__(
        self,
        founders: Iterable[str],
        elements: int = 1000,
        every_rounds: int = 4,
        keep_rounds: int = 8,
        store_rounds: int = 0,
        scope: str = RUN_SCOPE,
        run: bytes = RUN,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.run, self.scope = run, scope
        self.elements, self.every_rounds, self.keep_rounds = elements, every_rounds, keep_rounds
        self.store_rounds = store_rounds
        self.founders = tuple(Member(name) for name in founders)
        self.chunk_elements = max(256, elements // 8)
        self.root = UNSETTLED
        self.hints: list[PeerId] = [member.peer for member in self.founders]
        self.peers: dict[PeerId, SyncPeer] = {}
        self._made = 0
        self.cluster_size = 0  # of each voter's cluster, in the rounds from now on; 0: there are no clusters
        self._anchor = torch.linspace(-1, 1, elements)

    async def set_up(self) -> None:
        for member in self.founders:
            await self.add(member.peer, founder=True, incarnation=member.incarnation)

    async def add(self, name: PeerId, founder: bool = False, incarnation: int = 0) -> SyncPeer:
        """Add a founder with the initial state of the run, or a newcomer without a state."""
        peer = self.peers[name] = SyncPeer(self, name, self._anchor if founder else None, incarnation)
        await peer.outer_loop.settle()
        return peer

    def of(self, names: str) -> list[SyncPeer]:
        return [self.peers[name] for name in names.split()]

    async def decide(
        self,
        names: str,
        kind: Kind = Kind.MEAN,
        roster: Sequence[Member] | None = None,
        voters: Sequence[Member] | None = None,
        root: bytes | None = None,
        parts: bool | None = None,
    ) -> DecidedRound:
        """Decide a round and apply it at these peers, which have one head."""
        members = self.of(names)
        head, old = members[0].chain.head, members[0].chain.head.roster
        voters = [peer.me for peer in members if peer.me in old] if voters is None else voters
        mean = kind == Kind.MEAN if parts is None else parts
        held = self._parts(len(voters)) if mean else []
        record = Record(
            parent=head.key.lineage,
            state_root=root or head.state_root,
            round=head.key.round,
            kind=kind,
            plan=b"d" * 32,
            parts=tuple(part.result for part in held if part.result),
            roster=tuple(roster or (old if kind != Kind.FORK else voters)),
            peers=tuple(voter.peer for voter in voters),
            bounds=(0, self.elements // 3, self.elements) if held else (),
            clusters=(ClusterDigest(b"c" * 32, self.cluster_size),) * len(voters) if held and self.cluster_size else (),
        )
        link = follow(head, certified(head, record, voters))
        for peer in members:
            await self._apply(peer, link, held)
        return link

    async def rounds(self, names: str, count: int, **changes: Any) -> list[DecidedRound]:
        return [await self.decide(names, **changes) for _ in range(count)]

    def _parts(self, voters: int) -> list[ReducedPart]:
        """The encoded mean of a round in two parts, as reducers would make it."""
        self._made += 1
        delta = torch.randn(self.elements, generator=torch.Generator().manual_seed(self._made)) / 100
        third, held = self.elements // 3, []
        for low, high in ((0, third), (third, self.elements)):
            part = ReducedPart(codec(CODEC), low, high, self.chunk_elements)
            for index in range(part.chunks):
                first, last = part.elements(index)
                part.codec.encode(delta[first:last], part.chunk(index))
            part.masks, members = [1] * part.chunks, b""
            if self.cluster_size:
                part.clusters, members = voters, ((1 << self.cluster_size) - 1).to_bytes(4, "little")
                members += bytes(4 * (voters - 1))
                part.members = [members] * part.chunks
            part.seal([part.digest_of(index, 1, members) for index in range(part.chunks)])
            held.append(part)
        return held

    async def _apply(self, peer: SyncPeer, link: DecidedRound, held: Sequence[ReducedPart]) -> None:
        outer_loop, record = peer.outer_loop, link.record
        await peer.keep(held, record)
        for part in held:
            part.decode(VectorView([outer_loop._mean]))
        mean = AveragingResult(
            Outcome.COMMITTED if held else Outcome.SKIPPED,
            record=record,
            certificate=link.certificate,
            contributions={name: Contribution(1, 1) for name in record.peers},
        )
        head, work = outer_loop.chain.head, LocalProgress(TOKENS, 1.0, 1.0, 1.0)
        brought = RoundResult(head, mean, work, {"train": 1.0, "average": 0.0})
        overlap = Overlap(outer_loop.trainer, outer_loop.fragments, head, work)
        done = await outer_loop._step(brought, one_step=False, overlap=overlap)
        assert done.mean.outcome == mean.outcome, done.mean.blamed

    def same(self, names: str) -> bool:
        """Whether these peers have one head and one state, and the head's state root is that of the state."""
        first, *others = self.of(names)
        return all(
            peer.chain.head == first.chain.head
            and torch.equal(peer.outer_loop.anchor, first.outer_loop.anchor)
            and torch.equal(peer.outer_loop.state.velocity, first.outer_loop.state.velocity)
            and peer.chain.head.state_root == peer.outer_loop.state.root(peer.round)
            for peer in others
        )


async def fetch_part(
    host: Host,
    peer: PeerId,
    wanted: wire.PartDigest,
    part: ReducedPart,
    deadline: Deadline,
    silence_seconds: float = 30.0,
) -> ReducedPart:
    """Fetch a part into an empty one; raises what the peer did instead, and PeerGone if it does not have it."""
    errors: list[PeerError | BadPayload] = []
    download = PartDownload(
        host,
        RoundAccounting(),
        wanted=wanted,
        part=part,
        silence_seconds=silence_seconds,
        on_lost=lambda _, error: errors.append(error),
    )
    if await download.run(lambda: [peer], deadline):
        return part
    raise errors[0] if errors else PeerGone(peer, "does not have the part")
