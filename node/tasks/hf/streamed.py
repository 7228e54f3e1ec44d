"""Data sets on the hub that are too large for this machine: only a window of their files is here at a time.

A stream goes through all files in an order that its seed gives. For how many batches a window lasts follows from the
sizes of its files, so the batch at a position depends on the seed and the position alone. While a window is trained on,
the next one is fetched and tokenised.
"""

from __future__ import annotations

import random
import re
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import torch

from node.tasks.hf.digests import cache_directory
from node.tasks.hf.foreign import foreign
from node.tasks.hf.rows import PreparedData
from node.tasks.hf.settings import HfSettings, ModelError

PREFIX = "hub:"
"""At the beginning of what --data names, before ORG/NAME@REVISION and, after another colon, a pattern of files."""
WINDOW_BYTES = 256 << 20
MAX_FILE_BYTES = 8 << 30
MAX_FILES = 1 << 20
RETRY_SECONDS = (1.0, 5.0, 30.0, 120.0, 300.0)
_TOKEN_BYTES = {".parquet": 2, ".jsonl": 4, ".json": 4, ".txt": 4, ".md": 4}
"""Suffix of a file -> about how many of its bytes make a token. Parquet is compressed."""
_UNUSED_SECONDS = 86_400.0
_NAME = re.compile(r"([\w-][\w.-]*/[\w.-]+?)(?:@([\w./-]+?))?(?::(.+))?", re.ASCII)
_COMMIT = re.compile("[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a data set."""

    name: str
    size: int


@dataclass(frozen=True, slots=True)
class DataSet:
    """The files of a data set at one commit, in the order of their names."""

    name: str
    commit: str
    files: tuple[HubFile, ...]


@dataclass(frozen=True, slots=True)
class Window:
    """Some files of a data set.

    Attributes:
        first: position of the first batch that is taken from them.
        batches: how many are.
    """

    files: tuple[HubFile, ...]
    first: int
    batches: int


def is_streamed(data: Path | None) -> bool:
    """Whether --data names a data set on the hub."""
    return data is not None and str(data).startswith(PREFIX)


def find_data_set(data: Path) -> DataSet:
    """Look a data set up on the hub.

    Raises:
        ModelError: there is none, or it has no files that can be read.
    """
    if not (found := _NAME.fullmatch(str(data).removeprefix(PREFIX))):
        raise ModelError(f"{str(data)[:200]!a}: a data set on the hub is named hub:ORG/NAME@REVISION, or …:PATTERN")
    name, revision, pattern = found.groups()
    import huggingface_hub

    huggingface_hub.constants.HF_HUB_OFFLINE = False  # the model is here already
    with foreign(f"the data set {name} cannot be found on the hub", "; download it, and give its folder"):
        about = huggingface_hub.HfApi(token=False).dataset_info(name, revision=revision, files_metadata=True)
    files = [HubFile(each.rfilename, each.size or 0) for each in about.siblings or []]
    files = [each for each in files if each.size and Path(each.name).suffix in _TOKEN_BYTES]
    files = sorted((each for each in files if fnmatchcase(each.name, pattern or "*")), key=lambda each: each.name)
    if not _COMMIT.fullmatch(about.sha or "") or not 0 < len(files) <= MAX_FILES:
        of = f" whose names match {pattern}" if pattern else ""
        raise ModelError(f"the data set {name} has no files{of} that end in {', '.join(_TOKEN_BYTES)}")
    if (largest := max(files, key=lambda each: each.size)).size > MAX_FILE_BYTES:
        raise ModelError(
            f"{largest.name} of the data set {name} has {largest.size / 1e9:.1f} GB: too much for a window"
        )
    size = sum(each.size for each in files)
    what = f"{name}@{about.sha}: {size / 1e9:.2f} GB in {len(files)} files"
    print(f"{what}, of which about {WINDOW_BYTES / 1e9:.2f} GB are here at a time", file=sys.stderr, flush=True)
    return DataSet(name, about.sha or "", tuple(files))


def windows(files: Sequence[HubFile], seed: int, epoch: int, first: int, batch_tokens: int) -> list[Window]:
    """One pass through all files, in an order that depends on seed and epoch.

    Args:
        first: position of its first batch.
        batch_tokens: tokens of a batch, padding included.
    """
    order = list(files)
    random.Random(f"{seed}/{epoch}").shuffle(order)
    found: list[Window] = []
    part: list[HubFile] = []
    for each in order:
        part.append(each)
        if sum(one.size for one in part) >= WINDOW_BYTES or each is order[-1]:
            tokens = sum(one.size // _TOKEN_BYTES[Path(one.name).suffix] for one in part)
            found.append(Window(tuple(part), first, max(1, tokens // batch_tokens)))
            first, part = first + found[-1].batches, []
    return found


class NotFetched(ModelError):
    """A file cannot be fetched from the hub."""


class StreamedRows:
    """The rows of a data set, a window at a time."""

    def __init__(
        self,
        data_set: DataSet,
        settings: HfSettings,
        prepare: Callable[[list[Path], Path], PreparedData],
        fetch: Callable[[DataSet, HubFile, Path], Path] | None = None,
    ) -> None:
        """
        Args:
            prepare: tokenises files into a directory.
            fetch: downloads a file into a directory, and returns its path.
        """
        self._data_set, self._settings, self._prepare = data_set, settings, prepare
        self._fetch = fetch or _download
        self._seed = -1
        self._epoch, self._pass = 0, list[Window]()
        self._here: tuple[Window, PreparedData] | None = None
        self._next: tuple[Window, Future[PreparedData]] | None = None
        self._home: Path | None = None

    def ready(self, seed: int, position: int) -> bool:
        """Whether `batch` returns at once. If not, the window is being fetched, however long the hub takes."""
        if seed != self._seed:
            return True  # nothing has been fetched for it: `open` fails if the hub does not answer
        window = self._window(position)
        if self._here and self._here[0] == window:
            return True
        if not self._next or self._next[0] != window:
            self._ahead(window)
        assert self._next
        return self._next[1].done()

    def open(self, seed: int, position: int = 0) -> PreparedData:
        """The window of a position. It waits until that is here.

        Raises:
            ModelError: the window cannot be fetched, or not be read.
        """
        if seed != self._seed:
            self._begin(seed)
        window = self._window(position)
        if self._here is None or self._here[0] != window:
            self._here, following = None, self._next
            try:
                data = _result(following[1]) if following and following[0] == window else self._load(window)
            finally:
                self._next = None
            self._here = window, data
            self._ahead(self._window(window.first + window.batches))
        return self._here[1]

    def batch(self, seed: int, position: int, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """As `Rows.batch`. A window with fewer rows than it should have is gone through again."""
        data = self.open(seed, position)
        assert self._here
        return data.rows.batch(seed, position - self._here[0].first, count)

    def _begin(self, seed: int) -> None:
        cache = cache_directory()
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        for left in (self._home, *filter(_is_left, cache.glob("stream-*"))):
            if left:
                shutil.rmtree(left, ignore_errors=True)
        self._home = Path(tempfile.mkdtemp(prefix="stream-", dir=cache))
        self._seed, self._epoch, self._here, self._next = seed, -1, None, None

    def _window(self, position: int) -> Window:
        if self._epoch < 0 or position < self._pass[0].first:
            self._epoch, self._pass = 0, self._windows(0, 0)
        while position >= (end := self._pass[-1].first + self._pass[-1].batches):
            self._epoch += 1
            self._pass = self._windows(self._epoch, end)
        return next(each for each in reversed(self._pass) if each.first <= position)

    def _windows(self, epoch: int, first: int) -> list[Window]:
        return windows(self._data_set.files, self._seed, epoch, first, self._settings.rows * self._settings.context)

    def _ahead(self, window: Window) -> None:
        """Have a thread fetch the window, until it is here or another is wanted. It does not outlive the process."""
        future: Future[PreparedData] = Future()

        def work() -> None:
            while self._next and self._next[1] is future:
                try:
                    with foreign(f"the next files of the data set {self._data_set.name}"):
                        return future.set_result(self._load(window))
                except NotFetched:
                    continue
                except (ModelError, MemoryError) as error:
                    return future.set_exception(error)

        self._next = window, future
        threading.Thread(target=work, name="next-window", daemon=True).start()

    def _load(self, window: Window) -> PreparedData:
        """Fetch and tokenise a window's files. Their rows stay mapped when their directory is gone."""
        assert self._home
        place = Path(tempfile.mkdtemp(dir=self._home))
        try:
            self._check_space(sum(each.size for each in window.files), place)
            files = [self._fetched(each, place) for each in window.files]
            return self._prepare(files, place)
        except OSError as error:
            raise ModelError(f"{error.filename or place}: {error.strerror or error}") from None
        finally:
            shutil.rmtree(place, ignore_errors=True)

    def _check_space(self, size: int, place: Path) -> None:
        free, needed = shutil.disk_usage(place).free, 4 * size
        if free < needed:
            what = f"a window of {self._data_set.name} needs {needed / 1e9:.1f} GB of disk"
            raise ModelError(f"{what}, and {free / 1e9:.1f} GB are free in {cache_directory()}")

    def _fetched(self, file: HubFile, place: Path) -> Path:
        for seconds in (*RETRY_SECONDS, None):
            try:
                with foreign(f"{file.name} of the data set {self._data_set.name} cannot be fetched from the hub"):
                    return self._fetch(self._data_set, file, place)
            except ModelError as error:
                if seconds is None:
                    raise NotFetched(str(error)) from None
                print(f"warning: {error}; again in {seconds:g} s", file=sys.stderr, flush=True)
                time.sleep(seconds)
        raise AssertionError


def _result(future: Future[PreparedData]) -> PreparedData:
    try:
        return future.result(2 * sum(RETRY_SECONDS) + 60.0)
    except TimeoutError:
        raise NotFetched("the next files of the data set have not come from the hub") from None


def _is_left(directory: Path) -> bool:
    """Whether a process that was killed has left this directory."""
    with suppress(OSError):
        return time.time() - directory.stat().st_mtime > _UNUSED_SECONDS
    return False


def _download(data_set: DataSet, file: HubFile, place: Path) -> Path:
    import huggingface_hub

    return Path(
        huggingface_hub.hf_hub_download(
            data_set.name, file.name, repo_type="dataset", revision=data_set.commit, local_dir=place, token=False
        )
    )
