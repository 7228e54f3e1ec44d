"""Facts of real faults: in the state directory, and of ports; and how an examination of a running peer is polled."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest

from node.cli import doctor
from node.cli.app import main
from node.config.peer_sources import load_peer
from node.doctor import machine_probes
from node.doctor.findings import Finding, Level
from node.doctor.helpers import NetworkExamination
from node.doctor.machine import check_identity, check_storage
from node.doctor.machine_probes import hardware, holder, storage, system_clock, torch_devices
from node.doctor.run import check_run, saved_run
from node.runtime.identity import create
from node.runtime.listening import listen
from node.runtime.locks import hold
from node.session import processes
from node.session.examination import DoctorService, Examination, ExaminationAlone
from node.session.fatal import FatalPeerError
from node.session.peer import Peer
from node.session.processes import carry_out
from node.session.transport import make_transport
from node.storage.statedir import StateDir
from node.ui.control import MAX_REQUEST_BYTES, ControlServer, ControlUnavailable, ask
from tests.support.restart_examples import flip_bit, lived
from tests.support.status_examples import STATUS
from tests.support.waiting import now, until

CONFIG = load_peer({"listen": ["/ip4/127.0.0.1/tcp/0"], "nat": False}, {}, None)


def levels(findings: list[Finding]) -> list[Level]:
    return [each.level for each in findings]


# -- the state directory -----------------------------------------------------------------------------------------------


@pytest.fixture
def here(tmp_path: Path) -> StateDir:
    return StateDir.open(tmp_path / "peer")


def saved(here: StateDir, is_running: bool = False) -> tuple[Level, str]:
    (line,) = check_run(saved_run(here.path, here.manifest(), is_running))
    return line.level, line.text


def test_saved_run_is_whole_or_its_damage_named(here: StateDir) -> None:
    assert saved(here) == (Level.OK, "the state directory holds no run yet")
    _, made = lived(here)
    level, text = saved(here)
    assert level is Level.OK and text.endswith("certificates lead to round 5, checkpoint 4 is whole")
    before = here.certificates.read_bytes()
    here.certificates.write_bytes(before[:-5])
    assert saved(here)[0] is Level.WARN and "damaged after round 4" in saved(here)[1]
    assert saved(here, is_running=True)[0] is Level.OK  # it is being written
    here.certificates.write_bytes(before)
    flip_bit(made[1].path / "outer.safetensors", 300)
    assert saved(here)[0] is Level.WARN and "the one before round 3" in saved(here)[1]
    flip_bit(made[0].path / "manifest.json", 30)
    assert saved(here)[0] is Level.FAIL and "there is no other" in saved(here)[1]
    for damage in (lambda it: flip_bit(it, 40), lambda it: it.write_bytes(b"\x9f junk"), Path.unlink, Path.mkdir):
        damage(file := here.path / "manifest.bin")
        (line,) = check_run(saved_run(here.path, here.manifest(), False))
        if file.exists():
            assert line.level is Level.FAIL and f"{file} cannot be used" in line.text and "join --new" in line.cure


def test_large_checkpoint_is_compared_by_sizes_only(here: StateDir, monkeypatch: pytest.MonkeyPatch) -> None:
    _, made = lived(here)
    monkeypatch.setattr("node.doctor.run.VERIFY_BYTES", 0)
    flip_bit(made[1].path / "outer.safetensors", 300)
    assert saved(here)[0] is Level.OK
    with (made[1].path / "outer.safetensors").open("ab") as file:
        file.write(b"x")
    assert saved(here)[0] is Level.WARN


async def test_sizes_of_the_state_directory(here: StateDir, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in (("checkpoints/1", 100), ("checkpoints/2", 300), ("past/run/checkpoints/3", 50)):
        (here.path / name).mkdir(parents=True)
        (here.path / name / "outer").write_bytes(bytes(size))
    facts = await storage(CONFIG, here.path)
    assert (facts.checkpoint_bytes, facts.largest_bytes, facts.past_bytes) == (400, 300, 50)
    assert facts.free_bytes > 0 and facts.fsync_seconds < 5 and not facts.problem
    missing = await storage(CONFIG, here.path / "a" / "b")
    assert not missing.exists and not missing.problem and not (here.path / "a").exists()

    def full(directory: Path) -> None:
        raise OSError(28, "No space left on device")

    (here.path / "file").touch()
    assert levels(check_storage(await storage(CONFIG, here.path / "file" / "peer"))) == [Level.FAIL]
    monkeypatch.setattr(machine_probes, "_fsync", full)
    (line,) = check_storage(await storage(CONFIG, here.path))
    assert line.level is Level.FAIL and "No space left" in line.text


def test_identity_that_others_can_read_is_named(here: StateDir) -> None:
    assert levels(check_identity(holder(here.path, False, False))) == [Level.OK]
    os.chmod(here.path / "identity.key", 0o644)
    (line,) = check_identity(holder(here.path, False, False))
    assert line.level is Level.FAIL and "chmod 600" in line.cure
    assert holder(here.path / "none", True, False).peer == ""


def test_examined_directory_stays_free_for_a_peer_that_starts(here: StateDir, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[bool, bool]] = []

    async def run(examination: ExaminationAlone, tell: Callable[[Finding], None]) -> bool:
        if free := hold(here.path):
            os.close(free)
        seen.append((free is not None, examination._is_held))
        return True

    monkeypatch.setattr(ExaminationAlone, "run", run)
    before = here.path.stat().st_mtime_ns
    assert main(["doctor", "--state-dir", str(here.path)]) == 0
    assert here.path.stat().st_mtime_ns == before
    held = hold(here.path)
    assert held is not None and main(["doctor", "--state-dir", str(here.path)]) == 0
    os.close(held)
    assert seen == [(True, False), (False, True)]


def test_file_is_no_state_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert main(["doctor", "--state-dir", str(tmp_path / "file")]) == 2
    assert capsys.readouterr().err.startswith(f"starling: {tmp_path / 'file'} is no directory: ")


def test_json_has_what_was_found_before_the_peer_went_away(
    here: StateDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    finding = {"check": "storage", "level": "ok", "text": "all is well", "cure": ""}
    answers = iter([{"ok": True, "number": 1, "over": False, "findings": [finding]}])

    async def answer(*_: object, **__: object) -> dict[str, Any]:
        if found := next(answers, None):
            return found
        raise ControlUnavailable("no peer runs there")

    monkeypatch.setattr(doctor, "ask", answer)
    monkeypatch.setattr(doctor, "POLL_SECONDS", 0.0)
    assert main(["doctor", "--json", "--state-dir", str(here.path)]) == 1
    said = json.loads(capsys.readouterr().out)
    assert said == {"findings": [finding], "code": 1, "error": "no peer runs there"}


# -- this machine ------------------------------------------------------------------------------------------------------


@pytest.mark.real
def test_devices_and_ports_of_this_machine(tmp_path: Path) -> None:
    devices = torch_devices()
    assert not devices.problem
    (taken,) = listen(["127.0.0.1"], 0, 1)
    with taken:
        config = load_peer({"page": True, "page_port": taken.getsockname()[1]}, {}, None)
        facts = hardware(config, tmp_path, devices, None)
    assert facts.is_page_port_taken and facts.cores >= 1 and facts.open_files > 0
    assert not hardware(config, tmp_path, devices, None).is_page_port_taken
    assert system_clock().is_set_by_network in (True, False, None)


@pytest.mark.real
async def test_taken_port_is_named_and_the_rest_examined(tmp_path: Path) -> None:
    (taken,) = listen(["127.0.0.1"], 0, 1)
    create(tmp_path / "identity.key")
    with ExitStack() as stack:
        stack.enter_context(taken)
        config = load_peer({"listen": [f"/ip4/127.0.0.1/tcp/{taken.getsockname()[1]}"], "nat": False}, {}, None)
        told: list[Finding] = []
        assert await ExaminationAlone(config, tmp_path, "", False).run(told.append)
        view: Any = SimpleNamespace(say=lambda _: None)
        with pytest.raises(FatalPeerError, match="is in use by another program") as refused:
            await Peer(config, None, StateDir.open(tmp_path / "peer"), view).run()
    assert refused.value.code == 1, "a service tries again"
    failed = [each for each in told if each.level is Level.FAIL]
    assert [each.check for each in failed] == ["listen"] and "is in use by another program" in failed[0].text
    assert {"programs", "storage", "identity", "hardware", "run"} <= {each.check for each in told}
    assert not {"reach", "outside"} & {each.check for each in told}


@pytest.mark.real
async def test_service_says_once_that_its_port_is_taken_and_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (taken,) = listen(["127.0.0.1"], 0, 1)
    address = f"/ip4/127.0.0.1/tcp/{taken.getsockname()[1]}"
    config = load_peer({"listen": [address], "nat": False}, {}, None)
    said: list[str] = []
    view: Any = SimpleNamespace(say=said.append)
    monkeypatch.setattr(processes, "PORT_PAUSES_SECONDS", (0.1, 0.1))
    monkeypatch.setenv("SYSTEMD_EXEC_PID", str(os.getpid()))
    made: list[Any] = []

    def counted(*arguments: Any) -> Any:
        made.append(arguments)
        if len(made) == 3:
            taken.close()
        return make_transport(*arguments)

    monkeypatch.setattr(processes, "make_transport", counted)
    peer = processes.PeerProcesses(config, StateDir.open(tmp_path), view)
    async with asyncio.timeout(30), peer.running(lambda _: None, lambda *_: None):
        assert peer.transport.listening == (address,)
    (line,) = said
    assert "is in use by another program" in line and "this service waits" in line


async def test_directory_of_a_silent_process_is_left_to_it(tmp_path: Path) -> None:
    """Its ports are not tried: they would be taken by that process, which is no fault of its own."""
    create(tmp_path / "identity.key")
    told: list[Finding] = []
    assert await ExaminationAlone(CONFIG, tmp_path, "", True).run(told.append)
    (failed,) = [each for each in told if each.level is Level.FAIL]
    assert failed.check == "identity" and "does not answer" in failed.text
    (unknown,) = [each for each in told if each.level is Level.UNKNOWN]
    assert unknown.check == "network" and "may use its ports" in unknown.text


async def test_own_address_is_no_fault_of_this_peer() -> None:
    """Nothing is dialled: the transport here could not."""
    transport: Any = SimpleNamespace(me="own", addresses=(), listening=())
    for saved_as, given in (("", "own"), ("saved", "saved")):
        address = f"/ip4/192.0.2.1/tcp/1/p2p/{given}"
        network = NetworkExamination(transport, CONFIG, given=address, met={}, itself=saved_as)
        (line,) = await network.reach()
        assert line.level is Level.WARN and "that is this peer itself" in line.text and "another one" in line.cure
        await network.forget_helpers()


# -- a running peer ----------------------------------------------------------------------------------------------------


class SlowExamination(Examination):
    """Finds one thing when `go` is set, another at its end."""

    begun = 0
    go: asyncio.Event

    async def run(self, tell: Callable[[Finding], None]) -> bool:
        SlowExamination.begun += 1
        tell(Finding("first", Level.OK, "first"))
        await self.go.wait()
        tell(Finding("last", Level.WARN, "last", "mend it"))
        return True


async def test_examination_is_begun_once_and_polled(tmp_path: Path) -> None:
    SlowExamination.begun, SlowExamination.go = 0, asyncio.Event()
    given: list[str] = []

    def begin(address: str) -> Examination:
        given.append(address)
        if address == "early":
            raise ValueError("the peer is starting: ask again in a few seconds")
        return SlowExamination(CONFIG, tmp_path)

    async with DoctorService(begin) as examiner:
        unused: Any = None
        others = dict.fromkeys(("finish", "pauses", "limits", "swarm", "move"), unused)
        others["private"] = AsyncMock(return_value=None)
        command = partial(carry_out, doctor=examiner.ask, **others)
        async with ControlServer(tmp_path, lambda: STATUS, command):

            async def asks(number: int | None, address: str = "") -> dict[str, Any]:
                return await ask(tmp_path, "doctor", now() + 5, number=number, address=address)

            early = await asks(None, "early")
            assert early == {"ok": False, "line": "the peer is starting: ask again in a few seconds"}
            assert (await asks(None, "x" * (MAX_REQUEST_BYTES // 2)))["number"] == 1
            await until(lambda: SlowExamination.begun == 1, 5)
            refused = await asks(None, "/ip4/192.0.2.2/tcp/1/p2p/x")
            assert not refused["ok"] and re.search(r"an examination with x+ runs: ask again in \d+ s$", refused["line"])
            joined = await asks(None, "x" * (MAX_REQUEST_BYTES // 2))
            assert (joined["number"], joined["over"]) == (1, False) and joined["findings"][0]["check"] == "first"
            SlowExamination.go.set()
            await until(lambda: examiner.ask(1, "")["over"], 5)
            assert [each["cure"] for each in (await asks(1))["findings"]] == ["", "mend it"]
            SlowExamination.go.clear()
            assert (await asks(None))["number"] == 2 and not (await asks(1))["ok"]
            assert not (await asks(2))["over"]
            for wrong in ({"number": "1", "address": ""}, {"number": 1}, {"number": None, "address": 3}):
                with pytest.raises(ControlUnavailable, match="another version"):
                    await ask(tmp_path, "doctor", now() + 5, **wrong)
    assert len(given) == 3 and examiner.ask(2, "")["over"]
