"""A worker on a GPU against one on the CPU: `make gpu-test`, or on the CPU `make gpu-test DEVICE=cpu`.

On the CPU the worker's vectors lie apart from the shared ones, too (`tests.gpu.worker`).
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from node.runtime.compute import ThreadCompute
from node.tasks.gpt_presets import GptConfig
from node.tasks.hf.settings import HfMachine, HfSettings, HfValues
from node.tasks.recipe import Recipe
from node.tasks.spec import GptValues, OwnValues, WorkerSpec
from node.training.build import build
from node.training.remote import RemoteTrainer
from node.training.trainer import LocalTraining
from protocols.base import LocalProgress, RoundKey
from tests.support.other_worker import worker_program
from tests.support.paths import REPOSITORY
from tests.support.small_models import story, write_model

pytestmark = pytest.mark.gpu

DEVICE = os.environ.get("STARLING_TEST_DEVICE", "cpu")
OF_HF = ("transformers", "tokenizers", "safetensors")
OF_PEER = (
    "hivemind", "multiaddr", "uvloop", "msgpack", "cryptography", "blake3", "pydantic", "rich", "safetensors",
    "structlog", "typer",
)  # fmt: skip
STEPS, ROWS, ROW_TOKENS = 8, 4, 64
STEP_TOKENS = ROWS * ROW_TOKENS
SECONDS, SLOW_SECONDS = 100.0, 200.0
TEXT = bytes(n * n % 97 + 20 for n in range(20_000))


def lacking(names: tuple[str, ...]) -> str:
    return ", ".join(name for name in names if importlib.util.find_spec(name) is None)


needs_hf = pytest.mark.skipif(bool(lacking(OF_HF)), reason=f"without {lacking(OF_HF)}")
needs_peer = pytest.mark.skipif(bool(lacking(OF_PEER)), reason=f"without {lacking(OF_PEER)}")


def gpt(device: str, data: Path | None = None, **recipe: Any) -> WorkerSpec:
    values = GptValues(GptConfig(layers=2, width=64, heads=4, context=ROW_TOKENS), rows=ROWS)
    settings = {"learning_rate": 3e-3, "outer_learning_rate": 0.9, "outer_momentum": 0.5, "warmup_steps": 2}
    spec = WorkerSpec(values, Recipe(STEPS, 5, **settings | recipe), 3, 9, data, device=device, threads=1)
    return replace(spec, precision="float32")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "book.txt"
    path.write_bytes(TEXT)
    return path


@asynccontextmanager
async def trainer(spec: WorkerSpec) -> AsyncIterator[RemoteTrainer]:
    async with AsyncExitStack() as stack:
        if spec.device == "cpu" and spec.devices:
            stack.enter_context(worker_program("tests.gpu.ranks", "node.ranks.worker"))
        elif spec.device == "cpu":
            stack.enter_context(worker_program("tests.gpu.worker"))
        compute = await stack.enter_async_context(ThreadCompute())
        yield await stack.enter_async_context(RemoteTrainer(spec, compute))


def within(seconds: float, test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        async with asyncio.timeout(seconds):
            await test()

    asyncio.run(run())


def key(number: int) -> RoundKey:
    return RoundKey(bytes(32), "run", bytes(32), number)


async def trained(found: RemoteTrainer, number: int = 0) -> LocalProgress:
    """A round of exactly `STEPS` steps."""
    cut = asyncio.Event()
    return await found.train(key(number), cut, lambda work: cut.set() if work.complete else None, surplus=False)


async def vector(found: RemoteTrainer) -> torch.Tensor:
    into = torch.full(found.layout.sizes(), math.nan)
    await found.read(into)
    return into


async def until(what: Callable[[], object]) -> None:
    while not what():  # noqa: ASYNC110
        await asyncio.sleep(0.02)


def on_the_cpu(spec: WorkerSpec) -> LocalTraining:
    """What the same worker computes on the CPU, in this process."""
    return LocalTraining(build(replace(spec, device="cpu"), torch.empty, False).learner, STEPS)


OWN = Recipe(
    STEPS, 5, learning_rate=3e-3, outer_learning_rate=0.9, outer_momentum=0.5, warmup_steps=2, mean="token",
    decay="matrices",
)  # fmt: skip


# bfloat16 has 8 bits of mantissa, and AdamW's first steps are as long for small gradients as for large ones.
@pytest.mark.parametrize(
    "change, bound",
    [
        ({}, 2e-3),
        ({"checkpointing": True}, 2e-3),
        ({"precision": "bfloat16"}, 0.2),
        ({"precision": "float16"}, 0.2),
        ({"values": OwnValues("tests.gpu.own_task:make"), "recipe": OWN, "data": None}, 2e-3),
    ],
    ids=["float32", "checkpointing", "bfloat16", "float16", "own"],
)
def test_pseudo_gradient_is_that_of_the_cpu(text: Path, change: dict[str, Any], bound: float) -> None:
    spec = replace(gpt(DEVICE, text), **change)

    async def test() -> None:
        mine = on_the_cpu(replace(spec, precision="float32", checkpointing=False))
        async with trainer(spec) as found:
            assert torch.equal(await vector(found), mine.anchor), "the first parameters are the CPU's"
            for number in range(2):
                mine.begin(number)
                for _ in range(STEPS):
                    mine.step()
                work, expected = await trained(found, number), mine.work()
                assert (work.tokens, work.complete) == (expected.tokens, True)
                assert work.loss == pytest.approx(expected.loss, rel=1e-4 if spec.precision == "float32" else 0.02)
                local = await vector(found)
                moved, expected_move = mine.anchor - local, mine.anchor - mine.learner.vector
                difference = float((moved - expected_move).norm() / expected_move.norm())
                print(f"{change}: the movement differs by {difference:.1e}, the loss by {work.loss - expected.loss}")
                assert difference <= bound
                assert work.norm == pytest.approx(float(moved.norm()), rel=1e-5)
                assert torch.equal(found.anchor(), mine.anchor)
            assert found.restarts == 0

    within(SECONDS, test)


def test_vectors_that_are_written_come_back_bit_for_bit(text: Path) -> None:
    async def test() -> None:
        async with trainer(gpt(DEVICE, text)) as found:
            size = sum(found.layout.sizes())
            bits = torch.randint(-(1 << 31), 1 << 31, (size,), generator=torch.Generator().manual_seed(1))
            given = bits.to(torch.int32).view(torch.float32)  # all kinds of numbers, subnormal ones and -0.0 too
            given = torch.where(given.isfinite(), given, torch.tensor(-0.0))
            cut = asyncio.Event()
            cut.set()
            await found.write(given, anchor=-given, tokens=7)
            work = await found.train(key(0), cut, lambda work: None)
            assert (work.tokens, work.carried) == (7, 7), "no step, so the device's vector is what was written"
            assert torch.equal((await vector(found)).view(torch.int32), given.view(torch.int32))
            assert torch.equal(found.anchor(), -given)

    within(SECONDS, test)


def test_killed_worker_is_replaced_and_training_continues(text: Path) -> None:
    async def test() -> None:
        async with trainer(gpt(DEVICE, text)) as found:
            before = await found.evaluate()
            progress, cut, anchor = list[LocalProgress](), asyncio.Event(), found.anchor().clone()
            training = asyncio.create_task(found.train(key(0), cut, progress.append))
            await until(lambda: progress and progress[-1].tokens >= 3 * STEP_TOKENS)
            heard, killed = len(progress), found.pid
            os.kill(killed or 0, signal.SIGKILL)
            await until(lambda: found.pid is None)
            assert torch.equal(await vector(found), anchor)
            await until(lambda: progress[heard:] and progress[-1].tokens >= 3 * STEP_TOKENS)
            assert 0 in [each.tokens for each in progress[heard:]] and found.pid != killed
            cut.set()
            work = await training
            assert found.restarts == 1
            assert work.norm == pytest.approx(float((await vector(found) - anchor).norm()), rel=1e-5)
            assert await found.evaluate() == pytest.approx(before, rel=1e-5), "of the outer parameters"

    within(SECONDS, test)


def test_evaluation_and_text_are_those_of_the_cpu(text: Path) -> None:
    spec = gpt(DEVICE, text)

    async def test() -> None:
        mine = on_the_cpu(spec)
        async with trainer(spec) as found:
            first = await found.evaluate()
            assert first == pytest.approx(mine.evaluate(), rel=1e-4)
            await trained(found)
            assert await found.evaluate() == pytest.approx(first, rel=1e-5), "not of the local parameters"
            local = await vector(found)
            await found.write(local)
            mine.write(local)
            last = await found.evaluate()
            assert last == pytest.approx(mine.evaluate(), rel=1e-4) and last < first
            texts = [await found.generate(TEXT[:32], 24) for _ in range(2)]
            assert texts[0] == texts[1] and len(texts[0]) == 24
            drawn = await found.generate(TEXT[:32], 24, temperature=1.0, seed=4)
            assert len(drawn) == 24
            assert torch.equal(await vector(found), local), "neither changes the parameters"

    within(SECONDS, test)


@pytest.mark.parametrize("inner_optimizer", ["adamw", "muon"])
def test_inner_state_survives_a_file(text: Path, tmp_path: Path, inner_optimizer: str) -> None:
    spec = gpt(DEVICE, text, inner_optimizer=inner_optimizer)

    async def test() -> None:
        async with trainer(spec) as found:
            before = await trained(found)
            assert await found.save(tmp_path / "first")
            position = found.position
        async with trainer(spec) as found:
            await found.load(tmp_path / "first", position)
            assert found.position == position and await found.save(tmp_path / "second")
            assert (tmp_path / "first").read_bytes() == (tmp_path / "second").read_bytes()
            after = await trained(found, 1)
            assert math.isfinite(after.loss) and after.tokens == before.tokens

    within(SECONDS, test)


@needs_hf
def test_model_of_hugging_face_trains_compiled_and_checkpointed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    data = tmp_path / "story.txt"
    data.write_text(story(300))
    model = write_model(tmp_path / "llama", "llama")
    recipe = replace(gpt(DEVICE).recipe, inner_steps=4, mean="token", decay="matrices")

    async def loss(precision: str, checkpointing: bool = False, compile: bool = False) -> tuple[float, float]:
        values = HfValues(HfSettings(train="full", context=64, rows=2), HfMachine(str(model), compile=compile))
        spec = WorkerSpec(values, recipe, 3, data=data, device=DEVICE, threads=1, precision=precision)
        spec = replace(spec, checkpointing=checkpointing)
        async with trainer(spec) as found:
            work = await trained(found)
            assert found.restarts == 0, found.last_failure
            await found.write(await vector(found))
            return work.loss, await found.evaluate()

    async def test() -> None:
        plain = await loss("float32")
        assert await loss("float32", checkpointing=True) == pytest.approx(plain, rel=1e-4)
        assert await loss("float32", compile=True) == pytest.approx(plain, rel=1e-3)
        assert await loss("bfloat16", checkpointing=True) == pytest.approx(plain, rel=0.03)

    within(SLOW_SECONDS, test)


def said_by(seconds: float, *command: str | Path) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("NODE_")}
    done = subprocess.run(
        (sys.executable, "-m", *command), cwd=REPOSITORY, env=environment, capture_output=True, text=True,
        timeout=seconds,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux only")
def test_forked_worker_uses_the_device(text: Path) -> None:
    found = json.loads(said_by(SECONDS, "tests.gpu.forked", DEVICE, text).splitlines()[-1])
    assert math.isfinite(found["loss"]) and not found["initialised"], "what forks must not initialise CUDA"


@needs_peer
def test_doctor_names_the_device(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "node", "doctor", "--state-dir", str(tmp_path / "none"), "--json"]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "NODE_DEVICE": DEVICE.partition(":")[0]}
    said = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS)
    (line,) = [each for each in json.loads(said.stdout)["findings"] if each["check"] == "hardware"]
    name = torch.cuda.get_device_name() if DEVICE.startswith("cuda") else DEVICE
    assert line["level"] == "ok" and name in line["text"], said


@needs_peer
def test_two_peers_on_one_device_agree(text: Path, tmp_path: Path) -> None:
    run = tmp_path / "run.toml"
    run.write_text(
        'task = "gpt"\n[gpt]\npreset = "w64"\nlayers = 1\ncontext = 32\n[recipe]\ninner_steps = 10\nrounds = 3\n'
    )
    said = said_by(
        SLOW_SECONDS, "node", "swarm", "--peers", "2", "--run", run, "--device", DEVICE, "--no-page", "--json",
        "--dir", tmp_path / "swarm",
    )  # fmt: skip
    found = json.loads(said[said.index("{") :])
    assert found["agree"] and found["rounds"] == 3 and found["loss_last"] < found["loss_first"]
    assert all(each["tokens"] > 0 for each in found["peers"])


@pytest.mark.parametrize(
    "ranks, shard, offload, inner_optimizer",
    [
        (1, "zero1", "optimizer", "adamw"),
        *product((2,), ("zero1", "zero2", "zero3"), ("", "optimizer"), ("adamw",)),
        (2, "zero3", "optimizer", "muon"),
    ],
)
def test_ranks_on_one_device_compute_what_one_does(
    text: Path, ranks: int, shard: str, offload: str, inner_optimizer: str
) -> None:
    single = replace(gpt(DEVICE, text, inner_optimizer=inner_optimizer), device=DEVICE)
    spec = replace(single, devices=(DEVICE,) * ranks, shard=shard, offload=offload)

    async def test() -> None:
        async with trainer(spec) as found:
            begin, local = await vector(found), on_the_cpu(single)
            for anchor in (1.3 * begin, 0.9 * begin, begin):
                await found.write(begin, anchor=anchor)
                local.write(begin, anchor=anchor)
                assert await found.evaluate() == pytest.approx(local.evaluate(), rel=1e-4), "not of an earlier anchor"
            work = await trained(found)
            after = await vector(found)
            await found.write(after, anchor=begin)
            assert torch.equal(await vector(found), after), "the vectors come back as they were"
            local.begin(0)
            for _ in range(STEPS):
                local.step()
            moved = local.learner.vector - local.anchor
            assert work.tokens == STEPS * STEP_TOKENS
            bound = 2e-3 if inner_optimizer == "adamw" else 0.2  # Muon's iterations are in bfloat16
            assert float((after - begin - moved).norm()) <= bound * float(moved.norm())

    within(SLOW_SECONDS, test)
