"""Failpoints: real peers pass each of them, a trap kills at its point, and a dead harness costs a peer one timeout."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from pathlib import Path

import pytest

from tests.faults.failpoints import VOTED, FailpointClient
from tests.faults.peer import PROGRAM, TRACE
from tests.faults.tracing import Watch
from tests.support.real_swarm import START_SECONDS, RealPeer, RealSwarm, deciding_one_round, paced, wait


@pytest.mark.parametrize("harness", ["is not there", "is silent", "goes"])
def test_dead_harness_costs_one_timeout_and_warning(
    harness: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        path = f"/tmp/trace-{os.getpid()}-{harness.replace(' ', '-')}"
        if harness != "is not there":
            listening.bind(path)
            listening.listen()
        if harness == "goes":
            threading.Thread(target=lambda: listening.accept()[0].close()).start()
        trace, began = FailpointClient(path, answer_seconds=0.2), time.monotonic()
        with caplog.at_level(logging.WARNING):
            for point in VOTED:
                trace.point(point)
        assert (time.monotonic() - began >= 0.2) is (harness == "is silent")
        assert time.monotonic() - began < 0.1 * len(VOTED), "more than one timeout"
    Path(path).unlink(missing_ok=True)
    assert len(caplog.records) == 1 and "no answer from the harness" in caplog.text


def test_trap_holds_its_peer_once_at_its_point() -> None:
    go, caught = threading.Event(), list[str]()

    def strike(peer: str) -> None:
        caught.append(peer)
        assert go.wait(5)

    with Watch(max_records=5) as watch:
        a, b = (FailpointClient(watch.environment(name)[TRACE]) for name in "ab")
        trap = watch.arm("write", 3, strike, peers=["b"])
        watch.disarm(never := watch.arm("write", 3, lambda _: caught.append("disarmed")))
        a.round = 3
        a.point("write")
        for b.round in (2, 3):
            b.point("read")
            if b.round == 2:
                b.point("write")
        held = threading.Thread(target=b.point, args=("write",))
        held.start()
        wait("b is caught", lambda: caught == ["b"], 5)
        a.point("read")  # others are answered meanwhile
        assert held.is_alive() and not trap.fired.is_set()
        go.set()
        held.join(5)
        b.point("write")
        assert trap.fired.is_set() and caught == ["b"] and never.struck is None
        assert trap.struck and (trap.struck.peer, trap.struck.round) == ("b", 3)
        assert [each.point for each in watch.records("b")] == ["write", "read", "write", "write"], (
            "the last five of all"
        )
        for each in (a, b):
            each.close()


# -- real peers --------------------------------------------------------------------------------------------------------


def passed(watch: Watch, number: int) -> set[str]:
    return {each.point for each in watch.records() if each.round == number}


@pytest.mark.real
@pytest.mark.long
def test_real_peers_pass_every_point_and_trap_kills(tmp_path: Path) -> None:
    def prepare(peer: RealPeer) -> None:
        peer.program, peer.environment = PROGRAM, watch.environment(peer.name)

    with Watch() as watch, RealSwarm(tmp_path, paced(elements=600_000, inner_steps=6), prepare) as swarm:
        founder = swarm.found("a")
        peers = [founder, *swarm.join("b", "c", via=founder)]
        full = wait("three are in one mean", lambda: swarm.all_in_one_mean(peers), START_SECONDS)
        again = wait("and again", lambda: swarm.all_in_one_mean(peers, full["time"]), START_SECONDS)
        wait("every point is passed", lambda: set(VOTED) <= passed(watch, again["round"]), 5)
        trap = watch.arm("send PartDone", again["round"] + 2, lambda name: swarm[name].strike())
        assert trap.fired.wait(START_SECONDS) and trap.struck
        victim, struck = swarm[trap.struck.peer], time.time()
        assert victim.ends(2) == -signal.SIGKILL
        assert watch.records(victim.name)[-1] == trap.struck
        survivors = [peer for peer in peers if peer is not victim]
        ends = wait("the others decide", lambda: deciding_one_round(survivors, struck), START_SECONDS)
        assert len({(each["lineage"], each["params_hash"]) for each in ends}) == 1
        assert all(peer.running for peer in survivors)
