"""Failpoints, from both sides: what a peer reports, that it waits for the answer, what a trap does to it."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from node.training.remote import RemoteTrainer
from protocols.base import LocalProgress, Member, PeerSilent, RoundKey
from protocols.consensus.messages import RecordRequest
from protocols.sync.requests import SYNC
from protocols.wire import Chunk
from tests.faults.failpoints import VOTED, FailpointClient, FailpointJournal, FailpointTrainer, FailpointTransport
from tests.faults.peer import PROGRAM, TRACE
from tests.faults.tracing import Watch
from tests.support.real_swarm import START_SECONDS, RealPeer, RealSwarm, deciding, paced, wait
from tests.support.report_examples import REPORT

KEY = RoundKey(bytes(32), "run", bytes(32), 7)
WANT = RecordRequest(KEY, Member("me"), 0, bytes(32))


@pytest.fixture
def watch() -> Iterator[Watch]:
    with Watch() as watch:
        yield watch


@pytest.fixture
def trace(watch: Watch) -> Iterator[FailpointClient]:
    trace = FailpointClient(watch.environment("a")[TRACE])
    yield trace
    trace.close()


def reached(watch: Watch) -> list[tuple[int, str]]:
    return [(each.round, each.point) for each in watch.records()]


class Stand:
    """Stands for a stream, a transport and a trainer, and notes how it was called."""

    ANSWERS: ClassVar = {"receive": WANT, "train": LocalProgress(5, 1.0, 2.0, 3.0), "evaluate": 1.25}

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.handlers: dict[str, Callable[..., Any]] = {}

    def __getattr__(self, name: str) -> Callable[..., Any]:
        async def noted(*given: Any) -> Any:
            self.calls.append((name, *given))
            return self.ANSWERS.get(name)

        return noted

    def serve(self, method: str, handler: Callable[..., Any]) -> None:
        self.handlers[method] = handler

    @asynccontextmanager
    async def open(self, *given: Any) -> AsyncIterator[Stand]:
        self.calls.append(("open", *given))
        try:
            yield self
        except PeerSilent:
            self.calls.append(("reset",))
            raise


# -- the peer's side ---------------------------------------------------------------------------------------------------


async def test_trainer_and_journal_points_are_reported_in_order(
    watch: Watch, trace: FailpointClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(VOTED) == len(set(VOTED)) == 20
    stand: Any = Stand()
    for name in ("read", "train", "write", "evaluate"):
        call = getattr(stand, name)
        monkeypatch.setattr(RemoteTrainer, name, lambda self, *given, call=call: call(*given))
    path = tmp_path / "rounds.jsonl"
    trainer, journal = FailpointTrainer(trace, None, None), FailpointJournal(trace, path)
    vector, cut, progress = torch.zeros(2), asyncio.Event(), print
    written: list[bool] = []
    traps = [watch.arm(point, -1, lambda _: written.append(path.exists())) for point in ("report", "reported")]
    await trainer.read(vector)
    assert (await trainer.train(KEY, cut, progress)).tokens == 5
    await trainer.write(vector, anchor=vector, tokens=3)
    assert await trainer.evaluate() == 1.25
    journal.write(REPORT)
    trace.close()
    assert written == [False, True] and all(trap.fired.is_set() for trap in traps)
    assert reached(watch) == [(-1, "read"), *((7, point) for point in VOTED if point in AT_HOME)]
    assert stand.calls[:-1] == [
        ("read", vector, 0),
        ("train", KEY, cut, progress, True),
        ("write", vector, 0, vector, 3),
    ]


AT_HOME = ("train", "trained", "write", "evaluate", "report", "reported")


async def test_stream_points_are_reported_and_errors_reset(watch: Watch, trace: FailpointClient) -> None:
    stand: Any = Stand()
    transport = FailpointTransport(trace, stand)
    with pytest.raises(PeerSilent):
        async with transport.open("other", "data", 12.5) as stream:
            await stream.send(Chunk(0, 2), b"ab")
            assert await stream.receive(100) is WANT
            raise PeerSilent("other", "ended")
    assert stand.calls == [("open", "other", "data", 12.5), ("send", Chunk(0, 2), b"ab"), ("receive", 100), ("reset",)]

    async def answer(peer: str, stream: Any) -> None:
        await stream.send(WANT)

    for method in ("data", SYNC):
        transport.serve(method, answer)
        await stand.handlers[method]("other", stand)
    points = ["receive RecordRequest", "send RecordRequest", "sync: send RecordRequest"]
    assert reached(watch) == [(-1, "send Chunk"), *((7, point) for point in points)]


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


# -- the harness -------------------------------------------------------------------------------------------------------


def test_peer_is_held_until_its_trap_returns(watch: Watch, trace: FailpointClient) -> None:
    go, struck = threading.Event(), threading.Event()

    def strike(peer: str) -> None:
        assert peer == "a"
        struck.set()
        assert go.wait(5)

    trap = watch.arm("train", 2, strike)
    trace.round = 2
    peer = threading.Thread(target=trace.point, args=("train",))
    peer.start()
    assert struck.wait(5) and not trap.fired.is_set()
    other = FailpointClient(watch.environment("b")[TRACE])
    other.point("train")  # others go on
    other.close()
    assert peer.is_alive()
    go.set()
    peer.join(5)
    assert trap.fired.wait(5) and not peer.is_alive()
    assert trap.struck == watch.records("a")[0] and trap.struck.round == 2


def test_trap_fires_once_for_its_point_and_peer(watch: Watch, trace: FailpointClient) -> None:
    caught: list[str] = []
    other = FailpointClient(watch.environment("b")[TRACE])
    trap = watch.arm("write", 3, caught.append, peers=["b"])
    never = watch.arm("write", 3, lambda _: caught.append("disarmed"))
    watch.disarm(never)
    for trace.round in (2, 3):
        trace.point("write")
    for other.round in (2, 3, 4):
        other.point("read")
        other.point("write")
    other.close()
    assert caught == ["b"] and trap.struck and (trap.struck.peer, trap.struck.round) == ("b", 3)
    assert never.struck is None and not never.fired.is_set()


def test_reconnecting_peer_is_recorded_and_record_is_bounded() -> None:
    with Watch(max_records=3) as watch:
        for incarnation in range(4):
            trace = FailpointClient(watch.environment("a")[TRACE])
            trace.round = incarnation
            trace.point("train")
            trace.close()
        assert [each.round for each in watch.records("a")] == [1, 2, 3]
        assert len(watch.environment("a")[TRACE]) <= 100


# -- real peers --------------------------------------------------------------------------------------------------------


def kill(peer: RealPeer) -> None:
    peer.strike()


def passed(watch: Watch, number: int) -> set[str]:
    return {each.point for each in watch.records() if each.round == number}


@pytest.mark.real
def test_real_peers_pass_every_point_and_trap_kills(tmp_path: Path, watch: Watch) -> None:
    def prepare(peer: RealPeer) -> None:
        peer.program, peer.environment = PROGRAM, watch.environment(peer.name)

    with RealSwarm(tmp_path, paced(elements=600_000, inner_steps=6), prepare) as swarm:
        founder = swarm.found("a")
        peers = [founder, *swarm.join("b", "c", via=founder)]
        full = wait("three are in one mean", lambda: swarm.all_in_one_mean(peers), START_SECONDS)
        again = wait("and again", lambda: swarm.all_in_one_mean(peers, full["time"]), START_SECONDS)
        wait("every point is passed", lambda: set(VOTED) <= passed(watch, again["round"]), 5)
        trap = watch.arm("send PartDone", again["round"] + 2, lambda name: kill(swarm[name]))
        assert trap.fired.wait(START_SECONDS) and trap.struck
        victim, struck = swarm[trap.struck.peer], time.time()
        assert victim.ends(2) == -signal.SIGKILL
        assert watch.records(victim.name)[-1] == trap.struck
        survivors = [peer for peer in peers if peer is not victim]
        ends = wait("the others decide", lambda: deciding(survivors, struck), START_SECONDS)
        assert len({(each["lineage"], each["params_hash"]) for each in ends}) == 1
        assert all(peer.running for peer in survivors)
