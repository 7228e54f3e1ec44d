"""Fetch the model of a running swarm into a state directory, without taking part in the run.

It asks as a joiner does, but greets nobody: no peer counts it as live, and none admits it. The chain is verified from
the founder on, and the state against the chain, so a wrong answer is noticed. An old one is not.

With stages, each stage has a chain, and a state directory, of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from node.config.derived import protocol_settings
from node.config.manifest import Manifest, ManifestError, unseal
from node.config.peer_config import PeerConfig
from node.export.fine_tuned import fine_tuned_layout
from node.export.stage_peers import StagePeers
from node.export.trained_model import TrainedError
from node.joining.stages import seat_to_bytes
from node.membership.hello import StageSeat
from node.runtime.identity import verify
from node.storage.buffers import outer_buffer
from node.storage.certificate_log import CertificateLog
from node.storage.checkpoint import DIRECTORY, OUTER, Checkpoint, DataCursor, name_of, publish_checkpoint
from node.storage.statedir import STAGE, write_atomically
from node.tasks.flat import flatten
from node.tasks.gpt import Gpt
from node.tasks.gpt_stage import GptStage
from node.tasks.paced import Paced
from protocols.aio import task_group
from protocols.base import Deadline, Handler, Head, Host, Layout, Member, PeerId, Stream, Transport
from protocols.butterfly.part_cache import PartCache
from protocols.history.chain import Chain
from protocols.sync.chain_sync import ChainSync
from protocols.sync.snapshot import Snapshot, SnapshotBuffer, Snapshots
from protocols.sync.snapshot_download import StateUnavailable

INCARNATION = 1
PROOF_SECONDS = 30.0
DOWNLOAD_SECONDS = 60.0
"""For peers that send nothing. A download that makes progress has more time."""
MOST_ROUNDS_TRIED = 3


@dataclass(frozen=True, slots=True)
class FetchableRun:
    """A run whose model can be fetched: its sealed manifest, and the layouts of each stage as this machine has them."""

    sealed: bytes
    manifest: Manifest
    layouts: tuple[Layout, ...]


def fetchable(sealed: bytes, base: str | None = None) -> FetchableRun:
    """Check that the model of a run can be fetched from its peers."""
    try:
        manifest = unseal(sealed, verify)
    except ManifestError as error:
        raise TrainedError(str(error)) from None
    run, config = f"run {manifest.run_id[:12]}", manifest.config
    instead = "give a state directory of one of its peers by --state-dir"
    if config.protocol != "butterfly":
        raise TrainedError(f"{run} averages by {config.protocol}, so each peer has a model of its own: {instead}")
    layouts = []
    for stage in range(len(manifest.stages or (None,))):
        layout = _layout(manifest, stage, base)
        if layout is None:
            raise TrainedError(f"{run} trains {config.task}, and only its peers know its tensors: {instead}")
        try:
            manifest.require_layout(layout, stage)
        except ManifestError as error:
            raise TrainedError(str(error)) from None
        layouts.append(layout)
    return FetchableRun(sealed, manifest, tuple(layouts))


async def fetch_state(host: Host, run: FetchableRun, peers: Sequence[PeerId], directory: Path) -> list[Path]:
    """Fetch the newest state that these peers serve. With stages, the newest that all stages serve, if there is one.

    Returns:
        The state directories, each with one checkpoint: `directory` itself, or one below it for each stage, in order.
    """
    manifest, now = run.manifest, asyncio.get_running_loop().time
    host = replace(host, transport=_Asking(host.transport))
    if manifest.stages is None:
        downloads = [_Download(host, run, _Source(0, manifest.founder, peers, directory))]
    else:
        sources = await _stage_sources(host, manifest, peers, directory)
        downloads = [_Download(host, run, source) for source in sources]
    async with task_group() as group:
        for each in downloads:
            group.create_task(each.prove(now() + PROOF_SECONDS))
    snapshots = await _of_one_round(downloads)
    if snapshots is None:
        snapshots = await _all(each.newest(now() + DOWNLOAD_SECONDS) for each in downloads)
    for download, snapshot in zip(downloads, snapshots, strict=True):
        await host.compute.run(partial(download.publish, snapshot), 0)
    return [each.source.directory for each in downloads]


async def _stage_sources(host: Host, manifest: Manifest, peers: Sequence[PeerId], directory: Path) -> list[_Source]:
    """Find peers of each stage. Each has a directory of its own below this one."""
    there = StagePeers(host, Member(host.me, INCARNATION), manifest)
    await there.search(peers)
    return [
        _Source(stage, there.seat(stage).member, found, directory / f"stage-{stage}", there.seat(stage))
        for stage, found in enumerate(there.found)
    ]


async def _of_one_round(downloads: Sequence[_Download]) -> list[Snapshot] | None:
    """The newest state that all stages serve; None without stages, or if there is none or it does not arrive."""
    if len(downloads) == 1:
        return None
    served = [each.served() for each in downloads]
    shared = set(served[0]).intersection(*served[1:])
    for trained in sorted(shared, reverse=True)[:MOST_ROUNDS_TRIED]:
        until = asyncio.get_running_loop().time() + DOWNLOAD_SECONDS
        with suppress(TrainedError):
            return await _all(each.at(heads[trained], until) for each, heads in zip(downloads, served, strict=True))
    return None


async def _all(work: Iterable[Coroutine[Any, Any, Snapshot]]) -> list[Snapshot]:
    """Do all this at the same time. If one fails, the others are cancelled."""
    async with task_group() as group:
        tasks = [group.create_task(each) for each in work]
    return [task.result() for task in tasks]


class _Asking:
    """A transport on which this process serves nothing, so that several stages can use it side by side."""

    def __init__(self, transport: Transport) -> None:
        self.me, self._transport = transport.me, transport

    def serve(self, method: str, handler: Handler) -> None:
        """Ignored: no peer knows this process, so none asks it."""

    def open(self, peer: PeerId, method: str, deadline: Deadline) -> AbstractAsyncContextManager[Stream]:
        return self._transport.open(peer, method, deadline)


@dataclass(frozen=True, slots=True)
class _Source:
    """Where the state of a stage comes from, and where it goes. `first` is alone in the roster before round 0."""

    stage: int
    first: Member
    peers: Sequence[PeerId]
    directory: Path
    seat: StageSeat | None = None


class _Download:
    """The chain and the state of a stage, or of a run without stages."""

    def __init__(self, host: Host, run: FetchableRun, source: _Source) -> None:
        manifest, stage, home = run.manifest, source.stage, source.directory
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomically(home / "manifest.bin", run.sealed)
        if source.seat:
            write_atomically(home / STAGE, seat_to_bytes(source.seat))
        archive, key = CertificateLog(home / "certificates.bin"), bytes.fromhex(manifest.run_id)
        self.source, self._run, self._layout = source, manifest.run_id, run.layouts[stage]
        self._chain = Chain(key, manifest.scope(stage), (source.first,), manifest.root_of(stage), archive)
        snapshots = Snapshots(make_buffer=partial(_draft, home, self._layout))
        settings = protocol_settings(manifest, PeerConfig(), INCARNATION, stage)
        self._sync = ChainSync(
            host,
            settings,
            chain=self._chain,
            snapshots=snapshots,
            part_cache=PartCache(host),
            hints=lambda: source.peers,
        )
        self._name = f"run {manifest.run_id[:12]}" + (f", stage {stage}" if manifest.stages else "")

    async def prove(self, deadline: Deadline) -> None:
        """Have peers prove the best chain that they have. Without an answer it has no round."""
        if branch := await self._sync.better(deadline):
            self._chain.switch(branch.ancestor.key.lineage, branch.links)

    def served(self) -> dict[int, Head]:
        """The states that peers say they serve: number of rounds that trained it -> its place on the chain."""
        heads = sorted(self._sync.fetcher.offered(self._chain), key=lambda head: head.key.round)
        return {self._chain.trained_at(head.key.lineage): head for head in heads}

    async def newest(self, deadline: Deadline) -> Snapshot:
        """Fetch the newest state that arrives."""
        return await self._fetched(self._sync.fetcher.download(self._chain, deadline))

    async def at(self, head: Head, deadline: Deadline) -> Snapshot:
        """Fetch the state at a head in `served`; raises as `newest` does."""
        return await self._fetched(self._sync.fetcher.download_at(head, deadline))

    async def _fetched(self, download: Awaitable[Snapshot]) -> Snapshot:
        try:
            return await download
        except StateUnavailable as error:
            raise TrainedError(
                f"{self._name}: {error}: try again in a minute, or give the address of another of its peers"
            ) from None

    def publish(self, snapshot: Snapshot) -> None:
        """Make a fetched state the checkpoint of the directory."""
        draft = self.source.directory / DIRECTORY / f".{name_of(snapshot.round, snapshot.lineage)}"
        made = Checkpoint(
            path=draft,
            run=self._run,
            round=snapshot.round,
            lineage=snapshot.lineage,
            state_root=snapshot.index.state_root(snapshot.round),
            layout=self._layout,
            index=snapshot.index,
            data=DataCursor(0, INCARNATION, 0),
            carried=0,
            files={},
        )
        publish_checkpoint(made, inner=False)


def _layout(manifest: Manifest, stage: int, base: str | None) -> Layout | None:
    """Layout of a built-in task's parameters; None for a user's own task, whose code does not run here."""
    config = manifest.config
    if config.hf is not None:
        return fine_tuned_layout(manifest, base)
    if config.gpt is not None:
        shape, bounds = config.gpt.shape, manifest.bounds
        return flatten(GptStage(shape, *bounds[stage : stage + 2]) if manifest.stages else Gpt(shape)).layout
    if config.paced is None:
        return None
    elements = manifest.elements_of(stage)[0] if manifest.stages else config.paced.elements
    return Paced(elements, config.seed, resume=True).layout


def _draft(directory: Path, layout: Layout, lineage: bytes, round_number: int, size: int) -> SnapshotBuffer:
    """A file for a snapshot, in the directory that becomes its checkpoint."""
    draft = directory / DIRECTORY / f".{name_of(round_number, lineage)}"
    draft.mkdir(mode=0o700, parents=True, exist_ok=True)
    return outer_buffer(draft / OUTER, layout.sizes(), round_number, lineage)
