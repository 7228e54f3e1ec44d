"""Runs a command that plays as a shell expects it: a signal ends it after its clean-up. Without PyTorch."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable

PROGRAM = "python -m tests.faults"


def from_shell(
    command: Callable[[], int], program: str = PROGRAM, cure: str = "give another directory by --dir"
) -> int:
    """`cure` is said where a file cannot be written."""

    def stop(number: int, _: object) -> None:
        signal.signal(number, signal.SIG_IGN)  # cleaning up takes seconds; a second signal must not interrupt it
        sys.exit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup
            signal.signal(number, stop)
    try:
        return command()
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        print(f"{program}: {error}{cure and f': {cure}'}", file=sys.stderr)
        return 2
