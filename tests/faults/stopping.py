"""How a stop signal ends a command that plays: after its clean-up, whichever module of the tests it is."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable


def from_shell(command: Callable[[], int], program: str) -> int:
    """Run a command so that a signal ends it only after its clean-up; returns its exit code."""

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
        print(f"{program}: {error}: give another directory by --dir", file=sys.stderr)
        return 2
