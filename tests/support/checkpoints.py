"""Checkpoints of a small state, with a disk that works at once and a worker that saves as a test wants it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from node.outer.state import OuterSGD, OuterState
from node.runtime import tensors
from node.storage.checkpoint import Checkpoint, DataCursor, newest, whole
from node.storage.checkpoint_manager import CheckpointManager
from node.training.remote import RemoteTrainer, WorkerError
from protocols.base import Layout, RoundKey
from protocols.sync.snapshot import SnapshotIndex
from tests.sim.host import SimCompute

RUN = "5f" * 32
LAYOUT = Layout(((("weight", (30, 10)), ("bias", (1,))),))
ELEMENTS = 301
MOMENTS = {"exp_avg": torch.arange(301.0), "exp_avg_sq": torch.ones(301), "step": torch.tensor(7.0)}


class Disk:
    """`Compute` that does its work at once."""

    async def run(self, work: Callable[[], Any], cost_bytes: int) -> Any:
        await asyncio.sleep(0)
        return work()


class Worker(RemoteTrainer):
    """A worker that saves its moments; `how` says whether it does that well, refuses or is gone."""

    position, carried, threads = 42, 0, 3

    def __init__(self, how: str = "well") -> None:
        self.how = how

    async def save(self, path: Path) -> bool:
        if self.how == "refuses":
            raise WorkerError("the inner state cannot be written: No space left on device")
        try:
            if self.how == "well":
                tensors.write(path, MOMENTS, {})
        except OSError as error:
            raise WorkerError(f"the inner state cannot be written: {error.strerror}") from error
        return self.how == "well"


def lineage_of(round_number: int) -> bytes:
    return bytes([round_number % 251]) * 32


def key(round_number: int) -> RoundKey:
    return RoundKey(bytes.fromhex(RUN), "run", lineage_of(round_number), round_number)


def like(path: Path) -> Checkpoint:
    return Checkpoint(
        path=path,
        run=RUN,
        round=0,
        lineage=b"",
        state_root=b"",
        layout=LAYOUT,
        index=SnapshotIndex(0, ()),
        data=DataCursor(1234, 3, 0),
        carried=0,
        files={},
    )


def state(seed: int = 1) -> OuterState:
    draw = torch.Generator().manual_seed(seed)
    vectors = torch.randn(ELEMENTS, generator=draw), torch.randn(ELEMENTS, generator=draw)
    made = OuterState(vectors[0], OuterSGD(0.7, 0.9), SimCompute(), vectors[1])
    made.index = SnapshotIndex.of(*vectors)
    return made


def checkpoints(
    path: Path,
    worker: Worker | None = None,
    limit_bytes: int = 1 << 30,
    disk: Disk | None = None,
    sync_chain: Callable[[], None] = lambda: None,
) -> CheckpointManager:
    return CheckpointManager(
        path,
        like(path),
        every_rounds=5,
        limit_bytes=limit_bytes,
        disk=disk or Disk(),
        inner=worker or Worker(),
        sync=sync_chain,
    )


def keep(
    path: Path, *numbers: int, of: CheckpointManager | None = None, worker: Worker | None = None
) -> CheckpointManager:
    async def main() -> CheckpointManager:
        async with of or checkpoints(path, worker) as made:
            for number in numbers:
                await made.keep(state(number), key(number))
        return made

    return asyncio.run(main())


def rounds(path: Path) -> list[int]:
    return [each.round for each in whole(path, lambda line: None)]


def names(path: Path) -> list[str]:
    return sorted(each.name for each in (path / "checkpoints").iterdir())


def bytes_of_one(path: Path) -> int:
    keep(path, 5)
    return sum(file.stat().st_size for file in newest(path).path.iterdir())
