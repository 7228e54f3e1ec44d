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
"""Fewer threads are kept if a step takes at most so much of its time with more: others have use for a core, too. Between
the two bounds the number stays as it is, whichever it is."""
CHANGE = 1.3
"""Steps that take so many times as long as they did, or that much less, are a reason to try another number at once."""
FIRST_SECONDS, LAST_SECONDS = 2.0, 20.0
"""Until another number is tried where nothing has changed: after a change of the number, and at the longest. It doubles
with each trial that fails."""
SHARE = 0.02
"""Of the time may be lost to the slower steps of trials where nothing has changed; and as much where something has."""
HOPELESS, HOPELESS_SECONDS = 3.0, 1.0
"""A trial ends early once it has lost so many times what a block takes, and so many seconds."""


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
        self._credits = {True: 0.0, False: 0.0}  # seconds that trials may lose: after a change, and without one
        self.begin(start)

    def begin(self, threads: int) -> None:
        """Begin, or go on with a number that another worker, or a former life, has found."""
        self._kept = self.threads = min(max(1, threads), self._limit)
        self._upwards = True  # the direction of the trial before
        self._settle(warming=2)

    def took(self, seconds: float) -> int:
        """Take the time of a step into account; returns the threads of the next one."""
        mean = self._block.add(seconds)
        if self.threads != self._kept:
            self._try(seconds, mean)
        else:
            self._waited += seconds
            for kind in self._credits:
                self._credits[kind] = min(HOPELESS_SECONDS, self._credits[kind] + SHARE * seconds)
            if mean is not None:
                self._look(mean)
        return self.threads

    def _look(self, mean: float) -> None:
        """A block with the kept number is complete: whether to try another number."""
        usual = mean if self._usual is None else self._usual
        slower, faster = mean > CHANGE * usual, CHANGE * mean < usual
        changed, due = slower or faster, self._waited >= self._interval
        self._usual, self._block = usual, _Block(0)
        if (changed or due) and self._credits[changed] >= 0:
            self._begin_trial(mean, faster if changed else not self._upwards, changed)

    def _begin_trial(self, mean: float, upwards: bool, changed: bool) -> None:
        """Take the next steps with one rung more or less; where there is none, the other way, unless it changed."""
        rungs = sorted({*(rung for rung in RUNGS if rung < self._limit), self._limit})
        above, below = ([r for r in rungs if r > self._kept], [r for r in reversed(rungs) if r < self._kept])
        if not changed and not (above if upwards else below):
            upwards = not upwards
        self._usual, self._waited, self._upwards = mean, 0.0, upwards
        self._lost, self._changed = 0.0, changed
        if there := above if upwards else below:
            self.threads, self._block = there[0], _Block(1)

    def _try(self, seconds: float, mean: float | None) -> None:
        """A step of a trial was taken."""
        assert self._usual is not None
        self._lost += seconds - self._usual
        block_seconds = max(BLOCK_SECONDS, BLOCK_STEPS * self._usual)
        hopeless = self._lost > max(HOPELESS_SECONDS, HOPELESS * block_seconds)
        if mean is None and not hopeless:
            return
        self._credits[self._changed] -= max(0.0, self._lost)
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
        self._usual: float | None = None
        self._block = _Block(warming)
        self._waited, self._interval = 0.0, FIRST_SECONDS
        self._lost, self._changed = 0.0, False
