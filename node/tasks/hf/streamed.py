"""Rows of a data set that is too large for this machine: only a window of its files is on the disk at a time.

A stream goes through all files in an order that its seed gives. A window lasts for as many batches as the sizes of its
files say, so the batch at a position depends on the seed and the position alone. While a window is trained on, the next
one is fetched and tokenised. The ranks of one machine fetch and tokenise each window once.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from node.runtime.directories import cache_directory
from node.runtime.locks import LocksUnsupported, hold
from node.runtime.notes import note, warn
from node.tasks.hf.data_set import DataSet, HubFile, NotFetched, fetch
from node.tasks.hf.rows import PreparedData
from node.tasks.hf.settings import ModelError, foreign

WINDOW_BYTES = 256 << 20
RETRY_SECONDS = (1.0, 5.0, 30.0, 120.0, 300.0)
"""Pauses before a file is asked for again. A window that is fetched ahead continues with the last of them."""
_LONGEST_SECONDS = 2 * sum(RETRY_SECONDS) + 60.0
_LOOK_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Window:
    """Some files of a data set, the position of the first batch that is taken from them, and how many are."""

    files: tuple[HubFile, ...]
    first: int
    batches: int


def windows(
    files: Sequence[HubFile], seed: int, epoch: int, first: int, step_batches: int, batch_tokens: int
) -> list[Window]:
    """One pass through all files, from position `first` on. All batches of an inner step are taken from one window."""
    order = list(files)
    random.Random(f"{seed}/{epoch}").shuffle(order)
    parts: list[list[HubFile]] = [[]]
    size = 0
    for each in order:
        if size >= WINDOW_BYTES:
            parts.append([])
            size = 0
        parts[-1].append(each)
        size += each.size
    if len(parts) > 1 and size < WINDOW_BYTES:  # what is left over would be a window of next to nothing
        parts[-2].extend(parts.pop())
    found = []
    for part in parts:
        steps = max(1, sum(each.tokens for each in part) // (batch_tokens * step_batches))
        found.append(Window(tuple(part), first, steps * step_batches))
        first += found[-1].batches
    return found


class StreamedRows:
    """`shared` is the directory of the windows of so many `ranks`; without it a process has one of its own."""

    def __init__(
        self,
        data_set: DataSet,
        prepare: Callable[[list[Path], Path], PreparedData],
        *,
        step_batches: int,
        batch_tokens: int,
        fetcher: Callable[[DataSet, HubFile, Path], Path] = fetch,
        shared: Path | None = None,
        ranks: int = 1,
    ) -> None:
        self._data_set, self._prepare, self._fetch = data_set, prepare, fetcher
        self._shared, self._ranks = shared, ranks
        self._step = step_batches, batch_tokens
        self._seed, self._epoch, self._pass = -1, -1, list[Window]()
        self._here: tuple[Window, PreparedData] | None = None
        self._next: tuple[Window, Future[PreparedData]] | None = None
        self._home = shared
        self._short: Window | None = None

    def ready(self, seed: int, position: int) -> bool:
        """Whether `batch` returns at once. If not, the window is being fetched, however long the hub takes."""
        window = self._window(seed, position)
        if self._here and self._here[0] == window:
            return True
        if not self._next or self._next[0] != window:
            self._ahead(window)
        assert self._next
        return self._next[1].done()

    def open(self, seed: int, position: int = 0) -> PreparedData:
        """The window of a position. It waits until that has come.

        A later window that cannot be read is left out: the rows of the one before stay.
        """
        window = self._window(seed, position)
        if self._here is None or self._here[0] != window:
            before, following = self._here, self._next
            try:
                data = _result(following[1]) if following and following[0] == window else self._load(window)
            except ModelError as error:
                if before is None or isinstance(error, NotFetched):
                    raise
                warn(f"{error}; the rows before it are used again", is_own=True)
                data = before[1]
            finally:
                self._next = None
            self._here = window, data
            self._ahead(self._window(seed, window.first + window.batches))
        return self._here[1]

    def batch(self, seed: int, position: int, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """As `Rows.batch`. A window with fewer rows than it should have is gone through again, and a line says so."""
        data = self.open(seed, position)
        assert self._here
        window = self._here[0]
        if len(data.rows) < window.batches * count and self._short != window:
            self._short = window
            what = f"the present files of {self._data_set.name} hold {len(data.rows):,} rows"
            note(f"{what}, and {window.batches * count:,} are due: some come twice")
        return data.rows.batch(seed, position - self._here[0].first, count)

    def _window(self, seed: int, position: int) -> Window:
        if seed != self._seed:
            self._seed, self._epoch, self._here, self._next = seed, -1, None, None
            if self._shared is None:
                if self._home:
                    shutil.rmtree(self._home, ignore_errors=True)
                with foreign(f"no directory for the data set {self._data_set.name}"):
                    self._home = new_home()
        if self._epoch < 0 or position < self._pass[0].first:
            self._epoch, self._pass = 0, windows(self._data_set.files, seed, 0, 0, *self._step)
        while position >= (end := self._pass[-1].first + self._pass[-1].batches):
            self._epoch += 1
            self._pass = windows(self._data_set.files, seed, self._epoch, end, *self._step)
        return next(each for each in reversed(self._pass) if each.first <= position)

    def _ahead(self, window: Window) -> None:
        """Have a thread fetch the window, until it has come or another is wanted. It does not outlive the process."""
        future: Future[PreparedData] = Future()

        def is_wanted() -> bool:
            following = self._next
            return following is not None and following[1] is future

        def work() -> None:
            try:
                with foreign(f"the next files of the data set {self._data_set.name}"):
                    found = self._load(window, is_wanted)
            except (ModelError, MemoryError) as error:
                future.set_exception(error)
            else:
                future.set_result(found)

        self._next = window, future
        threading.Thread(target=work, name="next-window", daemon=True).start()

    def _load(self, window: Window, is_wanted: Callable[[], bool] | None = None) -> PreparedData:
        """Fetch and tokenise a window's files. Their rows stay mapped when their directory is gone."""
        assert self._home
        try:
            if self._shared:
                with suppress(LocksUnsupported):  # then each rank has windows of its own
                    return self._load_together(window, self._shared, is_wanted)
            place = Path(tempfile.mkdtemp(dir=self._home))
            try:
                return self._prepare(self._files(window, place, is_wanted), place)
            finally:
                shutil.rmtree(place, ignore_errors=True)
        except OSError as error:
            raise ModelError(f"{error.filename or cache_directory()}: {error.strerror or error}") from None

    def _load_together(self, window: Window, home: Path, is_wanted: Callable[[], bool] | None) -> PreparedData:
        """The first rank fills the window's directory, and the last that has mapped it removes it."""
        place = home / f"{self._data_set.commit}-{self._seed}-{window.first}"
        with _held(place.with_suffix(".lock"), is_wanted):
            place.mkdir(exist_ok=True)
            listed = place / "files.json"
            if not listed.exists():
                files = self._files(window, place, is_wanted)
                listed.write_text(json.dumps([str(each) for each in files]))
            data = self._prepare([Path(each) for each in json.loads(listed.read_text())], place)
            (place / f"mapped-{os.getpid()}-{id(self)}").touch()
            if len([*place.glob("mapped-*")]) == self._ranks:
                shutil.rmtree(place, ignore_errors=True)
            return data

    def _files(self, window: Window, place: Path, is_wanted: Callable[[], bool] | None) -> list[Path]:
        free, needed = shutil.disk_usage(place).free, 4 * sum(each.size for each in window.files)
        if free < needed:
            what = f"a window of {self._data_set.name} needs {needed / 1e9:.1f} GB of disk"
            raise ModelError(f"{what}, and {free / 1e9:.1f} GB are free in {cache_directory()}")
        return [self._fetched(each, place, is_wanted) for each in window.files]

    def _fetched(self, file: HubFile, place: Path, is_wanted: Callable[[], bool] | None) -> Path:
        tries = 0
        while True:
            try:
                return self._fetch(self._data_set, file, place)
            except NotFetched as error:
                if not is_wanted() if is_wanted else tries >= len(RETRY_SECONDS):
                    raise
                seconds = RETRY_SECONDS[min(tries, len(RETRY_SECONDS) - 1)]
                warn(f"{error}; again in {seconds:g} s", is_own=True)
                time.sleep(seconds)
                tries += 1


@contextmanager
def _held(lock: Path, is_wanted: Callable[[], bool] | None) -> Iterator[None]:
    """Hold a lock, for which another rank may make this one wait."""
    lock.touch()
    began = time.monotonic()
    while (held := hold(lock)) is None:
        if not is_wanted() if is_wanted else time.monotonic() - began > _LONGEST_SECONDS:
            raise NotFetched("another rank has not fetched the next files of the data set")
        time.sleep(_LOOK_SECONDS)
    try:
        yield
    finally:
        os.close(held)


def new_home() -> Path:
    """A directory for windows, which this process locks."""
    cache = cache_directory()
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    for each in cache.glob("stream-*"):
        with suppress(OSError):
            if (held := hold(each)) is not None:
                shutil.rmtree(each, ignore_errors=True)
                os.close(held)
    while True:
        home = Path(tempfile.mkdtemp(prefix="stream-", dir=cache))
        try:
            if hold(home) is not None and home.exists():
                return home
        except FileNotFoundError:  # another process has removed it before it was locked
            continue
        except LocksUnsupported:  # it stays behind if this process is killed
            return home


def _result(future: Future[PreparedData]) -> PreparedData:
    try:
        return future.result(_LONGEST_SECONDS)
    except TimeoutError:
        raise NotFetched("the next files of the data set have not come from the hub") from None
