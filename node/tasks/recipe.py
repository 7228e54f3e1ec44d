"""The hyper-parameters of a run. Without PyTorch: a configuration is checked before that is loaded."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Literal, TypeAlias

MAX_ELEMENTS = 1 << 31  # largest number of parameters of a run

MAX_FRAGMENTS = 64
"""Fragments that the parameters may be cut into."""

MAX_LOOKAHEAD = 64
"""Microbatches of the next inner step that a replica may admit."""

OptionValue: TypeAlias = bool | int | float | str  # the value of an option of a user's own task

InnerOptimizerName = Literal["adamw", "muon"]


def described(help: str, default: Any = MISSING) -> Any:
    """A field of a dataclass with its description, which the run file quotes."""
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, slots=True)
class Recipe:
    """Hyper-parameters of a run: the inner steps, the rounds, and the outer step (Nesterov SGD)."""

    inner_steps: int = described("H, inner steps of a round.")
    rounds: int = described("Length of the run, and of the learning rate's cosine.")
    learning_rate: float = described("Of the inner optimiser.")
    outer_learning_rate: float = described("Of the outer step (Douillard et al. 2023, algorithm 1).")
    outer_momentum: float = described("Of the outer step (Douillard et al. 2023, algorithm 1).")
    batches: int = described("Batches accumulated into one inner step.", 1)
    betas: tuple[float, float] = described("Of AdamW (Loshchilov & Hutter 2019).", (0.9, 0.95))
    weight_decay: float = described("Of the inner optimiser.", 0.1)
    clip_norm: float = described("L2 norm at which the gradient of an inner step is clipped.", 1.0)
    warmup_steps: int = described("Number of first global inner steps in which the rate rises linearly.", 20)
    final_fraction: float = described("Learning rate at the end of the cosine, as a fraction of learning_rate.", 0.1)
    outer_pull: float | None = described(
        "Only for gossip. If set, the outer step is NoLoCo's (Kolehmainen et al. 2025) with this gamma: it pulls the "
        "states of two peers together by this much instead of averaging them; best is 1 - outer_momentum². left out: "
        "gossip averages states.",
        None,
    )
    mean: Literal["batch", "token"] = described(
        "What a step's gradient is: with token, the mean over the targets of all its batches; with batch, the mean of "
        "the batches' means. The default is token for hf and users' own tasks.",
        "batch",
    )
    decay: Literal["all", "matrices"] = described(
        "What the weight decay applies to: with matrices, tensors of two or more dimensions except adapters, so not "
        "norms and biases; with all, every parameter. The default is matrices for hf and users' own tasks.",
        "all",
    )
    inner_optimizer: InnerOptimizerName = described(  # noqa: RUF009  (an alias of a Literal)
        "Adamw, or muon for hidden matrices (Jordan et al. 2024) with AdamW for all other parameters. Hidden are "
        "tensors of two dimensions, except adapters, embeddings and output layers. The default is muon for the "
        "presets of gpt, and adamw for hf and users' own tasks.",
        "adamw",
    )
    outer_decay: float | None = described(
        "Share of the rounds, the last ones, in which the outer step goes in equal parts to a plain mean of the "
        "peers' parameters (learning rate 1, momentum 0). left out: no such rounds. Not with outer_pull.",
        None,
    )

    overlap: Literal["keep", "off"] | None = described(
        "keep: training continues while a round averages, and that work is kept. off: training waits for the mean. "
        "left out: the founder chooses, if it declares its line (--bandwidth, --upload-limit) and sets no fragments; "
        "otherwise off. keep is for butterfly, without stages.",
        None,
    )

    fragments: int | None = described(
        "Number of equal parts of the parameters. Each round averages one of them, in turn (Douillard et al. 2025, "
        "Streaming DiLoCo), so each parameter is averaged every fragments * inner_steps steps. left out: a round "
        "averages all. Only for butterfly, without stages.",
        None,
    )

    lookahead: int | None = described(
        "Only for stages: microbatches of the next inner step that a replica admits before its present one is complete "
        "(docs/pipeline.md). They keep unequal replicas busy; some gradients are one step old. left out: none.",
        None,
    )

    def __post_init__(self) -> None:
        for name in ("inner_steps", "rounds", "batches"):
            require(self, name, lambda value: value >= 1, "at least 1")
        for name in ("learning_rate", "outer_learning_rate", "clip_norm"):
            require(self, name, lambda value: 0 < value < math.inf, "positive")
        for name in ("warmup_steps", "weight_decay"):
            require(self, name, lambda value: 0 <= value < math.inf, "0 or more")
        require(self, "outer_momentum", lambda value: 0 <= value < 1, "in [0, 1)")
        if self.outer_decay is not None:
            require(self, "outer_decay", lambda value: 0 <= value <= 1, "in [0, 1]")
            if self.outer_decay and self.outer_pull:
                raise ValueError("outer_decay and outer_pull cannot be combined: set one of them")
        if self.fragments is not None:
            require(self, "fragments", lambda value: 2 <= value <= MAX_FRAGMENTS, f"between 2 and {MAX_FRAGMENTS}")
        if self.lookahead is not None:
            require(self, "lookahead", lambda value: 0 <= value <= MAX_LOOKAHEAD, f"between 0 and {MAX_LOOKAHEAD}")
        require(self, "final_fraction", lambda value: 0 <= value <= 1, "in [0, 1]")
        if self.outer_pull is not None:
            most = most_pull(self.outer_momentum)
            require(
                self, "outer_pull", lambda value: 0 < value < most, f"above 0 and, with this momentum, below {most:g}"
            )
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must be two numbers in [0, 1), not {self.betas}")

    @property
    def overlaps(self) -> bool:
        """Whether training continues while a round averages."""
        return self.overlap == "keep"

    @property
    def fragment_count(self) -> int:
        """Number of fragments of the parameters, which rounds average in turn; 1 if each round averages all."""
        return self.fragments or 1

    def rate(self, global_step: int) -> float:
        """Learning rate of the inner step `global_step` (round * inner_steps + step, from 0): warm-up, then cosine.

        It depends only on the global step, so a late joiner trains at the same rate as all other peers.
        """
        steps = self.inner_steps * self.rounds
        warmup = min(1.0, (global_step + 1) / (self.warmup_steps + 1))
        span = max(1, steps - self.warmup_steps)
        done = min(1.0, max(0.0, (global_step - self.warmup_steps) / span))
        cosine = 0.5 * (1 + math.cos(math.pi * done))
        return self.learning_rate * warmup * (self.final_fraction + (1 - self.final_fraction) * cosine)


def most_pull(momentum: float) -> float:
    """Upper bound of NoLoCo's pull: from there on, peers that seldom meet diverge (`node.outer.noloco`)."""
    return 2 * (1 - momentum)


def require(values: object, name: str, valid: Callable[[float], bool], words: str) -> None:
    """Check a number in a field of a dataclass; fields annotated as int must be whole numbers."""
    value = getattr(values, name)
    # The annotation is a string here. In Python a bool is an int, but it is not meant as a number here.
    whole = next(each.type for each in fields(values) if each.name == name) == "int"  # type: ignore[arg-type]
    right = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    if not right or not valid(value):
        raise ValueError(f"{name} must be {'a whole number, ' if whole else ''}{words}, not {value!r}")
