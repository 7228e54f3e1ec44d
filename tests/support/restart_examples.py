"""A peer's state directory after it ran for a while: a sealed run, its chain and its checkpoints."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from node.config.manifest import Manifest, layout_digest, seal
from node.config.run_config import load_run
from node.outer.sgd import OuterSGD
from node.storage import tensors
from node.storage.checkpoint import Checkpoint, DataCursor, whole
from node.storage.checkpoint_manager import CheckpointManager, CheckpointStorage
from node.storage.state import OuterState
from node.storage.statedir import StateDir
from protocols import REPLICATED_PROTOCOLS
from protocols.base import Layout, Member
from protocols.history.chain import Chain
from protocols.sync.snapshot import SnapshotIndex
from tests.sim.host import SimCompute
from tests.support.fake_rounds import RUN, decided

SAMPLE = b"what all peers evaluate on"
ROSTER = tuple(Member(name) for name in ("anna", "bert", "cleo"))
ELEMENTS = 301
LAYOUT = Layout(((("weight", (30, 10)), ("bias", (1,))),))
MOMENTS = {"exp_avg": torch.arange(301.0), "exp_avg_sq": torch.ones(301), "step": torch.tensor(7.0)}


def sealed(here: StateDir, held_out: bytes = SAMPLE) -> tuple[Manifest, bytes]:
    """A run that this peer founded."""
    config = load_run(None, {"task": "paced"}, REPLICATED_PROTOCOLS)
    manifest = Manifest(
        config=config,
        founder=Member(here.identity.peer_id, 1),
        elements=(config.elements,),
        state_root=b"r" * 32,
        held_out=hashlib.sha256(held_out).digest() if held_out else bytes(32),
        created=0.0,
        layout=layout_digest(Layout(((("paced", (config.elements,)),),))),
    )
    return manifest, seal(manifest, here.identity)


def begin(here: StateDir, other: StateDir | None = None) -> Manifest:
    """Make the directory that of a run that this peer, or another one, founded."""
    manifest, data = sealed(other or here)
    here.begin(manifest.run_id, "", data, SAMPLE)
    here.remember({"12D3KooWPeer": ["/ip4/192.0.2.2/tcp/1"]})
    return manifest


class ImmediateCompute:
    """`Compute` that works at once, on the caller's thread."""

    async def run(self, work: Callable[[], Any], cost_bytes: int) -> Any:
        await asyncio.sleep(0)
        return work()


class SavingWorker:
    """What a worker has; it saves some moments."""

    position, carried, threads = 42, 0, 3

    async def save(self, path: Path) -> bool:
        tensors.write(path, MOMENTS, {})
        return True


def checkpoint_like(path: Path, run: str = RUN.hex()) -> Checkpoint:
    """What the checkpoints of a run have in common."""
    return Checkpoint(
        path=path,
        run=run,
        round=0,
        lineage=b"",
        state_root=b"",
        layout=LAYOUT,
        index=SnapshotIndex(0, ()),
        data=DataCursor(1234, 3, 0),
        carried=0,
        files={},
    )


def state(seed: int) -> OuterState:
    draw = torch.Generator().manual_seed(seed)
    vectors = torch.randn(ELEMENTS, generator=draw), torch.randn(ELEMENTS, generator=draw)
    made = OuterState(*vectors, OuterSGD(0.7, 0.9), SimCompute())
    made.index = SnapshotIndex.of(*vectors)
    return made


def train(chain: Chain, rounds: int = 5) -> None:
    """Decide some rounds, the state before round n being `state(n)`."""
    for number in range(rounds):
        chain.switch(chain.head.key.lineage, [decided(chain.head, root=state(number).root(number))])


def checkpoint(path: Path, chain: Chain, round_number: int, common: Checkpoint | None = None) -> Checkpoint:
    """Keep a checkpoint of the state before a round of this chain."""
    head = chain.at(chain.locator()[-1 - round_number])
    assert head and head.key.round == round_number

    async def main() -> None:
        async with checkpoint_manager(path, common) as manager:
            for each in newest_first(path):
                manager.holds(each)
            await manager.keep(state(round_number), head.key)

    asyncio.run(main())
    return newest_first(path)[0]


def newest_first(path: Path) -> tuple[Checkpoint, ...]:
    return tuple(whole(path, lambda line: None))


def checkpoint_manager(path: Path, common: Checkpoint | None = None) -> CheckpointManager:
    storage = CheckpointStorage(path, 1, 1 << 30, ImmediateCompute())
    return CheckpointManager(storage, common or checkpoint_like(path), SavingWorker())


def flip_bit(file: Path, at: int) -> bytes:
    """Damage one byte; the damaged content."""
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)
    return bytes(data)
