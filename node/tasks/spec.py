"""The specification of a worker's job as plain data: task, hyper-parameters, data, device."""

from __future__ import annotations

import json
import re
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
PRECISIONS = ("auto", "float32", "bfloat16", "float16")
SHARDS = ("zero1", "zero2", "zero3")


_DEVICE = re.compile(r"auto|cpu|mps|cuda(:\d{1,2})?")


@dataclass(frozen=True, slots=True)
class GptValues:
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
    """One stage of a run with stages. Stage k holds the blocks [bounds[k], bounds[k+1])."""

    number: int
    bounds: tuple[int, ...]
    activations: str  # how they travel: a key of `protocols.registry.ACTIVATION_CODECS`
    gradients: str  # the same of their gradients
    elements: int  # length of the stage's flat vector; the paced task needs it
    replica: str  # name of this peer in its present incarnation
    slots: int = -1  # file descriptor of `node.training.activation_slots`


@dataclass(frozen=True, slots=True)
class LoopValues:
    """What a user's own script trains (`node.training.script`): only the script knows."""


Values: TypeAlias = GptValues | PacedValues | OwnValues | HfValues | LoopValues


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """The specification of a worker's job. The type of `values` selects the task."""

    values: Values
    recipe: Recipe
    stream_seed: int  # of this peer's stream of data, different for each peer
    weights_seed: int = 0  # the initial weights; only those of a run's founder are used
    data: Path | None = None  # a file or a folder; None: the source code of the standard library
    held_out: Path | None = None  # the run's evaluation sample; None: a part of this peer's own text, as a founder does
    device: str = "auto"  # "auto" uses cuda or mps if available
    devices: tuple[str, ...] = ()  # of several ranks (`node.ranks`), in place of `device`
    shard: str = "zero1"  # how several ranks divide the training; "auto": by what fits
    tensor_parallel: int = 1  # ranks among which each layer is divided
    nodes: int = 1  # machines of which this peer has the devices; `devices` are those of this one
    rendezvous: str = ""  # HOST:PORT of machine 0, where they meet
    meeting_seconds: float = 300.0  # longest time that machine 0 waits for them
    offload: str = ""  # what several ranks keep on the host: "optimizer" or, with zero3, "parameters" as well
    threads: int = 0  # for computation; 0: measure, starting with this worker's share of the cores
    peers_here: int = 1  # on this machine
    precision: str = "auto"  # of the forward pass; "auto": bfloat16 where it was measured to be faster
    checkpointing: bool = False  # compute activations again in the backward pass
    nice: int = 0  # added to the worker's niceness
    stage: StageValues | None = None
    timeout_seconds: float | None = None  # without a sign of work (`node.training.liveness`); None: default
    windows: Path | None = None  # directory in which this machine's ranks share what comes from the hub
    record: Path | None = None  # where the worker keeps what the data are, for the peer's next start

    def __post_init__(self) -> None:
        require(self, "threads", lambda value: value >= 0, "0 or more")
        require(self, "peers_here", lambda value: value >= 1, "at least 1")
        require(self, "nice", lambda value: 0 <= value <= 19, "0 to 19")
        for name, words in (("precision", PRECISIONS), ("shard", ("auto", *SHARDS))):
            if getattr(self, name) not in words:
                raise ValueError(f"{name} must be one of {', '.join(words)}, not {getattr(self, name)!r}")

        for device in (self.device, *self.devices):
            if not _DEVICE.fullmatch(device):
                raise ValueError(f"device must be one of {', '.join(DEVICES)}, or cuda:0 and so on, not {device!r}")

    def to_json(self) -> str:
        return json.dumps({"task": type(self.values).__name__, **asdict(self)}, default=str)

    @classmethod
    def from_json(cls, text: str) -> WorkerSpec:
        fields: dict[str, Any] = json.loads(text)
        fields["values"] = _read_values(fields.pop("task"), fields["values"])
        recipe = fields.pop("recipe")
        if stage := fields.pop("stage"):
            fields["stage"] = StageValues(**stage | {"bounds": tuple(stage["bounds"])})
        fields["devices"] = tuple(fields["devices"])
        for name in ("data", "held_out", "windows", "record"):
            fields[name] = Path(fields[name]) if fields[name] else None
        return cls(recipe=Recipe(**recipe | {"betas": tuple(recipe["betas"])}), **fields)

    @property
    def ranks(self) -> int:
        return max(1, len(self.devices))

    def start_seconds(self, usual: float) -> float:
        """Longest time that a worker may show no sign of work while it starts."""
        return max(self.timeout_seconds or 0.0, usual) + (self.meeting_seconds if self.nodes > 1 else 0.0)

    def given_data(self, resume: bool) -> GivenData:
        return GivenData(self.data, self.record, not resume, self.windows, self.ranks)

    def thread_count(self) -> int:
        """Number of threads to start with: the given one, or this worker's share of the usable cores."""
        return self.threads or max(1, usable_cores() // self.peers_here)


def _read_values(kind: str, values: dict[str, Any]) -> Values:
    if kind == HfValues.__name__:
        return HfValues.from_fields(values)
    if kind == GptValues.__name__:
        return GptValues(GptConfig(**values["shape"]), values["rows"])
    if kind == LoopValues.__name__:
        return LoopValues()
    return PacedValues(**values) if kind == PacedValues.__name__ else OwnValues(**values)
