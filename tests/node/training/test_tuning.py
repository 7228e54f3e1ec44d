"""The number of threads that the tuner settles on, given the times of steps."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from node.training.tuning import LAST_SECONDS, SHARE, ThreadTuner

QUIET = {1: 0.078, 2: 0.046}
BESIDE_ONE = {1: 0.080, 2: 0.210}
COLLAPSED = {1: 0.080, 2: 4.0}

Times = Callable[[float, int], float]


def play(tuner: ThreadTuner, times: Times, seconds: float, at: float = 0.0) -> list[tuple[float, int, float]]:
    """(end, threads, seconds) of each step from `at` on."""
    steps = []
    end = at + seconds
    while at < end:
        threads = tuner.threads
        took = times(at, threads)
        at += took
        tuner.record_step(took)
        steps.append((at, threads, took))
    return steps


def lost(steps: list[tuple[float, int, float]], best: dict[int, float]) -> float:
    """The share of the time that steps took beyond those of the best number of threads."""
    return 1 - min(best.values()) * len(steps) / sum(took for *_, took in steps)


@pytest.mark.parametrize("start", [1, 2])
@pytest.mark.parametrize("best", [QUIET, BESIDE_ONE, COLLAPSED])
def test_better_thread_count_is_found_at_little_cost(best: dict[int, float], start: int) -> None:
    tuner, noise = ThreadTuner(start, 2), random.Random(start)

    def times(at: float, threads: int) -> float:
        return best[threads] * noise.uniform(0.9, 1.15)

    settled = play(tuner, times, 30.0)[-1][0]
    steps = play(tuner, times, 600.0, settled)
    assert sum(threads == min(best, key=lambda each: best[each]) for _, threads, _ in steps) > 0.95 * len(steps)
    assert lost(steps, {threads: 1.03 * took for threads, took in best.items()}) < 0.04  # the noise's mean is 1.025


@pytest.mark.parametrize("beside", [BESIDE_ONE, COLLAPSED])
def test_neighbour_process_costs_only_seconds(beside: dict[int, float]) -> None:
    """A block of slow steps when it starts; when it ends, a wait for the next trial that the last trial's cost sets."""
    tuner = ThreadTuner(2, 2)
    play(tuner, lambda at, threads: QUIET[threads], 60.0)
    dear_seconds = 5 * (beside[2] - beside[1]) / SHARE
    for now, slow_seconds in ((beside, 1.0 + 5 * beside[2]), (QUIET, LAST_SECONDS + dear_seconds)):
        steps = play(tuner, lambda at, threads, now=now: now[threads], slow_seconds + 100.0)  # type: ignore[misc]
        assert lost([step for step in steps if step[0] > slow_seconds], now) < 0.06


def test_equally_good_thread_counts_do_not_alternate() -> None:
    """The tuner treats counts as equal from a tenth faster to a thirtieth slower, however long it measures."""
    noise = random.Random(1)

    def times(at: float, threads: int) -> float:
        return (0.080 if threads == 1 else 0.0755) * noise.uniform(0.97, 1.03)

    for start in (1, 2):
        threads = [each for _, each, _ in play(ThreadTuner(start, 2), times, 900.0)]
        assert 0 < threads.count(3 - start) < 0.05 * len(threads), "a trial now and then, no more"


def test_many_cores_are_tried_step_by_step() -> None:
    def times(at: float, threads: int) -> float:
        return 0.5 / min(threads, 12) + 0.002 * threads  # as fast as it gets at 12 to 16 threads

    for start in (1, 4, 64):
        tuner = ThreadTuner(start, 64)
        steps = play(tuner, times, 120.0)
        assert {threads for at, threads, _ in steps if at > 60} <= {8, 12, 16}


def test_thread_count_of_former_incarnation_is_reused() -> None:
    tuner = ThreadTuner(4, 4)
    tuner.begin(2)
    assert tuner.record_step(0.1) == 2
    tuner.begin(99)
    assert tuner.threads == 4, "no more than there are cores now"
    tuner.confine(1)
    assert tuner.threads == 1
    tuner.confine(4)
    play(tuner, lambda at, threads: 0.1 / threads, 20.0)
    assert tuner.threads == 4, "the other peers have left"
