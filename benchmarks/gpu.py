"""Training on a GPU behind the worker, beside a bare PyTorch loop of the same model in the same run.

    python -m benchmarks.gpu [--device cuda] [--only NAME ...] [--json FILE] [--smoke]

Each case is a model of random weights. Two processes have it on the same device: the bare loop (`benchmarks.gpu_bare`)
and a worker behind `RemoteTrainer`, with the same batches, AdamW and precision. They take turns, A B A B ..., while the
other is idle. A turn is a round of 50 steps. Measured are:

tokens/s        bare: from the first step to the end of the last; worker: the same, and with what a round costs on this
                machine (parameters to the peer, and back to the device), without averaging
utilisation     model FLOPs a second over the peak of the device: 6 for each parameter but the embedding, and
                6 x layers x width x context for causal attention, a token
memory          peak on the device and in the process, of both
outer step      seconds and bytes/s to publish the parameters, to take parameters and anchor, of the norm of the
                pseudo-gradient, and of a switch to the outer parameters and back; the copies again from locked memory

Each case has a deadline, and all together end within ten minutes. A case that fails or does not fit says so, the
others are measured, and the exit code is 1; without the device it is 2. FILE holds what was measured up to then.
`--smoke` measures some cases with tiny models on the CPU, whose vectors are copied as on a GPU.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import random
import sys
import tempfile
import traceback
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Self

import torch

from node.runtime.compute import ThreadCompute
from node.tasks.gpt_presets import GptConfig
from node.tasks.hf.settings import HfMachine, HfSettings, HfValues
from node.tasks.recipe import Recipe
from node.tasks.spec import GptValues, WorkerSpec
from node.training.process import WorkerError
from node.training.remote import RemoteTrainer
from protocols.base import LocalProgress, RoundKey, Vector
from tests.sim.arguments import Parser
from tests.support.other_worker import worker_program
from tests.support.paths import REPOSITORY

ALL_SECONDS = 560.0
"""For everything: it has to end within ten minutes, also where the start takes long."""
LEAST_SECONDS = 15.0
"""A case that has less time left is not begun."""
LOWEST_RATIO, LOWEST_RATIO_WITH_ROUNDS = 0.98, 0.95
WARM_STEPS = 3
TERAFLOPS: Mapping[str, float] = {
    "B200": 2250.0, "H200": 989.0, "H100 PCIe": 756.0, "H100 NVL": 835.0, "H100": 989.0, "A100": 312.0, "A40": 149.7,
    "A10": 125.0, "L40S": 362.0, "L4": 121.0, "RTX 4090": 165.2, "RTX 3090": 71.0,
}  # fmt: skip
"""Name of a GPU, the longer before the shorter -> its peak in bfloat16 without sparsity, as its maker says. The peak of
another one, and of float32, is that of a measured product of matrices."""


@dataclass(frozen=True, slots=True)
class Case:
    """What is compared. `hf` is a Llama of transformers of the same shape, which alone can be compiled."""

    shape: GptConfig
    rows: int
    batches: int = 1  # of a step
    precision: str = "bfloat16"
    hf: bool = False
    checkpointing: bool = False
    compile: bool = False
    ranks: int = 1  # on the one device, over gloo: what several processes cost, and not what several devices bring
    steps: int = 50
    pairs: int = 3
    seconds: float = 80.0
    bytes_per_token: float = 60.0  # of activations, by layer and width, to tell what cannot fit

    @property
    def tokens(self) -> int:
        return self.rows * self.batches * self.shape.context

    @property
    def parameters(self) -> int:
        """About how many, without embeddings."""
        shape = self.shape
        return shape.layers * shape.width * (4 * shape.width + 3 * shape.hidden)

    @property
    def flops_per_token(self) -> float:
        return 6.0 * self.parameters + 6.0 * self.shape.layers * self.shape.width * self.shape.context

    @property
    def device_bytes(self) -> float:
        """About what both processes need: parameter, gradient, moments, anchor and its exchange, and activations."""
        activations = self.rows * self.shape.context * self.shape.layers * self.shape.width * self.bytes_per_token
        return (20 + 4 + 16) * self.parameters + 2 * activations + 2e9


SMALL = GptConfig(layers=12, width=1024, heads=16, context=1024)  # 152 million parameters
LARGE = GptConfig(layers=20, width=2048, heads=16, context=1024)  # 1,008 million
TINY = GptConfig(layers=2, width=64, heads=4, context=64)

CASES = {
    "gpt-150m": Case(SMALL, rows=16),
    "gpt-1b": Case(LARGE, rows=4, batches=4, pairs=2, seconds=180.0),
    "gpt-150m-float32": Case(SMALL, rows=8, precision="float32", pairs=1, seconds=70.0, bytes_per_token=90.0),
    "gpt-150m-checkpointing": Case(SMALL, rows=16, checkpointing=True, pairs=2, seconds=50.0),
    "gpt-150m-two-ranks": Case(SMALL, rows=16, ranks=2, pairs=1, seconds=60.0),
    "hf-150m": Case(SMALL, rows=16, hf=True, pairs=2, seconds=60.0),
    "hf-150m-compile": Case(SMALL, rows=16, hf=True, compile=True, pairs=2, seconds=150.0),
}
SMOKE = {
    name: replace(CASES[name], shape=TINY, rows=2, steps=3, pairs=1, batches=min(2, CASES[name].batches))
    for name in ("gpt-1b", "gpt-150m-checkpointing", "gpt-150m-two-ranks", "hf-150m")
}


class Failed(Exception):
    """A case cannot be measured. The message is one line."""


# -- the two processes -------------------------------------------------------------------------------------------------


class Bare:
    """The bare loop in a process of its own."""

    def __init__(self, first: str) -> None:
        self._first = first

    async def __aenter__(self) -> Self:
        command = (sys.executable, "-m", "benchmarks.gpu_bare")
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self._process = await asyncio.create_subprocess_exec(
            *command, stdin=PIPE, stdout=PIPE, stderr=self._said, cwd=REPOSITORY
        )
        self._stdin.write(f"{self._first}\n".encode())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()  # it has been killed
        self._said.close()

    @property
    def _stdin(self) -> asyncio.StreamWriter:
        assert self._process.stdin is not None
        return self._process.stdin

    async def run(self, steps: int) -> dict[str, Any]:
        self._stdin.write(f"{steps}\n".encode())
        return await self.answer()

    async def answer(self) -> dict[str, Any]:
        """The next one. The caller's deadline holds."""
        process: Process = self._process
        assert process.stdout is not None
        while line := await process.stdout.readline():
            if line.startswith(b"{"):
                found: dict[str, Any] = json.loads(line)
                return found
        self._said.seek(0)
        lines = self._said.read().decode(errors="replace").strip().splitlines()
        raise Failed(f"the bare loop ended: {lines[-1][:300] if lines else 'it said nothing'}")


class Rounds:
    """The worker's rounds, as a peer has them: train, read the parameters, write them back."""

    def __init__(self, trainer: RemoteTrainer) -> None:
        self._trainer, self._number = trainer, 0
        self._local: Vector = torch.empty(sum(trainer.layout.sizes()))

    async def run(self, steps: int) -> tuple[LocalProgress, float]:
        """A round, which is cut after some steps unless it is complete before; and its seconds."""
        cut, began = asyncio.Event(), asyncio.get_running_loop().time()
        least = steps

        def look(work: LocalProgress) -> None:
            nonlocal least
            least -= 1  # the first steps are reported one by one, after a report before them
            if work.complete or least < 0:
                cut.set()

        key = RoundKey(bytes(32), "run", bytes(32), self._number)
        work = await self._trainer.train(key, cut, look, surplus=False)
        await self._trainer.read(self._local)
        await self._trainer.write(self._local)
        self._number += 1
        return work, asyncio.get_running_loop().time() - began

    async def ask(self, command: str, **fields: Any) -> dict[str, Any]:
        found: dict[str, Any] = await self._trainer._order({"do": command, **fields})
        return found


# -- one case ----------------------------------------------------------------------------------------------------------


def spec_of(case: Case, device: str, home: Path) -> WorkerSpec:
    recipe = Recipe(
        case.steps, 1000, learning_rate=3e-4, outer_learning_rate=0.9, outer_momentum=0.5, batches=case.batches,
        mean="token" if case.hf else "batch",
    )  # fmt: skip
    values: GptValues | HfValues = GptValues(case.shape, case.rows)
    if case.hf:
        settings = HfSettings(train="full", context=case.shape.context, rows=case.rows)
        values = HfValues(settings, HfMachine(write_llama(case.shape, home), compile=case.compile))
    return WorkerSpec(
        values, recipe, 1, data=home / "words.txt", device=device, precision=case.precision,
        checkpointing=case.checkpointing, devices=(device,) * case.ranks if case.ranks > 1 else (),
    )  # fmt: skip


def write_llama(shape: GptConfig, home: Path) -> str:
    lacking = [name for name in ("transformers", "tokenizers", "safetensors") if importlib.util.find_spec(name) is None]
    if lacking:
        raise Failed(f"not measured: there is no {', '.join(lacking)}")
    import transformers

    from tests.support.small_models import WORDS, write_tokenizer

    folder = home / f"llama-{shape.width}"
    if not folder.exists():
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=WORDS, hidden_size=shape.width, intermediate_size=shape.hidden,
            num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.heads,
            max_position_embeddings=shape.context, bos_token_id=None, eos_token_id=0, pad_token_id=None,
        )  # fmt: skip
        transformers.LlamaForCausalLM(config).save_pretrained(folder)
        write_tokenizer(folder)
    return str(folder)


def write_words(path: Path) -> None:
    draw = random.Random(0)
    words = [bytes(draw.choices(b"abcdefghij", k=5)).decode() for _ in range(500)]
    path.write_text("\n".join(" ".join(draw.choices(words, k=12)) for _ in range(20_000)))


async def compare(case: Case, device: str, home: Path, until: float) -> dict[str, Any]:
    """Measure a case; as many pairs of turns as `until` leaves time for, at least one."""
    spec, loop = spec_of(case, device, home), asyncio.get_running_loop()
    began = loop.time()
    bare_turns, turns = list[dict[str, Any]](), list[tuple[LocalProgress, float]]()
    async with AsyncExitStack() as stack:
        if case.ranks > 1:
            stack.enter_context(worker_program("benchmarks.gpu_ranks", "node.ranks.worker"))
        else:
            stack.enter_context(worker_program("benchmarks.gpu_worker"))
        bare = await stack.enter_async_context(Bare(spec.to_json()))
        compute = await stack.enter_async_context(ThreadCompute())
        trainer = await stack.enter_async_context(RemoteTrainer(spec, compute))
        await bare.answer()
        rounds = Rounds(trainer)
        for each in await asyncio.gather(bare.run(WARM_STEPS), rounds.run(WARM_STEPS), return_exceptions=True):
            if isinstance(each, BaseException):  # only now, when neither is under way any more
                raise each
        start_seconds, pair_seconds = loop.time() - began, 0.0
        while len(turns) < case.pairs and (not turns or loop.time() + 2.5 * pair_seconds < until):
            began = loop.time()
            bare_turns.append(await bare.run(case.steps))
            turns.append(await rounds.run(case.steps))
            pair_seconds = loop.time() - began
        memory = await rounds.ask("memory")
        if trainer.restarts:
            raise Failed(f"the worker was replaced: {trainer.last_failure}")
        try:
            outer_step = await rounds.ask("outer_step", repeats=3)
        except WorkerError as error:  # what was measured before stays
            outer_step = {"failed": str(error)}
        elements = sum(trainer.layout.sizes())
    return {
        "elements": elements,
        "start_seconds": start_seconds,
        **speeds(bare_turns, turns),
        "memory": {"bare": {name: bare_turns[-1][name] for name in memory}, "worker": memory},
        "outer_step": outer_step,
    }


def speeds(bare: list[dict[str, Any]], turns: list[tuple[LocalProgress, float]]) -> dict[str, Any]:
    found = {
        "bare": [each["tokens"] / each["seconds"] for each in bare],
        "worker": [work.tokens / work.seconds for work, _ in turns],
        "with_rounds": [work.tokens / seconds for work, seconds in turns],
    }
    ratios = {
        name: median(mine / theirs for mine, theirs in zip(found[name], found["bare"], strict=True))
        for name in ("worker", "with_rounds")
    }
    return {
        "tokens_per_second": found,
        "ratio": ratios,
        "loss": {"bare": bare[-1]["loss"], "worker": turns[-1][0].loss},
    }


def peak_flops(about: Mapping[str, Any], precision: str) -> tuple[float, str]:
    """Of a device as `benchmarks.gpu_bare` describes it, and where the number is from."""
    if precision == "bfloat16":
        for name, peak in TERAFLOPS.items():
            if name in about["name"]:
                return peak * 1e12, "its maker's"
    return float(about[f"measured_{precision}_flops"]), "a measured product of matrices"


def utilisation(case: Case, found: Mapping[str, Any], about: Mapping[str, Any]) -> dict[str, Any]:
    peak, source = peak_flops(about, case.precision)
    rates = found["tokens_per_second"]
    of_peak = {name: median(each) * case.flops_per_token / peak for name, each in rates.items()}
    return {"peak_flops": peak, "peak_is": source, "flops_per_token": case.flops_per_token, **of_peak}


# -- all of them -------------------------------------------------------------------------------------------------------


class Benchmark:
    """Runs the cases one after the other; `found` is what goes into the file."""

    def __init__(self, cases: Mapping[str, Case], device: str, file: Path | None) -> None:
        self._cases, self._device, self._file = cases, device, file
        self.found: dict[str, Any] = {"device": None, "cases": {}}

    async def run(self) -> bool:
        """Returns whether all was measured."""
        end = asyncio.get_running_loop().time() + ALL_SECONDS
        with tempfile.TemporaryDirectory(prefix="starling-gpu-") as name:
            home = Path(name)
            os.environ["XDG_CACHE_HOME"] = str(home / "cache")
            write_words(home / "words.txt")
            self.found["device"] = about = await self._guarded(self._describe(), 90.0, end)
            print(f"{about.get('name', about)}, torch {torch.__version__}", flush=True)
            for each in self._cases:
                found = self.found["cases"][each] = await self._measure(each, home, end)
                self._keep()
                print(line_of(each, found), flush=True)
        cases = self.found["cases"].values()
        return not any("failed" in each for each in (about, *cases, *(each.get("outer_step", {}) for each in cases)))

    async def _describe(self) -> dict[str, Any]:
        async with Bare(f"device {self._device}") as bare:
            return await bare.answer()

    async def _measure(self, name: str, home: Path, end: float) -> dict[str, Any]:
        case, about = self._cases[name], self.found["device"]
        settings = {
            "precision": case.precision, "checkpointing": case.checkpointing, "compile": case.compile, "hf": case.hf,
            "ranks": case.ranks,
            "tokens_per_step": case.tokens, "steps_per_round": case.steps, "parameters": case.parameters,
        }  # fmt: skip
        memory = about.get("memory_bytes")
        if memory and case.device_bytes > memory:
            what = f"about {case.device_bytes / 1e9:.0f} GB for both, and the device has {memory / 1e9:.0f}"
            return settings | {"failed": f"does not fit: {what}"}
        until = min(end, asyncio.get_running_loop().time() + case.seconds)
        found = await self._guarded(compare(case, self._device, home, until), case.seconds, end)
        if "failed" not in found and "failed" not in about:
            found["utilisation"] = utilisation(case, found, about)
        return settings | found

    async def _guarded(self, measured: Any, seconds: float, end: float) -> dict[str, Any]:
        """The result of a coroutine, or in one line why there is none."""
        left = end - asyncio.get_running_loop().time()
        if left < LEAST_SECONDS:
            measured.close()
            return {"failed": "not begun: the ten minutes are over"}
        seconds = min(seconds, left)
        try:
            async with asyncio.timeout(seconds):
                found: dict[str, Any] = await measured
                return found
        except TimeoutError:
            return {"failed": f"not done within {seconds:.0f} s"}
        except (Failed, WorkerError) as error:
            return {"failed": str(error)}
        except Exception as error:  # noqa: BLE001 - whatever it is, the other cases are measured
            traceback.print_exc()
            return {"failed": f"{type(error).__name__}: {str(error)[:500]}"}

    def _keep(self) -> None:
        if self._file:
            self._file.write_text(json.dumps(self.found, indent=1) + "\n")


COLUMNS = (
    "case", "bare, tokens/s", "worker", "with rounds", "utilisation: bare, worker", "device GB: bare, worker",
    "publish, take, norm, outer: s",
)  # fmt: skip


def line_of(name: str, found: Mapping[str, Any]) -> str:
    """A row of the table of RESULTS.md."""
    if "failed" in found:
        return f"| {name} | {found['failed']} |"
    rates, ratio = found["tokens_per_second"], found["ratio"]
    used = found.get("utilisation", {})
    shares = ", ".join(f"{used[each]:.1%}" for each in ("bare", "worker")) if used else "–"
    peaks = [found["memory"][each]["device_peak_bytes"] for each in ("bare", "worker")]
    memory = ", ".join(f"{each / 1e9:.1f}" for each in peaks if each is not None) or "–"
    acts = found["outer_step"]
    seconds = [f"{acts[each]['seconds']:.3f}" for each in ("publish", "take", "norm", "outer") if each in acts]
    cells = (
        name,
        f"{median(rates['bare']):,.0f}",
        f"{ratio['worker']:.1%}",
        f"{ratio['with_rounds']:.1%}",
        shares,
        memory,
        acts.get("failed") or ", ".join(seconds),
    )
    return f"| {' | '.join(cells)} |"


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(prog="python -m benchmarks.gpu", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", nargs="+", choices=[*CASES], default=[], metavar="NAME", help=", ".join(CASES))
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--smoke", action="store_true", help="tiny models on the CPU, to see that all of it works")
    options = parser.parse_args(arguments)
    device, cases = ("cpu", SMOKE) if options.smoke else (options.device, CASES)
    if device == "cuda" and not torch.cuda.is_available():
        parser.error(f"torch {torch.__version__} finds no NVIDIA GPU here: --smoke runs tiny models on the CPU")
    cases = {name: case for name, case in cases.items() if not options.only or name in options.only}
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    benchmark = Benchmark(cases, device, options.json)
    done = asyncio.run(benchmark.run())
    print(f"aims: worker {LOWEST_RATIO:.0%}, with rounds {LOWEST_RATIO_WITH_ROUNDS:.0%} of the bare loop")
    return 0 if done else 1


if __name__ == "__main__":
    sys.exit(main())
