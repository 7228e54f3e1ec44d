"""A long run with a fault every 15 seconds, to find growth of memory, descriptors and tasks.

    python -m tests.faults.soak [--minutes 30] [--seed 0] [--json]

A seed draws which peers are killed, stopped, asked to leave, started again or added. Two peers have no faults, and are
watched. The run ends like a scenario (`python -m tests.faults`). Then it prints how much memory, descriptors and tasks
of the two have grown per hour since the swarm was warm, with a confidence interval. Half an hour shows a leak of 3 % an
hour; one of 1 % takes two hours. Exit code: 0 without violations, 1 with violations, 2 not played.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import NormalDist
from typing import NamedTuple

from tests.faults.artifacts import DIRECTORY, kept
from tests.faults.recording import Limits, Recording
from tests.faults.runner import Options, Unplayable
from tests.faults.scenarios import Scenario
from tests.faults.shell import from_shell
from tests.faults.steps import Step
from tests.sim.arguments import Parser, at_least
from tests.support.checkers import DECIDED

PROGRAM = "python -m tests.faults.soak"
EVERY_SECONDS = 15.0
STOPPED_SECONDS = 6.0
WATCHED = 2
FEWEST, MOST = 4, 7
WARM_SECONDS = 180.0
LEVELS = ("rss_bytes", "open_files", "tasks")
GROWTH_LIMIT = 0.01
BLOCK_SECONDS = 120.0
"""Deviations of a level so far apart are independent: measured, they are correlated for up to a minute."""
_CONFIDENCE = 0.95
_FEWEST_ROUNDS, _FEWEST_BLOCKS = 10, 6


class Growth(NamedTuple):
    """The growth of a level per hour, as a share of its mean, and half its 95 % interval; nan: too little data."""

    share: float
    within: float

    @property
    def verdict(self) -> str:
        if self.share - self.within > GROWTH_LIMIT:
            return "over"
        return "under" if self.share + self.within < GROWTH_LIMIT else "undecided"

    def __str__(self) -> str:
        return f"{self.share:+.2%} ± {self.within:.2%}" if math.isfinite(self.share) else "an unknown share"


class _Crowd:
    def __init__(self, names: Sequence[str]) -> None:
        self.here, self.gone = list(names), list[str]()
        self._came = 0

    def draw(self, rng: random.Random) -> list[Step]:
        watched = self.here[:WATCHED]
        others = [name for name in self.here if name not in watched]
        acts = ["worker", "p2pd", "stop"]
        acts += ["join"] * 2 * (len(self.here) < MOST) + ["restart"] * 3 * bool(self.gone and len(self.here) < MOST)
        acts += ["kill", "kill", "finish"] if len(self.here) > FEWEST else []
        act = rng.choice(acts)
        if act == "join":
            self._came += 1
            self.here.append(f"new-{self._came}")
            return [Step("join", (self.here[-1],))]
        if act == "restart":
            self.here.append(self.gone.pop(rng.randrange(len(self.gone))))
            return [Step("restart", (self.here[-1],))]
        victim = rng.choice(others)
        if act == "stop":
            role = rng.choice(("peer", "all"))
            wait = Step("wait", amount=STOPPED_SECONDS)
            return [Step("stop", (victim,), role=role), wait, Step("wake", (victim,), role=role)]
        if act in ("kill", "finish"):
            self.here.remove(victim)
            self.gone.append(victim)
            return [Step("finish", (victim,)) if act == "finish" else Step("kill", (victim,), role="peer")]
        return [Step("kill", (victim,), role=act)]


def soak(minutes: int) -> Scenario:
    def draw(rng: random.Random, seed: int, names: Sequence[str]) -> list[Step]:
        crowd, steps = _Crowd(names), list[Step]()
        for turn in range(int(60 * minutes / EVERY_SECONDS)):
            steps += [Step("until", amount=turn * EVERY_SECONDS), *crowd.draw(rng)]
        return [*steps, Step("until", amount=60.0 * minutes)]

    return Scenario(f"a fault every {EVERY_SECONDS:g} s, for {minutes} minutes", draw, Limits(120, forks=True))


def growth(play: Recording) -> Mapping[str, Mapping[str, Growth]]:
    found = {}
    for name, incarnations in play.incarnations.items():
        if len(incarnations) == 1 and incarnations[0].began <= play.calm[0] and incarnations[0].ended >= play.ended:
            since = play.calm[1] + WARM_SECONDS
            warm = [each for each in play.histories[name] if each["outcome"] in DECIDED and each["time"] > since]
            found[name] = {
                what: slope([(len(each["peers"]), each["time"] / 3600, each[what]) for each in warm]) for what in LEVELS
            }
    return found


def slope(points: Sequence[tuple[int, float, float]]) -> Growth:
    """The growth of a level, from (peers, hours, value) of each round.

    It is the common slope of straight lines, one for each number of peers in a round, because each further peer is a
    further connection. What a high number of peers leaves behind counts as growth.
    """
    unknown = Growth(math.nan, math.nan)
    if len(points) < _FEWEST_ROUNDS:
        return unknown
    lines: dict[int, list[tuple[float, float]]] = {}
    for peers, hour, value in points:
        lines.setdefault(peers, []).append((hour, value))
    off = list[tuple[float, float, float]]()
    for line in lines.values():
        hour, value = (sum(each) / len(line) for each in zip(*line, strict=True))
        off += [(x, x - hour, y - value) for x, y in line]
    spread = sum(x * x for _, x, _ in off)
    level = sum(value for _, _, value in points) / len(points)
    if not spread or not level:
        return unknown
    rise = sum(x * y for _, x, y in off) / spread
    error = _error([(hour, x, y - rise * x) for hour, x, y in off], spread)
    return Growth(rise / level, error / abs(level)) if error is not None else unknown


def _error(off: Sequence[tuple[float, float, float]], spread: float) -> float | None:
    """Half the confidence interval of a slope, from (hour, hour less its mean, residual); None: too little data.

    Residuals are correlated for some rounds, so those of two minutes form a block: the sandwich estimator of Liang and
    Zeger (Biometrika 73, 1986). There are few blocks, so Student's quantile is used, and residuals of a block are
    enlarged by its leverage (Bell and McCaffrey, Survey Methodology 28, 2002).
    """
    blocks: dict[int, list[tuple[float, float]]] = {}
    first = min(hour for hour, _, _ in off)
    for hour, x, y in off:
        blocks.setdefault(int((hour - first) * 3600 / BLOCK_SECONDS), []).append((x, y))
    if len(blocks) < _FEWEST_BLOCKS:
        return None
    squares = 0.0
    for block in blocks.values():
        drawn = len(block) / len(off) + sum(x * x for x, _ in block) / spread
        if drawn >= 1:
            return None
        squares += (sum(x * y for x, y in block) / (1 - drawn)) ** 2
    return student(len(blocks) - 2) * math.sqrt(squares) / spread


def student(freedom: int) -> float:
    """Student's quantile for a 95 % interval, from four degrees of freedom on, with an error below 1 %.

    Source: Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.5.
    """
    z = NormalDist().inv_cdf(0.5 + _CONFIDENCE / 2)
    terms = (z, (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384)
    return sum(term / freedom**power for power, term in enumerate(terms))


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(prog=PROGRAM, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=lambda text: at_least(1, text), default=30, metavar="N")
    parser.add_argument("--seed", type=lambda text: at_least(0, text), default=0, metavar="S")
    parser.add_argument("--dir", type=Path, default=DIRECTORY, help=f"where it is kept: {DIRECTORY} if not given")
    parser.add_argument("--json", action="store_true", help="only the JSON object on stdout")
    options = parser.parse_args(arguments)

    def say(line: str) -> None:
        print(line, file=sys.stderr if options.json else sys.stdout, flush=True)

    home = options.dir / f"soak-{options.seed}"
    try:
        played, result = kept("soak", soak(options.minutes), options.seed, Options(), home, say)
    except Unplayable as why:
        print(f"{PROGRAM}: {why}", file=sys.stderr)
        return 2
    grown = growth(played)
    for name, levels in grown.items():
        say(f"{name} grows by " + ", ".join(f"{levels[what]} {what}" for what in LEVELS) + " an hour")
    judged = {verdict: _levels(grown, verdict) for verdict in ("over", "undecided")}
    for verdict, what in judged.items():
        say(f"{verdict}, of a limit of {GROWTH_LIMIT:.0%} an hour: {', '.join(what) or 'nothing'}")
    figures = {"minutes": options.minutes, "growth": _finite(grown), "grown_too_much": judged["over"]}
    print(json.dumps(result | figures | {"growth_undecided": judged["undecided"]}, allow_nan=False))
    return 1 if result["verdict"] == "fail" else 0


def _levels(grown: Mapping[str, Mapping[str, Growth]], verdict: str) -> list[str]:
    return sorted({what for levels in grown.values() for what in LEVELS if levels[what].verdict == verdict})


def _finite(grown: Mapping[str, Mapping[str, Growth]]) -> dict[str, dict[str, list[float] | None]]:
    return {
        name: {what: list(value) if math.isfinite(value.share) else None for what, value in levels.items()}
        for name, levels in grown.items()
    }


if __name__ == "__main__":
    sys.exit(from_shell(main, PROGRAM))
