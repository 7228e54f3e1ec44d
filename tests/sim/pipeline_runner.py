"""A pipeline whose story a test tells: peers with disks, in stages of the test's choice."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from node.session.peer_session import MOVE_FIRST_STEP_SECONDS
from protocols.base import Member, PeerId
from protocols.pipeline.settings import PipelineEvent
from tests.sim.pipeline_world import PipelineWorld
from tests.sim.scenario_runner import Checkpoint, ScenarioRunner, ScenarioSetup
from tests.support import checkers, pipeline_checkers

AWAY_SECONDS = 5.0


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


class MovingRunner(PipelineRunner):
    """Peers that change stage, as `node.session.peer` lets them: by an orderly end, and a new incarnation."""

    def __init__(self, layout: Sequence[int], cast: ScenarioSetup | None = None) -> None:
        super().__init__(layout, cast)
        self._first = dict(self._layout)
        self._stages: dict[Member, int] = {}  # of each incarnation
        self._other_disks: dict[tuple[PeerId, int], Checkpoint] = {}  # what peers have on their disks of other stages
        self._moving: dict[PeerId, int] = {}

    def founders_of(self, index: int) -> tuple[Member, ...]:
        stage = self.stage(self.peers[index])
        return tuple(Member(peer) for peer in self.founders if self._first[peer] == stage)

    def move(self, peer: PeerId, stage: int) -> None:
        """Fetch the stage's state from a live peer there, and leave in good order; then begin again there."""
        donor = next(each for each in self.of_stage(stage) if each in self.alive())
        self._other_disks[peer, stage] = self.disks[donor]
        self._moving[peer] = stage
        with self.network.nodes[peer].process.entered():
            self.replicas[peer].leave(MOVE_FIRST_STEP_SECONDS)

    def _start(self, peer: PeerId) -> asyncio.Task[None]:
        self._stages[self.network.nodes[peer].member] = self.stage(peer)
        return super()._start(peer)

    def kill(self, peer: PeerId) -> None:
        super().kill(peer)
        self._moving.pop(peer, None)  # a process that starts again is asked for nothing

    def _end_of(self, peer: PeerId, member: Member) -> None:
        target, is_end = self._moving.get(peer), self.network.nodes[peer].process.alive
        super()._end_of(peer, member)
        if target is not None and is_end and self.network.nodes[peer].member == member:
            self._other_disks[peer, self.stage(peer)] = self.disks[peer]
            self._layout[peer], self.disks[peer] = target, self._other_disks.pop((peer, target))
            asyncio.get_running_loop().call_soon(self.revive, peer)

    async def killed_in_move(self, mover: PeerId, target: int, number: int) -> bool:
        """Move a peer, and kill it at one of its messages from then on; it comes back, and all train on.

        Returns whether the move has so many messages: it is over when all peers of the stage have admitted the mover.
        """
        await self.rounds(1)
        first, struck = self.network.nodes[mover].messages, False

        def watch(peer: PeerId, at: int, way: str, other: PeerId) -> None:
            nonlocal struck
            if peer == mover and at >= first + number and not struck:
                struck = True
                self.kill(mover)

        self.network.watch = watch
        self.move(mover, target)
        there = lambda: self.stage(mover) == target and mover in self.alive()  # noqa: E731
        await self.until(lambda: struck or there(), 60.0, "the switch")
        await asyncio.sleep(0.0)
        await self.until(lambda: struck or self.whole(), 120.0, "the end of the move")
        self.network.watch = None
        if struck:
            await asyncio.sleep(AWAY_SECONDS)
            self.revive(mover)
        await asyncio.sleep(0.0)
        await self.until(self.whole, 120.0, "a whole swarm")
        await self.rounds(2)
        return struck

    def check(self, histories: dict[PeerId, list[checkers.Report]]) -> list[checkers.Violation]:
        """Of each stage, what was done there."""
        found = []
        for stage in range(self.scenario.stages):
            there = {
                peer: [each for each in history if self._stages[Member(peer, each["incarnation"])] == stage]
                for peer, history in histories.items()
            }
            found += checkers.check({peer: history for peer, history in there.items() if history})
        return found + self.found + pipeline_checkers.check(self.events, self.pipeline(), self._finished())
