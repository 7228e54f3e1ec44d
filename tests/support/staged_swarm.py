"""Real peers of a run in stages: each stage has a chain of its own, so each has means of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from tests.support import stage_checkers
from tests.support.checkers import Report
from tests.support.history import one_mean
from tests.support.real_swarm import RealPeer, RealSwarm


class StagedSwarm(RealSwarm):
    """`RealSwarm` of a run with stages. Peer i, in the order of `names`, works in stage i mod `stages`."""

    invariants = staticmethod(stage_checkers.check)

    def __init__(
        self,
        home: Path,
        run: str,
        prepare: Callable[[RealPeer], None] = lambda peer: None,
        names: Iterable[str] = (),
        stages: int = 1,
    ) -> None:
        super().__init__(home, run, prepare)
        self.stages = stages
        self._stage_of = {name: number % stages for number, name in enumerate(names)}

    def stage_of(self, name: str) -> int:
        return self._stage_of[name]

    def arguments(self, name: str) -> tuple[str, ...]:
        """The stage, at its first start: after that its directory must tell."""
        return () if self[name].directory.exists() else ("--stage", str(self.stage_of(name)))

    def can_go_on(self, peers: Iterable[RealPeer]) -> bool:
        """Whether each stage has one of them."""
        return len({self.stage_of(peer.name) for peer in peers}) == self.stages

    def all_in_one_mean(self, peers: Iterable[RealPeer], since: float = 0.0) -> Report | None:
        """A round of stage 0 as `RealSwarm` finds it, if each other stage has one, too; None: not yet."""
        wanted = list(peers)
        stages = [[peer for peer in wanted if self.stage_of(peer.name) == stage] for stage in range(self.stages)]
        found = [one_mean(stage, since) for stage in stages]
        return found[0] if all(found) else None
