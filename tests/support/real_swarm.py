"""Peers as users start them: real `python -m node join` processes on the loopback, watched from outside.

What a peer did is read from its `rounds.jsonl`, what it does from its control door, what it said from its logs. Every
process of a peer carries a mark in its environment, which its children inherit: whatever is left of it can be found.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from operator import itemgetter
from pathlib import Path
from typing import Any, Self, TypeVar

import psutil

from node.ui.control import ControlUnavailable, ask
from tests.support.checkers import DECIDED, Report, Violation, check
from tests.support.history import History, one_mean
from tests.support.paths import REPOSITORY

T = TypeVar("T")

LISTEN = "/ip4/127.0.0.1/tcp/0"
POLL_SECONDS = 0.02
ASK_SECONDS = 2.0
START_SECONDS = 60.0
ORPHAN_SECONDS = 2.0
_MARK = "STARLING_TEST_PEER"
_ROLES = {"worker": "node.training.worker", "p2pd": "hivemind_cli/p2pd"}


def paced(elements: int = 250_000, step_seconds: float = 0.1, inner_steps: int = 10, rounds: int = 10_000) -> str:
    """A run file whose rounds last what they last, whatever else this machine does."""
    return (
        f'task = "paced"\n[paced]\nelements = {elements}\nstep_seconds = {step_seconds}\n'
        f"[recipe]\ninner_steps = {inner_steps}\nrounds = {rounds}\n"
    )


def wait(what: str, condition: Callable[[], T | None], seconds: float, poll_seconds: float = POLL_SECONDS) -> T:
    """What the condition returns as soon as it is truthy; fails in these words after so many seconds."""
    until = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > until:
            raise AssertionError(f"{what}: not within {seconds:g} s")
        time.sleep(poll_seconds)
    return value


class RealPeer:
    """One `join` process and what belongs to it; it may be started again, with the same directory.

    Attributes:
        id: its peer id, once it has told.
        address: at which others can dial it, once it has told.
        inside: what its command is started by: `nice`, `ip netns exec …`; one that keeps the process id.
        listen: the multiaddr that it listens on.
        environment: more of it, for all its lives.
        program: the module that is run.
    """

    def __init__(self, name: str, home: Path) -> None:
        self.program = "node"
        self.inside: tuple[str, ...] = ()
        self.listen = LISTEN
        self.environment: dict[str, str] = {}
        self.name, self.directory = name, home / name
        self.id = self.address = ""
        self._log = home / f"{name}.log"
        self._out = home / f"{name}.out"
        self._mark = f"{name}-{uuid.uuid4().hex}"
        self._process: subprocess.Popen[bytes] | None = None
        self._history = History(self.directory / "rounds.jsonl")

    # -- its process --------------------------------------------------------------------------------------------------

    def start(self, *arguments: str) -> Self:
        """Run `join` with these arguments; what it says is added to the log."""
        command = [*self.inside, sys.executable, "-P", "-m", self.program, "join"]
        command += [
            "--state-dir",
            str(self.directory),
            "--no-nat",
            "--listen",
            self.listen,
            "--nickname",
            self.name,
            "--threads",
            "1",
            "--json",
        ]
        command += arguments
        given = {name: value for name, value in os.environ.items() if not name.startswith("NODE_")}
        environment = given | {_MARK: self._mark, "PYTHONPATH": str(REPOSITORY)} | self.environment
        with self._log.open("ab") as log, self._out.open("ab") as out:
            self._process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=log)
        return self

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def code(self) -> int | None:
        """Exit code; minus the signal that killed it; None while it runs."""
        return self._process.poll() if self._process else -1

    @property
    def running(self) -> bool:
        return self.code is None

    def left(self) -> list[psutil.Process]:
        """All processes of this peer, its children and theirs, that there are; zombies do not count."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(_MARK) == self._mark:
                    found.append(process)
            except psutil.Error:  # another user's, a zombie, or gone meanwhile
                continue
        return found

    def child(self, role: str) -> psutil.Process | None:
        """Its worker or its p2pd; None while there is none."""
        for child in psutil.Process(self.pid).children():
            with suppress(psutil.Error):
                if child.status() != psutil.STATUS_ZOMBIE and _ROLES[role] in " ".join(child.cmdline()):
                    return child
        return None

    def strike(self, role: str = "peer", number: int = signal.SIGKILL) -> float:
        """Send a signal to the peer's own process, or to its worker or p2pd, if it has one; returns the wall time."""
        child = None if role == "peer" else self.child(role)
        assert child or role == "peer", f"{self.name} has no {role} now"
        os.kill(child.pid if child else self.pid, number)
        return time.time()

    def ends(self, seconds: float) -> int:
        """Its exit code, which must come within so many seconds."""
        assert self._process is not None
        return self._process.wait(seconds)

    def leaves_nothing(self) -> None:
        """That of a peer that has ended, or was just killed, nothing is left within 2 s."""
        wait(f"{self.name}: worker and p2pd go with the peer", lambda: not self.left(), ORPHAN_SECONDS)
        self.ends(ORPHAN_SECONDS)

    def clear(self) -> None:
        """Kill whatever is left."""
        for process in self.left():
            with suppress(psutil.Error):  # it went with its parent
                process.kill()
        if self._process:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(ORPHAN_SECONDS)
        until = time.monotonic() + ORPHAN_SECONDS
        while self.left() and time.monotonic() < until:  # a killed process takes a moment to go
            time.sleep(POLL_SECONDS)

    # -- what it tells ------------------------------------------------------------------------------------------------

    def ask(self, what: str, seconds: float = ASK_SECONDS) -> dict[str, Any]:
        """What it answers at its door; nothing if it does not."""

        async def answer() -> dict[str, Any]:
            return await ask(self.directory, what, asyncio.get_running_loop().time() + seconds)

        try:
            return asyncio.run(answer())
        except ControlUnavailable:
            return {}

    def status(self) -> dict[str, Any]:
        return self.ask("status")

    def sees(self, other: RealPeer) -> dict[str, Any]:
        """The line of its status about another peer; nothing if it knows of none."""
        lines = self.status().get("peers", ())
        return next((line for line in lines if line["peer"] == other.id), {})

    def reports(self) -> list[Report]:
        """Its history so far."""
        return self._history.reports()

    def last(self) -> Report:
        """Its last report; an empty one before the first."""
        return (self.reports() or [{"round": -1, "peers": (), "outcome": ""}])[-1]

    def said(self) -> str:
        """All that it wrote to stderr."""
        try:
            return self._log.read_text(errors="replace")
        except OSError:
            return ""

    def meet(self) -> bool:
        """Whether it can be dialled by now; notes its id and address."""
        status = self.status()
        if addresses := status.get("addresses"):
            self.id, self.address = status["peer"], addresses[0]
        return bool(addresses) and bool(status["run_id"])


class RealSwarm:
    """Peers in one run. A context manager: at its end no process is left, and the histories keep the invariants.

    Attributes:
        invariants: by which the histories are judged.
        decisions: outcomes that a round is to come to, whoever was lost in it.
    """

    decisions: tuple[str, ...] = DECIDED
    invariants: Callable[[dict[str, list[Report]]], list[Violation]] = staticmethod(check)

    def __init__(self, home: Path, run: str = "", prepare: Callable[[RealPeer], None] = lambda peer: None) -> None:
        """
        Args:
            run: the run file; a paced run if there is none.
            prepare: called with each new peer before it is started for the first time.
        """
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
        """One of that name, not started yet if it is new."""
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
        """Start peers with nothing but an address, side by side, and wait until they know which run it is."""
        joining = [self.peer(name).start("--bootstrap", via.address) for name in names]
        for peer in joining:
            _in_the_run(peer, f"{peer.name} gets into the run", seconds)
        return joining

    def four(self, seconds: float) -> list[RealPeer]:
        """Four running peers in one mean: whoever is missing is started, from where it was."""
        if not self.peers:
            self.join("b", "c", "d", via=self.found("a"))
        elif missing := [peer.name for peer in self.peers.values() if not peer.running][: 4 - len(self.running)]:
            self.join(*missing, via=self.running[0])
        four, now = self.running, time.time()
        wait("four are in one mean", lambda: self.all_in_one_mean(four, now), seconds)
        return four

    # -- judging ------------------------------------------------------------------------------------------------------

    def histories(self) -> dict[str, list[Report]]:
        return {name: peer.reports() for name, peer in self.peers.items()}

    def check(self) -> None:
        """That all histories together keep the invariants."""
        violations = self.invariants(self.histories())
        assert not violations, "\n".join(str(each.as_dict()) for each in violations[:5])

    def all_in_one_mean(self, peers: Iterable[RealPeer], since: float = 0.0) -> Report | None:
        """A round whose mean holds work of them all and of nobody else, and that each began later than at that wall
        time; None: not yet."""
        return one_mean(peers, since)


def _in_the_run(peer: RealPeer, what: str, seconds: float) -> None:
    """Wait until others can dial it, or it has ended, which is not waited out."""
    wait(what, lambda: not peer.running or peer.meet(), seconds)
    assert peer.running, f"{what}: ended with {peer.code}: {(peer.said().splitlines() or [''])[-1]}"


def deciding(
    peers: Iterable[RealPeer],
    since: float,
    decisions: Collection[str] = DECIDED,
    moment: Callable[[Report], float] = itemgetter("time"),
) -> list[Report]:
    """Of each peer the first decision of whose moment, the report's if nothing is said, is later than that wall time;
    empty until all have one."""
    wanted = list(peers)
    later = [[each for each in peer.reports() if moment(each) > since] for peer in wanted]
    found = [end for ends in later if (end := next((each for each in ends if each["outcome"] in decisions), None))]
    return found if len(found) == len(wanted) else []
