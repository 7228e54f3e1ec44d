"""Async tests on the simulated event loop."""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine
from typing import Any

from tests.sim import loop

LIMIT_SECONDS = 3600.0


def on_virtual_time(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run the test as the main task of a simulated loop, for at most an hour of virtual time."""

    @functools.wraps(test)
    def run(*given: Any, **fixtures: Any) -> None:
        loop.run(test(*given, **fixtures), limit_seconds=LIMIT_SECONDS)

    return run
