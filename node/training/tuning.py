"""How many threads the worker computes with, where that is measured: a pure decision on the times of steps.

More threads are faster while the cores are free. Once another program takes a core, threads that wait for each other at
each operation may be slower than one thread alone. So now and then some steps are taken with another number of threads,
and the better number is kept.
"""

from __future__ import annotations

from dataclasses import dataclass

RUNGS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""The numbers of threads that are tried, besides the limit itself."""
BLOCK_STEPS, BLOCK_SECONDS = 3, 0.25
"""A block is what is compared: at least so many steps, and so long."""
GAIN = 0.9
"""More threads are kept if a step takes at most so much of its time with fewer."""
LOSS = 1.03
"""Fewer threads are kept if a step takes at most so much of its time with more: others have use for a core, too.
Between the two bounds the number stays as it is, whichever it is."""
CHANGE = 1.3
"""Steps that take so many times as long as they did, or that much less, are a reason to try another number at once."""
FIRST_SECONDS, LAST_SECONDS = 2.0, 20.0
"""Until another number is tried where nothing has changed: after a change of the number, and at the longest. It doubles
with each trial that fails."""
SHARE = 0.02
"""Of the time may be lost to the slower steps of trials: so much to each kind of them, with more threads or fewer,
after a change or because it is due. A dear trial of one kind does not keep those of another waiting."""
MOST_CREDIT_SECONDS = 1.0
"""Are saved up for later trials. What a trial loses beyond that is waited for afterwards."""
HOPELESS_SECONDS = 1.0
"""A trial that has lost so much, and more than a block takes, ends early."""


@dataclass(slots=True)
class _Block:
    """Steps that are timed together, after one or more that do not count: the first with another number warm up."""

    warming: int
    steps: int = 0
    seconds: float = 0.0

    def add(self, seconds: float) -> float | None:
        """Count a step; the mean time of one if the block is complete."""
        if self.warming:
            self.warming -= 1
            return None
        self.steps += 1
        self.seconds += seconds
        complete = self.steps >= BLOCK_STEPS and self.seconds >= BLOCK_SECONDS
        return self.seconds / self.steps if complete else None


class ThreadTuner:
    """Chooses the number of threads for each step by the times of the steps before.

    Attributes:
        threads: of the next step.
    """

    def __init__(self, start: int, limit: int) -> None:
        """
        Args:
            start: threads of the first steps.
            limit: there are never more.
        """
        self._limit = max(1, limit)
        # (upwards, after a change) -> seconds that such a trial may lose
        self._credits = {(way, why): 0.0 for way in (True, False) for why in (True, False)}
        self._usual: float | None = None  # seconds of a step with the kept number, when that was looked at last
        self._waited, self._interval = 0.0, FIRST_SECONDS  # seconds since the last trial, and until the next
        self._lost, self._changed = 0.0, False  # of the trial: seconds so far, and whether a change was its reason
        self.begin(start)

    def begin(self, threads: int) -> None:
        """Begin, or go on with a number that another worker, or a former life, has found."""
        self._kept = self.threads = min(max(1, threads), self._limit)
        self._upwards = True  # the direction of the trial before
        self._settle(warming=2)

    def confine(self, limit: int) -> None:
        """There are never more threads than that, from now on."""
        if limit != self._limit:
            self._limit = max(1, limit)
            if self._kept > self._limit or self.threads > self._limit:
                self.begin(self._kept)

    def took(self, seconds: float) -> int:
        """Take the time of a step into account; returns the threads of the next one."""
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
        """A block with the kept number is complete: whether to try another number."""
        usual = mean if self._usual is None else self._usual
        self._usual, self._block = usual, _Block(0)
        if mean > CHANGE * usual or CHANGE * mean < usual:
            way = mean < usual
            if self._next(way) is None:  # what steps take now is what they take
                self._usual = mean
            elif self._credits[way, True] >= 0:
                self._begin_trial(mean, way, changed=True)
        elif self._waited >= self._interval:
            for way in (not self._upwards, self._upwards):
                if self._next(way) and self._credits[way, False] >= 0:
                    self._begin_trial(mean, way, changed=False)
                    break

    def _next(self, upwards: bool) -> int | None:
        """The next number of threads above or below the kept one; None: there is none."""
        rungs = {*(rung for rung in RUNGS if rung < self._limit), self._limit}
        if upwards:
            return min((rung for rung in rungs if rung > self._kept), default=None)
        return max((rung for rung in rungs if rung < self._kept), default=None)

    def _begin_trial(self, mean: float, upwards: bool, changed: bool) -> None:
        """Take the next steps with another number of threads.

        Args:
            mean: seconds of a step with the kept number, now.
        """
        self._usual, self._waited, self._upwards = mean, 0.0, upwards
        self._lost, self._changed = 0.0, changed
        self.threads, self._block = self._next(upwards) or self._kept, _Block(1)

    def _try(self, seconds: float, mean: float | None) -> None:
        """A step of a trial was taken."""
        assert self._usual is not None
        self._lost += seconds - self._usual
        hopeless = self._lost > max(HOPELESS_SECONDS, BLOCK_STEPS * self._usual)
        if mean is None and not hopeless:
            return
        self._credits[self._upwards, self._changed] -= max(0.0, self._lost)
        bound = (GAIN if self.threads > self._kept else LOSS) * self._usual
        if mean is not None and mean <= bound:
            self._kept = self.threads
            # A number that was found on the way goes on in its direction; one that a change forced is doubted first.
            self._upwards = self._upwards if self._changed else not self._upwards
            self._settle(warming=0)
        else:
            self.threads = self._kept
            self._interval = min(LAST_SECONDS, 2 * self._interval)
            self._block = _Block(1)

    def _settle(self, warming: int) -> None:
        """The kept number is new: what steps take with it is not known, and it is doubted soon."""
        self._usual, self._block = None, _Block(warming)
        self._waited, self._interval = 0.0, FIRST_SECONDS
