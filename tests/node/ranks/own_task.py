"""A user's own task, for ranks: BatchNorm, batches without targets, rows that cannot be divided; it fails as asked.

`plain`: without BatchNorm, so that zero3 trains it. `evaluates`: the ranks that can.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from node.tasks.base import TaskContext


class Shapes:
    def __init__(
        self,
        context: TaskContext,
        fails_at: int = -1,
        hangs_at: int = -1,
        writes: str = "",
        plain: int = 0,
        evaluates: str = "0123",
    ) -> None:
        self.fails_at, self.hangs_at, self.writes, self.device = fails_at, hangs_at, writes, context.device
        self.evaluates = evaluates
        if writes:
            Path(writes, f"{os.getpid()}-drawn").write_text(str(numpy.random.random()))
        torch.manual_seed(context.seed)
        norm = nn.Identity() if plain else nn.BatchNorm1d(16)
        self.module = nn.Sequential(nn.Linear(8, 16, bias=False), norm, nn.ReLU(), nn.Linear(16, 3))
        self.module.register_buffer("latest", torch.zeros(8, dtype=torch.float64))  # too precise to be averaged
        if writes:
            numbers = torch.tensor([os.getpid() % 97, 3])  # on each rank others
            for dtype in (torch.int16, torch.uint16, torch.float8_e4m3fn):
                self.module.register_buffer(str(dtype).rpartition(".")[2], numbers.to(dtype))
            self.module.register_buffer("expanded", numbers[:, None].expand(2, 3))
        self.module.to(context.device)

    def batch(self, seed: int, position: int) -> tuple[torch.Tensor, ...]:
        if position % 4 == self.fails_at:
            raise LookupError(f"no batch {position}")
        if position == self.hangs_at:
            time.sleep(1000)
        if self.writes:  # what this rank holds before it computes
            torch.save(dict(self.module.named_buffers()), Path(self.writes, f"{os.getpid()}-{position}"))
        random = torch.Generator().manual_seed(1000 * seed + position)
        inputs = torch.randn(12, 8, generator=random)
        labels = inputs[:, :3].argmax(1)
        labels[: 12 if position % 5 == 3 else position % 7] = -100
        return inputs, labels

    def targets(self, batch: tuple[torch.Tensor, ...]) -> int:
        return int((batch[-1] >= 0).sum())

    def loss(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if self.module.training:
            self.module.get_buffer("latest").copy_(inputs.mean(0))
        return functional.cross_entropy(self.module(inputs.to(self.device)), labels.to(self.device))

    def evaluate(self) -> float:
        if dist.is_initialized() and str(dist.get_rank()) not in self.evaluates:
            raise LookupError("no held-out data")
        with torch.no_grad():
            return float(self.loss(*self.batch(10**6, 0)))
