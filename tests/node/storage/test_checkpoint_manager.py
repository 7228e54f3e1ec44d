"""The checkpoint manager: when it writes, thins and caps checkpoints, and the cost of a full, failing or slow disk."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from node.storage import checkpoint_manager as keepers
from node.storage.checkpoint import MANIFEST, OUTER, Checkpoint, newest, whole
from protocols.sync.snapshot import MemoryBuffer
from tests.support.checkpoints import Disk, Worker, bytes_of_one, checkpoints, keep, key, names, rounds, state

pytestmark = pytest.mark.usefixtures("small_disk")


def test_chain_is_synced_before_the_checkpoint(tmp_path: Path) -> None:
    done: list[str] = []

    def step(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **more: Any) -> Any:
            done.append(name)
            return real(*given, **more)

        return call

    synced = checkpoints(tmp_path, sync_chain=step("chain", lambda: None))
    with pytest.MonkeyPatch.context() as patch:
        for name in ("fsync", "rename"):
            patch.setattr(os, name, step(name, getattr(os, name)))
        keep(tmp_path, 5, of=synced)
    assert done.count("chain") == done.count("rename") == 1 and done[0] == "chain"
    assert "fsync" in done[: done.index("rename")] and done[-2:] == ["fsync", "fsync"], "directories, too"


def test_failed_chain_sync_prevents_the_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    keep(tmp_path, 5)
    keep(tmp_path, 10, of=checkpoints(tmp_path, sync_chain=broken))
    assert rounds(tmp_path) == [5]
    assert [each.message for each in caplog.records] == ["no checkpoint before round 11: Input/output error"]


STEPS = ("mkdir", "open", "pwrite", "fsync", "rename", "posix_fallocate", "ftruncate")


def break_down(patch: pytest.MonkeyPatch, at: int, for_good: bool, number: int = errno.EIO) -> list[str]:
    """Make the `at`-th of these calls fail, `for_good` also all later ones; returns the names of all calls."""
    made: list[str] = []

    def failing(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **more: Any) -> Any:
            made.append(name)
            if len(made) == at + 1 or (for_good and len(made) > at):
                raise OSError(number, os.strerror(number))
            return real(*given, **more)

        return call

    for name in STEPS:
        patch.setattr(os, name, failing(name, getattr(os, name)))
    return made


@pytest.mark.parametrize("for_good", [True, False])
def test_failure_at_any_step_keeps_previous_checkpoint(
    tmp_path: Path, for_good: bool, caplog: pytest.LogCaptureFixture
) -> None:
    keep(tmp_path / "before", 5)
    failed: set[str] = set()
    for at in itertools.count():
        place = tmp_path / str(at)
        shutil.copytree(tmp_path / "before", place)
        caplog.clear()
        with pytest.MonkeyPatch.context() as patch:
            kept = checkpoints(place)
            kept.holds(newest(place))
            made = break_down(patch, at, for_good)
            keep(place, 10, of=kept)
        if len(made) <= at:
            break
        failed.add(made[at])
        assert rounds(place) in ([5], [10, 5]), made
        assert len(caplog.records) <= 1 or for_good, made
        assert caplog.records or rounds(place) == [10, 5], made
        keep(place, 15, of=kept)  # the failure does not affect the next checkpoint
        assert rounds(place)[0] == 15, made
    assert rounds(place) == [10, 5] and failed == set(STEPS) and at > 12


def test_unfinished_checkpoint_of_killed_peer_is_ignored(tmp_path: Path) -> None:
    keep(tmp_path, 5, 10)
    newest(tmp_path).path.rename(tmp_path / "checkpoints" / ".000010-0a0a0a0a0a0a")  # killed before the rename
    assert rounds(tmp_path) == [5]
    keep(tmp_path, 15)
    assert names(tmp_path) == ["000005-050505050505", "000015-0f0f0f0f0f0f"], "the whole checkpoint stays"


# -- space ------------------------------------------------------------------------------------------------------------


def test_former_incarnations_checkpoints_are_served_then_evicted(tmp_path: Path) -> None:
    keep(tmp_path, 5, 10, 15)

    async def main() -> None:
        async with checkpoints(tmp_path) as made:
            for each in whole(tmp_path, lambda line: None):
                made.holds(each)
            (old,) = [each for each in made.snapshots.held() if each.round == 5]
            await made.keep(state(20), key(20))
            await asyncio.sleep(0.01)
            assert rounds(tmp_path) == [20, 15, 10] == [each.round for each in made.snapshots.held()]
            assert bytes(old.chunk(0)) == state(5).anchor.numpy().tobytes()  # a donor may still be reading it

    asyncio.run(main())


def test_foreign_checkpoints_are_not_deleted(tmp_path: Path) -> None:
    unread = ["000005-050505050505", "000010-0a0a0a0a0a0a"]
    keep(tmp_path, 5, 10)
    (tmp_path / "checkpoints" / unread[0] / MANIFEST).write_bytes(b"of another version")
    (tmp_path / "checkpoints" / unread[1] / OUTER).write_bytes(b"damaged")
    one = bytes_of_one(tmp_path / "one")
    keep(tmp_path, 15, 20, 25, 30, of=checkpoints(tmp_path, limit_bytes=2 * one + 16384))
    assert names(tmp_path)[:2] == unread and rounds(tmp_path)[0] == 30


def test_size_cap_evicts_oldest_but_never_the_last(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    one = bytes_of_one(tmp_path / "one") + 8192
    keep(tmp_path / "three", 5, 10, 15, of=checkpoints(tmp_path / "three", limit_bytes=3 * one))
    assert rounds(tmp_path / "three") == [15, 10, 5] and not caplog.records
    less = checkpoints(tmp_path / "three", limit_bytes=2 * one - 8192)
    for each in whole(tmp_path / "three", lambda line: None):
        less.holds(each)
    made = keep(tmp_path / "three", 20, of=less)
    assert rounds(tmp_path / "three") == [20, 15] and not caplog.records and len(made.snapshots.held()) == 2
    tight = checkpoints(tmp_path / "one", limit_bytes=one)
    tight.holds(newest(tmp_path / "one"))
    keep(tmp_path / "one", 10, 15, of=tight)
    assert rounds(tmp_path / "one") == [5]
    assert [each.round for each in tight.snapshots.held()] == [15, 10, 5]  # other peers find the snapshots all the same
    (record,) = caplog.records
    assert "no checkpoint before round 11: " in record.message and "raise --disk-limit" in record.message


@pytest.mark.parametrize("full", ["disk", "cap"])
def test_older_checkpoints_are_not_evicted_in_vain(tmp_path: Path, full: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(file: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    one = bytes_of_one(tmp_path / "one")
    made = keep(tmp_path, 5, 10, 15, of=checkpoints(tmp_path))
    if full == "disk":
        least = SimpleNamespace(f_bavail=0, f_frsize=4096)
        monkeypatch.setattr(os, "statvfs", lambda path: least)
        monkeypatch.setattr(os, "posix_fallocate", refuse)
        monkeypatch.setattr(keepers, "SMALL_BYTES", 2 * one)
    else:
        made._quota.limit_bytes = 2 * one
    keep(tmp_path, 20, of=made)
    assert rounds(tmp_path) == [15, 10, 5]
    assert [each.round for each in made.snapshots.held()] == [20, 15, 10], "other peers need the snapshot all the same"


def test_full_disk_evicts_older_then_skips_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real, free = os.posix_fallocate, [0]

    def allocate(file: int, offset: int, size: int) -> None:
        if len([name for name in names(tmp_path) if not name.startswith(".")]) > free[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(file, offset, size)

    made = keep(tmp_path, 5, 10, 15)
    monkeypatch.setattr(os, "posix_fallocate", allocate)
    free[0] = 1
    keep(tmp_path, 20, of=made)
    assert rounds(tmp_path) == [20, 15] and not caplog.records
    free[0] = 0
    keep(tmp_path, 25, 30, of=made)
    assert rounds(tmp_path) == [20]
    assert [type(each.buffer) is MemoryBuffer for each in made.snapshots.held()] == [True, True, False]
    assert [each.message for each in caplog.records] == ["no checkpoint before round 26: No space left on device"]
    monkeypatch.undo()
    monkeypatch.setattr(keepers, "SMALL_BYTES", 4096)
    keep(tmp_path, 35, of=made)
    assert rounds(tmp_path)[0] == 35


# -- warnings ---------------------------------------------------------------------------------------------------------


def test_worker_write_failure_costs_the_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other peers still find the snapshot; the warning is rate-limited."""
    made = keep(tmp_path, 5, 10, 15, worker=Worker("refuses"))
    assert names(tmp_path) == [] and [each.round for each in made.snapshots.held()] == [15, 10, 5]
    assert bytes(made.snapshots.held()[-1].chunk(0)) == state(5).anchor.numpy().tobytes()
    (record,) = caplog.records
    assert record.message.startswith("no checkpoint before round 6: the inner state cannot be written: No space")
    assert made.age_seconds(1e9) is None
    monkeypatch.setattr(keepers, "AGAIN_SECONDS", 0.0)
    keep(tmp_path, 20, of=made)
    assert [each.message[:32] for each in caplog.records[1:]] == ["no checkpoint before round 21: t"]


def test_checkpoint_age_counts_from_its_manifest(tmp_path: Path) -> None:
    made = keep(tmp_path, 25)
    sealed = (newest(tmp_path).path / MANIFEST).stat().st_mtime
    assert (made.age_seconds(sealed + 60.0), made.age_seconds(sealed - 60.0)) == (60.0, 0.0)
    later = checkpoints(tmp_path)
    later.holds(newest(tmp_path))
    assert later.age_seconds(sealed + 60.0) == 60.0, "of a former incarnation"


def test_unexpected_publish_error_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def defective(made: Checkpoint, inner: bool, feedback: bool) -> Checkpoint:
        raise ValueError("no disk explains this")

    monkeypatch.setattr(keepers, "publish_checkpoint", defective)
    made = keep(tmp_path, 5)
    (record,) = caplog.records
    assert record.levelname == "ERROR" and record.message.startswith("a checkpoint was not sealed: ValueError(")
    monkeypatch.undo()
    keep(tmp_path, 10, of=made)
    assert rounds(tmp_path) == [10] and len(caplog.records) == 1


def test_slow_disk_skips_checkpoints_without_blocking(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        gate = asyncio.Event()

        class Slow(Disk):
            async def run(self, work: Callable[[], Any], cost_bytes: int) -> Any:
                if "_begin_to_seal" in repr(work) or "_seal" in repr(work):
                    await gate.wait()
                return await super().run(work, cost_bytes)

        async with checkpoints(tmp_path, disk=Slow()) as made:
            await made.keep(state(5), key(5))
            await made.keep(state(10), key(10))
            assert [each.round for each in made.snapshots.held()] == [5] and rounds(tmp_path) == []
            gate.set()
        assert rounds(tmp_path) == [5]

    asyncio.run(main())
    (record,) = caplog.records
    assert record.message == "no checkpoint before round 11: the one before is still being written"
