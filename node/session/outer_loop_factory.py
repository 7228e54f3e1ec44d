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
from protocols.sync.chain_sync import ChainSync
from protocols.sync.independent_sync import IndependentStateSync


@dataclass(frozen=True, slots=True)
class OuterLoopFactory:
    """What replicas of both kinds are made of."""

    host: Host
    settings: Settings
    config: RunConfig
    trainer: RemoteTrainer
    keeper: CheckpointManager
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
        host, keeper, anchor = self.host, self.keeper, self.trainer.anchor()
        snapshots, owed = keeper.snapshots, keeper.feedback
        averager = REPLICATED_PROTOCOLS[self.config.protocol](host, self.settings)
        averager.shelf.past = past(averager.shelf.gate)
        outer = self._outer()
        replica = ReplicatedOuterLoop(
            chain, self.trainer, averager, outer, host.compute, anchor, snapshots, keeper, owed
        )
        sync = ChainSync(host, chain, self.settings, snapshots, self.membership.peers, averager.shelf)
        sync.on_better, sync.proofs.room = (lambda branch: averager.supersede()), partial(spool, home)
        averager.on_ahead = sync.hear
        return OuterLoopStack(replica, sync, partial(run_replicated_rounds, replica, sync))

    def independent(self, course: LocalHistory, newcomer: bool) -> OuterLoopStack:
        """One with a state of its own; a newcomer has yet to fetch it."""
        # A copy: others may move the state while the worker trains, and the worker measures from what it was given.
        host, keeper, anchor = self.host, self.keeper, self.trainer.anchor().clone()
        averager = INDEPENDENT_PROTOCOLS[self.config.protocol](host, self.settings)
        replica = IndependentOuterLoop(
            course, self.trainer, averager, self._own_outer(), host.compute, anchor, keeper.snapshots, keeper
        )
        replica.lacks_state, replica.spread_limit = newcomer, self.config.spread_limit
        if isinstance(averager, ClosingAverager):
            replica.closing = ClosingPhase(averager, self.config.recipe.rounds, self.membership.rounds)
        replica.compare, hints = self.membership.compare, self.membership.peers
        standings = IndependentStateSync(
            host, self.settings, keeper.snapshots, lambda: course.key, hints, lambda: not replica.seeks_state
        )
        return OuterLoopStack(replica, standings, partial(run_independent_rounds, replica, standings))
