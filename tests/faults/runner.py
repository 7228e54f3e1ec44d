"""Plays one scenario: starts a swarm, carries out the schedule, waits for the recovery, and ends the swarm."""

from __future__ import annotations

import os
import string
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from protocols.registry import INDEPENDENT_PROTOCOLS
from tests.faults import memory
from tests.faults.goodput import MEANS
from tests.faults.liar_control import can_lie
from tests.faults.machines import clock_file, set_clock, small_disk
from tests.faults.nemesis import DIRECT_PORT, TROUBLE, Nemesis, Tools
from tests.faults.network import Namespaces, why_not
from tests.faults.peer import CLOCK, PROGRAM
from tests.faults.recording import Recording
from tests.faults.scenarios import Scenario
from tests.faults.steps import Step, left
from tests.faults.tracing import Watch
from tests.faults.wire import ACTS as PROXIED
from tests.faults.wire import Proxied
from tests.support.real_swarm import IndependentSwarm, PrivateSwarm, RealPeer, RealSwarm, StagedSwarm, paced, wait

CALM_ROUNDS = 5
PEERS_OF_A_STAGE = 2
LATER_ROUNDS, LATER_MIXINGS = 2, 8
"""Rounds to wait for after the recovery; peers that mix need more, as each round only halves their distance."""
PROCESS_SECONDS, START_SECONDS = 60.0, 120.0
ROUNDS_SECONDS = 90.0
SAMPLE_SECONDS, ASK_SECONDS = 1.0, 0.8
STEPS_TOLD = 40
"""Steps of a schedule that are printed before the play; the timeline has all of them."""
_OVERLAPPED = paced(elements=1_000_000, step_seconds=0.04, inner_steps=40) + 'overlap = "keep"\n'
"""Steps that are shorter than averaging."""
_RUNS = {
    "paced": paced(elements=1_000_000, inner_steps=8),
    "gpt": 'task = "gpt"\n[recipe]\ninner_steps = 8\nrounds = 10000\n',
    "keep": _OVERLAPPED,
    "stream": f"{_OVERLAPPED}fragments = 4\n",
}
_STAGED_RUNS = {
    "paced": paced(elements=300_000, step_seconds=1.6, inner_steps=2).replace("rounds", "batches = 8\nrounds"),
    "gpt": 'task = "gpt"\n[recipe]\ninner_steps = 4\nbatches = 8\nrounds = 10000\n[gpt]\npreset = "w64"\nrows = 1\n',
}
"""With stages: microbatches of a fifth of a second, so that six peers and their p2pd leave the cores idle."""
TASKS = tuple(_RUNS)
_DISKS, _LIMITED = frozenset(("fill", "choke")), frozenset(("squeeze", "confine"))
"""Steps that need a small disk, and steps that need a memory limit."""
_APART = "spread_limit = 1.0\n"
"""Paced peers walk at random, so the ordinary spread limit of a run does not fit them."""


class Unplayable(Exception):
    """The message says in one line what is missing and what to do."""


@dataclass(frozen=True, slots=True)
class Options:
    """The swarm of a play. `patience`: factor of all waiting times except the recovery limit."""

    peers: int = 4
    protocol: str = "butterfly"
    task: str = "paced"
    patience: float = 1.0
    stages: int = 1
    private: bool = False

    def beside(self, scenario: Scenario) -> Options:
        """These options with the stages of a scenario, and two peers for each at least; private if it is."""
        if scenario.stages == 1:
            return replace(self, private=scenario.private)
        return replace(self, stages=scenario.stages, peers=max(self.peers, PEERS_OF_A_STAGE * scenario.stages))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(string.ascii_lowercase[: self.peers])

    @property
    def run(self) -> str:
        apart = _APART if self.loose and self.task == "paced" else ""
        if self.stages > 1:
            return f"stages = {self.stages}\n{_STAGED_RUNS[self.task]}"
        return f'protocol = "{self.protocol}"\n{apart}{_RUNS[self.task]}'

    @property
    def loose(self) -> bool:
        return self.protocol in INDEPENDENT_PROTOCOLS


def play(
    name: str, scenario: Scenario, seed: int, options: Options, home: Path, say: Callable[[str], None]
) -> Recording:
    """Play a scenario in an empty directory, in which the files of the peers stay."""
    options = options.beside(scenario)
    schedule = scenario.schedule(name, seed, options.names)
    rest = f"; and {len(schedule) - STEPS_TOLD} more" if len(schedule) > STEPS_TOLD else ""
    say(f"{name}, seed {seed}: " + "; ".join(str(step) for step in schedule[:STEPS_TOLD]) + rest)
    acts = {step.act for step in schedule}
    why = _required(name, scenario, schedule, options)
    with ExitStack() as stack:
        network = None if why else stack.enter_context(Namespaces())
        watch = stack.enter_context(Watch())
        # A killed peer leaves its sockets. The path must be short: a socket's path has about a hundred bytes at most.
        sockets = stack.enter_context(TemporaryDirectory(prefix="play-", dir="/tmp", ignore_cleanup_errors=True))
        struck = _struck(schedule)
        proxied = stack.enter_context(Proxied(network, seed)) if network and acts & {*PROXIED} else None
        groups: dict[str, memory.Group] = {}

        def prepare(peer: RealPeer) -> None:
            peer.program = PROGRAM
            peer.environment = {"TMPDIR": sockets} | (watch.environment(peer.name) if "trap" in acts else {})
            if "skew" in acts:
                set_clock(peer, 0.0)
                peer.environment |= {CLOCK: str(clock_file(peer))}
            if peer.name in struck(_DISKS):
                stack.callback(small_disk(peer.directory))
            if peer.name in struck({"lie"}):
                can_lie(peer)
            if peer.name in struck(_LIMITED):
                groups[peer.name] = memory.group(peer.name)
                stack.callback(groups[peer.name].remove)
                peer.inside = groups[peer.name].inside
            if network:
                place = network.add(peer.name)
                peer.environment |= {"NODE_DIRECT_PORT": str(DIRECT_PORT)}
                address = "0.0.0.0" if "move" in acts else place.address
                peer.inside, peer.listen = (*peer.inside, *place.inside), f"/ip4/{address}/tcp/0"

        swarm = _swarm(home, options, prepare)
        nemesis = Nemesis(swarm, Tools(watch, network, groups, proxied), options.patience)
        stack.callback(_clear, swarm)
        stack.callback(nemesis.heal)
        runner = _Runner(swarm, nemesis, scenario, options)
        if options.stages == 1:
            return runner.run(name, seed, options, schedule)
        drivers = options.names[:: options.stages]
        with _sampling(lambda: [swarm.peers[each] for each in drivers if each in swarm.peers]) as samples:
            played = runner.run(name, seed, options, schedule)
        return replace(played, stages=options.stages, samples=samples)


@contextmanager
def _sampling(peers: Callable[[], Sequence[RealPeer]]) -> Iterator[dict[str, list[tuple[float, int]]]]:
    """Ask peers once a second for their tokens: peer -> (wall time, tokens of all its incarnations), oldest first."""
    over, found = threading.Event(), dict[str, list[tuple[float, int]]]()

    def look() -> None:
        while not over.wait(SAMPLE_SECONDS):
            for peer in peers():
                if peer.running and (status := peer.ask("status", ASK_SECONDS)):
                    samples = found.setdefault(peer.name, [])
                    # a peer that has just started again does not know yet what it has trained on
                    if not samples or status["tokens"] >= samples[-1][1]:
                        samples.append((time.time(), status["tokens"]))

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join(10.0)


def _swarm(home: Path, options: Options, prepare: Callable[[RealPeer], None]) -> RealSwarm:
    if options.stages > 1:
        return StagedSwarm(home, options.run, prepare, options.names, options.stages)
    if options.private:
        return PrivateSwarm(home, options.run, prepare)
    return (IndependentSwarm if options.loose else RealSwarm)(home, options.run, prepare)


def _required(name: str, scenario: Scenario, schedule: Sequence[Step], options: Options) -> str:
    """Why this machine has no network of namespaces, if the scenario does not need one; empty if it has one."""
    acts = {step.act for step in schedule}
    if options.loose and left(schedule, options.names) < 2:
        what = f"{name} leaves one of {options.peers} peers: by {options.protocol} it has no peer to mix with"
        raise Unplayable(f"{what}; take more peers, or another scenario")
    if options.loose and options.stages > 1:
        raise Unplayable(f"{name} needs stages, which average by butterfly, not by {options.protocol}")
    if options.private and options.loose:
        raise Unplayable(f"{name} is played by butterfly, not by {options.protocol}")
    if options.task in ("keep", "stream") and (options.loose or options.stages > 1):
        raise Unplayable(f"--task {options.task} is for butterfly, without stages")
    why = why_not()
    if why and scenario.network:
        raise Unplayable(f"{name} needs a network of its own: {why}")
    if os.geteuid() and acts & _DISKS:
        raise Unplayable(f"{name} needs a small disk of its own: run it as root")
    if acts & _LIMITED and (why_unlimited := memory.why_not()):
        raise Unplayable(f"{name} needs a memory limit: {why_unlimited}")
    return why


def _struck(schedule: Sequence[Step]) -> Callable[[Collection[str]], set[str]]:
    return lambda acts: {name for step in schedule if step.act in acts for name in step.targets}


def _clear(swarm: RealSwarm) -> None:
    for peer in swarm.peers.values():
        peer.clear()


class _Runner:
    def __init__(self, swarm: RealSwarm, nemesis: Nemesis, scenario: Scenario, options: Options) -> None:
        self._swarm, self._nemesis, self._scenario, self._patience = swarm, nemesis, scenario, options.patience
        self._later_rounds = LATER_MIXINGS if options.loose else LATER_ROUNDS

    def run(self, name: str, seed: int, options: Options, schedule: Sequence[Step]) -> Recording:
        nemesis, swarm = self._nemesis, self._swarm
        calm = self._begin(options.names)
        if calm[1] > calm[0]:
            nemesis.play(schedule)
        nemesis.unseen()
        healed, should, limits = nemesis.last, swarm.running, self._scenario.limits.beside(calm)
        self._recover(should, healed, limits.recovery_seconds)
        ended = nemesis.tell("asked to finish", [peer.name for peer in should], "end")
        self._end(should)
        return Recording(
            scenario=name,
            seed=seed,
            protocol=options.protocol,
            task=options.task,
            limits=limits,
            calm=calm,
            healed=healed,
            ended=ended,
            should=tuple(peer.name for peer in should),
            ids={peer.name: peer.id for peer in swarm.peers.values()},
            events=nemesis.events,
            histories=nemesis.machines.right(swarm.histories()),
            logs={peer.name: peer.said() for peer in swarm.peers.values()},
            incarnations=nemesis.incarnations,
            left=nemesis.left,
            measures=nemesis.measures,
            stuck=nemesis.stuck,
        )

    def _begin(self, names: Sequence[str]) -> tuple[float, float]:
        """Start all peers and run a few rounds; returns begin and end of this calm, equal if the start failed."""
        founder, *others = names
        for name in names:
            self._nemesis.began(name)
        began = self._nemesis.tell("started", names, "start")
        try:
            first = self._swarm.found(founder, seconds=PROCESS_SECONDS * self._patience)
            self._swarm.join(*others, via=first, seconds=PROCESS_SECONDS * self._patience)
            within = START_SECONDS * self._patience
            wait("all are in one mean", lambda: self._swarm.all_in_one_mean(self._swarm.running), within)
            began = time.time()
            self._rounds(self._swarm.running, began, CALM_ROUNDS)
        except TROUBLE as error:
            self._nemesis.stuck.append(f"the start: {error or type(error).__name__}")
            return began, began
        return began, time.time()

    def _recover(self, should: Sequence[RealPeer], healed: float, within: float) -> None:
        with suppress(AssertionError):
            wait("a mean of all", lambda: self._swarm.all_in_one_mean(should, healed), within)
        try:
            self._rounds(should, time.time(), self._later_rounds)
        except TROUBLE as error:
            self._nemesis.stuck.append(f"after the faults: {error or type(error).__name__}")

    def _rounds(self, peers: Sequence[RealPeer], since: float, count: int) -> None:
        def means(peer: RealPeer) -> int:
            return sum(each["time"] > since and each["outcome"] in MEANS for each in peer.reports())

        within = self._patience * ROUNDS_SECONDS
        wait(f"{count} rounds more", lambda: all(means(peer) >= count for peer in peers), within)

    def _end(self, peers: Sequence[RealPeer]) -> None:
        for peer in peers:
            try:
                self._nemesis.leave(peer.name)
            except TROUBLE as error:
                self._nemesis.stuck.append(f"{peer.name} leaves: {error or type(error).__name__}")
        self._nemesis.unseen()
