"""The command line as people use it: real processes, over the real modules or over a fake peer."""

from __future__ import annotations

import errno
import fcntl
import io
import json
import math
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from node.cli.app import main
from node.cli.options import OF_RUN
from node.config.peer_config import SETTINGS, option_name
from node.network.daemon import DaemonError
from tests.support import warm
from tests.support.fake_peer import ADDRESS
from tests.support.paths import REPOSITORY

pytestmark = pytest.mark.real
FAKE = "tests.support.fake_peer"
AT_ONCE_SECONDS = 8.0
"""Less than the ten seconds after which a peer that cannot finish its round ends by itself."""
UNFINISHED_SECONDS = 15.0
"""Those ten seconds, and time for the process to end on a loaded machine."""
ENDS_SECONDS = 30.0
SENTENCE = "finishing this round, then exiting ({name} again to exit now)"


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    sockets = tempfile.mkdtemp(prefix="st-", dir="/tmp")  # short, and of killed peers, too
    monkeypatch.setenv("TMPDIR", sockets)
    for name in [name for name in os.environ if name.startswith("NODE_")]:
        monkeypatch.delenv(name)
    yield tmp_path / "state" / "starling"
    shutil.rmtree(sockets)


def starling(*arguments: str) -> subprocess.CompletedProcess[str]:
    return warm.run("node", *arguments)


def here(capsys: pytest.CaptureFixture[str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """The same without a process of its own, which takes seconds to load PyTorch."""
    code = main(list(arguments))
    return subprocess.CompletedProcess(arguments, code, *capsys.readouterr())


class FakeJoin:
    """A running `join` over a fake peer."""

    def __init__(self, how: str = "", *arguments: str) -> None:
        (out, writing_out), (err, writing_err) = os.pipe(), os.pipe()
        self.process = warm.server().start(
            "tests.support.fake_peer",
            ["join", *arguments],
            os.environ | {"FAKE": how},
            {1: writing_out, 2: writing_err},
        )
        os.close(writing_out)
        os.close(writing_err)
        self.out, self._err = open(out), open(err)  # noqa: SIM115 - closed with the peer
        self.lines: list[str] = []

    def until(self, text: str) -> None:
        while not self.lines or text not in self.lines[-1]:
            line = self._err.readline()
            assert line, f"{text!r} never came: {self.lines}"
            self.lines.append(line)

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self, within_seconds: float) -> tuple[int, str, str]:
        """Exit code, stdout, stderr."""
        began = time.monotonic()
        out, err = self.out.read(), self._err.read()
        code = self.process.wait(within_seconds)
        assert time.monotonic() - began < within_seconds
        return code, out, "".join(self.lines) + err

    def close(self) -> None:
        self.process.kill()
        self.process.wait(AT_ONCE_SECONDS)
        self.out.close()
        self._err.close()


Join = Callable[..., FakeJoin]


@pytest.fixture
def join() -> Iterator[Join]:
    """Starts a `join`; with `ready=True` returns when it runs."""
    started: list[FakeJoin] = []

    def start(how: str = "", *arguments: str, ready: bool = False) -> FakeJoin:
        started.append(peer := FakeJoin(how, *arguments))
        if ready:
            peer.until("running")
        return peer

    yield start
    for each in started:
        each.close()


@pytest.fixture
def running(join: Join) -> FakeJoin:
    return join(ready=True)


def one_line(done: subprocess.CompletedProcess[str], code: int = 2) -> str:
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("starling: "), done.stderr
    return done.stderr


# -- help and mistakes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [[], ["join", "--help"]])
def test_help_goes_to_stdout(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "node", *arguments]  # not forked: as a user's first command
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=ENDS_SECONDS)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Usage: python -m node" in done.stdout and "<bool>" not in done.stdout


def test_help_of_join_begins_with_what_is_usual(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    first, _ = here(capsys, "join", "--help").stdout.split("─ The run ─")
    assert "─ Usual ─" in first and len(first.splitlines()) <= 24 and first.count("python -m node join --") == 3
    monkeypatch.setenv("COLUMNS", "200")
    named = re.findall(r"^│ (--\S+)", here(capsys, "join", "--help").stdout, re.MULTILINE)
    options = [name for key in SETTINGS if (name := option_name(key))]
    assert sorted(each.replace("[no-]", "") for each in named) == sorted(
        [*options, *(f"--{each}" for each in OF_RUN), "--ticket-file", "--help"]
    )


WITHOUT_PYTORCH = """
import json, sys
from node.cli.app import main
codes = [main(each) for each in json.loads(sys.argv[1])]
import node.cli.swarm_command
print([*codes, *sorted({"torch", "hivemind", "numpy"} & {*sys.modules})])
"""


def test_what_trains_nothing_loads_no_pytorch(running: FakeJoin, tmp_path: Path) -> None:
    """Nor does what is refused: a person sees the line at once."""
    run, taken = tmp_path / "run.toml", tmp_path / "taken"
    run.write_text('codec = "int9"')
    taken.write_text("")
    commands = (
        ["join", "--help"],
        ["data", "check", "--help"],
        ["status"],
        ["status", "--state-dir", str(tmp_path)],
        ["swarm", "--stages", "9"],
        ["join", "--run", str(run)],
        ["join", "--bootstrap", "nonsense"],
        ["join", "--state-dir", str(taken)],
        ["join", "--state-dir", str(tmp_path / "a"), "--addresses-file", str(tmp_path / "b" / "c")],
        ["join", "--state-dir", str(tmp_path / "a"), "--run-id", "0123456789ab"],
    )
    command = [sys.executable, "-c", WITHOUT_PYTORCH, json.dumps(commands)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=40)
    assert done.stdout.splitlines()[-1:] == [str([0, 0, 0, 1, *[2] * 6])], done.stderr


def test_version_is_printed_on_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    done = here(capsys, "--version")
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(r"starling \d+\.\d+\.\d+(\+\S+)?\n", done.stdout)


def test_output_on_a_full_disk_gives_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(sys, "stdout", Full())
    assert "the output cannot be written (No space left on device)" in one_line(here(capsys, "--version"), 1)


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["jion"], "Did you mean 'join'"),
        (["join", "--bootstap", "x"], "--bootstrap"),
        (["join", "--rounds", "many"], "--rounds"),
        (["join", "--rounds", "0"], "--rounds': must be at least 1\n"),
        (["join", "--inner", "muom"], "--inner': 'muom' is not one of 'adamw', 'muon'.\n"),
        (["join", "--bootstrap", "192.0.2.1:4000"], "/ip4/192.0.2.1/tcp/4000"),
        (["join", "--bootstrap", "\x1b[2Jnonsense\nand more"], "not a multiaddr"),
        (["join", "--task", "os;system:x"], "'os;system:x' is not a task"),
        (["join", "--task", "a/b.py:f", "--bootstrap", ADDRESS], "--task cannot be given with --bootstrap"),
        (["join", "--task", "gpt", "--bootstrap", ADDRESS], "settings by options or by NODE_* variables"),
        (["join", "--page-port", "9000"], "flag --page-port: no page is served: also give --page, or leave it out\n"),
        (["join", "--device", "cdua"], "cuda"),
        (["join", "--state-dir", "/proc/nothing"], "--state-dir"),
        (["join", "--state-dir", ""], "--state-dir': the path is empty: give one"),
        (["join", "--run-id", "0123456789ab"], "of its peers with --bootstrap; to start a new run, leave"),
        (["swarm", "--peers", "0"], "--peers"),
        (["swarm", "--device", "tpu"], "flag --device: must be 'auto', 'cpu', 'cuda' or 'mps', not 'tpu'"),
        (["swarm", "--protocol", "gosip"], 'unknown protocol "gosip": did you mean "gossip"?'),
        (["swarm", "--run", "/nowhere/run.toml"], "/nowhere/run.toml"),
        (["status", "extra"], "extra"),
        (["status", "--bootstrap", "/ip4/192.0.2.1/tcp/4000"], "--bootstrap"),
        (["status", "--bootstrap", "@file"], "--bootstrap"),
        (["status", "--swarm", "--bootstrap", ADDRESS], "leave --bootstrap out"),
        (
            ["doctor", "192.0.2.1:4000"],
            "ADDRESS: '192.0.2.1:4000' is not a multiaddr: write /ip4/192.0.2.1/tcp/4000/p2p",
        ),
        (["doctor", ""], "ADDRESS: '' is not a multiaddr"),
    ],
)
def test_mistake_gives_one_line_error(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = one_line(here(capsys, *arguments))
    assert words in line and "\x1b" not in line


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.EBADF])
def test_file_system_without_locks_is_named(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    line = one_line(here(capsys, "join", "--state-dir", str(tmp_path)))
    assert f"the file system of {tmp_path} has no locks" in line and "on a local disk with --state-dir" in line


def test_swarm_needs_a_peer_for_each_stage_of_its_run_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.toml"
    file.write_text("stages = 3\n")
    assert "3 stages need as many peers, not 2: give --peers 3" in one_line(
        here(capsys, "swarm", "--peers", "2", "--run", str(file))
    )


# -- joining -----------------------------------------------------------------------------------------------------------


def test_reports_go_to_stdout_as_strict_json(join: Join) -> None:
    code, out, err = join("short", "--json").end(ENDS_SECONDS)
    reports = [json.loads(line, parse_constant=pytest.fail) for line in out.splitlines()]
    assert code == 0 and [each["round"] for each in reports] == [0, 1, 2]
    assert reports[0]["loss"] is None and reports[0]["peers"] == ["p", "q"]
    assert "round 2" in err


@pytest.mark.parametrize(
    "arguments, words",
    [
        (
            ["--rounds", "7", "--task", "gpt", "--no-nat", "--bandwidth", "1.5", "--wait-for", "3"],
            [
                *("'recipe.rounds': 7", "'task': 'gpt'", " rounds=None", "nat=False", "wait_for_peers=3"),
                *("bandwidth_bytes_per_second='1.5MB'", "/state/starling/peer-1'"),
            ],
        ),
        (["--bootstrap", "x", "--task", "mine.tasks:make"], ["consent='mine.tasks:make'", ") None\n"]),
        (["--bootstrap", "x", "--bootstrap", "y", "--rounds", "7"], ["rounds=7", ") None\n", "['x', 'y']"]),
    ],
    ids=["of a new run", "consent to a task", "rounds of this peer"],
)
def test_join_options_reach_the_peer(arguments: list[str], words: list[str], join: Join) -> None:
    code, out, err = join("short", *arguments).end(ENDS_SECONDS)
    assert (code, out) == (0, "")
    assert [each for each in words if each not in err] == []


@pytest.mark.parametrize(
    "how, arguments, words",
    [
        ("short", ["--bootstrap", "x", "--task", "gpt"], "--task cannot be given with --bootstrap: the swarm decides"),
        ("short", ["--nickname", "bad"], "starling: flag --wait-for: too many\n"),
        ("refuse", [], "starling: the port is taken: free it\n"),
    ],
    ids=["run option with bootstrap", "option of the peer", "peer error"],
)
def test_refused_join_ends_with_one_line(how: str, arguments: list[str], words: str, join: Join) -> None:
    code, _, err = join(how, *arguments).end(ENDS_SECONDS)
    assert code == 2 and words in err.splitlines(keepends=True)[-1] and "Traceback" not in err
    assert how == "refuse" or err.count("\n") == 1


def test_directory_run_resumes_unless_over_or_task_given(join: Join, tmp_path: Path) -> None:
    (tmp_path / "peers.json").touch()
    (tmp_path / "manifest.bin").touch()
    here = ("--state-dir", str(tmp_path), "--rounds", "7")
    assert "rounds=7" in join("short", *here).end(ENDS_SECONDS)[2]
    code, _, err = join("short", *here, "--task", "gpt").end(ENDS_SECONDS)
    assert code == 0 and "'recipe.rounds': 7" in err and "rounds=None" in err, "the peer knows which run that is"
    (tmp_path / "over").touch()
    assert "'recipe.rounds': 7" in join("short", *here).end(ENDS_SECONDS)[2]


def test_closed_stdout_does_not_end_the_peer(join: Join) -> None:
    peer = join("", "--json")
    peer.out.close()
    peer.until("running")
    peer.signal(signal.SIGINT)
    peer.until("cleaned up")
    assert peer.process.wait(5) == 0


# -- leaving -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number, name, code", [(signal.SIGINT, "Ctrl-C", 130), (signal.SIGTERM, "SIGTERM", 143)])
@pytest.mark.parametrize(
    "how, handled",
    [("", ""), ("deaf", "asked to finish"), ("stubborn", "asked to finish"), ("stuck", "asked, but stuck")],
    ids=["finishes its round", "does not", "endless cleanup", "stuck event loop"],
)
def test_first_signal_finishes_the_round_and_second_ends_at_once(
    join: Join, how: str, handled: str, number: int, name: str, code: int
) -> None:
    peer = join(how, ready=True)
    peer.signal(number)
    peer.until(handled or f"{name}: {SENTENCE.format(name=name)}")
    if how:
        peer.signal(number)
    ended, _, err = peer.end(AT_ONCE_SECONDS)
    assert ended == (code if how else 0) and "Traceback" not in err
    if how in ("", "deaf"):
        assert "asked to finish" in err and "cleaned up" in err and ("again: exiting now" in err) == bool(how)


def test_unfinished_peer_ends_by_itself(join: Join) -> None:
    """After ten seconds, asked by a signal or by a command. All four wait at the same time."""
    signalled = {how: join(how, ready=True) for how in ("deaf", "stuck")}
    asked_to = {how: join(how, ready=True) for how in ("deaf", "hangs")}
    for peer in signalled.values():
        peer.signal(signal.SIGINT)
    for peer in asked_to.values():
        assert starling("finish", "--state-dir", state_of(peer)).returncode == 0
    for how, peer in signalled.items():
        code, _, err = peer.end(UNFINISHED_SECONDS)
        assert code == 1
        assert how == "stuck" or ("did not end within" in err and "cleaned up" in err)
    for peer in asked_to.values():
        code, _, err = peer.end(UNFINISHED_SECONDS)
        assert code == 1 and "asked to finish: finishing this round, then exiting\n" in err


def test_signal_after_finish_counts_as_second(join: Join) -> None:
    peer = join("deaf", ready=True)
    for _ in range(2):
        assert starling("finish").returncode == 0
    peer.signal(signal.SIGINT)
    code, _, err = peer.end(AT_ONCE_SECONDS)
    assert code == 130 and err.count("asked to finish: ") == 1


@pytest.mark.parametrize("number, name", [(signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "SIGTERM")])
def test_signal_during_library_loading_ends_at_once(number: int, name: str, own_home: Path) -> None:
    command = [sys.executable, "-m", "node", "join", "--task", "paced"]
    with subprocess.Popen(command, cwd=REPOSITORY, stderr=subprocess.PIPE, text=True) as peer:
        try:
            while not (own_home / "peer-1").exists():
                assert peer.poll() is None
                time.sleep(0.01)
            peer.send_signal(number)
            assert peer.communicate(timeout=5)[1] == f"{name}: exiting\n" and peer.returncode == 0
        finally:
            peer.kill()


def test_unread_terminal_does_not_block_the_peer(own_home: Path) -> None:
    """As after Ctrl-S, or with the window's host asleep."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", FAKE, "join", "--json"]
    environment = os.environ | {"FAKE": "quiet", "TERM": "xterm"}
    peer = subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdout=subprocess.DEVNULL, stderr=theirs)
    os.close(theirs)
    try:
        while not (own_home / "peer-1" / "control.json").exists():
            assert peer.poll() is None
            time.sleep(0.1)
        time.sleep(6)  # frames come four times a second: the terminal's buffer is full by now
        assert starling("status", "--json").returncode == 0
        peer.send_signal(signal.SIGINT)
        assert peer.wait(4) == 0
    finally:
        peer.kill()
        peer.wait()
        os.close(ours)


def test_closed_terminal_lets_the_peer_leave_except_under_nohup(own_home: Path) -> None:
    """The kernel and the shell each send a SIGHUP, and nothing can be written any more."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", FAKE, "join"]
    environment = os.environ | {"FAKE": "quiet", "TERM": "xterm"}

    def to_terminal() -> None:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests themselves may run under nohup

    def start(*before: str) -> subprocess.Popen[bytes]:
        out = subprocess.DEVNULL if before else theirs  # nohup would write into a file of its own
        return subprocess.Popen(
            [*before, *command], cwd=REPOSITORY, env=environment, stdin=theirs, stdout=out, stderr=out,
            start_new_session=True, preexec_fn=None if before else to_terminal,
        )  # fmt: skip

    peers = [start(), start("nohup")]
    os.close(theirs)
    try:
        deadline = time.monotonic() + ENDS_SECONDS
        while len(list(own_home.glob("*/control.json"))) < 2:
            assert all(each.poll() is None for each in peers) and time.monotonic() < deadline
            time.sleep(0.05)
        os.close(ours)
        for each in peers:
            each.send_signal(signal.SIGHUP)
        assert peers[0].wait(AT_ONCE_SECONDS) == 0
        assert peers[1].poll() is None and starling("finish").returncode == 0  # the only one that still runs
        assert peers[1].wait(AT_ONCE_SECONDS) == 0
    finally:
        for each in peers:
            each.kill()
            each.wait()


# -- status and finish -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["status", "finish"])
def test_missing_peer_gives_one_line_error(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no peer runs in" in one_line(here(capsys, command), 1)
    assert "no peer runs in" in one_line(here(capsys, command, "--state-dir", str(tmp_path)), 1)


def test_single_local_peer_is_found_and_queried(running: FakeJoin) -> None:
    done = starling("status", "--json")
    answer = json.loads(done.stdout, parse_constant=pytest.fail)
    assert (answer["run"], answer["pid"], answer["loss"]) == ("straw", running.process.pid, None)
    shown = starling("status")
    assert shown.returncode == 0 and "run straw" in shown.stdout and "2 of 3" in shown.stdout
    assert f"\npython -m node join --bootstrap {ADDRESS}\n" in shown.stdout
    swarm = json.loads(starling("status", "--swarm", "--json").stdout)["swarm"]
    assert swarm["asked"] and [each["state"] for each in swarm["rows"]] == ["training"]
    assert starling("finish").returncode == 0
    assert running.end(AT_ONCE_SECONDS)[0] == 0
    assert "no peer runs" in one_line(starling("status"), 1)


def test_several_local_peers_require_a_choice(join: Join, own_home: Path) -> None:
    """And another one gets none of theirs."""
    for _ in range(2):
        join(ready=True)
    code, _, err = join("short", "--state-dir", str(own_home / "peer-1")).end(ENDS_SECONDS)
    assert code == 2 and err.startswith("starling: another running peer holds") and "give another" in err
    line = one_line(starling("status"))
    assert (
        "2 peers run on this machine" in line and str(own_home / "peer-1") in line and str(own_home / "peer-2") in line
    )
    assert json.loads(starling("status", "--json", "--state-dir", str(own_home / "peer-2")).stdout)["round"] == 1


@pytest.mark.parametrize(
    "answer, words",
    [(DaemonError("no p2pd"), "no p2pd"), (OSError("no room"), "no room"), ({"loss": math.nan}, "cannot be read")],
)
def test_failed_status_query_gives_one_line_error(
    answer: object, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def remote_status(address: str, member: Path | None) -> object:
        if isinstance(answer, Exception):
            raise answer
        return answer

    for name, content in (
        ("remote_queries", {"remote_status": remote_status}),
        ("fatal", {"FatalPeerError": KeyError}),
    ):
        fake = ModuleType(f"node.session.{name}")
        vars(fake).update(content)
        monkeypatch.setitem(sys.modules, fake.__name__, fake)
    assert words in one_line(here(capsys, "status", "--bootstrap", ADDRESS), 1)


def state_of(peer: FakeJoin) -> str:
    line = next(line for line in peer.lines if line.startswith("given"))
    return line.split("PosixPath('")[1].split("'")[0]


def test_status_into_closed_pipe_is_no_error(running: FakeJoin) -> None:
    command = f"{sys.executable} -m node status --json | true"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.stderr == ""
