"""A pipeline whose story a test tells: peers with disks, in stages of the test's choice."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from protocols.base import Member, PeerId
from protocols.pipeline.settings import PipelineEvent
from tests.sim.pipeline_world import PipelineWorld
from tests.sim.scenario_runner import ScenarioRunner, ScenarioSetup
from tests.support import checkers


class PipelineRunner(ScenarioRunner, PipelineWorld):
    """Peers p0, p1, … with disks, each in the stage that `layout` says."""

    def __init__(self, layout: Sequence[int], cast: ScenarioSetup | None = None) -> None:
        cast = cast or ScenarioSetup(len(layout))
        super().__init__(replace(cast, peers=len(layout), stages=max(layout) + 1, every_rounds=1))
        self._layout = dict(zip(self.peers, layout, strict=True))
        self._react: Callable[[PipelineEvent], None] = lambda event: None

    def stage(self, peer: PeerId) -> int:
        return self._layout[peer]

    def of_stage(self, stage: int) -> tuple[PeerId, ...]:
        return tuple(peer for peer in self.peers if self._layout[peer] == stage)

    def founders_of(self, index: int) -> tuple[Member, ...]:
        return tuple(Member(peer) for peer in self.sharing(index) if peer in self.founders)

    # -- what is seen, and what follows from it -----------------------------------------------------------------------

    def watch(self, event: PipelineEvent) -> None:
        super().watch(event)
        self._react(event)

    def react(self, reaction: Callable[[PipelineEvent], None]) -> None:
        """Call this at every event from now on. What it does to peers belongs into `soon`."""
        self._react = reaction

    def soon(self, act: Callable[[PeerId], None], peer: PeerId) -> None:
        """Do something to a peer in this instant, after the event that is being watched; only once."""
        self._react = lambda event: None
        asyncio.get_running_loop().call_soon(act, peer)

    def count(self, kind: str, since: float = 0.0, stage: int | None = None) -> Counter[PeerId]:
        """How often something happened at each replica since a moment."""
        return Counter(
            event.replica.peer for time, event in self.events
            if event.kind == kind and time >= since and stage in (None, event.stage)
        )  # fmt: skip

    def trained(self, peer: PeerId) -> int:
        return self.chain(peer).trained

    def whole(self) -> bool:
        """Whether in each stage all live peers vote on one branch, each in its present incarnation."""
        for stage in range(self.scenario.stages):
            alive = [peer for peer in self.of_stage(stage) if peer in self.alive()]
            members = {self.network.nodes[peer].member for peer in alive}
            if not self.one_branch(alive) or any(set(self.head(peer).roster) != members for peer in alive):
                return False
        return True

    def unclean(self) -> list[checkers.Violation]:
        return [*super().unclean(), *self.check(self.histories)]
