"""A peer's directory: what a crash, a full disk, a careless user or a hostile peer may do to it."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from node.membership.hello import MAX_ADDRESS_CHARACTERS, MAX_ADDRESSES
from node.runtime.identity import IdentityError
from node.storage import statedir
from node.storage.statedir import (
    MAX_CACHED_PEERS,
    MAX_INCARNATION,
    StateDir,
    StateError,
    holds_run,
    read_stage,
    write_atomically,
)

HERE = "/ip4/192.0.2.1/tcp/4001"


@pytest.fixture
def state(tmp_path: Path) -> StateDir:
    return StateDir.open(tmp_path / "state")


def content(directory: Path) -> dict[str, bytes]:
    return {str(each.relative_to(directory)): each.read_bytes() for each in directory.rglob("*") if each.is_file()}


def failing_write(number: int, reason: str) -> Callable[[Path, bytes], None]:
    def write(path: Path, data: bytes) -> None:
        raise OSError(number, reason, str(path))

    return write


# -- incarnations -----------------------------------------------------------------------------------------------------


def test_incarnations_are_numbered_and_share_one_identity(tmp_path: Path) -> None:
    opened = [StateDir.open(tmp_path / "a" / "b") for _ in range(3)]
    assert [each.incarnation for each in opened] == [1, 2, 3]
    assert len({each.identity.peer_id for each in opened}) == 1
    assert (tmp_path / "a" / "b").stat().st_mode & 0o077 == 0


def test_crash_before_number_is_stored_reuses_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    StateDir.open(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", lambda self, target: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            StateDir.open(tmp_path)
    assert (tmp_path / "incarnation").read_bytes() == b"1\n"
    assert StateDir.open(tmp_path).incarnation == 2


def test_incarnation_is_synced_before_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[bytes] = []
    monkeypatch.setattr(statedir, "sync_directory", lambda path: synced.append((path / "incarnation").read_bytes()))
    assert StateDir.open(tmp_path).incarnation == 1
    assert synced == [b"1\n"]


@pytest.mark.parametrize("damage", [b"", b"\n", b"x", b"-3", b"1.5", b"\xff\xfe", b"9" * 31, b"%d" % MAX_INCARNATION])
def test_damaged_incarnation_is_not_guessed(tmp_path: Path, damage: bytes) -> None:
    StateDir.open(tmp_path)
    (tmp_path / "incarnation").write_bytes(damage)
    with pytest.raises(StateError, match="damaged: write a number into it"):
        StateDir.open(tmp_path)
    assert (tmp_path / "incarnation").read_bytes() == damage


def test_unusable_directory_gives_one_line_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StateError, match="--state-dir") as caught:
        StateDir.open(tmp_path / "file" / "state")
    assert "\n" not in str(caught.value)
    StateDir.open(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(statedir, "write_atomically", failing_write(errno.EROFS, "Read-only file system"))
        with pytest.raises(StateError, match=r"incarnation \(Read-only file system\)"):
            StateDir.open(tmp_path)
    (tmp_path / "incarnation").unlink()
    (tmp_path / "incarnation").mkdir()
    with pytest.raises(StateError, match=r"incarnation.*--state-dir"):
        StateDir.open(tmp_path)


def test_identity_readable_by_others_uses_no_incarnation(tmp_path: Path) -> None:
    StateDir.open(tmp_path)
    (tmp_path / "identity.key").chmod(0o644)
    with pytest.raises(IdentityError, match="chmod 600"):
        StateDir.open(tmp_path)
    (tmp_path / "identity.key").chmod(0o600)
    assert StateDir.open(tmp_path).incarnation == 2


# -- the run ----------------------------------------------------------------------------------------------------------


def test_resuming_same_run_keeps_its_files(state: StateDir) -> None:
    state.begin("aa" * 32, "", b"sealed", b"sample")
    state.rounds.write_bytes(b"lines")
    state.begin("aa" * 32, "aa" * 32, b"sealed", b"")
    assert (state.manifest(), state.sample.read_bytes(), state.rounds.read_bytes()) == (b"sealed", b"sample", b"lines")
    assert not (state.path / "past").exists()


def test_files_of_other_runs_are_set_aside_repeatedly(state: StateDir) -> None:
    runs = ["aa" * 32, "bb" * 32, "aa" * 32, "bb" * 32, "aa" * 32]
    before, written = "", set()
    for number, run in enumerate(runs):
        state.begin(run, before, f"sealed {number}".encode(), f"sample {number}".encode())
        assert not state.rounds.exists() and not state.peers()
        state.rounds.write_text(f"lines {number}")
        state.remember({f"peer {number}": [HERE]})
        state.keep_text(f"text {number}".encode())
        written |= set(content(state.path).values())
        before = run
    assert written <= set(content(state.path).values()) | {f"{number}".encode() for number in range(9)}
    aside = {each.name for each in (state.path / "past").iterdir()}
    assert aside == {"a" * 16, "a" * 16 + "-2", "b" * 16, "b" * 16 + "-2"}
    assert state.manifest() == b"sealed 4" and state.identity.path.exists()


@pytest.mark.parametrize("there", ["another run", "nothing", "the same run"])
def test_withdrawn_run_leaves_the_directory_unchanged(state: StateDir, there: str) -> None:
    before = "" if there == "nothing" else ("aa" if there == "another run" else "bb") * 32
    if before:
        state.begin(before, "", b"sealed", b"sample")
        state.rounds.write_bytes(b"lines")
        (state.path / "checkpoints" / "000005-050505050505").mkdir(parents=True)
        (state.path / "checkpoints" / "000005-050505050505" / "outer.safetensors").write_bytes(b"state")
    state = StateDir.open(state.path)
    was = content(state.path)
    state.begin("bb" * 32, before, b"sealed" if there == "the same run" else b"new", b"")
    if there != "the same run":
        state.certificates.touch()
    state.withdraw()
    assert content(state.path) == was
    assert [*(state.path / "past").glob("*")] == []
    state.withdraw()
    assert content(state.path) == was


def test_later_session_of_a_run_withdraws_nothing(state: StateDir) -> None:
    """Of the process that has begun it: a peer that cannot train in another stage goes back to what it had."""
    state.begin("aa" * 32, "", b"sealed", b"sample")
    state.enter_stage(0, b'{"stage": 0}')
    state.begin("aa" * 32, "aa" * 32, b"sealed", b"sample")
    was = content(state.path)
    state.withdraw()
    assert content(state.path) == was


def test_scratch_files_are_not_set_aside(state: StateDir) -> None:
    state.begin("aa" * 32, "", b"old", b"")
    (state.path / "scratch").mkdir()
    (state.path / "scratch" / "part").write_bytes(b"of a past round")
    state.begin("bb" * 32, "aa" * 32, b"new", b"")
    assert not (state.path / "scratch").exists()
    assert content(state.path / "past" / ("aa" * 8)).keys() == {"manifest.bin"}


def test_crash_while_setting_files_aside_loses_none(state: StateDir, monkeypatch: pytest.MonkeyPatch) -> None:
    state.begin("aa" * 32, "", b"old", b"sample")
    state.rounds.write_bytes(b"lines")
    rename, left = Path.rename, 1

    def crash(self: Path, target: Path) -> Path:
        nonlocal left
        if not left:
            raise KeyboardInterrupt
        left -= 1
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", crash)
        with pytest.raises(KeyboardInterrupt):
            state.begin("bb" * 32, "aa" * 32, b"new", b"")
    assert state.manifest() == b""
    state.begin("bb" * 32, "", b"new", b"")
    assert {b"old", b"sample", b"lines", b"new"} <= set(content(state.path).values())
    assert state.manifest() == b"new" and not state.rounds.exists()


def test_full_disk_at_begin_gives_one_line_error(state: StateDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statedir, "write_atomically", failing_write(errno.ENOSPC, "No space left on device"))
    with pytest.raises(StateError, match=r"manifest.bin \(No space left on device\): free space there"):
        state.begin("aa" * 32, "", b"sealed", b"")
    state.keep_text(b"text")
    state.remember({"p": [HERE]})  # neither raises, so that the round goes on


def test_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_atomically(tmp_path / "file", b"old")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_atomically(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_bytes() == b"old"


# -- known peers ------------------------------------------------------------------------------------------------------


def test_newest_peers_come_first_and_oldest_are_dropped(state: StateDir) -> None:
    state.remember({f"old{number}": [HERE] for number in range(MAX_CACHED_PEERS)})
    state.remember({"new": [HERE, HERE + "1"]})
    assert len(state.peers()) == MAX_CACHED_PEERS
    assert next(iter(state.peers().items())) == ("new", (HERE, HERE + "1"))
    assert f"old{MAX_CACHED_PEERS - 1}" not in state.peers()
    assert list(state.addresses())[:2] == [f"{HERE}/p2p/new", f"{HERE}1/p2p/new"]


def test_unchanged_cache_is_not_rewritten(state: StateDir, monkeypatch: pytest.MonkeyPatch) -> None:
    state.remember({"p": [HERE]})
    monkeypatch.setattr(statedir, "write_atomically", lambda path, data: pytest.fail("written"))
    state.remember({"p": [HERE]})


def test_cached_addresses_are_bounded(state: StateDir) -> None:
    many = [f"{HERE}{number}" for number in range(3 * MAX_ADDRESSES)]
    state.remember({"p": ["x" * (MAX_ADDRESS_CHARACTERS + 1), "\ud800", "\x1b[2J", "/dns/é", *many]})
    assert state.peers() == {"p": tuple(many[:MAX_ADDRESSES])}


def test_largest_cache_can_be_read_back(state: StateDir) -> None:
    worst = ["\\" * (MAX_ADDRESS_CHARACTERS - 2) + f"{number:02}" for number in range(MAX_ADDRESSES)]
    state.remember({f"{number:064}": worst for number in range(2 * MAX_CACHED_PEERS)})
    assert len(state.peers()) == MAX_CACHED_PEERS and state.peers()[f"{0:064}"] == tuple(worst)


@pytest.mark.parametrize(
    "damage",
    [b"", b"{", b"[1]", b"null", b"7", b"\xff", b"[" * 100_000, b'{"p": ' * 50_000, b'{"p": "x"}', b"1" * 10_000],
    ids=lambda damage: damage[:8].decode(errors="replace"),
)
def test_damaged_cache_counts_as_empty_and_is_replaced(state: StateDir, damage: bytes) -> None:
    (state.path / "peers.json").write_bytes(damage)
    assert state.peers() == {} and list(state.addresses()) == []
    state.remember({"p": [HERE]})
    assert state.peers() == {"p": (HERE,)}


def test_hostile_cache_is_read_partially(state: StateDir) -> None:
    entries = {"a": [HERE, 7, None, ["x"], "y" * 1000], "b": "no list", "c": []}
    (state.path / "peers.json").write_text(json.dumps(entries | {f"p{number}": [] for number in range(1000)}))
    assert state.peers()["a"] == (HERE,) and "b" not in state.peers() and state.peers()["c"] == ()
    assert len(state.peers()) == MAX_CACHED_PEERS


@pytest.mark.parametrize(
    "damage",
    [
        b"", b"{", b"[]", b"7", b'{"asked": ["a"]}', b'{"asked": ["a"], "took": 7}', b'{"asked": ["a"], "took": [7]}',
        b'{"asked": ["a"], "took": ["b", "c"]}', b'{"asked": ["a"], "took": ["b\\n"]}',
    ],
)  # fmt: skip
def test_damaged_listen_file_costs_only_the_port(state: StateDir, damage: bytes) -> None:
    (state.path / "listen.json").write_bytes(damage)
    assert state.listening(("a",)) == ()
    state.listens(("a",), ("b",))
    assert state.listening(("a",)) == ("b",) and state.listening(("a", "c")) == () == state.listening(("b",))


def test_resumable_run_needs_peers_or_a_state(state: StateDir) -> None:
    assert not holds_run(state.path)
    state.remember({"p": [HERE]})
    assert not holds_run(state.path), "peers of no run"
    state.begin("aa" * 32, "", b"sealed", b"")
    assert not holds_run(state.path), "a run without peers to ask"
    state.remember({"p": [HERE]})
    assert holds_run(state.path), "a run and its peers"
    (state.path / "peers.json").unlink()
    assert not holds_run(state.path), "no peers to ask, and no checkpoint to start from"
    (state.path / "checkpoints" / "000000-00").mkdir(parents=True)
    assert holds_run(state.path), "a checkpoint"
    for _ in range(2):
        state.forget()
        assert not holds_run(state.path) and not state.peers() and state.manifest() and state.is_over
    state.begin("bb" * 32, "aa" * 32, b"another", b"")
    assert not state.is_over and not (state.path / "checkpoints").exists()
    assert (state.path / "past" / ("aa" * 8) / "checkpoints" / "000000-00").exists()


def _old_stage(path: Path) -> dict[str, bytes]:
    """A directory as earlier versions kept a stage, with what is to be in stages/2/ afterwards."""
    files = {"checkpoints/000005-05/outer.safetensors": b"state", "certificates.bin": b"chain"}
    files["stage.json"] = b'{"stage": 2}'
    for name, data in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(data)
    return files


@pytest.mark.parametrize("renames", range(4))
def test_stage_of_an_earlier_version_is_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, renames: int
) -> None:
    """Without a loss, also if the first attempt dies after so many files."""
    files, rename = _old_stage(tmp_path), Path.rename

    def crash(self: Path, target: Path) -> Path:
        nonlocal renames
        if self.parent == tmp_path and self.name in ("certificates.bin", "checkpoints", "stage.json"):
            if not renames:
                raise KeyboardInterrupt
            renames -= 1
        return rename(self, target)

    with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
        patch.setattr(Path, "rename", crash)
        StateDir.open(tmp_path)
    state = StateDir.open(tmp_path)
    assert content(tmp_path / "stages" / "2") == files
    assert read_stage(tmp_path) == 2 and state.certificates.read_bytes() == b"chain"
    assert not any((tmp_path / name).exists() for name in ("checkpoints", "certificates.bin", "stage.json", "past"))


def test_stages_keep_what_is_theirs(state: StateDir) -> None:
    """A prepared stage changes nothing before the switch, which one write makes. A stage left before is found again."""
    state.begin("aa" * 32, "", b"sealed", b"")
    state.enter_stage(0, b'{"stage": 0}')
    state.certificates.write_bytes(b"of 0")
    state.prepare_stage(1, b'{"stage": 1}')
    (state.stage_home(1) / "certificates.bin").write_bytes(b"of 1")
    assert state.certificates.read_bytes() == b"of 0" and read_stage(state.path) == 0
    state.switch_stage(1)
    assert state.certificates.read_bytes() == b"of 1" and read_stage(state.path) == 1
    assert not state.is_pinned
    state.switch_stage(1, pinned=True)
    assert state.is_pinned and read_stage(state.path) == 1
    state.prepare_stage("1-2", b'{"stage": 1}')
    state.switch_stage("1-2")
    assert state.home.name == "1-2" and read_stage(state.path) == 1 and len(state.stage_homes(1)) == 2
    state.enter_stage(0, b'{"stage": 0}')
    assert StateDir.open(state.path).certificates.read_bytes() == b"of 0" and not state.is_pinned
    state.leave_stage()
    assert not state.stage() and state.home == state.path
    assert (state.path / "past" / "stage" / "0" / "certificates.bin").read_bytes() == b"of 0"
    for damaged in (b"x", b"", b"1 2", b"pinned", b"1 pinned 1", b"\xff"):
        (state.path / "stage").write_bytes(damaged)
        with pytest.raises(StateError, match=r"/stage is damaged: write the number"):
            holds_run(state.path)


def test_stage_is_read_or_named_as_damaged(tmp_path: Path) -> None:
    assert read_stage(tmp_path) == 0
    file = tmp_path / "stage.json"
    file.write_text('{"stage": 2}')
    assert read_stage(tmp_path) == 2
    for content in (b"", b"{", b"2", b"[1]", b"{}", b'{"stage": "1"}', b'{"stage": -1}', b'{"stage": true}', b"\xff"):
        file.write_bytes(content)
        with pytest.raises(StateError, match=r"stage\.json is damaged: write "):
            read_stage(tmp_path)
    file.unlink()
    file.mkdir()
    with pytest.raises(StateError, match=r"stage\.json cannot be read \(Is a directory\)"):
        read_stage(tmp_path)
