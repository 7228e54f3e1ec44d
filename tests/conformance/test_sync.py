"""State sync in each world: parts by digest, heads and certificates, and a state from donors, one of which lies."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
import torch

from protocols.allreduce.parts import ReducedPart
from protocols.base import BadPayload, PeerGone, PeerSilent
from protocols.blobs.parts import PartCache
from protocols.registry import CHUNK_ELEMENTS
from protocols.vectors.codec import codec
from protocols.vectors.views import VectorView
from tests.conformance.hosts import Network, host
from tests.conformance.worlds import GENEROUS_SECONDS, Peers, World, in_each_world, soon
from tests.support.long import long
from tests.support.sync_cluster import SyncCluster, fetch_part

ELEMENTS = 4 * CHUNK_ELEMENTS + 12_345
LARGE_ELEMENTS = 6 * CHUNK_ELEMENTS
SPAN = (0, ELEMENTS, CHUNK_ELEMENTS)
LINEAGE = b"l" * 32


def made_part() -> tuple[ReducedPart, torch.Tensor]:
    """A part of more than 4 MB, and the vector that it decodes to."""
    vector = torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(1))
    part = ReducedPart(codec("fp32"), *SPAN)
    for index in range(part.chunks):
        low, high = part.elements(index)
        part.codec.encode(vector[low:high], part.chunk(index))
    part.masks = [3, 3, 3, 1, 1]
    part.seal([part.digest_of(index, mask) for index, mask in enumerate(part.masks)])
    return part, vector


async def fetched(peers: Peers, part: ReducedPart, silence_seconds: float = GENEROUS_SECONDS) -> ReducedPart:
    assert part.result
    empty = ReducedPart(part.codec, *SPAN)
    return await fetch_part(host(peers, 0), peers.transports[1].me, part.result, empty, soon(), silence_seconds)


class TestParts:
    @in_each_world()
    async def test_multi_megabyte_part_arrives_unchanged(self, peers: Peers) -> None:
        part, vector = made_part()
        PartCache(host(peers, 1)).put(LINEAGE, part)
        got, into = await fetched(peers, part), torch.zeros(ELEMENTS)
        got.decode(VectorView([into]))
        assert torch.equal(into, vector)
        assert (got.result, got.masks) == (part.result, part.masks)

    @in_each_world()
    async def test_missing_part_raises_peer_gone(self, peers: Peers) -> None:
        part_cache, (part, _) = PartCache(host(peers, 1)), made_part()
        with pytest.raises(PeerGone):
            await fetched(peers, part)
        part_cache.put(LINEAGE, part)
        await fetched(peers, part)
        part_cache.keep([])
        with pytest.raises(PeerGone):
            await fetched(peers, part)

    @in_each_world()
    async def test_modified_part_is_rejected(self, peers: Peers) -> None:
        part, _ = made_part()
        PartCache(host(peers, 1)).put(LINEAGE, part)
        part.chunk(2)[7] ^= 1
        with pytest.raises(BadPayload):
            await fetched(peers, part)

    @in_each_world()
    async def test_frozen_part_holder_raises_peer_silent(self, peers: Peers) -> None:
        part, _ = made_part()
        PartCache(host(peers, 1)).put(LINEAGE, part)
        await fetched(peers, part)
        await peers.freeze_peer(1)
        with pytest.raises(PeerSilent):
            await fetched(peers, part, silence_seconds=0.3)


def play(world: World, elements: int, body: Callable[[SyncCluster, Peers, list[str]], Awaitable[None]]) -> None:
    """Run `body` with three peers of a world, of which the first two are founders."""

    async def whole(peers: Peers) -> None:
        names = [transport.me for transport in peers.transports]
        swarm = SyncCluster(names[:2], elements)
        swarm.network = Network(peers)  # type: ignore[assignment]
        for name in names[:2]:
            await swarm.add(name, founder=True)
        await body(swarm, peers, names)

    world.run(whole, count=3)


class TestChains:
    def test_heads_are_shown_and_verified(self, world: World) -> None:
        async def body(swarm: SyncCluster, peers: Peers, names: list[str]) -> None:
            anna, bert = names[:2]
            links = await swarm.rounds(anna, 5, voters=swarm.founders)
            branch = await swarm.peers[bert].sync.better(soon())
            assert branch and [link.lineage for link in branch.links] == [link.lineage for link in links]
            assert await swarm.peers[anna].sync.better(soon()) is None

        play(world, 1000, body)

    def test_missed_rounds_are_replayed_from_parts(self, world: World) -> None:
        async def body(swarm: SyncCluster, peers: Peers, names: list[str]) -> None:
            anna, bert = names[:2]
            await swarm.rounds(f"{anna} {bert}", 5)
            await swarm.rounds(anna, 2, voters=swarm.founders)
            report = await swarm.peers[bert].catch_up(20)
            assert (report.outcome, report.replayed_rounds, report.bytes_downloaded) == ("superseded", 2, 0)
            assert swarm.same(f"{anna} {bert}")

        play(world, ELEMENTS, body)


class TestSnapshots:
    @pytest.mark.parametrize("liar", [0, *long(1)])
    def test_newcomer_catches_up_despite_lying_donor(self, world: World, liar: int) -> None:
        async def body(swarm: SyncCluster, peers: Peers, names: list[str]) -> None:
            await swarm.rounds(" ".join(names[:2]), 6)
            for snapshot in swarm.peers[names[liar]].snapshots.held():
                for chunk in range(len(snapshot.index.digests)):  # its index, which gives the state root, stays
                    snapshot.put(chunk, bytes(snapshot.index.size(chunk)))
            newcomer = await swarm.add(names[2])
            report = await newcomer.catch_up(20)
            assert report.outcome == "superseded" and swarm.same(f"{names[1 - liar]} {names[2]}")
            # The other donor may have sent everything before the liar was asked.
            assert all(peer == names[liar] and "digest" in why for peer, why in report.blamed.items())
            extra_bytes = report.bytes_downloaded - 8 * LARGE_ELEMENTS
            assert (extra_bytes > 0) == bool(report.blamed) and extra_bytes <= 4 * CHUNK_ELEMENTS

        play(world, LARGE_ELEMENTS, body)

    def test_second_donor_replaces_killed_donor(self, world: World) -> None:
        async def body(swarm: SyncCluster, peers: Peers, names: list[str]) -> None:
            await swarm.rounds(" ".join(names[:2]), 6)
            newcomer = await swarm.add(names[2])
            await newcomer.sync.better(soon())  # it has heard what both donors offer
            await peers.kill_peer(0)
            report = await newcomer.catch_up(20)
            assert report.outcome == "superseded" and swarm.same(f"{names[1]} {names[2]}")

        play(world, ELEMENTS, body)
