"""The program of a real peer under test: `python -m node`, with what the environment says done to it.

    python -m tests.faults.peer join …

    STARLING_TRACE=SOCKET         it reports its failpoints there (`tests/faults/failpoints.py`)
    STARLING_TEST_LIE=FILE        it tells the lie that the file names (`tests/faults/liar.py`)
    STARLING_CLOCK_FILE=FILE      its wall clock is off by the seconds in the file, from the moment that they change

It replaces what a session is composed of, by name: the product knows nothing of it.
"""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path
from typing import Any

PROGRAM = "tests.faults.peer"
TRACE, LIE, CLOCK = "STARLING_TRACE", "STARLING_TEST_LIE", "STARLING_CLOCK_FILE"


def report_failpoints(socket_path: str) -> None:
    from node.session import build, peer
    from tests.faults import failpoints

    trace = failpoints.FailpointClient(socket_path)
    vars(peer)["RemoteTrainer"] = partial(failpoints.FailpointTrainer, trace)
    vars(build)["Journal"] = partial(failpoints.FailpointJournal, trace)
    wrap_transport(partial(failpoints.FailpointTransport, trace))


def lie(file: str) -> None:
    from tests.faults.liar import LyingTransport

    wrap_transport(lambda transport: LyingTransport(transport, transport._identity, Path(file)))


def wrap_transport(wrap: Any) -> None:
    """What is sent and received in a session goes through `wrap` of its transport, and through those before it."""
    from node.session import build

    host = vars(build)["Host"]
    vars(build)["Host"] = lambda transport, *rest: host(wrap(transport), *rest)


def shift_clock(file: str) -> None:
    from node.runtime.clock import WallClock

    def wall(self: WallClock) -> float:
        try:
            return time.time() + float(Path(file).read_text())
        except (OSError, ValueError):  # not written yet, or just being written
            return time.time()

    WallClock.wall = wall  # type: ignore[method-assign]


if __name__ == "__main__":
    from node.__main__ import main

    for variable, change in ((TRACE, report_failpoints), (LIE, lie), (CLOCK, shift_clock)):
        if given := os.environ.get(variable):
            change(given)
    main()
