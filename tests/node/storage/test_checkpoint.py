"""Checkpoints on a disk: whole or not there, known to be damaged if so, thinned, capped; and what a full disk costs."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import itertools
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from node.outer.sgd import OuterSGD
from node.storage import checkpoint_manager as keepers
from node.storage import tensors
from node.storage.checkpoint import (
    INNER,
    MANIFEST,
    OUTER,
    Checkpoint,
    CheckpointError,
    DataCursor,
    encode,
    newest,
    whole,
)
from node.storage.checkpoint_manager import CheckpointManager, CheckpointStorage
from node.storage.state import OuterState
from node.training.process import WorkerError
from protocols.base import Layout, RoundKey
from protocols.sync.snapshot import MemoryBuffer, SnapshotIndex
from tests.sim.host import SimCompute

RUN = "5f" * 32
LAYOUT = Layout(((("weight", (30, 10)), ("bias", (1,))),))
ELEMENTS = 301
MOMENTS = {"exp_avg": torch.arange(301.0), "exp_avg_sq": torch.ones(301), "step": torch.tensor(7.0)}


class Disk:
    """`Compute` at once; what a test wants to go wrong goes wrong."""

    async def run(self, work: Callable[[], Any], cost_bytes: int) -> Any:
        await asyncio.sleep(0)
        return work()


class Worker:
    """What a worker has; `how` it saves."""

    position, carried, threads = 42, 0, 3

    def __init__(self, how: str = "well") -> None:
        self.how = how

    async def save(self, path: Path) -> bool:
        if self.how == "refuses":
            raise WorkerError("the inner state cannot be written: No space left on device")
        try:
            if self.how == "well":
                tensors.write(path, MOMENTS, {})
        except OSError as error:
            raise WorkerError(f"the inner state cannot be written: {error.strerror}") from error
        return self.how == "well"


def lineage_of(round_number: int) -> bytes:
    return bytes([round_number % 251]) * 32


def key(round_number: int) -> RoundKey:
    return RoundKey(bytes.fromhex(RUN), "run", lineage_of(round_number), round_number)


def like(path: Path) -> Checkpoint:
    return Checkpoint(
        path=path,
        run=RUN,
        round=0,
        lineage=b"",
        state_root=b"",
        layout=LAYOUT,
        index=SnapshotIndex(0, ()),
        data=DataCursor(1234, 3, 0),
        carried=0,
        files={},
    )


def state(seed: int = 1) -> OuterState:
    draw = torch.Generator().manual_seed(seed)
    vectors = torch.randn(ELEMENTS, generator=draw), torch.randn(ELEMENTS, generator=draw)
    made = OuterState(*vectors, OuterSGD(0.7, 0.9), SimCompute())
    made.index = SnapshotIndex.of(*vectors)
    return made


def checkpoints(path: Path, worker: Worker | None = None, limit_bytes: int = 1 << 30) -> CheckpointManager:
    return CheckpointManager(CheckpointStorage(path, 5, limit_bytes, Disk()), like(path), worker or Worker())


def keep(
    path: Path, *numbers: int, of: CheckpointManager | None = None, worker: Worker | None = None
) -> CheckpointManager:
    """Keep the state before each of these rounds."""

    async def main() -> CheckpointManager:
        async with of or checkpoints(path, worker) as made:
            for number in numbers:
                await made.keep(state(number), key(number))
        return made

    return asyncio.run(main())


def rounds(path: Path) -> list[int]:
    """Of the whole checkpoints, the newest first."""
    return [each.round for each in whole(path, lambda line: None)]


def names(path: Path) -> list[str]:
    return sorted(each.name for each in (path / "checkpoints").iterdir())


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keepers, "SMALL_BYTES", 4096)
    monkeypatch.setattr(keepers, "SLOW_SECONDS", 0.05)


# -- what is written --------------------------------------------------------------------------------------------------


def test_checkpoint_round_trips(tmp_path: Path) -> None:
    keep(tmp_path, 5)
    found, was = newest(tmp_path), state(5)
    assert (found.run, found.round, found.lineage, found.layout) == (RUN, 5, lineage_of(5), LAYOUT)
    assert found.index == was.index and found.state_root == was.root(5)
    assert found.data == DataCursor(1234, 3, 42) and found.threads == 3
    assert found.path == tmp_path / "checkpoints" / "000005-050505050505"
    assert torch.equal(found.parameters()[0], was.anchor)
    parameters, velocity = torch.empty(ELEMENTS), torch.empty(ELEMENTS)
    found.snapshot().copy(parameters, velocity)
    assert torch.equal(parameters, was.anchor) and torch.equal(velocity, was.velocity)
    moments = {name: torch.zeros_like(tensor) for name, tensor in MOMENTS.items()}
    assert found.inner
    tensors.read(found.inner, moments)
    assert all(torch.equal(moments[name], MOMENTS[name]) for name in MOMENTS)


def test_safetensors_library_reads_the_files(tmp_path: Path) -> None:
    keep(tmp_path, 5)
    outer, inner = (load_file(newest(tmp_path).path / name) for name in (OUTER, INNER))
    assert torch.equal(outer["parameters"], state(5).anchor) and torch.equal(outer["velocity"], state(5).velocity)
    assert inner.keys() == MOMENTS.keys() and all(torch.equal(inner[name], MOMENTS[name]) for name in MOMENTS)


def test_fragments_are_separate_tensors(tmp_path: Path) -> None:
    start = tensors.header(tensors.fragments(("parameters", "velocity"), (2, 3)), {})
    (tmp_path / "file").write_bytes(start + torch.arange(10.0).numpy().tobytes())
    found = load_file(tmp_path / "file")
    assert {name: tensor.tolist() for name, tensor in found.items()} == {
        "parameters.0": [0, 1],
        "parameters.1": [2, 3, 4],
        "velocity.0": [5, 6],
        "velocity.1": [7, 8, 9],
    }


def test_tensors_larger_than_one_piece(tmp_path: Path) -> None:
    wide = {"a": torch.randn(2, 200_000), "b": torch.arange(3), "c": torch.empty(0)}
    tensors.write(tmp_path / "file", wide, {"format": "x"})
    assert all(torch.equal(tensor, wide[name]) for name, tensor in load_file(tmp_path / "file").items())
    again = {name: torch.zeros_like(tensor) for name, tensor in wide.items()}
    tensors.read(tmp_path / "file", again)
    assert all(torch.equal(tensor, wide[name]) for name, tensor in again.items())
    for other in ({"a": wide["a"]}, wide | {"b": torch.arange(4)}, wide | {"b": torch.arange(3.0)}):
        with pytest.raises(tensors.Unreadable, match="its tensors are not those"):
            tensors.read(tmp_path / "file", other)


def test_chain_is_synced_before_the_checkpoint(tmp_path: Path) -> None:
    done: list[str] = []

    def step(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **more: Any) -> Any:
            done.append(name)
            return real(*given, **more)

        return call

    synced = CheckpointManager(
        CheckpointStorage(tmp_path, 5, 1 << 30, Disk(), step("chain", lambda: None)), like(tmp_path), Worker()
    )
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
    keep(
        tmp_path,
        10,
        of=CheckpointManager(CheckpointStorage(tmp_path, 5, 1 << 30, Disk(), broken), like(tmp_path), Worker()),
    )
    assert rounds(tmp_path) == [5]
    assert [each.message for each in caplog.records] == ["no checkpoint before round 11: Input/output error"]


def test_checkpoint_without_worker_has_no_inner_state(tmp_path: Path) -> None:
    keep(tmp_path, 5, worker=Worker("is gone"))
    assert newest(tmp_path).inner is None and not (newest(tmp_path).path / INNER).exists()


def test_download_becomes_a_checkpoint(tmp_path: Path) -> None:
    async def main() -> None:
        async with checkpoints(tmp_path) as made:
            was = state()
            snapshot = made.snapshots.new(lineage_of(9), 9, was.index)
            assert snapshot.fresh and rounds(tmp_path) == []
            half = len(was.index.digests) // 2
            snapshot.put(0, was.anchor.numpy().tobytes())
            later = made.snapshots.new(lineage_of(9), 9, was.index)  # it was broken off, and is taken up again
            assert not later.fresh and bytes(later.chunk(0)) == was.anchor.numpy().tobytes()
            later.put(half, was.velocity.numpy().tobytes())
            made.take(later)
            assert made.snapshots.get(lineage_of(9)) is later

    asyncio.run(main())
    assert newest(tmp_path).round == 9 and newest(tmp_path).inner is None
    assert torch.equal(newest(tmp_path).parameters()[0], state().anchor)


# -- damage -----------------------------------------------------------------------------------------------------------


def test_every_bit_flip_and_truncation_is_detected(tmp_path: Path) -> None:
    keep(tmp_path, 5, 10)
    draw, said = random.Random(1), list[str]()
    files = sorted(newest(tmp_path).path.iterdir())
    assert [file.name for file in files] == [INNER, MANIFEST, OUTER]
    damages = [("flip", draw.choice(files)) for _ in range(1000)] + [("cut", draw.choice(files)) for _ in range(100)]
    for kind, file in damages:
        data = file.read_bytes()
        if kind == "cut":
            os.truncate(file, draw.randrange(len(data)))
        else:
            place = draw.randrange(len(data))
            bad = bytearray(data)
            bad[place] ^= 1 << draw.randrange(8)
            file.write_bytes(bad)
        said.clear()
        found = next(whole(tmp_path, said.append, RUN))
        assert found.round == 5 and len(said) == 1 and "000010-0a0a0a0a0a0a" in said[0] and "not used" in said[0]
        file.write_bytes(data)
    assert newest(tmp_path).round == 10


def test_missing_checkpoint_gives_one_line_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds no whole checkpoint$"):
        newest(tmp_path)
    keep(tmp_path, 5)
    (newest(tmp_path).path / OUTER).unlink()
    with pytest.raises(CheckpointError, match=r"holds no whole checkpoint; .*cannot be read: No such file") as error:
        newest(tmp_path)
    assert "\n" not in str(error.value)


def test_checkpoint_of_other_run_or_version_is_skipped(tmp_path: Path) -> None:
    keep(tmp_path, 5)
    said: list[str] = []
    assert list(whole(tmp_path, said.append, "ab" * 32)) == [] and "is of another run, 5f5f5f5f5f5f" in said.pop()
    manifest = newest(tmp_path).path / MANIFEST
    fields = json.loads(manifest.read_text())
    manifest.write_text(json.dumps(fields | {"format": 2}))
    assert rounds(tmp_path) == [] and not list(whole(tmp_path, said.append)) and "of format 2: update" in said[0]
    for nonsense in (b"", b"[]", b"\xff", b'{"digest": 1}', b"[" * 100_000, b"null"):
        manifest.write_bytes(nonsense)
        assert rounds(tmp_path) == []


def test_checkpoint_without_thread_count_is_used(tmp_path: Path) -> None:
    keep(tmp_path, 5)
    manifest = newest(tmp_path).path / MANIFEST
    fields = json.loads(manifest.read_text())
    for changed, found in (({}, 0), ({"threads": 7}, 7), ({"threads": "7"}, None)):
        old = {name: value for name, value in fields.items() if name not in ("digest", "threads")} | changed
        manifest.write_bytes(encode(old | {"digest": hashlib.sha256(encode(old)).hexdigest()}))
        assert [each.threads for each in whole(tmp_path, lambda line: None)] == ([] if found is None else [found])


def test_checkpoint_under_wrong_name_is_skipped(tmp_path: Path) -> None:
    keep(tmp_path, 5)
    (path := newest(tmp_path).path).rename(path.with_name("000007-050505050505"))
    assert rounds(tmp_path) == []


STEPS = ("mkdir", "open", "pwrite", "fsync", "rename", "posix_fallocate", "ftruncate")


def break_down(patch: pytest.MonkeyPatch, at: int, for_good: bool, number: int = errno.EIO) -> list[str]:
    """Have the `at`-th of these calls from now on fail, and those after it; returns the names of all that are made."""
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
        keep(place, 15, of=kept)  # and the next one is made as if nothing had been
        assert rounds(place)[0] == 15, made
    assert rounds(place) == [10, 5] and failed == set(STEPS) and at > 12


def test_unfinished_checkpoint_of_killed_peer_is_ignored(tmp_path: Path) -> None:
    keep(tmp_path, 5, 10)
    newest(tmp_path).path.rename(tmp_path / "checkpoints" / ".000010-0a0a0a0a0a0a")  # killed before the rename
    assert rounds(tmp_path) == [5]
    keep(tmp_path, 15)
    assert names(tmp_path) == ["000005-050505050505", "000015-0f0f0f0f0f0f"], "whoever made it, it is whole"


# -- room -------------------------------------------------------------------------------------------------------------


def test_last_three_checkpoints_are_kept(tmp_path: Path) -> None:
    made = keep(tmp_path, 5, 10, 15, 20)
    assert rounds(tmp_path) == [20, 15, 10] == [each.round for each in made.snapshots.held()]


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


def test_unreadable_checkpoint_directory_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_bytes(b"a file")
    with pytest.raises(CheckpointError, match=r"checkpoints cannot be read \(Not a directory\)"):
        newest(tmp_path)


def bytes_of_one(path: Path) -> int:
    keep(path, 5)
    return sum(file.stat().st_size for file in newest(path).path.iterdir())


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
    assert [each.round for each in tight.snapshots.held()] == [15, 10, 5]  # others find them all the same
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
    assert [each.round for each in made.snapshots.held()] == [20, 15, 10], "others need it all the same"


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
    assert [type(each.room) is MemoryBuffer for each in made.snapshots.held()] == [True, True, False]
    assert [each.message for each in caplog.records] == ["no checkpoint before round 26: No space left on device"]
    monkeypatch.undo()
    monkeypatch.setattr(keepers, "SMALL_BYTES", 4096)
    keep(tmp_path, 35, of=made)
    assert rounds(tmp_path)[0] == 35


def test_repeated_checkpoint_failure_warning_is_rate_limited(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = keep(tmp_path, 5, 10, 15, worker=Worker("refuses"))
    assert len(caplog.records) == 1 and made.age_seconds(1e9) is None
    monkeypatch.setattr(keepers, "AGAIN_SECONDS", 0.0)
    keep(tmp_path, 20, of=made)
    assert [each.message[:32] for each in caplog.records[1:]] == ["no checkpoint before round 21: t"]
    made = keep(tmp_path, 25)
    sealed = (newest(tmp_path).path / MANIFEST).stat().st_mtime
    assert (made.age_seconds(sealed + 60.0), made.age_seconds(sealed - 60.0)) == (60.0, 0.0)
    later = checkpoints(tmp_path)
    later.holds(newest(tmp_path))
    assert later.age_seconds(sealed + 60.0) == 60.0, "of a former life"


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


def test_worker_write_failure_costs_the_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = keep(tmp_path, 5, worker=Worker("refuses"))
    assert names(tmp_path) == [] and [each.round for each in made.snapshots.held()] == [5]
    assert bytes(made.snapshots.held()[0].chunk(0)) == state(5).anchor.numpy().tobytes()
    (record,) = caplog.records
    assert record.message.startswith("no checkpoint before round 6: the inner state cannot be written: No space")


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

        made = CheckpointManager(CheckpointStorage(tmp_path, 5, 1 << 30, Slow()), like(tmp_path), Worker())
        async with made:
            await made.keep(state(5), key(5))
            await made.keep(state(10), key(10))
            assert [each.round for each in made.snapshots.held()] == [5] and rounds(tmp_path) == []
            gate.set()
        assert rounds(tmp_path) == [5]

    asyncio.run(main())
    (record,) = caplog.records
    assert record.message == "no checkpoint before round 11: the one before is still being written"
