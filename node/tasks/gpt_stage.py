"""One stage of the built-in model, and the task that trains it. Its tensors have the names of the whole model's."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.nn import functional

from node.tasks.gpt import GptBody, Linear
from node.tasks.gpt_presets import VOCABULARY, GptConfig, Preset
from node.tasks.partition import BlockCost, Partition
from node.tasks.text import Text

MAX_HELD_OUT = 64  # held-out microbatches, at most: as many as an evaluation takes
_TRIALS = 5


class GptStage(nn.Module):
    """Blocks [low, high) of the model: block 0 is the embedding, then the layers, the last one norm and head.

    The first stage takes int64 bytes (rows, positions), the last one gives logits (rows, positions, 256). In between
    go float32 activations (rows, positions, width). The weights depend only on the seed and the tensors' names, so
    they do not depend on the cut.
    """

    def __init__(self, config: GptConfig, low: int, high: int, seed: int = 0) -> None:
        super().__init__()
        if not 0 <= low < high <= config.layers + 2:
            raise ValueError(f"blocks {low} to {high} are not of the model's {config.layers + 2}")
        self.model = GptBody(config, low, high)
        if high == config.layers + 2:
            self.lm_head = Linear(config.width, VOCABULARY)
        draw_weights(self, seed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.model(x)
        return self.lm_head(x) if hasattr(self, "lm_head") else x


@dataclass(frozen=True, slots=True)
class ActivationShape:
    """Of one microbatch: rows, positions, and the width of an activation."""

    rows: int
    positions: int
    width: int

    @property
    def tokens(self) -> int:
        return self.rows * self.positions


class GptStageTask:
    """One stage of the built-in task. `shape` is that of the activations that it takes and gives."""

    def __init__(
        self, preset: Preset, partition: Partition, stage: int, seed: int = 0, text: Text | None = None
    ) -> None:
        config = preset.shape
        self.module = GptStage(config, partition.bounds[stage], partition.bounds[stage + 1], seed)
        self.shape = ActivationShape(preset.rows, config.context, config.width)
        self._text = text
        if text is not None:
            text.require(config.context + 1)

    def batch(self, seed: int, position: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets of stage 0, each int64 (rows, positions): those of `GptTask`."""
        assert self._text is not None, "only stage 0 draws batches"
        windows = self._text.windows(seed, position, self.shape.rows, self.shape.positions + 1)
        return windows[:, :-1], windows[:, 1:]

    def held_out(self, index: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Inputs and targets of held-out microbatch `index` (from 0), each int64 (rows, positions). None: no such one.

        They are of windows spread evenly over the held-out text. Only a text that is shorter than one microbatch
        repeats windows.
        """
        assert self._text is not None, "only stage 0 has held-out text"
        if not 0 <= index < self.samples:
            return None
        rows = self.shape.rows
        windows = self._text.held_out_windows(self.samples * rows, self.shape.positions + 1)
        windows = windows[torch.arange(index * rows, (index + 1) * rows) % len(windows)]
        return windows[:, :-1], windows[:, 1:]

    @property
    def samples(self) -> int:
        """How many held-out microbatches there are."""
        assert self._text is not None, "only stage 0 has held-out text"
        tokens = self.shape.rows * (self.shape.positions + 1)
        return max(1, min(MAX_HELD_OUT, len(self._text.held_out) // tokens))

    def loss(self, output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(output.flatten(0, 1), targets.flatten())


def block_names(config: GptConfig) -> tuple[str, ...]:
    return ("embedding", *(f"layer {number}" for number in range(config.layers)), "norm and head")


def measure(preset: Preset, timer: Callable[[], float]) -> tuple[BlockCost, ...]:
    """Time each block of the model, for the run's cut: forward, and forward with backward, each the fastest of a few
    trials: other work on the machine only adds to them."""
    config = preset.shape
    costs = []
    for number, name in enumerate(block_names(config)):
        block = GptStage(config, number, number + 1)
        size = sum(parameter.numel() for parameter in block.parameters())
        x = torch.zeros(preset.rows, config.context, dtype=torch.int64)
        if number:
            x = torch.full((preset.rows, config.context, config.width), 0.1).requires_grad_()
        forward = _least_seconds(torch.no_grad()(partial(block, x)), timer)
        both = _least_seconds(partial(_forward_backward, block, x), timer)
        costs.append(BlockCost(name, forward, both, 4 * size))
    return tuple(costs)


def _forward_backward(block: GptStage, x: torch.Tensor) -> None:
    block(x).sum().backward()


def _least_seconds(work: Callable[[], object], timer: Callable[[], float]) -> float:
    seconds = []
    for _ in range(_TRIALS):
        began = timer()
        work()
        seconds.append(timer() - began)
    return min(seconds)


_PIECE = 1 << 20
_MASK = (1 << 31) - 1


def fill(tensor: torch.Tensor, seed: int, name: str, bound: float) -> None:
    """Fill a float32 tensor with numbers uniform in [-bound, bound), as this name has them for this seed."""
    digest = hashlib.sha256(f"starling weights/{seed}/{name}".encode()).digest()
    first, second = (int.from_bytes(digest[low : low + 4], "big") & _MASK for low in (0, 4))
    flat, scale = tensor.detach().view(-1), torch.tensor(bound / (1 << 23), dtype=torch.float32)
    for low in range(0, len(flat), _PIECE):
        piece = flat[low : low + _PIECE]
        x = torch.arange(low, low + len(piece), dtype=torch.int64) & _MASK
        x = (x * 0x2545F491) & _MASK
        x = (((x ^ (x >> 15)) ^ first) * 0x5BD1E995) & _MASK
        x = (((x ^ (x >> 13)) + second) * 0x27D4EB2F) & _MASK
        piece.copy_((((x ^ (x >> 16)) >> 7) - (1 << 23)).float() * scale)


def draw_weights(module: nn.Module, seed: int) -> None:
    """Draw all weights: of linear layers within ±1/√inputs, of embeddings uniform with deviation 1, of norms ones."""
    for path, each in module.named_modules():
        if isinstance(each, nn.Linear):
            fill(each.weight, seed, f"{path}.weight", each.in_features**-0.5)
        elif isinstance(each, nn.Embedding):
            fill(each.weight, seed, f"{path}.weight", math.sqrt(3))
        elif isinstance(each, nn.RMSNorm):
            nn.init.ones_(each.weight)
