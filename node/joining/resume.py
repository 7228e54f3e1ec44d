"""Resuming a run after a restart: what the state directory holds of it, and which state this peer starts from.

A directory holds a run to resume if the run's manifest is there, the run is not over, and the peer either knows peers
to ask, or has a state of its own: a checkpoint or, at the founder, the initial state. It asks the others first. If none
answers for a while, a peer with a state resumes without an answer: else a swarm whose peers were all restarted would
never continue.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from node.config.derived import chain_of, stream_seed
from node.config.manifest import Manifest, ManifestError, unseal
from node.joining.bootstrap import RunInfo
from node.membership.hello import StageSeat
from node.membership.seats import seat_of
from node.outer.independent_loop import IndependentOuterLoop
from node.outer.replicated_loop import ReplicatedOuterLoop
from node.reporting.status import short
from node.runtime.identity import sync_directory, verify
from node.storage.certificate_log import CertificateLog
from node.storage.checkpoint import DIRECTORY, Checkpoint, CheckpointError, DataCursor, places, whole
from node.storage.checkpoint_manager import CheckpointManager
from node.storage.statedir import StateDir, StateError, holds_run
from node.training.remote import RemoteTrainer, WorkerError
from protocols.base import Layout, Member, PeerId
from protocols.consensus import record as records
from protocols.history.chain import UNSETTLED, Chain
from protocols.sync.snapshot import SnapshotIndex

log = logging.getLogger(__name__)

ANOTHER = "--new starts another run, and moves what is here to past/"
ANSWER_SECONDS = 10.0
"""Time that other peers have to say which run they are in, before a peer resumes the run that it holds."""


@dataclass(frozen=True, slots=True)
class ResumableRun:
    manifest: Manifest
    run: RunInfo
    has_state: bool


def find_resumable(state: StateDir, asks: bool = True) -> ResumableRun | None:
    """The run that the directory holds; None if there is none to resume, or if it cannot be read.

    If this peer `asks` others then, that is only logged; else `require_none` says why.
    """
    sealed, sample = state.manifest(), state.held_out()
    if not holds_run(state.path):
        return None
    try:
        manifest = unseal(sealed, verify)
    except ManifestError as error:
        if asks:
            log.warning("the run in %s cannot be resumed: %s", state.path, error)
        return None
    if any(manifest.held_out) and hashlib.sha256(sample).digest() != manifest.held_out:
        log.warning("the run in %s cannot be resumed without other peers: its evaluation sample is damaged", state.path)
        return None
    seat = seat_of(state.stage()) if manifest.stages else None
    first = seat.member.peer if seat else "" if manifest.stages else manifest.founder.peer
    run = RunInfo(sealed, sample if any(manifest.held_out) else b"")
    try:
        return ResumableRun(manifest, run, bool(places(state.home / DIRECTORY)) or state.identity.peer_id == first)
    except OSError as error:
        raise StateError(f"{state.home / DIRECTORY} cannot be read ({error.strerror}): make it readable") from None


def require_none(state: StateDir) -> None:
    """Check that the directory holds nothing worth keeping, so that a run can be started without --new."""
    if state.is_over:
        raise StateError(f"the run in {state.path} is over: {ANOTHER}")
    why, kept = "", state.certificates.exists() and state.certificates.stat().st_size > 0
    try:
        unseal(state.manifest(), verify)
    except ManifestError as error:
        there = (state.path / "manifest.bin").exists()
        why, kept = f" ({error})" if there else " (manifest.bin is missing)", kept or there
    if kept or (state.home / DIRECTORY).exists():
        raise StateError(f"the run in {state.path} cannot be resumed{why}: --bootstrap joins it again, {ANOTHER}")


@dataclass(frozen=True, slots=True)
class RestartPoint:
    chain: Chain
    archive: CertificateLog
    checkpoints: tuple[Checkpoint, ...]  # those on the chain, newest first; empty if the peer has no state
    data: DataCursor
    shares_anchor: bool = True  # the run has replicated state; if not, the chain is empty, any checkpoint is usable

    def description(self) -> str:
        return f"from {_listed(self.checkpoints[:1])}" if self.checkpoints else ""

    def waiting_reason(
        self, me: Member, fork_peers: int, removed: Callable[[PeerId], bool] = lambda peer: False
    ) -> str:
        """Why this peer waits if no other peer comes: it is not in the state's roster. Empty if it is.

        This happens where the peer left and others continued, and with a new identity in an old directory.
        """
        head = self.chain.head
        roster = {member.peer for member in head.roster}
        if me.peer in roster or not self.shares_anchor:
            return ""
        if any(me.peer == member.peer for each in head.former for member in each):
            if fork_peers and all(map(removed, roster)):
                return "all members of the saved state were removed from the run: former members continue after a fork"
            line = f"this peer left the run before its last members ({_named(roster)}). It waits for one of them"
            return f"{line}, or for most of the peers that left" if fork_peers else f"{line}: the run forbids forks"
        return (
            f"peer {short(me.peer)} is not a member of the saved state (members: {_named(roster)}) and waits for one "
            "of them to connect. If identity.key was replaced, restore the original; --new starts another run instead"
        )

    def like(self, run: str, layout: Layout) -> Checkpoint:
        """A template with the fields that all future checkpoints share."""
        root = bytes(32)
        return Checkpoint(
            path=Path(),
            run=run,
            round=0,
            lineage=root,
            state_root=root,
            layout=layout,
            index=SnapshotIndex(0, ()),
            data=self.data,
            carried=0,
            files={},
        )


def _named(peers: Collection[PeerId]) -> str:
    return ", ".join(sorted(map(short, peers))[:8])


def load_restart_point(
    state: StateDir,
    manifest: Manifest,
    me: Member,
    alone: bool = False,
    shares_anchor: bool = True,
    seat: StageSeat | None = None,
) -> RestartPoint:
    """Find the state from which this incarnation begins. Reads the chain and all checkpoints, so it blocks.

    `alone`: no other peer answered that could send the chain.
    """
    try:
        found = tuple(whole(state.home, log.warning, manifest.run_id))
        chained = found if shares_anchor else ()
        archive, chain = _cut(state, manifest, seat, chained, alone and (shares_anchor or not found))
    except CheckpointError as error:
        raise StateError(str(error)) from None
    except OSError as error:
        raise StateError(f"cannot write {state.certificates} ({error.strerror}): free space there") from None
    checkpoints = tuple(each for each in found if not shares_anchor or is_of(chain, each))
    data = checkpoints[0].data if checkpoints else DataCursor(stream_seed(me), me.incarnation, 0)
    return RestartPoint(chain, archive, checkpoints, data, shares_anchor)


def _cut(
    state: StateDir, manifest: Manifest, seat: StageSeat | None, found: Sequence[Checkpoint], alone: bool
) -> tuple[CertificateLog, Chain]:
    """The chain up to the newest checkpoint on it. A copy is cut, and replaces the file only in the end.

    Checkpoints that the chain does not lead to are moved to past/, together with the chain as it was: a single wrong
    byte in the chain must not cost a month of training.
    """
    copy = state.certificates.with_name(f".{state.certificates.name}.new")
    copy.unlink(missing_ok=True)
    copy.touch(0o600)
    if state.certificates.exists():
        shutil.copyfile(state.certificates, copy)
    archive = CertificateLog(copy, str(state.certificates))
    chain = chain_of(manifest, seat, archive)
    unused = [each for each in found if not is_of(chain, each)]
    what = f"none of the checkpoints in {state.home / DIRECTORY} can be used"
    if unused:
        what = f"{state.certificates} is damaged, or of another branch: it does not lead to {_listed(unused)}"
    if alone and len(unused) == len(found) and places(state.home / DIRECTORY):
        copy.unlink()
        raise StateError(f"{what}; give the address of a peer of the run with --bootstrap, or start another with --new")
    if unused:
        log.warning("%s: moved to %s", what, state.quarantine(manifest.run_id, [each.path for each in unused]))
    cut_back(found, chain)
    archive.sync()
    copy.replace(state.certificates)
    sync_directory(state.home)
    return archive, chain


def _listed(checkpoints: Sequence[Checkpoint]) -> str:
    several = f" and {len(checkpoints) - 1} older ones" if len(checkpoints) > 1 else ""
    return f"the checkpoint before round {checkpoints[0].round + 1}{several}"


def cut_back(checkpoints: Iterable[Checkpoint], chain: Chain) -> tuple[Checkpoint, ...]:
    """Cut the chain back to the first checkpoint on it, or to the genesis."""
    usable = tuple(each for each in checkpoints if is_of(chain, each))
    chain.switch(usable[0].lineage if usable else records.genesis(chain.head.key.run, chain.head.key.scope), ())
    return usable


def is_of(chain: Chain, checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint is of this chain, as far as its records say."""
    head = chain.at(checkpoint.lineage)
    return head is not None and head.state_root in (UNSETTLED, checkpoint.state_root)


async def restore(
    start: RestartPoint,
    outer_loop: ReplicatedOuterLoop | IndependentOuterLoop,
    trainer: RemoteTrainer,
    checkpoints: CheckpointManager,
) -> None:
    """Restore the newest checkpoint, with the inner optimiser's state; offer the older ones to others again."""
    try:
        for each in start.checkpoints:
            checkpoints.holds(each)
        snapshot = checkpoints.snapshots.get(start.checkpoints[0].lineage) if start.checkpoints else None
        if snapshot:
            await outer_loop.start_from(snapshot)
    except OSError as error:
        what = f"{_listed(start.checkpoints[:1])} cannot be read any more ({error.strerror or error})"
        where = checkpoints.home
        raise StateError(f"{what}: repair {where}, or move the damaged checkpoint out of it, and start again") from None
    if start.checkpoints:
        await _load(start.checkpoints[0], trainer)
        if isinstance(outer_loop, ReplicatedOuterLoop) and outer_loop.feedback:
            await outer_loop.feedback.load(start.checkpoints[0].feedback)


async def _load(checkpoint: Checkpoint, trainer: RemoteTrainer) -> None:
    try:
        await trainer.load(checkpoint.inner, checkpoint.data.position, checkpoint.threads)
    except WorkerError as error:
        log.warning("the inner optimiser's state is lost, it starts from zero: %s", error)
        await trainer.load(None, checkpoint.data.position, checkpoint.threads)
