"""Two peers behind routers and a public founder: whether the two meet, and whether all three average.

    python -m tests.faults.pairs [--pairs "symmetric/CGNAT" …] [--rounds 20] [--json]

Each of the 15 pairs of routers (`tests/faults/homes.py`) is a run of its own, of real `join` processes whose steps are
paced. Both homes number their hosts alike, and both peers listen on the same port. Then the founder is killed and
started again. The table shows how many seconds after all are in the run, and after the founder is back, the three see
each other live, how many of the next rounds are means of three, and which way data goes between the homes at last.
Needs root. Exit code 0 if all pairs met within 30 s, and 19 of 20 rounds are means of three; 2 if it cannot be played.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import combinations_with_replacement
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

from tests.faults.homes import Homes, Router
from tests.faults.network import why_not
from tests.faults.shell import from_shell
from tests.sim.arguments import Parser, at_least_one
from tests.support.checkers import DECIDED, began
from tests.support.real_swarm import RealPeer, RealSwarm, paced, wait

PROGRAM = "python -m tests.faults.pairs"
Pair: TypeAlias = tuple[Router, Router]
PAIRS: tuple[Pair, ...] = tuple(combinations_with_replacement(Router, 2))
ELEMENTS = 500_000
"""A third of it, in int8, is more than p2pd carries between two peers that it introduces."""
MEET_SECONDS, PATIENT_SECONDS = 30.0, 120.0
GLANCE_SECONDS = 0.2
FOUNDER, AT_HOME = "founder", ("a", "b")
PORT = 4001


def play(pair: Pair, rounds: int, directory: Path) -> dict[str, Any]:
    """Seconds and counts of one pair; None for what did not come."""
    with Homes() as network:

        def prepare(peer: RealPeer) -> None:
            peer.nat = True
            if peer.name == FOUNDER:
                place = network.add(peer.name)
            else:
                place = network.home(peer.name, pair[AT_HOME.index(peer.name)])
            peer.inside, peer.listen = place.inside, f"/ip4/0.0.0.0/tcp/{PORT}"

        with RealSwarm(directory, paced(ELEMENTS), prepare) as swarm:
            founder = swarm.found(FOUNDER)
            a, b = swarm.join(*AT_HOME, via=founder)
            first = _measured(founder, a, b, rounds)
            founder.strike()
            founder.ends(MEET_SECONDS)
            founder.start()
            wait("the founder is back", founder.meet, PATIENT_SECONDS, GLANCE_SECONDS)
            again = _measured(founder, a, b, rounds)
            routes = [str(one.sees(other).get("route", "")) for one, other in ((a, b), (b, a))]
    return {"pair": [*pair], "rounds": rounds, "start": first, "restart": again, "routes": routes}


def _measured(founder: RealPeer, a: RealPeer, b: RealPeer, rounds: int) -> dict[str, Any]:
    """Seconds until all three see each other, and how many of the next rounds, as the founder reports, hold all."""
    three, since = (founder, a, b), time.time()
    met = lambda: all(one.sees(other).get("live") for one in three for other in three if other is not one)  # noqa: E731
    try:
        wait("they meet", met, PATIENT_SECONDS, GLANCE_SECONDS)
    except AssertionError:
        return {"meet_seconds": None, "means_of_three": 0}
    moment = time.time()

    def later() -> list[dict[str, Any]]:
        return [each for each in founder.reports() if each["outcome"] in DECIDED and began(each) > moment][:rounds]

    with suppress(AssertionError):  # the count says how many there were
        wait(f"{rounds} rounds", lambda: len(later()) == rounds, PATIENT_SECONDS + 10 * rounds, GLANCE_SECONDS)
    everyone = {peer.id for peer in three}
    return {
        "meet_seconds": round(moment - since, 1),
        "means_of_three": sum({*each["peers"]} == everyone for each in later()),
        "outcomes": [f"{each['outcome']} {len(each['peers'])}" for each in later()],
        "round_seconds": [round(each["time"] - began(each), 2) for each in later()],
    }


def is_good(result: dict[str, Any]) -> bool:
    """Whether they met in time, and 19 of 20 rounds, or as large a share, were means of three."""
    enough = result["rounds"] * 19 / 20
    return all(
        each["meet_seconds"] is not None
        and each["meet_seconds"] <= MEET_SECONDS
        and each["means_of_three"] >= int(enough)
        for each in (result["start"], result["restart"])
    )


def row(result: dict[str, Any]) -> str:
    cells = [*result["pair"]]
    for each in (result["start"], result["restart"]):
        seconds = each["meet_seconds"]
        cells += ["never" if seconds is None else f"{seconds:.0f} s", f"{each['means_of_three']} of {result['rounds']}"]
    ways = " and ".join(dict.fromkeys(each or "none" for each in result["routes"]))
    return f"| {' | '.join((*cells, ways))} |"


def _pair(text: str) -> Pair:
    names = text.split("/")
    if len(names) != 2 or not {*names} <= {*Router}:
        raise argparse.ArgumentTypeError(f"{text!r} is not two of {', '.join(Router)}, like symmetric/CGNAT")
    return Router(names[0]), Router(names[1])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(PROGRAM, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=_pair, nargs="+", default=PAIRS, metavar="A/B", help="all 15 if not given")
    parser.add_argument("--rounds", type=at_least_one, default=20, help="to count, twice (default %(default)s)")
    parser.add_argument("--json", action="store_true", help="only one JSON object on stdout")
    options = parser.parse_args(arguments)
    if why := why_not():
        print(f"{PROGRAM}: {why}", file=sys.stderr)
        return 2
    say = sys.stderr if options.json else sys.stdout
    heads = ("one router", "the other", "meet", "means of three", "founder restarted: meet", "means of three", "data")
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}", file=say, flush=True)
    results = []
    for pair in options.pairs:
        with TemporaryDirectory() as directory:
            results.append(play(pair, options.rounds, Path(directory)))
        print(row(results[-1]), file=say, flush=True)
    if options.json:
        print(json.dumps({"results": results}))
    return 0 if all(map(is_good, results)) else 1


if __name__ == "__main__":
    sys.exit(from_shell(main, PROGRAM, cure=""))
