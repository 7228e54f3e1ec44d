"""The cases: faults of the compose swarm, one after the other. The recovery starts when the fault of a case is over."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from tests.docker.swarm import FOUNDER, POLL_SECONDS, Peer, Swarm
from tests.faults.goodput import MEANS
from tests.faults.recording import Event
from tests.support.checkers import Report, began
from tests.support.history import one_mean
from tests.support.real_swarm import WORKER, wait

KILL_SECONDS = CUT_SECONDS = 90.0
TOGETHER_SECONDS = 120.0
NEXT_ROUND_SECONDS = 30.0
RESTART_SECONDS = 30.0
ONE_BY_ONE_SECONDS = 60.0
LEAVE_SECONDS = 15.0
UNPLUGGED_SECONDS, PAUSED_SECONDS, STAYS_DEAD_SECONDS = 20.0, 15.0, 6.0
PEERS, MORE_PEERS = 3, 5
# Takes memory in pieces of 8 MB until the kernel has killed the worker.
_HOG = """
import os, sys, time
worker, held = int(sys.argv[1]), []
while len(held) < 400 and os.path.exists(f"/proc/{worker}"):
    held.append(b"x" * (8 << 20))
    time.sleep(0.01)
sys.exit(os.path.exists(f"/proc/{worker}"))
"""
_FIND_WORKER = r"""
import glob, re
for path in glob.glob("/proc/[0-9]*/cmdline"):
    if re.search(rb"node\.training\.(stage_)?worker\b", open(path, "rb").read()): print(path.split("/")[2])
"""


@dataclass(slots=True)
class Struck:
    """The result of a case. `over`: wall time of the end of the fault; `should`: who must be in one mean afterwards."""

    name: str
    targets: tuple[str, ...] = ()
    began: float = field(default_factory=time.time)
    over: float = 0.0
    should: tuple[str, ...] = ()
    figures: dict[str, float] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)


class Cases:
    def __init__(self, swarm: Swarm, say: Callable[[str], None]) -> None:
        self.struck: list[Struck] = []
        self.events: list[Event] = []
        self._swarm, self._say = swarm, say

    def all(self) -> Iterator[Callable[[], None]]:
        """Consecutive faults of single peers affect different peers."""
        yield lambda: self._killed("kill -9 of the container's first process", "peer-1", self._swarm.pid)
        python = "node join"
        yield lambda: self._killed(
            "kill -9 of Python under it", "peer-2", lambda name: self._swarm.process(name, python).pid
        )
        yield lambda: self._killed("founder: kill -9", FOUNDER, self._swarm.pid)
        yield self._docker_kill
        yield self._disconnect
        yield self._pause
        yield self._out_of_memory
        yield self._one_by_one
        yield self._scale
        yield self._down_and_up

    def up(self) -> None:
        with self._case(f"compose up, founder and {PEERS} peers", KILL_SECONDS) as case:
            case.over = self._swarm.up(PEERS)
            case.targets = tuple(self._swarm.names)
            self._tell("start", "compose up", *case.targets, at=case.over)
            if len(self._ids()) != 1 + PEERS:
                case.failed.append(f"{len(self._ids())} peers hold {1 + PEERS} directories")

    def leave(self) -> tuple[float, float]:
        """Stop all peers at once; returns the wall time before, and the seconds until all had left."""
        swarm, names = self._swarm, self._swarm.names
        asked = self._tell("end", "docker stop", *names)
        seconds = swarm.stop(*names)
        if seconds > LEAVE_SECONDS:
            self.struck[-1].failed.append(f"leaving took {seconds:.1f} s, more than {LEAVE_SECONDS:g}")
        return asked, seconds

    # -- crashes ------------------------------------------------------------------------------------------------------

    def _killed(self, name: str, peer: str, pid: Callable[[str], int]) -> None:
        """Kill a process; the engine restarts the container, which is the next incarnation of the same peer."""
        swarm = self._swarm
        with self._case(name, KILL_SECONDS, peer, *self._mates(peer)) as case:
            before, running = swarm.peer(peer).incarnation, len(swarm.running)
            case.over = self._tell("fault", f"SIGKILL: {name}", peer, at=swarm.die(peer, pid(peer)))
            wait(f"{peer} has died", lambda: peer not in swarm.names, 10.0, POLL_SECONDS)
            case.figures["next_round_seconds"] = self._next_round(case.over, peer)
            swarm.identify(running)
            again = f"{peer} is the same peer in its next incarnation"
            wait(again, lambda: swarm.peer(peer).incarnation == before + 1, RESTART_SECONDS, POLL_SECONDS)

    def _docker_kill(self) -> None:
        """`docker kill`: the engine does not restart the container, `docker start` does."""
        swarm, peer = self._swarm, "peer-3"
        with self._case("docker kill, docker start", KILL_SECONDS, peer) as case:
            container = swarm.container(peer)
            swarm.expect([peer], -9)
            swarm.engine.run("kill", container)
            killed = self._tell("fault", "docker kill", peer)
            case.figures["next_round_seconds"] = self._next_round(killed, peer)
            time.sleep(max(0.0, killed + STAYS_DEAD_SECONDS - time.time()))
            if swarm.inspect(container)["State"]["Status"] != "exited":
                case.failed.append("the engine started a container that docker kill had ended")
            case.over = self._tell("start", "docker start", peer, at=swarm.start(peer))

    # -- away for a while ---------------------------------------------------------------------------------------------

    def _disconnect(self) -> None:
        swarm, peer = self._swarm, "peer-1"
        with self._case(f"network: disconnected for {UNPLUGGED_SECONDS:g} s", CUT_SECONDS, peer) as case:
            network, container = f"{swarm.project}_default", swarm.container(peer)
            swarm.engine.run("network", "disconnect", network, container)
            cut = self._tell("fault", "disconnected", peer)
            case.figures["next_round_seconds"] = self._next_round(cut, peer)
            time.sleep(max(0.0, cut + UNPLUGGED_SECONDS - time.time()))
            swarm.engine.run("network", "connect", network, container)
            case.over = self._tell("heal", "connected", peer)

    def _pause(self) -> None:
        swarm, peer = self._swarm, "peer-2"
        with self._case(f"docker pause for {PAUSED_SECONDS:g} s", CUT_SECONDS, peer) as case:
            swarm.engine.run("pause", swarm.container(peer))
            paused = self._tell("fault", "paused", peer)
            case.figures["next_round_seconds"] = self._next_round(paused, peer)
            time.sleep(max(0.0, paused + PAUSED_SECONDS - time.time()))
            swarm.engine.run("unpause", swarm.container(peer))
            case.over = self._tell("heal", "unpaused", peer)

    def _out_of_memory(self) -> None:
        """The kernel kills the worker for lack of memory, and the peer starts another."""
        swarm, peer = self._swarm, "peer-3"
        with self._case("out of memory: the kernel ends the worker", KILL_SECONDS, peer) as case:
            incarnation, old = swarm.peer(peer).incarnation, swarm.process(peer, WORKER).pid
            container = swarm.container(peer)
            inside = swarm.engine.run("exec", container, "python", "-c", _FIND_WORKER).split()
            swarm.engine.run("exec", container, "python", "-c", _HOG, inside[0], seconds=60)
            case.over = self._tell("fault", "its worker was killed: no memory", peer)
            new = wait("another worker", lambda: self._worker(peer, old), 30.0, POLL_SECONDS)
            if new == old or swarm.peer(peer).incarnation != incarnation or peer not in swarm.names:
                case.failed.append("the peer itself did not live through it")

    def _worker(self, name: str, old: int) -> int:
        try:
            found = self._swarm.process(name, WORKER).pid
        except AssertionError:
            return 0
        return found if found != old else 0

    # -- many at once -------------------------------------------------------------------------------------------------

    def _one_by_one(self) -> None:
        """All peers leave in turn; all but the last return and continue; then the last returns.

        The last has the highest directory, so that no other container takes it.
        """
        swarm, names = self._swarm, self._swarm.names
        *others, last = names
        with self._case("left one by one; the last returns last", TOGETHER_SECONDS, *names) as case:
            for name in names:
                swarm.stop(name)
                self._tell("end", "stopped", name)
            began = self._tell("start", "started, all but the last to leave", *others, at=swarm.start(*others))
            try:
                self._together(others, began, ONE_BY_ONE_SECONDS)
                case.figures["without_the_last_seconds"] = self._latest(others, began) - began
            except AssertionError as error:
                case.failed.append(f"without the last to leave: {error}")
            case.over = self._tell("start", "started", last, at=swarm.start(last))

    def _scale(self) -> None:
        swarm = self._swarm
        with self._case(f"scaled from {PEERS} to {MORE_PEERS} peers", TOGETHER_SECONDS) as case:
            before = set(swarm.names)
            case.over = swarm.up(MORE_PEERS)
            case.targets = tuple(sorted(set(swarm.names) - before))
            self._tell("start", "compose up --scale", *case.targets, at=case.over)

    def _down_and_up(self) -> None:
        """Remove the containers and keep the volumes: new containers are the same peers and continue."""
        swarm = self._swarm
        with self._case("compose down, compose up", TOGETHER_SECONDS, *swarm.names) as case:
            ids, rounds = self._ids(), self._rounds()
            self._tell("end", "compose down", *case.targets)
            swarm.keep_logs()
            seconds = time.monotonic()
            swarm.down()
            case.figures["down_seconds"] = time.monotonic() - seconds
            case.over = self._tell("start", "compose up", *case.targets, at=swarm.up(len(ids) - 1))
            if self._ids() != ids:
                case.failed.append("other peers came up than went down")
            case.should = tuple(swarm.names)
            self._together(case.should, case.over, TOGETHER_SECONDS)
            if self._rounds() < rounds:
                case.failed.append(f"it went back from round {rounds} to {self._rounds()}")

    def _ids(self) -> set[str]:
        return {peer.id for peer in self._swarm.peers}

    def _rounds(self) -> int:
        return min(peer.reports()[-1]["round"] for peer in self._swarm.peers)

    # -- helpers of all cases -----------------------------------------------------------------------------------------

    @contextmanager
    def _case(self, name: str, within_seconds: float, *targets: str) -> Iterator[Struck]:
        """Run the fault in the body; afterwards all peers must get into one mean that began after it."""
        case = Struck(name, tuple(targets))
        self.struck.append(case)
        try:
            yield case
            case.should = tuple(self._swarm.names)
            self._together(case.should, case.over, within_seconds)
            case.figures["recovery_seconds"] = self._latest(case.should, case.over) - case.over
        except AssertionError as error:
            case.failed.append(str(error))
        figures = ", ".join(f"{what.removesuffix('_seconds')} {value:.1f} s" for what, value in case.figures.items())
        self._say(f"{'FAIL' if case.failed else 'ok':<5} {name}: {'; '.join([*case.failed, figures])}")

    def _tell(self, kind: str, what: str, *peers: str, at: float | None = None) -> float:
        self.events.append(Event(time.time() if at is None else at, what, peers, kind))
        return self.events[-1].time

    def _mates(self, peer: str) -> tuple[str, ...]:
        """Those that may go on without `peer` although most of their roster is gone: none."""
        return ()

    def _means(self, peers: Sequence[Peer], since: float) -> list[Report]:
        """The rounds by which these peers have come together since then; none: not yet."""
        return [found] if (found := one_mean(peers, since)) else []

    def _together(self, names: Sequence[str], since: float, within_seconds: float) -> None:
        peers = [self._swarm.peer(name) for name in names]
        left = max(1.0, since + within_seconds - time.time())
        wait(f"a mean of {len(names)}", lambda: self._means(peers, since), left, POLL_SECONDS)

    def _latest(self, names: Sequence[str], since: float) -> float:
        peers = [self._swarm.peer(name) for name in names]
        found = {each["lineage"] for each in self._means(peers, since)}
        return max(each["time"] for peer in peers for each in peer.reports() if each["lineage"] in found)

    def _next_round(self, since: float, without: str) -> float:
        """Seconds until the others decided a mean that began after `since` and is without that peer."""
        gone = self._swarm.peer(without).id
        others = [self._swarm.peer(name) for name in self._swarm.names if name != without]

        def decided() -> list[float]:
            return [
                each["time"]
                for peer in others
                for each in peer.reports()
                if each["outcome"] in MEANS and began(each) > since and gone not in each["peers"]
            ]

        found = wait("a round of the others", decided, NEXT_ROUND_SECONDS, POLL_SECONDS)
        return min(found) - since
