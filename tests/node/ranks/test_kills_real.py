"""Ranks that are killed, stopped, hang or fail: the peer names them, and starts others in place of all."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from node.runtime.compute import ThreadCompute
from node.runtime.metrics import with_children, workers_here
from node.training import liveness, process
from node.training import worker_supervisor as succession
from node.training.remote import RemoteTrainer, WorkerError
from tests.support.long import long
from tests.support.other_worker import worker_program
from tests.support.processes import gone
from tests.support.rank_groups import OWN, Training, gpt, grouped, own, ranks_of, round_of, vector, without_files
from tests.support.waiting import until

pytestmark = [pytest.mark.real, pytest.mark.timeout(150)]

STEP_TOKENS = 512


@pytest.mark.parametrize(
    "group, kills",
    [
        ("zero1 x2 shared", {"step": 1, "save": 0}),
        *long(
            ("zero1 x3 shared", {"save": 2, "step": 0, "evaluate": 1}),
            ("zero2 x3 optimizer", {"step": 2, "evaluate": 0, "publish": 2, "save": 1}),
            ("zero3 x3 apart", {"publish": 1, "save": 0, "step": 1, "evaluate": 2}),
            ("zero3 x2 parameters", {"save": 1, "publish": 0, "evaluate": 1, "step": 0}),
            ("tensor x4 apart", {"evaluate": 3, "step": 2, "save": 1, "publish": 0}),
        ),
    ],
)
async def test_killed_rank_is_replaced_with_all(
    group: str, kills: dict[str, int], compute: ThreadCompute, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One after another, of the same peer: the round that is under way continues each time."""
    monkeypatch.setattr(succession, "BACKOFF_SECONDS", (0.0,) * succession.DEATHS)
    with nullcontext() if "shared" in group else worker_program("tests.gpu.ranks", "node.ranks.worker"):
        async with RemoteTrainer(grouped(gpt(), group), compute) as trainer:
            before = await trainer.evaluate()
            training = Training(trainer, surplus=True)
            for when, rank in kills.items():
                await kill(trainer, training, when, rank, before, tmp_path / "state")
            assert (await training.end()).tokens > 0 and trainer.restarts == len(kills)
            others = ranks_of(trainer)
    await gone(others)


async def kill(trainer: RemoteTrainer, training: Training, when: str, rank: int, before: float, path: Path) -> None:
    await training.until_tokens(3 * STEP_TOKENS)
    heard, restarts, processes = len(training.progress), trainer.restarts, ranks_of(trainer)
    asked: asyncio.Task[Any] | None = None
    if when != "step":
        processes[0].suspend()
        asks = {"evaluate": trainer.evaluate, "publish": lambda: vector(trainer), "save": lambda: trainer.save(path)}
        asked = asyncio.create_task(asks[when]())
        await asyncio.sleep(0.1)
    processes[rank].kill()
    if when != "step" and rank:
        processes[0].resume()
    await gone(processes)
    await until(lambda: trainer.restarts > restarts)
    last = f"rank {rank} of {len(processes)}: its process was killed by signal 9"
    assert rank == 0 or trainer.last_failure.endswith(last)
    if when == "evaluate":
        assert asked and await asked == before
    elif when == "publish":
        assert asked and (await asked).isfinite().all()
    elif asked:
        await asyncio.wait([asked])
        assert isinstance(asked.exception(), WorkerError) or asked.result()
    # its work begins anew
    await until(lambda: any(a.tokens == 0 < b.tokens for a, b in pairwise(training.progress[heard:])))
    assert trainer.restarts == restarts + 1


@pytest.mark.parametrize("group", ["zero1 x2 shared", *long("zero2 x3 shared", "zero3 x3 apart")])
async def test_state_that_one_rank_cannot_write_costs_no_training(
    group: str, compute: ThreadCompute, tmp_path: Path
) -> None:
    async with RemoteTrainer(grouped(gpt(), group), compute) as trainer:
        await round_of(trainer, 0)
        assert await trainer.save(tmp_path / "state")
        local = await vector(trainer)
        with without_files(ranks_of(trainer)[-1]):
            with pytest.raises(WorkerError, match=r"cannot be written: rank (1 of 2|2 of 3): Too many open files"):
                await trainer.save(tmp_path / "other")
            with pytest.raises(WorkerError, match=r"cannot be read: rank (1 of 2|2 of 3): Too many open files"):
                await trainer.load(tmp_path / "state", trainer.position)
        assert torch.equal(await vector(trainer), local) and await trainer.save(tmp_path / "other")
        assert (tmp_path / "other").read_bytes() == (tmp_path / "state").read_bytes()
        assert (await round_of(trainer, 1)).complete and trainer.restarts == 0


@pytest.mark.parametrize("able, restarts", long(("", 0), ("1", 1), ("01", 1)))
async def test_evaluation_that_fails_on_all_ranks_costs_no_training(
    able: str, restarts: int, compute: ThreadCompute
) -> None:
    """One that fails on some of them, while the others compute, ends the worker: these wait for it."""
    async with RemoteTrainer(grouped(own(plain=1, evaluates=able), "zero3 x3 apart"), compute) as trainer:
        training = Training(trainer, surplus=True)
        await training.until_tokens(100)
        with pytest.raises(WorkerError, match=r"task .*: evaluate.*: LookupError: no held-out data"):
            await trainer.evaluate()
        assert (trainer.restarts > 0) == restarts
        heard = len(training.progress)
        await until(lambda: training.progress[heard:] and training.progress[-1].tokens)
        assert (await training.end()).tokens


def oom_score(of: psutil.Process) -> int:
    return int(Path(f"/proc/{of.pid}/oom_score_adj").read_text())


async def test_stopped_rank_is_seen(
    compute: ThreadCompute, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(process, "LOOK_SECONDS", 0.25)
    monkeypatch.setattr(liveness, "STOPPED_SECONDS", 1.0)
    async with RemoteTrainer(replace(grouped(gpt(), "zero1 x2 shared"), nice=5), compute) as trainer:
        training = Training(trainer)
        await training.until_tokens(STEP_TOKENS)
        processes = ranks_of(trainer)
        assert {each.nice() for each in processes} == {min(19, os.getpriority(os.PRIO_PROCESS, 0) + 5)}
        assert {oom_score(each) for each in processes} == {process.OOM_SCORE}
        found, ours = psutil.process_iter, {each.pid for each in processes}
        monkeypatch.setattr(psutil, "process_iter", lambda names: (each for each in found(names) if each.pid in ours))
        assert workers_here() == 1 and with_children(processes[0].pid) == [each.pid for each in processes]
        os.kill(processes[1].pid, signal.SIGSTOP)
        asked = asyncio.create_task(trainer.evaluate())
        await until(lambda: trainer.restarts == 1, 20)
        assert trainer.last_failure.startswith("rank 1 of 2 was stopped (by SIGSTOP or a debugger) in an inner step")
        assert "File " not in caplog.text, "no stack of a rank that waited"
        await gone(processes)
        await asked
        assert (await training.end()).tokens >= 0


@pytest.mark.parametrize("group", ["zero2 x2 shared", *long("zero1 x3 shared", "zero3 x2 apart")])
async def test_rank_that_hangs_is_noticed_by_progress(group: str, compute: ThreadCompute) -> None:
    """The others wait for it in a collective."""
    hanging = own(hangs_at=9, plain=int("zero3" in group))
    spec = replace(grouped(hanging, group), timeout_seconds=1.0)
    async with RemoteTrainer(spec, compute) as trainer:
        training = Training(trainer)
        await until(lambda: trainer.restarts == 1)
        assert trainer.last_failure.startswith("the worker hangs in an inner step: for 1 s it finished nothing")
        await until(lambda: training.progress[-1].tokens > 0)
        await training.end()


async def test_rank_that_fails_is_named(compute: ThreadCompute, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(succession, "DEATHS", 2)
    given_up: list[str] = []
    async with RemoteTrainer(grouped(own(fails_at=1), "zero1 x2 shared"), compute, given_up.append) as trainer:
        training = Training(trainer)
        await until(lambda: given_up)
        what = f"rank 1 of 2: task {OWN}: batch(): LookupError: no batch "
        assert given_up[0].startswith("the worker died 2 times in a row: the worker failed in train: " + what)
        assert ", in Shapes.batch (own_task.py:" in given_up[0]
        await training.end()
