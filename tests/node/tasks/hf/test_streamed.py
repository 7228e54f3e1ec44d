"""A data set in windows: each batch depends on seed and position alone, and only two windows are on the disk."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from node.runtime import notes
from node.tasks.hf import streamed
from node.tasks.hf.data_set import DataSet, HubFile, NotFetched, chosen, find_data_set
from node.tasks.hf.rows import PreparedData, RowCounts, Rows
from node.tasks.hf.settings import ModelError
from node.tasks.hf.streamed import StreamedRows, windows

FILES = tuple(HubFile(f"part-{number}.jsonl", 4 * 16 * 5) for number in range(6))  # five batches each


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
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., StreamedRows]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(streamed, "WINDOW_BYTES", 2 * FILES[0].size)
    monkeypatch.setattr(streamed, "RETRY_SECONDS", (0.0, 0.0))
    return partial(
        StreamedRows, DataSet("org/set", "0" * 40, FILES), prepare, step_batches=1, batch_tokens=16, fetcher=fetch
    )


@given(
    sizes=st.lists(st.integers(1, streamed.WINDOW_BYTES), min_size=1, max_size=30),
    seed=st.integers(0, 3),
    first=st.integers(0, 1 << 40),
    batches=st.integers(1, 5),
)
def test_windows_hold_every_file_once_and_follow_each_other(
    sizes: list[int], seed: int, first: int, batches: int
) -> None:
    """None is small if there are several, and no step has batches of two."""
    files = [HubFile(f"{number}.txt", size) for number, size in enumerate(sizes)]
    found, first = windows(files, seed, 0, first * batches, batches, 1 << 20), first * batches
    assert sorted(file.name for each in found for file in each.files) == sorted(each.name for each in files)
    for each in found:
        assert each.first == first and each.batches >= 1 and each.batches % batches == 0
        assert len(found) == 1 or sum(file.size for file in each.files) >= streamed.WINDOW_BYTES
        first += each.batches


def test_batch_depends_on_seed_and_position_alone(opened: Callable[[], StreamedRows]) -> None:
    """In order, after a restart, backwards and by two that take turns; all rows come before one comes again."""
    one, seen = opened(), list[torch.Tensor]()
    for position in range(60):
        seen.append(one.batch(7, position, 2)[0])
        assert torch.equal(seen[-1], one.batch(7, position, 2)[0])
    late, other = opened(), opened()
    for position in (59, 30, 12, 3, 36):
        assert torch.equal(late.batch(7, position, 2)[0], seen[position])
        other.batch(8, position, 2)
        assert torch.equal(other.batch(7, position, 2)[0], seen[position])
    for low in (0, 30):
        drawn = torch.cat(seen[low : low + 30])[:, 0].tolist()
        assert sorted(drawn) == sorted([*range(6)] * 10)


def test_files_are_gone_once_they_are_read(opened: Callable[[], StreamedRows], tmp_path: Path) -> None:
    rows = opened()
    for position in range(0, 40, 5):
        rows.batch(0, position, 2)
        assert rows._next
        rows._next[1].result()
        assert not list(tmp_path.rglob("part-*"))


def test_ranks_fetch_each_window_once(opened: Callable[..., StreamedRows]) -> None:
    """Whichever comes first; all see the same rows, and the files are gone once the last has mapped them."""
    fetched, lone = list[str](), opened()

    def counted(data_set: DataSet, file: HubFile, place: Path) -> Path:
        fetched.append(file.name)
        return fetch(data_set, file, place)

    home = streamed.new_home()
    ranks = [opened(fetcher=counted, shared=home, ranks=3) for _ in range(3)]
    for position in range(30):
        for rank in (ranks[position // 10], *ranks):
            assert torch.equal(rank.batch(7, position, 2)[0], lone.batch(7, position, 2)[0])
    for rank in ranks:
        assert rank._next
        rank._next[1].result(10)
    assert sorted(fetched) == sorted([*(each.name for each in FILES), *fetched[-2:]]), "and the window that follows"
    assert not [*home.rglob("part-*")]


def test_training_waits_for_a_hub_that_is_away(
    opened: Callable[[], StreamedRows], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notes, "_is_quiet", True)  # as in any rank but the first
    """The first window must come; later ones are asked for until they do, and `ready` says when."""
    rows, away, refused = opened(), threading.Event(), threading.Event()

    def unsure(data_set: DataSet, file: HubFile, place: Path) -> Path:
        if away.is_set():
            refused.set()
            raise NotFetched("no route")
        return fetch(data_set, file, place)

    rows._fetch = unsure
    position = len(rows.open(0).sample)
    assert rows._next
    rows._next[1].result()
    away.set()
    while rows.ready(0, position):
        rows.batch(0, position, 2)
        position += 1
    assert 10 < position < 40 and refused.wait(10)
    away.clear()
    assert rows._next
    rows._next[1].result(10)
    assert rows.ready(0, position) and len(rows.batch(0, position, 2)[0]) == 2
    assert "no route; again in 0 s" in capsys.readouterr().err
    away.set()
    late = opened()
    late._fetch = unsure
    with pytest.raises(NotFetched, match="no route"):
        late.open(1)


def test_window_that_cannot_be_read_is_left_out(
    opened: Callable[[], StreamedRows], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notes, "_is_quiet", True)  # as in any rank but the first
    rows = opened()
    rows._prepare = lambda files, home: (_ for _ in ()).throw(ModelError("not JSON"))
    with pytest.raises(ModelError, match="not JSON"):
        rows.open(0)
    rows._prepare = prepare
    first = rows.open(0).rows
    assert rows._next
    rows._next[1].result()
    rows._next, rows._prepare = None, lambda files, home: (_ for _ in ()).throw(ModelError("not JSON"))
    assert rows.open(0, 10).rows is first
    assert "warning: not JSON; the rows before it are used again" in capsys.readouterr().err


def test_rows_that_come_twice_are_told_once(
    opened: Callable[[], StreamedRows], capsys: pytest.CaptureFixture[str]
) -> None:
    rows = opened()
    rows._prepare = lambda files, home: prepare(files[:1], home)  # half of what the sizes promise
    for position in range(10):
        rows.batch(0, position, 2)
    line = "the present files of org/set hold 10 rows, and 20 are due: some come twice"
    noted = [each for each in capsys.readouterr().err.splitlines() if each.startswith("note: ")]
    assert noted == [f"note: {line}"], "beside what threads of other tests, which fetch ahead, still write"


def test_directory_of_a_process_that_has_ended_is_removed(opened: Callable[[], StreamedRows], tmp_path: Path) -> None:
    left = tmp_path / "starling" / "stream-left"
    left.mkdir(parents=True)
    one, other = opened(), opened()
    one.open(0)
    other.open(1)
    assert not left.exists()
    one.batch(0, 25, 2)


def test_files_of_one_kind_are_taken_and_no_descriptions() -> None:
    names = ("README.md", "a.jsonl", "b.parquet", "data/c.parquet", "dataset_infos.json", "d.txt", "e.bin")
    files = tuple(HubFile(name, 100) for name in names)
    taken = lambda pattern, is_chat, some=files: [each.name for each in chosen(some, pattern, is_chat)[0]]  # noqa: E731
    assert taken(None, False) == ["b.parquet", "data/c.parquet"]
    assert taken("data/*", False) == ["data/c.parquet"] and taken("*.txt", False) == ["d.txt"]
    assert taken("*.txt", True) == [] and taken(None, True, files[:2]) == ["a.jsonl"]
    assert taken(None, False, (files[0], files[5])) == ["d.txt"] and taken(None, True, (files[0], files[5])) == []
    splits = tuple(HubFile(f"data/{name}-0.JSONL.gz", 100) for name in ("test", "train", "validation"))
    assert chosen(splits, None, True) == (splits[1:2], 2) and splits[0].tokens == 50
    assert taken("data/test*", True, splits) == ["data/test-0.JSONL.gz"]


@pytest.mark.parametrize("name", ("hub:", "hub:set", "hub:org/set@", "hub:/x/y", "hub:org/set name"))
def test_malformed_names_are_refused(name: str) -> None:
    with pytest.raises(ModelError, match="is named hub:ORG/NAME@REVISION"):
        find_data_set(Path(name), False)
