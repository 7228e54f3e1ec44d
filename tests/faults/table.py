"""Plays every scenario with many seeds, and prints a table. It may be stopped at any time, and then goes on.

    python -m tests.faults.table [--seeds 0:10] [--scenarios kill,stop] [--results build/faults.jsonl]
    python -m tests.faults.table --protocol gossip      # build/faults-gossip.jsonl

For each seed of another scenario, `kill` is played with one seed for each point of a round (twenty for butterfly).
Results are added to a file, one JSON object a line. The table on stdout is made from all results in the file, which
holds those of one protocol.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from tests.faults.artifacts import DIRECTORY, home_of, one
from tests.faults.failpoints import POINTS
from tests.faults.runner import Options, Unplayable
from tests.faults.scenarios import SCENARIOS, scenario_of
from tests.faults.shell import from_shell
from tests.sim.arguments import Parser, seeds

Result = dict[str, Any]
VOTED = "butterfly"
POINTWISE = "kill"


def order(scenarios: Sequence[str], numbers: Iterable[int], protocol: str = VOTED) -> list[tuple[str, int]]:
    """The plays in order: all scenarios with the first seed, then with the next, so that a part makes a table, too."""
    found = []
    for seed in numbers:
        for name in scenarios:
            points = len(POINTS[protocol]) if name == POINTWISE else 1
            found += [(name, seed * points + point) for point in range(points)]
    return found


def load(path: Path) -> list[Result]:
    """An incomplete last line is ignored."""
    if not path.exists():
        return []
    data = path.read_bytes()
    return [json.loads(line) for line in data[: data.rfind(b"\n") + 1].splitlines()]


def add(path: Path, result: Result) -> None:
    """Append a result after the last complete line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
        file.write(f"{json.dumps(result, allow_nan=False)}\n".encode())


def table(results: Iterable[Result], protocol: str = VOTED) -> list[str]:
    """The results as a Markdown table with a line for each scenario."""
    by_name: dict[str, list[Result]] = {}
    for each in results:
        by_name.setdefault(each["scenario"], []).append(each)
    shares = "goodput, median | participation, median"
    lines = [f"| scenario | passed | recovery seconds: median, p90, worst | {shares} | rounds skipped | measured |"]
    lines.append("|---|---|---|---|---|---|---|")
    return lines + [_row(name, by_name[name], protocol) for name in SCENARIOS if name in by_name]


def _row(name: str, played: Sequence[Result], protocol: str) -> str:
    passed = sum(each["verdict"] == "pass" for each in played)
    recoveries = [each["recovery_seconds"] for each in played if each["recovery_seconds"] is not None]
    skipped, rounds = (sum(each[f"rounds_{what}"] for each in played) for what in ("skipped", "committed"))
    recovery = ", ".join(f"{each:.1f}" for each in _spread(recoveries)) if recoveries else "none"
    recovery += f"; never in {never}" if (never := len(played) - len(recoveries)) and recoveries else ""
    shares = [_share(what, played) for what in ("goodput", "participation")]
    cells = [f"`{name}`", f"{passed} of {len(played)}", recovery, *shares, f"{skipped} of {skipped + rounds}"]
    return f"| {' | '.join([*cells, _measured(name, played, protocol)])} |"


def _spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Median, 90th percentile (the least that nine of ten do not exceed) and worst."""
    ranked = sorted(values)
    return median(ranked), ranked[math.ceil(0.9 * len(ranked)) - 1], ranked[-1]


def _share(what: str, played: Sequence[Result]) -> str:
    known = [value for each in played if (value := each.get(what)) is not None]
    return f"{median(known):.0%}" if known else "unknown"


def _measured(name: str, played: Sequence[Result], protocol: str) -> str:
    measures = []
    aims = scenario_of(name, protocol).limits.aims
    for what in sorted({what for each in played for what in each["measures"]} | set(aims)):
        figures = [figure for each in played if (figure := each["measures"].get(what)) and figure["worst"] is not None]
        words = what.removesuffix("_seconds").replace("_", " ")
        if figures:
            words += f" {median(each['median'] for each in figures):.1f}, {max(each['worst'] for each in figures):.1f}"
        if what in aims:
            missed = sum(what in each["missed"] for each in played)
            words += f" (aim {aims[what]:g}, missed {missed} of {len(played)})"
        measures.append(words)
    return "; ".join(measures)


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(prog="python -m tests.faults.table", description=__doc__)
    parser.add_argument("--seeds", type=seeds, default=range(10))
    parser.add_argument("--scenarios", default=",".join(SCENARIOS))
    parser.add_argument("--protocol", choices=tuple(POINTS), default=VOTED)
    parser.add_argument("--results", type=Path, help="build/faults.jsonl, or build/faults-PROTOCOL.jsonl, if not given")
    options = parser.parse_args(arguments)
    scenarios = options.scenarios.split(",")
    if unknown := [name for name in scenarios if name not in SCENARIOS]:
        parser.error(f"no scenario {unknown[0]!r}: there are {', '.join(SCENARIOS)}")
    stage = Options(protocol=options.protocol)
    path = options.results or Path("build", "-".join(["faults"] + [stage.protocol] * stage.loose)).with_suffix(".jsonl")
    results = load(path)
    unplayed = False
    done = {(each["scenario"], each["seed"]) for each in results}
    for name, seed in order(scenarios, options.seeds, stage.protocol):
        if (name, seed) in done:
            continue
        try:
            result = one(name, seed, stage, home_of(DIRECTORY, name, seed, stage), lambda line: None)
        except Unplayable as why:
            print(f"not played: {name}: {why}", file=sys.stderr)
            unplayed = True
            continue
        add(path, result)
        results.append(result)
        violations = "; ".join(f"{each['invariant']}: {each['detail']}" for each in result["violations"])
        print(f"{name}, seed {seed}: {result['verdict']} {violations}", file=sys.stderr, flush=True)
    print("\n".join(table(results, stage.protocol)))
    return 1 if any(each["verdict"] == "fail" for each in results) else 2 if unplayed else 0


if __name__ == "__main__":
    sys.exit(from_shell(main))
