"""A peer's replica and all that belongs to its kind, put together for the protocol of its run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from node.members.membership import Membership
from node.noloco import NoLoCo
from node.outer import OuterSGD
from node.rounds.closing import Closing
from node.rounds.course import OwnCourse
from node.rounds.life import loose_rounds, rounds
from node.rounds.loose import LooseReplica
from node.rounds.round import Replica
from node.settings.runconfig import RunConfig
from node.stay import Way
from node.storage.archive import spool
from node.storage.keeper import Keeper
from node.training.remote import RemoteTrainer
from protocols import LOOSE, PROTOCOLS
from protocols.base import ClosingAverager, Host, Settings
from protocols.catchup.standing import Standings
from protocols.catchup.sync import Sync
from protocols.gate import Gate
from protocols.history.chain import Chain
from protocols.rounds.partstore import PartStore


@dataclass(frozen=True, slots=True)
class Parts:
    """What replicas of both kinds are made of."""

    host: Host
    settings: Settings
    config: RunConfig
    trainer: RemoteTrainer
    keeper: Keeper
    membership: Membership

    def _outer(self) -> OuterSGD:
        return OuterSGD(self.config.recipe.outer_learning_rate, self.config.recipe.outer_momentum)

    def _own_outer(self) -> OuterSGD | NoLoCo:
        """Of a peer with a state of its own: a run may say that pairs pull each other."""
        recipe = self.config.recipe
        if recipe.outer_pull is None:
            return self._outer()
        return NoLoCo(recipe.outer_momentum, recipe.outer_learning_rate, recipe.outer_pull)

    def anchored(self, chain: Chain, past: Callable[[Gate], PartStore], home: Path) -> Way:
        """One that shares its anchor with the others."""
        host, keeper, anchor = self.host, self.keeper, self.trainer.anchor()
        snapshots, owed = keeper.snapshots, keeper.feedback
        averager = PROTOCOLS[self.config.protocol](host, self.settings)
        averager.shelf.past = past(averager.shelf.gate)
        outer = self._outer()
        replica = Replica(chain, self.trainer, averager, outer, host.compute, anchor, snapshots, keeper, owed)
        sync = Sync(host, chain, self.settings, snapshots, self.membership.peers, averager.shelf)
        sync.on_better, sync.proofs.room = (lambda branch: averager.supersede()), partial(spool, home)
        averager.on_ahead = sync.hear
        return Way(replica, sync, partial(rounds, replica, sync))

    def loose(self, course: OwnCourse, newcomer: bool) -> Way:
        """One with a state of its own; a newcomer has yet to fetch it."""
        # A copy: others may move the state while the worker trains, and the worker measures from what it was given.
        host, keeper, anchor = self.host, self.keeper, self.trainer.anchor().clone()
        averager = LOOSE[self.config.protocol](host, self.settings)
        replica = LooseReplica(
            course, self.trainer, averager, self._own_outer(), host.compute, anchor, keeper.snapshots, keeper
        )
        replica.lacks_state, replica.spread_limit = newcomer, self.config.spread_limit
        if isinstance(averager, ClosingAverager):
            replica.closing = Closing(averager, self.config.recipe.rounds, self.membership.rounds)
        replica.compare, hints = self.membership.compare, self.membership.peers
        standings = Standings(
            host, self.settings, keeper.snapshots, lambda: course.key, hints, lambda: not replica.seeks_state
        )
        return Way(replica, standings, partial(loose_rounds, replica, standings))
