"""`python -m node swarm` as users run it: real processes, the paced task."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from node.cli.app import main
from tests.support.paths import REPOSITORY

pytestmark = [pytest.mark.real, pytest.mark.timeout(150)]
RUN = """
task = "paced"
[paced]
elements = 50000
step_seconds = 0.05
[recipe]
inner_steps = 5
rounds = {rounds}
"""


class Running:
    """A `swarm` command under way, its processes marked by a variable that they all inherit."""

    def __init__(self, directory: Path, rounds: int) -> None:
        self.directory = directory / "swarm"
        self.mark = uuid.uuid4().hex
        file = directory / "run.toml"
        file.write_text(RUN.format(rounds=rounds))
        given = ("--peers", "3", "--run", file, "--dir", self.directory, "--json")
        environment = {name: value for name, value in os.environ.items() if not name.startswith("NODE_")}
        self.process = subprocess.Popen(
            (sys.executable, "-m", "node", "swarm", *given), cwd=REPOSITORY, env=environment | {"MARK": self.mark},
            text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def left(self) -> list[str]:
        """Command lines of its processes that still run."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("MARK") == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(" ".join(process.cmdline()))
            except psutil.Error:
                continue
        return found

    def reports(self, number: int) -> list[dict[str, Any]]:
        file = self.directory / f"peer-{number}" / "rounds.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def control(self, number: int) -> int:
        """The process of a peer."""
        return int(json.loads((self.directory / f"peer-{number}" / "control.json").read_text())["pid"])

    def until(self, what: Callable[[], object]) -> None:
        end = time.monotonic() + 60
        while not what():
            assert self.process.poll() is None and time.monotonic() < end, self.process.communicate()
            time.sleep(0.05)

    def end(self, seconds: float) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=seconds)
        return self.process.returncode, out, err


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[int], Running]]:
    started: list[Running] = []

    def run(rounds: int) -> Running:
        started.append(Running(tmp_path, rounds))
        return started[-1]

    yield run
    for each in started:
        each.process.kill()
        each.process.communicate()
        end = time.monotonic() + 2
        while (left := each.left()) and time.monotonic() < end:
            time.sleep(0.05)
        assert not left


def agreed(swarm: Running, numbers: tuple[int, ...]) -> None:
    """Assert that all peers which committed a lineage hold the same parameters."""
    hashes: dict[str, set[str]] = {}
    for number in numbers:
        for each in swarm.reports(number):
            if each["outcome"] in ("committed", "alone", "fork"):
                hashes.setdefault(each["lineage"], set()).add(each["params_hash"])
    assert hashes and all(len(each) == 1 for each in hashes.values())


def test_three_peers_agree_and_leave_nothing_behind(start: Callable[[int], Running]) -> None:
    swarm = start(4)
    code, out, err = swarm.end(120)
    assert swarm.left() == []
    (end,) = (json.loads(line) for line in out.splitlines())
    assert code == 0 and end["agree"] and end["rounds"] == 5 and len(end["peers"]) == 3, err  # one admits the others
    assert end["loss_first"] > 0 and end["loss_last"] > 0  # the paced task learns nothing
    assert len({each["params_hash"] for each in end["peers"]}) == len({each["lineage"] for each in end["peers"]}) == 1
    for number, each in enumerate(end["peers"], 1):
        own = swarm.reports(number)
        assert each["peer_id"] == own[-1]["peer"] and each["params_hash"] == own[-1]["params_hash"]
        assert each["bytes_sent"] == sum(report["bytes_sent"] for report in own) > 0
        assert each["tokens"] >= 1024 and each["seconds_train"] > 0 and each["seconds_average"] > 0
    agreed(swarm, (1, 2, 3))
    shown = [line.split()[1].split("/") for line in err.splitlines() if line.startswith("round")]
    assert [number for number, _ in shown] == ["1", "2", "3", "4", "5"] and shown[-1][1] == "5"
    assert [len(report["peers"]) for report in swarm.reports(1) if report["tokens"]] == [3] * 4
    assert "all peers agree" in err and "Traceback" not in err


@pytest.mark.long
def test_others_continue_without_a_killed_peer_until_ctrl_c(start: Callable[[int], Running]) -> None:
    swarm = start(1000)
    swarm.until(lambda: any(len(report["peers"]) == 3 for report in swarm.reports(1)))
    for program, count in (("join", 3), ("p2pd", 3), ("worker", 3), ("fork_server", 4), ("swarm", 1)):
        assert sum(program in line for line in swarm.left()) >= count, "the mark finds each of its processes"
    os.kill(swarm.control(2), signal.SIGKILL)
    before = len(swarm.reports(2))
    swarm.until(lambda: min(len(swarm.reports(number)) for number in (1, 3)) >= before + 4)
    began = time.monotonic()
    swarm.process.send_signal(signal.SIGINT)
    code, out, err = swarm.end(12)
    assert time.monotonic() - began < 12
    assert "Ctrl-C: finishing this round" in err and "rounds in" in err and "Traceback" not in err
    end = json.loads(out.splitlines()[-1])
    assert code == 1 and not end["agree"] and end["rounds"] >= before + 3, err
    assert end["peers"][0]["params_hash"] != end["peers"][1]["params_hash"] != end["peers"][2]["params_hash"]
    assert len([line for line in err.splitlines() if line.startswith("peer-2 killed by signal 9")]) == 1
    assert err.count(" left") == 2, err
    agreed(swarm, (1, 2, 3))
    assert swarm.left() == []


def test_peers_die_with_their_killed_swarm(start: Callable[[int], Running]) -> None:
    swarm = start(1000)
    swarm.until(lambda: len(swarm.left()) >= 4)
    swarm.process.kill()
    # The fixture asserts that no process is left two seconds later.


def test_wrong_arguments_start_no_peer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refusal(*arguments: object) -> str:
        code, (out, err) = main(["swarm", *map(str, arguments)]), capsys.readouterr()
        (line,) = err.splitlines(keepends=True)
        assert (code, out) == (2, "")
        return line

    file, directory = tmp_path / "run.toml", tmp_path / "swarm"
    for content, words in (
        ('task = "paced"\nrouds = 3\n', "rouds"),
        ('protocol = "butterfyl"\n', "butterfyl"),
        ("[[", "run.toml"),
    ):
        file.write_text(content)
        line = refusal("--peers", "2", "--run", file, "--dir", directory)
        assert line.startswith("starling: ") and words in line and not directory.exists()
    (directory / "peer-1").mkdir(parents=True)
    expected = f"starling: --dir {directory}: holds a swarm's peers already: give another directory\n"
    assert refusal("--dir", directory) == expected
