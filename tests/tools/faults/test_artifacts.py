"""A stop signal makes a command that plays clean up once; its exit code names the signal."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

pytestmark = pytest.mark.real

COMMAND = """
import signal, sys, time
from tests.faults.stopping import from_shell

def command():
    try:
        print("begun", flush=True)
        time.sleep(60)
    finally:
        print("cleaning up", flush=True)
        sys.stdin.readline()
        print("done", flush=True)
    return 0

signal.signal(signal.SIGHUP, signal.SIG_IGN if "nohup" in sys.argv else signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
sys.exit(from_shell(command, "a program"))
"""


def exit_of(first: signal.Signals, *more: signal.Signals) -> tuple[int, str]:
    """What becomes of a command that gets a signal, and more while it cleans up: its exit code, and its last word."""
    command = [sys.executable, "-c", COMMAND]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        process.send_signal(first)
        assert process.stdout.readline() == "cleaning up\n"
        for number in more:
            process.send_signal(number)
        said, _ = process.communicate("\n", 30)
        return process.returncode, said


@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 130)])
def test_stop_signal_runs_cleanup(number: signal.Signals, code: int) -> None:
    assert exit_of(number) == (code, "done\n")


def test_second_stop_signal_does_not_interrupt_cleanup() -> None:
    assert exit_of(signal.SIGTERM, signal.SIGTERM) == (143, "done\n")


def test_nohup_ignores_the_hangup_signal() -> None:
    command = [sys.executable, "-c", COMMAND, "nohup"]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGHUP)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
        process.kill()
        assert process.stdout.read() == ""
