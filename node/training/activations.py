"""How activations and gradients travel between stages: the table `CODECS`, and the payloads of a run's microbatches.

A sender refuses with `LeaseLost` what it cannot encode in finite numbers, and a receiver with `BadPayload` what it
cannot decode to them. So the receiver blames only a peer that has broken the format.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from node.tasks.gpt_presets import VOCABULARY
from node.tasks.gpt_stage import ActivationShape
from protocols.base import BadPayload, Buffer
from protocols.pipeline.job import LeaseLost, Payload, StageSizes
from protocols.registry import activation_bytes

_NOT_FINITE = "an activation or gradient that is not finite"


class RowCodec(Protocol):
    """Turns float32 (tokens, width) into bytes and back. `protocols.registry.ACTIVATION_CODECS` has their number."""

    def encode(self, rows: torch.Tensor) -> bytes:
        """Of a tensor on the CPU. Raises `LeaseLost` if the encoded numbers would not be finite."""

    def decode(self, data: Buffer, width: int) -> torch.Tensor:
        """Of data of the right size. Raises `BadPayload` if they break the format, or are not finite."""


def _is_finite(tensor: torch.Tensor) -> bool:
    """As `torch.isfinite` of all, in a fifth of the time: `amax` keeps nan."""
    return math.isfinite(tensor.abs().amax())


@dataclass(frozen=True, slots=True)
class PlainCodec:
    dtype: torch.dtype

    def encode(self, rows: torch.Tensor) -> bytes:
        encoded = rows.to(self.dtype)
        if not _is_finite(encoded):
            raise LeaseLost(_NOT_FINITE)
        return raw(encoded)

    def decode(self, data: Buffer, width: int) -> torch.Tensor:
        encoded = torch.frombuffer(bytearray(data), dtype=self.dtype)
        if not _is_finite(encoded):
            raise BadPayload(_NOT_FINITE)
        return encoded.float().view(-1, width)


class Int8Codec:
    """A float32 scale for each row, its largest magnitude / 127; all scales, then the codes -127..127, to nearest."""

    def encode(self, rows: torch.Tensor) -> bytes:
        scales = rows.abs().amax(1, keepdim=True) / 127
        if not bool(torch.isfinite(127 * scales).all()):
            raise LeaseLost(_NOT_FINITE)
        codes = (rows / scales).round_().clamp_(-127, 127)  # a scale below the normal numbers may be too small
        codes.masked_fill_(scales == 0, 0.0)  # rows of zeros, or of numbers whose scale is rounded to 0
        return raw(scales) + raw(codes.to(torch.int8))

    def decode(self, data: Buffer, width: int) -> torch.Tensor:
        tokens = len(data) // (width + 4)
        flat = torch.frombuffer(bytearray(data), dtype=torch.int8)
        scales, codes = flat[: 4 * tokens].view(torch.float32).unsqueeze(1), flat[4 * tokens :].view(tokens, width)
        if not bool(((scales >= 0) & torch.isfinite(127 * scales)).all()):
            raise BadPayload("a scale that is negative or not finite")
        if int(codes.min()) < -127:
            raise BadPayload("the code -128, which no sender makes")
        if bool(codes[scales[:, 0] == 0].any()):
            raise BadPayload("a code in a row whose scale is 0")
        return codes * scales


CODECS: Mapping[str, RowCodec] = {
    "fp32": PlainCodec(torch.float32),
    "bf16": PlainCodec(torch.bfloat16),
    "int8": Int8Codec(),
}


@dataclass(frozen=True, slots=True)
class ActivationCodec:
    """The payloads of a run's microbatches: activations and gradients (rows, positions, width) are float32."""

    shape: ActivationShape
    activations: str = "bf16"  # keys of `CODECS`
    gradients: str = ""  # empty: as activations

    @property
    def sizes(self) -> StageSizes:
        """Targets are int32, the logits of one position float32 (rows, classes)."""
        tokens, rows, width = self.shape.tokens, self.shape.rows, self.shape.width
        activation, gradient = (activation_bytes(self._name(payload), tokens, width) for payload in _TENSORS)
        return StageSizes(activation, gradient, 4 * tokens, 4 * rows * VOCABULARY, tokens)

    def encode(self, tensor: torch.Tensor, payload: Payload = Payload.ACTIVATION) -> bytes:
        """Raises `LeaseLost` if it is not finite: no other peer is to blame for what this one has computed."""
        return CODECS[self._name(payload)].encode(tensor.detach().cpu().flatten(0, 1))

    def decode(self, data: Buffer, payload: Payload = Payload.ACTIVATION) -> torch.Tensor:
        if len(data) != (due := self.sizes.of(payload)):
            raise BadPayload(f"an {payload.name.lower()} of {len(data)} bytes where {due} are due")
        shape = self.shape
        flat = CODECS[self._name(payload)].decode(data, shape.width)
        return flat.view(shape.rows, shape.positions, shape.width)

    def check(self, data: Buffer, payload: Payload) -> None:
        """Raise `BadPayload` if another peer has sent an activation or gradient that does not decode."""
        if payload in _TENSORS:
            self.decode(data, payload)

    def encode_targets(self, targets: torch.Tensor) -> bytes:
        return raw(targets.to(torch.int32))

    def decode_targets(self, data: Buffer, classes: int) -> torch.Tensor:
        """int64 (rows, positions), each in 0..classes-1. Raises `BadPayload`: wrong size, or out of range."""
        if len(data) != (due := self.sizes.target_bytes):
            raise BadPayload(f"targets of {len(data)} bytes where {due} are due")
        targets = torch.frombuffer(bytearray(data), dtype=torch.int32).long()
        if not bool(((targets >= 0) & (targets < classes)).all()):
            raise BadPayload("targets that are not in the vocabulary")
        return targets.view(self.shape.rows, self.shape.positions)

    def _name(self, payload: Payload) -> str:
        return self.gradients or self.activations if payload is Payload.GRADIENT else self.activations


_TENSORS = Payload.ACTIVATION, Payload.GRADIENT


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
