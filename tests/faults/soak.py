"""A long run in which something is done to somebody every 15 seconds: is what it holds at the end what it held before?

    python -m tests.faults.soak [--minutes 30] [--seed 0] [--json]

Peers are killed, stopped, sent away and started again, and new ones come, as a seed draws it; two are left alone, and
watched. It ends as a scenario does (`python -m tests.faults`), and says how much memory, descriptors and tasks of the
two have grown, per hour, since the swarm was warm. Exit code: 0 no violation, 1 violations, 2 not played.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.checkers import DECIDED
from tests.faults.keeping import DIRECTORY, from_shell, kept
from tests.faults.play import Limits, Play
from tests.faults.scenarios import Scenario, Step
from tests.faults.stage import Options, Unplayable
from tests.sim.arguments import Parser, at_least

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

    return Scenario(f"something every {EVERY_SECONDS:g} s, for {minutes} minutes", draw, Limits(120))


def growth(play: Play) -> Mapping[str, Mapping[str, float]]:
    """Of each peer that lived through all of it: level -> what it grows by in an hour, as a share of its mean.

    The slope of straight lines, equally steep, through its reports since the swarm was warm: one line for each number
    of peers that a round had, since each peer more is a connection more. nan where there are too few.
    """
    found = {}
    for name, lives in play.lives.items():
        if len(lives) == 1 and lives[0].began <= play.calm[0] and lives[0].ended >= play.ended:
            since = play.calm[1] + WARM_SECONDS
            warm = [each for each in play.histories[name] if each["outcome"] in DECIDED and each["time"] > since]
            found[name] = {
                what: slope([(len(each["peers"]), each["time"] / 3600, each[what]) for each in warm]) for what in LEVELS
            }
    return found


def slope(points: Sequence[tuple[int, float, float]]) -> float:
    """Of (peers, hours, value), as a share of the mean value."""
    if len(points) < 10:
        return math.nan
    lines: dict[int, list[tuple[float, float]]] = {}
    for peers, hour, value in points:
        lines.setdefault(peers, []).append((hour, value))
    rise = spread = 0.0
    for line in lines.values():
        hour, value = (sum(each) / len(line) for each in zip(*line, strict=True))
        rise += sum((x - hour) * (y - value) for x, y in line)
        spread += sum((x - hour) ** 2 for x, _ in line)
    level = sum(value for _, _, value in points) / len(points)
    return rise / spread / level if spread and level else math.nan


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
        say(f"{name} grows by " + ", ".join(f"{levels[what]:+.2%} {what}" for what in LEVELS) + " an hour")
    over = sorted({what for levels in grown.values() for what in LEVELS if not levels[what] < GROWTH_LIMIT})
    say(f"over {GROWTH_LIMIT:.0%} an hour, or not measured: {', '.join(over) or 'nothing'}")
    told = {"minutes": options.minutes, "growth": _finite(grown), "grown_too_much": over}
    print(json.dumps(result | told, allow_nan=False))
    return 1 if result["verdict"] == "fail" else 0


def _finite(grown: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float | None]]:
    return {
        name: {what: value if math.isfinite(value) else None for what, value in levels.items()}
        for name, levels in grown.items()
    }


if __name__ == "__main__":
    sys.exit(from_shell(main))
