"""A training script of one or more ranks, as users write them. It prints a line of JSON at each end of a round.

python -m tests.node.library.rank_script KIND STORE RANK SIZE OPTIONS       # OPTIONS: JSON
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from node.library import Swarm, SwarmError

LISTEN = "/ip4/127.0.0.1/tcp/0"
IN, HIDDEN, OUT, ROWS = 5, 8, 3, 4


class Model(nn.Module):
    """7 rows of a parameter are not divided evenly by 2 ranks, and 1 of another leaves a rank with nothing."""

    def __init__(self, normalizes: bool, hidden: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(IN, hidden), nn.Linear(hidden, hidden)
        self.norm = nn.BatchNorm1d(hidden) if normalizes else nn.Identity()
        self.last, self.scale = nn.Linear(hidden, OUT), nn.Parameter(torch.ones(1))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        hidden = self.second(self.first(rows).tanh()).tanh()
        result: torch.Tensor = self.last(self.norm(hidden)) * self.scale
        return result


def divided(kind: str, size: int, options: dict[str, Any]) -> nn.Module:
    torch.manual_seed(options.get("seed", 7))
    model: nn.Module = Model(kind in ("ddp", "bare"), options.get("hidden", HIDDEN))
    model = model.to(getattr(torch, options.get("dtype", "float32")))
    match kind:
        case "ddp":
            return nn.parallel.DistributedDataParallel(model)
        case "fsdp" | "offload" | "mixed":
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if kind == "mixed" else None)
            offload = CPUOffloadPolicy(pin_memory=False) if kind == "offload" else OffloadPolicy()
            fully_shard(model.get_submodule("second"), mp_policy=policy, offload_policy=offload)
            fully_shard(model, mp_policy=policy, offload_policy=offload)
        case "hsdp":
            fully_shard(model, mesh=init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("copy", "shard")))
        case "2d":
            mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("data", "tensor"))
            plan = {"first": ColwiseParallel(), "second": RowwiseParallel()}
            parallelize_module(model, mesh["tensor"], plan)
            fully_shard(model, mesh=mesh["data"])
    return model


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """Of the whole tensors, whichever way they are divided."""
    found = hashlib.sha256()
    for each in tensors:
        value = each.detach()
        found.update((value.full_tensor() if isinstance(value, DTensor) else value).float().numpy().tobytes())
    return found.hexdigest()


def held(model: nn.Module) -> dict[str, str]:
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.reshard()
    buffers = (each for each in model.buffers() if each.is_floating_point())
    return {"digest": digest(model.parameters()), "buffers": digest(buffers)}


def say(**line: Any) -> None:
    print(json.dumps(line), flush=True)


def train(kind: str, rank: int, size: int, options: dict[str, Any]) -> None:
    model = divided(kind, size, options)
    optimizer = torch.optim.SGD(model.parameters(), lr=options.get("rate", 1e-3))
    torch.manual_seed(100 + (rank // 2 if kind == "2d" else rank))  # tensor-parallel ranks have the same rows
    rows, dtype = torch.randn(ROWS, IN), next(model.parameters()).dtype

    def evaluate() -> float:
        with torch.no_grad():
            loss = float(model(rows.to(dtype)).square().mean())
        if rank == options.get("fails"):
            raise ValueError("no data")
        return loss

    names = ("join_seconds", "wait_seconds", "state_dir", "quiet")
    common: dict[str, Any] = {name: options[name] for name in names if name in options}
    common["evaluate"] = evaluate if options.get("evaluates", True) else None
    make: Callable[[], Swarm]
    if "inner_steps" in options:
        counts = {name: options[name] for name in ("inner_steps", "rounds")}
        make = lambda: Swarm.start(model, optimizer, options=["--listen", LISTEN], **counts, **common)  # noqa: E731
    else:
        where: dict[str, Any] = {name: options[name] for name in ("attach", "bootstrap") if name in options}
        where |= {"options": ["--listen", LISTEN]} if "bootstrap" in options else {}
        make = lambda: Swarm.join(model, optimizer, **where, **common)  # noqa: E731
    with make() as swarm:
        say(joined=True, **held(model))
        loop(swarm, model, optimizer, rank, options)
    say(left=True, over=swarm.over, **held(model))


def loop(swarm: Swarm, model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, options: dict[str, Any]) -> None:
    dtype = next(model.parameters()).dtype
    ended = 0
    for step in range(10_000):
        rows = torch.randn(ROWS, IN, dtype=dtype)
        loss = (model(rows) - rows[:, :OUT]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(options.get("step_seconds", 0.0))
        if rank not in options.get("callers", [rank]):
            continue
        before = held(model)["digest"]
        result = swarm.step(tokens=ROWS + rank, loss=loss.detach())
        ended += result.ended
        if result.ended:
            seen = {name: value for name, value in swarm.metrics().items() if math.isfinite(value)}
            say(
                round=result.round,
                step=step,
                before=before,
                **held(model),
                contributed=result.contributed,
                metrics=seen,
            )
        if swarm.over or ended == options.get("ends") or Path(options.get("stop", "/nonexistent")).exists():
            return


def main(kind: str, store: str, rank: int, size: int, options: dict[str, Any]) -> int:
    torch.set_num_threads(1)
    if size > 1:
        method, limit = f"file://{store}", timedelta(seconds=60)
        dist.init_process_group("gloo", init_method=method, rank=rank, world_size=size, timeout=limit)
    try:
        train(kind, rank, size, options)
    except SwarmError as error:
        say(error=str(error))
        return 3
    return 0


if __name__ == "__main__":
    os._exit(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), json.loads(sys.argv[5])))
