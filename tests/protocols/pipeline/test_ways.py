"""Star or chain: what a driver has measured decides, and what it says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from node.tasks.paced_stage import SIZES
from protocols.base import Member
from protocols.pipeline.job import StageSizes
from protocols.pipeline.settings import PAIR_SECONDS, PipelineSettings
from protocols.pipeline.ways import BrokenPairs, Chains, Load, LoadMeter, chosen_way

SETTINGS = PipelineSettings(bytes(32), 4, 16, StageSizes(1000, 1000, 100))
BUSY = Load(rate=1.3, upload=10_000.0)  # a star sends 5,100 bytes a microbatch
FAR = Load(trip_seconds=0.05, computing_seconds=0.7)  # a chain saves four trips


@pytest.mark.parametrize(
    ("load", "is_chain", "why"),
    [
        (Load(), False, ""),
        (BUSY, True, "would fill 66% of its upload of 0.01 MB/s"),
        (replace(BUSY, rate=1.1), False, "room"),
        (FAR, True, "0.2 s of trips where a microbatch computes for 0.7 s"),
        (replace(FAR, computing_seconds=0.9), False, "room"),
        (replace(BUSY, upload=0.0), False, ""),
    ],
)
def test_measured_load_chooses_the_way(load: Load, is_chain: bool, why: str) -> None:
    way = chosen_way(SETTINGS, Chains.AUTO, load)
    assert way.is_chain == is_chain and why in way.why and bool(why) == bool(way.why)
    stays = chosen_way(SETTINGS, Chains.AUTO, load, is_chain=True)
    assert stays.is_chain == bool(way.why), "each of these is near its threshold"
    assert not chosen_way(replace(SETTINGS, stages=2), Chains.ALWAYS, load).is_chain, "nothing to pass on"


def test_upload_follows_from_the_sizes() -> None:
    for stages in (3, 4, 6):
        settings = PipelineSettings(bytes(32), stages, 4, replace(SIZES, gradient_bytes=SIZES.activation_bytes))
        star, chain = (settings.upload_bytes(is_chain) - SIZES.target_bytes for is_chain in (False, True))
        assert star == (2 * stages - 3) * chain == (2 * stages - 3) * SIZES.activation_bytes


def test_rate_is_of_the_time_in_which_it_drove() -> None:
    meter = LoadMeter()
    for began in (0.0, 100.0):
        meter.begin(began)
        for _ in range(20):
            meter.done()
        meter.end(began + 10.0)
    assert meter.rate == 2.0


def test_broken_pair_is_forgotten_in_time() -> None:
    pairs, one, two = BrokenPairs(), Member("p1"), Member("p2")
    pairs.add(one, two, 5.0)
    assert pairs.has(one, two, 5.0 + PAIR_SECONDS - 1) and not pairs.has(one, two, 5.0 + PAIR_SECONDS)
    assert not pairs.has(two, one, 6.0) and not pairs.has(one, Member("p2", 1), 6.0), "a restart may have changed it"
