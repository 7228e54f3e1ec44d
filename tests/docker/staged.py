"""The profile `stages` of docker/compose.yaml: six containers of a run in three stages, and their faults.

Two plays: six containers are started at once, and lose one and a disk; and a founder is killed before all stages have
members. After each case all peers of each stage must be in one mean that began after it.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.docker import verdict
from tests.docker.cases import Cases
from tests.docker.engine import Engine
from tests.docker.swarm import FOUNDER, POLL_SECONDS, Peer, Swarm
from tests.support.checkers import Report
from tests.support.history import one_mean
from tests.support.real_swarm import wait

STAGES, CONTAINERS = 3, 6
REPLICAS = tuple(f"replica-{number}" for number in range(1, 5))
UP_SECONDS = TOGETHER_SECONDS = 120.0
BEGINS_SECONDS = 90.0
CALM_SECONDS = 15.0
SEATED_SECONDS = 60.0
RUN = f"""name = "docker-test-stages"
stages = {STAGES}
[recipe]
rounds = 10000
inner_steps = 10
[gpt]
preset = "w64"
"""


@dataclass(frozen=True, slots=True)
class Play:
    """What became of one: the figures of its cases, and what failed."""

    cases: list[dict[str, Any]]
    failed: list[str]


def plays(engine: Engine, variables: Mapping[str, str], place: Path, say: Callable[[str], None]) -> Iterator[Play]:
    (place / "stages.toml").write_text(RUN)
    variables = {**variables, "RUN_FILE": str(place / "stages.toml")}
    for name, play in (("stages", _lose_peers), ("founding", _lose_the_founder)):
        home = place / name
        home.mkdir()
        swarm = Swarm(engine, f"starling-{name}-{uuid.uuid4().hex[:8]}", variables, home, profile="stages")
        try:
            yield _judged(swarm, StagedCases(swarm, say), play, say)
        finally:
            swarm.remove()


def _lose_peers(cases: StagedCases) -> tuple[float, float]:
    cases.up()
    began = time.time()
    time.sleep(CALM_SECONDS)
    calm = began, time.time()
    for case in (cases.kill, cases.lose_a_volume):
        if not cases.struck[-1].failed:
            case()
    return calm


def _lose_the_founder(cases: StagedCases) -> tuple[float, float]:
    cases.begin_without_the_founder()
    return time.time(), time.time()


def _judged(
    swarm: Swarm, cases: StagedCases, play: Callable[[StagedCases], tuple[float, float]], say: Callable[[str], None]
) -> Play:
    calm = play(cases)
    failed = swarm.privileges()
    for stage, peers in sorted(by_stage(swarm.peers).items()):
        rounds = max(each["round"] + 1 for peer in peers for each in peer.reports())
        say(f"stage {stage}: {', '.join(peer.name for peer in peers)}: {rounds} rounds")
    leaving, _ = cases.leave()
    swarm.keep_logs()
    recorded = verdict.play(swarm, cases.events, cases.struck, calm, leaving, STAGES)
    judged = verdict.judged(recorded, swarm, cases.struck, swarm.home / "timeline.txt", say)
    return Play(verdict.cases(cases.struck), failed + verdict.broken(judged))


def by_stage(peers: Sequence[Peer]) -> dict[int, list[Peer]]:
    """The peers of each stage, by their last reports."""
    found: dict[int, list[Peer]] = {}
    for peer in peers:
        if reports := peer.reports():
            found.setdefault(reports[-1]["stage"], []).append(peer)
    return found


class StagedCases(Cases):
    """Stages with two replicas fork if one is lost, so a fault of one is a fault of its stage."""

    def up(self) -> None:
        with self._case(f"compose up, {CONTAINERS} containers in {STAGES} stages", UP_SECONDS) as case:
            case.over = self._swarm.launch(count=CONTAINERS)
            case.targets = tuple(self._swarm.names)
            self._tell("start", "compose up", *case.targets, at=case.over)

    def kill(self) -> None:
        self._killed("stages: kill -9 of a container of the last stage", self._victim(STAGES - 1), self._swarm.pid)

    def lose_a_volume(self) -> None:
        """Another peer takes the place of one that is gone with its disk."""
        swarm, peer = self._swarm, self._victim(1)
        mates = self._mates(peer)
        with self._case("stages: a container and its volume removed", TOGETHER_SECONDS, peer, *mates) as case:
            old = swarm.peer(peer).id
            swarm.lose(peer)
            lost = self._tell("fault", "removed, with its volume", f"{peer} that was lost")
            case.figures["next_round_seconds"] = self._next_round(lost, f"{peer} that was lost")
            case.over = self._tell("start", "compose up", peer, at=swarm.launch(count=CONTAINERS))
            if swarm.peer(peer).id == old:
                case.failed.append("it is the same peer, although its volume was removed")

    def begin_without_the_founder(self) -> None:
        """It is killed when one other peer has a stage; the rest begins the run, and it takes part afterwards."""
        swarm, first = self._swarm, REPLICAS[0]
        others = (*REPLICAS[1:], "peer")
        with self._case("stages: the founder killed at the founding", TOGETHER_SECONDS) as case:
            self._tell("start", "compose up", FOUNDER, first, at=swarm.launch(FOUNDER, first, count=2))
            wait(f"{first} has a stage", (swarm.peer(first).directory / "stage").exists, SEATED_SECONDS, POLL_SECONDS)
            swarm.expect([FOUNDER], -9)
            swarm.engine.run("kill", swarm.container(FOUNDER))
            self._tell("fault", "docker kill", FOUNDER)
            swarm.launch("--no-deps", *others, count=CONTAINERS - 1)
            began = self._tell("start", "compose up", *others)
            wait("all stages train without the founder", lambda: self._trains(REPLICAS), BEGINS_SECONDS, POLL_SECONDS)
            case.figures["begins_seconds"] = time.time() - began
            case.over = self._tell("start", "docker start", FOUNDER, at=swarm.start(FOUNDER))
            case.targets = tuple(swarm.names)

    def _trains(self, names: Sequence[str]) -> bool:
        """Whether each of these peers has trained a round, and each stage has one of them."""
        peers = [self._swarm.peer(name) for name in names]
        return len(by_stage(peers)) == STAGES and all(any(each["tokens"] for each in peer.reports()) for peer in peers)

    def _victim(self, stage: int) -> str:
        """A replica that others of its stage outlive: of this stage, or else of one that has them."""
        found = by_stage(self._swarm.peers)
        places = sorted(found, key=lambda each: (len(found[each]) < 2, each != stage))
        return next(peer.name for place in places for peer in found[place] if peer.name in REPLICAS)

    def _mates(self, peer: str) -> tuple[str, ...]:
        found = by_stage(self._swarm.peers).values()
        return tuple(each.name for mates in found for each in mates if peer in [mate.name for mate in mates])

    def _means(self, peers: Sequence[Peer], since: float) -> list[Report]:
        """One for each stage, as soon as all stages have one."""
        found = by_stage(peers)
        if len(found) < STAGES or sum(map(len, found.values())) < len(peers):
            return []
        means = [mean for each in found.values() if (mean := one_mean(each, since))]
        return means if len(means) == STAGES else []
