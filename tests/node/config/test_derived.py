"""The worker's spec, derived from a run's configuration and this machine's."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from node.config import derived as outfit
from node.config.derived import stream_seed, worker_spec
from node.config.peer_config import PeerConfig
from node.config.peer_sources import load_peer
from node.config.run_config import RunConfig, load_run
from node.tasks.spec import GptValues, PacedValues, WorkerSpec
from protocols.base import Member
from protocols.registry import REPLICATED_PROTOCOLS


@pytest.fixture(autouse=True)
def two_workers_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outfit, "workers_here", lambda: 2)


def run(**overrides: object) -> RunConfig:
    return load_run(None, overrides, REPLICATED_PROTOCOLS)


def peer(**flags: object) -> PeerConfig:
    return load_peer(flags, {}, None)


def test_incarnations_draw_separate_streams_and_equal_weights() -> None:
    members = [Member(*each) for each in itertools.product(("anna", "anna/1", "bert"), range(12))]
    specs = [worker_spec(run(), peer(), stream_seed(member)) for member in members]
    streams = {spec.stream_seed for spec in specs}
    assert len(streams) == len({f"{member.peer}/{member.incarnation}" for member in members})
    assert all(0 <= stream < 1 << 56 for stream in streams)
    assert {spec.weights_seed for spec in specs} == {run().seed}
    assert worker_spec(run(), peer(), stream_seed(members[0])) == specs[0]


def test_task_and_sample_come_from_the_run(tmp_path: Path) -> None:
    gpt = worker_spec(run(), peer(), 1, tmp_path / "held-out.bin")
    assert isinstance(gpt.values, GptValues) and gpt.held_out == tmp_path / "held-out.bin"
    paced = worker_spec(run(task="paced"), peer(), 1)
    assert isinstance(paced.values, PacedValues) and paced.held_out is None
    assert gpt.recipe == run().recipe and (gpt.peers_here, gpt.threads) == (3, 0), "the worker chooses its threads"
    assert worker_spec(run(), peer(threads=3), 1).threads == 3
    for spec in (gpt, paced):
        assert WorkerSpec.from_json(spec.to_json()) == spec
