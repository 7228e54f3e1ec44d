"""The file that starts a peer with its user's session: what it holds, and what refuses to be in it."""

from __future__ import annotations

import os
import plistlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from node.cli.app import main
from node.machine import service
from node.machine.service import Service

UNIT, JOB = (Service(Path(f"/home/ann/starling.{kind}"), (), ()) for kind in ("service", "plist"))
ODD = ("--hours", "mon-fri 18:00-08:00", "--nickname", '100% "$HOME" \\')


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user with systemd and one state directory that holds a run."""
    monkeypatch.setattr(service, "_SYSTEMD", tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(sys, "platform", "linux")
    peer = tmp_path / "state" / "starling" / "peer-1"
    peer.mkdir(parents=True)
    for name in ("manifest.bin", "peers.json"):
        (peer / name).touch()
    return tmp_path


def test_words_of_a_unit_reach_the_peer_unchanged() -> None:
    unit = UNIT.content(("/opt/a b/starling", "join", *ODD), Path("/srv/100%")).decode()
    assert (
        'ExecStart="/opt/a b/starling" join --hours "mon-fri 18:00-08:00" --nickname "100%% \\"$$HOME\\" \\\\"\n'
        in unit
    )
    assert "WorkingDirectory=/srv/100%%\n" in unit
    for program, directory in (("/opt/$x/starling", "/"), ("/opt/starling", "/srv/a\\"), ("/opt/starling", "/srv/a ")):
        with pytest.raises(ValueError, match=r"^systemd .*: (use another|install it elsewhere)$"):
            UNIT.content((program, "join"), Path(directory))
        assert JOB.content((program, "join"), Path(directory))
    with pytest.raises(ValueError, match="not one line of text"):
        UNIT.content(("/opt/starling", "join", "--nickname", "a\nExecStop=/bin/false"), Path("/"))


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="there is no systemd")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    file = tmp_path / "starling.service"
    file.write_bytes(UNIT.content((sys.executable, "-m", "node", "join", *ODD), tmp_path))
    command = ["systemd-analyze", "--user", "--man=no", "verify", str(file)]
    environment = os.environ | {"XDG_RUNTIME_DIR": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=20)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_job_of_launchd_restarts_what_failed() -> None:
    job = plistlib.loads(JOB.content(("/opt/starling", "join", *ODD), Path("/Users/ann")))
    assert job["ProgramArguments"] == ["/opt/starling", "join", *ODD]
    assert job["RunAtLoad"] and job["KeepAlive"] == {"SuccessfulExit": False} and job["ExitTimeOut"] == 20


def test_service_is_written_shown_and_removed(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = home / "config/systemd/user/starling.service"
    assert main(["service", "install", "--", "--page", "--hours", "sat-sun"]) == 0
    assert "systemctl --user enable --now starling" in capsys.readouterr().out
    assert main(["service", "show"]) == 0
    text = file.read_text()
    assert text in capsys.readouterr().out
    assert f"join --state-dir {home}/state/starling/peer-1 --page --hours sat-sun\n" in text
    assert main(["service", "install", "--hours", "sat-sun"]) == 2 and file.read_text() == text
    assert main(["service", "install", "--page", "--hours", "sat-sun"]) == 0
    assert main(["service", "remove"]) == 0 and not file.exists()
    assert main(["service", "show"]) == 1


@pytest.mark.parametrize(
    "words, line",
    [
        (["--", "--bootstrap", "@file"], "--bootstrap has no place in a service"),
        (["--", "--hours", "someday"], "someday"),
        (["--peage"], "--page"),
        (["--state-dir", "elsewhere"], "join once by hand first"),
    ],
)
def test_service_that_could_not_run_is_refused(
    words: list[str], line: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["service", "install", *words]) == 2
    said = capsys.readouterr().err
    assert line in said and said.count("\n") == 1 and not (home / "config").exists()


def test_settings_of_the_shell_are_named_and_no_others(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("NODE_EXTRA_CA_CERTS", "NODE_NICKNAME", "NODE_ENV"):
        monkeypatch.setenv(name, "x")
    assert main(["service", "install"]) == 0
    assert capsys.readouterr().out.startswith("NODE_NICKNAME: of this shell only")


def test_service_needs_a_directory_to_run_in(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (home / "gone").mkdir()
    monkeypatch.chdir(home / "gone")
    (home / "gone").rmdir()
    assert main(["service", "install"]) == 2
    assert capsys.readouterr().err.startswith("starling: the present directory cannot be used (No such file")


def test_without_systemd_a_line_says_so(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "_SYSTEMD", home / "nowhere")
    assert main(["service", "install"]) == 2
