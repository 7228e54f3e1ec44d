"""A script of several ranks is one peer: all ranks hold the same bits after a round, and one that fails ends all."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.node.library.peer_side import Rounds
from tests.node.library.rank_script import HIDDEN, IN, OUT
from tests.support import warm
from tests.support.long import long
from tests.support.paths import REPOSITORY
from tests.support.real_swarm import wait

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]

ADDRESS = re.compile(r"/ip4/127\.0\.0\.1/tcp/\d+/p2p/\w+")
END_SECONDS = 150.0
SCRIPT = "tests.node.library.rank_script"
MODULES = ("torch.distributed.fsdp", "torch.nn.parallel", "node.library.ranked_parameters")


class Scripts:
    """The ranks of one script. Each writes lines of JSON."""

    def __init__(
        self, home: Path, kind: str, size: int, own: dict[int, dict[str, Any]] | None = None, **options: Any
    ) -> None:
        self._home, self.began = home, time.monotonic()
        home.mkdir()
        self.ranks = []
        for rank in range(size):
            given = json.dumps({"quiet": True, **options, **(own or {}).get(rank, {})})
            arguments = [kind, str(home / "store"), str(rank), str(size), given]
            environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
            with (home / f"{rank}.out").open("wb") as out, (home / f"{rank}.err").open("wb") as err:
                streams = {1: out.fileno(), 2: err.fileno()}
                self.ranks.append(warm.server(*MODULES).start(SCRIPT, arguments, environment, streams))

    def lines(self, rank: int) -> list[dict[str, Any]]:
        text = (self._home / f"{rank}.out").read_text()
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def rounds(self, rank: int = 0) -> list[dict[str, Any]]:
        return [line for line in self.lines(rank) if "round" in line]

    def errors(self) -> list[str]:
        return [str(self.lines(rank)[-1].get("error")) for rank in range(len(self.ranks)) if self.lines(rank)]

    def ended(self, seconds: float = END_SECONDS) -> list[int]:
        until = time.monotonic() + seconds
        codes = [each.wait(max(0.1, until - time.monotonic())) for each in self.ranks]
        self.said = "".join((self._home / f"{rank}.err").read_text() for rank in range(len(self.ranks)))
        return codes

    def kill(self) -> None:
        for each in self.ranks:
            if each.poll() is None:
                os.kill(each.pid, signal.SIGKILL)
                each.wait(10)


@pytest.fixture
def started() -> Iterator[list[Scripts]]:
    scripts: list[Scripts] = []
    yield scripts
    for each in scripts:
        each.kill()


def trained(hidden: int, normalizes: bool) -> int:
    """Elements of the parameters, which come first in the vector."""
    return (IN + 1 + hidden + 1 + 2 * normalizes) * hidden + (hidden + 1) * OUT + 1


def digest(vector: torch.Tensor, dtype: torch.dtype) -> str:
    return hashlib.sha256(vector.to(dtype).float().numpy().tobytes()).hexdigest()


CASES = ("ddp", 2, HIDDEN, "float32"), ("fsdp", 2, 7, "bfloat16")
LONG_CASES = (
    ("ddp", 2, HIDDEN, "bfloat16"),
    ("fsdp", 3, 7, "float32"),
    ("offload", 2, 7, "float32"),
    ("mixed", 2, HIDDEN, "float32"),
    ("hsdp", 4, HIDDEN, "float32"),
    ("2d", 4, 6, "float32"),
)


@pytest.mark.parametrize(("kind", "size", "hidden", "dtype"), [*CASES, *long(*LONG_CASES)])
def test_ranks_hold_the_bits_of_the_round(
    tmp_path: Path, started: list[Scripts], kind: str, size: int, hidden: int, dtype: str
) -> None:
    """What the peer reads is what the ranks trained, what they take is what it gave, and all tokens count.

    In bfloat16 they train with a learning rate of 0: the peer must read what it gave, and not rounded values.
    """
    is_rounded, of, count = dtype == "bfloat16", getattr(torch, dtype), trained(hidden, kind == "ddp")
    options: dict[str, Any] = {"ends": 3, "hidden": hidden, "dtype": dtype, "rate": 1e-3 * (not is_rounded)}
    with Rounds(tmp_path, inner_steps=3, round_seconds=60) as rounds:
        started.append(script := Scripts(tmp_path / "script", kind, size, attach=str(tmp_path), **options))
        assert script.ended() == [0] * size, script.said
    for rank in range(1, size):
        assert script.lines(rank) == script.lines(0)
    ends = [-1, *(line["step"] for line in script.rounds())]
    for at, line in enumerate(script.rounds()):
        work, vector = rounds.contributions[at]
        assert line["digest"] == digest(rounds.anchors[at + 1][:count], of)
        assert line["before"] == digest(vector[:count], of)
        assert work.tokens == sum(4 + rank for rank in range(size)) * (ends[at + 1] - ends[at])
        if is_rounded and at:
            assert torch.equal(vector[:count], rounds.anchors[at][:count])
    assert rounds.evaluations and all(value > 0 for value in rounds.evaluations)


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "size", "options", "own", "message"),
    [
        ("ddp", 2, {"callers": [0], "wait_seconds": 3}, {}, "another rank did not take part within 3 s"),
        ("ddp", 2, {"callers": [1], "wait_seconds": 1}, {}, "rank 0 did not take part within 3 s"),
        ("bare", 2, {}, {1: {"hidden": 7}}, "the model of rank 1 has other parameters.*first.weight"),
        ("bare", 2, {}, {1: {"seed": 8}}, "the ranks' parameters differ: seed them alike"),
        ("ddp", 2, {}, {1: {"evaluates": False}}, "evaluate is given on some ranks only"),
        ("ddp", 3, {"join_seconds": 4}, {2: {"attach": None}}, "does each call Swarm.join"),
    ],
)
def test_ranks_that_differ_end_with_a_line(
    tmp_path: Path, started: list[Scripts], kind: str, size: int, options: dict[str, Any], own: Any, message: str
) -> None:
    with Rounds(tmp_path, inner_steps=3, round_seconds=60):
        given = {"attach": str(tmp_path), "wait_seconds": 20, **options}
        started.append(script := Scripts(tmp_path / "script", kind, size, own, **given))
        assert 0 not in script.ended(60)
    assert any(re.search(message, error) for error in script.errors()), (script.errors(), script.said)


@pytest.mark.long
@pytest.mark.parametrize(("kind", "victim"), [("ddp", 0), ("fsdp", 1)])
def test_killed_rank_ends_the_others_and_a_new_script_goes_on(
    tmp_path: Path, started: list[Scripts], kind: str, victim: int
) -> None:
    with Rounds(tmp_path, inner_steps=3, round_seconds=20) as rounds:
        started.append(script := Scripts(tmp_path / "script", kind, 2, attach=str(tmp_path), step_seconds=0.05))
        wait("two rounds", lambda: len(script.rounds()) >= 2, 60)
        os.kill(script.ranks[victim].pid, signal.SIGKILL)
        assert 0 not in script.ended(15)
        before = len(rounds.anchors)
        started.append(after := Scripts(tmp_path / "after", kind, 2, attach=str(tmp_path), ends=3))
        assert after.ended() == [0, 0], after.said
        assert len(rounds.anchors) > before + 1


@pytest.mark.long
@pytest.mark.parametrize(("kind", "alone"), [("ddp", "bare"), ("fsdp", "plain")])
def test_ranks_and_one_process_agree_in_one_run(tmp_path: Path, started: list[Scripts], kind: str, alone: str) -> None:
    """The tokens of all ranks count. When a rank is killed, its script ends, and the other peer loses no round."""
    stop, dirs = tmp_path / "stop", {name: tmp_path / f"state-{name}" for name in "ab"}
    options: dict[str, Any] = {"stop": str(stop), "hidden": 7, "step_seconds": 0.05}
    options |= {"evaluates": False, "quiet": False}
    run: dict[str, Any] = {"inner_steps": 10, "rounds": 1000, "state_dir": str(dirs["a"])}
    started.append(one := Scripts(tmp_path / "a", alone, 1, **run, **options))
    address = wait("an address", lambda: ADDRESS.search((tmp_path / "a" / "0.err").read_text()), 90)[0]
    started.append(ranks := Scripts(tmp_path / "b", kind, 2, bootstrap=address, state_dir=str(dirs["b"]), **options))

    def both() -> list[tuple[dict[str, Any], ...]]:
        others = ({line["round"]: line for line in each.rounds(rank)} for each, rank in ((ranks, 0), (ranks, 1)))
        here, there = others
        return [
            (line, here[line["round"]], there[line["round"]])
            for line in one.rounds()
            if line["round"] in here and line["round"] in there and line["metrics"].get("swarm/peers") == 2
        ]

    shared = wait("three rounds of both", lambda: found if len(found := both()) >= 3 else None, 90)
    for lines in shared:
        assert len({line["digest"] for line in lines}) == len({line["buffers"] for line in lines}) == 1
        assert lines[1]["contributed"] and lines[1]["metrics"] == lines[2]["metrics"]
        assert lines[0]["metrics"]["swarm/tokens"] % 4 == lines[1]["metrics"]["swarm/tokens"] % 9 == 0
    os.kill(ranks.ranks[1].pid, signal.SIGKILL)
    assert 0 not in ranks.ended(30)
    ended = len(one.rounds())
    wait("two more rounds", lambda: len(one.rounds()) >= ended + 2, 60)
    stop.touch()
    assert one.ended(60) == [0], one.said
    journal = [json.loads(line) for line in (dirs["a"] / "rounds.jsonl").read_text().splitlines()]
    assert [line["round"] for line in journal] == [*range(len(journal))]
