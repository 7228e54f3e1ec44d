"""Builds a peer's outer loop, with its state sync, for the protocol of its run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from node.config.run_config import RunConfig
from node.membership.membership import Membership
from node.outer.closing import ClosingPhase
from node.outer.error_feedback import ErrorFeedback
from node.outer.independent_loop import IndependentOptions, IndependentOuterLoop
from node.outer.noloco import NoLoCo
from node.outer.outer_loop import OuterLoopDeps
from node.outer.replicated_loop import ReplicatedOuterLoop
from node.outer.round_history import LocalHistory
from node.outer.round_loops import run_independent_rounds, run_replicated_rounds
from node.outer.sgd import OuterSGD
from node.session.peer_session import OuterLoopStack
from node.storage.certificate_log import spool
from node.storage.checkpoint_manager import CheckpointManager
from node.tasks.extra import extra_elements
from node.training.remote import RemoteTrainer
from protocols.aio import Gate
from protocols.base import ClosingAverager, Host, LocalProgress, Settings, Vector
from protocols.butterfly.part_cache import PartCache
from protocols.butterfly.part_store import PartStore
from protocols.history.chain import Chain
from protocols.registry import load_averager
from protocols.sync.chain_sync import ChainSync, ChainSyncOptions
from protocols.sync.independent_sync import IndependentStateSync


@dataclass(frozen=True, slots=True)
class OuterLoopFactory:
    """Builds outer loops of both kinds.

    Attributes:
        on_progress: see `OuterLoopDeps`.
    """

    host: Host
    settings: Settings
    config: RunConfig
    trainer: RemoteTrainer
    checkpoints: CheckpointManager
    membership: Membership
    on_progress: Callable[[str, LocalProgress], None]

    def replicated(
        self,
        chain: Chain,
        make_store: Callable[[Gate], PartStore],
        directory: Path,
        feedback: ErrorFeedback | None,
    ) -> OuterLoopStack:
        """The outer loop of a peer that shares its outer state with all members.

        Args:
            make_store: returns the store for the reduced parts of past rounds.
            directory: the peer's state directory.
        """
        host, snapshots, gate = self.host, self.checkpoints.snapshots, Gate()
        part_cache = PartCache(host, make_store(gate), gate)
        options = ChainSyncOptions(part_cache, partial(spool, directory), lambda branch: averager.supersede())
        sync = ChainSync(host, chain, self.settings, snapshots, self.membership.peers, options)
        averager = load_averager(self.config.protocol)(host, self.settings, part_cache, sync.hear)
        deps = self._deps(self.trainer.anchor())
        outer_loop = ReplicatedOuterLoop(chain, averager, self._sgd(), deps, feedback)
        return OuterLoopStack(outer_loop, sync, partial(run_replicated_rounds, outer_loop, sync))

    def independent(self, history: LocalHistory, newcomer: bool) -> OuterLoopStack:
        """The outer loop of a peer with independent state. A newcomer must fetch its first state."""
        host, snapshots, membership = self.host, self.checkpoints.snapshots, self.membership
        averager = load_averager(self.config.protocol)(host, self.settings)
        closing = None
        if isinstance(averager, ClosingAverager):
            closing = ClosingPhase(averager, self.config.recipe.rounds, membership.rounds)
        options = IndependentOptions(membership.compare, self.config.spread_limit, closing, newcomer, membership.rounds)
        # A copy: exchanges may change the state while the worker trains, but the worker measures from its own start.
        deps = self._deps(self.trainer.anchor().clone())
        outer_loop = IndependentOuterLoop(history, averager, self._independent_optimizer(), deps, options)
        sync = IndependentStateSync(
            host, self.settings, snapshots, lambda: history.key, membership.peers, lambda: not outer_loop.seeks_state
        )
        return OuterLoopStack(outer_loop, sync, partial(run_independent_rounds, outer_loop, sync))

    def _deps(self, anchor: Vector) -> OuterLoopDeps:
        checkpoints = self.checkpoints
        return OuterLoopDeps(
            self.trainer,
            self.host.compute,
            anchor,
            checkpoints.snapshots,
            checkpoints,
            self.on_progress,
            self.membership.announce_activity,
        )

    def _sgd(self) -> OuterSGD:
        recipe = self.config.recipe
        decay, extra = recipe.outer_decay or 0.0, extra_elements(self.trainer.layout)
        return OuterSGD(recipe.outer_learning_rate, recipe.outer_momentum, recipe.rounds, decay, extra)

    def _independent_optimizer(self) -> OuterSGD | NoLoCo:
        """SGD, or NoLoCo if the run's recipe sets `outer_pull`."""
        recipe = self.config.recipe
        if recipe.outer_pull is None:
            return self._sgd()
        extra = extra_elements(self.trainer.layout)
        return NoLoCo(recipe.outer_momentum, recipe.outer_learning_rate, recipe.outer_pull, extra)
