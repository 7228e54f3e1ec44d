"""The worker in a process of its own: what it computes, and what follows when it is killed, hangs or cannot start."""

from __future__ import annotations

import asyncio
import gc
import itertools
import math
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio
import torch

from node.outer.fragments import Fragments
from node.outer.overlap import Overlap
from node.outer.state import OuterSGD, OuterState
from node.runtime.child_process import ChildProcess
from node.runtime.compute import ThreadCompute
from node.runtime.fork_server import ForkServer
from node.tasks.recipe import Recipe
from node.tasks.spec import OwnValues, PacedValues, WorkerSpec
from node.training import liveness, process
from node.training import worker_supervisor as succession
from node.training.build import build
from node.training.remote import RemoteTrainer, WorkerError
from node.training.trainer import LocalTraining
from protocols.base import LocalProgress, Member, RoundKey, Trainer
from protocols.history.chain import genesis
from protocols.sync.snapshot import SnapshotIndex
from tests.conformance.worlds import freeze
from tests.support import warm
from tests.support.long import long
from tests.support.paths import REPOSITORY
from tests.support.processes import runs
from tests.support.waiting import until
from tests.support.warm import WarmForkServer

pytestmark = [pytest.mark.real, pytest.mark.timeout(120)]

RECIPE = Recipe(10, 5, learning_rate=1e-2, outer_learning_rate=0.9, outer_momentum=0.5, warmup_steps=4)
SIZE = 100_000
STEP_TOKENS = 1024


def key(number: int, fragment: int = 0) -> RoundKey:
    return RoundKey(bytes(32), "run", bytes(32), number, fragment)


def paced(step_seconds: float = 0.02) -> WorkerSpec:
    return WorkerSpec(PacedValues(SIZE, STEP_TOKENS, step_seconds), RECIPE, 3, threads=1)


@pytest_asyncio.fixture
async def compute(forked: None) -> AsyncIterator[ThreadCompute]:
    async with ThreadCompute() as made:
        yield made
        assert workers() == []


def workers() -> list[int]:
    """Worker processes of this process, and orphans."""
    return [
        each.pid
        for each in psutil.process_iter(["cmdline", "ppid"])
        if "node.training.worker" in (each.info["cmdline"] or []) and _is_ours(each.info["ppid"])
    ]


def _is_ours(parent: int) -> bool:
    """Whether the parent is a reaper of this process or of its fork server, or there is none."""
    with suppress(psutil.NoSuchProcess):
        server = ForkServer.here.pid if isinstance(ForkServer.here, WarmForkServer) else None
        return parent == 1 or psutil.Process(parent).ppid() in (os.getpid(), server)
    return True


class Training:
    """A call of `train` under way."""

    def __init__(self, trainer: Trainer, number: int = 0, fragment: int = 0) -> None:
        self.cut, self.progress = asyncio.Event(), list[LocalProgress]()
        self.task = asyncio.create_task(trainer.train(key(number, fragment), self.cut, self.progress.append))

    async def until_tokens(self, tokens: int) -> None:
        await until(lambda: self.task.done() or (self.progress and self.progress[-1].tokens >= tokens))

    async def end(self) -> LocalProgress:
        self.cut.set()
        async with asyncio.timeout(20):
            return await self.task


async def vector(trainer: RemoteTrainer) -> torch.Tensor:
    into = torch.full(trainer.layout.sizes(), math.nan)
    await trainer.read(into)
    return into


@pytest.mark.parametrize("how", ["forked", *long("executed")])
async def test_training_matches_in_process_bits(
    how: str, spec: WorkerSpec, compute: ThreadCompute, monkeypatch: pytest.MonkeyPatch
) -> None:
    if how == "executed":
        monkeypatch.setattr(ForkServer, "here", None)
    learner = build(spec, torch.empty, False).learner
    local_training = LocalTraining(learner, RECIPE.inner_steps)
    async with RemoteTrainer(spec, compute) as trainer:
        assert trainer.layout == learner.layout
        assert torch.equal(await vector(trainer), learner.vector)
        for number in range(3):
            training = Training(trainer, number)
            await training.until_tokens(32 * 13)
            local_training.begin(number)
            if number == 0:
                reported = {work.tokens // 32: work.complete for work in training.progress}
                assert [*reported][:2] == [0, 1] and [*reported] == sorted(reported)
                assert reported[10] and not any(complete for steps, complete in reported.items() if steps < 10)
            assert training.progress[0].tokens == local_training.work().tokens
            work = await training.end()
            while local_training.work().tokens < work.tokens:
                local_training.step()
            mine = local_training.work()
            assert all(getattr(work, name) == getattr(mine, name) for name in ("tokens", "loss", "norm", "complete"))
            assert 0 < work.step_seconds <= work.seconds
            assert torch.equal(await vector(trainer), learner.vector)
            if number == 1:
                continue  # a skipped round: the work goes on growing
            anchor, tokens = learner.vector * 0.5, 64 * number
            await trainer.write(learner.vector * 0.75, anchor=anchor, tokens=tokens)
            local_training.write(learner.vector * 0.75, anchor=anchor, tokens=tokens)
            assert await trainer.evaluate() == local_training.evaluate()
        assert trainer.restarts == 0


async def test_calls_during_training_are_answered(spec: WorkerSpec, compute: ThreadCompute) -> None:
    async with RemoteTrainer(spec, compute) as trainer:
        training = Training(trainer)
        await training.until_tokens(320)
        loss = await trainer.evaluate()
        seen = []
        for _ in range(5):
            seen.append(await vector(trainer))
            await asyncio.sleep(0.1)
        assert len({float(each.norm()) for each in seen}) == 5, "training goes on"
        await trainer.write(torch.zeros(trainer.layout.sizes()))
        await until(lambda: training.progress[-1].tokens < 320)
        assert await trainer.evaluate() == pytest.approx(math.log(256)) and loss != math.log(256)
        work = await training.end()
        assert work.norm == pytest.approx(float((await vector(trainer)).norm()), rel=1e-5)
        tokens = [each.tokens for each in training.progress]
        assert sum(later < earlier for earlier, later in itertools.pairwise(tokens)) == 1, (
            "the write restarted the count once"
        )


async def test_cut_is_seen_within_a_step(compute: ThreadCompute) -> None:
    async with RemoteTrainer(paced(0.2), compute) as trainer:
        training = Training(trainer)
        await training.until_tokens(2 * STEP_TOKENS)
        heard = training.progress[-1].tokens
        work = await training.end()
        # The next step has begun or not when the cut arrives; no later step begins.
        assert work.tokens - heard in (0, STEP_TOKENS)
        assert work.step_seconds == pytest.approx(0.2, rel=0.5)
        assert work.seconds >= 0.199 * work.tokens / STEP_TOKENS
        cut, progress = asyncio.Event(), list[LocalProgress]()
        cut.set()
        again = await trainer.train(key(1), cut, progress.append)
        assert again.tokens == work.tokens and [each.tokens for each in progress] == [work.tokens]


async def test_worker_killed_during_training_is_replaced(spec: WorkerSpec, compute: ThreadCompute) -> None:
    async with RemoteTrainer(replace(spec, precision="float16"), compute) as trainer:
        anchor = torch.linspace(-0.1, 0.1, trainer.layout.sizes()[0])
        await trainer.write(anchor)
        before = await trainer.evaluate()
        training = Training(trainer)
        await training.until_tokens(640)
        pid, heard = trainer.pid, len(training.progress)
        trainer._shared.loss_scale[0] = 512
        assert pid
        os.kill(pid, signal.SIGKILL)
        await until(lambda: trainer.pid is None)
        assert torch.equal(await vector(trainer), anchor)
        await until(lambda: training.progress[heard:] and training.progress[-1].tokens >= 64)
        tokens = [each.tokens for each in training.progress[heard:]]
        assert 0 in tokens, "it starts again from zero, after what the dead worker had still sent"
        assert trainer.restarts == 1 and trainer.pid != pid
        work = await training.end()
        assert work.norm == pytest.approx(float((await vector(trainer) - anchor).norm()), rel=1e-5)
        assert work.tokens // 32 < trainer._shared.steps <= trainer._shared.position, "no data is used twice"
        assert trainer._shared.loss_scale[0] == 512, "the new worker has the loss scale of the old one"
        assert await trainer.evaluate() == before


async def test_worker_killed_while_idle_resumes_its_state(compute: ThreadCompute) -> None:
    async with RemoteTrainer(paced(), compute) as trainer:
        training = Training(trainer)
        await training.until_tokens(4 * STEP_TOKENS)
        work = await training.end()
        local = await vector(trainer)
        os.kill(trainer.pid or 0, signal.SIGKILL)
        await until(lambda: trainer.restarts == 1)
        assert torch.equal(await vector(trainer), local)
        training = Training(trainer)
        await training.until_tokens(work.tokens + STEP_TOKENS)
        again = await training.end()
        assert training.progress[0].tokens == work.tokens and again.norm > 0
        os.kill(trainer.pid or 0, signal.SIGKILL)
        await until(lambda: trainer.pid is None)
        await trainer.write(torch.zeros(SIZE), anchor=torch.ones(SIZE), tokens=77)
        training = Training(trainer, 1)
        await until(lambda: training.progress[-1:] and training.progress[-1].tokens > 77)
        assert 77 in [each.tokens for each in training.progress]
        assert training.progress[-1].norm == pytest.approx(math.sqrt(SIZE), rel=0.1)
        await training.end()


async def test_worker_killed_during_evaluation_is_replaced(spec: WorkerSpec, compute: ThreadCompute) -> None:
    async with RemoteTrainer(spec, compute) as trainer:
        anchor = await vector(trainer)
        before = await trainer.evaluate()
        await freeze(trainer.pid)
        asked = asyncio.create_task(trainer.evaluate())
        await asyncio.sleep(0.1)
        os.kill(trainer.pid or 0, signal.SIGKILL)
        assert await asked == before and trainer.restarts == 1
        assert torch.equal(await vector(trainer), anchor)


async def test_cut_without_a_worker_does_not_wait(compute: ThreadCompute) -> None:
    async with RemoteTrainer(paced(), compute) as trainer:
        training = Training(trainer)
        await training.until_tokens(STEP_TOKENS)
        os.kill(trainer.pid or 0, signal.SIGKILL)
        await until(lambda: trainer.pid is None)
        work = await training.end()
        assert work.tokens == 0 and trainer.restarts == 0
        assert training.progress[-1].tokens == 0


@pytest.mark.parametrize("busy", [True, False])
async def test_hung_worker_is_replaced(busy: bool, compute: ThreadCompute, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "LOOK_SECONDS", 0.25)
    monkeypatch.setattr(liveness, "STOPPED_SECONDS", 1.0)
    async with RemoteTrainer(paced(), compute) as trainer:
        anchor = await vector(trainer)
        training = Training(trainer)
        await training.until_tokens(2 * STEP_TOKENS)
        if not busy:
            await training.end()
            await trainer.write(anchor)
        await freeze(trainer.pid)
        began = time.perf_counter()
        if busy:
            assert torch.equal(await vector(trainer), anchor)
            assert 0.9 < time.perf_counter() - began < 10
            await trainer.write(anchor)
        assert await trainer.evaluate() == pytest.approx(float(anchor[: 1 << 14].square().mean()))
        assert trainer.restarts == 1
        if busy:
            await training.until_tokens(STEP_TOKENS)
            await training.end()


TASK = """
import time

import torch
from torch import nn


class Failing:
    timeout_seconds = 600

    def __init__(self, context):
        self.module = nn.Linear(2, 2)

    def batch(self, seed, position):
        if position == 3:
            return [][position]
        if position == 5:
            time.sleep(1000)
        return (torch.full((4, 2), float(position)),)

    def loss(self, batch):
        return self.module(batch).square().mean()

    def evaluate(self):
        raise KeyError("no such loss")
"""


async def test_exception_and_hang_name_their_place(
    compute: ThreadCompute, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "failing.py").write_text(TASK)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(succession, "BACKOFF_SECONDS", (0.0,) * 5)
    spec = WorkerSpec(OwnValues("failing:Failing"), RECIPE, 3, threads=1, timeout_seconds=2.0)
    async with warm.forked_workers(), RemoteTrainer(spec, compute) as trainer:  # with that path
        with pytest.raises(WorkerError) as error:
            await trainer.evaluate()
        assert "KeyError: 'no such loss', in Failing.evaluate (failing.py:25)" in str(error.value)
        assert trainer.restarts == 0, "an evaluation that fails costs no worker"
        training = Training(trainer)
        for number, why in enumerate(
            [
                "the worker failed in train: task failing:Failing: batch(): IndexError: list index out of range, in ",
                "the worker hangs in an inner step: for 2 s it finished nothing, used no processor time and ",
            ],
            1,
        ):
            await until(lambda: trainer.restarts == number)  # noqa: B023
            assert trainer.last_failure.startswith(why) and "batch (failing.py:" in trainer.last_failure
            assert f"{trainer.last_failure}: another is started" in caplog.text
        assert "--worker-timeout" in trainer.last_failure and "IndexError: list index out of range" in caplog.text
        await training.until_tokens(4)
        await training.end()


async def test_worker_dying_repeatedly_at_start_is_given_up(
    compute: ThreadCompute, monkeypatch: pytest.MonkeyPatch, text: Path, spec: WorkerSpec
) -> None:
    monkeypatch.setattr(succession, "BACKOFF_SECONDS", (0.0,) * 5)
    given_up: list[str] = []
    async with RemoteTrainer(spec, compute, given_up.append) as trainer:
        before = await vector(trainer)
        os.unlink(text)
        os.kill(trainer.pid or 0, signal.SIGKILL)
        with pytest.raises(WorkerError) as error:
            await trainer.evaluate()
        assert str(error.value).startswith(f"the worker died 5 times in a row: there is no file or folder {text} ")
        assert given_up == [str(error.value)]
        training = Training(trainer)
        await until(lambda: training.progress)
        await asyncio.sleep(0)
        assert not training.task.done(), "a leaver waits for the end of its round, without a worker"
        assert (await training.end()).tokens == 0
        trainer._on_given_up = None
        with pytest.raises(WorkerError):
            await Training(trainer).task
        assert torch.equal(await vector(trainer), before) and trainer.pid is None


async def test_last_output_is_reported(
    compute: ThreadCompute, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\nsys.stderr.write('x' * 999 + '\\nfarewell\\n')\nos._exit(3)"
    )
    launch = ChildProcess.start

    async def start(name: str, command: Any, on_line: Any, environment: Any, *rest: Any) -> ChildProcess:
        return await launch(name, command, on_line, {"PYTHONPATH": str(tmp_path)}, *rest)

    monkeypatch.setattr(ChildProcess, "start", start)
    monkeypatch.setattr(ForkServer, "here", None)
    with pytest.raises(WorkerError) as error:
        await RemoteTrainer(paced(), compute).__aenter__()
    assert str(error.value).startswith("the worker did not start: exit code 3; last output: xxx")
    assert str(error.value).endswith("x | farewell") and len(str(error.value)) < 400
    assert "worker: farewell" in caplog.text


async def test_joiner_evaluates_on_the_founders_sample(
    spec: WorkerSpec, compute: ThreadCompute, tmp_path: Path
) -> None:
    async with RemoteTrainer(spec, compute) as founder:
        sample, anchor, loss = await founder.held_out(), await vector(founder), await founder.evaluate()
        texts = await founder.generate(b"ab", 6), await founder.generate(b"ab", 6, 1.0, seed=5)
        with pytest.raises(WorkerError, match=r"^the prompt is empty$"):
            await founder.generate(b"", 6)
        assert founder.restarts == 0
    (tmp_path / "held-out.bin").write_bytes(sample)
    (tmp_path / "other.txt").write_bytes(b"something else, for long enough. " * 40)
    spec = replace(spec, data=tmp_path / "other.txt", held_out=tmp_path / "held-out.bin")
    async with RemoteTrainer(replace(spec, stream_seed=4, weights_seed=1), compute) as joiner:
        assert await joiner.held_out() == sample and await joiner.evaluate() != loss
        await joiner.write(anchor)
        assert await joiner.evaluate() == loss
        assert texts == (await joiner.generate(b"ab", 6), await joiner.generate(b"ab", 6, 1.0, seed=5))


async def test_cancellation_leaves_nothing_half_done(compute: ThreadCompute) -> None:
    async with RemoteTrainer(paced(), compute) as trainer:
        anchor = await vector(trainer)
        training = Training(trainer)
        await training.until_tokens(STEP_TOKENS)
        training.task.cancel()
        await asyncio.wait([training.task])
        assert torch.equal(await vector(trainer), anchor)
        training = Training(trainer)
        await training.until_tokens(STEP_TOKENS)
        assert (await training.end()).tokens >= STEP_TOKENS and trainer.restarts == 1


async def test_ten_worker_deaths_leave_nothing_behind(compute: ThreadCompute) -> None:
    def held() -> tuple[int, int, int]:
        gc.collect()
        return len(os.listdir("/proc/self/fd")), len(asyncio.all_tasks()), psutil.Process().memory_info().rss

    outside = held()
    async with RemoteTrainer(paced(0.001), compute) as trainer:
        training = Training(trainer)
        levels, noticed_seconds = [], []
        for number in range(10):
            await until(lambda: trainer.pid)
            heard = len(training.progress)
            await until(lambda: any(work.tokens > 0 for work in training.progress[heard:]))  # noqa: B023
            levels.append(held())
            began = time.perf_counter()
            os.kill(trainer.pid or 0, signal.SIGKILL)
            await until(lambda: trainer.pid is None)
            noticed_seconds.append(time.perf_counter() - began)
            await until(lambda: trainer.restarts == number + 1)  # noqa: B023
        await training.end()
    assert statistics.median(noticed_seconds) < 0.5, noticed_seconds  # by the pipe's end, not by any deadline
    assert len({(descriptors, tasks) for descriptors, tasks, _ in levels[2:]}) == 1, levels
    assert levels[-1][2] - levels[2][2] < 4 << 20 and held()[:2] == outside[:2]


_PARENT = """
import asyncio
import sys
from contextlib import AsyncExitStack
from node.runtime.compute import ThreadCompute
from node.runtime.fork_server import ForkServer
from node.training import worker
from node.training.remote import RemoteTrainer, WorkerSpec
from protocols.base import RoundKey

async def main():
    training = []
    async with ThreadCompute() as compute, AsyncExitStack() as stack:
        for ForkServer.here in (server, server, None):
            trainer = await stack.enter_async_context(RemoteTrainer(WorkerSpec.from_json(sys.argv[1]), compute))
            training.append(trainer.train(RoundKey(bytes(32), "run", bytes(32), 0), asyncio.Event(), lambda work: None))
            print(trainer.pid, flush=True)
        await asyncio.gather(*training)

ForkServer.begin()
assert (server := ForkServer.here)
asyncio.run(main())
"""


def test_worker_dies_with_its_parent() -> None:
    """One that trains, and two that are stopped, of which one is executed, not forked."""
    root = str(REPOSITORY)
    command = [sys.executable, "-c", _PARENT, paced().to_json()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": root}) as parent:
        assert parent.stdout
        children = [psutil.Process(int(parent.stdout.readline())) for _ in range(3)]
        for child in children:
            assert os.getsid(child.pid) == child.pid, "Ctrl-C cannot reach it"
        for child in children[1:]:
            child.send_signal(signal.SIGSTOP)
        parent.kill()
        began = time.monotonic()
        while any(map(runs, children)):
            assert time.monotonic() - began < 10
            time.sleep(0.01)


async def test_resting_worker_stands_still_and_lives(compute: ThreadCompute) -> None:
    """For far longer than a worker that takes no step may live; then it goes on where it stopped."""
    async with RemoteTrainer(replace(paced(), timeout_seconds=0.3), compute) as trainer:
        training = Training(trainer)
        await training.until_tokens(3 * STEP_TOKENS)
        pid = trainer.pid
        trainer.rest(True)
        await until(lambda: training.progress[-1].resting)
        stopped = training.progress[-1].tokens
        await asyncio.sleep(1.0)
        assert (training.progress[-1].tokens, trainer.pid, trainer.restarts) == (stopped, pid, 0)
        assert trainer._shared.steps * STEP_TOKENS == stopped
        trainer.rest(False)
        await training.until_tokens(stopped + 2 * STEP_TOKENS)
        trainer.rest(True)
        work = await training.end()
        assert work.tokens > stopped and trainer.pid == pid


async def test_released_worker_returns_with_the_parameters(compute: ThreadCompute) -> None:
    async with RemoteTrainer(paced(), compute) as trainer:
        training = Training(trainer)
        await training.until_tokens(3 * STEP_TOKENS)
        work, before, pid = await training.end(), await vector(trainer), trainer.pid
        await trainer.release()
        assert trainer.pid is None
        await until(lambda: pid not in workers(), 5.0)
        await asyncio.sleep(0.2)
        assert workers() == [], "another worker came although nothing was asked of one"
        assert torch.equal(await vector(trainer), before)
        training = Training(trainer, 1)
        await training.until_tokens(work.tokens + STEP_TOKENS)
        assert (await training.end()).carried == work.tokens
        assert trainer.restarts == 0 and trainer.pid not in (None, pid)
        await trainer.release()
        await Training(trainer, 2).end()  # before that worker's end is noticed
        await until(lambda: trainer.pid is not None, 20.0)
        assert trainer.restarts == 0


@pytest.mark.parametrize(("dies", "fragments"), [(False, 1), (True, 3), (False, 3)])
async def test_overlapped_work_stays_across_the_outer_step(dies: bool, fragments: int, compute: ThreadCompute) -> None:
    """Also in part, if the worker is killed meanwhile: it starts again from the anchor. The outer step is of one
    fragment, the others' work stays, and the worker goes on with the next one's.
    """
    spec = replace(paced(), recipe=replace(RECIPE, fragments=fragments if fragments > 1 else None))
    head = genesis(bytes(32), "run", (Member("anna"),), fragments=fragments)
    async with RemoteTrainer(spec, compute) as trainer:
        training, account = Training(trainer, 0), Fragments(trainer, SIZE, fragments)
        await training.until_tokens(10 * STEP_TOKENS)
        handed_in, begun = await training.end(), trainer.anchor().clone()
        cut, overlap, heard = await vector(trainer), Overlap(trainer, account, head, handed_in), list[LocalProgress]()

        def train(arrived: asyncio.Event) -> Coroutine[Any, Any, LocalProgress]:
            return trainer.train(key(1, head.next_fragment), arrived, heard.append)

        async with overlap.run(train, heard.append):
            await until(lambda: heard and heard[-1].tokens >= handed_in.tokens + 2 * STEP_TOKENS)
            if dies:
                assert trainer.pid
                os.kill(trainer.pid, signal.SIGKILL)
                await until(lambda: trainer.restarts and heard[-1].tokens >= 2 * STEP_TOKENS)
        worked, state = await vector(trainer), OuterState(trainer.anchor(), OuterSGD(0.5, 0.5), compute)
        await state.hash()
        part, following = account.part(0), account.part(head.next_fragment)
        delta = (begun - cut)[part]
        assert await overlap.step(state, 1, delta.clone(), delta.clone(), keeps=False)
        moved, expected = (trainer.anchor() - (begun if dies else cut))[part], worked.clone()
        expected[part] += moved
        assert moved.abs().max() > 0 and state.index == SnapshotIndex.of(state.anchor, state.velocity)
        torch.testing.assert_close(await vector(trainer), expected, rtol=0, atol=1e-6)
        training = Training(trainer, 1, head.next_fragment)
        await training.until_tokens(1)
        left = training.progress[0]
        uncounted = heard[-1].tokens - (0 if dies or fragments > 1 else handed_in.tokens)
        assert left.tokens == left.carried == uncounted > 0
        assert account.work(0, left).tokens == heard[-1].tokens - (0 if dies else handed_in.tokens)
        since = (begun if dies or fragments > 1 else cut)[following]
        assert left.norm == pytest.approx(float((worked[following] - since).norm()), rel=1e-3)
        await training.end()
