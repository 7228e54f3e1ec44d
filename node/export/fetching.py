"""Fetch the model of a running swarm into a state directory, without taking part in the run.

It asks as a joiner does, but greets nobody: no peer counts it as live, and none admits it. The chain is verified from
the founder on, and the state against the chain, so a wrong answer is noticed. An old one is not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from node.config.derived import protocol_settings
from node.config.manifest import Manifest, ManifestError, unseal
from node.config.peer_config import PeerConfig
from node.config.run_config import RunConfig
from node.export.trained_model import TrainedError
from node.runtime.identity import verify
from node.storage.certificate_log import CertificateLog
from node.storage.checkpoint import DIRECTORY, OUTER, Checkpoint, DataCursor, name_of
from node.storage.file_buffer import outer_buffer
from node.storage.publish import publish_checkpoint
from node.storage.statedir import write_atomically
from node.tasks.base import flatten
from node.tasks.gpt import Gpt
from node.tasks.paced import Paced
from protocols.base import Host, Layout, PeerId
from protocols.butterfly.part_cache import PartCache
from protocols.history.chain import Chain
from protocols.sync.chain_sync import ChainSync, ChainSyncOptions
from protocols.sync.snapshot import Snapshot, SnapshotBuffer, Snapshots
from protocols.sync.snapshot_download import StateUnavailable

INCARNATION = 1
PROOF_SECONDS = 30.0
DOWNLOAD_SECONDS = 60.0
"""For peers that send nothing. A download that makes progress has more time."""


@dataclass(frozen=True, slots=True)
class FetchableRun:
    """A run whose model can be fetched.

    Attributes:
        sealed: the manifest, in its founder's envelope.
        layout: of the parameters, as the run's task has them here.
    """

    sealed: bytes
    manifest: Manifest
    layout: Layout


def fetchable(sealed: bytes) -> FetchableRun:
    """Check that the model of a run can be fetched from its peers.

    Raises:
        TrainedError: the envelope is invalid, the peers have no common state, the run has stages, or its tensors are
            not known here.
    """
    try:
        manifest = unseal(sealed, verify)
    except ManifestError as error:
        raise TrainedError(str(error)) from None
    run, config = f"run {manifest.run_id[:12]}", manifest.config
    instead = "give a state directory of one of its peers by --state-dir"
    if config.protocol != "butterfly":
        raise TrainedError(f"{run} averages by {config.protocol}, so each peer has a model of its own: {instead}")
    if manifest.stages is not None:
        raise TrainedError(
            f"{run} has {len(manifest.stages)} stages, which cannot be fetched from running peers yet: "
            "give a state directory of a peer of each by --state-dir"
        )
    layout = _layout(config)
    if layout is None:
        raise TrainedError(f"{run} trains {config.task}, and only its peers know its tensors: {instead}")
    try:
        manifest.require_layout(layout)
    except ManifestError as error:
        raise TrainedError(str(error)) from None
    return FetchableRun(sealed, manifest, layout)


async def fetch_state(host: Host, run: FetchableRun, peers: Sequence[PeerId], directory: Path) -> None:
    """Fetch the newest state that these peers serve, as a checkpoint in a state directory.

    Args:
        host: of this process, which is no member. Its transport can reach the peers.
        directory: an existing directory without a run.

    Raises:
        TrainedError: no peer proves a chain and sends a state on it.
        OSError: the directory cannot be written.
    """
    manifest, now = run.manifest, asyncio.get_running_loop().time
    write_atomically(directory / "manifest.bin", run.sealed)
    archive = CertificateLog(directory / "certificates.bin")
    key = bytes.fromhex(manifest.run_id)
    chain = Chain(key, manifest.scope(0), (manifest.founder,), manifest.root_of(0), archive)
    snapshots = Snapshots(make_buffer=partial(_draft, directory, run.layout))
    settings = protocol_settings(manifest, PeerConfig(), INCARNATION)
    sync = ChainSync(host, chain, settings, snapshots, lambda: peers, ChainSyncOptions(PartCache(host)))
    if branch := await sync.better(now() + PROOF_SECONDS):
        chain.switch(branch.ancestor.key.lineage, branch.links)
    try:
        snapshot = await sync.fetcher.download(chain, now() + DOWNLOAD_SECONDS)
    except StateUnavailable as error:
        raise TrainedError(
            f"run {manifest.run_id[:12]}: {error}: try again in a minute, or give the address of another of its peers"
        ) from None
    await host.compute.run(partial(_publish, directory, run, snapshot), 0)


def _layout(config: RunConfig) -> Layout | None:
    """Layout of a built-in task's parameters; None for a user's own task, whose code does not run here."""
    if config.gpt is not None:
        return flatten(Gpt(config.gpt.shape)).layout
    return Paced(config.paced.elements, config.seed, resume=True).layout if config.paced is not None else None


def _draft(directory: Path, layout: Layout, lineage: bytes, round_number: int, size: int) -> SnapshotBuffer:
    """A file for a snapshot, in the directory that becomes its checkpoint."""
    draft = directory / DIRECTORY / f".{name_of(round_number, lineage)}"
    draft.mkdir(mode=0o700, parents=True, exist_ok=True)
    return outer_buffer(draft / OUTER, layout.sizes(), round_number, lineage)


def _publish(directory: Path, run: FetchableRun, snapshot: Snapshot) -> Checkpoint:
    made = Checkpoint(
        path=directory / DIRECTORY / f".{name_of(snapshot.round, snapshot.lineage)}",
        run=run.manifest.run_id,
        round=snapshot.round,
        lineage=snapshot.lineage,
        state_root=snapshot.index.state_root(snapshot.round),
        layout=run.layout,
        index=snapshot.index,
        data=DataCursor(0, INCARNATION, 0),
        carried=0,
        files={},
    )
    return publish_checkpoint(made, inner=False)
