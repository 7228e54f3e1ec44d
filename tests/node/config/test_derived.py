"""The worker's spec, derived from a run's configuration and this machine's."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from node.config import derived as outfit
from node.config.derived import stream_seed, training_devices, worker_spec
from node.config.peer_config import PeerConfig
from node.config.peer_sources import load_peer
from node.config.run_config import RunConfig, load_run
from node.config.toml import ConfigError
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


@pytest.mark.parametrize(
    "flags, gpus, workers, names",
    [
        ({}, 0, 0, ("auto",)),
        ({}, 1, 0, ("auto",)),
        ({}, 3, 0, ("cuda:0", "cuda:1", "cuda:2")),
        ({}, 3, 1, ("auto",)),  # another peer's
        ({}, 64, 0, tuple(f"cuda:{number}" for number in range(8))),  # a step has one batch of 8 rows
        ({"tensor_parallel": 2}, 3, 0, ("cuda:0", "cuda:1")),
        ({"ranks": 1}, 3, 0, ("auto",)),
        ({"device": "cuda"}, 3, 0, ("cuda",)),
        ({"device": "cpu"}, 3, 0, ("cpu",)),
        ({"ranks": 2}, 3, 0, ("cuda:0", "cuda:1")),
        ({"ranks": 2}, 0, 1, ("cpu", "cpu")),
        ({"ranks": 2, "device": "cpu"}, 3, 0, ("cpu", "cpu")),
        ({"devices": ("cuda:1",)}, 3, 0, ("cuda:1",)),
        ({"devices": ("cuda:1,cuda:1",)}, 3, 1, ("cuda:1", "cuda:1")),
    ],
)
def test_devices_are_named_counted_or_all(
    flags: dict[str, object], gpus: int, workers: int, names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outfit, "visible_gpus", lambda: gpus)
    monkeypatch.setattr(outfit, "workers_here", lambda: workers)
    assert training_devices(run(), peer(**flags)) == names
    spec = worker_spec(run(), peer(**flags), 1)
    assert (spec.device, spec.devices, spec.ranks) == (names[0], names[: len(names) * (len(names) > 1)], len(names))
    assert WorkerSpec.from_json(spec.to_json()) == spec


@pytest.mark.parametrize("flags", [{}, {"device": "cuda"}, {"devices": ("cuda:0",)}])
def test_one_gpu_with_offload_is_a_group_of_one(flags: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(outfit, "workers_here", lambda: 0)
    spec = worker_spec(run(), peer(offload="optimizer", **flags), 1)
    assert (spec.devices, spec.offload, spec.shard) == (("cuda:0",), "optimizer", "zero1")


@pytest.mark.parametrize(
    "of_run, flags, workers, used",
    [
        ({}, {}, 0, ""),
        ({}, {}, 1, "cuda:0"),
        ({"stages": 2}, {}, 0, "cuda:0"),
        ({"gpt": {"rows": 2}}, {}, 0, "cuda:0, cuda:1"),
        ({"task": "paced"}, {}, 0, ""),
        ({}, {"devices": ("cuda:2",)}, 1, ""),
        ({}, {"ranks": 1}, 0, ""),
    ],
)
def test_user_is_told_of_unused_gpus(
    of_run: dict[str, object], flags: dict[str, object], workers: int, used: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(outfit, "workers_here", lambda: workers)
    mine = peer(**flags)
    told = outfit.unused_gpus(mine, worker_spec(run(**of_run), mine, 1))
    assert told == (used and f"this peer trains on {used}; this machine has 3 GPUs: name those to use by --devices")


@pytest.mark.parametrize(
    "of_run, flags, why",
    [
        ({"task": "paced"}, {"ranks": 2}, "task paced trains on one device of each peer, not 2: leave out --ranks"),
        ({"stages": 2}, {"devices": ("cpu,cpu",)}, "a run with stages trains on one device of each peer, not 2: leave"),
        ({}, {"ranks": 3, "tensor_parallel": 2}, "flag --tensor-parallel: 3 devices do not make groups of 2"),
        ({}, {"shard": "zero2"}, "flag --shard: this peer trains on one device: name several by --devices"),
        ({}, {"tensor_parallel": 2}, "flag --tensor-parallel: this peer trains on one device"),
        (
            {"task": "paced"},
            {"offload": "optimizer"},
            "flag --offload: this peer trains on one device: name",
        ),
        (
            {},
            {"offload": "parameters", "device": "cuda"},
            "flag --offload: one device keeps its parameters: give --off",
        ),
        ({}, {"offload": "optimizer"}, "flag --offload: on the CPU all memory is the host's"),
        ({}, {"offload": "optimizer", "device": "mps"}, "flag --offload: on a Mac all memory is the host's"),
        ({}, {"offload": "optimizer", "ranks": 2}, "flag --offload: on the CPU all memory is the host's"),
        ({}, {"offload": "parameters", "devices": ("cuda:0,cuda:1",)}, "flag --offload: only --shard zero3 keeps"),
        (
            {},
            {"offload": "parameters", "devices": ("cuda:0,cuda:1",), "tensor_parallel": 2, "shard": "zero3"},
            "flag --offload: devices that all share each layer keep its parameters: give --offload optimizer, or more ",
        ),
        ({}, {"tensor_parallel": 2, "ranks": 2, "shard": "zero1"}, "flag --shard: beside tensor parallel"),
        ({}, {"ranks": 2, "device": "mps"}, "mps is one device: leave --ranks out, or give --device cpu"),
        ({}, {"ranks": 2, "device": "cuda"}, "2 ranks, and this machine has 1 GPU that this build of torch can use"),
        ({}, {"ranks": 9, "device": "cpu"}, "9 devices, and a step has 1 batch of 8 rows: give fewer devices, or "),
    ],
)
def test_devices_that_cannot_train_a_run_are_refused(
    of_run: dict[str, object], flags: dict[str, object], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outfit, "visible_gpus", lambda: int(flags.get("device") == "cuda"))
    monkeypatch.setattr(outfit, "workers_here", lambda: 0)
    with pytest.raises(ConfigError) as error:
        worker_spec(run(**of_run), peer(**flags), 1)
    assert str(error.value).startswith(why) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "flags, why",
    [
        ({"devices": ("cpu,cpu",), "ranks": 3}, "flag --ranks: 3 ranks, but flag --devices names 2 devices: leave one"),
        ({"devices": ("cuda:0",), "device": "cuda"}, "flag --device: flag --devices names devices, too: leave one"),
    ],
)
def test_settings_of_devices_that_contradict_are_refused(flags: dict[str, object], why: str) -> None:
    with pytest.raises(ConfigError) as error:
        peer(**flags)
    assert str(error.value).startswith(why)
