"""A compute whose workers are forked, and small models."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from node.runtime.compute import ThreadCompute
from tests.support import warm
from tests.support.rank_groups import LOADED
from tests.support.small_models import story, write_model


@pytest_asyncio.fixture
async def compute(request: pytest.FixtureRequest) -> AsyncIterator[ThreadCompute]:
    loaded = LOADED if request.node.get_closest_marker("long") else ()
    async with warm.forked_workers(*loaded), ThreadCompute() as made:
        yield made


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Write a small model when it is first asked for."""
    home = tmp_path_factory.mktemp("models")
    (home / "story.txt").write_text(story(600))

    def folder(kind: str) -> Path:
        if not (home / kind).exists():
            settings = write_model(home / kind, kind) / "config.json"
            settings.write_text(settings.read_text().replace('_pdrop": 0.1', '_pdrop": 0.0'))  # gpt2's dropout
        return home / kind

    return folder
