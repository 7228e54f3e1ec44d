"""Evaluates what the rounds of a pipeline came to, each beside the round that follows it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from typing import Any

from node.reporting.report import RoundReport
from node.training.process import WorkerError
from protocols.aio import Notifier, loop_time, run_with_helper
from protocols.pipeline.held_out import HeldOutLoss
from protocols.pipeline.job import VersionPassed

log = logging.getLogger(__name__)

IDLE_SECONDS = 3600.0  # how often one without a round looks for one


class _Outdated(Exception):
    """There is a newer round, or no more time."""


class RoundEvaluator:
    """One evaluation at a time: that of a newer round ends the older one, with what that has."""

    def __init__(self, evaluate: Callable[[HeldOutLoss], Coroutine[Any, Any, None]]) -> None:
        """`evaluate` fills what it is given; it may raise WorkerError, TimeoutError, `VersionPassed`."""
        self._evaluate = evaluate
        self._next: tuple[RoundReport, HeldOutLoss] | None = None
        self._is_busy = self._is_over = False
        self._changed = Notifier()
        self.on_end: Callable[[RoundReport, HeldOutLoss, str], None] = lambda report, found, why: None
        """Called with what an evaluation has found and, if it has failed, why."""

    def start(self, report: RoundReport, found: HeldOutLoss) -> None:
        self._next = report, found
        self._changed.notify()

    async def run(self) -> None:
        while True:
            await self._changed.reached(lambda: self._next is not None, loop_time() + IDLE_SECONDS)
            if self._next:
                (report, found), self._next, self._is_busy = self._next, None, True
                try:
                    self.on_end(report, found, await self._why_failed(found))
                finally:
                    self._is_busy = False
                    self._changed.notify()

    async def finish(self, seconds: float) -> None:
        """Wait until the last evaluation has ended; after so many seconds, with what it has."""
        if not await self._changed.reached(self._is_idle, loop_time() + seconds):
            self._is_over = True
            self._changed.notify()
            await self._changed.reached(self._is_idle, loop_time() + 1.0)

    def _is_idle(self) -> bool:
        return not self._is_busy and self._next is None

    async def _why_failed(self, found: HeldOutLoss) -> str:
        try:
            await run_with_helper(self._evaluate(found), self._until_outdated())
        except _Outdated:
            log.info("the evaluation ends with %d samples: there is a newer round", found.samples)
        except VersionPassed as error:
            log.info("the evaluation ends with %d samples: %s", found.samples, error)
        except (WorkerError, TimeoutError) as error:
            return str(error) or type(error).__name__
        return ""

    async def _until_outdated(self) -> None:
        while not (self._next or self._is_over):
            await self._changed.reached(lambda: bool(self._next) or self._is_over, loop_time() + IDLE_SECONDS)
        raise _Outdated
