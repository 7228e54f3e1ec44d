"""A stop signal makes a command that plays clean up once; its exit code names the signal."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

pytestmark = pytest.mark.real

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
    return 0

signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
sys.exit(from_shell(command))
"""


@pytest.mark.parametrize(
    "numbers, code",
    [([signal.SIGTERM], 143), ([signal.SIGHUP], 129), ([signal.SIGINT], 130), ([signal.SIGTERM] * 2, 143)],
)
def test_stop_signals_run_cleanup_once(numbers: list[signal.Signals], code: int) -> None:
    """The first interrupts the command; more of them do not interrupt its cleanup."""
    command = [sys.executable, "-S", "-c", COMMAND]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        process.send_signal(numbers[0])
        assert process.stdout.readline() == "cleaning up\n"
        for number in numbers[1:]:
            process.send_signal(number)
        said, _ = process.communicate("\n", 30)
        assert (process.returncode, said) == (code, "done\n")
