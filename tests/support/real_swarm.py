"""Peers as users start them: real `python -m node join` processes on the loopback, observed from outside.

A peer's past is read from its `rounds.jsonl`, its present from its control socket, its messages from its logs. Every
process of a peer has a mark in its environment, which its children inherit, so that leftover processes are found.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from operator import itemgetter
from pathlib import Path
from typing import Any, Self, TypeVar

import psutil

from node.ui.control import ControlUnavailable, ask
from tests.support import independent_checkers as checkers_loose
from tests.support import stage_checkers, warm
from tests.support.checkers import DECIDED, Report, Violation, began, check
from tests.support.history import History, one_mean
from tests.support.paths import REPOSITORY
from tests.support.warm import MARK, WarmProcess, server

T = TypeVar("T")

LISTEN = "/ip4/127.0.0.1/tcp/0"
POLL_SECONDS = 0.1
"""Each question costs the tests and the peers milliseconds, on cores that they share."""
ASK_SECONDS = 2.0
START_SECONDS = 120.0
"""Of a process, on a machine that plays other tests beside it; a script may load libraries for half of it."""
ORPHAN_SECONDS = 2.0
WORKER = r"node\.training\.(stage_)?worker\b"
"""Found in the command line of a worker, of a whole model or of a stage."""
_ROLES = {"worker": re.compile(WORKER), "p2pd": re.compile("hivemind_cli/p2pd")}


def paced(elements: int = 250_000, step_seconds: float = 0.1, inner_steps: int = 10, rounds: int = 10_000) -> str:
    """A run file whose steps have a fixed length, whatever the load of the machine."""
    return (
        f'task = "paced"\n[paced]\nelements = {elements}\nstep_seconds = {step_seconds}\n'
        f"[recipe]\ninner_steps = {inner_steps}\nrounds = {rounds}\n"
    )


def wait(what: str, condition: Callable[[], T | None], seconds: float, poll_seconds: float = POLL_SECONDS) -> T:
    """Return the condition's value as soon as it is truthy; after this many seconds, fail with `what`."""
    until = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > until:
            raise AssertionError(f"{what}: not within {seconds:g} s")
        time.sleep(poll_seconds)
    return value


class RealPeer:
    """One `join` process and its children. It may be started again with the same directory.

    Attributes:
        id: the peer id, once it is known.
        address: the address at which others can dial it, once it is known.
        inside: a prefix of the command that keeps the process id: `nice`, `ip netns exec …`.
        listen: the multiaddr that it listens on.
        nat: whether it may use relays and map ports.
        environment: additional environment variables, for every start.
        program: the module that is run.
        modules: what the peer's process has loaded when it begins, to save the time.
    """

    def __init__(self, name: str, home: Path) -> None:
        self.program = "node"
        self.modules: tuple[str, ...] = ()
        self.inside: tuple[str, ...] = ()
        self.listen = LISTEN
        self.nat = False
        self.environment: dict[str, str] = {}
        self.name, self.directory = name, home / name
        self.id = self.address = ""
        self._log = home / f"{name}.log"
        self._out = home / f"{name}.out"
        self._mark = uuid.uuid4().hex
        self._process: subprocess.Popen[bytes] | WarmProcess | None = None
        self._history = History(self.directory / "rounds.jsonl")

    # -- its process --------------------------------------------------------------------------------------------------

    def start(self, *arguments: str, threads: bool = True) -> Self:
        """Run `join` with these arguments; its output is appended to the log."""
        words = ["join", "--state-dir", str(self.directory), "--listen", self.listen, "--nickname", self.name]
        words += ["--nat" if self.nat else "--no-nat", "--json", *(("--threads", "1") if threads else ()), *arguments]
        given = {name: value for name, value in os.environ.items() if not name.startswith("NODE_")}
        environment = given | {MARK: self._mark, "PYTHONPATH": str(REPOSITORY)} | self.environment
        with self._log.open("ab") as log, self._out.open("ab") as out:
            if self.inside:
                command = [*self.inside, sys.executable, "-P", "-m", self.program, *words]
                self._process = subprocess.Popen(
                    command, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=log
                )
            else:
                self._process = server(*self.modules).start(
                    self.program, words, environment, {1: out.fileno(), 2: log.fileno()}
                )
        return self

    @property
    def mark(self) -> dict[str, str]:
        """The variable by which its processes are found."""
        return {MARK: self._mark}

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def code(self) -> int | None:
        """The exit code, or minus the signal that killed it; None while it runs."""
        return self._process.poll() if self._process else -1

    @property
    def running(self) -> bool:
        return self.code is None

    def left(self) -> list[psutil.Process]:
        """All running processes of this peer, its children and theirs, without zombies."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self._mark:
                    found.append(process)
            except psutil.Error:  # another user's, a zombie, or gone meanwhile
                continue
        return found

    def child(self, role: str) -> psutil.Process | None:
        for child in psutil.Process(self.pid).children(recursive=True):
            with suppress(psutil.Error):
                if child.status() != psutil.STATUS_ZOMBIE and _ROLES[role].search(" ".join(child.cmdline())):
                    return child
        return None

    def strike(self, role: str = "peer", number: int = signal.SIGKILL) -> float:
        """Send a signal to the peer's process, or to its worker or p2pd, which must exist; returns the wall time."""
        child = None if role == "peer" else self.child(role)
        assert child or role == "peer", f"{self.name} has no {role} now"
        os.kill(child.pid if child else self.pid, number)
        return time.time()

    def ends(self, seconds: float) -> int:
        assert self._process is not None
        return self._process.wait(seconds)

    def leaves_nothing(self) -> None:
        """Assert that of a peer that has ended or was just killed, no process is left within 2 s."""
        wait(f"{self.name}: worker and p2pd go with the peer", lambda: not self.left(), ORPHAN_SECONDS)
        if self._process:  # not of a peer that a script has started
            self.ends(ORPHAN_SECONDS)

    def clear(self) -> None:
        for process in self.left():
            with suppress(psutil.Error):  # it went with its parent
                process.kill()
        if self._process:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(ORPHAN_SECONDS)
        until = time.monotonic() + ORPHAN_SECONDS
        while self.left() and time.monotonic() < until:  # a killed process takes a moment to go
            time.sleep(POLL_SECONDS)

    def command(self, *arguments: str, code: int = 0) -> str:
        """Run a command on this peer as its user does; returns what it prints."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("NODE_")}
        done = warm.run("node", *arguments, "--state-dir", str(self.directory), environment=environment, seconds=30)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    # -- its status and reports ---------------------------------------------------------------------------------------

    def ask(self, what: str, seconds: float = ASK_SECONDS) -> dict[str, Any]:
        """Its answer at the control socket; empty if it does not answer."""

        async def answer() -> dict[str, Any]:
            return await ask(self.directory, what, asyncio.get_running_loop().time() + seconds)

        try:
            return asyncio.run(answer())
        except ControlUnavailable:
            return {}

    def status(self) -> dict[str, Any]:
        return self.ask("status")

    def sees(self, other: RealPeer) -> dict[str, Any]:
        """What its status says about another peer; empty if it does not know the other."""
        lines = self.status().get("peers", ())
        return next((line for line in lines if line["peer"] == other.id), {})

    def reports(self) -> list[Report]:
        return self._history.reports()

    def since(self, wall: float) -> list[Report]:
        """The reports of rounds that it began after that wall time."""
        return [each for each in self.reports() if began(each) > wall]

    def last(self) -> Report:
        return (self.reports() or [{"round": -1, "peers": (), "outcome": ""}])[-1]

    def said(self) -> str:
        try:
            return self._log.read_text(errors="replace")
        except OSError:
            return ""

    def meet(self) -> bool:
        """Whether it can be dialled by now; sets its id and address."""
        status = self.status()
        if addresses := status.get("addresses"):
            self.id, self.address = status["peer"], addresses[0]
        return bool(addresses) and bool(status["run_id"])


class RealSwarm:
    """Peers in one run. A context manager: at its end no process is left, and the histories keep the invariants."""

    decisions: tuple[str, ...] = DECIDED
    invariants: Callable[[dict[str, list[Report]]], list[Violation]] = staticmethod(check)

    def __init__(self, home: Path, run: str = "", prepare: Callable[[RealPeer], None] = lambda peer: None) -> None:
        self.home, self._prepare = home, prepare
        self.peers: dict[str, RealPeer] = {}
        (home / "run.toml").write_text(run or paced())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for peer in self.peers.values():
            peer.clear()
        if kind is None:
            self.check()
        for peer in self.peers.values():
            peer.leaves_nothing()

    def __getitem__(self, name: str) -> RealPeer:
        return self.peers[name]

    @property
    def running(self) -> list[RealPeer]:
        return [peer for peer in self.peers.values() if peer.running]

    # -- starting -----------------------------------------------------------------------------------------------------

    def peer(self, name: str) -> RealPeer:
        """The peer of this name; a new one is not started yet."""
        if name not in self.peers:
            self.peers[name] = RealPeer(name, self.home)
            self._prepare(self.peers[name])
        return self.peers[name]

    def found(self, name: str, *arguments: str, seconds: float = START_SECONDS) -> RealPeer:
        """Start the run, and wait until others can join it."""
        peer = self.peer(name).start("--run", str(self.home / "run.toml"), *arguments)
        _in_the_run(peer, f"{name} founds a run", seconds)
        return peer

    def join(self, *names: str, via: RealPeer, seconds: float = START_SECONDS) -> list[RealPeer]:
        """Start peers at the same time with one address to join at, and wait until they are in the run."""
        joining = [self.peer(name).start(*self.way_in(name, via), *self.arguments(name)) for name in names]
        for peer in joining:
            _in_the_run(peer, f"{peer.name} gets into the run", seconds)
        return joining

    def arguments(self, name: str) -> tuple[str, ...]:
        return ()

    def way_in(self, name: str, via: RealPeer) -> tuple[str, ...]:
        """The arguments by which a peer finds the run of another one."""
        return ("--bootstrap", via.address)

    def four(self, seconds: float) -> list[RealPeer]:
        """Four running peers in one mean. Peers that have ended are started again as needed."""
        if not self.peers:
            self.join("b", "c", "d", via=self.found("a"))
        elif missing := [peer.name for peer in self.peers.values() if not peer.running][: 4 - len(self.running)]:
            self.join(*missing, via=self.running[0])
        four, now = self.running, time.time()
        wait("four are in one mean", lambda: self.all_in_one_mean(four, now), seconds)
        return four

    # -- checking -----------------------------------------------------------------------------------------------------

    def histories(self) -> dict[str, list[Report]]:
        return {name: peer.reports() for name, peer in self.peers.items()}

    def check(self) -> None:
        violations = self.invariants(self.histories())
        assert not violations, "\n".join(str(each.as_dict()) for each in violations[:5])

    def can_go_on(self, peers: Iterable[RealPeer]) -> bool:
        """Whether these peers, if they are all that run, can train at all."""
        return any(True for _ in peers)

    def all_in_one_mean(self, peers: Iterable[RealPeer], since: float = 0.0) -> Report | None:
        """A round whose mean has work of exactly these peers, and that each began after that wall time (`one_mean`)."""
        return one_mean(peers, since)


def _in_the_run(peer: RealPeer, what: str, seconds: float) -> None:
    """Wait until others can dial the peer; fails at once if it ends."""
    wait(what, lambda: not peer.running or peer.meet(), seconds)
    assert peer.running, f"{what}: ended with {peer.code}: {(peer.said().splitlines() or [''])[-1]}"


def whole_rounds(peers: Sequence[RealPeer], count: int, round_seconds: float) -> list[list[Report]]:
    """The next rounds of each peer that it has not begun yet."""
    now = time.time()
    wait(f"{count} rounds", lambda: all(len(each.since(now)) >= count for each in peers), count * round_seconds)
    return [each.since(now)[:count] for each in peers]


def deciding(
    peers: Iterable[RealPeer],
    since: float,
    decisions: Collection[str] = DECIDED,
    moment: Callable[[Report], float] = itemgetter("time"),
) -> list[Report]:
    """The first decision of each peer after that wall time; empty until all peers have one."""
    wanted = list(peers)
    later = [[each for each in peer.reports() if moment(each) > since] for peer in wanted]
    found = [end for ends in later if (end := next((each for each in ends if each["outcome"] in decisions), None))]
    return found if len(found) == len(wanted) else []


def deciding_one_round(peers: Sequence[RealPeer], since: float) -> list[Report]:
    """Each peer's decision of the first round that one of them decides after that wall time; others may be sooner."""
    number = min((end["round"] for end in deciding(peers, since)), default=None)
    found = [
        each for peer in peers for each in peer.reports() if each["round"] == number and each["outcome"] in DECIDED
    ]
    return found if len(found) == len(peers) else []


class IndependentSwarm(RealSwarm):
    decisions = ("committed",)
    invariants = staticmethod(checkers_loose.check)

    def all_in_one_mean(self, peers: Iterable[RealPeer], since: float = 0.0) -> Report | None:
        """The report by which all have mixed, in rounds that began after that wall time (`mixed`); None: not yet."""
        wanted = list(peers)
        reports = (report for peer in wanted for report in peer.reports())
        return checkers_loose.mixed(reports, [peer.id for peer in wanted], since)


class PrivateSwarm(RealSwarm):
    """`RealSwarm` of a private run: peers join by tickets of the peer that they join through, which lie in files."""

    def found(self, name: str, *arguments: str, seconds: float = START_SECONDS) -> RealPeer:
        return super().found(name, "--private", *arguments, seconds=seconds)

    def way_in(self, name: str, via: RealPeer) -> tuple[str, ...]:
        if (self[name].directory / "pass.bin").exists():
            return super().way_in(name, via)
        ticket = self.home / f"{name}.ticket"
        ticket.write_text(json.loads(via.command("invite", "--json"))["ticket"])
        return ("--ticket-file", str(ticket))


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
