"""Fixtures of the tests of training: a text, what makes a worker of a small GPT that trains on it, forked workers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from node.tasks.gpt_presets import GptConfig
from node.tasks.recipe import Recipe
from node.tasks.spec import GptValues, WorkerSpec
from tests.support import warm


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "book.txt"
    path.write_bytes(bytes(n * n % 97 + 20 for n in range(4000)))
    return path


@pytest.fixture
def spec(text: Path) -> WorkerSpec:
    recipe = Recipe(10, 5, learning_rate=1e-2, outer_learning_rate=0.9, outer_momentum=0.5, warmup_steps=4)
    values = GptValues(GptConfig(layers=1, width=16, heads=2, context=16), rows=2)
    return WorkerSpec(values, recipe, 3, 9, text, device="cpu", threads=1)


@pytest_asyncio.fixture
async def forked() -> AsyncIterator[None]:
    async with warm.forked_workers():
        yield
