"""The held-out microbatches of the first stage."""

from __future__ import annotations

import pytest
import torch

from node.tasks.gpt_stage import GptStageTask, block_names
from node.tasks.partition import BlockCost, cut
from node.tasks.text import Text
from protocols.pipeline.held_out import MAX_SAMPLES
from tests.support.outer_stages import PRESET

ROWS, WIDTH = 3, 13


@pytest.mark.parametrize("size, count", ((20, 1), (ROWS * WIDTH * 5 + 7, 5), (ROWS * WIDTH * 100, MAX_SAMPLES)))
def test_held_out_microbatches_spread_over_the_text(size: int, count: int) -> None:
    """All of one shape, from the text's first byte to its last one if it has two windows; a short text repeats."""
    held_out = torch.randint(256, (size,), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    cuts = cut([BlockCost(name, 1.0, 2.0, 4) for name in block_names(PRESET.shape)], 2)
    task = GptStageTask(PRESET, cuts, 0, 0, Text(torch.zeros(50, dtype=torch.uint8), held_out))
    batches = [task.held_out(index) for index in range(count)]
    assert task.held_out(count) is None and task.held_out(-1) is None
    windows = torch.cat([torch.cat((batch[0], batch[1][:, -1:]), 1) for batch in batches if batch])
    assert windows.shape == (count * ROWS, WIDTH)
    assert torch.equal(windows[0], held_out[:WIDTH].long())
    if size >= ROWS * WIDTH:
        assert torch.equal(windows[-1], held_out[-WIDTH:].long()) and len(windows.unique(dim=0)) == len(windows)
