"""What a file is, by its first bytes, else by its name, and which files of a folder are data."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, BinaryIO, Literal

from node.runtime.program import install
from node.tasks.hf.settings import ModelError

FileKind = Literal["text", "json", "csv", "parquet", "arrow", "settings", "archive", "binary", "empty", "pointer"]
ROWS: Mapping[str, FileKind] = {
    ".jsonl": "json", ".ndjson": "json", ".jsonlines": "json", ".json": "json", ".csv": "csv", ".tsv": "csv",
    ".parquet": "parquet", ".arrow": "arrow", ".feather": "arrow",
}  # fmt: skip
"""Suffixes of files that hold rows."""
_PACKED = {".gz": "gzip", ".bz2": "bz2", ".xz": "xz", ".zst": "zstd"}
_MAGIC = {b"\x1f\x8b": "gzip", b"BZh": "bz2", b"\xfd7zXZ\0": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
_ARCHIVES = (".zip", ".tar", ".tgz", ".tbz2", ".txz", ".7z", ".rar")
_ARCHIVE_MAGIC = (b"PK\x03\x04", b"PK\x05\x06", b"7z\xbc\xaf\x27\x1c", b"Rar!\x1a\x07")
_BINARY_MAGIC = (b"%PDF-", b"{\\rtf", b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"\x7fELF", b"%!PS")
_MARKS = {b"\xff\xfe\0\0": "utf-32", b"\0\0\xfe\xff": "utf-32", b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16"}
_PLAIN = "utf-8-sig"
_POINTER = b"version https://git-lfs.github.com/spec/"
_REFUSED: Mapping[FileKind, str] = {
    "empty": "is empty: give a file that contains text",
    "pointer": "is a pointer of git LFS, not the data: fetch them by git lfs pull",
    "archive": "is not text but an archive: unpack it, and give the folder",
    "binary": "is not text: texts, JSON, CSV and parquet are read; convert it",
}
_PROBED_BYTES = 8 << 10
_SETTINGS_BYTES = 1 << 20
MAX_FILES = 1 << 20
_DOCUMENTATION = re.compile(
    r"(readme|licen[cs]e|copying|notice|changelog|changes|contributing|code_of_conduct|citation|authors|security"
    r"|dataset_?card|data_?card)\b.*|croissant\.json|dataset_infos?\.json|dataset_dict\.json|state\.json",
    re.IGNORECASE,
)
_HUB_MARKS = ("dataset_infos.json", "dataset_info.json", "dataset_dict.json")
_TEST_SPLIT = re.compile(r"(?<![a-z])(validation|valid|val|dev|test|testing|eval|evaluation)(?![a-z])", re.IGNORECASE)
_FIELDS = ("text", "messages", "conversations", "prompt", "completion")
_FIRST_FIELD = re.compile(rf'[\ufeff\s\[]*\{{\s*"({"|".join(_FIELDS)})"\s*:\s*["\[]')
LINE_CHARACTERS = 280  # of a line that a worker's peer shows
REASONS = {
    "hidden": "",
    "empty": "",
    "binary": "",
    "archive": "unpack them",
    "documentation": "",
    "beside rows": "give a folder without the rows to train on them",
    "settings": "JSON without text or messages",
    "rows of another split": "name such a file itself to train on it",
    "rows": "the task gpt trains on plain text; use the task hf, or write their texts into a .txt file",
    "pointer of git LFS": "fetch what they stand for: git lfs pull",
    "broken link": "",
    "link to a folder that is read already": "",
    "neither file nor folder": "",
}
"""Why a file of a folder is left out, and what to do if it should not be."""


@dataclass(frozen=True, slots=True)
class Look:
    """What a file is, how it is compressed (or not: empty), and a text's encoding."""

    kind: FileKind
    packing: str = ""
    encoding: str = _PLAIN


@dataclass(frozen=True, slots=True)
class Selection:
    """The files to train on, those left out (by the keys of `REASONS`), and those read as UTF-16 or UTF-32."""

    files: tuple[Path, ...]
    left_out: Mapping[str, tuple[str, ...]]
    decoded: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        return sum(each.stat().st_size for each in self.files)

    def lines(self) -> list[str]:
        """What is taken, and what is left out and why; each line under 300 characters."""
        found = [f"{'taken':12}{counted(len(self.files), 'file')}, {size_words(self.size)}: {_kinds(self.files)}"]
        if self.decoded:
            found.append(f"{'decoded':12}{len(self.decoded):,} from UTF-16 or UTF-32: {named(self.decoded)}")
        plain = [f"{len(names):,} {why}: {named(names)}" for why, names in self.left_out.items() if not REASONS[why]]
        if plain:
            found.append(f"{'left out':12}{'; '.join(plain)}"[:LINE_CHARACTERS])
        for reason, names in self.left_out.items():
            if cure := REASONS[reason]:
                found.append(f"{'left out':12}{len(names):,} {reason} ({cure}): {named(names)}"[:LINE_CHARACTERS])
        return found


def shown(name: object) -> str:
    """A name of a file without characters that a terminal would obey or not take."""
    text = str(name)
    return text if text.isprintable() else ascii(text)[1:-1]


def suffix_of(path: PurePath) -> str:
    """The end of a file's name in lower case, without that of a compression."""
    ends = [each.lower() for each in path.suffixes]
    return next((each for each in reversed(ends) if each not in _PACKED), "")


def look(path: Path) -> Look:
    with path.open("rb") as file:
        head = file.read(_PROBED_BYTES)
    if not head:
        return Look("empty")
    if head.startswith(_POINTER):
        return Look("pointer")
    packing = next((name for magic, name in _MAGIC.items() if head.startswith(magic)), "")
    is_tar = bool(packing) and ".tar" in map(str.lower, path.suffixes)
    if is_tar or head.startswith(_ARCHIVE_MAGIC) or path.name.lower().endswith(_ARCHIVES):
        return Look("archive")
    if not packing:
        return _look_at(path, head)
    with suppress(OSError, EOFError, ModelError), opened(path, packing) as file:
        found = _look_at(path, file.read(_PROBED_BYTES))
        return Look("binary") if found.kind in ("parquet", "arrow") else Look(found.kind, packing, found.encoding)
    return Look(ROWS.get(suffix_of(path), "text"), packing)  # it is damaged, or needs pyarrow: reading it says so


def _look_at(path: Path, head: bytes) -> Look:
    suffix = suffix_of(path)
    if head.startswith(b"PAR1") or suffix == ".parquet":
        return Look("parquet")
    if head.startswith(b"ARROW1") or suffix in (".arrow", ".feather"):
        return Look("arrow")
    mark = next((name for bytes_, name in _MARKS.items() if head.startswith(bytes_)), "")
    encoding = mark or _unmarked(head) or _PLAIN
    if head.startswith(_BINARY_MAGIC) or (b"\0" in head and encoding == _PLAIN):
        return Look("binary")
    if not head.decode(encoding, "replace").strip("\ufeff \t\r\n\f\v") and len(head) < _PROBED_BYTES:
        return Look("empty")
    kind = ROWS.get(suffix) or ("json" if _begins_with_row(head.decode(encoding, "replace")) else "text")
    return Look(kind, encoding=encoding)


def _begins_with_row(head: str) -> bool:
    """Whether a text is rows under another name, such as part-00000, train.jsonl.1 or train.jsonl.bak."""
    if _FIRST_FIELD.match(head):  # the row may be longer than what is looked at
        return True
    with suppress(ValueError, RecursionError):
        fields, _ = json.JSONDecoder().raw_decode(head.lstrip("\ufeff \t\r\n["))
        return isinstance(fields, dict) and any(isinstance(fields.get(name), str | list) for name in _FIELDS)
    return False


def _unmarked(head: bytes) -> str:
    """The encoding of a text in UTF-16 without a byte-order mark: every other byte is nearly always NUL."""
    even, odd, most = head[::2].count(0), head[1::2].count(0), max(8, 0.7 * (len(head) // 2))
    if not even and odd >= most:
        return "utf-16-le"
    return "utf-16-be" if not odd and even >= most else ""


def opened(path: Path, packing: str) -> BinaryIO:
    """The file, decompressed while it is read."""
    if not packing:
        return path.open("rb")
    if packing == "zstd":
        try:
            from pyarrow import input_stream
        except ImportError:
            raise ModelError(f"{shown(path)}: reading zstd needs pyarrow: {install('data')}, or unpack it") from None
        stream: BinaryIO = input_stream(str(path), compression="zstd")
        return stream
    module: Any = {"gzip": gzip, "bz2": bz2, "xz": lzma}[packing]
    file: BinaryIO = module.open(path, "rb")
    return file


def select(path: Path | None, option: str = "--data", has_rows: bool = True, splits: bool = True) -> Selection:
    """The file, or the files of the folder that are data, in order."""
    if path is None:
        raise ModelError(f"task hf needs data to train on: give a file or a folder by {option}")
    try:
        if path.is_file():
            require_data(path, (found := look(path)).kind, has_rows)
            return Selection((path,), {}, () if found.encoding == _PLAIN else (shown(path.name),))
        if not path.is_dir():
            what = "neither a file nor a folder" if path.exists() else "missing"
            raise ModelError(f"there is no file or folder {shown(path)} (it is {what}): give texts by {option}")
        return _select(path, option, has_rows, splits)
    except OSError as error:
        raise ModelError(f"{shown(error.filename or path)} cannot be read ({error.strerror})") from None


def require_data(path: Path, kind: FileKind, has_rows: bool = True) -> None:
    if kind in _REFUSED:
        raise ModelError(f"{shown(path)} {_REFUSED[kind]}")
    if kind not in ("text", "settings") and not has_rows:
        raise ModelError(
            f"{shown(path)} holds rows ({suffix_of(path) or kind}), and the task gpt trains on plain text: write their "
            "texts into a .txt file, or train with --task hf"
        )


def _select(root: Path, option: str, has_rows: bool, splits: bool) -> Selection:
    left_out: dict[Path, str] = {}
    kinds: dict[Path, FileKind] = {}
    decoded: set[Path] = set()
    for file, reason in _walk(root):
        if reason:
            left_out[file] = reason
            continue
        kind = (found := look(file)).kind
        if found.encoding != _PLAIN:
            decoded.add(file)
        kinds[file] = "settings" if kind == "json" and _is_settings(file) else kind
    left_out |= _no_data(root, kinds, has_rows, splits)
    files = tuple(sorted(kinds.keys() - left_out.keys()))
    grouped = {
        reason: tuple(sorted(shown(each.relative_to(root)) for each, why in left_out.items() if why == reason))
        for reason in REASONS
        if reason in left_out.values()
    }
    if not files:
        why = "; ".join(f"{len(names):,} {reason}: {named(names)}" for reason, names in grouped.items())
        why = f" ({why})" if why else ""
        name = "name a file itself, or " if "rows of another split" in grouped else ""
        raise ModelError(f"the folder {shown(root)} contains no text to take{why}: {name}give texts by {option}")
    names = tuple(shown(each.relative_to(root)) for each in files if each in decoded)
    return Selection(files, grouped, names)


def _no_data(root: Path, kinds: Mapping[Path, FileKind], has_rows: bool, splits: bool) -> dict[Path, str]:
    found: dict[Path, str] = {}
    rows = [each for each, kind in kinds.items() if kind in ROWS.values() and not is_documentation(each)]
    pointers = [each for each, kind in kinds.items() if kind == "pointer"]
    is_clone = bool(rows or pointers) and _is_clone(root)
    texts = [each for each, kind in kinds.items() if kind == "text" and not is_documentation(each)]
    has_documentation = bool(rows or pointers) or (bool(texts) and all(suffix_of(each) == ".txt" for each in texts))
    for file, kind in kinds.items():
        if kind in ("empty", "binary", "archive", "settings"):
            found[file] = kind
        elif kind == "pointer":
            if suffix_of(file) in (*ROWS, ".txt", ".text", ".md", ""):  # that of a picture is only left out
                raise ModelError(f"{shown(file)} {_REFUSED[kind]}, or remove the file")
            found[file] = "pointer of git LFS"
        elif is_documentation(file) and has_documentation:
            found[file] = "documentation"
        elif kind == "text" and is_clone:
            found[file] = "beside rows"
        elif kind != "text" and not has_rows:
            found[file] = "rows"
        elif splits and kind != "text" and is_test_split(file.relative_to(root)):
            found[file] = "rows of another split"
    taken = [each for each in texts if each not in found]
    if splits and any("train" in str(each.relative_to(root)).lower() for each in taken):
        of_tests = [each for each in taken if suffix_of(each) == ".txt" and is_test_split(each.relative_to(root))]
        found |= dict.fromkeys(of_tests, "rows of another split")
    return found


def is_documentation(file: PurePath) -> bool:
    return bool(_DOCUMENTATION.fullmatch(file.name))


def is_test_split(relative: PurePath) -> bool:
    """Whether a file is of a validation or test split, by the words in names that `datasets` looks for, too."""
    return bool(_TEST_SPLIT.search(str(relative).replace("_", "-"))) and "train" not in relative.name.lower()


def _is_clone(root: Path) -> bool:
    """Whether the folder comes from a hub: then it has a card, or `datasets` has described it."""
    if any((root / name).is_file() for name in _HUB_MARKS):
        return True
    card = root / "README.md"
    if not card.is_file():
        return False
    with card.open("rb") as file:
        return file.read(4).startswith(b"---")


def _is_settings(file: Path) -> bool:
    """Whether a file is one JSON object, and no document."""
    if suffix_of(file) != ".json" or file.stat().st_size > _SETTINGS_BYTES:
        return False
    try:
        fields = json.loads(file.read_bytes())
    except (ValueError, RecursionError):
        return False
    return isinstance(fields, dict) and not any(name in fields for name in _FIELDS)


def _walk(root: Path) -> Iterator[tuple[Path, str]]:
    """All files below a folder, links followed, each folder once; and why a file cannot be taken, else nothing."""

    def refuse(error: OSError) -> None:
        raise error

    seen, count = {os.path.realpath(root)}, 0
    for place, folders, names in os.walk(root, onerror=refuse, followlinks=True):
        for name in sorted(folders):
            real = os.path.realpath(os.path.join(place, name))
            if name.startswith(".") or real in seen:
                folders.remove(name)
                yield Path(place, name), "hidden" if name.startswith(".") else "link to a folder that is read already"
            seen.add(real)
        folders.sort()
        for name in names:
            count += 1
            if count > MAX_FILES:
                raise ModelError(f"{shown(root)} holds more than {MAX_FILES:,} files: put their texts into fewer files")
            file = Path(place, name)
            if name.startswith("."):
                yield file, "hidden"
            elif file.is_file():
                yield file, ""
            else:
                yield file, "broken link" if file.is_symlink() else "neither file nor folder"


def counted(number: int, word: str) -> str:
    return f"{number:,} {word}{'' if number == 1 else 's'}"


def size_words(size: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000 or unit == "GB":
            return f"{size:,.0f} {unit}" if unit == "bytes" else f"{size:,.1f} {unit}"
        size /= 1000
    raise AssertionError


def _kinds(files: Sequence[Path]) -> str:
    counts = Counter(suffix_of(each) or "without suffix" for each in files).most_common()
    words = [f"{count:,} {shown(suffix[:20])}" for suffix, count in counts[:6]]
    if more := sum(count for _, count in counts[6:]):
        words.append(f"{more:,} more")
    return ", ".join(words)


def named(names: Sequence[str]) -> str:
    cut = [each if len(each) <= 40 else f"…{each[-39:]}" for each in names[:3]]
    return ", ".join(cut) + (", …" if len(names) > 3 else "")
