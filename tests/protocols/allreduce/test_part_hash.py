"""The hashes of reduced parts: bytes that must not change, and what a run of each of them agrees on."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from protocols.allreduce.part_hash import PART_HASHES, part_hash
from protocols.consensus import record as records
from protocols.sync.snapshot_download import StateUnavailable
from tests.sim.butterfly_harness import Averaged, ButterflyHarness
from tests.support.example_vectors import equal_norm_vectors
from tests.support.simulated import simulated
from tests.support.sync_cluster import SyncCluster

GOLDEN = {
    "sha256": "9e108f842636e260abd5322ad46510bfb439787e8a43f5e3c3cbfda18a980695",
    "blake3": "1a02c665cc0c72689466f739543a394d77bacf4194d57ec5724b14fe891fd818",
}
"""That of SHA-256 was computed before there was a choice: parts of such runs must still be recognised."""


@pytest.mark.parametrize("name", PART_HASHES)
def test_part_digests_are_stable(name: str) -> None:
    chunks, masks = [bytes(range(256)) * 4, bytes(range(255, -1, -1)) * 4, b"the last"], [7, 7, 3]
    hash = part_hash(name)
    digests = [hash.chunk(mask, memoryview(chunk)) for mask, chunk in zip(masks, chunks, strict=True)]
    assert hash.part(100, 614, masks, digests).digest.hex() == GOLDEN[name]


def averaged(digest: str) -> Averaged:
    """A round of four peers whose parts have several chunks."""
    vectors = equal_norm_vectors(4, 40_000, seed=3)
    return ButterflyHarness(vectors, [1000] * 4, [1e7] * 4, chunk_elements=4096, digest=digest).average()


def test_round_has_equal_bits_with_every_digest() -> None:
    rounds = {name: averaged(name) for name in PART_HASHES}
    results = {result.numpy().tobytes() for each in rounds.values() for result in each.results}
    assert len(results) == 1
    agreed = {name: {mean.record for mean in each.means} for name, each in rounds.items()}
    assert all(len(held) == 1 for held in agreed.values())
    parts = [{part.digest for part in records.decode(*held).parts} for held in agreed.values()]
    assert parts[0].isdisjoint(parts[1])


@pytest.mark.parametrize("digest", PART_HASHES)
def test_missed_rounds_are_replayed_with_the_runs_digest(digest: str) -> None:
    @simulated(SyncCluster, ("anna", "bert"), digest=digest)
    async def play(world: SyncCluster) -> None:
        await world.rounds("anna bert", 1)
        await world.rounds("anna", 3, voters=world.founders)
        report = await world.peers["bert"].catch_up()
        assert report.replayed_rounds == 3 and world.same("anna bert")

    play()


@simulated(SyncCluster, ("anna", "bert"), digest="blake3")
async def test_parts_of_another_digest_are_refused(world: SyncCluster) -> None:
    """No run mixes digests. A peer that did would take none of the others' parts for those of the record."""
    (link,) = await world.rounds("anna", 1, voters=world.founders)
    bert = world.peers["bert"]
    replayer = bert.sync.fetcher._replayer
    replayer._format = replace(replayer._format, hash=part_hash("sha256"))
    with pytest.raises(StateUnavailable):
        await replayer.parts(link.record, ["anna"], asyncio.get_running_loop().time() + 60)
    faults, _, _ = replayer._context.accounting.take()
    assert [(each.peer, "another digest" in each.why) for each in faults] == [("anna", True)]
