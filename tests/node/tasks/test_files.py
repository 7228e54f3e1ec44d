"""What people bring: each file is read as what it is, or named with a cure; a folder accounts for all of its files."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import os
import tempfile
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from node.tasks import readers
from node.tasks.files import select
from node.tasks.given_data import DataState, GivenData
from node.tasks.hf.corpus import Seen, is_held_out, joined, read_documents
from node.tasks.hf.settings import ModelError
from node.tasks.readers import LEAST, MOST, blocks
from node.tasks.text import load

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 3\n"
TEXTS = ["eins", 'zwei "und"\ndrei', "vier, 你好 🙂", ""]
ROWS = [{"text": each, "id": number} for number, each in enumerate(TEXTS)]
LINES = "".join(json.dumps(each) + "\n" for each in ROWS).encode()


def as_csv(delimiter: str = ",") -> bytes:
    file = io.StringIO()
    writer = csv.DictWriter(file, ("id", "text"), delimiter=delimiter)
    writer.writeheader()
    writer.writerows(ROWS)
    return file.getvalue().encode()


def contents(path: Path, is_chat: bool = False) -> list[object]:
    return [each.content for each in read_documents(select(path).files, is_chat)]


READ = {
    "a.jsonl": LINES,
    "B.JSONL": LINES.replace(b"\n", b"\r\n"),
    "c.NdJson": b"\xef\xbb\xbf" + LINES,
    "without a newline.jsonl": LINES[:-1],
    "list.json": json.dumps(ROWS).encode(),
    "pretty.json": json.dumps(ROWS, indent=2, ensure_ascii=False).encode(),
    "objects.json": "\n".join(json.dumps(each, indent=1) for each in ROWS).encode(),
    "lists.json": json.dumps(ROWS[:2]).encode() + b"\n" + json.dumps(ROWS[2:]).encode(),
    "list.jsonl": json.dumps(ROWS).encode(),
    "utf-16.jsonl": LINES.decode().encode("utf-16"),
    "unmarked.json": json.dumps(ROWS).encode("utf-16-be"),
    "d.csv": as_csv(),
    "semicolons.CSV": as_csv(";"),
    "e.tsv": as_csv("\t"),
    "excel.tsv": as_csv("\t").decode().encode("utf-16"),
    "f.jsonl.gz": gzip.compress(LINES),
    "g.JSON.BZ2": bz2.compress(json.dumps(ROWS).encode()),
    "h.csv.xz": lzma.compress(as_csv()),
    "packed without its suffix.jsonl": gzip.compress(LINES),
    "train.jsonl.1": LINES,
    "part-00000": LINES.decode().encode("utf-16"),
    "list.txt": json.dumps(ROWS, indent=1).encode(),
    "later": b"".join(json.dumps({"id": n, "text": each}).encode() + b"\n" for n, each in enumerate(TEXTS)),
}


@pytest.mark.parametrize("name", READ)
def test_rows_are_read_from_every_form(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "_PIECE_BYTES", 7)  # nothing depends on where a piece ends
    (tmp_path / name).write_bytes(READ[name])
    assert contents(tmp_path) == TEXTS


@pytest.mark.parametrize("encoding", ("utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-32"))
def test_texts_are_read_from_every_unicode_encoding(encoding: str, tmp_path: Path) -> None:
    text = "Ännchen hat 3 Äpfel.\r\n" * 300
    (tmp_path / "a").write_bytes(text.encode(encoding))
    assert "".join(map(str, contents(tmp_path / "a"))) == text
    loaded = load(tmp_path / "a")
    assert len(loaded.training) + len(loaded.held_out) == len(text.encode())


REFUSED = {
    "a.txt": (b"caf\xe9 au lait\n" * 9, r"a\.txt is not in UTF-8 \(byte 3\): convert it, as by iconv"),
    "b.jsonl": (b'{"text": "caf\xe9"}\n', r"b\.jsonl is not in UTF-8 \(byte 13\)"),
    "c.csv": (b"text\ncaf\xe9\n", r"c\.csv is not in UTF-8 \(byte 8\)"),
    "late.txt": (b"a" * 9000 + b"\0", "is not text: it contains NUL bytes"),
    "d.txt": (POINTER, "is a pointer of git LFS, not the data: fetch them by git lfs pull"),
    "d.parquet": (POINTER, "is a pointer of git LFS, not the data: fetch them by git lfs pull"),
    "d.jsonl": (POINTER, "is a pointer of git LFS, not the data: fetch them by git lfs pull"),
    "e.txt": (b"", "is empty"),
    "e.jsonl": (b" \n\t\r\n", "is empty"),
    "f.txt": (b"ab\0\1\2", "is not text"),
    "f.pdf": (b"%PDF-1.7\n", "is not text"),
    "g.zip": (b"PK\x03\x04...", "is not text but an archive: unpack it"),
    "g.tar.gz": (gzip.compress(b"a" * 100), "is not text but an archive: unpack it"),
    "h.jsonl.gz": (gzip.compress(LINES * 99)[:-40], "is damaged: it cannot be decompressed"),
    "h.txt.gz": (gzip.compress(b"a\n" * (1 << 20)), "holds more than 200 times its size: if that is right, unpack it"),
    "i.jsonl": (LINES + b'{"text": "b', r"i\.jsonl:5: not JSON"),
    "j.jsonl": (LINES + b'{"text": "b\n{"text": "c"}\n', r"j\.jsonl:5: not JSON"),
    "k.json": (b'[{"text": "a"},\n {"text": "b"}', r"k\.json:2: the file ends within a list"),
    "l.jsonl": (b'{"text": "a", "text": "b"}', r'l\.jsonl:1: the key "text" comes twice'),
    "m.jsonl": (b'{"text": "a"}\n\n{"text": null}', r'm\.jsonl:3: its "text" is null, not a text'),
    "m.json": (b'[{"text": "a"},\n {"text": ["b"]}]', r'm\.json:2: its "text" is a list, not a text'),
    "n.jsonl": (b'{"text": NaN}', 'its "text" is a number, not a text'),
    "o.json": (b'{"version": 1, "data": [{"text": "a"}]}', 'write the list under "data" into a file of its own'),
    "p.jsonl": (b'{"content": "a", "id": 1}', r"it has content, id: rename content to text"),
    "p.csv": (b"content,id\na,1\n", r"it has content, id: rename content to text\); the first line must name"),
    "q.csv": (b"hello,there\na,b\n", "it has hello, there: .*the first line must name the columns"),
    "r.csv": (b'text,id\n"a\nb",1\nc,2,3\n', r"r\.csv:4: 3 fields, where the first line names 2 columns"),
    "s.csv": (b'text\n"a\n', r"s\.csv:.*: not CSV"),
    "t.csv": (b"text,text\na,b\n", "two columns have the same name"),
    "u.jsonl": (b'{"instruction": "a", "output": "b"}', "rename instruction to prompt and output to completion, and"),
    "v.jsonl": (b'{"text": "a"}\n{"txt": "b"}\n', r'v\.jsonl:2: has no "text" \(it has txt'),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_is_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "_FREE_BYTES", 1000)
    content, words = REFUSED[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelError, match=words) as caught:
        contents(tmp_path / name)
    assert "\n" not in str(caught.value) and name in str(caught.value)
    if name not in ("a.txt", "h.txt.gz"):  # the bytes of an unknown encoding are trained on, and a line says so
        with pytest.raises(ValueError, match=name):
            load(tmp_path / name)


def test_long_row_is_refused_unless_it_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "MAX_ROW_BYTES", 1000)
    monkeypatch.setattr(readers, "_PIECE_BYTES", 300)
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "a" * 900}) + "\n")
    assert contents(tmp_path) == ["a" * 900]
    (tmp_path / "a.jsonl").write_text("\n" + json.dumps({"text": "a" * 2000}) + "\n")
    with pytest.raises(ModelError, match=r"a\.jsonl:2: a line of more than"):
        contents(tmp_path)


def test_conversations_are_read_from_json_and_csv(tmp_path: Path) -> None:
    pair = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    for name, text in {
        "a.json": json.dumps([{"prompt": "a", "completion": "b"}]),
        "b.csv": "prompt,completion\na,b\n",
        "c.csv": 'conversations\n"' + json.dumps(pair).replace('"', '""') + '"\n',
        "d.jsonl": json.dumps({"messages": json.dumps(pair)}),
    }.items():
        (tmp_path / name).write_text(text)
    assert contents(tmp_path, True) == [{"messages": pair}] * 4
    (tmp_path / "notes.txt").write_text("a")
    with pytest.raises(ModelError, match=r"notes\.txt is plain text: conversations are read from"):
        contents(tmp_path, True)


def write(root: Path, names: dict[str, bytes | None]) -> None:
    for name, content in names.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        if content is None:
            (root / name).symlink_to(root / "nowhere")
        else:
            (root / name).write_bytes(content)


CARD = b"---\nlicense: mit\n---\n"
CLONE: dict[str, bytes | None] = {
    "README.md": CARD, "LICENSE": b"MIT", ".gitattributes": b"x", "dataset_infos.json": b'{"a": {}}', "set.py": b"x",
    "data/train-0.jsonl": LINES, "data/test-0.jsonl": LINES, "data/validation-0.jsonl": LINES,
}  # fmt: skip
FOLDERS: list[tuple[dict[str, bytes | None], list[str], dict[str, int]]] = [
    (CLONE, ["data/train-0.jsonl"],
     {"hidden": 1, "documentation": 2, "beside rows": 1, "settings": 1, "rows of another split": 2}),
    ({"train.txt": b"a", "test.txt": b"b", "README": b"c"},
     ["train.txt"], {"documentation": 1, "rows of another split": 1}),
    ({"src/a.py": b"a", "tests/b.py": b"b", "README.md": b"c", "package.json": b'{"name": "x"}', ".git/config": b"x"},
     ["README.md", "src/a.py", "tests/b.py"], {"hidden": 1, "settings": 1}),
    ({"one.json": b'{"conversations": []}', "two.json": b"{}"}, ["one.json"], {"settings": 1}),
    ({"a.md": b"a", "README.md": CARD}, ["README.md", "a.md"], {}),
    ({"a.JSONL": LINES, "b.txt": b"b", "LICENSE.txt": b"c"}, ["a.JSONL", "b.txt"], {"documentation": 1}),
    ({"a.txt": b"a", "b.txt": None, "c.txt": b" \n", "d.bin": b"\0\1", "e.zip": b"PK\x03\x04", "f.png": POINTER},
     ["a.txt"], {"broken link": 1, "empty": 1, "binary": 1, "archive": 1, "pointer of git LFS": 1}),
    ({"latest/a.jsonl": LINES, "developer.jsonl": LINES, "contest.csv": as_csv()},
     ["contest.csv", "developer.jsonl", "latest/a.jsonl"], {}),
]  # fmt: skip


@pytest.mark.parametrize("names, taken, left_out", FOLDERS)
def test_folder_says_what_it_takes_and_leaves_out(
    names: dict[str, bytes | None], taken: list[str], left_out: dict[str, int], tmp_path: Path
) -> None:
    write(tmp_path, names)
    found = select(tmp_path)
    assert [each.relative_to(tmp_path).as_posix() for each in found.files] == taken
    assert {reason: len(each) for reason, each in found.left_out.items()} == left_out
    table = found.lines()
    assert len(table) <= 12 and all(len(line) < 300 for line in table) and f"{len(taken)} file" in table[0]


def test_folder_without_data_says_why(tmp_path: Path) -> None:
    write(
        tmp_path,
        {"only/test.jsonl": LINES, "clone/README.md": CARD, "clone/a.parquet": POINTER, "rows/a.csv": b"text\na\n"},
    )
    for name, words in (("only", "1 rows of another split: test.jsonl.*name a file itself"), ("clone", "git lfs pull")):
        with pytest.raises(ModelError, match=words):
            select(tmp_path / name)
    assert (
        len(select(tmp_path / "only", splits=False).files) == len(select(tmp_path / "only" / "test.jsonl").files) == 1
    )
    with pytest.raises(ModelError, match=r"contains no text to take \(1 rows: a.csv"):
        load(tmp_path / "rows")


def test_links_and_odd_names_are_followed_and_escaped(tmp_path: Path) -> None:
    write(tmp_path, {"out/side.txt": b"side", "in/a\nb.txt": b"odd"})
    root = tmp_path / "in"
    (root / "folder").symlink_to(tmp_path / "out")
    (root / "file.txt").symlink_to(tmp_path / "out" / "side.txt")
    (root / "loop").symlink_to(root)
    os.mkfifo(root / "pipe")
    found = select(root)
    assert sorted(map(str, contents(root))) == ["odd", "side", "side"]
    assert {why: list(names) for why, names in found.left_out.items()} == {
        "neither file nor folder": ["pipe"],
        "link to a folder that is read already": ["loop"],
    }
    (root / "a\nb.txt").write_bytes(b"\xff")
    with pytest.raises(ModelError, match=r"a\\nb.txt is not in UTF-8"):
        contents(root)


FORMS = {
    ".jsonl": LINES, ".JSONL": LINES, ".ndjson": b"\xef\xbb\xbf" + LINES, ".json": json.dumps(ROWS).encode(),
    ".csv": as_csv(), ".jsonl.gz": gzip.compress(LINES), ".jsonl.xz": lzma.compress(LINES),
}  # fmt: skip
OTHERS = {".png": b"\x89PNG\0", ".zip": b"PK\x03\x04", ".bin": b"\0\1\2", ".md": b"\n", ".mp4": POINTER}
NAMES = st.text("aé_ -.", min_size=1, max_size=4).map(lambda name: f"n{name}")


@settings(max_examples=25, deadline=None)
@given(
    rows=st.dictionaries(NAMES, st.sampled_from(sorted(FORMS)), max_size=4),
    texts=st.dictionaries(NAMES, st.text("ab\né🙂", min_size=1, max_size=30).filter(str.strip), max_size=3),
    others=st.dictionaries(NAMES, st.sampled_from(sorted(OTHERS)), max_size=3),
    depth=st.integers(0, 2),
)
def test_every_file_of_a_folder_is_read_or_named(
    rows: dict[str, str], texts: dict[str, str], others: dict[str, str], depth: int
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        place = "deep/" * depth
        names = {f"{place}r{name}{kind}": FORMS[kind] for name, kind in rows.items()}
        names |= {f"t{name}.txt": text.encode() for name, text in texts.items()}
        names |= {f"{place}o{name}{kind}": OTHERS[kind] for name, kind in others.items()}
        write(root, dict(names))
        if not rows and not texts:
            with pytest.raises(ModelError, match="contains no text"):
                select(root)
            return
        found = select(root)
        named = [str(each.relative_to(root)) for each in found.files]
        named += [each for group in found.left_out.values() for each in group]
        assert sorted(named) == sorted(names)
        expected = Counter(TEXTS * len(rows)) + Counter(text.replace("\r", "") for text in texts.values())
        assert Counter(map(str, contents(root))) == expected


LINE = st.text("ab é\n", max_size=60).map(lambda text: text + "\n") | st.integers(0, 2000).map("line {}\n".format)


@settings(max_examples=25, deadline=None)
@given(
    lines=st.lists(st.integers(), min_size=100, max_size=300),
    size=st.integers(1, 5000),
    at=st.integers(0, 99),
    added=LINE,
)
def test_blocks_depend_on_the_text_around_them_alone(lines: list[int], size: int, at: int, added: str) -> None:
    data = [f"{number} {number * number} é\n".encode() for number in lines]
    text = b"".join(data)
    found = list(blocks(text[low : low + size] for low in range(0, len(text), size)))
    assert b"".join(found) == text and found == list(blocks([text]))
    assert all(LEAST <= len(each) <= MOST + LEAST and each.endswith(b"\n") for each in found[:-1])
    changed = list(blocks([b"".join([*data[:at], added.encode(), *data[at:], *data[:50]])]))
    assert len(set(found) - set(changed)) <= 4
    long = "é".encode() * 3 * MOST
    assert b"".join(blocks([b"a", long])) == b"a" + long
    assert all(each.decode() and len(each) <= MOST + LEAST for each in blocks([b"a", long]))


def test_more_data_change_nothing_that_was_held_out(tmp_path: Path) -> None:
    """A file that grows, and one file more: what was trained on or held out of the text stays so, up to its end."""
    text = "".join(f"{n} is {n * n % 1009}, and {n * n * n % 10007} beside it.\n" for n in range(3000))
    write(tmp_path, {"a.txt": text.encode()})
    before = list(read_documents([tmp_path / "a.txt"], False))
    write(
        tmp_path, {"0.txt": b"other words\n" * 9, "a.txt": (text + "and more\n" * 99).encode(), "b.txt": text.encode()}
    )
    after = {document.key(): is_held_out(document) for document in read_documents(select(tmp_path).files, False)}
    held = [each for each in before[:-1] if is_held_out(each)]
    assert held and all(after.get(each.key()) == is_held_out(each) for each in before[:-1])
    parts = [each for each in joined(None if is_held_out(each) else each for each in before)]
    assert len(parts) <= len(held) + 3 and "".join(str(each.content) for each in parts).count("\n") < 3000
    assert (parts[0].begins, parts[-1].ends) == (not is_held_out(before[0]), not is_held_out(before[-1]))


@settings(max_examples=15, deadline=None)
@given(st.lists(st.binary(min_size=1, max_size=2).map(lambda each: each * 16), max_size=60))
def test_equal_keys_are_seen_once(keys: list[bytes]) -> None:
    seen, known = Seen(), set[bytes]()
    for key in keys:
        key = (key + bytes(14))[:14]
        assert seen.add(key) is (key not in known)
        known.add(key)


def test_changed_data_are_told_with_both_sizes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, {"data/a.txt": b"some lines of text\n" * 40})
    given_data = GivenData(tmp_path / "data", tmp_path / "data.json")
    load(given_data.place, given=given_data)
    assert capsys.readouterr().err == "note: taken       1 file, 760 bytes: 1 .txt\n"
    load(given_data.place, given=GivenData(given_data.place, given_data.record, tells=False))
    assert capsys.readouterr().err == ""
    write(tmp_path, {"data/b.txt": b"caf\xe9 and more\n" * 99})
    load(given_data.place, given=given_data)
    assert capsys.readouterr().err.splitlines() == [
        "note: taken       2 files, 2.1 kB: 2 .txt",
        "note: encoding    1 not in UTF-8, whose bytes are trained on as they are: b.txt",
        "note: the data have changed since this peer's last start: then 1 file, 760 bytes; now 2 files, 2.1 kB",
    ]
    state = DataState(1, 2, 3, "x")
    for damaged in (b"", b"[]", b'{"state": 1}', b"\xff", b'{"state": {"files": 1}, "held_out": "\xc3"}'):
        (tmp_path / "data.json").write_bytes(damaged)
        assert GivenData(None, tmp_path / "data.json").held_out() == b""
        GivenData(None, tmp_path / "data.json").keep(state, b'{"text": "only"}\n')
    assert GivenData(None, tmp_path / "data.json").held_out() == b'{"text": "only"}\n' and capsys.readouterr().err == ""
