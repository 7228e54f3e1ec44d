"""A stage in a real worker process: the same numbers as without one, and no gradient that outlives its worker."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from node.runtime.compute import ThreadCompute
from node.runtime.fork_server import ForkServer
from node.tasks.gpt_presets import GptConfig, Preset
from node.tasks.gpt_stage import GptStageTask
from node.tasks.partition import Partition
from node.tasks.recipe import Recipe
from node.tasks.spec import GptValues, StageValues, WorkerSpec
from node.tasks.text import load
from node.training.activations import ActivationCodec
from node.training.remote_stage import RemoteStage
from node.training.stage_learner import StageLearner
from node.training.stage_replica import MAX_OUTER_JOBS, LeasedStage, OuterVersion
from node.training.stage_trainer import ServingTrainer, StageTraining
from protocols.base import BadPayload, Member, RoundKey
from protocols.pipeline.admission import StepAdmission
from protocols.pipeline.job import JobKind, LeaseLost, StageJob
from tests.sim.inline_stage import accumulate
from tests.support.long import long
from tests.support.waiting import until

pytestmark = pytest.mark.usefixtures("forked")

RECIPE = Recipe(10, 5, learning_rate=1e-2, outer_learning_rate=0.9, outer_momentum=0.5, warmup_steps=4, batches=2)
SHAPE, ROWS, BOUNDS, SEED, STREAM = GptConfig(layers=2, width=16, heads=2, context=16), 2, (0, 2, 3, 4), 9, 3
DRIVER = Member("driver")
LOOKAHEAD = 1


def spec(stage: int, text: Path, recipe: Recipe) -> WorkerSpec:
    values = StageValues(stage, BOUNDS, "fp32", "fp32", 0, "me/1")
    return WorkerSpec(GptValues(SHAPE, ROWS), recipe, STREAM, SEED, text, device="cpu", threads=1, stage=values)


def learner(stage: int, text: Path, recipe: Recipe = RECIPE) -> StageLearner:
    data = load(text) if stage == 0 else None
    task = GptStageTask(Preset(SHAPE, ROWS, recipe), Partition((), BOUNDS), stage, SEED, data)
    return StageLearner(task, recipe, ActivationCodec(task.shape, "fp32"), STREAM)


@asynccontextmanager
async def workers(text: Path, *stages: int, recipe: Recipe = RECIPE) -> AsyncIterator[list[RemoteStage]]:
    async with ThreadCompute() as compute, AsyncExitStack() as stack:
        yield [await stack.enter_async_context(RemoteStage(spec(stage, text, recipe), compute)) for stage in stages]


def admission_of(stage: RemoteStage) -> StepAdmission:
    """What admits microbatches to the stage's steps, as a peer has it."""
    admission = StepAdmission(RECIPE.batches, lambda kind, lease: None, LOOKAHEAD)
    stage.on_lost = admission.void
    admission.open()
    return admission


async def microbatch(remotes: list[RemoteStage], admissions: list[StepAdmission], number: int) -> float:
    """One microbatch through all stages and back."""
    leases = [admission.grant(DRIVER, number, 0.0) for admission in admissions]
    first, middle, last = map(LeasedStage, remotes)
    drawn = await first.run(StageJob(JobKind.DRAW), leases[0])
    x, targets = drawn.payloads
    (y,) = (await middle.run(StageJob(JobKind.FORWARD, (x,)), leases[1])).payloads
    last_done = await last.run(StageJob(JobKind.LOSS, (y, targets)), leases[2])
    backward = StageJob(JobKind.BACKWARD, (x, *last_done.payloads))
    gradient = (await middle.run(backward, leases[1])).payloads
    await first.run(StageJob(JobKind.FINISH, gradient, drawn.number, last_done.loss), leases[0])
    return last_done.loss


async def test_stages_in_workers_compute_what_they_do_without(text: Path) -> None:
    """Two steps: equal losses, weights, tokens and optimiser states, bit for bit; and the anchor stays."""
    locals_ = [learner(stage, text) for stage in range(3)]
    async with workers(text, 0, 1, 2) as remotes:
        admissions = [admission_of(remote) for remote in remotes]
        cut = asyncio.Event()
        for remote in remotes:
            assert (await remote.begin(0, cut)).tokens == 0
        for step in range(2):
            for number in range(RECIPE.batches):
                loss = accumulate(locals_)
                assert await microbatch(remotes, admissions, 10 * step + number) == loss
            for remote, admission, here in zip(remotes, admissions, locals_, strict=True):
                assert admission.is_due
                here.step(0, step)
                complete, work = await remote.step(0, admission.stepped)
                assert not complete and (work is None or work.tokens == (step + 1) * RECIPE.batches * ROWS * 16)
        for remote, here in zip(remotes, locals_, strict=True):
            vector = torch.empty_like(here.vector)
            await remote.read(vector)
            assert torch.equal(vector, here.vector) and not torch.equal(vector, remote.anchor())
            assert (await remote.work()).tokens == 2 * RECIPE.batches * ROWS * 16
        assert remotes[0].position == 4


async def test_lookahead_computes_a_backward_in_the_weights_of_its_forward(text: Path) -> None:
    """Three microbatches are begun before the first step of two; the third counts in the next. Bit for bit."""
    recipe = replace(RECIPE, lookahead=LOOKAHEAD)
    here = learner(0, text, recipe)
    async with workers(text, 0, recipe=recipe) as (remote,):
        admission, stage = admission_of(remote), LeasedStage(remote)
        await remote.begin(0, asyncio.Event())
        gradient = torch.linspace(-1, 1, remote.sizes.gradient_bytes // 4).numpy().tobytes()
        jobs = [StageJob(JobKind.FINISH, (gradient,), number, 1.0) for number in range(4)]
        leases = [admission.grant(DRIVER, number, 0.0) for number in range(3)]
        for lease in leases:
            assert await stage.run(StageJob(JobKind.DRAW), lease) == here.run(StageJob(JobKind.DRAW))
        for step, due in enumerate(((0, 1), (2, 3))):
            for number in due:
                await stage.run(jobs[number], leases[number])
                here.run(replace(jobs[number], stale=number == 2))
            assert admission.is_due
            await remote.step(0, admission.stepped)
            here.step(0, step)
            leases.append(admission.grant(DRIVER, 3, 0.0))
        vector = torch.empty_like(here.vector)
        await remote.read(vector)
        assert torch.equal(vector, here.vector) and remote.restarts == 0


async def test_killed_worker_voids_the_step_and_is_replaced(text: Path) -> None:
    """One of two microbatches is counted when the worker dies: it is lost, and the next step has two of its own."""
    async with workers(text, 2) as (remote,):
        admission, stage, cut = admission_of(remote), LeasedStage(remote), asyncio.Event()
        await remote.begin(0, cut)
        job = StageJob(JobKind.LOSS, (bytes(remote.sizes.activation_bytes), bytes(remote.sizes.target_bytes)))
        await stage.run(job, admission.grant(DRIVER, 1, 0.0))
        held = admission.grant(DRIVER, 2, 0.0)
        assert remote.pid
        os.kill(remote.pid, signal.SIGKILL)
        with pytest.raises(LeaseLost):
            await stage.run(job, held)
        assert admission.epoch == 1 and not admission.counted and not admission.leased
        await remote.begin(0, cut)
        for number in (3, 4):
            await stage.run(job, admission.grant(DRIVER, number, 0.0))
        assert admission.is_due and (await remote.step(0, admission.stepped))[0] is False
        assert (await remote.work()).tokens == RECIPE.batches * ROWS * 16


async def test_door_is_closed_while_there_is_no_worker(text: Path) -> None:
    """Nobody uploads a microbatch for which there is no worker, and no driver spins; then training goes on."""
    async with workers(text, 2) as (remote,):
        admission = admission_of(remote)
        trainer = ServingTrainer(StageTraining(DRIVER, 2, remote, lambda: True), admission, lambda: 0)
        remote.on_lost, remote.on_restored = trainer.lose, trainer.resume
        cut = asyncio.Event()
        admission.close()
        training_on = asyncio.create_task(trainer.train(RoundKey(bytes(32), "run/stage/2", bytes(32), 0), cut, print))
        await until(lambda: admission.is_open)
        assert remote.pid
        os.kill(remote.pid, signal.SIGKILL)
        await until(lambda: not admission.is_open)
        assert not remote.is_ready and admission.epoch == 1
        await until(lambda: admission.is_open)
        assert remote.is_ready and remote.restarts == 1
        cut.set()
        assert (await training_on).tokens == 0 and not admission.is_open


@pytest.mark.parametrize("how", ("forked", *long("executed")))
async def test_only_microbatches_count_as_steps(how: str, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if how == "executed":
        monkeypatch.setattr(ForkServer, "here", None)
    async with workers(text, 0) as (remote,):
        await remote.begin(0, asyncio.Event())
        await remote.work()
        assert remote._shared.steps == 0
        await LeasedStage(remote).run(StageJob(JobKind.DRAW), admission_of(remote).grant(DRIVER, 1, 0.0))
        assert remote._shared.steps == 1


async def test_cancelled_job_ends_and_the_worker_stays(text: Path) -> None:
    """A driver that is cut cancels its lanes; its worker goes on."""
    async with workers(text, 0) as (remote,):
        admission, stage = admission_of(remote), LeasedStage(remote)
        await remote.begin(0, asyncio.Event())
        pid = remote.pid
        tasks = [
            asyncio.create_task(stage.run(StageJob(JobKind.DRAW), admission.grant(DRIVER, n, 0.0))) for n in range(2)
        ]
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        assert (await remote.work()).tokens == 0 and remote.pid == pid and remote.restarts == 0


async def test_what_does_not_decode_is_refused_and_adds_nothing(text: Path) -> None:
    async with workers(text, 2) as (remote,):
        admission, stage = admission_of(remote), LeasedStage(remote)
        await remote.begin(0, asyncio.Event())
        nan = torch.full((remote.sizes.activation_bytes // 4,), torch.nan).numpy().tobytes()
        with pytest.raises(BadPayload, match="not finite"):
            job = StageJob(JobKind.LOSS, (nan, bytes(remote.sizes.target_bytes)))
            await stage.run(job, admission.grant(DRIVER, 1, 0.0))
        assert not admission.leased and not admission.counted


async def test_outer_jobs_use_the_anchor_change_nothing_and_are_few(text: Path) -> None:
    """Also those whose askers have vanished."""
    async with workers(text, 0) as (remote,):
        version = OuterVersion(trained=5)
        here, stage, admission = learner(0, text), LeasedStage(remote, lambda: version), admission_of(remote)
        for n in range(2):
            sample = StageJob(JobKind.OUTER_SAMPLE, number=n)
            assert await stage.run(sample) == replace(here.run(sample), trained=5)
        await remote.begin(0, asyncio.Event())
        drawn = await stage.run(StageJob(JobKind.DRAW), lease := admission.grant(DRIVER, 1, 0.0))
        gradient = bytes(remote.sizes.activation_bytes)
        await stage.run(StageJob(JobKind.FINISH, (gradient,), drawn.number, 1.0), lease)
        await remote.step(0, admission.stepped)
        tokens = StageJob(JobKind.OUTER_FIRST, (bytes(32),))
        assert await stage.run(tokens) == replace(here.run(tokens), trained=5), "the anchor, not the local weights"
        asked = [asyncio.create_task(stage.run(sample)) for _ in range(MAX_OUTER_JOBS)]
        await asyncio.sleep(0)
        for task in asked:
            task.cancel()
        with pytest.raises(LeaseLost, match="too many"):
            await stage.run(sample)
        await until(lambda: not stage._outer_jobs)
        beyond = await stage.run(StageJob(JobKind.OUTER_SAMPLE, number=10**6))
        assert not beyond.payloads and remote.restarts == 0
