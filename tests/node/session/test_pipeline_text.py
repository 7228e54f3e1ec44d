"""Text from the logits of a pipeline: what is asked, what is drawn, what is refused."""

from __future__ import annotations

import math

import pytest
import torch

from node.session.pipeline_session import generate
from node.tasks.gpt_stage import ActivationShape
from protocols.base import BadPayload

SHAPE = ActivationShape(rows=2, positions=4, width=8)


async def test_context_is_the_first_row_of_a_whole_microbatch() -> None:
    """The byte after the last one asked for is the likeliest: here, always one more than the last byte."""
    asked: list[tuple[bytes, int]] = []

    async def logits(tokens: bytes, position: int) -> bytes:
        asked.append((tokens, position))
        rows = torch.zeros(2, 256)
        rows[0, tokens[position - 1] + 1] = 1.0
        return rows.numpy().tobytes()

    assert await generate(b"abc", 3, 0.0, 0, logits, SHAPE) == b"def"
    assert asked == [(b"abc\0\0\0\0\0", 3), (b"abcd\0\0\0\0", 4), (b"bcde\0\0\0\0", 4)]
    assert await generate(b"123456789abc", 1, 0.0, 0, logits, SHAPE) == b"d" and asked[-1] == (b"9abc\0\0\0\0", 4)


async def test_bytes_are_drawn_by_the_seed() -> None:
    async def logits(tokens: bytes, position: int) -> bytes:
        return bytes(4 * 2 * 256)

    drawn = [await generate(b"a", 20, 1.0, seed, logits, SHAPE) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2] and len(drawn[0]) == 20


async def test_bad_logits_are_refused() -> None:
    answer = b""

    async def logits(tokens: bytes, position: int) -> bytes:
        return answer

    with pytest.raises(ValueError, match="prompt is empty"):
        await generate(b"", 1, 0.0, 0, logits, SHAPE)
    with pytest.raises(BadPayload, match="logits of 0 bytes where 2048 are due"):
        await generate(b"a", 1, 0.0, 0, logits, SHAPE)
    for value in (math.nan, math.inf):
        answer = torch.full((2, 256), value).numpy().tobytes()
        with pytest.raises(BadPayload, match="not finite"):
            await generate(b"a", 1, 1.0, 0, logits, SHAPE)
