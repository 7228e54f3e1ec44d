"""`python -m tests.mutants`: does a test fail when the code is wrong?

    python -m tests.mutants draw --seed 21 --count 300 mutants.json
    python -m tests.mutants play mutants.json results.json
    python -m tests.mutants compare before.json after.json

`play` goes on where it was stopped. `compare` lists the mutants that one set of tests kills and another does not.
"""

from __future__ import annotations

import json
import sys
import tempfile
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path

from tests.mutants.draw import Mutant, draw
from tests.mutants.play import Playground
from tests.sim.arguments import Parser

ROOT = Path(__file__).parents[2]
TARGETS = (
    "protocols/consensus",
    "protocols/history",
    "protocols/allreduce",
    "protocols/pairwise",
    "protocols/sync",
    "node/outer",
)


def _draw(arguments: Namespace) -> int:
    mutants = draw(ROOT, arguments.targets, arguments.count, arguments.seed)
    arguments.list.write_text(json.dumps([asdict(each) for each in mutants], indent=1) + "\n")
    print(f"{len(mutants)} mutants of {len({each.file for each in mutants})} files")
    return 0


def _play(arguments: Namespace) -> int:
    import pytest  # noqa: F401 - loaded once, before the forks
    import torch  # noqa: F401

    mutants = [Mutant(**each) for each in json.loads(arguments.list.read_text())]
    results = json.loads(arguments.results.read_text()) if arguments.results.exists() else {}
    mine = [each for index, each in enumerate(mutants) if index % arguments.parts == arguments.part]
    with tempfile.TemporaryDirectory() as place:
        ground = Playground(ROOT, Path(place))
        for number, mutant in enumerate(mine):
            if mutant.name in results:
                continue
            outcome, seconds, tests = ground.play(mutant)
            results[mutant.name] = {"outcome": outcome, "seconds": seconds, "tests": len(tests)}
            arguments.results.write_text(json.dumps(results, indent=1) + "\n")
            print(
                f"{number + 1}/{len(mine)} {outcome:9}{seconds:6.1f} s  {mutant.file}:{mutant.line} {mutant.kind}",
                flush=True,
            )
    print(_counted(results))
    return 0


def _compare(arguments: Namespace) -> int:
    before, after = (json.loads(path.read_text()) for path in (arguments.before, arguments.after))
    print("before:", _counted(before), "\nafter: ", _counted(after))
    lost = [name for name, each in before.items() if _is_dead(each) and not _is_dead(after.get(name, {}))]
    for name in lost:
        print("survives now:", name)
    return 1 if lost else 0


def _is_dead(result: dict[str, object]) -> bool:
    return result.get("outcome") in ("killed", "timeout")


def _counted(results: dict[str, dict[str, object]]) -> str:
    counts = {name: sum(each["outcome"] == name for each in results.values())
              for name in ("killed", "timeout", "survived", "untested")}  # fmt: skip
    return ", ".join(f"{count} {name}" for name, count in counts.items())


def main() -> int:
    parser = Parser(prog="python -m tests.mutants", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    drawing = commands.add_parser("draw", help="draw mutants of the code as it stands")
    drawing.add_argument("list", type=Path)
    drawing.add_argument("--seed", type=int, default=21)
    drawing.add_argument("--count", type=int, default=300)
    drawing.add_argument("--targets", nargs="+", default=TARGETS)
    playing = commands.add_parser("play", help="run the tests against each mutant; goes on where it was stopped")
    playing.add_argument("list", type=Path)
    playing.add_argument("results", type=Path)
    playing.add_argument("--part", type=int, default=0, help="play only each PARTS-th mutant, from this one")
    playing.add_argument("--parts", type=int, default=1)
    comparing = commands.add_parser("compare", help="which mutants die in one run and survive in another")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    arguments = parser.parse_args()
    for name in {"draw": (), "play": ("list",), "compare": ("before", "after")}[arguments.command]:
        if not (path := getattr(arguments, name)).is_file():
            parser.error(f"argument {name}: there is no file {path}")
    for target in getattr(arguments, "targets", ()):
        if not ((ROOT / target).is_dir() or (target.endswith(".py") and (ROOT / target).is_file())):
            parser.error(f"argument --targets: {target} is not a folder or a Python file of this repository")
    return {"draw": _draw, "play": _play, "compare": _compare}[arguments.command](arguments)


if __name__ == "__main__":
    sys.exit(main())
