"""Settings of the task `hf`: what a run shares, what this machine sets, and what the manifest says of the model."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from node.runtime.program import install
from node.tasks.recipe import described, require

MAX_ROW_TOKENS = 1 << 17
MAX_HF_BATCH_TOKENS = 1 << 20
MAX_TARGETS = 256
MAX_WORD_CHARACTERS = 200
ALL_LINEAR = "all-linear"
NO_HELD_OUT = "none"
NEEDS = install("hf")


class ModelError(ValueError):
    """A model, tokenizer or data cannot be used. The message is one line: what, why, what to do."""


@contextmanager
def foreign(what: str, remedy: str = "") -> Iterator[None]:
    """Turn every error of the libraries into a `ModelError`; their types have no common base."""
    try:
        yield
    except (ModelError, MemoryError):
        raise
    except Exception as error:
        raise ModelError(f"{what}: {_short(error)}{remedy}") from error


def _short(error: Exception) -> str:
    words = " ".join(f"{type(error).__name__}: {error}".split())
    return "".join(each if each.isprintable() else "?" for each in words)[:300]


@dataclass(frozen=True, slots=True)
class HfSettings:
    """`[hf]`: how the model is trained."""

    train: Literal["lora", "full"] = described(
        "Lora trains small adapters beside the model, which stays as it is; full trains the whole model.", "lora"
    )
    lora_rank: int = described("Rank of the adapters.", 16)
    lora_alpha: int = described(
        "Scale of the adapters, as a multiple of 1 / lora_rank. Its default is twice the rank.", 32
    )
    lora_targets: tuple[str, ...] = described(
        "Names of the layers that get adapters, such as q_proj, or experts.down_proj of fused experts; all-linear "
        "means all linear layers except the output layer and routers, without fused experts.",
        (ALL_LINEAR,),
    )
    context: int = described("Tokens of a row.", 1024)
    rows: int = described("Rows of a batch.", 4)
    format: Literal["text", "chat"] = described(
        "Text: every token is a target. chat: conversations, in which only the assistant's turns are targets.", "text"
    )
    pack: bool = described("Whether several texts share a row. They do not see each other.", True)

    def __post_init__(self) -> None:
        require(self, "lora_rank", lambda value: 1 <= value <= 1024, "1 to 1024")
        require(self, "lora_alpha", lambda value: 1 <= value <= 1 << 16, "1 to 65536")
        require(self, "context", lambda value: 8 <= value <= MAX_ROW_TOKENS, f"8 to {MAX_ROW_TOKENS}")
        require(self, "rows", lambda value: 1 <= value <= 1 << 12, "1 to 4096")
        if self.rows * self.context > MAX_HF_BATCH_TOKENS:
            raise ValueError(f"rows times context are {self.rows * self.context}, more than {MAX_HF_BATCH_TOKENS}")
        _require_names("lora_targets", self.lora_targets)
        if self.train not in ("lora", "full") or self.format not in ("text", "chat"):
            raise ValueError("train is lora or full, format is text or chat")


def _require_names(what: str, names: tuple[str, ...]) -> None:
    if not 0 < len(names) <= MAX_TARGETS or not all(re.fullmatch(r"[\w.-]{1,100}", each, re.ASCII) for each in names):
        raise ValueError(f"{what} must be 1 to {MAX_TARGETS} names of layers")


@dataclass(frozen=True, slots=True)
class ModelPins:
    """What the manifest says of the model, so that no peer trains with another one."""

    base: str  # where the founder's came from: ORG/NAME@REVISION, or its folder's name. Only a hint
    weights: str  # digest of the base's tensors, 64 hex digits, as all digests
    size: int  # bytes of the base's files of weights
    config: str
    tokenizer: str  # digest of it, and of the tokens that it makes of a fixed text
    template: str = ""  # digest of the chat template; empty in a run on plain text
    targets: tuple[str, ...] = ()  # layers that have adapters; empty in a run that trains the whole model
    base_loss: float | None = None  # held-out loss before the first round; None without a held-out sample

    def __post_init__(self) -> None:
        if not 0 < len(self.base) <= MAX_WORD_CHARACTERS or not (self.base.isascii() and self.base.isprintable()):
            raise ValueError("base must be 1 to 200 printable characters")
        for name in ("weights", "config", "tokenizer", "template"):
            if not re.fullmatch("[0-9a-f]{64}", value := getattr(self, name)) and (value or name != "template"):
                raise ValueError(f"{name} must be 64 hex digits")
        require(self, "size", lambda value: 0 <= value < 1 << 50, "0 or more")
        if self.targets:
            _require_names("targets", self.targets)
        if self.base_loss is not None and not math.isfinite(self.base_loss):
            raise ValueError("base_loss must be a finite number")

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> ModelPins:
        return cls(**fields | {"targets": tuple(fields["targets"])})


@dataclass(frozen=True, slots=True)
class HfMachine:
    model: str  # a folder, or ORG/NAME@REVISION on the hub
    compile: bool = False
    held_out: str = ""  # a founder's file with the run's sample; "none"; empty: of text, its data
    template: str = ""  # file with the chat template to use instead of the model's own


@dataclass(frozen=True, slots=True)
class HfValues:
    """The task `hf` in a worker's specification. `pins` is None for a founder, whose model decides it."""

    settings: HfSettings
    machine: HfMachine
    pins: ModelPins | None = field(default=None)

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> HfValues:
        settings = fields["settings"]
        return cls(
            HfSettings(**settings | {"lora_targets": tuple(settings["lora_targets"])}),
            HfMachine(**fields["machine"]),
            ModelPins.from_fields(fields["pins"]) if fields["pins"] else None,
        )
