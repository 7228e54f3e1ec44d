"""One scenario from the first process to the last: a swarm is started, played with, healed, asked to finish."""

from __future__ import annotations

import string
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.checkers import DECIDED
from tests.faults.nemesis import LEAVE_SECONDS, Nemesis
from tests.faults.network import Namespaces, why_not
from tests.faults.play import Play
from tests.faults.scenarios import SCENARIOS, Scenario, Step
from tests.faults.tracing import Watch
from tests.realswarm import ORPHAN_SECONDS, RealPeer, RealSwarm, paced, wait

CALM_ROUNDS = 5
LATER_ROUNDS = 2
START_SECONDS = 120.0
ROUNDS_SECONDS = 90.0
_RUNS = {
    "paced": paced(elements=1_000_000, inner_steps=8),
    "gpt": 'task = "gpt"\n[recipe]\ninner_steps = 8\nrounds = 10000\n',
}
TASKS = tuple(_RUNS)


class Unplayable(Exception):
    """This machine does not allow the scenario; one line says what is missing and what to do."""


@dataclass(frozen=True, slots=True)
class Options:
    """What to play with.

    Attributes:
        peers: how many there are before anything is done to them.
    """

    peers: int = 4
    protocol: str = "butterfly"
    task: str = "paced"

    @property
    def names(self) -> tuple[str, ...]:
        """Of the peers, the founder first."""
        return tuple(string.ascii_lowercase[: self.peers])

    @property
    def run(self) -> str:
        """The run file."""
        return f'protocol = "{self.protocol}"\n{_RUNS[self.task]}'


def play(name: str, seed: int, options: Options, home: Path, say: Callable[[str], None]) -> Play:
    """Play a scenario in an empty directory, which keeps what the peers wrote.

    Raises:
        Unplayable: this machine cannot.
    """
    scenario = SCENARIOS[name]
    schedule = scenario.schedule(name, seed, options.names)
    say(f"{name}, seed {seed}: " + "; ".join(str(step) for step in schedule))
    why = why_not()
    if why and scenario.network:
        raise Unplayable(f"{name} needs a network of its own: {why}")
    with ExitStack() as stack:
        network = None if why else stack.enter_context(Namespaces())
        watch = stack.enter_context(Watch())
        traced = any(step.act == "trap" for step in schedule)

        def prepare(peer: RealPeer) -> None:
            peer.environment = watch.environment(peer.name) if traced else {}
            if network:
                place = network.add(peer.name)
                peer.inside, peer.listen = place.inside, f"/ip4/{place.address}/tcp/0"

        swarm = RealSwarm(home, options.run, prepare)
        stack.callback(_clear, swarm)
        return _Stage(swarm, Nemesis(swarm, watch, network), scenario).run(name, seed, options, schedule)


def _clear(swarm: RealSwarm) -> None:
    for peer in swarm.peers.values():
        peer.clear()


class _Stage:
    def __init__(self, swarm: RealSwarm, nemesis: Nemesis, scenario: Scenario) -> None:
        self._swarm, self._nemesis, self._scenario = swarm, nemesis, scenario

    def run(self, name: str, seed: int, options: Options, schedule: Sequence[Step]) -> Play:
        nemesis, swarm = self._nemesis, self._swarm
        calm = self._begin(options.names)
        nemesis.play(schedule)
        healed, should = nemesis.last, swarm.running
        self._recover(should, healed)
        ended = nemesis.tell("asked to finish", [peer.name for peer in should], "end")
        self._end(should)
        left = {peer.name: self._left(peer) for peer in swarm.peers.values()}
        return Play(
            scenario=name,
            seed=seed,
            protocol=options.protocol,
            task=options.task,
            limits=self._scenario.limits,
            calm=calm,
            healed=healed,
            ended=ended,
            should=tuple(peer.name for peer in should),
            ids={peer.name: peer.id for peer in swarm.peers.values()},
            events=nemesis.events,
            histories=swarm.histories(),
            logs={peer.name: peer.said() for peer in swarm.peers.values()},
            lives=nemesis.lives,
            left=left,
            measures=nemesis.measures,
            stuck=nemesis.stuck,
        )

    def _begin(self, names: Sequence[str]) -> tuple[float, float]:
        """All are there, and nothing happens for a few rounds; returns from when to when."""
        founder, *others = names
        for name in names:
            self._nemesis.began(name)
        self._nemesis.tell("started", names, "start")
        first = self._swarm.found(founder)
        self._swarm.join(*others, via=first)
        wait("all are in one mean", lambda: self._swarm.all_in_one_mean(self._swarm.running), START_SECONDS)
        began = time.time()
        self._rounds(self._swarm.running, began, CALM_ROUNDS)
        return began, time.time()

    def _recover(self, should: Sequence[RealPeer], healed: float) -> None:
        """Until all who should have committed together, which the judge looks for, and for a few rounds more."""
        limit = self._scenario.limits.recovery_seconds
        with suppress(AssertionError):
            wait("a mean of all", lambda: self._swarm.all_in_one_mean(should, healed), limit)
        try:
            self._rounds(should, time.time(), LATER_ROUNDS)
        except AssertionError as error:
            self._nemesis.stuck.append(f"after the faults: {error}")

    @staticmethod
    def _rounds(peers: Sequence[RealPeer], since: float, count: int) -> None:
        def decided(peer: RealPeer) -> int:
            return sum(each["time"] > since and each["outcome"] in DECIDED for each in peer.reports())

        wait(f"{count} rounds more", lambda: all(decided(peer) >= count for peer in peers), ROUNDS_SECONDS)

    def _end(self, peers: Sequence[RealPeer]) -> None:
        for peer in peers:
            peer.ask("finish")
        for peer in peers:
            self._nemesis.over(peer.name, 0, LEAVE_SECONDS)

    @staticmethod
    def _left(peer: RealPeer) -> list[str]:
        """Command lines of what is left of a peer a while after its end."""
        until = time.monotonic() + ORPHAN_SECONDS
        while (left := peer.left()) and time.monotonic() < until:
            time.sleep(0.1)
        return [" ".join(each.cmdline()) or str(each.pid) for each in left]
