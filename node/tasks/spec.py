"""The specification of a worker's job as plain data: task, hyper-parameters, data, device."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from node.runtime.cgroup import usable_cores
from node.tasks.given_data import GivenData
from node.tasks.gpt_presets import GptConfig
from node.tasks.hf.settings import HfValues
from node.tasks.recipe import OptionValue, Recipe, require

DEVICES = ("auto", "cpu", "cuda", "mps")
PRECISIONS = ("auto", "float32", "bfloat16")


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
    """One stage of a run with stages. Of S + 1 bounds, stage k holds the blocks [bounds[k], bounds[k+1]).

    `activations` is a key of `protocols.registry.ACTIVATION_CODECS`; `elements` the length of the stage's flat vector,
    for the paced task; `replica` the name of this peer in its present incarnation; `slots` the file descriptor of the
    activations that peer and worker share (`node.training.activation_slots`).
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
    """The specification of a worker's job. The type of `values` selects the task.

    `weights_seed` is used by the run's founder alone. `data` None: the source code of the standard library. `held_out`
    None: hold out a part of this peer's own text, as a founder does. `device` "auto": cuda or mps if available.
    `threads` 0: tune the number by measurement, starting with this worker's share of the cores, which it divides with
    `peers_here` peers. `precision` "auto": bfloat16 where it was measured to be faster. `nice` is added to the
    worker's. `stage` None: the whole model. `timeout_seconds`: as for a `Task`. `record`: file in which the worker
    keeps what the data are, to compare them at the peer's next start.
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
        """The data, for a worker."""
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
