"""The control socket: bounded, for this user only, and correct about peers that are gone."""

from __future__ import annotations

import asyncio
import json
import math
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from node.reporting.status import parse
from node.session.pausing import PauseController
from node.session.processes import carry_out
from node.ui import control
from node.ui.control import ControlServer, ControlUnavailable, ask, claimed, running
from tests.support.paths import REPOSITORY
from tests.support.status_examples import STATUS


def soon(seconds: float = 2.0) -> float:
    return asyncio.get_running_loop().time() + seconds


UNUSED: Any = None


async def unknown(request: Mapping[str, Any]) -> None:
    pass


def control_server(
    state_dir: Path, finish: Callable[[], None] = lambda: None, pauses: PauseController = UNUSED
) -> ControlServer:
    others = dict.fromkeys(("limits", "swarm", "doctor", "move"), UNUSED)
    command = partial(carry_out, finish=finish, pauses=pauses, private=unknown, **others)
    return ControlServer(state_dir, lambda: STATUS, command)


async def raw(state_dir: Path, request: bytes) -> bytes:
    path = json.loads((state_dir / "control.json").read_text())["socket"]
    reader, writer = await asyncio.open_unix_connection(path)
    writer.write(request)
    try:
        return await asyncio.wait_for(reader.read(1 << 20), 10)
    except OSError:
        return b""
    finally:
        writer.transport.abort()


async def test_status_is_returned_and_finish_passed_on(tmp_path: Path) -> None:
    asked: list[int] = []
    async with control_server(tmp_path, lambda: asked.append(1)):
        answer = await ask(tmp_path, "status", soon())
        assert asked == [] and await ask(tmp_path, "finish", soon()) == {"ok": True}
    assert asked == [1]
    assert answer["loss"] is None and answer["eta_seconds"] is None
    parsed = parse(answer)
    assert math.isnan(parsed.loss) and replace(parsed, loss=0.0) == replace(STATUS, loss=0.0)


class Pauses(PauseController):
    """Refuses ends in the past, as a real controller does; `asked` holds the requests."""

    def __init__(self) -> None:
        self.asked: list[object] = []

    def pause(
        self, cause: str = "", until: float | None = None, after_round: bool = False, away: bool | None = None
    ) -> str:
        if until is not None and not (math.isfinite(until) and until >= 1.0):
            raise ValueError("the end of a pause must be in the future")
        self.asked.append((cause, until, after_round))
        return "paused"

    def resume(self) -> str:
        self.asked.append("resume")
        return "works"


async def test_pauses_are_passed_on_or_refused(tmp_path: Path) -> None:
    pauses = Pauses()
    async with control_server(tmp_path, pauses=pauses):
        assert await ask(tmp_path, "pause", soon(), until=None, after_round=True) == {"ok": True, "line": "paused"}
        assert await ask(tmp_path, "resume", soon()) == {"ok": True, "line": "works"}
        past = await ask(tmp_path, "pause", soon(), until=0.5, after_round=False)
        assert past == {"ok": False, "line": "the end of a pause must be in the future"}
        huge = await ask(tmp_path, "pause", soon(), until=10**400, after_round=False)
        assert not huge["ok"] and "too large" in huge["line"]
        for wrong in ({"until": "18:00", "after_round": False}, {"until": None, "after_round": 1}, {}):
            with pytest.raises(ControlUnavailable, match="another version"):
                await ask(tmp_path, "pause", soon(), **wrong)
    assert pauses.asked == [("", None, True), "resume"]


async def test_socket_is_private_and_removed_at_exit(tmp_path: Path) -> None:
    async with control_server(tmp_path):
        place = json.loads((tmp_path / "control.json").read_text())
        directory = Path(place["socket"]).parent
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        assert place["pid"] == os.getpid()
        assert len(place["socket"]) < 104
    assert not directory.exists()
    assert os.listdir(tmp_path) == []


async def test_created_files_are_private_to_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    before = os.umask(0)
    try:
        with claimed(None) as directory:
            (directory / ".control.json.new").touch(0o644)  # a killed peer's
            async with control_server(directory):
                made = (directory.parent, directory, *directory.iterdir())
                modes = [stat.S_IMODE(each.stat().st_mode) for each in made]
    finally:
        os.umask(before)
    assert modes == [0o700, 0o700, 0o600]


async def test_malformed_requests_get_errors_and_long_none(tmp_path: Path) -> None:
    async with control_server(tmp_path):
        for request_line in (b"\n", b"[]\n", b'{"do": "dance"}\n', b"\xff\xfe\n", b"[" * 900 + b"\n"):
            assert "error" in json.loads(await raw(tmp_path, request_line)), request_line
            assert (await ask(tmp_path, "status", soon()))["round"] == 5
        assert await raw(tmp_path, b"x" * 100_000) == b""
        assert (await ask(tmp_path, "status", soon()))["round"] == 5


async def test_silent_clients_are_bounded_and_time_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "SERVE_SECONDS", 0.3)
    async with control_server(tmp_path) as server:
        silent = [asyncio.create_task(raw(tmp_path, b"")) for _ in range(8)]
        await asyncio.sleep(0.1)
        assert len(server._clients) == control.MAX_CLIENTS
        await asyncio.gather(*silent)
        assert not server._clients
        assert (await ask(tmp_path, "status", soon()))["round"] == 5


async def test_exit_does_not_wait_for_clients(tmp_path: Path) -> None:
    async with control_server(tmp_path):
        silent = asyncio.create_task(raw(tmp_path, b""))
        await asyncio.sleep(0.1)
        began = asyncio.get_running_loop().time()
    assert asyncio.get_running_loop().time() - began < 0.5
    await silent


async def test_unusable_control_file_counts_as_no_peer(tmp_path: Path) -> None:
    for content in (None, "", "{}", "[]", "nonsense", '{"socket": 3}', '{"socket": "/nowhere"}', "[" * 4000):
        if content is not None:
            (tmp_path / "control.json").write_text(content)
        with pytest.raises(ControlUnavailable, match=r"no peer runs in .*: start one"):
            await ask(tmp_path, "status", soon())
        async with control_server(tmp_path):
            assert (await ask(tmp_path, "status", soon()))["round"] == 5


_KILLED = """
import asyncio, os, signal, sys
from pathlib import Path
from node.ui.control import ControlServer
async def main():
    async with ControlServer(Path(sys.argv[1]), None, None):
        os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""


@pytest.fixture
def own_sockets(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Sockets in a short directory of their own: any peer that starts removes what killed ones left beside its own."""
    with tempfile.TemporaryDirectory(prefix="st-", dir="/tmp") as directory:
        monkeypatch.setenv("TMPDIR", directory)
        monkeypatch.setattr(tempfile, "tempdir", directory)
        yield


def killed(state_dir: Path) -> Path:
    """The socket of a peer that was killed while it served."""
    subprocess.run([sys.executable, "-c", _KILLED, str(state_dir)], cwd=REPOSITORY, timeout=30)
    left = Path(json.loads((state_dir / "control.json").read_text())["socket"])
    assert left.exists()
    return left


@pytest.mark.usefixtures("own_sockets")
async def test_leftovers_of_killed_peer_are_cleared(tmp_path: Path) -> None:
    left = killed(tmp_path)
    with pytest.raises(ControlUnavailable, match="no peer runs"):
        await ask(tmp_path, "status", soon())
    async with control_server(tmp_path):
        assert not left.parent.exists()
        assert (await ask(tmp_path, "status", soon()))["round"] == 5


@pytest.mark.parametrize(
    "name, pid", [("precious", 1), ("starling-x/control", os.getppid())], ids=["no socket", "copied directory"]
)
async def test_cleanup_never_deletes_foreign_files(tmp_path: Path, name: str, pid: int) -> None:
    foreign = tmp_path / name
    foreign.parent.mkdir(exist_ok=True)
    foreign.write_text("mine")
    (tmp_path / "control.json").write_text(json.dumps({"pid": pid, "socket": str(foreign)}))
    async with control_server(tmp_path):
        assert (await ask(tmp_path, "status", soon()))["round"] == 5
    assert foreign.read_text() == "mine"


async def test_stopped_peer_differs_from_missing_peer(tmp_path: Path) -> None:
    async def mute(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.transport.abort()

    path = tmp_path / "s"
    server = await asyncio.start_unix_server(mute, path)
    (tmp_path / "control.json").write_text(json.dumps({"pid": 77, "socket": str(path)}))
    with pytest.raises(ControlUnavailable, match=r"process 77\) does not answer"):
        await ask(tmp_path, "status", soon(0.2))
    server.close()
    await asyncio.sleep(0.05)


async def test_failed_control_socket_does_not_stop_the_peer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with control_server(tmp_path / "missing"):
        pass
    assert "cannot reach this peer" in caplog.text


async def test_running_peers_are_found(tmp_path: Path) -> None:
    first, second, third = (tmp_path / f"peer-{n}" for n in (1, 2, 3))
    for each in (first, second, third):
        each.mkdir()
    (third / "control.json").write_text('{"pid": 1, "socket": "/nowhere/control"}')
    assert await running(tmp_path / "none", soon()) == ()
    async with control_server(first):
        assert await running(tmp_path, soon()) == (first,)
        async with control_server(second):
            assert await running(tmp_path, soon()) == (first, second)


def test_first_free_directory_is_claimed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with claimed(None) as first, claimed(None) as second:
        assert (first, second) == (tmp_path / "starling" / "peer-1", tmp_path / "starling" / "peer-2")
        with pytest.raises(BlockingIOError, match="another running peer"), claimed(first):
            pass
    with claimed(None) as again, claimed(tmp_path / "mine" / "own") as own:
        assert (again, own) == (first, tmp_path / "mine" / "own")
    with pytest.raises(BlockingIOError, match="other"), claimed(tmp_path / "a"):
        raise BlockingIOError("other")
