"""Several ranks behind one worker: they compute what one process computes, and one that fails is replaced with all."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio
import torch

from node.runtime import tensors
from node.runtime.compute import ThreadCompute
from node.runtime.metrics import with_children, workers_here
from node.tasks.gpt_presets import GptConfig
from node.tasks.hf.settings import HfMachine, HfSettings, HfValues
from node.tasks.recipe import Recipe
from node.tasks.spec import SHARDS, GptValues, OwnValues, WorkerSpec
from node.training import liveness, process
from node.training import worker_supervisor as succession
from node.training.remote import RemoteTrainer, WorkerError
from protocols.base import LocalProgress, RoundKey
from tests.support import warm
from tests.support.long import long
from tests.support.other_worker import worker_program
from tests.support.real_swarm import START_SECONDS, RealSwarm, wait
from tests.support.small_models import story, write_model
from tests.support.waiting import until

pytestmark = [pytest.mark.real, pytest.mark.timeout(150)]

STEPS = 20
RECIPE = Recipe(STEPS, 5, 1e-2, 0.9, 0.5, warmup_steps=4, batches=4)
TOLERANCE, MUON_TOLERANCE = 1e-4, 1e-2
"""Of the parameters after 20 steps, relative to how far one process has moved them. Muon computes in bfloat16."""
ORPHAN_SECONDS = 5.0
OWN = "tests.node.ranks.own_task:Shapes"


@pytest_asyncio.fixture
async def compute() -> AsyncIterator[ThreadCompute]:
    async with warm.forked_workers(), ThreadCompute() as made:
        yield made


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Write a small model when it is first asked for."""
    home = tmp_path_factory.mktemp("models")
    (home / "story.txt").write_text(story(600))

    def folder(kind: str) -> Path:
        if not (home / kind).exists():
            settings = write_model(home / kind, kind) / "config.json"
            settings.write_text(settings.read_text().replace('_pdrop": 0.1', '_pdrop": 0.0'))  # gpt2's dropout
        return home / kind

    return folder


def gpt(**recipe: Any) -> WorkerSpec:
    values = GptValues(GptConfig(layers=2, width=32, heads=2, context=32), rows=4)
    return WorkerSpec(values, replace(RECIPE, **recipe), 3, 9, threads=1, device="cpu")


def own(**options: int | str) -> WorkerSpec:
    recipe = replace(RECIPE, mean="token", decay="matrices")
    return WorkerSpec(OwnValues(OWN, options), recipe, 3, 9, threads=1, device="cpu")


def grouped(spec: WorkerSpec, division: str) -> WorkerSpec:
    """The same on several ranks: zero1 x3, or tensor parallel x4, of which two share each layer."""
    shard, ranks = division.split(" x")
    parallel = shard not in SHARDS
    return replace(
        spec,
        devices=("cpu",) * int(ranks),
        shard="zero3" if parallel else shard,
        tensor_parallel=2 if parallel else 1,
    )


def spec_of(task: str, models: Callable[[str], Path]) -> WorkerSpec:
    if task.startswith("own"):
        return own(plain=int(task == "own plain"))
    kind, _, train = task.partition(" ")
    if not train:
        return gpt(inner_optimizer=kind.removeprefix("gpt-"))
    settings = HfSettings(context=48, rows=4, train=train, lora_rank=4)  # type: ignore[arg-type]
    recipe = replace(RECIPE, mean="token", decay="matrices", learning_rate=3e-3)
    folder = models(kind)
    values = HfValues(settings, HfMachine(str(folder)))
    return WorkerSpec(values, recipe, 3, 9, folder.parent / "story.txt", threads=1, device="cpu")


class Training:
    """A round under way."""

    def __init__(self, trainer: RemoteTrainer, number: int = 0, surplus: bool = False) -> None:
        self.cut, self.progress = asyncio.Event(), list[LocalProgress]()
        key = RoundKey(bytes(32), "run", bytes(32), number)
        self.task = asyncio.create_task(trainer.train(key, self.cut, self.progress.append, surplus))

    async def until_tokens(self, tokens: int) -> None:
        await until(lambda: self.task.done() or (self.progress and self.progress[-1].tokens >= tokens))

    async def end(self) -> LocalProgress:
        self.cut.set()
        async with asyncio.timeout(30):
            return await self.task


async def round_of(trainer: RemoteTrainer, number: int) -> LocalProgress:
    """All inner steps of a round."""
    training = Training(trainer, number)
    await until(lambda: training.task.done() or (training.progress and training.progress[-1].complete))
    return await training.end()


async def vector(trainer: RemoteTrainer) -> torch.Tensor:
    into = torch.full(trainer.layout.sizes(), torch.nan)
    await trainer.read(into)
    return into


@dataclass
class Apart:
    """How far two vectors are apart, relative to how far the first is from where it began, or from 0."""

    trainer: RemoteTrainer
    whole: torch.Tensor
    begun: torch.Tensor

    def of(self, other: torch.Tensor, name: Callable[[str], bool], begun: float = 1.0) -> float:
        square = moved = 0.0
        at = 0
        for each, shape in self.trainer.layout.fragments[0]:
            part = slice(at, at := at + torch.Size(shape).numel())
            if name(each):
                square += float((self.whole[part] - other[part]).double().square().sum())
                moved += float((self.whole[part] - begun * self.begun[part]).double().square().sum())
        return float((square / moved) ** 0.5)


def is_statistic(name: str) -> bool:
    """Of BatchNorm. The mean of the ranks' own counts, which follows the data more slowly."""
    return "running" in name or "tracked" in name


TASKS = ("gpt-adamw", "gpt-muon", "own", "qwen3 lora", "qwen3 full", "llama full", "gpt2 full")
ANY = [
    ("zero1 x2", "apart"),
    ("zero1 x3", "shared"),
    ("zero1 x4", "apart"),
    ("zero2 x2", "shared"),
    ("zero2 x4", "apart"),
]
SHORT = [("gpt-adamw", "zero1 x2", "shared"), ("own", "zero2 x3", "apart")]
ALL = [
    *((task, *how) for task, how in product(TASKS, ANY)),
    *product([each for each in TASKS if each != "own"], ("zero3 x2", "zero3 x3"), ("apart",)),
    *product(("own plain",), ("zero3 x2", "zero3 x4"), ("apart",)),  # batches without targets
    *product(("gpt-adamw", "qwen3 full", "llama full"), ("tensor parallel x2", "tensor parallel x4"), ("apart",)),
    *product(("gpt-adamw", "gpt-muon"), ("zero1 x1", "zero1 x2", "zero2 x3", "zero3 x2"), ("optimizer on the host",)),
]


@pytest.mark.parametrize("task, division, where", [*SHORT, *long(*(each for each in ALL if each not in SHORT))])
async def test_ranks_compute_what_one_process_does(
    task: str, division: str, where: str, models: Callable[[str], Path], tmp_path: Path
) -> None:
    tolerance = MUON_TOLERANCE if "muon" in task else TOLERANCE
    one_spec = spec_of(task, models)
    has_statistics = task == "own"
    loaded = () if (task, division, where) in SHORT else ("node.ranks.dtensors", "node.tasks.hf.task")
    group_spec = replace(grouped(one_spec, division), offload="optimizer" if "host" in where else "")
    with nullcontext() if where == "shared" else worker_program("tests.gpu.ranks", "node.ranks.worker"):
        async with (
            warm.forked_workers(*loaded),
            ThreadCompute() as compute,
            RemoteTrainer(one_spec, compute) as one,
            RemoteTrainer(group_spec, compute) as group,
        ):
            assert group.layout == one.layout
            begun = await vector(one)
            assert torch.equal(await vector(group), begun)
            tensors.write(tmp_path / "other", {"exp_avg": torch.zeros(3)}, {})
            for number, path in enumerate((tmp_path / "first", tmp_path / "second")):
                with pytest.raises(WorkerError, match="its tensors are not those of this model"):
                    await group.load(tmp_path / "other", group.position)
                works = await round_of(one, number), await round_of(group, number)
                assert works[0].tokens == works[1].tokens > 0 and group.position == one.position == 80 * (number + 1)
                assert works[1].loss == pytest.approx(works[0].loss, rel=tolerance)
                assert works[1].norm == pytest.approx(works[0].norm, rel=1e-2 if has_statistics else tolerance)
                found = Apart(one, await vector(one), begun)
                other = await vector(group)
                assert found.of(other, lambda name: not is_statistic(name)) <= tolerance
                if has_statistics:
                    assert 0 < found.of(other, is_statistic, begun=0.0) < 0.5
                # Each continues with the parameters and the optimiser's state of the other.
                begun = found.whole
                await one.save(path)
                await group.save(path.with_suffix(".group"))
                assert path.stat().st_size == path.with_suffix(".group").stat().st_size
                await one.load(path.with_suffix(".group"), one.position)
                await group.load(path, group.position)
                # The next round does not compute with what an evaluation has gathered; nor does another evaluation.
                for each in (one, group):
                    await each.write(begun, anchor=0.9 * begun, tokens=1)
                assert torch.equal(await vector(group), begun)
                assert await group.evaluate() == pytest.approx(await one.evaluate(), rel=1e-6)
            for each in (one, group):
                await each.write(begun)
            assert await group.evaluate() == pytest.approx(await one.evaluate(), rel=1e-6)
            if not task.startswith("own"):
                assert await group.generate(b"1. Ann", 4) == await one.generate(b"1. Ann", 4)
            assert group.restarts == one.restarts == 0


async def test_ranks_have_the_same_buffers_at_the_end_of_a_round(
    compute: ThreadCompute, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also those that no vector holds; and the user is told whose batches they come from. Random numbers differ."""
    async with RemoteTrainer(grouped(own(writes=str(tmp_path)), "zero1 x3"), compute) as trainer:
        for number in range(2):
            await round_of(trainer, number)
        pids = [each.pid for each in ranks_of(trainer)]
    assert len({(tmp_path / f"{pid}-drawn").read_text() for pid in pids}) == 3
    each, *others = (torch.load(tmp_path / f"{pid}-{80 + rank}") for rank, pid in enumerate(pids))
    assert each["1.num_batches_tracked"] and each["latest"].abs().sum()
    changed = {"1.running_mean", "1.running_var", "1.num_batches_tracked", "latest"}
    assert each.keys() == changed | {"int16", "uint16", "float8_e4m3fn", "expanded"}
    assert all(torch.equal(each[name].double(), other[name].double()) for other in others for name in each)
    said = caplog.text
    assert " 1.running_mean, 1.running_var: each rank follows its own batches, and after each step all have " in said
    assert " 1.num_batches_tracked, latest: each rank has its own during a round, and then all have the fi" in said


def ranks_of(trainer: RemoteTrainer) -> list[psutil.Process]:
    """Rank 0 and the others, in their order."""
    worker = psutil.Process(trainer.pid)
    others = {" ".join(each.cmdline()[4:]).strip(): each for each in worker.children()}
    return [worker, *(others[f"rank {rank} of {len(others) + 1}"] for rank in range(1, len(others) + 1))]


async def gone(processes: list[psutil.Process]) -> None:
    await until(lambda: not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in processes), 5)


@pytest.mark.parametrize(
    "group, when, rank",
    [
        ("zero1 x3", "step", 1),
        ("zero1 x3", "save", 2),
        *long(
            *product(("zero1 x3",), ("step", "evaluate"), (0, 2)),
            *product(("zero1 x3",), ("save",), (0, 1)),
            *product(("zero3 x3",), ("step", "evaluate", "save", "publish"), (0, 1, 2)),
        ),
    ],
)
async def test_killed_rank_is_replaced_with_all(
    group: str, when: str, rank: int, compute: ThreadCompute, tmp_path: Path
) -> None:
    async with RemoteTrainer(grouped(gpt(), group), compute) as trainer:
        processes = ranks_of(trainer)
        before = await trainer.evaluate()
        training = Training(trainer, surplus=True)
        await training.until_tokens(5 * 512)
        heard = len(training.progress)
        asked: asyncio.Task[Any] | None = None
        if when != "step":
            processes[0].suspend()
            asks = {"evaluate": trainer.evaluate, "publish": lambda: vector(trainer)}
            asked = asyncio.create_task(asks[when]() if when in asks else trainer.save(tmp_path / "state"))
            await asyncio.sleep(0.1)
        processes[rank].kill()
        if when != "step" and rank:
            processes[0].resume()
        await gone(processes)
        await until(lambda: trainer.restarts == 1)
        assert rank == 0 or trainer.last_failure.endswith(f"rank {rank} of 3: its process was killed by signal 9")
        if when == "evaluate":
            assert asked and await asked == before
        elif when == "publish":
            assert asked and (await asked).isfinite().all()
        elif asked:
            await asyncio.wait([asked])
            assert isinstance(asked.exception(), WorkerError) or asked.result()
        await until(lambda: training.progress[heard:] and 0 < training.progress[-1].tokens <= 5 * 512)
        assert (await training.end()).tokens > 0 and trainer.restarts == 1
        others = ranks_of(trainer)
    await gone(others)


@contextmanager
def without_files(process: psutil.Process) -> Iterator[None]:
    """It can open no file inside the context."""
    usual = process.rlimit(psutil.RLIMIT_NOFILE)
    process.rlimit(psutil.RLIMIT_NOFILE, (3, usual[1]))
    try:
        yield
    finally:
        process.rlimit(psutil.RLIMIT_NOFILE, usual)


@pytest.mark.parametrize("group", ["zero1 x3", *long("zero2 x3", "zero3 x3")])
async def test_state_that_one_rank_cannot_write_costs_no_training(
    group: str, compute: ThreadCompute, tmp_path: Path
) -> None:
    async with RemoteTrainer(grouped(gpt(), group), compute) as trainer:
        await round_of(trainer, 0)
        assert await trainer.save(tmp_path / "state")
        local = await vector(trainer)
        with without_files(ranks_of(trainer)[2]):
            with pytest.raises(WorkerError, match=r"cannot be written: rank 2 of 3: Too many open files"):
                await trainer.save(tmp_path / "other")
            with pytest.raises(WorkerError, match=r"cannot be read: rank 2 of 3: Too many open files"):
                await trainer.load(tmp_path / "state", trainer.position)
        assert torch.equal(await vector(trainer), local) and await trainer.save(tmp_path / "other")
        assert (tmp_path / "other").read_bytes() == (tmp_path / "state").read_bytes()
        assert (await round_of(trainer, 1)).complete and trainer.restarts == 0


@pytest.mark.parametrize("able, restarts", long(("", 0), ("1", 1), ("01", 1)))
async def test_evaluation_that_fails_on_all_ranks_costs_no_training(
    able: str, restarts: int, compute: ThreadCompute
) -> None:
    """One that fails on some of them, while the others compute, ends the worker: these wait for it."""
    async with RemoteTrainer(grouped(own(plain=1, evaluates=able), "zero3 x3"), compute) as trainer:
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
    async with RemoteTrainer(replace(grouped(gpt(), "zero1 x3"), nice=5), compute) as trainer:
        training = Training(trainer, surplus=True)
        await training.until_tokens(512)
        processes = ranks_of(trainer)
        assert {each.nice() for each in processes} == {min(19, os.getpriority(os.PRIO_PROCESS, 0) + 5)}
        assert {oom_score(each) for each in processes} == {process.OOM_SCORE}
        found, ours = psutil.process_iter, {each.pid for each in processes}
        monkeypatch.setattr(psutil, "process_iter", lambda names: (each for each in found(names) if each.pid in ours))
        assert workers_here() == 1 and with_children(processes[0].pid) == [each.pid for each in processes]
        os.kill(processes[2].pid, signal.SIGSTOP)
        await until(lambda: trainer.restarts == 1, 20)
        assert trainer.last_failure.startswith("rank 2 of 3 was stopped (by SIGSTOP or a debugger) in an inner step")
        assert "File " not in caplog.text, "no stack of a rank that waited"
        await gone(processes)
        assert (await training.end()).tokens >= 0


async def test_rank_that_hangs_or_fails_is_named(compute: ThreadCompute, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(succession, "BACKOFF_SECONDS", (0.0,) * 5)
    spec = replace(grouped(own(hangs_at=9), "zero2 x2"), timeout_seconds=2.0)  # drawn by rank 1
    async with RemoteTrainer(spec, compute) as trainer:
        training = Training(trainer)
        await until(lambda: trainer.restarts == 1)
        assert trainer.last_failure.startswith("the worker hangs in an inner step: for 2 s it finished nothing")
        await training.end()
    given_up: list[str] = []
    async with RemoteTrainer(grouped(own(fails_at=1), "zero1 x2"), compute, given_up.append) as trainer:
        training = Training(trainer)
        await until(lambda: given_up)
        what = f"rank 1 of 2: task {OWN}: batch(): LookupError: no batch "
        assert given_up[0].startswith("the worker died 5 times in a row: the worker failed in train: " + what)
        assert ", in Shapes.batch (own_task.py:" in given_up[0]
        await training.end()


RUN = """
task = "gpt"
[gpt]
layers = 2
width = 32
heads = 2
context = 32
rows = 2
[recipe]
inner_steps = 20
rounds = 10000
batches = 2
"""


def test_peers_of_two_ranks_and_of_one_agree(tmp_path: Path) -> None:
    with RealSwarm(tmp_path, RUN) as swarm:
        a = swarm.found("a", "--ranks", "2", "--shard", "zero2")
        assert "2 ranks train together (zero2), on the CPU" in a.said()
        (b,) = swarm.join("b", via=a)
        report = wait("both are in one mean", lambda: swarm.all_in_one_mean([a, b]), START_SECONDS)
        assert len(report["peers"]) == 2
