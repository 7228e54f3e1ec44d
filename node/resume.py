"""Going on in a run after a restart: what a state directory holds of it, and which state this peer starts from.

The rule: there is a run here to go on with if its manifest is here, it is not over, and either others were met, who can
be asked, or there is a state of one's own. Others are asked first, if there are addresses. Where nobody answers for a
while, a peer with a state of its own goes on without an answer: else a swarm of which everybody was started again would
wait for itself for ever. A state of one's own is a checkpoint, or, at the run's founder, where the run starts from.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from node.archive import CertificateFile
from node.checkpoint import DIRECTORY, Checkpoint, Data, places, whole
from node.entry import Run
from node.identity import verify
from node.keeper import Keeper
from node.manifest import Manifest, ManifestError, unseal
from node.outfit import stream_seed
from node.remote import RemoteTrainer, WorkerError
from node.round import Replica
from node.statedir import StateDir, StateError, holds_run
from protocols import record as records
from protocols.base import Layout, Member
from protocols.chain import UNSETTLED, Chain
from protocols.snapshot import Index

log = logging.getLogger(__name__)

ANSWER_SECONDS = 10.0
"""Others have so long to say which run they are in before a peer that knows one goes on with that."""


@dataclass(frozen=True, slots=True)
class Held:
    """A run that a state directory holds, and that is not over.

    Attributes:
        run: what newcomers are told of it.
        has_state: whether there is something to start from that nobody has to be asked for.
    """

    manifest: Manifest
    run: Run
    has_state: bool


def held(state: StateDir) -> Held | None:
    """The run that the directory is of; None if there is none to go on with, or one that cannot be read."""
    sealed, sample = state.manifest(), state.held_out()
    if not holds_run(state.path):
        return None
    try:
        manifest = unseal(sealed, verify)
    except ManifestError as error:
        log.warning("the run in %s cannot be gone on with: %s", state.path, error)
        return None
    if any(manifest.held_out) and hashlib.sha256(sample).digest() != manifest.held_out:
        log.warning("the run in %s cannot be gone on with alone: its evaluation sample is damaged", state.path)
        return None
    founded = manifest.founder.peer == state.identity.peer_id
    run = Run(sealed, sample if any(manifest.held_out) else b"")
    return Held(manifest, run, founded or bool(places(state.path / DIRECTORY)))


@dataclass(frozen=True, slots=True)
class Start:
    """Where a peer begins in a run.

    Attributes:
        chain: as its former lives knew it, up to the state that it starts from.
        archive: where that is kept.
        checkpoints: of its former lives, whole and on the chain, the newest first; none: it begins with nothing.
        data: where its stream of data goes on.
    """

    chain: Chain
    archive: CertificateFile
    checkpoints: tuple[Checkpoint, ...]
    data: Data

    def like(self, run: str, layout: Layout) -> Checkpoint:
        """What all checkpoints to come have in common."""
        root = bytes(32)
        return Checkpoint(
            path=Path(),
            run=run,
            round=0,
            lineage=root,
            state_root=root,
            layout=layout,
            index=Index(0, ()),
            data=self.data,
            carried=0,
            files={},
        )


def start(state: StateDir, manifest: Manifest, me: Member) -> Start:
    """Where this life begins. It reads the chain and all checkpoints: to be called off the event loop.

    Raises:
        StateError: the directory cannot be written.
    """
    try:
        archive = CertificateFile(state.certificates)
    except OSError as error:
        raise StateError(f"cannot write {state.certificates} ({error.strerror}): free space there") from None
    chain = Chain(bytes.fromhex(manifest.run_id), "run", (manifest.founder,), manifest.state_root, archive)
    checkpoints = cut_back(whole(state.path, log.warning, manifest.run_id), chain)
    data = checkpoints[0].data if checkpoints else Data(stream_seed(me), me.incarnation, 0)
    return Start(chain, archive, checkpoints, data)


def cut_back(checkpoints: Iterable[Checkpoint], chain: Chain) -> tuple[Checkpoint, ...]:
    """Those that are of this chain; it is cut back to the first of them, or to the genesis if there is none."""
    usable = tuple(each for each in checkpoints if _is_of(chain, each))
    chain.switch(usable[0].lineage if usable else records.genesis(chain.head.key.run), ())
    return usable


def _is_of(chain: Chain, checkpoint: Checkpoint) -> bool:
    head = chain.at(checkpoint.lineage)
    return head is not None and head.state_root in (UNSETTLED, checkpoint.state_root)


async def take_up(begin: Start, replica: Replica, trainer: RemoteTrainer, keeper: Keeper) -> None:
    """Put this peer where its last checkpoint was made, inner optimiser and all; the older ones are handed out again.

    Raises:
        OSError: it cannot be read, though it could be a moment ago.
    """
    for each in begin.checkpoints:
        keeper.holds(each)
    if not begin.checkpoints:
        return
    newest = begin.checkpoints[0]
    snapshot = keeper.snapshots.get(newest.lineage)
    assert snapshot is not None
    await replica.start_from(snapshot)
    try:
        await trainer.load(newest.inner, newest.data.position)
    except WorkerError as error:
        log.warning("the inner optimiser begins anew: %s", error)
        await trainer.load(None, newest.data.position)
