"""A long run in which something is done to somebody every 15 seconds: is what it holds at the end what it held before?

    python -m tests.faults.soak [--minutes 30] [--seed 0] [--json]

Peers are killed, stopped, sent away and started again, and new ones come, as a seed draws it; two are left alone, and
watched. It ends as a scenario does (`python -m tests.faults`), and says how much memory, descriptors and tasks of the
two have grown, per hour, since the swarm was warm, and how far that may be off: half an hour tells a leak of 3 % an
hour from none, and 1 % takes two hours. Exit code: 0 no violation, 1 violations, 2 not played.
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

from tests.faults.artifacts import DIRECTORY, from_shell, kept
from tests.faults.recording import Limits, Recording
from tests.faults.runner import Options, Unplayable
from tests.faults.scenarios import Scenario
from tests.faults.steps import Step
from tests.sim.arguments import Parser, at_least
from tests.support.checkers import DECIDED

PROGRAM = "python -m tests.faults.soak"
EVERY_SECONDS = 15.0
STOPPED_SECONDS = 6.0
WATCHED = 2
"""So many of the first are never touched."""
FEWEST, MOST = 4, 7
WARM_SECONDS = 180.0
LEVELS = ("rss_bytes", "open_files", "tasks")
GROWTH_LIMIT = 0.01
"""Of each level, an hour."""
BLOCK_SECONDS = 120.0
"""What a level is off by in one round says nothing of what it is off by so much later: measured, up to a minute."""
_CONFIDENCE = 0.95
_FEWEST_ROUNDS, _FEWEST_BLOCKS = 10, 6


class Growth(NamedTuple):
    """By what a level grows in an hour, as a share of its mean; nan where too little was seen.

    Attributes:
        share: the best guess.
        within: the true one is at most so far from it, in 95 of 100 soaks.
    """

    share: float
    within: float

    @property
    def verdict(self) -> str:
        """What is known about the limit: `over`, `under`, or `undecided` where both may be."""
        if self.share - self.within > GROWTH_LIMIT:
            return "over"
        return "under" if self.share + self.within < GROWTH_LIMIT else "undecided"

    def __str__(self) -> str:
        return f"{self.share:+.2%} ± {self.within:.2%}" if math.isfinite(self.share) else "an unknown share"


class _Crowd:
    """Who will be there, as a schedule is drawn."""

    def __init__(self, names: Sequence[str]) -> None:
        self.here, self.gone = list(names), list[str]()
        self._came = 0

    def draw(self, rng: random.Random) -> list[Step]:
        """What to do next to whom."""
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
    """Something every 15 seconds, for so many minutes."""

    def draw(rng: random.Random, seed: int, names: Sequence[str]) -> list[Step]:
        crowd, steps = _Crowd(names), list[Step]()
        for turn in range(int(60 * minutes / EVERY_SECONDS)):
            steps += [Step("until", amount=turn * EVERY_SECONDS), *crowd.draw(rng)]
        return [*steps, Step("until", amount=60.0 * minutes)]

    return Scenario(f"something every {EVERY_SECONDS:g} s, for {minutes} minutes", draw, Limits(120, forks=True))


def growth(play: Recording) -> Mapping[str, Mapping[str, Growth]]:
    """Of each peer that lived through all of it: level -> how it grew since the swarm was warm."""
    found = {}
    for name, lives in play.lives.items():
        if len(lives) == 1 and lives[0].began <= play.calm[0] and lives[0].ended >= play.ended:
            since = play.calm[1] + WARM_SECONDS
            warm = [each for each in play.histories[name] if each["outcome"] in DECIDED and each["time"] > since]
            found[name] = {
                what: slope([(len(each["peers"]), each["time"] / 3600, each[what]) for each in warm]) for what in LEVELS
            }
    return found


def slope(points: Sequence[tuple[int, float, float]]) -> Growth:
    """How a level grows, from (peers, hours, value) of each round.

    The slope of straight lines, equally steep: one for each number of peers that a round had, since each peer more is
    a connection more. What the highest number so far has left behind counts as growth: it errs on that side.
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
    """How far off a slope is at most, from (hour, that less the mean, off the line by); None: too short a time.

    What a round is off by lasts for some rounds, so those of two minutes count as one: the sandwich of Liang and Zeger
    (Biometrika 73, 1986). Of these there are few, which draw the line to themselves: hence Student's quantile, and
    what a block is off by counts more the more it has drawn (Bell and McCaffrey, Survey Methodology 28, 2002).
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
    """Student's quantile for an interval that holds 95 of 100, four degrees of freedom or more.

    Source: Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.5; off by less than 1 %.
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
    told = {"minutes": options.minutes, "growth": _finite(grown), "grown_too_much": judged["over"]}
    print(json.dumps(result | told | {"growth_undecided": judged["undecided"]}, allow_nan=False))
    return 1 if result["verdict"] == "fail" else 0


def _levels(grown: Mapping[str, Mapping[str, Growth]], verdict: str) -> list[str]:
    return sorted({what for levels in grown.values() for what in LEVELS if levels[what].verdict == verdict})


def _finite(grown: Mapping[str, Mapping[str, Growth]]) -> dict[str, dict[str, list[float] | None]]:
    return {
        name: {what: list(value) if math.isfinite(value.share) else None for what, value in levels.items()}
        for name, levels in grown.items()
    }


if __name__ == "__main__":
    sys.exit(from_shell(main))
