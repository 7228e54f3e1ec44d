"""The trained model in a peer's directory, and the one-line errors where there is none."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest
from torch import nn

from node.config.run_config import load_run
from node.export import trained_model
from node.export.trained_model import load_trained
from node.storage.checkpoint import Checkpoint, CheckpointError, newest
from node.tasks.hf.settings import ModelError
from tests.support.refusals import one_line
from tests.support.statedir_fixtures import keep, kept_gpt


def refusal(directory: Path) -> str:
    return one_line(ModelError, load_trained, [directory])


def test_unmeasured_loss_is_nan(tmp_path: Path) -> None:
    keep(tmp_path, load_run(None, {"task": "mine:make"}, ["butterfly"]), nn.Linear(2, 2), loss=None)
    reports = tmp_path / "rounds.jsonl"
    reports.write_text(reports.read_text() + '[1]\n{"lineage": 3}\n{"lin')
    assert math.isnan(load_trained([tmp_path]).held_out_loss)
    reports.unlink()
    assert math.isnan(load_trained([tmp_path]).held_out_loss)


def test_missing_model_gives_one_line_error(tmp_path: Path) -> None:
    assert refusal(tmp_path / "absent").endswith("is not a directory: name a peer's state directory by --state-dir")
    assert "contains no run: name the state directory of a peer" in refusal(tmp_path)
    kept_gpt(tmp_path / "peer")
    for path in (tmp_path / "peer" / "checkpoints").rglob("*.safetensors"):
        path.write_bytes(path.read_bytes()[:-1])
    line = refusal(tmp_path / "peer")
    assert "holds no whole checkpoint" in line and "is damaged: outer.safetensors is not what it was" in line
    shutil.rmtree(tmp_path / "peer" / "checkpoints")
    assert "holds no whole checkpoint: a peer makes its first one after some rounds" in refusal(tmp_path / "peer")
    manifest = tmp_path / "peer" / "manifest.bin"
    manifest.write_bytes(manifest.read_bytes()[:-1])
    assert "manifest.bin: the envelope is damaged" in refusal(tmp_path / "peer")
    manifest.unlink()
    manifest.mkdir()
    assert "manifest.bin cannot be read: Is a directory" in refusal(tmp_path / "peer")


def test_checkpoint_of_another_run_is_rejected(tmp_path: Path) -> None:
    kept_gpt(tmp_path / "a")
    kept_gpt(tmp_path / "b")
    shutil.copy(tmp_path / "a" / "manifest.bin", tmp_path / "b")
    assert "its peer has made no checkpoint of the new run yet" in refusal(tmp_path / "b")


def test_checkpoint_vanishing_during_read_is_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept_gpt(tmp_path, 5)
    tries: list[Path] = []

    def gone_at_first(directory: Path) -> Checkpoint:
        tries.append(directory)
        if len(tries) < 3:
            raise CheckpointError("it has gone")
        return newest(directory)

    monkeypatch.setattr(trained_model, "newest", gone_at_first)
    assert load_trained([tmp_path]).rounds == (5,) and len(tries) == 3
