"""A stage of a real model: activations from bytes and back, gradients summed over microbatches, optimiser steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from node.tasks.base import Step
from node.tasks.flat import flatten
from node.tasks.gpt_presets import VOCABULARY
from node.tasks.gpt_stage import ActivationShape, GptStageTask
from node.tasks.recipe import Recipe
from node.training.inner_optimizer import InnerOptimizer
from protocols.base import BadPayload, Buffer, Vector
from protocols.registry import ACTIVATION_CODECS

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True, slots=True)
class ActivationCodec:
    """Turns activations (rows, positions, width), float32, into bytes and back.

    Attributes:
        name: one of `protocols.registry.ACTIVATION_CODECS`.
    """

    shape: ActivationShape
    name: str = "bf16"

    @property
    def activation_bytes(self) -> int:
        """Of one activation, or its gradient."""
        return self.shape.tokens * self.shape.width * ACTIVATION_CODECS[self.name]

    @property
    def target_bytes(self) -> int:
        """Of a microbatch's targets, int32."""
        return 4 * self.shape.tokens

    @property
    def logit_bytes(self) -> int:
        """Of the logits of one position, float32 (rows, classes)."""
        return 4 * self.shape.rows * VOCABULARY

    def encode(self, activation: torch.Tensor) -> bytes:
        """The bytes of an activation or a gradient. The receiver refuses what is not finite."""
        return _bytes(activation.detach().cpu().to(_DTYPES[self.name]))

    def decode(self, data: Buffer) -> torch.Tensor:
        """
        Raises:
            BadPayload: wrong size, or not finite.
        """
        if len(data) != self.activation_bytes:
            raise BadPayload(f"an activation of {len(data)} bytes where {self.activation_bytes} are due")
        flat = torch.frombuffer(bytearray(data), dtype=_DTYPES[self.name])
        _require_finite(flat)
        return flat.float().view(self.shape.rows, self.shape.positions, self.shape.width)

    def encode_targets(self, targets: torch.Tensor) -> bytes:
        return _bytes(targets.to(torch.int32))

    def decode_targets(self, data: Buffer, classes: int) -> torch.Tensor:
        """int64 (rows, positions), each in 0..classes-1.

        Raises:
            BadPayload: wrong size, or out of range.
        """
        if len(data) != self.target_bytes:
            raise BadPayload(f"targets of {len(data)} bytes where {self.target_bytes} are due")
        targets = torch.frombuffer(bytearray(data), dtype=torch.int32).long()
        if not bool(((targets >= 0) & (targets < classes)).all()):
            raise BadPayload("targets that are not in the vocabulary")
        return targets.view(self.shape.rows, self.shape.positions)


def check_activation(data: Buffer, name: str) -> None:
    """Check what another peer has sent, without decoding it.

    Args:
        name: how activations travel: one of `protocols.registry.ACTIVATION_CODECS`.

    Raises:
        BadPayload: it is not finite.
    """
    _require_finite(torch.frombuffer(data, dtype=_DTYPES[name]))


def _require_finite(flat: torch.Tensor) -> None:
    if not bool(torch.isfinite(flat).all()):
        raise BadPayload("an activation or gradient that is not finite")


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


@dataclass(slots=True)
class _Accumulated:
    """Microbatches since the last step."""

    count: int = 0
    tokens: int = 0
    loss: float = 0.0
    losses: int = 0

    def add(self, tokens: int, loss: float | None) -> None:
        self.count += 1
        self.tokens += tokens
        if loss is not None:
            self.loss += loss
            self.losses += 1


class StageLearner:
    """A `StageCompute` on a stage of the built-in model.

    No graph is kept between a forward and its backward: the backward computes the forward again.

    Attributes:
        position: number of batches drawn so far, in stage 0.
    """

    def __init__(
        self,
        task: GptStageTask,
        recipe: Recipe,
        codec: ActivationCodec,
        seed: int = 0,
        allocate: Callable[[int], Vector] | None = None,
        resume: bool = False,
    ) -> None:
        """
        Args:
            seed: of this peer's stream of data.
            allocate, resume: as in `flatten`.
        """
        flat = flatten(task.module, allocate, resume)
        self.layout, self.vectors = flat.layout, flat.vectors
        self.position = 0
        self._task, self._codec, self._seed = task, codec, seed
        self._device = flat.vectors[0].device
        self._optimizer = InnerOptimizer(flat, recipe)
        self._accumulated = _Accumulated()

    # -- microbatches -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def forward(self, x: Buffer) -> bytes:
        return self._codec.encode(self._task.module(self._decoded(x)))

    def backward(self, x: Buffer, gradient: Buffer) -> bytes:
        taken, given = self._decoded(x).requires_grad_(), self._decoded(gradient)
        self._task.module(taken).backward(given)
        self._accumulated.add(self._codec.shape.tokens, None)
        assert taken.grad is not None
        return self._codec.encode(taken.grad)

    def loss(self, x: Buffer, targets: Buffer) -> tuple[float, bytes]:
        taken = self._decoded(x).requires_grad_()
        output = self._task.module(taken)
        loss = self._task.loss(output, self._codec.decode_targets(targets, output.shape[-1]).to(self._device))
        loss.backward()  # type: ignore[no-untyped-call]
        value = float(loss.detach())
        self._accumulated.add(self._codec.shape.tokens, value)
        assert taken.grad is not None
        return value, self._codec.encode(taken.grad)

    @torch.no_grad()
    def draw(self) -> tuple[int, bytes, bytes]:
        batch, self.position = self.position, self.position + 1
        inputs, targets = self._task.batch(self._seed, batch)
        output = self._task.module(inputs.to(self._device))
        return batch, self._codec.encode(output), self._codec.encode_targets(targets)

    def finish(self, batch: int, gradient: Buffer, loss: float) -> None:
        inputs, _ = self._task.batch(self._seed, batch)  # a batch is a pure function of its number
        self._task.module(inputs.to(self._device)).backward(self._decoded(gradient))
        self._accumulated.add(inputs.numel(), loss)

    def check(self, activation: Buffer) -> None:
        check_activation(activation, self._codec.name)

    def discard(self) -> None:
        self._optimizer.clear()
        self._accumulated = _Accumulated()

    # -- evaluation and text, with the present vectors: nothing is counted, no gradient changes -----------------------

    def outer_forward(self, x: Buffer) -> bytes:
        """Of a middle stage: its output."""
        return self.forward(x)

    @torch.no_grad()
    def outer_loss(self, x: Buffer, targets: Buffer) -> float:
        """Of the last stage: the mean loss, in nats per byte."""
        output = self._task.module(self._decoded(x))
        decoded = self._codec.decode_targets(targets, output.shape[-1]).to(self._device)
        return float(self._task.loss(output, decoded))

    @torch.no_grad()
    def outer_logits(self, x: Buffer, position: int) -> bytes:
        """Of the last stage: the logits of a position, counted from 1, float32 (rows, 256).

        Raises:
            BadPayload: there is no such position.
        """
        if not 1 <= position <= self._codec.shape.positions:
            raise BadPayload(f"position {position} of {self._codec.shape.positions}")
        return _bytes(self._task.module(self._decoded(x))[:, position - 1].float().cpu())

    @torch.no_grad()
    def outer_sample(self, index: int) -> tuple[bytes, bytes] | None:
        """Of stage 0: the output and the targets of held-out microbatch `index`. None beyond the last."""
        batch = self._task.held_out(index)
        if batch is None:
            return None
        inputs, targets = batch
        output = self._task.module(inputs.to(self._device))
        return self._codec.encode(output), self._codec.encode_targets(targets)

    @torch.no_grad()
    def outer_first(self, tokens: Buffer) -> bytes:
        """Of stage 0: the output for these bytes, uint8 (rows * positions).

        Raises:
            ValueError: wrong size.
        """
        shape = self._codec.shape
        if len(tokens) != shape.tokens:
            raise ValueError(f"{len(tokens)} bytes where a microbatch has {shape.tokens}")
        inputs = torch.frombuffer(bytearray(tokens), dtype=torch.uint8).long().view(shape.rows, shape.positions)
        return self._codec.encode(self._task.module(inputs.to(self._device)))

    def _decoded(self, data: Buffer) -> torch.Tensor:
        return self._codec.decode(data).to(self._device)

    @contextmanager
    def using(self, vectors: Sequence[Vector]) -> Iterator[None]:
        """Compute with these parameters instead of the learner's own, inside the context. Nothing is copied."""
        parameters, low = list(self._task.module.parameters()), 0
        own = [parameter.data for parameter in parameters]
        for parameter in parameters:
            high = low + parameter.numel()
            parameter.data, low = vectors[0][low:high].view(parameter.shape), high
        try:
            yield
        finally:
            for parameter, data in zip(parameters, own, strict=True):
                parameter.data = data

    # -- steps --------------------------------------------------------------------------------------------------------

    def step(self, round_number: int, step: int) -> Step:
        """Take one optimiser step along the mean gradient of the microbatches; skip it if that is not finite.

        The loss is their mean, and nan in a middle stage, which measures none.
        """
        done = self._accumulated
        stepped = self._optimizer.step(round_number, step, max(1, done.count))
        self.discard()
        if not stepped:
            return Step(math.nan, 0)
        return Step(done.loss / done.losses if done.losses else math.nan, done.tokens)

    def moments(self, make: bool = False) -> dict[str, torch.Tensor]:
        """The optimiser's tensors by name; see `InnerOptimizer.moments`."""
        return self._optimizer.moments(make)

    def evaluate(self) -> float:
        """nan: a stage alone has no loss."""
        return math.nan
