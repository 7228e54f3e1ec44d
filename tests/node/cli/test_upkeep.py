"""Commands about a machine: what a shell completes, and what may be deleted."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from node.cli.app import main
from node.runtime.locks import hold
from node.runtime.program import STARTED_AS
from tests.support.paths import REPOSITORY


@pytest.mark.real
@pytest.mark.parametrize(
    "words, completed", [("starling comp", "completion"), ("starling join --upl", "--upload-limit")]
)
def test_bash_completes_commands_and_options(words: str, completed: str) -> None:
    place = {"COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    environment = os.environ | {STARTED_AS: "starling", "_STARLING_COMPLETE": "complete_bash"} | place
    command = [sys.executable, "-m", "node"]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=20)
    assert (done.stdout, done.stderr) == (f"{completed}\n", "")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_script_asks_the_program(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    assert f"_STARLING_COMPLETE=complete_{shell}" in capsys.readouterr().out


def test_clean_deletes_only_what_it_lists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    idle, running = (tmp_path / "starling" / f"peer-{number}" for number in (1, 2))
    for directory in (idle, running):
        for name in (
            "past/cdcd/checkpoints/5/outer.safetensors",
            "past/abab-unused/3/x",
            "checkpoints/6/y",
            "identity.key",
        ):
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (directory / name).write_bytes(bytes(1000))
    dead, live = tmp_path / "starling-dead", tmp_path / "starling-live"
    for each in (dead, live):
        each.mkdir()
        (each / "lock").touch()
    held = [hold(running), hold(live / "lock")]
    everything = {*tmp_path.rglob("*")}
    assert main(["clean"]) == 0 and {*tmp_path.rglob("*")} == everything
    listed = capsys.readouterr().out
    assert listed.count("1.00 kB") == 2 and f"{running}: left alone" in listed and str(live) not in listed
    assert main(["clean", "--yes"]) == 0
    assert not dead.exists() and [*(idle / "past").iterdir()] == []
    gone = everything - {*tmp_path.rglob("*")}
    assert all((idle / "past") in each.parents or each == dead or dead in each.parents for each in gone)
    capsys.readouterr()
    assert main(["clean", "--state-dir", str(idle)]) == 0 and capsys.readouterr().out == "nothing to delete\n"
    for descriptor in held:
        assert descriptor is not None
        os.close(descriptor)


@pytest.mark.parametrize("entry", ["past", "past/run"])
@pytest.mark.parametrize("target", [".", "..", "/elsewhere"])
def test_clean_never_follows_a_link_nor_takes_an_identity(
    entry: str, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("NODE_STATE_DIR", str(peer := tmp_path / "above" / "peer"))
    for name in ("peer/identity.key", "peer/checkpoints/6/y", "other", "peer/past/nested/peer-1/identity.key"):
        (tmp_path / "above" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "above" / name).touch()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "lock").touch()
    (tmp_path / "starling-link").symlink_to(tmp_path / "elsewhere")
    if entry == "past":
        (peer / "past").rename(peer / "kept")
    (peer / entry).symlink_to(str(tmp_path / "elsewhere") if target.startswith("/") else target)
    before = {*tmp_path.rglob("*")}
    assert main(["clean", "--yes"]) == 0 and {*tmp_path.rglob("*")} == before
    said = capsys.readouterr().out
    assert f"{peer / entry}: left alone, it is a link\n" in said and "nothing to delete" in said
    assert ("holds an identity" in said) == (entry != "past")


def test_clean_of_a_directory_that_is_no_peers_deletes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "none"))
    (tmp_path / "past" / "photographs").mkdir(parents=True)
    assert main(["clean", "--state-dir", str(tmp_path), "--yes"]) == 0
    assert (tmp_path / "past" / "photographs").exists() and "no state directory" in capsys.readouterr().out
