"""What a worker is to do, as plain data: which task, how, on which data, on which device."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch

from node.tasks import user_task as own
from node.tasks.base import OptionValue, Recipe, TaskContext, require
from node.tasks.gpt import GptConfig, GptTask, Preset
from node.tasks.paced import Paced
from node.tasks.text import load
from node.training.cores import usable_cores
from node.training.trainer import AdamWLearner, Learner
from protocols.base import Vector

DEVICES = ("auto", "cpu", "cuda", "mps")
PRECISIONS = ("auto", "float32", "bfloat16")
BFLOAT16_WIDTH = 192
"""From this width on bfloat16 pays on CPUs that compute in it: 8.8k tokens/s against 7.7k at 192, less below."""


@dataclass(frozen=True, slots=True)
class GptValues:
    """The language model of `node.tasks.gpt`: its shape, and the rows of a batch."""

    shape: GptConfig
    rows: int


@dataclass(frozen=True, slots=True)
class PacedValues:
    """The paced task of `node.tasks.paced`; a step sleeps `step_seconds`."""

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


Values: TypeAlias = GptValues | PacedValues | OwnValues


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """Everything that a worker needs to know.

    Attributes:
        values: of the task, by whose type it is chosen.
        stream_seed: of this peer's stream of data, different for each peer.
        weights_seed: of the initial weights; they matter to a run's founder alone.
        data: a text file or a folder of them; None: the standard library's source.
        held_out: the run's evaluation sample, a file; None: what one's own text holds out, as a founder's.
        device: "auto" takes cuda or mps where there is one.
        threads: of the worker's arithmetic; 0: they are measured, beginning with its share of the cores, of which
            `peers_here` peers have one each.
        precision: of the forward pass. "auto" is bfloat16 where it was measured to pay, float32 elsewhere.
        nice: how much less than the peer's own processes the worker is to get of busy cores: 0 to 19 as `nice` has it.
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
        """What `to_json` wrote."""
        fields: dict[str, Any] = json.loads(text)
        fields["values"] = _read_values(fields.pop("task"), fields["values"])
        recipe = fields.pop("recipe")
        for name in ("data", "held_out"):
            fields[name] = Path(fields[name]) if fields[name] else None
        return cls(recipe=Recipe(**recipe | {"betas": tuple(recipe["betas"])}), **fields)

    def thread_count(self) -> int:
        """Threads of torch to begin with: this worker's share of the usable cores, unless they were given."""
        return self.threads or max(1, usable_cores() // self.peers_here)


def _read_values(kind: str, values: dict[str, Any]) -> Values:
    if kind == GptValues.__name__:
        return GptValues(GptConfig(**values["shape"]), values["rows"])
    return PacedValues(**values) if kind == PacedValues.__name__ else OwnValues(**values)


class ResumableLearner(Learner, Protocol):
    """A learner whose data go on where another's ended.

    Attributes:
        position: batches drawn so far.
    """

    position: int


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """A task that is ready to be trained.

    Attributes:
        rest_seconds: to sleep before each step.
        held_out: the evaluation sample; empty if the task has none.
        generate: continues (prompt, tokens, temperature, seed) by what the learner holds, if the task can.
    """

    learner: ResumableLearner
    rest_seconds: float = 0.0
    held_out: bytes = b""
    generate: Callable[[bytes, int, float, int], bytes] | None = None


Allocate: TypeAlias = Callable[[int], Vector]


def build(spec: WorkerSpec, allocate: Allocate, resume: bool) -> Job:
    """Load data and model. Parameters on the CPU stand in the vector that `allocate` gives.

    On another device (untested: none at hand) they stand there; whoever shares vectors has to copy.

    Args:
        resume: that vector holds the parameters already.

    Raises:
        ValueError: data, device or a user's module are not there, or do not fit; one line.
    """
    values = spec.values
    if isinstance(values, PacedValues):
        paced = Paced(values.elements, spec.stream_seed, values.tokens_per_step, allocate, resume)
        return Job(paced, values.step_seconds)
    device = _device(spec.device)
    place, resume = (allocate, resume) if device == "cpu" else (None, False)
    if isinstance(values, OwnValues):
        theirs = own.make(values.name, TaskContext(spec.weights_seed, device, spec.data, values.options))
        theirs.try_out(spec.stream_seed)
        autocast = _autocast(spec.precision, device, width=0)
        return Job(AdamWLearner(theirs, spec.recipe, spec.stream_seed, place, resume, autocast))
    text = load(spec.data, spec.held_out)
    preset = Preset(values.shape, values.rows, spec.recipe)
    task = GptTask(preset, text, spec.weights_seed, device)
    autocast = _autocast(spec.precision, device, values.shape.width)
    learner = AdamWLearner(task, spec.recipe, spec.stream_seed, place, resume, autocast)
    return Job(learner, held_out=text.held_out.numpy().tobytes(), generate=task.module.generate)


def _device(name: str) -> str:
    there = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if name == "auto":
        return next(each for each in ("cuda", "mps", "cpu") if there[each])
    if not there[name]:
        raise ValueError(f"no device {name} on this machine, or none that this torch can use: try --device auto")
    return name


def _autocast(precision: str, device: str, width: int) -> torch.dtype | None:
    pays = device == "cpu" and width >= BFLOAT16_WIDTH and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.bfloat16 if precision == "bfloat16" or (precision == "auto" and pays) else None
