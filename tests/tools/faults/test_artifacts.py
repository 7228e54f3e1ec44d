"""A stop signal makes a command that plays clean up once; its exit code names the signal."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

COMMAND = """
import signal, sys, time
from tests.faults.shell import from_shell

def command():
    try:
        print("begun", flush=True)
        time.sleep(60)
    finally:
        print("cleaning up", flush=True)
        sys.stdin.readline()
        print("done", flush=True)

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
sys.exit(from_shell(command))
"""


@pytest.mark.real
@pytest.mark.parametrize("numbers, code", [([signal.SIGINT], 130), ([signal.SIGTERM] * 2, 143)])
def test_stop_signals_run_cleanup_once(numbers: list[signal.Signals], code: int) -> None:
    """The first interrupts the command; more of them do not interrupt its cleanup."""
    command = [sys.executable, "-S", "-c", COMMAND]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for number, line in zip(numbers, ("begun\n", "cleaning up\n"), strict=False):
            assert process.stdout.readline() == line
            process.send_signal(number)
        said, _ = process.communicate("\n", 30)
        assert process.returncode == code and said.removeprefix("cleaning up\n") == "done\n"
