"""The download of a stage's state, or of a whole model's, by a peer or a process that takes no part in its rounds.

It asks as a joiner does, but greets no peer as one, and serves nothing. The chain is verified from its first member on,
and the state against the chain. So a wrong answer is noticed; an old one is not.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path

from node.config.derived import chain_of, protocol_settings
from node.config.manifest import Manifest
from node.config.peer_config import PeerConfig
from node.joining.resume import is_of
from node.membership.hello import StageSeat
from node.storage.buffers import outer_buffer
from node.storage.certificate_log import CertificateLog
from node.storage.checkpoint import (
    DIRECTORY,
    INNER,
    OUTER,
    Checkpoint,
    DataCursor,
    name_of,
    places,
    publish_checkpoint,
    whole,
)
from node.tasks.flat import layout_of, unfrozen
from node.tasks.gpt import Gpt
from node.tasks.gpt_stage import GptStage
from node.tasks.paced import Paced
from protocols.aio import loop_time
from protocols.base import Deadline, Handler, Head, Host, Layout, PeerId, Stream, Transport
from protocols.blobs.parts import PartCache
from protocols.history.round_log import ListArchive
from protocols.sync.chain_sync import ChainSync
from protocols.sync.snapshot import Snapshot, SnapshotBuffer, Snapshots

log = logging.getLogger(__name__)

INCARNATION = 1
PROOF_SECONDS = 30.0
DOWNLOAD_SECONDS = 60.0  # For peers that send nothing. A download that makes progress has more time.
_NO_DATA = DataCursor(0, INCARNATION, 0)


def built_in_layout(manifest: Manifest, stage: int) -> Layout:
    """Layout of the parameters of a stage of the task gpt or paced; the whole model's without stages. It computes."""
    config = manifest.config
    if config.gpt is not None:
        shape, bounds = config.gpt.shape, manifest.bounds
        return layout_of(unfrozen(GptStage(shape, *bounds[stage : stage + 2]) if manifest.stages else Gpt(shape)))
    assert config.paced is not None
    elements = manifest.elements_of(stage)[0] if manifest.stages else config.paced.elements
    return Paced(elements, config.seed, resume=True).layout


def kept_state(manifest: Manifest, seat: StageSeat, directory: Path) -> tuple[int, Checkpoint] | None:
    """The newest whole state in a stage's directory, after the number of rounds that trained it, else None.

    Blocks. Raises OSError, CheckpointError.
    """
    if not (directory / DIRECTORY).exists():
        return None
    chain = chain_of(manifest, seat, CertificateLog(directory / "certificates.bin"))
    found = (each for each in whole(directory, log.warning, manifest.run_id) if is_of(chain, each))
    return next(((chain.trained_at(each.lineage), each) for each in found), None)


def clear(home: Path, kept: str = "", *, also_whole: bool = True) -> None:
    """Delete downloaded states but the one of that name, the unfinished ones and if wished the whole ones. Blocks.

    Checkpoints that this peer made itself when it was in the stage stay.
    """
    for path in places(home, drafts=True) + (places(home) if also_whole else []):
        if path.name.removeprefix(".") != kept and not (path / INNER).exists():
            shutil.rmtree(path, ignore_errors=True)


def begin_again(manifest: Manifest, seat: StageSeat, backup: Checkpoint, home: Path, data: DataCursor) -> None:
    """Make a backup the state from which the stage of a seat with a base begins again, in its directory. Blocks.

    Raises OSError.
    """
    before, start = backup.snapshot(), chain_of(manifest, seat, ListArchive()).head.key
    draft = home / DIRECTORY / f".{name_of(start.round, start.lineage)}"
    draft.mkdir(mode=0o700, parents=True, exist_ok=True)
    buffer = outer_buffer(draft / OUTER, backup.layout.sizes(), start.round, start.lineage)
    snapshot = Snapshot(start.lineage, start.round, before.index, buffer)
    for chunk in range(len(before.index.digests)):
        snapshot.put(chunk, before.chunk(chunk))
    _publish(draft, snapshot, manifest.run_id, backup.layout, data)


def _publish(draft: Path, snapshot: Snapshot, run: str, layout: Layout, data: DataCursor) -> None:
    """Make a whole state in a hidden directory a checkpoint, without the state of an inner optimiser."""
    made = Checkpoint(
        path=draft,
        run=run,
        round=snapshot.round,
        lineage=snapshot.lineage,
        state_root=snapshot.index.state_root(snapshot.round),
        layout=layout,
        index=snapshot.index,
        data=data,
        carried=0,
        files={},
    )
    publish_checkpoint(made, inner=False)


class _Asking:
    """A transport on which nothing is served, so that several downloads can use it side by side."""

    def __init__(self, transport: Transport) -> None:
        self.me, self._transport = transport.me, transport

    def serve(self, method: str, handler: Handler) -> None:
        """Ignored: no peer asks a download."""

    def open(self, peer: PeerId, method: str, deadline: Deadline) -> AbstractAsyncContextManager[Stream]:
        return self._transport.open(peer, method, deadline)


class StateDownload:
    """The chain and the state of the stage of a seat, or of a run without stages."""

    def __init__(
        self,
        host: Host,
        manifest: Manifest,
        *,
        layout: Layout,
        seat: StageSeat | None,
        peers: Callable[[], Sequence[PeerId]],
        directory: Path,
        data: DataCursor = _NO_DATA,
    ) -> None:
        """`directory` exists, and may hold an older part of the chain, and checkpoints. `peers` are asked.

        `data` is where a peer that starts from the state begins to draw.
        """
        host = replace(host, transport=_Asking(host.transport))
        archive = CertificateLog(directory / "certificates.bin")
        self.directory, self._run, self._layout, self._data = directory, manifest.run_id, layout, data
        self.name = f"run {manifest.run_id[:12]}" + (f", stage {seat.stage}" if seat else "")
        self._archive, self._chain = archive, chain_of(manifest, seat, archive)
        self._sync = ChainSync(
            host,
            protocol_settings(manifest, PeerConfig(), data.incarnation, seat.stage if seat else 0),
            chain=self._chain,
            snapshots=Snapshots(make_buffer=self._draft),
            part_cache=PartCache(host),
            hints=peers,
        )

    async def prove(self) -> None:
        """Have peers prove the best chain that they have. Without an answer it stays as it is."""
        if branch := await self._sync.better(loop_time() + PROOF_SECONDS):
            self._chain.switch(branch.ancestor.key.lineage, branch.links)

    def served(self) -> dict[int, Head]:
        """The states that peers say they serve: number of rounds that trained it -> its place on the chain."""
        heads = sorted(self._sync.fetcher.offered(self._chain), key=lambda head: head.key.round)
        return {self._chain.trained_at(head.key.lineage): head for head in heads}

    async def fetch(self, head: Head | None = None) -> Snapshot:
        """Fetch the state at one of the heads in `served`, else the newest that arrives. Raises `StateUnavailable`."""
        fetcher, deadline = self._sync.fetcher, loop_time() + DOWNLOAD_SECONDS
        return await (fetcher.download_at(head, deadline) if head else fetcher.download(self._chain, deadline))

    def publish(self, snapshot: Snapshot) -> None:
        """Make a fetched state a checkpoint of the directory, on the disk for good. Blocks. Raises OSError."""
        draft = self._place(snapshot.lineage, snapshot.round)
        if draft.with_name(draft.name.removeprefix(".")).exists():  # an earlier incarnation has had this state
            return shutil.rmtree(draft)
        self._archive.sync()
        _publish(draft, snapshot, self._run, self._layout, self._data)

    def clear(self, kept: Head, *, also_whole: bool = False) -> None:
        """Delete what other downloads left unfinished, and their whole states if wished. Blocks."""
        clear(self.directory / DIRECTORY, name_of(kept.key.round, kept.key.lineage), also_whole=also_whole)

    def _place(self, lineage: bytes, round_number: int) -> Path:
        """The directory that becomes the checkpoint of this state."""
        return self.directory / DIRECTORY / f".{name_of(round_number, lineage)}"

    def _draft(self, lineage: bytes, round_number: int, size: int) -> SnapshotBuffer:
        place = self._place(lineage, round_number)
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        return outer_buffer(place / OUTER, self._layout.sizes(), round_number, lineage)
