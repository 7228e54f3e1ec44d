"""Data sets on the hub: which files they have, and how one is fetched. What the hub says is not trusted."""

from __future__ import annotations

import errno
import hashlib
import json
import re
from contextlib import suppress
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any

from node.runtime.directories import cache_directory, cached_file
from node.runtime.notes import note, warn
from node.runtime.proxies import download_remedy
from node.tasks.files import is_documentation, is_test_split, suffix_of
from node.tasks.hf.settings import ModelError, foreign

PREFIX = "hub:"
"""At the beginning of what --data names, before ORG/NAME@REVISION and, after another colon, a pattern of files."""
MAX_FILE_BYTES = 8 << 30
MAX_FILES = 1 << 20
KINDS = ((".parquet",), (".jsonl", ".ndjson"), (".json",), (".csv", ".tsv"), (".txt", ".md"))
"""Suffixes of files. Without a pattern, a data set's files are those of the first kind that it has."""
_TOKEN_BYTES, _PACKED_TOKEN_BYTES = 4, 2
"""About how many bytes of a file make a token, also if it is compressed, as parquet is."""
_NAME = re.compile(r"([\w-][\w.-]*/[\w.-]+?)(?:@([\w./-]+?))?(?::(.+))?", re.ASCII)
_COMMIT = re.compile("[0-9a-f]{40}")
_OWN_FAULTS = {errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS}


class NotFetched(ModelError):
    """A file has not come from the hub, and may come later."""


@dataclass(frozen=True, slots=True)
class HubFile:
    name: str
    size: int

    @property
    def path(self) -> PurePosixPath:
        return PurePosixPath(self.name)

    @property
    def kind(self) -> str:
        """Its suffix, without that of a compression."""
        return suffix_of(self.path)

    @property
    def tokens(self) -> int:
        is_plain = self.path.suffix.lower() == self.kind != ".parquet"
        return self.size // (_TOKEN_BYTES if is_plain else _PACKED_TOKEN_BYTES)


@dataclass(frozen=True, slots=True)
class DataSet:
    """The files of a data set at one commit, in the order of their names."""

    name: str
    commit: str
    files: tuple[HubFile, ...]


def is_streamed(data: Path | None) -> bool:
    """Whether --data names a data set on the hub."""
    return data is not None and str(data).startswith(PREFIX)


def find_data_set(data: Path, is_chat: bool) -> DataSet:
    """Look a data set up on the hub. If that does not answer, what it said earlier is used."""
    if not (found := _NAME.fullmatch(str(data).removeprefix(PREFIX))):
        raise ModelError(f"{str(data)[:200]!a}: a data set on the hub is named hub:ORG/NAME@REVISION, or …:PATTERN")
    name, revision, pattern = found.groups()
    kept = cache_directory() / f"data-set-{hashlib.sha256(f'{name}@{revision}'.encode()).hexdigest()[:40]}.json"
    try:
        every = _look_up(name, revision)
        with suppress(OSError):
            cached_file(kept.name, lambda file: file.write(json.dumps(asdict(every)).encode()))
    except ModelError as error:
        if not kept.exists():
            raise
        warn(f"{error}; its files as of the last time are used")
        every = _kept(kept)
    files, of_tests = chosen(every.files, pattern, is_chat)
    if not files:
        of = f" whose names match {pattern}" if pattern else ""
        kinds = ", ".join(sum(_kinds(is_chat), ()))
        raise ModelError(f"the data set {name} has no files{of} that end in {kinds}")
    size = sum(each.size for each in files)
    left_out = f"; {of_tests} of a validation or test split are left out" if of_tests else ""
    note(f"{name}@{every.commit}: {size / 1e9:.2f} GB in {len(files)} files{left_out}")
    return DataSet(name, every.commit, files)


def chosen(files: tuple[HubFile, ...], pattern: str | None, is_chat: bool) -> tuple[tuple[HubFile, ...], int]:
    """The files that match the pattern, else of one kind, no descriptions; and how many test files are left out."""
    kinds = _kinds(is_chat)
    if pattern:
        return tuple(each for each in files if fnmatchcase(each.name, pattern) and each.kind in sum(kinds, ())), 0
    for kind in kinds:
        named = [each for each in files if each.kind in kind and not is_documentation(each.path)]
        if found := tuple(each for each in named if not is_test_split(each.path)):
            return found, len(named) - len(found)
    return (), 0


def _kinds(is_chat: bool) -> tuple[tuple[str, ...], ...]:
    return KINDS[:-1] if is_chat else KINDS


def _look_up(name: str, revision: str | None) -> DataSet:
    import huggingface_hub

    huggingface_hub.constants.HF_HUB_OFFLINE = False  # the model is here already, and was to come from no hub
    remedy = f"{download_remedy()}; download it, and give its folder"
    with foreign(f"the data set {name} cannot be found on the hub", remedy):
        about = huggingface_hub.HfApi(token=False).dataset_info(name, revision=revision, files_metadata=True)
    siblings = {each.rfilename: each.size or 0 for each in about.siblings or []}
    if not _COMMIT.fullmatch(about.sha or "") or len(siblings) > MAX_FILES:
        raise ModelError(f"the hub names no commit of the data set {name}, or more than {MAX_FILES} files")
    files = tuple(HubFile(each, size) for each, size in sorted(siblings.items()) if size > 0)
    return DataSet(name, about.sha or "", tuple(map(_checked, files)))


def _checked(file: HubFile) -> HubFile:
    if file.path.is_absolute() or ".." in file.path.parts or not file.name.isprintable() or "\\" in file.name:
        raise ModelError(f"the hub names a file {file.name[:100]!a}, not the name of a file: nothing is fetched")
    if file.size > MAX_FILE_BYTES and file.kind in sum(KINDS, ()):
        raise ModelError(f"{file.name} has {file.size / 1e9:.0f} GB, too much for one file: name others by a pattern")
    return file


def _kept(path: Path) -> DataSet:
    try:
        fields: dict[str, Any] = json.loads(path.read_bytes())
        files = tuple(_checked(HubFile(str(each["name"]), int(each["size"]))) for each in fields["files"])
        return DataSet(str(fields["name"]), str(fields["commit"]), files)
    except (OSError, ValueError, KeyError, TypeError):
        raise ModelError(f"{path} is damaged: remove it") from None


def fetch(data_set: DataSet, file: HubFile, place: Path) -> Path:
    import huggingface_hub

    try:
        with foreign(f"{file.name} of the data set {data_set.name} cannot be fetched from the hub", download_remedy()):
            options = {"repo_type": "dataset", "revision": data_set.commit, "local_dir": place, "token": False}
            found = Path(huggingface_hub.hf_hub_download(data_set.name, file.name, **options))
    except ModelError as error:
        if _may_pass(error.__cause__):
            raise NotFetched(str(error)) from None
        raise
    if (size := found.stat().st_size) != file.size:
        raise ModelError(f"{file.name} of the data set {data_set.name} has {size} bytes, not {file.size}")
    return found


def _may_pass(error: BaseException | None) -> bool:
    """Whether what the hub's client raised is no answer from the hub, or one for now."""
    if status := getattr(getattr(error, "response", None), "status_code", 0):
        return int(status) >= 500 or status == 429
    if isinstance(error, OSError):  # so are those of the client for a hub that cannot be reached
        return error.errno not in _OWN_FAULTS
    return type(error).__module__.partition(".")[0] in ("httpx", "httpcore")
