"""A data set in windows: each batch depends on seed and position alone, and only two windows are on the disk."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from node.tasks.hf import streamed
from node.tasks.hf.rows import PreparedData, RowCounts, Rows
from node.tasks.hf.settings import HfSettings, ModelError
from node.tasks.hf.streamed import DataSet, HubFile, StreamedRows, windows

SETTINGS = HfSettings("full", context=8, rows=2)
FILES = tuple(HubFile(f"part-{number}.jsonl", 4 * 8 * 2 * 5) for number in range(5))  # five batches each


def prepare(files: list[Path], home: Path) -> PreparedData:
    """Ten rows for each file, which hold its number."""
    assert all(each.parent == home for each in files)
    numbers = torch.tensor([int(each.read_text()) for each in files], dtype=torch.int32)
    tokens = numbers.repeat_interleave(10)[:, None] + torch.zeros(1, 8, dtype=torch.int32)
    return PreparedData(Rows(tokens, torch.ones_like(tokens, dtype=torch.uint8)), RowCounts(len(tokens)), b"")


def fetch(data_set: DataSet, file: HubFile, place: Path) -> Path:
    (place / file.name).write_text(file.name[5])
    return place / file.name


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], StreamedRows]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(streamed, "WINDOW_BYTES", 2 * FILES[0].size)
    monkeypatch.setattr(streamed, "RETRY_SECONDS", (0.0, 0.0))
    return lambda: StreamedRows(DataSet("org/set", "0" * 40, FILES), SETTINGS, prepare, fetch)


@given(st.lists(st.integers(1, 1 << 20), min_size=1, max_size=30), st.integers(0, 3), st.integers(0, 1 << 40))
def test_windows_hold_every_file_once_and_follow_each_other(sizes: list[int], seed: int, first: int) -> None:
    files = [HubFile(f"{number}.txt", size) for number, size in enumerate(sizes)]
    found = windows(files, seed, 0, first, 16)
    assert sorted(file.name for each in found for file in each.files) == sorted(each.name for each in files)
    for each in found:
        assert each.first == first and each.batches >= 1
        first += each.batches


def test_batch_depends_on_seed_and_position_alone(opened: Callable[[], StreamedRows]) -> None:
    """In order, after a restart, backwards and by two that take turns; all rows come before one comes again."""
    one, seen = opened(), list[torch.Tensor]()
    for position in range(50):
        seen.append(one.batch(7, position, 2)[0])
        assert torch.equal(seen[-1], one.batch(7, position, 2)[0])
    late, other = opened(), opened()
    for position in (49, 30, 12, 3, 26):
        assert torch.equal(late.batch(7, position, 2)[0], seen[position])
        other.batch(8, position, 2)
        assert torch.equal(other.batch(7, position, 2)[0], seen[position])
    for low in (0, 25):
        drawn = torch.cat(seen[low : low + 25])[:, 0].tolist()
        assert sorted(drawn) == sorted([*range(5)] * 10)


def test_files_are_gone_once_they_are_read(opened: Callable[[], StreamedRows], tmp_path: Path) -> None:
    rows = opened()
    for position in range(25):
        rows.batch(0, position, 2)
        assert len(list(tmp_path.rglob("part-*"))) <= 2
    assert rows._next
    rows._next[1].result()
    assert not list(tmp_path.rglob("part-*"))


def test_training_waits_for_a_hub_that_is_away(
    opened: Callable[[], StreamedRows], capsys: pytest.CaptureFixture[str]
) -> None:
    """The first window must come; later ones are asked for until they do, and `ready` says when."""
    rows, here = opened(), [True]

    def unsure(data_set: DataSet, file: HubFile, place: Path) -> Path:
        if not here[0]:
            raise ConnectionError("no route")
        return fetch(data_set, file, place)

    rows._fetch = unsure
    position = rows.open(0) and 0
    assert rows._next
    rows._next[1].result()
    here[0] = False
    while rows.ready(0, position):
        rows.batch(0, position, 2)
        position += 1
    assert 10 < position < 40
    here[0] = True
    assert rows._next
    rows._next[1].result(10)
    assert rows.ready(0, position) and len(rows.batch(0, position, 2)[0]) == 2
    assert "cannot be fetched from the hub: ConnectionError: no route; again in 0 s" in capsys.readouterr().err
    here[0], late = False, opened()
    late._fetch = unsure
    with pytest.raises(ModelError, match=r"part-\d.jsonl of the data set org/set cannot be fetched"):
        late.open(1)


def test_damaged_file_ends_the_wait(opened: Callable[[], StreamedRows]) -> None:
    rows = opened()
    rows.open(0)
    rows._next = None
    rows._prepare = lambda files, home: (_ for _ in ()).throw(ModelError("not JSON"))
    position = 10
    while not rows.ready(0, position):
        time.sleep(0.01)
    with pytest.raises(ModelError, match="not JSON"):
        rows.batch(0, position, 2)


@pytest.mark.parametrize("name", ("hub:", "hub:set", "hub:org/set@", "hub:/x/y", "hub:org/set name"))
def test_malformed_names_are_refused(name: str) -> None:
    with pytest.raises(ModelError, match="is named hub:ORG/NAME@REVISION"):
        streamed.find_data_set(Path(name))
