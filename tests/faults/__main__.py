"""Fault tests with real peers: a swarm of `join` processes, faults drawn from a seed, and a verdict.

    python -m tests.faults --scenario kill --seed 6
    python -m tests.faults --scenario matrix [--json]

It prints the schedule, a timeline and, last, one JSON object. The directory of the play holds what the peers wrote.
Each peer runs in its own network namespace if the machine allows that (Linux, root, iproute2, iptables).
Otherwise all run on the loopback, and scenarios that need a network are not played.
Exit code: 0 without violations, 1 with violations, 2 if a scenario was not played.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from tests.faults.artifacts import DIRECTORY, home_of, one
from tests.faults.failpoints import POINTS
from tests.faults.runner import TASKS, Options, Unplayable
from tests.faults.scenarios import SCENARIOS
from tests.faults.shell import PROGRAM, from_shell
from tests.sim.arguments import Parser, at_least

MATRIX = "matrix"
NOT_PLAYED = "not played"
MOST_PEERS = 16


def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    wanted = list(SCENARIOS) if options.scenario == MATRIX else [options.scenario]
    stage = Options(options.peers, options.protocol, options.task, options.patience)

    def say(line: str) -> None:
        print(line, file=sys.stderr if options.json else sys.stdout, flush=True)

    results = []
    for name in wanted:
        try:
            results.append(one(name, options.seed, stage, home_of(options.dir, name, options.seed, stage), say))
        except Unplayable as why:
            if options.scenario != MATRIX:
                print(f"{PROGRAM}: {why}", file=sys.stderr)
                return 2
            say(f"not played: {why}")
            results.append({"scenario": name, "seed": options.seed, "verdict": NOT_PLAYED, "why": str(why)})
    failed, unplayed = (
        [each["scenario"] for each in results if each["verdict"] == verdict] for verdict in ("fail", NOT_PLAYED)
    )
    whole = results[0]
    if options.scenario == MATRIX:
        verdict = "fail" if failed else NOT_PLAYED if unplayed else "pass"
        outcome = {"failed": failed, "not_played": unplayed, "results": results}
        whole = {"scenario": MATRIX, "seed": options.seed, "verdict": verdict, **outcome}
        for each in results:
            say(_line(each))
    print(json.dumps(whole, allow_nan=False))
    return 1 if failed else 2 if unplayed else 0


def _line(result: dict[str, Any]) -> str:
    recovery = result.get("recovery_seconds")
    figures = "" if recovery is None else f"recovery {recovery:5.1f} s"
    for what in ("goodput", "participation"):
        figures += "" if (share := result.get(what)) is None else f"  {what} {share:4.0%}"
    missed = ", ".join(result.get("missed", ()))
    return f"{result['scenario']:<17}{result['verdict']:<11}{figures}{'  missed ' + missed if missed else ''}"


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    names = "\n".join(f"  {name:<17}{scenario.about}" for name, scenario in SCENARIOS.items())
    parser = Parser(
        prog=PROGRAM,
        description=__doc__,
        epilog=f"scenarios:\n{names}\n  {MATRIX:<17}all of them",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--scenario", required=True, choices=(*SCENARIOS, MATRIX), metavar="NAME")
    parser.add_argument("--peers", type=_peers, default=4, metavar="N", help=f"3 to {MOST_PEERS}; 4 if not given")
    parser.add_argument("--protocol", choices=tuple(POINTS), default="butterfly")
    parser.add_argument("--task", choices=TASKS, default="paced", help="all but gpt: no competition for cores")
    parser.add_argument("--seed", type=lambda text: at_least(0, text), default=0, metavar="S")
    slow = "for a busy machine: wait X times as long for each step; the recovery limit stays the same"
    parser.add_argument("--patience", type=lambda text: float(at_least(1, text)), default=1.0, metavar="X", help=slow)
    parser.add_argument("--dir", type=Path, default=DIRECTORY, help=f"where plays are kept: {DIRECTORY} if not given")
    parser.add_argument("--json", action="store_true", help="only the JSON object on stdout")
    return parser.parse_args(arguments)


def _peers(text: str) -> int:
    if at_least(3, text) > MOST_PEERS:
        raise argparse.ArgumentTypeError(f"{text} peers are too many for one machine: {MOST_PEERS} at most")
    return int(text)


if __name__ == "__main__":
    sys.exit(from_shell(main))
