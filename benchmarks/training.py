"""The cost of the worker process: inner steps behind `RemoteTrainer`, compared with a bare PyTorch loop.

    python -m benchmarks.training [--preset w128] [--steps 50] [--pairs 6] [--threads 1]

bare      the same model, data and AdamW in a process of its own: separate parameters, `clip_grad_norm_`, no rounds
worker    rounds of the same number of steps: train until they are complete, read, write, as a peer does

The two take turns, A B A B …, while the other is idle, so that both see the machine under the same conditions. All
trained tokens count. Seconds are wall time: of the loop (bare), or from the call of `train` to the return of `write`
(worker). The ratio of wall speeds within a pair is judged. On a machine with other work, the ratio by processor seconds
(of worker and peer together) says more.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from asyncio.subprocess import PIPE
from dataclasses import dataclass, replace
from statistics import median

import psutil
import torch
import uvloop

from node.runtime.compute import ThreadCompute
from node.tasks.gpt import GptTask
from node.tasks.gpt_presets import DEFAULT_PRESET, preset
from node.tasks.spec import GptValues, WorkerSpec
from node.tasks.text import load
from node.training.remote import RemoteTrainer
from protocols.base import RoundKey, Vector
from tests.sim.arguments import Parser

LOWEST_RATIO = 0.97
_ANSWER_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Setup:
    preset: str
    steps: int
    threads: int


@dataclass(frozen=True, slots=True)
class Speed:
    """Tokens per second of wall time, and of processor time."""

    wall: float
    processor: float


def bare(setup: Setup) -> None:
    """Take `setup.steps` steps for each line of standard input, and print tokens, seconds and processor seconds."""
    torch.set_num_threads(setup.threads)
    values = preset(setup.preset)
    task, recipe = GptTask(values, load()), values.recipe
    parameters = list(task.module.parameters())
    adamw = torch.optim.AdamW(parameters, 1e-3, recipe.betas, weight_decay=recipe.weight_decay, fused=True)
    position = 0
    print("up", flush=True)
    for _ in sys.stdin:
        tokens, began, busy = 0, time.perf_counter(), time.process_time()
        for _ in range(setup.steps):
            adamw.zero_grad()
            inputs, targets = task.batch(1, position)
            position += 1
            loss = task.loss(inputs, targets)
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(parameters, recipe.clip_norm)
            for group in adamw.param_groups:
                group["lr"] = recipe.rate(position)
            adamw.step()
            loss.item()
            tokens += targets.numel()
        print(tokens, time.perf_counter() - began, time.process_time() - busy, flush=True)


class Bare:
    """The bare loop in a process of its own."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup

    async def __aenter__(self) -> Bare:
        options = [f"--{name}={getattr(self._setup, name)}" for name in ("preset", "steps", "threads")]
        command = [sys.executable, "-m", "benchmarks.training", "--bare", *options]
        self._process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE)
        await self._answer()
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        async with asyncio.timeout(10):
            await self._process.wait()

    async def speed(self) -> Speed:
        """Of the next steps."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")
        tokens, seconds, busy_seconds = map(float, (await self._answer()).split())
        return Speed(tokens / seconds, tokens / busy_seconds)

    async def _answer(self) -> bytes:
        assert self._process.stdout is not None
        async with asyncio.timeout(_ANSWER_SECONDS):
            return await self._process.stdout.readline()


def _busy_seconds(trainer: RemoteTrainer) -> float:
    times = psutil.Process(trainer.pid).cpu_times()
    return float(times.user + times.system + time.process_time())


async def speed(trainer: RemoteTrainer, number: int, local: Vector) -> Speed:
    """Measure the worker's next round."""
    cut = asyncio.Event()
    began, busy = time.perf_counter(), _busy_seconds(trainer)
    key = RoundKey(bytes(32), "run", bytes(32), number)
    work = await trainer.train(key, cut, lambda work: cut.set() if work.complete else None)
    await trainer.read(local)
    await trainer.write(local)
    return Speed(work.tokens / (time.perf_counter() - began), work.tokens / (_busy_seconds(trainer) - busy))


async def measure(setup: Setup, pairs: int) -> bool:
    """Print all pairs and their summary; returns whether the median ratio is high enough."""
    values = preset(setup.preset)
    recipe = replace(values.recipe, inner_steps=setup.steps, inner_optimizer="adamw")
    spec = WorkerSpec(
        GptValues(values.shape, values.rows), recipe, 1, device="cpu", threads=setup.threads, precision="float32"
    )
    print(f"{setup.preset}, rounds of {setup.steps} steps, {setup.threads} threads, load {os.getloadavg()[0]:.2f}")
    print(f"{'pair':>4} {'bare tok/s':>10} {'worker tok/s':>12} {'ratio':>7} {'processor':>9}")
    ratios, processor = [], []
    async with ThreadCompute() as compute, Bare(setup) as loop, RemoteTrainer(spec, compute) as trainer:
        local = torch.empty(trainer.layout.sizes()[0])
        await loop.speed()
        await speed(trainer, 0, local)
        for pair in range(1, pairs + 1):
            a, b = await loop.speed(), await speed(trainer, pair, local)
            ratios.append(b.wall / a.wall)
            processor.append(b.processor / a.processor)
            print(f"{pair:>4} {a.wall:>10.0f} {b.wall:>12.0f} {ratios[-1]:>7.1%} {processor[-1]:>9.1%}", flush=True)
    for words, each in (("ratio", ratios), ("ratio by processor seconds", processor)):
        print(f"{words}: median {median(each):.1%}, min {min(each):.1%}, max {max(each):.1%}")
    held = median(ratios) >= LOWEST_RATIO
    print(f"bound {LOWEST_RATIO:.0%}: {'held' if held else 'BROKEN'}; load {os.getloadavg()[0]:.2f}")
    return held


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(prog="python -m benchmarks.training", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--preset", default=DEFAULT_PRESET)
    parser.add_argument("--steps", type=int, default=50, help="of a round")
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--bare", action="store_true", help="be the bare loop")
    options = parser.parse_args(arguments)
    if min(options.steps, options.pairs, options.threads) < 1:
        parser.error("--steps, --pairs and --threads must be at least 1")
    setup = Setup(options.preset, options.steps, options.threads)
    try:
        preset(setup.preset)
    except ValueError as error:
        parser.error(str(error))
    if options.bare:
        bare(setup)
        return 0
    return 0 if uvloop.run(measure(setup, options.pairs)) else 1


if __name__ == "__main__":
    sys.exit(main())
