"""The nemesis: carries out a schedule on a real swarm, and logs what it did and when."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import psutil

from node.membership.pass_exchange import PRIVATE
from tests.faults.event_log import DEATH_SECONDS, EventLog
from tests.faults.goodput import MEANS
from tests.faults.liar_control import LiarControl
from tests.faults.machines import Act, MachineFaults
from tests.faults.memory import Group, Memory
from tests.faults.network import Namespaces
from tests.faults.steps import STRUCK, Step
from tests.faults.tracing import Watch
from tests.faults.wire import Proxied, Wire
from tests.support.checkers import began
from tests.support.real_swarm import RealSwarm, T, deciding, wait

TROUBLE = (AssertionError, LookupError, ValueError, OSError, RuntimeError, psutil.Error, subprocess.SubprocessError)
"""Errors with which a step ends if peers do not do what they should."""
SETTLE_SECONDS = 90.0
DIRECT_PORT = 7077
"""Every peer's port for direct connections in a play with namespaces."""
TRAP_SECONDS = 60.0
SUSPECTED_SECONDS = 30.0
LEAVE_SECONDS = 15.0
_CYCLE_SECONDS = 0.5


HANDS = (MachineFaults, Memory, Wire, LiarControl)


@dataclass(frozen=True, slots=True)
class Tools:
    """`network` and `proxied` are None where peers run on the loopback; `groups`: those whose memory can be limited."""

    watch: Watch
    network: Namespaces | None = None
    groups: Mapping[str, Group] = field(default_factory=dict)
    proxied: Proxied | None = None


class Straggler:
    """Lets a process run for a share of the time only, as cpulimit does, to imitate a slower machine."""

    def __init__(self, pid: Callable[[], int | None], share: float) -> None:
        self.signals = 0
        self._pid, self._share = pid, share
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._over.is_set():
            pid = self._pid()  # it changes when the worker is restarted
            self._signal(pid, signal.SIGSTOP)
            self._over.wait((1 - self._share) * _CYCLE_SECONDS)
            self._signal(pid, signal.SIGCONT)
            self._over.wait(self._share * _CYCLE_SECONDS)

    def _signal(self, pid: int | None, number: int) -> None:
        if pid:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
                self.signals += 1

    def end(self) -> None:
        self._over.set()
        self._thread.join(2 * _CYCLE_SECONDS)


class Nemesis(EventLog):
    def __init__(self, swarm: RealSwarm, tools: Tools, patience: float = 1.0) -> None:
        """`patience`: factor of all times for which it waits for peers."""
        super().__init__(swarm)
        self._patience = patience
        self._watch, self._network = tools.watch, tools.network
        self.machines = MachineFaults(self, swarm, tools.network)
        self._hands = (
            self.machines, Memory(self, swarm, tools.groups), Wire(self, tools.proxied), LiarControl(self, swarm),
        )  # fmt: skip
        self._stragglers: list[Straggler] = []
        self._struck = ""

    def play(self, schedule: Sequence[Step]) -> None:
        """Carry out all steps. A failed step is noted, and the next follows, so that lasting faults are healed."""
        self.machines.began = time.monotonic()
        for step in schedule:
            targets = tuple(self._struck if name == STRUCK else name for name in step.targets)
            try:
                self.act(step.act)(targets, step)
            except TROUBLE as error:
                self.stuck.append(f"{step}: {error or type(error).__name__}")
        self.heal()

    def act(self, name: str) -> Act:
        found = (getattr(hand, name) for hand in self._hands if hasattr(hand, name))
        act: Act | None = getattr(self, f"_{name}", None) or next(found, None)
        if act is None:
            raise AttributeError(name)
        return act

    def heal(self) -> None:
        for straggler in self._stragglers:
            straggler.end()
            if not straggler.signals:
                self.stuck.append("there was no worker to hold up")
        self._stragglers.clear()
        for hand in self._hands:
            hand.heal()
        if self._network:
            self._network.heal()

    def _names(self, but: Sequence[str]) -> list[str]:
        return [peer.name for peer in self.running(but)]

    def awaits(self, what: str, condition: Callable[[], T | None], seconds: float = SETTLE_SECONDS) -> T:
        return wait(what, condition, self._patience * seconds)

    def _suffers(self) -> bool:
        return bool(self._stragglers or (self._network and self._network.suffers()))

    # -- processes ----------------------------------------------------------------------------------------------------

    def _wait(self, targets: tuple[str, ...], step: Step) -> None:
        time.sleep(step.amount)

    def _kill(self, targets: tuple[str, ...], step: Step) -> None:
        for name in targets:
            if step.role != "peer":
                self.awaits(f"{name} has a {step.role}", lambda name=name: self._swarm[name].child(step.role), 5)  # type: ignore[misc]
            self._swarm[name].strike(step.role)
        killed = self.tell(f"SIGKILL to {step.role}", targets, "fault")
        if step.role == "peer":
            for name in targets:
                self.over(name, -signal.SIGKILL, DEATH_SECONDS)
            self._decided(targets, killed)

    def _trap(self, targets: tuple[str, ...], step: Step) -> None:
        self._struck = ""
        now = max(peer.last()["round"] for peer in self.running())
        trap = self._watch.arm(step.role, now + 2, lambda name: self._spring(name, step.role), targets or None)
        if not trap.fired.wait(self._patience * TRAP_SECONDS):
            self._watch.disarm(trap)
            raise AssertionError(f"no peer reached {step.role} within {TRAP_SECONDS:g} s")
        assert trap.struck
        self._struck, killed = trap.struck.peer, self.last
        self.over(self._struck, -signal.SIGKILL, DEATH_SECONDS)
        self._decided((self._struck,), killed)

    def _spring(self, name: str, point: str) -> None:
        self._swarm[name].strike()
        self.tell(f"SIGKILL at {point}", (name,), "fault")

    def _decided(self, dead: Sequence[str], killed: float) -> None:
        """Measure when all survivors have decided the round under way at a kill, and the first that began after it."""
        survivors = self.running(dead)
        if self._suffers() or not self._swarm.can_go_on(survivors):  # other faults would distort the figure
            return
        ends = self.awaits("the survivors decide", lambda: deciding(survivors, killed, self._swarm.decisions))
        self.measure("decided_seconds", max(each["time"] for each in ends) - killed)
        decisions = self._swarm.decisions
        ends = self.awaits("they go on", lambda: deciding(survivors, killed, decisions, began))
        self.measure("next_round_seconds", max(each["time"] for each in ends) - killed)

    def _stop(self, targets: tuple[str, ...], step: Step) -> None:
        self._signal(targets, step.role, signal.SIGSTOP)
        self.tell(f"SIGSTOP to {step.role}", targets, "fault")

    def _wake(self, targets: tuple[str, ...], step: Step) -> None:
        self._signal(targets, step.role, signal.SIGCONT)
        self.tell(f"SIGCONT to {step.role}", targets, "heal")

    def _signal(self, targets: Sequence[str], role: str, number: int) -> None:
        for name in targets:
            peer = self._swarm[name]
            for pid in [each.pid for each in peer.left()] if role == "all" else [peer.pid]:
                os.kill(pid, number)

    def _straggle(self, targets: tuple[str, ...], step: Step) -> None:
        for name in targets:
            self._stragglers.append(Straggler(lambda name=name: self._worker(name), step.amount))  # type: ignore[misc]
        self.tell(f"the worker runs {step.amount:.0%} of the time", targets, "fault")

    def _worker(self, name: str) -> int | None:
        with suppress(psutil.Error):
            if worker := self._swarm[name].child("worker"):
                return int(worker.pid)
        return None

    # -- the network --------------------------------------------------------------------------------------------------

    def _part(self, targets: tuple[str, ...], step: Step) -> None:
        self._net.part(targets, self._names(targets))
        self.tell("cut off from the others", targets, "fault")

    def _deafen(self, targets: tuple[str, ...], step: Step) -> None:
        self._net.deafen(targets, self._names(targets))
        self.tell("hears no other peer", targets, "fault")

    def _mute(self, targets: tuple[str, ...], step: Step) -> None:
        self._net.deafen(self._names(targets), targets)
        self.tell("is heard by no other peer", targets, "fault")

    def _lose(self, targets: tuple[str, ...], step: Step) -> None:
        for name in targets or (None,):
            self._net.lose(name, step.amount)
        self.tell(f"{step.amount:.0%} of packets lost", targets or self._names(()), "fault")

    def _slow(self, targets: tuple[str, ...], step: Step) -> None:
        for name in targets:
            self._net.slow(name, int(step.amount))
        self.tell(f"the line carries {step.amount / 1e6:g} Mbit/s", targets, "fault")

    def _refuse(self, targets: tuple[str, ...], step: Step) -> None:
        self._firewall(targets, "a firewall resets its direct connections", refuse=True)

    def _swallow(self, targets: tuple[str, ...], step: Step) -> None:
        self._firewall(targets, "a firewall swallows what its direct connections carry", refuse=False)

    def _firewall(self, targets: tuple[str, ...], words: str, *, refuse: bool) -> None:
        for name in targets:
            self._net.block(name, DIRECT_PORT, refuse=refuse)
        self.tell(words, targets, "fault")

    def _detoured(self, targets: tuple[str, ...], step: Step) -> None:
        others, hidden = self.running(targets), [self._swarm[name] for name in targets]
        self.awaits(
            f"bulk data of {', '.join(targets)} goes over libp2p",
            lambda: all(each.sees(peer).get("route") == "libp2p" for each in others for peer in hidden),
        )
        self.measure("detoured_seconds", time.time() - self.last)

    def _heal(self, targets: tuple[str, ...], step: Step) -> None:
        if self._network and self._network.suffers() and not self._network.felt():
            self.stuck.append("no packet met the fault")
        self.heal()
        self.tell("healed", self._names(()), "heal")

    @property
    def _net(self) -> Namespaces:
        assert self._network, "a scenario that needs a network of namespaces is refused where there is none"
        return self._network

    # -- joining and leaving ------------------------------------------------------------------------------------------

    def _join(self, targets: tuple[str, ...], step: Step) -> None:
        for name in targets:
            self.began(name)
        via = self.running()[-1]
        self.awaits(f"{via.name} says where it is", via.meet)  # it may have moved
        self.tell(f"started, through {via.name}", targets, "start")
        began = self.last
        self._swarm.join(*targets, via=via, seconds=self._patience * SETTLE_SECONDS)
        self.measure("in_the_run_seconds", time.time() - began)

    def _restart(self, targets: tuple[str, ...], step: Step) -> None:
        assert all(targets) and not any(self._swarm[name].running for name in targets), "no peer was struck"
        self._join(targets, step)

    def _back(self, targets: tuple[str, ...], step: Step) -> None:
        """Start peers again from their directories alone, after all were killed."""
        reached = max(report["round"] + 1 for name in targets for report in self._swarm[name].reports())
        for name in targets:
            assert not self._swarm[name].running, f"{name} was not killed"
            self.began(name)
            self._swarm[name].start()
        again = self.tell("started again, with nothing but what they had", targets, "start")
        for name in targets:
            self.awaits(f"{name} is back", self._swarm[name].meet)
        peers = [self._swarm[name] for name in targets]
        first = self.awaits("a round after that", lambda: deciding(peers, again, self._swarm.decisions))
        self.measure("rounds_lost", max(0, reached - min(each["round"] for each in first)))

    def _finish(self, targets: tuple[str, ...], step: Step) -> None:
        for name in targets:
            asked = self.tell("asked to finish", (name,), "end")
            self.leave(name)
            self.measure("leaving_seconds", time.time() - asked)
            last = self._swarm[name].last()
            handed_in = last.get("time", 0) > asked and last["outcome"] in MEANS and (last["weight"] or 0) > 0
            self.measure("contributions_lost", 0.0 if handed_in else 1.0)

    def _intrude(self, targets: tuple[str, ...], step: Step) -> None:
        via = self.running()[-1]
        self.awaits(f"{via.name} says where it is", via.meet)
        for name in targets:
            self.began(name)
            self._swarm.peer(name).start("--bootstrap", via.address)
            self.tell(f"a stranger, through {via.name}", (name,), "start")
            self.over(name, 2, self._patience * SETTLE_SECONDS)
            assert PRIVATE in self._swarm[name].said(), "it was not told that the run is private"

    def _revoke(self, targets: tuple[str, ...], step: Step) -> None:
        for name in targets:
            began = time.time()
            self._swarm[step.role].command("revoke", self._swarm[name].id)
            self.tell(f"removed by {step.role}", (name,), "fault")
            self.over(name, 2, self._patience * LEAVE_SECONDS)
            self.measure("removed_seconds", time.time() - began)

    def leave(self, name: str) -> None:
        self.awaits(f"{name} is asked to finish", lambda: self._swarm[name].ask("finish").get("ok"), LEAVE_SECONDS)
        self.over(name, 0, self._patience * LEAVE_SECONDS)

    def _suspected(self, targets: tuple[str, ...], step: Step) -> None:
        self._seen(targets, "live")
        self.measure("suspected_seconds", time.time() - self.last)

    def _excluded(self, targets: tuple[str, ...], step: Step) -> None:
        self._seen(targets, "member")
        self.measure("excluded_seconds", time.time() - self.last)

    def _seen(self, targets: Sequence[str], what: str) -> None:
        others, gone = self.running(targets), [self._swarm[name] for name in targets]
        self.awaits(
            f"no other sees {', '.join(targets)} as {what}",
            lambda: all(other.sees(peer).get(what) is False for other in others for peer in gone),
            SUSPECTED_SECONDS,
        )

    def _settle(self, targets: tuple[str, ...], step: Step) -> None:
        since, asked = self.last, time.time()
        self.awaits("all who run are in one mean", lambda: self._swarm.all_in_one_mean(self.running(), since))
        self.measure("settled_seconds", time.time() - asked)
