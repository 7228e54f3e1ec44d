"""Groups of ranks for tests: their specifications, a round of training, and how far two vectors are apart."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import psutil
import torch

from node.tasks.gpt_presets import GptConfig
from node.tasks.hf.settings import HfMachine, HfSettings, HfValues
from node.tasks.recipe import Recipe
from node.tasks.spec import SHARDS, GptValues, OwnValues, WorkerSpec
from node.training.remote import RemoteTrainer
from protocols.base import LocalProgress, RoundKey
from tests.support.paths import REPOSITORY
from tests.support.real_swarm import RealPeer
from tests.support.waiting import until

STEPS = 20
RECIPE = Recipe(STEPS, 5, 1e-2, 0.9, 0.5, warmup_steps=4, batches=4)
TOLERANCE, MUON_TOLERANCE = 1e-4, 1e-2
"""Of the parameters after 20 steps, relative to how far one process has moved them. Muon computes in bfloat16."""
DATA = REPOSITORY / "benchmarks" / "RESULTS.md"  # the default, all of Python's source, takes each rank half a second
OWN = "tests.node.ranks.own_task:Shapes"
RUN = """
task = "gpt"
[gpt]
layers = 2
width = 32
heads = 2
context = 32
rows = 2
[recipe]
inner_steps = 8
rounds = 10000
batches = 2
"""
LOADED = "node.ranks.dtensors", "node.tasks.hf.task"
"""What long tests have loaded before their workers are forked: each rank would need seconds."""


def with_small_data(peer: RealPeer) -> None:
    peer.environment["NODE_DATA"] = str(DATA)


def gpt(**recipe: Any) -> WorkerSpec:
    values = GptValues(GptConfig(layers=2, width=32, heads=2, context=32), rows=4)
    return WorkerSpec(values, replace(RECIPE, **recipe), 3, 9, DATA, threads=1, device="cpu")


def own(**options: int | str | bool) -> WorkerSpec:
    recipe = replace(RECIPE, mean="token", decay="matrices")
    return WorkerSpec(OwnValues(OWN, options), recipe, 3, 9, threads=1, device="cpu")


def grouped(spec: WorkerSpec, division: str) -> WorkerSpec:
    """The same on several ranks, as in zero1 x3 shared, or tensor x4 apart, of which two share each layer.

    The last word is where the parameters are or, if it is optimizer or parameters, what is kept on the host.
    """
    shard, ranks, place = division.split()
    parallel = shard not in SHARDS
    return replace(
        spec,
        devices=("cpu",) * int(ranks.removeprefix("x")),
        shard="zero3" if parallel else shard,
        tensor_parallel=2 if parallel else 1,
        offload=place if place in ("optimizer", "parameters") else "",
    )


def spec_of(task: str, models: Callable[[str], Path], home: Path | None = None) -> WorkerSpec:
    """gpt-muon, qwen3 lora, own and the like; one's own writes into `home` what it holds."""
    if task.startswith("own"):
        return own(writes=str(home or ""), plain=int(task == "own plain"))
    kind, _, train = task.partition(" ")
    if not train:
        return gpt(inner_optimizer=kind.removeprefix("gpt-"))
    settings = HfSettings(context=48, rows=4, train=cast("Any", train), lora_rank=4)
    recipe = replace(RECIPE, mean="token", decay="matrices", learning_rate=3e-3)
    folder = models(kind)
    values = HfValues(settings, HfMachine(str(folder)))
    return WorkerSpec(values, recipe, 3, 9, folder.parent / "story.txt", threads=1, device="cpu")


class Training:
    """A round under way."""

    def __init__(self, trainer: RemoteTrainer, number: int = 0, surplus: bool = False, fragment: int = 0) -> None:
        self.cut, self.progress = asyncio.Event(), list[LocalProgress]()
        key = RoundKey(bytes(32), "run", bytes(32), number, fragment)
        self.task = asyncio.create_task(trainer.train(key, self.cut, self.progress.append, surplus))

    async def until_tokens(self, tokens: int) -> None:
        await until(lambda: self.task.done() or (self.progress and self.progress[-1].tokens >= tokens))

    async def end(self) -> LocalProgress:
        self.cut.set()
        async with asyncio.timeout(90):
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


def ranks_of(trainer: RemoteTrainer) -> list[psutil.Process]:
    """Rank 0 and the others, in their order."""
    worker = psutil.Process(trainer.pid)
    others = {" ".join(each.cmdline()[4:]).strip(): each for each in worker.children()}
    return [worker, *(others[f"rank {rank} of {len(others) + 1}"] for rank in range(1, len(others) + 1))]


@contextmanager
def without_files(process: psutil.Process) -> Iterator[None]:
    """It can open no file inside the context."""
    usual = process.rlimit(psutil.RLIMIT_NOFILE)
    process.rlimit(psutil.RLIMIT_NOFILE, (3, usual[1]))
    try:
        yield
    finally:
        process.rlimit(psutil.RLIMIT_NOFILE, usual)
