"""Text from a model in stages: the context travels through the pipeline as one microbatch, byte after byte."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import torch

from node.tasks.gpt import next_byte
from node.tasks.gpt_presets import VOCABULARY
from node.tasks.gpt_stage import ActivationShape
from protocols.base import BadPayload, Buffer


async def generate(
    prompt: bytes,
    tokens: int,
    temperature: float,
    seed: int,
    logits: Callable[[bytes, int], Awaitable[bytes]],
    shape: ActivationShape,
) -> bytes:
    """Continue `prompt` by `tokens` bytes, as `Gpt.generate` does. Of a long prompt only the last `positions` are used.

    Args:
        logits: takes the inputs of one microbatch, uint8 (rows * positions), and a position, counted from 1. Returns
            that position's logits, float32 (rows, 256). The text is in row 0; the rest is zeros, which no used position
            sees.
        shape: of a microbatch.

    Raises:
        ValueError: the prompt is empty.
        BadPayload: the logits have a wrong size, or are not finite.
    """
    if not prompt:
        raise ValueError("the prompt is empty")
    generator = torch.Generator().manual_seed(seed)
    text = bytearray(prompt[-shape.positions :])
    start = len(text)
    for _ in range(tokens):
        seen = bytes(text[-shape.positions :])
        answer = await logits(seen.ljust(shape.tokens, b"\0"), len(seen))
        text.append(next_byte(_first_row(answer, shape.rows), temperature, generator))
    return bytes(text[start:])


def _first_row(logits: Buffer, rows: int) -> torch.Tensor:
    """float32 (256).

    Raises:
        BadPayload: wrong size, or not finite.
    """
    if len(logits) != 4 * rows * VOCABULARY:
        raise BadPayload(f"logits of {len(logits)} bytes where {4 * rows * VOCABULARY} are due")
    row = torch.frombuffer(bytearray(logits), dtype=torch.float32)[:VOCABULARY]
    if not bool(torch.isfinite(row).all()):
        raise BadPayload("logits that are not finite")
    return row
