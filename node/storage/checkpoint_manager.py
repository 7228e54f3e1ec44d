"""Keeps checkpoints: where snapshots stand on the disk, what becomes of them, and how much of it they may take.

A checkpoint takes three steps. Room is made for it, so that a disk that is too small shows before anything is written;
its files are filled, for which the peer stands still; then it is sealed behind the peer's back. What fails costs the
checkpoint, and a line; never the round.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from node.storage.checkpoint import DIRECTORY, FEEDBACK, INNER, MANIFEST, OUTER, Checkpoint, name_of, places
from node.storage.error_feedback import ErrorFeedback
from node.storage.file_buffer import FileBuffer, allocate, outer_buffer
from node.storage.publish import publish_checkpoint
from node.storage.quota import Quota
from node.storage.state import OuterState
from node.training.process import WorkerError
from protocols.aio import task_group
from protocols.base import Compute, RoundKey
from protocols.sync.snapshot import MemoryBuffer, Snapshot, SnapshotBuffer, Snapshots, buffer_bytes

log = logging.getLogger(__name__)

KEEP = 3
SMALL_BYTES = 1 << 20
"""For headers, the manifest and all that is not a vector."""
SLOW_SECONDS = 2.0
"""The checkpoint before has so long until this one is given up; it had all the rounds since."""
AGAIN_SECONDS = 600.0
"""What goes on failing is told again, no more often than that."""


class InnerStateSource(Protocol):
    """Whoever has the inner optimiser's state.

    Attributes:
        position: batches drawn from this peer's stream of data.
        carried: tokens of work in the local parameters that no round has counted.
        threads: that it computes with.
    """

    @property
    def position(self) -> int: ...

    @property
    def carried(self) -> int: ...

    @property
    def threads(self) -> int: ...

    async def save(self, path: Path) -> bool:
        """Put it into a file; False where there is none to be had just now.

        Raises:
            WorkerError: it cannot be written.
        """


class CheckpointManager:
    """Keeps the checkpoints of one run. Use as an async context manager: it ends when the last is sealed.

    Attributes:
        home: the directory of the checkpoints.
        feedback: what of this peer's work its codec has not sent yet, if it needs that.
        snapshots: what it keeps; they are handed out as soon as they are filled.
    """

    def __init__(
        self,
        directory: Path,
        every_rounds: int,
        limit_bytes: int,
        like: Checkpoint,
        inner: InnerStateSource,
        disk: Compute,
        sync: Callable[[], None] = lambda: None,
        feedback: ErrorFeedback | None = None,
    ) -> None:
        """
        Args:
            directory: the peer's state directory.
            limit_bytes: that all checkpoints together may take.
            like: run, layout and data of those to come.
            disk: runs what waits for the disk, and nothing that a round waits for.
            sync: has the disk keep the chain that a checkpoint stands on; it blocks, and raises OSError.
        """
        has_begun = lambda lineage, before: (self._draft(lineage, before) / OUTER).exists()  # noqa: E731
        self.snapshots = Snapshots(every_rounds, KEEP, self.room, has_begun)
        self.home, self._like = directory / DIRECTORY, like
        self._quota = Quota(self.home, limit_bytes)
        self._inner, self._disk, self._sync, self.feedback = inner, disk, sync, feedback
        self._sealing: asyncio.Task[None] | None = None
        self._whole: set[str] = set()
        self._told = -math.inf
        self._kept_wall: float | None = None  # when the newest whole checkpoint was sealed

    async def __aenter__(self) -> Self:
        self._now = asyncio.get_running_loop().time  # `room` is called on other threads, too
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        if self._sealing:
            await asyncio.wait([self._sealing])
        self._sealing = None

    def holds(self, checkpoint: Checkpoint) -> None:
        """One of a former life is whole, and on our chain.

        Raises:
            OSError: it has gone.
        """
        self.snapshots.put(checkpoint.snapshot())
        self._whole.add(checkpoint.name)
        self._is_kept(checkpoint.path)

    def age_seconds(self, wall: float) -> float | None:
        """Of the newest whole checkpoint; None: there is none.

        Args:
            wall: time, as files have it.
        """
        return None if self._kept_wall is None else max(0.0, wall - self._kept_wall)

    # -- a checkpoint -------------------------------------------------------------------------------------------------

    async def keep(self, state: OuterState, key: RoundKey) -> None:
        """Keep the state before a round, and the inner one; both may change when this returns."""
        began, draft = self._now(), self._draft(key.lineage, key.round)
        if not await self._sealed():
            self._warn(f"no checkpoint before round {key.round + 1}: the one before is still being written")
            return
        if not await self._make_way(draft, key):
            await state.keep(self.snapshots, key)  # others need it all the same
            return
        async with task_group() as group:
            filling = group.create_task(state.keep(self.snapshots, key))
            saving = group.create_task(self._save(draft, key))
        snapshot, saved = filling.result(), saving.result()
        log.debug("before round %d, a checkpoint held the peer up for %.2f s", key.round + 1, self._now() - began)
        if snapshot and saved is not None:
            self._begin_to_seal(snapshot, saved, self.feedback is not None)

    def take(self, snapshot: Snapshot) -> None:
        """Keep one that was downloaded, with no inner state."""
        self.snapshots.put(snapshot)
        self._begin_to_seal(snapshot, False)

    async def _save(self, draft: Path, key: RoundKey) -> bool | None:
        """Whether there is an inner state; None if it, or what was not sent yet, could not be written."""
        try:
            if self.feedback:
                await self.feedback.save(draft / FEEDBACK)
            return await self._inner.save(draft / INNER)
        except (WorkerError, OSError) as error:
            await self._fail(key.round, getattr(error, "strerror", None) or str(error), draft)
            return None

    def _begin_to_seal(self, snapshot: Snapshot, inner: bool, feedback: bool = False) -> None:
        if isinstance(snapshot.room, FileBuffer):
            made = replace(
                self._like,
                path=snapshot.room.path.parent,
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
        """Whether the checkpoint before is done with; it may take a moment."""
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
            self._told = -math.inf
            self._whole.add(made.name)
            self._is_kept(self.home / made.name)
            held = {name_of(each.round, each.lineage) for each in self.snapshots.held()}
            useless = [self.home / name for name in sorted(self._whole - held)]  # what it does not know is not its own
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
        """At once, and every ten minutes until it works again."""
        due = self._now() >= self._told + AGAIN_SECONDS
        log.log(logging.WARNING if due else logging.DEBUG, line)
        if due:
            self._told = self._now()

    # -- room ---------------------------------------------------------------------------------------------------------

    def room(self, lineage: bytes, round_number: int, size: int) -> SnapshotBuffer:
        """Room for an outer state: on the disk or, where it does not fit there, in memory, for others need it."""
        draft = self._draft(lineage, round_number)
        try:
            if not (draft / OUTER).exists():
                self._quota.check(size)
            draft.mkdir(mode=0o700, parents=True, exist_ok=True)
            return outer_buffer(draft / OUTER, self._like.layout.sizes(), round_number, lineage)
        except OSError as error:
            self._warn(f"no {size >> 20} MiB on the disk for a snapshot ({error.strerror}): they are taken from memory")
            return MemoryBuffer(size)

    def _draft(self, lineage: bytes, round_number: int) -> Path:
        return self.home / f".{name_of(round_number, lineage)}"

    async def _make_way(self, draft: Path, key: RoundKey) -> bool:
        """Take the room that a checkpoint needs, from older ones if need be; False: there is none."""
        vectors_bytes = buffer_bytes(sum(self._like.layout.sizes()))
        beside = {INNER: vectors_bytes + SMALL_BYTES}  # AdamW's moments
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
            gone = [*self._spare(draft), draft]
            enough = partial(self._quota.would_do, needed_bytes, gone)
            if not (full and await self._disk.run(enough, 0)) or not await self._thin(draft):
                await self._fail(key.round, why, draft)
                return False

    async def _thin(self, draft: Path) -> bool:
        """Give up the least useful of what is there, but never the last whole one; False: there is nothing."""
        for path in self._spare(draft)[:1]:
            await self._remove([path])
            return not path.exists()
        return False

    def _spare(self, draft: Path) -> list[Path]:
        """What may be given up for a draft, the least useful first; nothing that a life before left unread."""
        drafts: list[Path] = []
        with suppress(OSError):
            drafts = [path for path in places(self.home, drafts=True) if path != draft]
        return [*drafts, *(self.home / name for name in sorted(self._whole)[:-1])]

    async def _remove(self, paths: list[Path]) -> None:
        """Delete these. A snapshot there is let go first, so that its bytes go back; whoever reads it reads on."""
        names = {path.name.removeprefix(".") for path in paths if not path.name.startswith(".")}
        for snapshot in self.snapshots.held():
            if name_of(snapshot.round, snapshot.lineage) in names:
                self.snapshots.drop(snapshot)
        self._whole -= names
        for path in paths:
            await self._disk.run(partial(shutil.rmtree, path, ignore_errors=True), 0)


def _tell_defect(sealing: asyncio.Task[None]) -> None:
    """Of ours, that no disk explains: training goes on, and it is not passed over in silence."""
    if not sealing.cancelled() and (defect := sealing.exception()):
        log.error("a checkpoint was not sealed: %r", defect, exc_info=defect)
