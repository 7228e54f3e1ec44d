"""Readings of a real machine, and of a desktop's services, which a program of the same name plays."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from node.machine.monitor import MachineMonitor
from node.machine.probes import Desktop, MachineProbes
from node.machine.rules import WORK, MachineRules, Mode, Wish
from node.runtime.compute import ThreadCompute

pytestmark = pytest.mark.real
SPIN = "import time\nend = time.monotonic() + 20\nwhile time.monotonic() < end: pass"


def test_others_load_leaves_out_this_program(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "__main__.py").write_text(SPIN)
    own = subprocess.Popen([sys.executable, "-m", "mine"], cwd=tmp_path)
    try:
        seen, other = (MachineProbes("mine"), MachineProbes("another"))
        time.sleep(0.5)
        assert math.isnan(seen.read(load=True).others_share) and math.isnan(other.read(load=True).others_share)
        time.sleep(2)
        # Both see the same programs but this one, which no other probe may take for its own.
        assert other.read(load=True).others_share > seen.read(load=True).others_share + 0.02
    finally:
        own.kill()
        own.wait()


def test_this_process_and_the_command_are_not_other_programs() -> None:
    probes = MachineProbes("another")
    assert os.getpid() in dict(probes._own_seconds())
    assert probes._is_program(["/venv/bin/python", "/venv/bin/starling", "join"])
    assert not probes._is_program(["vi", "notes", "starling"])


def test_memory_of_this_machine_is_known() -> None:
    readings = MachineProbes().read(load=False)
    assert 0 < readings.memory_available_bytes <= readings.memory_bytes and math.isnan(readings.others_share)


@pytest.fixture
def services_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], object]:
    """Set what the desktop's services answer."""
    answers = tmp_path / "answers"
    program = tmp_path / "busctl"
    program.write_text(
        f'#!/bin/sh\ncase "$*" in *ScreenSaver*) cat {answers} ;; *) echo "no such service"; exit 1 ;; esac\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    return answers.write_text


async def test_input_pauses_and_ends_its_pause(services_answer: Callable[[str], object]) -> None:
    wishes: list[Wish] = []
    async with ThreadCompute() as compute:
        monitor = MachineMonitor(MachineRules(in_use=True), compute, wishes.append)
        services_answer("u 2000\n")
        for now in (0.0, 5.0, 10.0):
            await monitor.look(now)
        assert [each.mode for each in wishes] == [Mode.REST] and "using" in wishes[0].cause
        services_answer("u 400000\n")
        for now in (20.0, 330.0):
            await monitor.look(now)
    assert wishes[1:] == [WORK]


@pytest.mark.parametrize("answer", ["", "s hello\n", "u\n", "u -5\n", "u 99999999999999999999\n", "x" * 100_000])
async def test_odd_answers_are_unknown(services_answer: Callable[[str], object], answer: str) -> None:
    services_answer(answer)
    assert math.isnan(await Desktop().input_idle_seconds())
    assert await Desktop().is_metered() is None
