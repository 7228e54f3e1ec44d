"""Checkpoints on a disk: what is in their files, and that a damaged one is recognised and not used."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from node.runtime import tensors
from node.storage.checkpoint import INNER, MANIFEST, OUTER, CheckpointError, DataCursor, encode, newest, whole
from tests.support.checkpoints import (
    ELEMENTS,
    LAYOUT,
    MOMENTS,
    RUN,
    Worker,
    checkpoints,
    keep,
    lineage_of,
    rounds,
    state,
)
from tests.support.refusals import one_line

pytestmark = pytest.mark.usefixtures("small_disk")


def test_checkpoint_round_trips(tmp_path: Path) -> None:
    """Through this project's reader, and through the library safetensors."""
    keep(tmp_path, 5)
    found, was = newest(tmp_path), state(5)
    assert (found.run, found.round, found.lineage, found.layout) == (RUN, 5, lineage_of(5), LAYOUT)
    assert found.index == was.index and found.state_root == was.root(5)
    assert found.data == DataCursor(1234, 3, 42) and found.threads == 3
    assert found.path == tmp_path / "checkpoints" / "000005-050505050505"
    assert torch.equal(found.parameters()[0], was.anchor)
    parameters, velocity = torch.empty(ELEMENTS), torch.empty(ELEMENTS)
    found.snapshot().copy(parameters, velocity)
    assert torch.equal(parameters, was.anchor) and torch.equal(velocity, was.velocity)
    moments = {name: torch.zeros_like(tensor) for name, tensor in MOMENTS.items()}
    assert found.inner
    tensors.read(found.inner, moments)
    assert all(torch.equal(moments[name], MOMENTS[name]) for name in MOMENTS)
    outer, inner = (load_file(found.path / name) for name in (OUTER, INNER))
    assert torch.equal(outer["parameters"], was.anchor) and torch.equal(outer["velocity"], was.velocity)
    assert inner.keys() == MOMENTS.keys() and all(torch.equal(inner[name], MOMENTS[name]) for name in MOMENTS)


def test_fragments_are_separate_tensors(tmp_path: Path) -> None:
    start = tensors.header(tensors.fragments(("parameters", "velocity"), (2, 3)), {})
    (tmp_path / "file").write_bytes(start + torch.arange(10.0).numpy().tobytes())
    found = load_file(tmp_path / "file")
    assert {name: tensor.tolist() for name, tensor in found.items()} == {
        "parameters.0": [0, 1],
        "parameters.1": [2, 3, 4],
        "velocity.0": [5, 6],
        "velocity.1": [7, 8, 9],
    }


def test_tensors_larger_than_one_piece(tmp_path: Path) -> None:
    wide = {"a": torch.randn(2, 200_000), "b": torch.arange(3), "c": torch.empty(0)}
    tensors.write(tmp_path / "file", wide, {"format": "x"})
    assert all(torch.equal(tensor, wide[name]) for name, tensor in load_file(tmp_path / "file").items())
    again = {name: torch.zeros_like(tensor) for name, tensor in wide.items()}
    tensors.read(tmp_path / "file", again)
    assert all(torch.equal(tensor, wide[name]) for name, tensor in again.items())
    for other in ({"a": wide["a"]}, wide | {"b": torch.arange(4)}, wide | {"b": torch.arange(3.0)}):
        with pytest.raises(tensors.Unreadable, match="its tensors are not those"):
            tensors.read(tmp_path / "file", other)


def test_checkpoint_without_worker_has_no_inner_state(tmp_path: Path) -> None:
    keep(tmp_path, 5, worker=Worker("is gone"))
    assert newest(tmp_path).inner is None and not (newest(tmp_path).path / INNER).exists()


def test_download_becomes_a_checkpoint(tmp_path: Path) -> None:
    async def main() -> None:
        async with checkpoints(tmp_path) as made:
            was = state()
            snapshot = made.snapshots.new(lineage_of(9), 9, was.index)
            assert snapshot.fresh and rounds(tmp_path) == []
            half = len(was.index.digests) // 2
            snapshot.put(0, was.anchor.numpy().tobytes())
            later = made.snapshots.new(lineage_of(9), 9, was.index)  # the download resumes after a break
            assert not later.fresh and bytes(later.chunk(0)) == was.anchor.numpy().tobytes()
            later.put(half, was.velocity.numpy().tobytes())
            made.take(later)
            assert made.snapshots.get(lineage_of(9)) is later

    asyncio.run(main())
    assert newest(tmp_path).round == 9 and newest(tmp_path).inner is None
    assert torch.equal(newest(tmp_path).parameters()[0], state().anchor)


# -- damage -----------------------------------------------------------------------------------------------------------


def test_every_bit_flip_and_truncation_is_detected(tmp_path: Path) -> None:
    keep(tmp_path, 5, 10)
    draw, warnings = random.Random(1), list[str]()
    files = sorted(newest(tmp_path).path.iterdir())
    assert [file.name for file in files] == [INNER, MANIFEST, OUTER]
    damages = [("flip", draw.choice(files)) for _ in range(300)] + [("cut", draw.choice(files)) for _ in range(30)]
    for kind, file in damages:
        data = file.read_bytes()
        if kind == "cut":
            os.truncate(file, draw.randrange(len(data)))
        else:
            place = draw.randrange(len(data))
            bad = bytearray(data)
            bad[place] ^= 1 << draw.randrange(8)
            file.write_bytes(bad)
        warnings.clear()
        found = next(whole(tmp_path, warnings.append, RUN))
        assert (
            found.round == 5
            and len(warnings) == 1
            and "000010-0a0a0a0a0a0a" in warnings[0]
            and "not used" in warnings[0]
        )
        file.write_bytes(data)
    assert newest(tmp_path).round == 10


def test_missing_checkpoint_gives_one_line_error(tmp_path: Path) -> None:
    assert one_line(CheckpointError, newest, tmp_path).endswith("holds no whole checkpoint")
    keep(tmp_path, 5)
    (newest(tmp_path).path / OUTER).unlink()
    line = one_line(CheckpointError, newest, tmp_path)
    assert "holds no whole checkpoint; " in line and "cannot be read: No such file" in line
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "checkpoints").write_bytes(b"a file")
    line = one_line(CheckpointError, newest, tmp_path / "other")
    assert "checkpoints cannot be read (Not a directory)" in line


def test_checkpoint_of_other_run_version_or_name_is_skipped(tmp_path: Path) -> None:
    keep(tmp_path, 5)
    warnings: list[str] = []
    assert (
        list(whole(tmp_path, warnings.append, "ab" * 32)) == [] and "is of another run, 5f5f5f5f5f5f" in warnings.pop()
    )
    manifest = newest(tmp_path).path / MANIFEST
    fields = json.loads(manifest.read_text())
    manifest.write_text(json.dumps(fields | {"format": 2}))
    assert (
        rounds(tmp_path) == [] and not list(whole(tmp_path, warnings.append)) and "of format 2: update" in warnings[0]
    )
    for nonsense in (b"", b"[]", b"\xff", b'{"digest": 1}', b"[" * 100_000, b"null"):
        manifest.write_bytes(nonsense)
        assert rounds(tmp_path) == []
    keep(tmp_path / "renamed", 5)
    (path := newest(tmp_path / "renamed").path).rename(path.with_name("000007-050505050505"))
    assert rounds(tmp_path / "renamed") == []


def test_checkpoint_without_thread_count_is_used(tmp_path: Path) -> None:
    keep(tmp_path, 5)
    manifest = newest(tmp_path).path / MANIFEST
    fields = json.loads(manifest.read_text())
    for changed, found in (({}, 0), ({"threads": 7}, 7), ({"threads": "7"}, None)):
        old = {name: value for name, value in fields.items() if name not in ("digest", "threads")} | changed
        manifest.write_bytes(encode(old | {"digest": hashlib.sha256(encode(old)).hexdigest()}))
        assert [each.threads for each in whole(tmp_path, lambda line: None)] == ([] if found is None else [found])
