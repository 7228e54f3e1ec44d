"""A peer's state directory after it ran for a while: a sealed run, its chain and its checkpoints."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import replace
from pathlib import Path

from node.config.manifest import Manifest, layout_digest, seal
from node.config.run_config import load_run
from node.joining import resume
from node.storage.checkpoint import Checkpoint, whole
from node.storage.checkpoint_manager import CheckpointManager
from node.storage.statedir import StateDir
from protocols.base import Layout, Member
from protocols.history.chain import Chain
from protocols.registry import REPLICATED_PROTOCOLS
from tests.support.checkpoints import LAYOUT, Disk, Worker, like, state
from tests.support.fake_rounds import RUN, decided

SAMPLE = b"what all peers evaluate on"
ROSTER = tuple(Member(name) for name in ("anna", "bert", "cleo"))


def sealed(here: StateDir, held_out: bytes = SAMPLE) -> tuple[Manifest, bytes]:
    config = load_run(None, {"task": "paced"}, REPLICATED_PROTOCOLS)
    assert config.elements
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


def lived(here: StateDir) -> tuple[Manifest, list[Checkpoint]]:
    """A former incarnation: five rounds, and checkpoints before the third and the fifth."""
    manifest = begin(here)
    first = resume.load_restart_point(here, manifest, Member("anna", 1))
    train(first.chain)
    common = first.like(manifest.run_id, LAYOUT)
    return manifest, [checkpoint(here.path, first.chain, number, common) for number in (2, 4)]


def newest_first(path: Path) -> tuple[Checkpoint, ...]:
    return tuple(whole(path, lambda line: None))


def checkpoint_manager(path: Path, common: Checkpoint | None = None) -> CheckpointManager:
    first = common or replace(like(path), run=RUN.hex())
    return CheckpointManager(path, first, every_rounds=1, limit_bytes=1 << 30, disk=Disk(), inner=Worker())


def flip_bit(file: Path, at: int) -> bytes:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)
    return bytes(data)
