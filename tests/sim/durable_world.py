"""A simulated swarm whose peers have disks: an incarnation starts from the last checkpoint of the one before."""

from __future__ import annotations

from dataclasses import dataclass

from node.outer.replicated_loop import ReplicatedOuterLoop
from node.reporting.report import RoundReport, tokens_counted
from protocols.base import PeerId, Vector
from protocols.consensus.record import genesis
from protocols.history.chain import Chain, DecidedRound
from tests.sim.scenario_runner import ScenarioRunner, ScenarioSetup
from tests.sim.world import RUN


@dataclass(frozen=True, slots=True)
class Checkpoint:
    links: tuple[DecidedRound, ...]
    anchor: Vector
    velocity: Vector


class DurableWorld(ScenarioRunner):
    """A world whose peers write checkpoints and restart from them.

    Attributes:
        every_rounds: a checkpoint is written before each round whose number it divides.
        disks: peer -> its checkpoint. A test may remove or replace it.
    """

    def __init__(self, cast: ScenarioSetup, every_rounds: int = 1) -> None:
        super().__init__(cast)
        self.every_rounds = every_rounds
        self.disks: dict[PeerId, Checkpoint] = {}

    async def restored(self, outer_loop: ReplicatedOuterLoop) -> None:
        if kept := self.disks.get(outer_loop.averager.me.peer):
            outer_loop.chain.switch(genesis(RUN, outer_loop.chain.head.key.scope), kept.links)
            outer_loop.anchor.copy_(kept.anchor)
            outer_loop.state.velocity.copy_(kept.velocity)
            await outer_loop.trainer.write(outer_loop.anchor)
            await outer_loop.state.hash()
            await outer_loop.state.keep(outer_loop._snapshots, outer_loop.chain.head.key)
            outer_loop.recall(
                tokens_counted(RoundReport(**each) for each in self.histories[outer_loop.averager.me.peer])
            )

    def entering(self, peer: PeerId, head: object) -> None:
        super().entering(peer, self.head(peer))
        chain = self.chain(peer)
        if chain.head.key.round % self.every_rounds == 0:
            self.disks[peer] = self._checkpoint(chain, self.replicas[peer])

    @staticmethod
    def _checkpoint(chain: Chain, outer_loop: ReplicatedOuterLoop) -> Checkpoint:
        start = genesis(RUN, chain.head.key.scope)
        return Checkpoint(chain.since(start), outer_loop.anchor.clone(), outer_loop.state.velocity.clone())
