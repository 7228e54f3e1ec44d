"""A peer's replica and all that belongs to its kind, put together for the protocol of its run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from node.config.run_config import RunConfig
from node.membership.membership import Membership
from node.outer.closing import ClosingPhase
from node.outer.independent_loop import IndependentOuterLoop
from node.outer.noloco import NoLoCo
from node.outer.replicated_loop import ReplicatedOuterLoop
from node.outer.round_history import LocalHistory
from node.outer.round_loops import run_independent_rounds, run_replicated_rounds
from node.outer.sgd import OuterSGD
from node.session.peer_session import OuterLoopStack
from node.storage.certificate_log import spool
from node.storage.checkpoint_manager import CheckpointManager
from node.training.remote import RemoteTrainer
from protocols import INDEPENDENT_PROTOCOLS, REPLICATED_PROTOCOLS
from protocols.base import ClosingAverager, Host, Settings
from protocols.butterfly.part_store import PartStore
from protocols.gate import Gate
from protocols.history.chain import Chain
from protocols.sync.chain_sync import ChainSync, ChainSyncOptions
from protocols.sync.independent_sync import IndependentStateSync


@dataclass(frozen=True, slots=True)
class OuterLoopFactory:
    """What replicas of both kinds are made of."""

    host: Host
    settings: Settings
    config: RunConfig
    trainer: RemoteTrainer
    checkpoints: CheckpointManager
    membership: Membership

    def _outer(self) -> OuterSGD:
        return OuterSGD(self.config.recipe.outer_learning_rate, self.config.recipe.outer_momentum)

    def _own_outer(self) -> OuterSGD | NoLoCo:
        """Of a peer with a state of its own: a run may say that pairs pull each other."""
        recipe = self.config.recipe
        if recipe.outer_pull is None:
            return self._outer()
        return NoLoCo(recipe.outer_momentum, recipe.outer_learning_rate, recipe.outer_pull)

    def replicated(self, chain: Chain, past: Callable[[Gate], PartStore], home: Path) -> OuterLoopStack:
        """One that shares its anchor with the others."""
        host, checkpoints, anchor = self.host, self.checkpoints, self.trainer.anchor()
        snapshots, error_feedback = checkpoints.snapshots, checkpoints.feedback
        averager = REPLICATED_PROTOCOLS[self.config.protocol](host, self.settings)
        averager.part_cache.past = past(averager.part_cache.gate)
        outer = self._outer()
        outer_loop = ReplicatedOuterLoop(
            chain, self.trainer, averager, outer, host.compute, anchor, snapshots, checkpoints, error_feedback
        )
        options = ChainSyncOptions(averager.part_cache, partial(spool, home), lambda branch: averager.supersede())
        sync = ChainSync(host, chain, self.settings, snapshots, self.membership.peers, options)
        averager.on_ahead = sync.hear
        return OuterLoopStack(outer_loop, sync, partial(run_replicated_rounds, outer_loop, sync))

    def independent(self, course: LocalHistory, newcomer: bool) -> OuterLoopStack:
        """One with a state of its own; a newcomer has yet to fetch it."""
        # A copy: others may move the state while the worker trains, and the worker measures from what it was given.
        host, checkpoints, anchor = self.host, self.checkpoints, self.trainer.anchor().clone()
        averager = INDEPENDENT_PROTOCOLS[self.config.protocol](host, self.settings)
        outer_loop = IndependentOuterLoop(
            course, self.trainer, averager, self._own_outer(), host.compute, anchor, checkpoints.snapshots, checkpoints
        )
        outer_loop.lacks_state, outer_loop.spread_limit = newcomer, self.config.spread_limit
        if isinstance(averager, ClosingAverager):
            outer_loop.closing = ClosingPhase(averager, self.config.recipe.rounds, self.membership.rounds)
        outer_loop.compare, hints = self.membership.compare, self.membership.peers
        state_sync = IndependentStateSync(
            host, self.settings, checkpoints.snapshots, lambda: course.key, hints, lambda: not outer_loop.seeks_state
        )
        return OuterLoopStack(outer_loop, state_sync, partial(run_independent_rounds, outer_loop, state_sync))
