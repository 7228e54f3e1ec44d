"""Training beside other programs: the speed of a worker alone and beside busy processes, and their speed beside it.

    python -m benchmarks.neighbour [--seconds 10] [--times 3] [--also THREADS,NICE,SPIN]

before    one thread per core, nice 0, and libgomp's default spin (GOMP_SPINCOUNT=300000)
now       Starling's defaults: a measured number of threads, the default nice, a bounded spin
--also    one more setting, e.g. 2,0,1000 or auto,19,default; repeatable

A busy process counts in a plain Python loop, in a session of its own, like a program in another terminal. Each setting
has its own worker behind a `RemoteTrainer`, which trains alone, beside one busy process and beside two. Settings take
turns, A B B A A B. After each change, the measurement waits some seconds (`--settle`) until the number of threads has
adapted. `first s` is the training speed in these seconds, beside the first busy process. The speed of a busy process is
a share of its speed without a worker, measured before each worker.

Other programs spoil the figures. `others` is the processor time that they took meanwhile, in cores; a table with more
than a few hundredths there is no evidence. It takes five and a half minutes. The figures mean most on two cores.
"""

from __future__ import annotations

import asyncio
import math
import mmap
import os
import struct
import sys
import tempfile
import time
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from statistics import median

import psutil
import uvloop

from node.config.peer_config import DEFAULT_NICE
from node.runtime.cgroup import SPIN, usable_cores
from node.runtime.compute import ThreadCompute
from node.tasks.gpt_presets import DEFAULT_PRESET, preset
from node.tasks.spec import GptValues, WorkerSpec
from node.training.remote import RemoteTrainer
from protocols.base import RoundKey
from tests.sim.arguments import Parser

LIBGOMP_SPIN = 300_000
MOST_BUSY = 2
NOISE = 0.1
"""Cores that other programs may take before the table counts as no evidence."""
_LONE_SECONDS = 2.0
_START_SECONDS = 120.0
_BUSY = """
import mmap, os, struct, sys
with open(sys.argv[1], "r+b") as file:
    count, done, parent = mmap.mmap(file.fileno(), 8), 0, os.getppid()
while os.getppid() == parent:
    for _ in range(20_000):
        pass
    done += 20_000
    count[:] = struct.pack("q", done)
"""


@dataclass(frozen=True, slots=True)
class Setting:
    """How a worker runs. Threads 0: measured. Spin 0: the value that a peer sets."""

    name: str
    threads: int
    nice: int
    spin: int

    @classmethod
    def parse(cls, text: str) -> Setting:
        threads, nice, spin = text.split(",")
        numbers = (0 if threads == "auto" else int(threads)), int(nice), (0 if spin == "default" else int(spin))
        return cls(text, *numbers)


@dataclass(frozen=True, slots=True)
class Window:
    """The measurements of one period.

    Attributes:
        tokens: per second.
        busy: turns per second of each busy process.
        others: cores that other programs took.
    """

    tokens: float
    busy: tuple[float, ...]
    others: float
    threads: int


@dataclass(frozen=True, slots=True)
class Turn:
    """One worker, from its start to its end.

    Attributes:
        lone: turns per second of a busy process without a worker.
        first: the seconds just after the first busy process started.
        windows: alone, beside one, beside two.
    """

    lone: float
    first: Window
    windows: tuple[Window, ...]

    def kept(self, beside: int) -> float:
        """The busy processes' mean share of their lone speed."""
        return sum(self.windows[beside].busy) / beside / self.lone


class Busy:
    """A process that always has work, in a session of its own."""

    def __init__(self, process: Process, count: mmap.mmap) -> None:
        self.process, self._count = process, count

    @property
    def turns(self) -> int:
        return int(struct.unpack("q", self._count[:])[0])

    @classmethod
    @asynccontextmanager
    async def run(cls) -> AsyncIterator[Busy]:
        with tempfile.NamedTemporaryFile() as file:
            file.write(bytes(8))
            file.flush()
            command = (sys.executable, "-I", "-S", "-c", _BUSY, file.name)
            process = await asyncio.create_subprocess_exec(*command, start_new_session=True)
            try:
                yield cls(process, mmap.mmap(file.fileno(), 8))
            finally:
                process.kill()
                await process.wait()


def _processor_seconds(pids: Sequence[int]) -> float:
    return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids)


def _all_processor_seconds() -> float:
    times = psutil.cpu_times()
    return float(sum(times[:8]) - times.idle - getattr(times, "iowait", 0.0))


async def watch(seconds: float, trainer: RemoteTrainer | None, busy: Sequence[Busy], tokens: int) -> Window:
    """Measure for that many seconds.

    Args:
        tokens: in a batch.
    """
    pids = [os.getpid(), *(each.process.pid for each in busy)]
    if trainer and trainer.pid:
        pids.append(trainer.pid)
    batches, turns = trainer.position if trainer else 0, [each.turns for each in busy]
    ours, everybodys, began = _processor_seconds(pids), _all_processor_seconds(), time.perf_counter()
    await asyncio.sleep(seconds)
    took = time.perf_counter() - began
    others = _all_processor_seconds() - everybodys - (_processor_seconds(pids) - ours)
    return Window(
        tokens=((trainer.position if trainer else 0) - batches) * tokens / took,
        busy=tuple((each.turns - before) / took for each, before in zip(busy, turns, strict=True)),
        others=max(0.0, others / took),
        threads=trainer.threads if trainer else 0,
    )


async def play(setting: Setting, preset_name: str, seconds: float, settle: float) -> Turn:
    """One worker's turn."""
    values = preset(preset_name)
    tokens = values.rows * values.shape.context
    recipe = replace(values.recipe, inner_optimizer="adamw")
    spec = WorkerSpec(
        GptValues(values.shape, values.rows), recipe, 1, device="cpu", threads=setting.threads,
        precision="float32", nice=setting.nice,
    )  # fmt: skip
    async with Busy.run() as busy:
        await asyncio.sleep(0.5)
        lone = (await watch(_LONE_SECONDS, None, [busy], 0)).busy[0]
    for name in SPIN:
        os.environ.pop(name, None)
    if setting.spin:
        os.environ["GOMP_SPINCOUNT"] = str(setting.spin)
    async with AsyncExitStack() as stack:
        compute = await stack.enter_async_context(ThreadCompute())
        trainer = await stack.enter_async_context(RemoteTrainer(spec, compute))
        cut, begun = asyncio.Event(), asyncio.Event()
        training = asyncio.create_task(trainer.train(_KEY, cut, lambda work: begun.set() if work.tokens else None))
        async with asyncio.timeout(_START_SECONDS):
            await begun.wait()
        busies: list[Busy] = []
        settling, windows = [], []
        for count in range(MOST_BUSY + 1):
            if count:
                busies.append(await stack.enter_async_context(Busy.run()))
            settling.append(await watch(settle, trainer, busies, tokens))
            windows.append(await watch(seconds, trainer, busies, tokens))
        cut.set()
        await training
    return Turn(lone, settling[1], tuple(windows))


_KEY = RoundKey(bytes(32), "model", bytes(32), 0, 0)


def _line(setting: Setting, turn: Turn) -> str:
    alone, one, two = turn.windows
    threads = "/".join(str(each.threads) for each in turn.windows)
    others = "/".join(f"{each.others:.2f}" for each in turn.windows)
    return (
        f"{setting.name:>16}  {alone.tokens:7,.0f}  {one.tokens:7,.0f}  {two.tokens:7,.0f}  "
        f"{turn.first.tokens:7,.0f}  {turn.kept(1):6.1%}  {turn.kept(2):6.1%}  {threads:>7}  {others}"
    )


def _share(part: float, whole: float) -> float:
    return part / whole if whole else math.nan


def _summary(settings: Sequence[Setting], turns: dict[Setting, list[Turn]]) -> None:
    """Print a table of medians, and the aims for the defaults."""
    print("\n| median of turns | alone | beside one | beside two | first seconds | one keeps | two keep |")
    print("|---|---|---|---|---|---|---|")
    middle: dict[Setting, list[float]] = {}
    for setting in settings:
        mine = turns[setting]
        middle[setting] = [median(turn.windows[beside].tokens for turn in mine) for beside in range(3)]
        speeds = " | ".join(f"{each:,.0f}" for each in (*middle[setting], median(t.first.tokens for t in mine)))
        kept = " | ".join(f"{median(turn.kept(beside) for turn in mine):.0%}" for beside in (1, 2))
        print(f"| {setting.name} | {speeds} | {kept} |")
    before, now = settings[:2]
    kept_one = median(turn.kept(1) for turn in turns[now])
    print(f"\nalone: {_share(middle[now][0], middle[before][0]):.0%} of before (aim 95 %)")
    share = _share(middle[now][1], middle[now][0])
    print(f"beside one: {share:.0%} of alone (aim 45 %); it keeps {kept_one:.0%} (aim 90 %)")
    if (worst := max(each.others for all_of in turns.values() for turn in all_of for each in turn.windows)) > NOISE:
        print(f"no evidence: other programs took up to {worst:.2f} cores meanwhile")


async def main(arguments: Sequence[str]) -> int:
    parser = Parser(prog="python -m benchmarks.neighbour", description="A worker beside busy processes.")
    parser.add_argument("--preset", default=DEFAULT_PRESET)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--settle", type=float, default=5.0)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--also", type=Setting.parse, action="append", default=[])
    options = parser.parse_args(arguments)
    if min(options.seconds, options.settle, options.times) <= 0:
        parser.error("--seconds, --settle and --times must be more than 0")
    cores = usable_cores()
    settings = [Setting("before", cores, 0, LIBGOMP_SPIN), Setting("now", 0, DEFAULT_NICE, 0), *options.also]
    turns: dict[Setting, list[Turn]] = {each: [] for each in settings}
    print(
        f"{options.preset}, {cores} cores, nice {DEFAULT_NICE}, spin {SPIN['GOMP_SPINCOUNT']}, load {os.getloadavg()}"
    )
    print("         setting    alone    one      two  first s    keeps   keep    threads  others")
    for time_number in range(options.times):
        for setting in settings if time_number % 2 == 0 else reversed(settings):
            turns[setting].append(await play(setting, options.preset, options.seconds, options.settle))
            print(_line(setting, turns[setting][-1]), flush=True)
    _summary(settings, turns)
    return 0


if __name__ == "__main__":
    sys.exit(uvloop.run(main(sys.argv[1:])))
