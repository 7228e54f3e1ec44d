"""A nemesis on processes and a network of straw: it notes what does not go as scheduled, and ends left processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest

from tests.faults.machines import MachineFaults, clock_file
from tests.faults.nemesis import Nemesis, Tools
from tests.faults.steps import STRUCK, Step
from tests.faults.tracing import Watch
from tests.support.real_swarm import RealPeer, RealSwarm, wait
from tests.support.warm import MARK

FREE_SECONDS = 20.0
"""For an action without a bound of its own, on a machine with other work."""
SLEEP = "import time; time.sleep(60)"
CHILD = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {SLEEP!r}]); {SLEEP}"


class Network:
    """Notes each request; its faults affect no packet."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def felt(self) -> int:
        return 0

    def suffers(self) -> bool:
        return True

    def __getattr__(self, name: str) -> Any:
        return lambda *given: self.calls.append((name, *given))


def run(peer: RealPeer, code: str = SLEEP) -> None:
    """Let a process stand for the peer."""
    peer._process = subprocess.Popen([sys.executable, "-c", code], env=os.environ | {MARK: peer._mark})


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[RealSwarm]:
    """Three peers that only sleep, and a fourth with a child."""
    swarm = RealSwarm(tmp_path)
    for name in "abcd":
        run(swarm.peer(name), CHILD if name == "d" else SLEEP)
    wait("d has a child", lambda: len(swarm["d"].left()) == 2, FREE_SECONDS)
    yield swarm
    for peer in swarm.peers.values():
        peer.clear()


@pytest.fixture
def nemesis(swarm: RealSwarm) -> Iterator[Nemesis]:
    with Watch() as watch:
        nemesis = Nemesis(swarm, Tools(watch, cast(Any, Network())))
        for name in swarm.peers:
            nemesis.began(name)
        yield nemesis


@pytest.mark.real
@pytest.mark.parametrize("role, processes", [("peer", 1), ("all", 2)])
def test_stopped_peer_resumes_when_woken(role: str, processes: int, nemesis: Nemesis, swarm: RealSwarm) -> None:
    def stopped(name: str = "d") -> int:
        return sum(each.status() == psutil.STATUS_STOPPED for each in swarm[name].left())

    nemesis.play([Step("stop", ("d",), role=role)])
    wait("d is stopped", lambda: stopped() == processes, FREE_SECONDS)
    assert stopped("a") == 0
    nemesis.play([Step("wake", ("d",), role=role)])
    wait("d runs again", lambda: stopped() == 0, FREE_SECONDS)
    events = [(each.what, each.peers, each.kind) for each in nemesis.events]
    assert events == [(f"SIGSTOP to {role}", ("d",), "fault"), (f"SIGCONT to {role}", ("d",), "heal")]
    assert nemesis.stuck == []


@pytest.mark.real
def test_what_does_not_go_as_scheduled_is_noted(nemesis: Nemesis, swarm: RealSwarm) -> None:
    steps = [Step("restart", (STRUCK,)), Step("straggle", ("a",), 0.5), Step("part", ("a",)), Step("heal")]
    nemesis.play(steps)
    calls, others = cast(Any, nemesis._network).calls, ["b", "c", "d"]
    assert calls == [("part", ("a",), others), ("heal",), ("heal",)]  # as asked, and at the end in any case
    os.kill(swarm["c"].pid, signal.SIGSEGV)
    swarm["c"].ends(2)
    nemesis.unseen()
    nemesis.over("a", 0, 0.2)
    swarm["d"].strike()
    nemesis.over("d", -signal.SIGKILL, 2)
    assert [each.split(":")[0] for each in nemesis.stuck] == [
        f"restart {STRUCK}", "no packet met the fault", "there was no worker to hold up",  # a sleeper has none
        "c ended without being asked to", "a did not end within 0.2 s",
    ]  # fmt: skip
    codes = {name: [(each.code, each.expected) for each in ends] for name, ends in nemesis.incarnations.items()}
    assert codes == {"c": [(-signal.SIGSEGV, 0)], "a": [(-signal.SIGKILL, 0)], "d": [(-signal.SIGKILL,) * 2]}
    (command,) = nemesis.left["d"]
    assert SLEEP in command and not swarm["a"].running and not swarm["d"].left()


def _report(time: float) -> dict[str, float]:
    """Of a round of .9 seconds."""
    return {"time": time, "seconds_train": 0.5, "seconds_wait": 0.3, "seconds_average": 0.1}


@pytest.mark.parametrize(
    "since, stuck", [((101.0 - 600.0,), []), ((), ["the clock of c was never -600 s off"]), ((101.0, 102.0), ["the "])]
)
def test_skewed_report_times_are_corrected(tmp_path: Path, since: tuple[float, ...], stuck: list[str]) -> None:
    """And a clock that the peer never followed is noted."""
    reports, notes = [_report(100.0)], SimpleNamespace(tell=lambda *_: None, stuck=list[str]())
    peer = SimpleNamespace(name="c", directory=tmp_path / "c", reports=lambda: list(reports))
    machines = MachineFaults(cast(Any, notes), cast(Any, {"c": peer}), None)
    machines.skew(("c",), Step("skew", ("c",), amount=-600.0))
    assert float(clock_file(cast(Any, peer)).read_text()) == -600.0
    reports += map(_report, since)
    machines.heal()
    assert float(clock_file(cast(Any, peer)).read_text()) == 0.0
    assert len(notes.stuck) == len(stuck) and all(map(str.startswith, notes.stuck, stuck))
    if not stuck:
        right = machines.right({"c": [*reports, _report(102.0)], "a": [_report(7.0)]})
        assert right == {"c": [_report(100.0), _report(101.0), _report(102.0)], "a": [_report(7.0)]}
