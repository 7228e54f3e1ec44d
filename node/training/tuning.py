"""Choose the number of threads of the worker from the measured times of its steps. No I/O, no clock.

More threads are faster while the cores are free. Once another program takes a core, threads that wait for each other at
each operation may be slower than a single thread. So the tuner tries another number of threads for a few steps now and
then, and keeps the better number.
"""

from __future__ import annotations

from dataclasses import dataclass

RUNGS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""The numbers of threads that are tried, besides the limit itself."""
BLOCK_STEPS, BLOCK_SECONDS = 3, 0.25
"""The tuner compares blocks of steps. A block has at least this many steps and lasts at least this long."""
GAIN = 0.9
"""More threads are kept if a step's time is at most this multiple of its time with fewer."""
LOSS = 1.03
"""Fewer threads are kept if a step's time is at most this multiple of its time with more, because other programs can
use the core. Between the two bounds the number stays as it is."""
CHANGE = 1.3
"""If steps become slower or faster by this factor, the tuner tries another number at once."""
FIRST_SECONDS, LAST_SECONDS = 2.0, 20.0
"""Time until the next trial if nothing has changed: after a change of the number, and at most. It doubles with each
trial that fails."""
SHARE = 0.02
"""Share of the time that each kind of trial (with more or fewer threads; after a change or because it is due) may lose
to slower steps. The kinds have separate budgets, so an expensive one does not delay another."""
MOST_CREDIT_SECONDS = 1.0
"""Largest budget that is saved for later trials of a kind. After a trial that loses more, the next one waits."""
HOPELESS_SECONDS = 1.0
"""A trial that has lost more than this, and more than the time of a block, ends early."""


@dataclass(slots=True)
class _Block:
    """Steps that are timed together. The first `warming` steps do not count: they warm up a new number of threads."""

    warming: int
    steps: int = 0
    seconds: float = 0.0

    def add(self, seconds: float) -> float | None:
        """Count a step. Return the mean time of a step if the block is complete."""
        if self.warming:
            self.warming -= 1
            return None
        self.steps += 1
        self.seconds += seconds
        complete = self.steps >= BLOCK_STEPS and self.seconds >= BLOCK_SECONDS
        return self.seconds / self.steps if complete else None


class ThreadTuner:
    """Chooses the number of threads for each step, at most `limit`, by the times of the steps before."""

    def __init__(self, start: int, limit: int) -> None:
        self._limit = max(1, limit)
        # (upwards, after a change) -> seconds that such a trial may lose
        self._credits = {(upwards, changed): 0.0 for upwards in (True, False) for changed in (True, False)}
        self._usual: float | None = None  # seconds of a step with the kept number, as last measured
        self._waited, self._interval = 0.0, FIRST_SECONDS  # seconds since the last trial, and until the next one
        self._lost, self._changed = 0.0, False  # seconds lost by this trial, and whether a change was its reason
        self.begin(start)

    def begin(self, threads: int) -> None:
        """Start from what an earlier worker or incarnation may have found."""
        self._kept = self.threads = min(max(1, threads), self._limit)
        self._upwards = True  # the direction of the trial before
        self._settle(warming=2)

    def confine(self, limit: int) -> None:
        if limit != self._limit:
            self._limit = max(1, limit)
            if self._kept > self._limit or self.threads > self._limit:
                self.begin(self._kept)

    def record_step(self, seconds: float) -> int:
        mean = self._block.add(seconds)
        if self.threads != self._kept:
            self._try(seconds, mean)
        else:
            self._waited += seconds
            for kind in self._credits:
                self._credits[kind] = min(MOST_CREDIT_SECONDS, self._credits[kind] + SHARE * seconds)
            if mean is not None:
                self._look(mean)
        return self.threads

    def _look(self, mean: float) -> None:
        """Decide whether to start a trial, now that a block with the kept number is complete."""
        usual = mean if self._usual is None else self._usual
        self._usual, self._block = usual, _Block(0)
        if mean > CHANGE * usual or CHANGE * mean < usual:
            upwards = mean < usual
            if self._next(upwards) is None:  # no other number to try: accept the new step time as usual
                self._usual = mean
            elif self._credits[upwards, True] >= 0:
                self._begin_trial(mean, upwards, changed=True)
        elif self._waited >= self._interval:
            for upwards in (not self._upwards, self._upwards):
                if self._next(upwards) and self._credits[upwards, False] >= 0:
                    self._begin_trial(mean, upwards, changed=False)
                    break

    def _next(self, upwards: bool) -> int | None:
        rungs = {*(rung for rung in RUNGS if rung < self._limit), self._limit}
        if upwards:
            return min((rung for rung in rungs if rung > self._kept), default=None)
        return max((rung for rung in rungs if rung < self._kept), default=None)

    def _begin_trial(self, mean: float, upwards: bool, changed: bool) -> None:
        self._usual, self._waited, self._upwards = mean, 0.0, upwards
        self._lost, self._changed = 0.0, changed
        self.threads, self._block = self._next(upwards) or self._kept, _Block(1)

    def _try(self, seconds: float, mean: float | None) -> None:
        assert self._usual is not None
        self._lost += seconds - self._usual
        hopeless = self._lost > max(HOPELESS_SECONDS, BLOCK_STEPS * self._usual)
        if mean is None and not hopeless:
            return
        self._credits[self._upwards, self._changed] -= max(0.0, self._lost)
        bound = (GAIN if self.threads > self._kept else LOSS) * self._usual
        if mean is not None and mean <= bound:
            self._kept = self.threads
            # Next, try the same direction again; after a trial that a change caused, try the opposite direction first.
            self._upwards = self._upwards if self._changed else not self._upwards
            self._settle(warming=0)
        else:
            self.threads = self._kept
            self._interval = min(LAST_SECONDS, 2 * self._interval)
            self._block = _Block(1)

    def _settle(self, warming: int) -> None:
        self._usual, self._block = None, _Block(warming)
        self._waited, self._interval = 0.0, FIRST_SECONDS
