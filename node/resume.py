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

from node.checkpoint import DIRECTORY, Checkpoint, Data, places, whole
from node.entry import Run
from node.identity import verify
from node.keeper import Keeper
from node.manifest import Manifest, ManifestError, unseal
from node.outfit import stream_seed
from node.remote import RemoteTrainer, WorkerError
from node.round import Replica
from node.statedir import StateDir, holds_run
from protocols import record as records
from protocols.base import Member
from protocols.chain import UNSETTLED, Chain

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
        checkpoints: of its former lives, whole and on its chain, the newest first; none: it begins with nothing.
        data: where its stream of data goes on.
    """

    checkpoints: tuple[Checkpoint, ...]
    data: Data


def found(directory: Path, run: str) -> tuple[Checkpoint, ...]:
    """The whole checkpoints of a run; damaged ones are named. It reads all of them: to be called off the event loop."""
    return tuple(whole(directory, log.warning, run))


def start(checkpoints: Iterable[Checkpoint], chain: Chain, me: Member) -> Start:
    """Cut the chain back to the newest of these checkpoints that is of it, or to the genesis.

    Args:
        me: whose data are drawn, if there is none.
    """
    usable = [each for each in checkpoints if _is_of(chain, each)]
    chain.switch(usable[0].lineage if usable else records.genesis(chain.head.key.run), ())
    data = usable[0].data if usable else Data(stream_seed(me), me.incarnation, 0)
    return Start(tuple(usable), data)


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
