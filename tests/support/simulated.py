"""Tests that are coroutines and run in a simulated world, on its virtual clock."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from tests.sim import loop as simloop

LIMIT_SECONDS = 86_400.0


class Playable(Protocol):
    """A simulated world: it runs a coroutine on a loop of its own, and then checks its invariants."""

    def play(self, main: Callable[[], Coroutine[Any, Any, None]]) -> object: ...


Test = Callable[..., Coroutine[Any, Any, None]]


def simulated(make: Callable[..., Playable], *arguments: Any, **options: Any) -> Callable[[Test], Callable[..., None]]:
    """A decorator: the test coroutine runs in a new world, which is its first argument."""
    given = inspect.signature(make).bind_partial(*arguments, **options).arguments
    needed = [
        each
        for each in inspect.signature(make).parameters.values()
        if each.name not in given
        and each.default is each.empty
        and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    ]

    def decorate(test: Test) -> Callable[..., None]:
        _, *own = inspect.signature(test).parameters.values()

        @functools.wraps(test)
        def run(**values: Any) -> None:
            world = make(*arguments, **options, **{each.name: values[each.name] for each in needed})
            world.play(lambda: test(world, **{each.name: values[each.name] for each in own}))

        names = {each.name for each in own}
        run.__signature__ = inspect.Signature([*own, *(each for each in needed if each.name not in names)])  # type: ignore[attr-defined]
        return run

    return decorate


def on_virtual_time(test: Test) -> Callable[..., None]:
    """A decorator: the test coroutine runs on a simulated loop, without a world, for at most a day."""

    @functools.wraps(test)
    def run(**values: Any) -> None:
        simloop.run(test(**values), limit_seconds=LIMIT_SECONDS)

    return run
