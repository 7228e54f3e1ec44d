"""Builds what a worker trains, from its specification: the task with its data, and the learner."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch

from node.runtime.notes import note, warn
from node.tasks import user_task as own
from node.tasks.base import TaskContext
from node.tasks.checkpointing import checkpoint_blocks, repeated_blocks
from node.tasks.given_data import GivenData
from node.tasks.gpt import GptTask
from node.tasks.gpt_presets import Preset
from node.tasks.hf.settings import HfValues, ModelPins
from node.tasks.paced import Paced
from node.tasks.spec import GptValues, OwnValues, PacedValues, WorkerSpec
from node.tasks.text import load
from node.training.inner_optimizer import LossScale
from node.training.task_learner import TaskLearner
from node.training.trainer import Learner, device_name
from protocols.base import Vector

BFLOAT16_WIDTH = 192
"""Least width at which bfloat16 is faster, on CPUs that support it: 8.8k tokens/s against 7.7k at 192, slower below.
On a GPU, where narrower models mostly wait for the CPU, it is not measured yet."""


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    learner: Learner
    rest_seconds: float = 0.0  # to sleep before each step
    held_out: bytes = b""  # the evaluation sample, if the task has one
    generate: Callable[[bytes, int, float, int], bytes] | None = None  # takes prompt, tokens, temperature, seed
    pins: ModelPins | None = None  # what the run's manifest says of the task's own model
    ready: Callable[[], bool] = lambda: True  # whether the data of the next step are here; else the worker waits
    timeout_seconds: float | None = None  # the task's own `WorkerSpec.timeout_seconds`
    loss_scale: LossScale | None = None  # of training in float16
    check_first_loss: Callable[[float], None] | None = None  # takes the held-out loss before training


Allocate: TypeAlias = Callable[[int], Vector]
MakeLearner: TypeAlias = Callable[..., Any]
"""Called with the task and the recipe and, by name, `seed`, `resume` and `autocast`."""


def build(
    spec: WorkerSpec, allocate: Allocate, resume: bool, make: MakeLearner | None = None, on_cpu: bool = False
) -> Job:
    """Load data and model. On the CPU the parameters are in the vector of `allocate`, where `resume` finds them.

    `make` makes the learner of a task's module, in place of `TaskLearner`. `on_cpu`: it moves the module to the device
    itself, except that of a user's own task.

    On another device the caller has to copy them. Raises `ValueError`, with one line, if data, device or a
    user's module are missing or unsuitable.
    """
    values = spec.values
    if isinstance(values, PacedValues):
        paced = Paced(values.elements, spec.stream_seed, values.tokens_per_step, allocate, resume)
        return Job(paced, values.step_seconds)
    device, data = device_of(spec.device), spec.given_data(resume)
    if device.startswith("cuda:"):
        torch.cuda.set_device(device)  # or what names no device would also take memory of the first
    replaces = resume  # another worker, which has said what there is to say
    if not replaces:
        _tell_slow(spec.precision, device)
    place, kept = (allocate, resume) if device == "cpu" else (None, False)
    make = make or partial(TaskLearner, allocate=place)
    if isinstance(values, HfValues):
        return _build_hf(spec, data, device, make, kept, tells=not replaces, on_cpu=on_cpu)
    if isinstance(values, OwnValues):
        own_task = own.make(values.name, TaskContext(spec.weights_seed, device, spec.data, values.options))
        if spec.checkpointing:
            blocks = repeated_blocks(own_task.module)
            if not blocks and not replaces:
                note(f"task {values.name}: --checkpointing has no effect, because the module has no list of blocks")
            checkpoint_blocks(blocks)
        lines = own_task.try_out(spec.stream_seed, training=spec.recipe.mean == "token")
        for line in lines if not replaces else ():
            note(line)
        torch.manual_seed(spec.stream_seed)  # of dropout, in which peers should differ
        autocast = _autocast(spec.precision, device, width=0)
        learner = make(own_task, spec.recipe, seed=spec.stream_seed, resume=kept, autocast=autocast)
        return Job(learner, timeout_seconds=own_task.timeout_seconds, loss_scale=learner.loss_scale)
    assert isinstance(values, GptValues)
    text = load(spec.data, spec.held_out, data)
    preset = Preset(values.shape, values.rows, spec.recipe)
    task = GptTask(preset, text, spec.weights_seed, "cpu" if on_cpu else device)
    if spec.checkpointing:
        checkpoint_blocks(task.module.model.layers.values())
    autocast = _autocast(spec.precision, device, values.shape.width)
    learner = make(task, spec.recipe, seed=spec.stream_seed, resume=kept, autocast=autocast)
    held_out = text.held_out.numpy().tobytes()
    return Job(learner, held_out=held_out, generate=task.module.generate, loss_scale=learner.loss_scale)


def _build_hf(
    spec: WorkerSpec, data: GivenData, device: str, make: MakeLearner, resume: bool, *, tells: bool, on_cpu: bool
) -> Job:
    from node.tasks.hf.task import make_task  # only a worker of this task loads transformers

    values = spec.values
    assert isinstance(values, HfValues)
    precision = spec.precision if spec.precision != "auto" else hf_precision(device, tells)
    dtype, autocast = torch.bfloat16 if precision == "bfloat16" else torch.float32, None
    if precision == "float16":
        # What is trained stays in float32 and is rounded by autocast, not in copies as for bfloat16: these would sum a
        # step's gradients in float16, which overflows. What is frozen may be in float16, which takes half the memory.
        autocast, dtype = torch.float16, torch.float16 if values.settings.train == "lora" else torch.float32
    torch.manual_seed(spec.weights_seed)  # of the adapters
    task = make_task(
        values,
        data,
        held_out=spec.held_out,
        device="cpu" if on_cpu else device,
        dtype=dtype,
        checkpointing=spec.checkpointing,
        seed=spec.stream_seed,
        step_batches=spec.recipe.batches,
        ranks=spec.ranks,
    )
    torch.manual_seed(spec.stream_seed)  # of dropout, in which peers should differ
    learner = make(task, spec.recipe, seed=spec.stream_seed, resume=resume, autocast=autocast)

    def generate(prompt: bytes, tokens: int, temperature: float, seed: int) -> bytes:
        with learner.evaluating():
            return task.generate(prompt, tokens, temperature, seed)

    def ready() -> bool:
        return task.ready(spec.stream_seed, learner.position)

    compares = tells and spec.held_out is not None and values.settings.train == "lora"
    return Job(
        learner,
        held_out=task.held_out,
        generate=generate,
        pins=task.pins,
        ready=ready,
        loss_scale=learner.loss_scale,
        check_first_loss=partial(task.compare_base, pins=values.pins) if compares else None,
    )


def device_of(name: str) -> str:
    there = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if name == "auto":
        return next(each for each in ("cuda", "mps", "cpu") if there[each])
    kind, _, number = name.partition(":")
    if not there[kind] or (number and int(number) >= torch.cuda.device_count()):
        raise ValueError(f"no device {name} on this machine that this build of torch can use: try --device auto")
    return name


def devices_of(spec: WorkerSpec) -> str:
    """What a worker trains on, in words. Its own machine's devices; those of a cluster are taken to be alike."""
    if isinstance(spec.values, PacedValues):
        return "cpu"
    number, name = spec.ranks * spec.nodes, device_name(device_of((spec.devices or (spec.device,))[0]))
    return f"{number} × {name}" if number > 1 else name


def hf_precision(device: str, tells: bool) -> str:
    """What `--precision auto` is for a model of Hugging Face."""
    if torch.device(device).type != "cuda":
        return "float32"
    if torch.cuda.is_bf16_supported(including_emulation=False):
        return "bfloat16"
    if tells:
        note("this GPU does not compute in bfloat16: training is in float16; --precision float32 is slower and safer")
    return "float16"


def _tell_slow(precision: str, device: str) -> None:
    if precision == "float16" and device == "cpu" and not torch.ops.mkldnn._is_mkldnn_fp16_supported():
        warn("this processor does not compute in float16: steps take several times as long as with --precision auto")


def _autocast(precision: str, device: str, width: int) -> torch.dtype | None:
    if precision == "float16":
        return torch.float16
    kind = torch.device(device).type
    pays = width >= BFLOAT16_WIDTH and (
        (kind == "cpu" and torch.ops.mkldnn._is_mkldnn_bf16_supported())
        or (kind == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False))
    )
    return torch.bfloat16 if precision == "bfloat16" or (precision == "auto" and pays) else None
