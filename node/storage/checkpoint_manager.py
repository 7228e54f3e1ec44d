"""Writes, keeps and removes checkpoints within a limit of disk space.

First disk space is reserved, so that a full disk shows before anything is written. Then the files are filled, for which
the peer waits. Publication follows in the background. A failure costs the checkpoint, never the round.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import os
import shutil
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Protocol, Self

from node.storage.buffers import FileBuffer, allocate, outer_buffer
from node.storage.checkpoint import (
    DIRECTORY,
    FEEDBACK,
    INNER,
    MANIFEST,
    OUTER,
    Checkpoint,
    name_of,
    places,
    publish_checkpoint,
)
from node.training.remote import RemoteTrainer, WorkerError
from protocols.aio import task_group
from protocols.base import Compute, RoundKey
from protocols.sync.snapshot import MemoryBuffer, Snapshot, SnapshotBuffer, Snapshots, buffer_bytes

log = logging.getLogger(__name__)

KEEP = 3
SMALL_BYTES = 1 << 20  # allowance for headers, the manifest and everything else that is not a vector
SLOW_SECONDS = 2.0
"""A checkpoint is given up if the one before is not published after this wait. It had all the rounds since."""
AGAIN_SECONDS = 600.0  # least time between two warnings while checkpoints keep failing


class OuterStateSource(Protocol):
    """The owner of the outer state (`node.outer.state.OuterState`)."""

    async def keep(self, snapshots: Snapshots, key: RoundKey) -> Snapshot | None:
        """Add a copy to the snapshots, as the state before a round; None if its file cannot be written."""


class FeedbackSource(Protocol):
    """The owner of the error feedback (`node.outer.error_feedback.ErrorFeedback`); `bytes` is the size of its file."""

    @property
    def bytes(self) -> int: ...

    async def save(self, path: Path) -> None:
        """Raises OSError if the file cannot be written."""


class CheckpointManager:
    """Keeps the checkpoints of one run. An async context manager, whose exit waits for the last publication.

    `problem` says in one line why the latest checkpoint failed. `snapshots` are served as soon as they are filled.
    """

    def __init__(
        self,
        directory: Path,
        like: Checkpoint,
        *,
        every_rounds: int,
        limit_bytes: int,
        disk: Compute,
        inner: RemoteTrainer,
        feedback: FeedbackSource | None = None,
        sync: Callable[[], None] = lambda: None,
    ) -> None:
        """Write a checkpoint before every `every_rounds`-th round, at most `limit_bytes` of them in all.

        `like` supplies run, layout and data of all checkpoints. `disk` runs what no round waits for. `sync` flushes the
        chain to which checkpoints belong, so that it survives a power cut; it blocks and raises OSError.
        """
        self.snapshots = Snapshots(every_rounds, KEEP, self.make_buffer, self._has_draft)
        self.home, self._like = directory / DIRECTORY, like
        self._quota = Quota(self.home, limit_bytes)
        self._inner, self.feedback = inner, feedback
        self._disk, self._sync = disk, sync
        self._sealing: asyncio.Task[None] | None = None
        self._whole: set[str] = set()
        self._warned_at, self.problem = -math.inf, ""
        self._kept_wall: float | None = None  # wall-clock time at which the newest whole checkpoint was published

    async def __aenter__(self) -> Self:
        self._now = asyncio.get_running_loop().time  # `make_buffer` is called on other threads, too
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.published()
        self._sealing = None

    def holds(self, checkpoint: Checkpoint) -> None:
        """Take over a whole checkpoint of an earlier incarnation, which is on this peer's chain. Raises OSError."""
        self.snapshots.put(checkpoint.snapshot())
        self._whole.add(checkpoint.name)
        self._is_kept(checkpoint.path)

    def age_seconds(self, wall: float) -> float | None:
        """Age of the newest whole checkpoint, by the clock of the files' timestamps; None if there is none."""
        return None if self._kept_wall is None else max(0.0, wall - self._kept_wall)

    # -- a checkpoint -------------------------------------------------------------------------------------------------

    async def keep(self, state: OuterStateSource, key: RoundKey) -> None:
        """Write a checkpoint of the outer and inner state before a round. Both may change once this returns."""
        began, draft = self._now(), self._draft(key.lineage, key.round)
        if not await self._sealed():
            self._warn(f"no checkpoint before round {key.round + 1}: the one before is still being written")
            return
        if not await self._make_way(draft, key):
            await state.keep(self.snapshots, key)  # without a checkpoint, other peers still need the snapshot
            return
        async with task_group() as group:
            filling = group.create_task(state.keep(self.snapshots, key))
            saving = group.create_task(self._save(draft, key))
        snapshot, saved = filling.result(), saving.result()
        log.debug("before round %d, a checkpoint held the peer up for %.2f s", key.round + 1, self._now() - began)
        if snapshot and saved is not None:
            self._begin_to_seal(snapshot, saved, self.feedback is not None)

    async def published(self) -> None:
        """Wait until the latest checkpoint is on the disk for good, or has failed."""
        if self._sealing:
            await asyncio.wait([self._sealing])

    def take(self, snapshot: Snapshot) -> None:
        """Write a downloaded snapshot as a checkpoint without inner state."""
        self.snapshots.put(snapshot)
        self._begin_to_seal(snapshot, False)

    async def _save(self, draft: Path, key: RoundKey) -> bool | None:
        """Write error feedback and inner state; returns whether there is an inner state, None if writing failed."""
        try:
            if self.feedback:
                await self.feedback.save(draft / FEEDBACK)
            return await self._inner.save(draft / INNER)
        except (WorkerError, OSError) as error:
            await self._fail(key.round, getattr(error, "strerror", None) or str(error), draft)
            return None

    def _begin_to_seal(self, snapshot: Snapshot, inner: bool, feedback: bool = False) -> None:
        if isinstance(snapshot.buffer, FileBuffer):
            made = replace(
                self._like,
                path=snapshot.buffer.path.parent,
                round=snapshot.round,
                lineage=snapshot.lineage,
                state_root=snapshot.index.state_root(snapshot.round),
                index=snapshot.index,
                data=replace(self._like.data, position=self._inner.position),
                carried=self._inner.carried,
                threads=self._inner.threads,
            )
            work = partial(publish_checkpoint, made, inner, feedback)
            self._sealing = asyncio.create_task(self._seal(made, work, self._sealing), name="checkpoint")
            self._sealing.add_done_callback(_tell_defect)

    async def _sealed(self) -> bool:
        """Wait up to `SLOW_SECONDS` until the previous checkpoint's publication has ended."""
        if self._sealing:
            await asyncio.wait([self._sealing], timeout=SLOW_SECONDS)
        return self._sealing is None or self._sealing.done()

    async def _seal(self, made: Checkpoint, do: Callable[[], object], before: asyncio.Task[None] | None) -> None:
        def work() -> None:
            self._sync()
            do()

        if before:
            await asyncio.wait([before])
        began = self._now()
        try:
            await self._disk.run(work, 0)
        except OSError as error:
            await self._fail(made.round, error.strerror or str(error), made.path)
        else:
            log.debug("the checkpoint before round %d was sealed in %.2f s", made.round + 1, self._now() - began)
            self._warned_at, self.problem = -math.inf, ""
            self._whole.add(made.name)
            self._is_kept(self.home / made.name)
            held = {name_of(each.round, each.lineage) for each in self.snapshots.held()}
            # directories that this manager does not know stay
            useless = [self.home / name for name in sorted(self._whole - held)]
            with suppress(OSError):
                drafts = places(self.home, drafts=True)
                useless += [path for path in drafts if path.name[1:] < min(held | {made.name})]
            await self._remove(useless)

    async def _fail(self, round_number: int, why: str, draft: Path) -> None:
        self._warn(f"no checkpoint before round {round_number + 1}: {why}")
        await self._remove([draft])

    def _is_kept(self, path: Path) -> None:
        with suppress(OSError):
            self._kept_wall = max(self._kept_wall or 0.0, (path / MANIFEST).stat().st_mtime)

    def _warn(self, line: str) -> None:
        """Warn at once, then at most every ten minutes until a checkpoint succeeds."""
        self.problem = line
        due = self._now() >= self._warned_at + AGAIN_SECONDS
        log.log(logging.WARNING if due else logging.DEBUG, line)
        if due:
            self._warned_at = self._now()

    # -- disk space ---------------------------------------------------------------------------------------------------

    def make_buffer(self, lineage: bytes, round_number: int, size: int) -> SnapshotBuffer:
        """A buffer for an outer state: on disk, or in memory if it does not fit there, because other peers need it."""
        draft = self._draft(lineage, round_number)
        try:
            if not (draft / OUTER).exists():
                self._quota.check(size)
            draft.mkdir(mode=0o700, parents=True, exist_ok=True)
            return outer_buffer(draft / OUTER, self._like.layout.sizes(), round_number, lineage)
        except OSError as error:
            self._warn(f"no {size >> 20} MiB on the disk for a snapshot ({error.strerror}): they are taken from memory")
            return MemoryBuffer(size)

    def _has_draft(self, lineage: bytes, round_number: int) -> bool:
        return (self._draft(lineage, round_number) / OUTER).exists()

    def _draft(self, lineage: bytes, round_number: int) -> Path:
        return self.home / f".{name_of(round_number, lineage)}"

    async def _make_way(self, draft: Path, key: RoundKey) -> bool:
        """Reserve the disk space of a checkpoint, removing older ones if needed."""
        vectors_bytes = buffer_bytes(sum(self._like.layout.sizes()))
        beside = {INNER: vectors_bytes + SMALL_BYTES}  # moments
        if self.feedback:
            beside[FEEDBACK] = self.feedback.bytes + SMALL_BYTES
        needed_bytes = vectors_bytes + sum(beside.values())

        def reserve() -> None:
            self._quota.check(needed_bytes, [draft])
            draft.mkdir(mode=0o700, parents=True, exist_ok=True)
            outer_buffer(draft / OUTER, self._like.layout.sizes(), key.round, key.lineage)
            for name, size in beside.items():
                file = os.open(draft / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                try:
                    allocate(file, size)
                finally:
                    os.close(file)

        while True:
            try:
                await self._disk.run(reserve, 0)
                return True
            except OSError as error:
                full, why = error.errno in (errno.ENOSPC, errno.EDQUOT), error.strerror or str(error)
            gone = [*self._removable(draft), draft]
            enough = partial(self._quota.would_do, needed_bytes, gone)
            if not (full and await self._disk.run(enough, 0)) or not await self._remove_one(draft):
                await self._fail(key.round, why, draft)
                return False

    async def _remove_one(self, draft: Path) -> bool:
        """Remove the least useful checkpoint, but never the last whole one; False if there is none to remove."""
        for path in self._removable(draft)[:1]:
            await self._remove([path])
            return not path.exists()
        return False

    def _removable(self, draft: Path) -> list[Path]:
        """What may be removed for a draft, the least useful first: no checkpoint that another incarnation made."""
        drafts: list[Path] = []
        with suppress(OSError):
            drafts = [path for path in places(self.home, drafts=True) if path != draft]
        return [*drafts, *(self.home / name for name in sorted(self._whole)[:-1])]

    async def _remove(self, paths: list[Path]) -> None:
        """Delete directories, their snapshots first, which frees the space. Transfers that read one can finish."""
        names = {path.name.removeprefix(".") for path in paths if not path.name.startswith(".")}
        for snapshot in self.snapshots.held():
            if name_of(snapshot.round, snapshot.lineage) in names:
                self.snapshots.drop(snapshot)
        self._whole -= names
        for path in paths:
            await self._disk.run(partial(shutil.rmtree, path, ignore_errors=True), 0)


def _tell_defect(sealing: asyncio.Task[None]) -> None:
    """Log an error in our own code, as opposed to a disk error. Training continues."""
    if not sealing.cancelled() and (defect := sealing.exception()):
        log.error("a checkpoint was not sealed: %r", defect, exc_info=defect)


class Quota:
    """The limit on the size of a directory of checkpoints, unfinished ones included."""

    def __init__(self, home: Path, limit_bytes: int) -> None:
        self._home, self.limit_bytes = home, limit_bytes

    def check(self, size: int, ours: Collection[Path] = ()) -> None:
        """Raise OSError if `size` bytes more would exceed the limit. The directories in `ours` do not count."""
        there = [*places(self._home), *places(self._home, drafts=True)]
        taken = sum(_bytes(path) for path in there if path not in ours)
        if taken + size > self.limit_bytes:
            limit = f"{self.limit_bytes / 1e9:g} GB"
            raise OSError(errno.EDQUOT, f"{(taken + size) / 1e9:.3g} GB would be over {limit}: raise --disk-limit")

    def would_do(self, size: int, gone: Collection[Path]) -> bool:
        """Whether there would be space for `size` bytes if these directories were deleted."""
        with suppress(OSError):
            self.check(size, gone)
            disk = os.statvfs(self._home)
            return disk.f_bavail * disk.f_frsize + sum(_bytes(path) for path in gone) >= size
        return False


def _bytes(path: Path) -> int:
    taken = 0
    with suppress(OSError):
        for each in os.scandir(path):
            with suppress(OSError):
                taken += each.stat().st_size
    return taken
