"""What a peer holds while its processes run, and the run that it has entered."""

from __future__ import annotations

from dataclasses import dataclass

from node.config.manifest import Manifest
from node.joining import resume
from node.joining.bootstrap import BootstrapClient, RunInfo
from node.joining.stages import StagePlace
from node.network.libp2p import LibP2PTransport
from node.runtime.compute import ThreadCompute
from node.runtime.metrics import LoopLag
from node.session.pausing import PauseController
from node.session.stage_entrance import StageEntrance
from node.storage.statedir import StateDir
from node.training.remote import RemoteTrainer
from protocols.base import Member


@dataclass(frozen=True, slots=True)
class PeerResources:
    """What a peer holds from the start of its processes to their end.

    Attributes:
        disk, files: run blocking reads and writes: of the state directory, and of files with addresses.
    """

    state: StateDir
    transport: LibP2PTransport
    compute: ThreadCompute
    disk: ThreadCompute
    files: ThreadCompute
    bootstrap: BootstrapClient
    lag: LoopLag
    pauses: PauseController

    @property
    def me(self) -> Member:
        return Member(self.state.identity.peer_id, self.state.incarnation)


@dataclass(frozen=True, slots=True)
class EnteredRun:
    """A run that this peer takes part in: its description for joiners, and where this peer starts from.

    Attributes:
        entrance, place: this peer's stage; None in a run without stages.
    """

    manifest: Manifest
    run: RunInfo
    start: resume.RestartPoint
    trainer: RemoteTrainer
    entrance: StageEntrance | None = None
    place: StagePlace | None = None
