"""The specification of a worker's job as plain data: task, hyper-parameters, data, device."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch

from node.runtime.notes import note
from node.tasks import user_task as own
from node.tasks.base import TaskContext
from node.tasks.given_data import GivenData
from node.tasks.gpt import GptTask
from node.tasks.gpt_presets import GptConfig, Preset
from node.tasks.hf.settings import HfValues, ModelPins
from node.tasks.paced import Paced
from node.tasks.recipe import OptionValue, Recipe, require
from node.tasks.text import load
from node.training.cores import usable_cores
from node.training.task_learner import TaskLearner
from node.training.trainer import Learner
from protocols.base import Vector

DEVICES = ("auto", "cpu", "cuda", "mps")
PRECISIONS = ("auto", "float32", "bfloat16")
BFLOAT16_WIDTH = 192
"""Least width at which bfloat16 is faster, on CPUs that support it: 8.8k tokens/s against 7.7k at 192, slower below."""


@dataclass(frozen=True, slots=True)
class GptValues:
    """The language model of `node.tasks.gpt`: its shape, and the number of rows of a batch."""

    shape: GptConfig
    rows: int


@dataclass(frozen=True, slots=True)
class PacedValues:
    """The paced task of `node.tasks.paced`. A step sleeps for `step_seconds`."""

    elements: int
    tokens_per_step: int = 1024
    step_seconds: float = 0.1

    def __post_init__(self) -> None:
        require(self, "step_seconds", lambda value: 0 <= value < 3600, "seconds, below an hour")


@dataclass(frozen=True, slots=True)
class OwnValues:
    """A user's own task, see `node.tasks.user_task`: its name, and the options of its factory."""

    name: str
    options: Mapping[str, OptionValue] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StageValues:
    """One stage of a run with stages.

    Attributes:
        number: of the stage.
        bounds: S + 1 block numbers; stage k holds the blocks [bounds[k], bounds[k+1]).
        activations: how activations travel: a key of `protocols.choices.ACTIVATION_CODECS`.
        elements: length of the stage's flat vector; the paced task needs it.
        replica: name of this peer in its present incarnation.
        slots: file descriptor of the activations that peer and worker share (`node.training.activation_slots`).
    """

    number: int
    bounds: tuple[int, ...]
    activations: str
    elements: int
    replica: str
    slots: int = -1

    @property
    def stages(self) -> int:
        return len(self.bounds) - 1

    @property
    def is_last(self) -> bool:
        return self.number == self.stages - 1


Values: TypeAlias = GptValues | PacedValues | OwnValues | HfValues


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """The specification of a worker's job.

    Attributes:
        values: settings of the task. Their type selects the task.
        stream_seed: seed of this peer's stream of data, different for each peer.
        weights_seed: seed of the initial weights. Only those of a run's founder are used.
        data: a text file or a folder of text files; None: the source code of the standard library.
        held_out: file with the run's evaluation sample; None: hold out a part of this peer's own text, as a founder
            does.
        device: one of `DEVICES`. "auto" uses cuda or mps if available.
        threads: number of threads for computation; 0: tune it by measurement, starting with this worker's share of
            the cores, which it divides with `peers_here` peers.
        peers_here: number of peers on this machine.
        precision: of the forward pass. "auto" is bfloat16 where it was measured to be faster, and otherwise float32.
        nice: niceness to add to that of the worker, 0 to 19, as for the command `nice`.
        stage: the stage to train; None for the whole model.
        timeout_seconds: longest time that the worker may show no sign of work (`node.training.liveness`); None: as the
            task says, or the default.
        record: file in which the worker keeps what the data are, to compare them at the peer's next start.
    """

    values: Values
    recipe: Recipe
    stream_seed: int
    weights_seed: int = 0
    data: Path | None = None
    held_out: Path | None = None
    device: str = "auto"
    threads: int = 0
    peers_here: int = 1
    precision: str = "auto"
    nice: int = 0
    stage: StageValues | None = None
    timeout_seconds: float | None = None
    record: Path | None = None

    def __post_init__(self) -> None:
        require(self, "threads", lambda value: value >= 0, "0 or more")
        require(self, "peers_here", lambda value: value >= 1, "at least 1")
        require(self, "nice", lambda value: 0 <= value <= 19, "0 to 19")
        for name, words in (("device", DEVICES), ("precision", PRECISIONS)):
            if getattr(self, name) not in words:
                raise ValueError(f"{name} must be one of {', '.join(words)}, not {getattr(self, name)!r}")

    def to_json(self) -> str:
        return json.dumps({"task": type(self.values).__name__, **asdict(self)}, default=str)

    @classmethod
    def from_json(cls, text: str) -> WorkerSpec:
        """Decode the result of `to_json`."""
        fields: dict[str, Any] = json.loads(text)
        fields["values"] = _read_values(fields.pop("task"), fields["values"])
        recipe = fields.pop("recipe")
        if stage := fields.pop("stage"):
            fields["stage"] = StageValues(**stage | {"bounds": tuple(stage["bounds"])})
        for name in ("data", "held_out", "record"):
            fields[name] = Path(fields[name]) if fields[name] else None
        return cls(recipe=Recipe(**recipe | {"betas": tuple(recipe["betas"])}), **fields)

    def given_data(self, resume: bool) -> GivenData:
        """The data, for a worker.

        Args:
            resume: it takes the place of another.
        """
        return GivenData(self.data, self.record, not resume)

    def thread_count(self) -> int:
        """Number of threads to start with: the given one, or this worker's share of the usable cores."""
        return self.threads or max(1, usable_cores() // self.peers_here)


def _read_values(kind: str, values: dict[str, Any]) -> Values:
    if kind == HfValues.__name__:
        return HfValues.from_fields(values)
    if kind == GptValues.__name__:
        return GptValues(GptConfig(**values["shape"]), values["rows"])
    return PacedValues(**values) if kind == PacedValues.__name__ else OwnValues(**values)


class ResumableLearner(Learner, Protocol):
    """A learner that can resume the data of an earlier one.

    Attributes:
        position: number of batches drawn so far.
    """

    position: int


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """A task that is ready for training.

    Attributes:
        rest_seconds: time to sleep before each step.
        held_out: the evaluation sample; empty if the task has none.
        generate: takes (prompt, tokens, temperature, seed) and generates text with the learner's parameters; None if
            the task generates no text.
        pins: what the run's manifest says of the model; None for a task that has no model of its own.
        ready: whether the data of the next step are here; until then the worker waits, and takes no step.
        timeout_seconds: the task's own `WorkerSpec.timeout_seconds`; None: it has none.
    """

    learner: ResumableLearner
    rest_seconds: float = 0.0
    held_out: bytes = b""
    generate: Callable[[bytes, int, float, int], bytes] | None = None
    pins: ModelPins | None = None
    ready: Callable[[], bool] = lambda: True
    timeout_seconds: float | None = None


Allocate: TypeAlias = Callable[[int], Vector]


def build(spec: WorkerSpec, allocate: Allocate, resume: bool) -> Job:
    """Load data and model. On the CPU the parameters are in the vector that `allocate` returns.

    On another device (untested) they are in that device's memory, and the caller has to copy them.

    Args:
        resume: that vector already holds the parameters.

    Raises:
        ValueError: data, device or a user's module are missing or unsuitable. The message is one line.
    """
    values = spec.values
    if isinstance(values, PacedValues):
        paced = Paced(values.elements, spec.stream_seed, values.tokens_per_step, allocate, resume)
        return Job(paced, values.step_seconds)
    device, data = device_of(spec.device), spec.given_data(resume)
    place, resume = (allocate, resume) if device == "cpu" else (None, False)
    if isinstance(values, HfValues):
        return _build_hf(spec, data, device, place, resume)
    if isinstance(values, OwnValues):
        own_task = own.make(values.name, TaskContext(spec.weights_seed, device, spec.data, values.options))
        lines = own_task.try_out(spec.stream_seed, training=spec.recipe.mean == "token")
        for line in lines if not resume else ():
            note(line)
        torch.manual_seed(spec.stream_seed)  # of dropout, in which peers should differ
        autocast = _autocast(spec.precision, device, width=0)
        learner = TaskLearner(own_task, spec.recipe, spec.stream_seed, place, resume, autocast)
        return Job(learner, timeout_seconds=own_task.timeout_seconds)
    text = load(spec.data, spec.held_out, data)
    preset = Preset(values.shape, values.rows, spec.recipe)
    task = GptTask(preset, text, spec.weights_seed, device)
    autocast = _autocast(spec.precision, device, values.shape.width)
    learner = TaskLearner(task, spec.recipe, spec.stream_seed, place, resume, autocast)
    return Job(learner, held_out=text.held_out.numpy().tobytes(), generate=task.module.generate)


def _build_hf(spec: WorkerSpec, data: GivenData, device: str, place: Allocate | None, resume: bool) -> Job:
    from node.tasks.hf.task import make_task  # only a worker of this task loads transformers

    values = spec.values
    assert isinstance(values, HfValues)
    reduced = spec.precision == "bfloat16" or (spec.precision == "auto" and device == "cuda")
    dtype = torch.bfloat16 if reduced else torch.float32
    torch.manual_seed(spec.weights_seed)  # of the adapters
    task = make_task(values, data, spec.held_out, device, dtype, spec.stream_seed, spec.recipe.batches)
    torch.manual_seed(spec.stream_seed)  # of dropout, in which peers should differ
    learner = TaskLearner(task, spec.recipe, spec.stream_seed, place, resume)
    if not resume and spec.held_out is not None and values.settings.train == "lora":
        task.compare_base(learner.evaluate(), values.pins)

    def generate(prompt: bytes, tokens: int, temperature: float, seed: int) -> bytes:
        with learner.evaluating():
            return task.generate(prompt, tokens, temperature, seed)

    def ready() -> bool:
        return task.ready(spec.stream_seed, learner.position)

    return Job(learner, held_out=task.held_out, generate=generate, pins=task.pins, ready=ready)


def device_of(name: str) -> str:
    """The device to train on.

    Raises:
        ValueError: this machine has no such device.
    """
    there = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if name == "auto":
        return next(each for each in ("cuda", "mps", "cpu") if there[each])
    if not there[name]:
        raise ValueError(f"no device {name} on this machine that this build of torch can use: try --device auto")
    return name


def _autocast(precision: str, device: str, width: int) -> torch.dtype | None:
    pays = device == "cpu" and width >= BFLOAT16_WIDTH and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.bfloat16 if precision == "bfloat16" or (precision == "auto" and pays) else None
