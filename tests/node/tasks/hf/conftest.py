"""Small models, made once, and a cache that is this test's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.small_models import conversations, story, write_model


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the models qwen3, llama, gpt2 and olmoe, and the data story.txt and chat.jsonl."""
    home = tmp_path_factory.mktemp("models")
    for kind in ("qwen3", "llama", "gpt2", "olmoe"):
        write_model(home / kind, kind)
    (home / "story.txt").write_text(story(600))
    (home / "chat.jsonl").write_text(conversations(60))
    return home


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "starling"
