"""The text: its files, its held-out part, and streams that resume."""

import sysconfig
from pathlib import Path

import pytest
import torch

from node.tasks.text import HELD_OUT_BYTES, Text, held_out, load
from tests.support.refusals import one_line


@pytest.fixture(scope="module")
def library() -> Text:
    return load()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """200 files in folders, whose text names them, and a hidden file, which must not be read."""
    for number in range(200):
        place = tmp_path / f"part{number % 7}"
        place.mkdir(exist_ok=True)
        (place / f"{number:03}.txt").write_text(f"<{number:03}>" * 40)
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("hidden")
    return tmp_path


def numbers(part: torch.Tensor) -> list[int]:
    return [int(word) for word in bytes(part.tolist()).decode().replace("<", "").split(">")[:-1]]


def test_folder_is_split_by_file(folder: Path) -> None:
    text = load(folder)
    training, sample = numbers(text.training), numbers(text.held_out)
    assert set(training) | set(sample) == set(range(200)) and not set(training) & set(sample)
    assert set(sample) == {n for n in range(200) if held_out(f"part{n % 7}/{n:03}.txt")} != set()
    assert len(sample) == 40 * len(set(sample))
    assert training == sorted(training, key=lambda n: f"part{n % 7}/{n:03}.txt")


def test_held_out_split_is_stable() -> None:
    names = ("abc.py", "asyncio/events.py", "json/decoder.py", *(f"f{n}" for n in range(100)))
    assert [name for name in names if held_out(name)] == ["f4", "f18", "f41", "f46", "f61", "f90"]


def test_standard_library_is_loaded_without_its_tests(library: Text) -> None:
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages"}
    files = [file.relative_to(root) for file in root.rglob("*.py")]
    kept = [file.as_posix() for file in files if not skipped & set(file.parts)]
    training = [name for name in kept if not held_out(name)]
    assert len(library.training) == sum((root / name).stat().st_size for name in training) > 1 << 20
    sample = b"".join((root / name).read_bytes() for name in sorted(kept) if held_out(name))
    assert HELD_OUT_BYTES == 64 * 4096
    blocks = [(len(sample) - 4096) * block // 63 for block in range(64)]
    expected = b"".join(sample[low : low + 4096] for low in blocks) if len(sample) > HELD_OUT_BYTES else sample
    assert bytes(library.held_out.tolist()) == expected
    first = (root / min(training)).read_bytes()
    assert bytes(library.training[: len(first)].tolist()) == first


def lines(first: int, last: int) -> bytes:
    return b"".join(b"%d apples and %d pears, %d\n" % (n, n * n % 97, n * n * n % 89) for n in range(first, last))


def blocks_of(part: torch.Tensor) -> set[bytes]:
    return {each for each in bytes(part.tolist()).splitlines() if each}


def test_held_out_blocks_of_a_file_stay_so_when_it_grows(tmp_path: Path) -> None:
    """For a founder that starts again, and for a joiner with one more file, with the run's sample and without."""
    file, data = tmp_path / "book.txt", lines(0, 2000)
    file.write_bytes(data)
    first = load(file)
    assert len(first.training) + len(first.held_out) == len(data) and len(first.held_out) >= len(data) // 16
    sample = tmp_path / "held-out.bin"
    sample.write_bytes(bytes(first.held_out.tolist()))
    file.write_bytes(lines(-30, 0) + data[:20_000] + b"one more line\n" + data[20_000:] + lines(2000, 3000))
    (tmp_path / "more.txt").write_bytes(lines(5000, 5200))
    for grown in (load(file, sample), load(tmp_path, sample)):
        assert not blocks_of(grown.training) & blocks_of(first.held_out)
        assert len(blocks_of(first.training) - blocks_of(grown.training)) < 80, "at most a block or two"
    file.write_bytes(b"x" * 1600)  # too short for blocks
    assert [len(each) for each in (load(file).training, load(file).held_out)] == [1500, 100]
    file.write_bytes(bytes(20 * HELD_OUT_BYTES).replace(b"\0", b"x"))
    assert len(load(file).held_out) == HELD_OUT_BYTES


def test_stream_resumes_at_any_position(folder: Path) -> None:
    text, again = load(folder), load(folder)
    draws = [text.windows(7, position, 4, 33) for position in range(6)]
    assert all(draw.shape == (4, 33) and draw.dtype == torch.int64 for draw in draws)
    for position in (5, 0, 3):
        assert torch.equal(again.windows(7, position, 4, 33), draws[position])
    assert len({tuple(draw.flatten().tolist()) for draw in draws}) == 6
    assert not torch.equal(text.windows(8, 0, 4, 33), draws[0])


def test_windows_reach_both_ends() -> None:
    text = Text(torch.arange(20, dtype=torch.uint8), torch.arange(100, 120, dtype=torch.uint8))
    drawn = {int(row[0]) for position in range(100) for row in text.windows(0, position, 4, 16)}
    assert drawn == {0, 1, 2, 3, 4}


def test_held_out_windows_are_spread_without_overlap() -> None:
    text = Text(torch.zeros(50, dtype=torch.uint8), torch.arange(100, dtype=torch.uint8))
    windows = text.held_out_windows(4, 10)
    assert windows[:, 0].tolist() == [0, 30, 60, 90] and windows[-1].tolist() == list(range(90, 100))
    for rows in (7, 10, 64):
        flat = text.held_out_windows(rows, 10).flatten().tolist()
        assert len(flat) == len(set(flat)) == min(rows, 10) * 10


def test_text_shorter_than_a_window_is_rejected() -> None:
    text = Text(torch.zeros(50, dtype=torch.uint8), torch.zeros(20, dtype=torch.uint8))
    text.require(20)
    with pytest.raises(ValueError, match="the held-out text has 20 bytes: a window takes 21"):
        text.require(21)


def test_bad_paths_give_one_line_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "short").write_bytes(b"ten bytes.")
    (tmp_path / "nothing").mkdir()
    cases = {
        "absent": f"there is no file or folder {tmp_path / 'absent'} (it is missing): give texts by --data",
        "empty": f"{tmp_path / 'empty'} is empty: give a file that contains text",
        "short": f"{tmp_path / 'short'} has only 10 bytes of text",
        "nothing": f"the folder {tmp_path / 'nothing'} contains no text to take: give texts by --data",
        "x" * 300: f"{tmp_path / ('x' * 300)} cannot be read (File name too long)",
    }
    for name, message in cases.items():
        assert one_line(ValueError, load, tmp_path / name) == message

    def refuse(path: Path, *arguments: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ValueError, match=r"/(empty|short) cannot be read \(Permission denied\)$"):
        load(tmp_path)


def test_large_folder_is_copied_once_and_mapped(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    small = load(folder)
    cache = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setattr("node.tasks.text._IN_MEMORY_BYTES", 100)
    for _ in range(2):
        large = load(folder)
        assert torch.equal(large.training, small.training) and torch.equal(large.held_out, small.held_out)
        kept = {file.name: file.stat().st_mtime_ns for file in (cache / "starling").iterdir()}
        assert len(kept) == 2 and all(name.endswith(".text") for name in kept)
    large.training.zero_()
    assert torch.equal(load(folder).training, small.training), "changes of the loaded text do not reach the copy"
    training = next(n for n in range(200) if not held_out(f"part{n % 7}/{n:03}.txt"))
    (folder / f"part{training % 7}" / f"{training:03}.txt").write_text("changed")
    assert len(load(folder).training) < len(small.training)
    monkeypatch.setattr("os.replace", lambda source, target: (_ for _ in ()).throw(OSError(28, "No space")))
    (folder / "another.txt").write_text("changed")
    with pytest.raises(ValueError, match=r"^cannot read .*: No space$"):
        load(folder)
    assert all(file.name.endswith(".text") for file in (cache / "starling").iterdir()), "no unfinished file is left"


def test_given_sample_replaces_own_held_out_text(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    sample = tmp_path_factory.mktemp("run") / "sample"
    sample.write_bytes(b"the run's own" * 10)
    text, own = load(folder, sample), load(folder)
    assert bytes(text.held_out.tolist()) == sample.read_bytes() and torch.equal(text.training, own.training)
    sample.write_bytes(bytes(HELD_OUT_BYTES + 1))
    assert len(load(folder, sample).held_out) == HELD_OUT_BYTES
    for path, why in ((folder, "Is a directory"), (folder / "absent", "No such file or directory")):
        assert one_line(ValueError, load, folder, path) == f"cannot read {path}: {why}"
