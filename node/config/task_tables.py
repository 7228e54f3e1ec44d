"""The tables `[gpt]` and `[paced]` of a run's configuration. Every value is bounded: it may come from a stranger."""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from node.tasks.gpt_presets import VOCABULARY, GptConfig
from node.tasks.recipe import MAX_ELEMENTS, described

MAX_BATCH_TOKENS = 1 << 20
MAX_ACTIVATION_BYTES = 16 << 20
"""Of one microbatch's activations in float32, with stages: a replica holds up to two of them for each microbatch."""

STRICT = ConfigDict(
    extra="forbid", strict=True, allow_inf_nan=False, revalidate_instances="always", val_json_bytes="hex"
)
"""No value is converted: "5" and true are not numbers, and 1.0 is not a whole number."""


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class GptTable:
    """`[gpt]`: the model's shape and the rows of a batch; see `node.tasks.gpt`."""

    layers: Annotated[int, Field(ge=1, le=1 << 10)] = described("Layers of the transformer.")
    width: Annotated[int, Field(ge=1, le=1 << 16)] = described("Width of the residual stream.")
    heads: Annotated[int, Field(ge=1, le=1 << 10)] = described(
        "Attention heads; the width must be a multiple of twice this number."
    )
    context: Annotated[int, Field(ge=1, le=1 << 14)] = described("Length of the context, in bytes.")
    rows: Annotated[int, Field(ge=1, le=1 << 12)] = described("Rows of a batch, each as long as the context.")

    def __post_init__(self) -> None:
        _ = self.shape  # raises if the heads do not fit the width
        if self.elements > MAX_ELEMENTS:
            raise ValueError(f"the model has {self.elements} parameters, more than {MAX_ELEMENTS}: make it smaller")
        if self.rows * self.context > MAX_BATCH_TOKENS:
            raise ValueError(f"rows times context are {self.rows * self.context}, more than {MAX_BATCH_TOKENS}")

    @property
    def shape(self) -> GptConfig:
        return GptConfig(self.layers, self.width, self.heads, self.context)

    @property
    def activation_elements(self) -> int:
        """Elements of the activations of one microbatch between two layers."""
        return self.rows * self.context * self.width

    def require_stages(self, stages: int) -> None:
        """Raise ValueError if the model cannot be cut into this number of stages."""
        if stages > (blocks := self.layers + 2):
            raise ValueError(f"{stages} stages need as many blocks, and the model has {blocks}: take fewer stages")
        if (size := 4 * self.activation_elements) > MAX_ACTIVATION_BYTES:
            what = f"a microbatch has activations of {size / 2**20:.0f} MiB, more than {MAX_ACTIVATION_BYTES >> 20}"
            raise ValueError(f"{what}: take fewer gpt.rows and more recipe.batches")

    @property
    def elements(self) -> int:
        """Number of parameters of `node.tasks.gpt.Gpt` in this shape, computed without building the model."""
        layer = 4 * self.width**2 + 3 * self.width * self.shape.hidden + 2 * self.width
        return 2 * VOCABULARY * self.width + self.layers * layer + self.width


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class PacedTable:
    """`[paced]`: the vector, and the time and tokens of an inner step; see `node.tasks.paced`."""

    elements: Annotated[int, Field(ge=1, le=MAX_ELEMENTS)] = described("Length of the vector.", 1_000_000)
    step_seconds: Annotated[float, Field(gt=0, le=3600)] = described("Seconds that an inner step takes.", 0.1)
    tokens_per_step: Annotated[int, Field(ge=1, le=1 << 30)] = described("Tokens that an inner step counts as.", 1024)
