"""Memory of the ranks of one worker, beside what `node.ranks.memory` computes.

    python -m benchmarks.ranks_memory [NAME ...] [--json FILE]      # NAME: cpu-zero1-2, device-zero3-4-offload, ...

A model of 24 million parameters is trained on one device and on several. "cpu" are ranks on the CPU. "device" are the
same with vectors of their own, as on a GPU: the memory of the process is that of the GPU and, with offload, what the
rank has on the host. "hf" is a Llama of Hugging Face that computes in bfloat16.

Rows are as short as they may be: the heap keeps the room of activations, which in rows of 16 bytes was .3 bytes for
each parameter.

Each process's own memory (private and anonymous) is read after a step, after a command that puts the outer parameters
in place, and all the time for the peaks. What a model of two layers takes is taken away, so that libraries and scratch
memory do not count. What all share is counted once. The C library's heap is switched off for blocks above 128 kB
(`MALLOC_MMAP_THRESHOLD_`): it keeps holes, which are not tensors.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import psutil

from node.ranks.memory import rank_bytes
from node.runtime.compute import ThreadCompute
from node.tasks.gpt_presets import GptConfig
from node.tasks.hf.settings import HfMachine, HfSettings, HfValues
from node.tasks.recipe import Recipe
from node.tasks.spec import GptValues, Values, WorkerSpec
from node.training import process
from node.training.remote import RemoteTrainer
from protocols.base import LocalProgress, RoundKey
from tests.support.small_models import WORDS, write_tokenizer

RECIPE = Recipe(3, 1, 1e-3, 0.9, 0.5, warmup_steps=1, batches=4)
SHAPE = GptConfig(layers=8, width=512, heads=8, context=2)
READ_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Case:
    place: str  # cpu or device
    shard: str  # one, zero1, zero2, zero3, tp
    ranks: int
    more: str = ""  # offload, parameters (offload of them, too) or hf

    @property
    def name(self) -> str:
        return f"{self.place}-{self.shard}-{self.ranks}{self.more and '-'}{self.more}"

    @property
    def offload(self) -> str:
        return {"offload": "optimizer", "parameters": "parameters"}.get(self.more, "")

    def expected(self) -> float:
        """Bytes for each parameter of one rank, as they are computed."""
        shard = "tensor" if self.shard == "tp" else self.shard
        is_shared, in_bfloat16 = self.place == "cpu", self.more == "hf"
        found = rank_bytes(shard, self.ranks, is_shared=is_shared, bfloat16=in_bfloat16, offload=self.offload)
        is_same = self.shard == "zero3" and self.offload == "optimizer"  # the gradient is not copied to the same memory
        return found.device + found.host - 4 / self.ranks * is_same

    def spec(self, shape: GptConfig, folder: Path) -> WorkerSpec:
        has_group = self.ranks > 1 or self.offload
        spec = WorkerSpec(
            self._values(shape, folder),
            RECIPE,
            3,
            data=folder / "text",
            threads=1,
            device="cpu",
            devices=("cpu",) * self.ranks if has_group else (),
            offload=self.offload,
            precision="bfloat16" if self.more == "hf" else "float32",
        )
        if self.shard == "tp":
            return replace(spec, shard="zero3", tensor_parallel=self.ranks)
        return replace(spec, shard="zero1" if self.shard == "one" else self.shard)

    def _values(self, shape: GptConfig, folder: Path) -> Values:
        if self.more != "hf":
            return GptValues(shape, rows=1)
        return HfValues(HfSettings(train="full", context=8, rows=1), HfMachine(str(write_llama(folder, shape))))


def write_llama(folder: Path, shape: GptConfig) -> Path:
    import transformers

    path = folder / f"llama-{shape.layers}"
    config = transformers.LlamaConfig(
        vocab_size=WORDS,
        hidden_size=shape.width,
        intermediate_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        max_position_embeddings=128,
        eos_token_id=0,
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)
    write_tokenizer(path)
    return path


CASES = [
    Case(place, shard, ranks)
    for place in ("cpu", "device")
    for shard, counts in (("one", (1,)), ("zero1", (2, 4)), ("zero2", (2, 4)), ("zero3", (2, 4)), ("tp", (2,)))
    for ranks in counts
]
CASES += [Case(place, shard, 4, "hf") for place in ("cpu", "device") for shard in ("zero1", "zero2", "zero3")]
CASES += [Case("device", shard, 4, "offload") for shard in ("zero1", "zero2")]
CASES += [
    Case("device", "one", 1, "offload"),
    *(Case("device", "zero3", 2, more) for more in ("offload", "parameters")),
]


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes, of rank 0 and of the largest of the others, or of all together."""

    first: int = 0
    others: int = 0
    total: int = 0

    def above(self, base: Memory, per: int) -> list[float]:
        return [round((getattr(self, name) - getattr(base, name)) / per, 2) for name in self.__slots__]


def read(pids: list[int]) -> Memory:
    own = [_own(pid) for pid in pids]
    return Memory(own[0], max(own[1:], default=0), sum(own))


def _own(pid: int) -> int:
    """Bytes that only this process has, or its share of what a fork shares; not what is mapped from files."""
    lines = dict(line.split(":") for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
    return int(lines["Pss_Anon"].split()[0]) * 1024


def shared(pid: int) -> int:
    """Bytes of the shared vectors that are in memory, counted once."""
    return sum(each.rss for each in psutil.Process(pid).memory_maps() if "memfd:starling" in each.path)


class Watch:
    """Reads the peak of the memory of this process's workers, all together and the largest, if it `looks`."""

    def __init__(self, looks: bool) -> None:
        self.peak, self._is_over = Memory(), threading.Event()
        self._threads = [threading.Thread(target=self._run)] * looks

    def __enter__(self) -> Watch:
        for each in self._threads:
            each.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for each in self._threads:
            each.join()

    def _run(self) -> None:
        while not self._is_over.is_set():
            try:
                now = read(worker_pids())
                self.peak = Memory(*(max(pair) for pair in zip(_values(self.peak), _values(now), strict=True)))
            except (OSError, KeyError, IndexError, psutil.Error):
                pass
            time.sleep(READ_SECONDS)


def _values(memory: Memory) -> tuple[int, int, int]:
    return memory.first, memory.others, memory.total


def worker_pids() -> list[int]:
    """The worker, which is rank 0, and then its other ranks."""
    for each in psutil.Process().children(recursive=True):
        line = each.cmdline()
        if any(part.endswith("worker") or part.endswith("ranks") for part in line) and "-m" in line:
            return [each.pid, *(child.pid for child in each.children())]
    return []


@dataclass(frozen=True, slots=True)
class Found:
    elements: int
    after_step: Memory
    peak_building: Memory
    peak_training: Memory
    peak_evaluating: Memory
    shared: int


async def measure(spec: WorkerSpec, peaks: bool) -> Found:
    async with ThreadCompute() as compute:
        with Watch(peaks) as building:
            trainer = RemoteTrainer(spec, compute)
            await trainer.__aenter__()
        try:
            with Watch(peaks) as training:
                cut, done = asyncio.Event(), asyncio.Event()
                key = RoundKey(bytes(32), "run", bytes(32), 0)

                def look(progress: LocalProgress) -> None:
                    if progress.complete:
                        done.set()

                task = asyncio.create_task(trainer.train(key, cut, look, surplus=False))
                await done.wait()
                cut.set()
                await task
            after = read(worker_pids())
            with Watch(peaks) as evaluating:
                if peaks:
                    await trainer.evaluate()
            elements = sum(trainer.layout.sizes())
            return Found(elements, after, building.peak, training.peak, evaluating.peak, shared(worker_pids()[0]))
        finally:
            await trainer.__aexit__(None, None, None)


@contextmanager
def vectors(place: str) -> Iterator[None]:
    """`device`: workers whose vectors lie apart from the shared ones, as on a GPU."""
    usual = process._program
    if place == "device":
        process._program = lambda spec: "tests.gpu.ranks" if spec.devices else "tests.gpu.worker"
    try:
        yield
    finally:
        process._program = usual


@dataclass(frozen=True, slots=True)
class Result:
    """Bytes for each parameter: of rank 0, of the largest of the others, of all together."""

    case: str
    computed: float  # of each rank
    after_step: list[float]
    peak_building: list[float]
    peak_training: list[float]
    peak_evaluating: list[float]
    shared: float  # by all, and with the peer


def run(case: Case, layers: tuple[int, int] = (2, 8), peaks: bool = True) -> Result:
    """With models of so many layers. Without `peaks`, these are not measured: they take as long as the rest."""
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(1 << 17)
    with tempfile.TemporaryDirectory() as folder, vectors(case.place):
        # For gpt so little that an evaluation is a few batches.
        Path(folder, "text").write_bytes(bytes(range(32, 127)) * (2000 if case.more == "hf" else 40))
        base, found = (
            asyncio.run(measure(case.spec(replace(SHAPE, layers=each), Path(folder)), peaks)) for each in layers
        )
    per = found.elements - base.elements
    return Result(
        case.name,
        case.expected(),
        found.after_step.above(base.after_step, per),
        found.peak_building.above(base.peak_building, per),
        found.peak_training.above(base.peak_training, per),
        found.peak_evaluating.above(base.peak_evaluating, per),
        round(found.shared / found.elements, 2),
    )


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Memory of ranks.")
    parser.add_argument("names", nargs="*")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    found = []
    for case in CASES:
        if not given.names or case.name in given.names:
            found.append(run(case))
            print(found[-1], flush=True)
    if given.json:
        given.json.write_text(json.dumps([asdict(each) for each in found], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
