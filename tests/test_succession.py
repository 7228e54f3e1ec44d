"""One worker after the other, on virtual time: how often, and when there is no point in another."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from node.tasks.spec import WorkerSpec
from node.training.process import WorkerError, WorkerProcess
from node.training.succession import DEATHS, DEATHS_AN_HOUR, Succession
from tests.sim import loop as simloop


def worker(useful: bool) -> WorkerProcess:
    return cast(WorkerProcess, SimpleNamespace(useful=useful, child=SimpleNamespace(pid=1)))


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """When workers were started."""
    made: list[float] = []

    async def start(spec: WorkerSpec, memory: int) -> Any:
        made.append(asyncio.get_running_loop().time())

    monkeypatch.setattr(WorkerProcess, "start", start)
    return made


def lives(count: int, seconds: float, useful: bool) -> None:
    """So many workers live so long each."""

    async def main() -> None:
        succession = Succession(cast(WorkerSpec, None), 0)
        for _ in range(count):
            await asyncio.sleep(seconds)
            await succession.after(worker(useful), "killed by signal 9; last output: farewell")

    simloop.run(main())


@pytest.mark.parametrize("seconds", [1.0, 89.0])
def test_who_works_and_dies_all_the_time_is_given_up_in_one_line(starts: list[float], seconds: float) -> None:
    with pytest.raises(WorkerError) as caught:
        lives(100, seconds, useful=True)
    assert len(starts) == DEATHS_AN_HOUR - 1
    line = str(caught.value)
    assert line.startswith(
        "the worker died 40 times within an hour, at last: killed by signal 9; last output: farewell;"
    )
    assert "memory" in line and "started again" in line and "\n" not in line


def test_who_dies_now_and_then_is_replaced_for_ever(starts: list[float]) -> None:
    lives(500, 95.0, useful=True)
    assert len(starts) == 500


def test_who_does_nothing_before_it_dies_is_given_up_soon_with_growing_pauses(starts: list[float]) -> None:
    with pytest.raises(WorkerError, match=f"died {DEATHS} times in a row: killed by signal 9; .*; see to what"):
        lives(100, 0.0, useful=False)
    assert starts == [0.0, 0.5, 1.5, 3.5]
