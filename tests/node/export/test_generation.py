"""Text from a kept model: the module's own, streamed, and without control characters for a terminal."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from node.config.run_config import load_run
from node.export.fine_tuned import harmless, write
from node.export.trained_model import load_trained
from node.tasks.gpt import Gpt
from node.tasks.hf.settings import ModelError
from tests.support.statedir_fixtures import keep, kept_gpt


def test_text_is_emitted_as_soon_as_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept_gpt(tmp_path)
    text, steps = "aé日\x1b[2Jz".encode(), 0

    def follow(self: Gpt, seen: list[int]) -> torch.Tensor:
        nonlocal steps
        steps += 1
        return torch.nn.functional.one_hot(torch.tensor(text[steps - 1]), 256).float()

    monkeypatch.setattr(Gpt, "_next", follow)
    emitted = [(steps, piece) for piece in write(load_trained([tmp_path]), b"x", len(text), 0.0, 0) if piece]
    assert emitted == [(1, "a"), (3, "é"), (6, "日"), (7, "\ufffd"), (8, "["), (9, "2"), (10, "J"), (11, "z")]


def test_huge_prompt_is_truncated_to_its_end(tmp_path: Path) -> None:
    module = kept_gpt(tmp_path)
    prompt = bytes(range(32, 127)) * 10_000
    for temperature, seed in ((0.0, 0), (1.0, 5)):
        wanted = module.generate(prompt[-module.shape.context :], 5, temperature, seed)
        assert "".join(write(load_trained([tmp_path]), prompt, 5, temperature, seed)) == harmless(
            wanted.decode(errors="replace")
        )


def test_impossible_generation_gives_one_line_error(tmp_path: Path) -> None:
    kept_gpt(tmp_path / "gpt")
    with pytest.raises(ModelError, match=r"^the prompt is empty: "):
        list(write(load_trained([tmp_path / "gpt"]), b"", 5, 0.0, 0))
    keep(tmp_path / "own", load_run(None, {"task": "mine:make"}, ["butterfly"]), torch.nn.Linear(1, 1))
    with pytest.raises(ModelError, match=r"^this run trains mine:make, which generates no text: only gpt and hf do$"):
        list(write(load_trained([tmp_path / "own"]), b"a", 5, 0.0, 0))


def test_newlines_and_tabs_are_kept() -> None:
    assert harmless("a\tb\nc\r\x00\x9b\u202ed") == "a\tb\nc\ufffd\ufffd\ufffd\ufffdd"
