"""How ranks meet: on which GPU, by which backends, where these listen, and how long a collective may take."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses import FakeTensorMode

from node.ranks import dtensors
from node.ranks.cluster import Machines
from node.ranks.dtensors import Piece, ShardMuon, make_mesh
from node.ranks.exchange import Exchange
from node.ranks.group import COLLECTIVE_SECONDS, RankGroup
from node.ranks.worker import Rank
from node.tasks.gpt_presets import GptConfig
from node.tasks.recipe import Recipe
from node.tasks.spec import GptValues, WorkerSpec

SPEC = WorkerSpec(GptValues(GptConfig(1, 8, 1, 8), 1), Recipe(1, 1, 1e-3, 0.9, 0.5, inner_optimizer="muon"), 0)


@pytest.mark.parametrize(
    "devices, rank, device, backend",
    [
        (("cuda",), 0, 0, "cpu:gloo,cuda:nccl"),
        (("cuda", "cuda"), 1, 0, "gloo"),
        (("cuda:1", "cuda:1"), 0, 1, "gloo"),
        (("cuda:0", "cuda:1"), 1, 1, "cpu:gloo,cuda:nccl"),
    ],
)
def test_ranks_on_gpus_meet_by_nccl_unless_they_share_one(
    devices: tuple[str, ...], rank: int, device: int, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen, met = list[int](), list[Any]()
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr(torch._C, "_cuda_setDevice", chosen.append, raising=False)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(dist, "init_process_group", lambda *how, **more: met.append((how, more["timeout"])))
    monkeypatch.setattr(dist, "barrier", lambda: None)
    machines = Machines(len(devices), shares=len({*devices}) < len(devices))
    with open(os.devnull) as memory:
        group = RankGroup(rank, machines, memory.fileno(), Path("nowhere"))
        Rank(replace(SPEC, devices=devices), group)
    assert chosen == [device] and group.device == torch.device("cuda", device)
    assert met[0][0] == (backend,) and met[0][1].total_seconds() == COLLECTIVE_SECONDS


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[RankGroup]:
    """A group of one rank on the CPU."""
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    with open(os.devnull) as memory:
        group = RankGroup.fork(Machines(1), memory.fileno(), lambda *_: None)
    group.meet("cpu")
    yield group
    dist.destroy_process_group()


def test_backends_listen_on_the_loopback_and_wait_a_day(alone: RankGroup) -> None:
    assert os.environ["NCCL_SOCKET_IFNAME"] == "=" + os.environ["GLOO_SOCKET_IFNAME"] in ("=lo", "=lo0")
    alone._has_nccl = True
    made = [alone.backends()["gloo"], Exchange(0, Machines(1), alone.new_group)._firsts]
    mesh = make_mesh(alone, 1)
    made += [mesh[dtensors.DATA].get_group(), mesh[dtensors.TENSOR].get_group()]
    everyone = dist.distributed_c10d._world.pg_map
    assert len({id(each) for each in made}) == 4 and len(everyone) == 1 + 5
    waits = {each._get_backend(torch.device("cpu")).options._timeout.total_seconds() for each in everyone}
    assert waits == {COLLECTIVE_SECONDS}


class Whole:
    """Any part of a matrix on the device."""

    def __init__(self) -> None:
        self.device, self.shape = torch.device("cuda:0"), (4, 3)

    def __getitem__(self, _: object) -> Any:
        return torch.ones(2, 3, device=self.device)


def test_matrix_from_the_device_moves_parameters_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """With `--offload`, Muon's step is the host's, and each matrix is put together on the device."""
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda including_emulation: True)
    monkeypatch.setattr(dtensors, "_whole", lambda *_: Whole())
    monkeypatch.setattr(dtensors, "orthogonalized", lambda *_: [Whole()])
    with FakeTensorMode():
        parameter = nn.Parameter(torch.zeros(2, 3))
        parameter.grad = torch.ones(2, 3)
        piece = Piece("", (4, 3), 0, parameter, parameter.detach(), (), copies=1, is_first=True, is_summed=False)
        ShardMuon([(parameter, piece)], SPEC.recipe).step()
        assert parameter.device.type == "cpu"
