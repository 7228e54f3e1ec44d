"""A peer of several machines, as process trees on this one: they compute what one process does, and find each other
again.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from node.ranks.cluster import say_over
from node.runtime.compute import ThreadCompute
from node.tasks.spec import WorkerSpec
from node.training import worker_supervisor as succession
from node.training.remote import RemoteTrainer, WorkerError
from tests.support.long import long
from tests.support.paths import REPOSITORY
from tests.support.processes import runs
from tests.support.rank_groups import (
    MUON_TOLERANCE,
    RUN,
    TOLERANCE,
    Apart,
    Training,
    gpt,
    round_of,
    vector,
    with_small_data,
    without_files,
)
from tests.support.real_swarm import START_SECONDS, RealSwarm, wait
from tests.support.waiting import until
from tests.support.warm import MARK, WarmProcess, server

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]

GONE_SECONDS = 5.0


class Lender:
    """One of the other machines."""

    def __init__(self, home: Path, number: int, rendezvous: str, *more: str, nodes: int = 2) -> None:
        self._log, self._mark = home / f"machine-{number}-{uuid.uuid4().hex}.log", uuid.uuid4().hex
        words = ["join", "--nodes", str(nodes), "--node", str(number), "--rendezvous", rendezvous, "--device", "cpu"]
        words += ["--threads", "1", *more]
        environment = {**os.environ, MARK: self._mark, "PYTHONPATH": str(REPOSITORY)}
        with self._log.open("ab") as log:
            streams = {1: log.fileno(), 2: log.fileno()}
            self.process: WarmProcess = server().start("node", words, environment, streams)

    def said(self) -> str:
        return self._log.read_text(errors="replace")

    def ranks(self) -> list[psutil.Process]:
        """Its processes that compute, the first rank first."""
        every = psutil.Process(self.process.pid).children(recursive=True)
        return [each for each in every if "node.ranks." in " ".join(each.cmdline())]

    def tree(self) -> list[psutil.Process]:
        own = psutil.Process(self.process.pid)
        return [own, *own.children(recursive=True)]

    async def dies(self) -> None:
        """Kill the machine's own process; all others of it follow."""
        tree = self.tree()
        os.kill(self.process.pid, signal.SIGKILL)
        await until(lambda: not any(runs(each) for each in tree), GONE_SECONDS)

    def clear(self) -> None:
        with suppress(psutil.Error, ProcessLookupError):
            for each in self.tree():
                each.kill()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(GONE_SECONDS)


@contextmanager
def lenders(home: Path, *ranks: int) -> Iterator[tuple[str, list[Lender]]]:
    """Machines 1 and so on with so many ranks, and where they meet machine 0."""
    rendezvous = a_rendezvous()
    made = [
        Lender(home, number, rendezvous, "--ranks", str(count), nodes=1 + len(ranks))
        for number, count in enumerate(ranks, 1)
    ]
    try:
        yield rendezvous, made
    finally:
        for each in made:
            each.clear()


def a_rendezvous() -> str:
    """With a port that no outgoing connection takes meanwhile: below those of Linux."""
    while True:
        with suppress(OSError), socket.create_server(("127.0.0.1", random.randint(20_000, 32_000))) as free:
            return "{}:{}".format(*free.getsockname())


def spread(spec: WorkerSpec, division: str, rendezvous: str) -> tuple[WorkerSpec, list[int]]:
    """The same on several machines, as in zero2 1+2: one rank on machine 0, two on machine 1."""
    shard, _, counts = division.partition(" ")
    ranks = [*map(int, counts.split("+"))]
    parallel = shard == "tensor"
    more: dict[str, Any] = {"shard": "zero3" if parallel else shard, "tensor_parallel": 2 if parallel else 1}
    return replace(
        spec,
        devices=("cpu",) * ranks[0],
        nodes=len(ranks),
        rendezvous=rendezvous,
        meeting_seconds=60.0,
        **more,
    ), ranks


async def published(trainer: RemoteTrainer, number: int) -> torch.Tensor:
    """What the ranks give back without a step."""
    await Training(trainer, number).end()
    return await vector(trainer)


@pytest.mark.parametrize(
    "optimizer, division, steps",
    [
        ("adamw", "zero2 1+1", 6),
        *long(
            ("muon", "zero1 1+2", 8),
            ("adamw", "zero2 1+1+1", 8),
            ("adamw", "zero3 1+1", 20),
            ("muon", "zero3 2+1", 8),
            ("adamw", "tensor 2+2", 8),
        ),
    ],
)
async def test_machines_compute_what_one_process_does(
    optimizer: str, division: str, steps: int, compute: ThreadCompute, tmp_path: Path
) -> None:
    one_spec = gpt(inner_optimizer=optimizer, inner_steps=steps)
    counts = [*map(int, division.partition(" ")[2].split("+"))]
    tolerance = MUON_TOLERANCE if optimizer == "muon" else TOLERANCE
    with lenders(tmp_path, *counts[1:]) as (rendezvous, others):
        spec = spread(one_spec, division, rendezvous)[0]
        async with RemoteTrainer(one_spec, compute) as one, RemoteTrainer(spec, compute) as group:
            begun = await vector(one)
            assert torch.equal(await vector(group), begun)
            for number, path in enumerate((tmp_path / "first", tmp_path / "second")[: 1 + (steps > 6)]):
                works = await round_of(one, number), await round_of(group, number)
                assert works[0].tokens == works[1].tokens > 0
                assert works[1].norm == pytest.approx(works[0].norm, rel=tolerance)
                found = Apart(one, await vector(one), begun)
                assert found.of(await vector(group), lambda name: True) <= tolerance
                begun = found.whole
                await one.save(path)
                if counts[0] > 1:
                    with (
                        without_files(psutil.Process(group.pid).children()[0]),
                        pytest.raises(WorkerError, match=r"cannot be written: rank 1 of .: Too many open files"),
                    ):
                        await group.save(path.with_suffix(".group"))
                await group.save(path.with_suffix(".group"))
                assert path.stat().st_size == path.with_suffix(".group").stat().st_size
                # each continues with the parameters and the optimiser's state of the other
                await one.load(path.with_suffix(".group"), one.position)
                await group.load(path, group.position)
                await group.save(tmp_path / "again")
                assert (tmp_path / "again").read_bytes() == path.read_bytes()
                for each in (one, group):
                    await each.write(begun)
            zeros = torch.where(torch.arange(len(begun)) % 3 == 0, torch.tensor(-0.0), begun)
            await group.write(zeros)
            assert torch.equal((await published(group, 7)).view(torch.int32), zeros.view(torch.int32))
            await group.write(begun)
            assert await group.evaluate() == pytest.approx(await one.evaluate(), rel=1e-6)
            assert group.restarts == one.restarts == 0
        for _ in range(5):  # on a busy machine one of them may come too late
            if any(each.process.poll() is None for each in others):
                say_over(rendezvous)
        assert [each.process.wait(20) for each in others] == [0] * len(others)


@pytest.mark.long
@pytest.mark.parametrize("division", ["zero2 1+1", "zero3 2+2"])
async def test_killed_machine_is_named_and_replaced(division: str, compute: ThreadCompute, tmp_path: Path) -> None:
    counts = [*map(int, division.partition(" ")[2].split("+"))]
    with lenders(tmp_path, *counts[1:]) as (rendezvous, others):
        spec = spread(gpt(), division, rendezvous)[0]
        async with RemoteTrainer(spec, compute) as trainer:
            training = Training(trainer, surplus=True)
            await training.until_tokens(3 * 512)
            heard, last = len(training.progress), others[0].ranks()[-1]
            last.kill()  # its last rank; then the whole machine
            await until(lambda: trainer.restarts == 1)
            whose = f"rank 3 of 4: {KILLED}" if counts[1] > 1 else "the connection to it ended"
            assert trainer.last_failure.endswith(f"machine 1 of 2 (127.0.0.1): {whose}")
            mine = KILLED if counts[1] > 1 else "machine 1 of 2: its first rank was killed by signal 9; waiting up to "
            assert mine in others[0].said() and "machine 0's worker has ended" not in others[0].said()
            await until(lambda: training.progress[heard:] and training.progress[-1].tokens > 0)
            await others[0].dies()
            await until(lambda: trainer.last_failure.endswith("(127.0.0.1): the connection to it ended"))
            with lenders_at(tmp_path, rendezvous, counts[1]) as again:
                await until(lambda: trainer.restarts == 2)
                heard = len(training.progress)
                await until(lambda: training.progress[heard:] and training.progress[-1].tokens > 0)
                assert (await training.end()).tokens > 0
                tree = again.ranks()
                await trainer.release()  # machine 0's worker ends
                await until(lambda: not any(runs(each) for each in tree), GONE_SECONDS)
                await until(lambda: "machine 0's worker has ended; waiting" in again.said(), GONE_SECONDS)


KILLED = "its process was killed by signal 9"


@contextmanager
def lenders_at(home: Path, rendezvous: str, ranks: int) -> Iterator[Lender]:
    lender = Lender(home, 1, rendezvous, "--ranks", str(ranks))
    try:
        yield lender
    finally:
        lender.clear()


@pytest.mark.long
async def test_machines_that_cannot_meet_say_why(
    compute: ThreadCompute, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(succession, "BACKOFF_SECONDS", (0.0,) * 5)
    rendezvous = a_rendezvous()
    spec = replace(spread(gpt(), "zero2 1+1", rendezvous)[0], meeting_seconds=1.0)
    with pytest.raises(WorkerError, match=f"machine 1 of 2 did not come to {rendezvous} within 1 s: start it with "):
        async with RemoteTrainer(spec, compute):
            pass
    nowhere = replace(spec, rendezvous="192.0.2.7:20001")
    with pytest.raises(WorkerError, match=r"machine 0 cannot listen at 192\.0\.2\.7:20001 "):
        async with RemoteTrainer(nowhere, compute):
            pass
    lender = Lender(tmp_path, 1, rendezvous, "--rendezvous-timeout", "1")
    assert lender.process.wait(30) == 2
    assert lender.said().splitlines()[-1].startswith(f"starling: machine 0 was not at {rendezvous} for 1 s (")
    lender = Lender(tmp_path, 1, rendezvous, nodes=3)
    spec = replace(spec, meeting_seconds=15.0)
    with pytest.raises(WorkerError, match="machine 1 of 2 did not come"):
        async with RemoteTrainer(spec, compute):
            pass
    assert lender.process.wait(30) == 2
    assert "machine 0 has --nodes 2, and this one 3" in lender.said()
    missing = Lender(tmp_path, 1, rendezvous, "--data", str(tmp_path / "missing"))
    with pytest.raises(WorkerError, match=r"machine 1 of 2 \(127.0.0.1\): there is no file or folder .*missing "):
        async with RemoteTrainer(spec, compute):
            pass
    missing.clear()


@pytest.mark.long
def test_peer_of_two_machines_agrees_with_another(tmp_path: Path) -> None:
    rendezvous = a_rendezvous()
    lender = Lender(tmp_path, 1, rendezvous)
    with RealSwarm(tmp_path, RUN, with_small_data) as swarm:
        a = swarm.found("a", "--nodes", "2", "--rendezvous", rendezvous, "--device", "cpu", "--shard", "zero3")
        assert "2 ranks train together (zero3), on 2 machines" in a.said()
        (b,) = swarm.join("b", via=a)
        report = wait("both are in one mean", lambda: swarm.all_in_one_mean([a, b]), START_SECONDS)
        assert len(report["peers"]) == 2
        os.kill(a.pid, signal.SIGINT)
        assert a.ends(60) == 0
        assert lender.process.wait(20) == 0 and "the peer on machine 0 has ended" in lender.said()
