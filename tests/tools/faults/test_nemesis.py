"""What a nemesis does, on processes and networks of straw: steps do what they say, and nothing goes unnoted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import psutil
import pytest

from tests.faults.nemesis import Nemesis, Tools
from tests.faults.steps import STRUCK, Step
from tests.faults.tracing import Watch
from tests.support.real_swarm import RealPeer, RealSwarm, wait
from tests.support.warm import MARK

pytestmark = pytest.mark.real

FREE_SECONDS = 20.0
"""For an action without a bound of its own, on a machine with other work."""
SLEEP = "import time; time.sleep(60)"
CHILD = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {SLEEP!r}]); {SLEEP}"


class Network:
    """Notes each request; its faults affect a set number of packets."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.packets = 1

    def felt(self) -> int:
        return self.packets

    def suffers(self) -> bool:
        return True

    def __getattr__(self, name: str) -> Any:
        return lambda *given: self.calls.append((name, *given))


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[RealSwarm]:
    """Three peers that only sleep."""
    swarm = RealSwarm(tmp_path)
    for name in "abc":
        run(swarm.peer(name))
    yield swarm
    for peer in swarm.peers.values():
        peer.clear()


@pytest.fixture
def network() -> Network:
    return Network()


@pytest.fixture
def nemesis(swarm: RealSwarm, network: Network) -> Iterator[Nemesis]:
    with Watch() as watch:
        nemesis = Nemesis(swarm, Tools(watch, cast(Any, network)))
        for name in swarm.peers:
            nemesis.began(name)
        yield nemesis


def run(peer: RealPeer, code: str = SLEEP) -> None:
    """Let a process stand for the peer."""
    peer._process = subprocess.Popen([sys.executable, "-c", code], env=os.environ | {MARK: peer._mark})


def state(peer: RealPeer) -> str:
    return str(psutil.Process(peer.pid).status())


@pytest.mark.parametrize("role, processes", [("peer", 1), ("all", 2)])
def test_stopped_peer_resumes_when_woken(role: str, processes: int, nemesis: Nemesis, swarm: RealSwarm) -> None:
    run(swarm.peer("d"), CHILD)
    wait("d has a child", lambda: len(swarm["d"].left()) == 2, FREE_SECONDS)

    def stopped() -> int:
        return sum(each.status() == psutil.STATUS_STOPPED for each in swarm["d"].left())

    nemesis.play([Step("stop", ("d",), role=role)])
    wait("d is stopped", lambda: stopped() == processes, FREE_SECONDS)
    assert state(swarm["a"]) != psutil.STATUS_STOPPED
    nemesis.play([Step("wake", ("d",), role=role)])
    wait("d runs again", lambda: stopped() == 0, FREE_SECONDS)
    events = [(each.what, each.peers, each.kind) for each in nemesis.events]
    assert events == [(f"SIGSTOP to {role}", ("d",), "fault"), (f"SIGCONT to {role}", ("d",), "heal")]
    assert nemesis.stuck == []


def test_deafen_mute_and_part_call_the_network(nemesis: Nemesis, network: Network) -> None:
    nemesis.play([Step("deafen", ("b",)), Step("mute", ("c",)), Step("part", ("a",)), Step("heal")])
    assert network.calls[:3] == [
        ("deafen", ("b",), ["a", "c"]),
        ("deafen", ["a", "b"], ("c",)),
        ("part", ("a",), ["b", "c"]),
    ]
    assert network.calls[3:] == [("heal",), ("heal",)]  # once as asked, and at the end in any case
    assert nemesis.stuck == []


def test_fault_without_affected_packets_is_noted(nemesis: Nemesis, network: Network) -> None:
    network.packets = 0
    nemesis.play([Step("lose", (), 0.2), Step("heal")])
    assert nemesis.stuck == ["no packet met the fault"]


def test_failed_step_is_noted_and_next_is_played(nemesis: Nemesis, network: Network) -> None:
    nemesis.play([Step("restart", (STRUCK,)), Step("restart", ("b",)), Step("part", ("a",))])
    assert [each.partition(":")[0] for each in nemesis.stuck] == [f"restart {STRUCK}", "restart b"]
    assert network.calls == [("part", ("a",), ["b", "c"]), ("heal",)]


def test_missing_exit_is_noted_and_forced(nemesis: Nemesis, swarm: RealSwarm) -> None:
    nemesis.over("a", 0, 0.2)
    assert [(each.code, each.expected) for each in nemesis.incarnations["a"]] == [(-signal.SIGKILL, 0)]
    assert nemesis.stuck == ["a did not end within 0.2 s"] and not swarm["a"].running


def test_leftover_process_is_noted_and_ended(nemesis: Nemesis, swarm: RealSwarm) -> None:
    run(swarm.peer("d"), CHILD)
    nemesis.began("d")
    wait("d has a child", lambda: len(swarm["d"].left()) == 2, FREE_SECONDS)
    swarm["d"].strike()
    nemesis.over("d", -signal.SIGKILL, 2)
    (command,) = nemesis.left["d"]
    assert SLEEP in command and not swarm["d"].left()


def test_unrequested_exit_is_recorded(nemesis: Nemesis, swarm: RealSwarm) -> None:
    os.kill(swarm["c"].pid, signal.SIGSEGV)
    swarm["c"].ends(2)
    nemesis.unseen()
    assert {
        name: [(each.code, each.expected) for each in incarnations]
        for name, incarnations in nemesis.incarnations.items()
    } == {"c": [(-signal.SIGSEGV, 0)]}
    assert nemesis.stuck == ["c ended without being asked to"], "nor does exit code 0 make that right"


def test_straggler_without_a_worker_is_noted(nemesis: Nemesis) -> None:
    nemesis.play([Step("straggle", ("a",), 0.5), Step("wait", amount=0.1)])  # a sleeper has no worker
    assert nemesis.stuck == ["there was no worker to hold up"]
