"""Plays a schedule on a real swarm, step by step, and notes what was done when, and how it went."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress

import psutil

from tests.faults.goodput import MEANS
from tests.faults.network import Namespaces
from tests.faults.play import Event, Life
from tests.faults.scenarios import STRUCK, Step
from tests.faults.straggler import Straggler
from tests.faults.tracing import Watch
from tests.realswarm import ORPHAN_SECONDS, RealPeer, RealSwarm, deciding, wait

TROUBLE = (AssertionError, LookupError, ValueError, OSError, RuntimeError, psutil.Error, subprocess.SubprocessError)
"""What a step may end with, where peers do not do what they should."""
SETTLE_SECONDS = 90.0
TRAP_SECONDS = 60.0
SUSPECTED_SECONDS = 30.0
LEAVE_SECONDS = 15.0
DEATH_SECONDS = 3.0


class Nemesis:
    """Does what a schedule says.

    Attributes:
        events: what was done.
        measures: name -> seconds, of each time that it was measured.
        lives: name -> processes that have ended.
        left: name -> command lines of what was left of it a while after its end.
        stuck: what could not be done, or was waited for in vain, in words.
        last: wall time at which the last fault, or the last thing lasting, was over.
    """

    def __init__(self, swarm: RealSwarm, watch: Watch, network: Namespaces | None) -> None:
        self.events: list[Event] = []
        self.measures: dict[str, list[float]] = {}
        self.lives: dict[str, list[Life]] = {}
        self.left: dict[str, list[str]] = {}
        self.stuck: list[str] = []
        self.last = time.time()
        self._swarm, self._watch, self._network = swarm, watch, network
        self._began: dict[str, float] = {}
        self._stragglers: list[Straggler] = []
        self._struck = ""

    def play(self, schedule: Sequence[Step]) -> None:
        """All steps; one that waits in vain is noted, and the next is done: what lasts must be healed."""
        for step in schedule:
            whom = tuple(self._struck if name == STRUCK else name for name in step.whom)
            try:
                getattr(self, f"_{step.act}")(whom, step)
            except TROUBLE as error:
                self.stuck.append(f"{step}: {error or type(error).__name__}")
        self.heal()

    # -- what is noted ------------------------------------------------------------------------------------------------

    def tell(self, what: str, whom: Sequence[str], kind: str) -> float:
        """Note an event; returns its wall time, which is where recovery begins, unless another follows."""
        self.events.append(Event(time.time(), what, tuple(whom), kind))
        self.last = self.events[-1].time
        return self.last

    def began(self, name: str) -> None:
        """A process of that peer was started."""
        self._began[name] = time.time()

    def over(self, name: str, expected: int, seconds: float) -> None:
        """A peer's process ends, within so many seconds, and takes its children along; one that does not is killed."""
        peer = self._swarm[name]
        try:
            peer.ends(seconds)
        except subprocess.TimeoutExpired:
            self.stuck.append(f"{name} did not end within {seconds:g} s")
            peer.strike()
            peer.ends(DEATH_SECONDS)
        self.ended(name, expected)
        until = time.monotonic() + ORPHAN_SECONDS
        while (left := peer.left()) and time.monotonic() < until:
            time.sleep(0.05)
        if left:
            self.left[name] = [_command(each) for each in left]
            peer.clear()

    def ended(self, name: str, expected: int) -> None:
        """A peer's process has ended."""
        code = self._swarm[name].code
        assert code is not None
        self.lives.setdefault(name, []).append(Life(self._began.pop(name), time.time(), code, expected))

    def unseen(self) -> None:
        """Note whose process has ended without anybody's doing."""
        for name in [name for name in self._began if not self._swarm[name].running]:
            self.ended(name, 0)

    def running(self, but: Sequence[str] = ()) -> list[RealPeer]:
        """Who runs, without these."""
        return [peer for peer in self._swarm.running if peer.name not in but]

    def heal(self) -> None:
        """All that lasts is over."""
        for straggler in self._stragglers:
            straggler.end()
            if not straggler.signals:
                self.stuck.append("there was no worker to hold up")
        self._stragglers.clear()
        if self._network:
            self._network.heal()

    def _measure(self, what: str, since: float) -> None:
        self.measures.setdefault(what, []).append(time.time() - since)

    def _names(self, but: Sequence[str]) -> list[str]:
        return [peer.name for peer in self.running(but)]

    # -- processes ----------------------------------------------------------------------------------------------------

    def _wait(self, whom: tuple[str, ...], step: Step) -> None:
        time.sleep(step.amount)

    def _kill(self, whom: tuple[str, ...], step: Step) -> None:
        for name in whom:
            if step.role != "peer":
                wait(f"{name} has a {step.role}", lambda name=name: self._swarm[name].child(step.role), 5)  # type: ignore[misc]
            self._swarm[name].strike(step.role)
        killed = self.tell(f"SIGKILL to {step.role}", whom, "fault")
        if step.role == "peer":
            for name in whom:
                self.over(name, -signal.SIGKILL, DEATH_SECONDS)
            self._decided(whom, killed)

    def _trap(self, whom: tuple[str, ...], step: Step) -> None:
        self._struck = ""
        now = max(peer.last()["round"] for peer in self.running())
        trap = self._watch.arm(step.role, now + 2, lambda name: self._spring(name, step.role), whom or None)
        if not trap.fired.wait(TRAP_SECONDS):
            self._watch.disarm(trap)
            raise AssertionError(f"nobody came to {step.role} within {TRAP_SECONDS:g} s")
        assert trap.struck
        self._struck, killed = trap.struck.peer, self.last
        self.over(self._struck, -signal.SIGKILL, DEATH_SECONDS)
        self._decided((self._struck,), killed)

    def _spring(self, name: str, point: str) -> None:
        self._swarm[name].strike()
        self.tell(f"SIGKILL at {point}", (name,), "fault")

    def _decided(self, dead: Sequence[str], killed: float) -> None:
        """Measure when the last of the survivors has decided a round after that."""
        survivors = self.running(dead)
        ends = wait("the survivors decide", lambda: deciding(survivors, killed), SETTLE_SECONDS)
        self.measures.setdefault("decided_seconds", []).append(max(each["time"] for each in ends) - killed)

    def _stop(self, whom: tuple[str, ...], step: Step) -> None:
        self._signal(whom, step.role, signal.SIGSTOP)
        self.tell(f"SIGSTOP to {step.role}", whom, "fault")

    def _wake(self, whom: tuple[str, ...], step: Step) -> None:
        self._signal(whom, step.role, signal.SIGCONT)
        self.tell(f"SIGCONT to {step.role}", whom, "heal")

    def _signal(self, whom: Sequence[str], role: str, number: int) -> None:
        for name in whom:
            peer = self._swarm[name]
            for pid in [each.pid for each in peer.left()] if role == "all" else [peer.pid]:
                os.kill(pid, number)

    def _straggle(self, whom: tuple[str, ...], step: Step) -> None:
        for name in whom:
            self._stragglers.append(Straggler(lambda name=name: self._worker(name), step.amount))  # type: ignore[misc]
        self.tell(f"the worker runs {step.amount:.0%} of the time", whom, "fault")

    def _worker(self, name: str) -> int | None:
        with suppress(psutil.Error):
            if worker := self._swarm[name].child("worker"):
                return int(worker.pid)
        return None

    # -- the network --------------------------------------------------------------------------------------------------

    def _part(self, whom: tuple[str, ...], step: Step) -> None:
        self._net.part(whom, self._names(whom))
        self.tell("cut off from the others", whom, "fault")

    def _deafen(self, whom: tuple[str, ...], step: Step) -> None:
        self._net.deafen(whom, self._names(whom))
        self.tell("hears nobody", whom, "fault")

    def _mute(self, whom: tuple[str, ...], step: Step) -> None:
        self._net.deafen(self._names(whom), whom)
        self.tell("is heard by nobody", whom, "fault")

    def _lose(self, whom: tuple[str, ...], step: Step) -> None:
        for name in whom or (None,):
            self._net.lose(name, step.amount)
        self.tell(f"{step.amount:.0%} of packets lost", whom or self._names(()), "fault")

    def _slow(self, whom: tuple[str, ...], step: Step) -> None:
        for name in whom:
            self._net.slow(name, int(step.amount))
        self.tell(f"the line carries {step.amount / 1e6:g} Mbit/s", whom, "fault")

    def _heal(self, whom: tuple[str, ...], step: Step) -> None:
        lasting = bool(self._network and not self._stragglers)
        if lasting and not self._net.felt():
            self.stuck.append("no packet met the fault")
        self.heal()
        self.tell("healed", self._names(()), "heal")

    @property
    def _net(self) -> Namespaces:
        assert self._network, "a scenario that needs a network of namespaces is refused where there is none"
        return self._network

    # -- who is here --------------------------------------------------------------------------------------------------

    def _join(self, whom: tuple[str, ...], step: Step) -> None:
        for name in whom:
            self.began(name)
        via = self.running()[-1]
        self.tell(f"started, through {via.name}", whom, "start")
        began = self.last
        self._swarm.join(*whom, via=via, seconds=SETTLE_SECONDS)
        self._measure("in_the_run_seconds", began)

    def _restart(self, whom: tuple[str, ...], step: Step) -> None:
        assert all(whom) and not any(self._swarm[name].running for name in whom), "nobody was struck"
        self._join(whom, step)

    def _finish(self, whom: tuple[str, ...], step: Step) -> None:
        for name in whom:
            asked = self.tell("asked to finish", (name,), "end")
            self.leave(name)
            self._measure("leaving_seconds", asked)
            last = self._swarm[name].last()
            handed_in = last["outcome"] in MEANS and (last["weight"] or 0) > 0
            self.measures.setdefault("contributions_lost", []).append(0.0 if handed_in else 1.0)

    def leave(self, name: str) -> None:
        """Ask a peer to finish, and see it off."""
        wait(f"{name} is asked to finish", lambda: self._swarm[name].ask("finish").get("ok"), LEAVE_SECONDS)
        self.over(name, 0, LEAVE_SECONDS)

    def _suspected(self, whom: tuple[str, ...], step: Step) -> None:
        self._seen(whom, "live")
        self._measure("suspected_seconds", self.last)

    def _excluded(self, whom: tuple[str, ...], step: Step) -> None:
        self._seen(whom, "member")
        self._measure("excluded_seconds", self.last)

    def _seen(self, whom: Sequence[str], what: str) -> None:
        others, gone = self.running(whom), [self._swarm[name] for name in whom]
        wait(
            f"no other sees {', '.join(whom)} as {what}",
            lambda: all(other.sees(peer).get(what) is False for other in others for peer in gone),
            SUSPECTED_SECONDS,
        )

    def _settle(self, whom: tuple[str, ...], step: Step) -> None:
        since = self.last
        wait("all who run are in one mean", lambda: self._swarm.all_in_one_mean(self.running(), since), SETTLE_SECONDS)


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline()) or str(process.pid)
    except psutil.Error:
        return str(process.pid)
