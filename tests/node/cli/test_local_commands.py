"""`init`, `export` and `generate` as people type them, and the one line where they cannot be done."""

from __future__ import annotations

import errno
import json
import sys
from pathlib import Path

import pytest

from node.cli.app import main
from node.export import hugging_face
from node.export.fine_tuned import harmless
from tests.support.statedir_fixtures import kept_gpt, staged_run


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("NODE_STATE_DIR", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hugging_face, "require_loading", lambda *_: None)  # it takes seconds
    home = tmp_path / "state" / "starling"
    home.mkdir(parents=True)
    return home


class Said:
    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *arguments: str) -> tuple[int, str, str]:
        return (main(list(arguments)), *self._capsys.readouterr())

    def refused(self, *arguments: str) -> str:
        code, out, err = self(*arguments)
        assert code in (1, 2) and out == "" and err.count("\n") == 1 and err.startswith("starling: "), (code, out, err)
        return err


@pytest.fixture
def starling(capsys: pytest.CaptureFixture[str]) -> Said:
    return Said(capsys)


def test_init_writes_a_file_once(tmp_path: Path, starling: Said) -> None:
    assert starling("init") == (0, "", "wrote run.toml: edit it, then: python -m node join --run run.toml\n")
    (tmp_path / "run.toml").write_text("mine")
    assert "run.toml exists already and is not overwritten" in starling.refused("init")
    assert (tmp_path / "run.toml").read_text() == "mine"
    assert starling("init", "other.toml")[0] == 0
    assert "absent/run.toml cannot be written (No such file or directory)" in starling.refused(
        "init", "absent/run.toml"
    )
    assert "cannot be written" in starling.refused("init", "/proc/run.toml")
    assert "exists already" in starling.refused("init", ".")


def test_full_disk_leaves_no_partial_run_file(tmp_path: Path, starling: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("node.config.run_file.run_file", full)
        assert "run.toml cannot be written (No space left on device)" in starling.refused("init")
    assert starling("init")[0] == 0 and (tmp_path / "run.toml").stat().st_size > 1000


def test_single_local_peer_is_found(home: Path, tmp_path: Path, starling: Said) -> None:
    assert f"no state directory in {home} holds a run" in starling.refused("export", "--out", "out")
    module = kept_gpt(home / "peer-1")
    code, out, err = starling("export", "--out", "out")
    assert (code, out) == (0, "") and err.startswith("wrote out: run ") and err.endswith(" after 5 rounds\n")
    assert "out exists already" in starling.refused("export", "--out", "out")
    code, text, err = starling("generate", "def ", "--tokens", "20", "--temperature", "0")
    assert code == 0 and err == "" and text.endswith("\n") and 1 < len(text) <= 21
    assert starling("generate", "def ", "--tokens", "20", "--seed", "1") != starling(
        "generate", "def ", "--tokens", "20"
    )
    assert module.shape.width == 32
    kept_gpt(home / "peer-2")
    assert "2 state directories hold a run: choose one with --state-dir" in starling.refused("generate", "x")
    assert starling("generate", "x", "--tokens", "1", "--state-dir", str(home / "peer-2"))[0] == 0


def test_unchecked_export_says_so(home: Path, starling: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    kept_gpt(home / "peer-1")
    said = starling("export", "--out", "unchecked", "--no-check")[2]
    assert said.endswith(" after 5 rounds; it was not loaded again to compare (--no-check)\n")
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert "compare (transformers is not installed)" in starling("export", "--out", "without")[2]


def test_variable_names_one_directory(
    home: Path, tmp_path: Path, starling: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept_gpt(tmp_path / "a b")
    kept_gpt(home / "peer-1", 10)
    monkeypatch.setenv("NODE_STATE_DIR", str(tmp_path / "a b"))
    assert starling("export", "--out", "out")[2].endswith(" after 5 rounds\n"), "a path may contain a space"
    code, _, err = starling("export", "--out", "other", "--state-dir", str(home / "peer-1"))
    assert code == 0 and err.endswith(" after 10 rounds\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NODE_STATE_DIR", "~/a b")  # no shell replaces it in a file of variables
    assert starling("export", "--out", "third")[2].endswith(" after 5 rounds\n")
    monkeypatch.setenv("NODE_STATE_DIR", "  ")
    assert "the path is empty" in starling.refused("generate", "x")


def test_all_stages_on_this_machine_are_found(home: Path, tmp_path: Path, starling: Said) -> None:
    run = staged_run(tmp_path / "founder")
    kept = [run.keep(home / f"peer-{stage + 1}", stage) for stage in (0, 1)]
    assert starling.refused("export", "--out", "out").startswith("starling: stage 2 is missing: give ")
    kept.append(run.keep(home / "peer-3", 2))
    run.keep(home / "peer-4", 2)
    code, out, err = starling("export", "--out", "out")
    assert (code, out) == (0, "") and err == f"wrote out: run {run.run_id[:12]} after 5 rounds\n"
    wanted = run.whole.generate(b"def ", 20).decode(errors="replace")
    given = [argument for each in kept for argument in ("--state-dir", str(each))]
    for directories in ([], given):
        code, text, err = starling("generate", "def ", "--tokens", "20", "--temperature", "0", *directories)
        assert (code, text, err) == (0, f"{harmless(wanted)}\n", "")
    kept_gpt(home / "peer-5")
    assert "5 state directories hold a run: choose one with --state-dir" in starling.refused("generate", "x")


def test_different_rounds_of_stages_are_warned_of(home: Path, tmp_path: Path, starling: Said) -> None:
    run = staged_run(tmp_path / "founder", (0, 2, 4))
    run.keep(home / "peer-1", 0, 10)
    run.keep(home / "peer-2", 1, 5)
    code, _, err = starling("export", "--out", "out")
    warning, wrote = err.splitlines()
    assert code == 0 and "different rounds (stage 0 after 10, stage 1 after 5)" in warning and "10 rounds" in wrote
    code, text, err = starling("generate", "def ", "--tokens", "5")
    assert code == 0 and text and err == f"{warning}\n"


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["export"], "--out"),
        (["export", "--out", "out", "--state-dir", "absent"], "absent is not a directory"),
        (["export", "--out", "out", "--state-dir", "."], "contains no run"),
        (["export", "--out", "out", "--bootstrap", "nonsense"], "--bootstrap"),
        (["export", "--out", "out", "--bootstrap", "@file"], "give one of the addresses in the file instead"),
        (["export", "--out", "out", *["--bootstrap", "nonsense"] * 65], "65 addresses are too many"),
        (["export", "--out", "out", "--bootstrap", "nonsense", "--state-dir", "."], "leave out --state-dir"),
        (["generate"], "argument 'prompt'"),
        (["generate", ""], "the prompt is empty"),
        (["generate", "x", "--tokens", "-1"], "--tokens"),
        (["generate", "x", "--tokens", "1000001"], "--tokens"),
        (["generate", "x", "--tokens", "many"], "--tokens"),
        (["generate", "x", "--temperature", "-1"], "--temperature"),
        (["generate", "x", "--temperature", "nan"], "--temperature"),
        (["generate", "x", "--seed", "-1"], "--seed"),
        (["generate", "x", "--state-dir", "absent"], "absent is not a directory"),
    ],
)
def test_mistake_gives_one_line_error(arguments: list[str], words: str, home: Path, starling: Said) -> None:
    kept_gpt(home / "peer-1")
    assert words in starling.refused(*arguments)


@pytest.mark.parametrize(
    "words",
    [
        ["doctor", "nonsense", "--json"],
        ["status", "--swarm", "--json", "--state-dir", "none"],
        ["evaluate", "--json", "--bogus"],
        ["data", "check", "none", "--json"],
        ["swarm", "--json", "--peers", "many"],
    ],
    ids=" ".join,
)
def test_an_error_is_json_for_a_command_that_prints_json(words: list[str], starling: Said) -> None:
    code, out, err = starling(*words)
    said = json.loads(out)
    assert code in (1, 2) and said["code"] == code and err == f"starling: {said['error']}\n"
    assert (said.keys() == {"code", "error"}) == (words[0] != "doctor") and said.get("findings", []) == []


def test_lines_of_join_are_reports_only(starling: Said) -> None:
    starling.refused("join", "--json", "--hours", "someday")
