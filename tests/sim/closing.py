"""`python -m tests.sim.closing`: the spread at the end of a run, with and without closing exchanges.

It prints a line for each protocol, number of peers and length of the run. The columns are maxima over the seeds:

    without, with    true spread without closing exchanges, and with them
    reported         spread in the last reports, with closing exchanges
    exchanges        closing exchanges of a peer
    seconds          from the end of the last peer's last round to the end of the run

The exit code is 1 if the true or the reported spread with closing exchanges is above the limit.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, replace

from tests.sim.arguments import Parser, at_least_one, seeds
from tests.sim.independent_world import IndependentWorld
from tests.sim.process import prepare
from tests.sim.scenario import Scenario

LIMIT = 0.02


class Unclosed(IndependentWorld):
    CLOSES = False


@dataclass(frozen=True, slots=True)
class End:
    spread: float
    reported: float
    exchanges: int
    seconds: float
    violations: tuple[str, ...]


def end_of(scenario: Scenario, world_type: type[IndependentWorld] = IndependentWorld) -> End:
    world = world_type(scenario)
    world.play(world.run)
    last = [history[-1] for history in world.histories.values()]
    found = world.check(world.histories) + world.leaks() + world.progress(world.histories)
    return End(
        world.spread(),
        max(report["spread"] for report in last),
        max(report["closing_exchanges"] for report in last),
        min(report["seconds_average"] for report in last),
        tuple(map(str, found)),
    )


def _numbers(text: str) -> list[int]:
    return [at_least_one(each) for each in text.split(",")]


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = Parser(prog="python -m tests.sim.closing", description="The spread at the end of a run.")
    parser.add_argument("--protocol", choices=("gossip", "push_sum"), help="default: both")
    parser.add_argument("--peers", type=_numbers, default=[4, 8], help="numbers with commas between them")
    parser.add_argument("--rounds", type=_numbers, default=[3, 4, 5, 14])
    parser.add_argument("--seeds", type=seeds, default=range(5))
    parser.add_argument("--codec", default="fp32")
    parser.add_argument("--pull", type=float, help="gossip by NoLoCo's rule, with this as its gamma")
    options = parser.parse_args(arguments)
    try:
        Scenario(options.protocol or "push_sum", pull=options.pull)
    except ValueError as error:
        parser.error(str(error))
    return options


def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    prepare()
    failed = 0
    print("protocol  peers  rounds  without    with  reported  exchanges  seconds")
    for protocol in [options.protocol] if options.protocol else ["gossip", "push_sum"]:
        for peers, rounds in ((peers, rounds) for peers in options.peers for rounds in options.rounds):
            first = Scenario(
                protocol, peers, rounds, codec=options.codec, elements=5000, chunk_elements=1024, pull=options.pull
            )
            played = [replace(first, seed=seed) for seed in options.seeds]
            without = max(end_of(each, Unclosed).spread for each in played)
            ends = [end_of(each) for each in played]
            spread, reported = max(each.spread for each in ends), max(each.reported for each in ends)
            exchanges, seconds = max(each.exchanges for each in ends), max(each.seconds for each in ends)
            print(
                f"{protocol:9} {peers:5}  {rounds:6}  {without:7.2%} {spread:7.2%} {reported:9.2%}  {exchanges:9}"
                f"  {seconds:7.1f}",
                flush=True,
            )
            failed += max(spread, reported) > LIMIT
            for violation in (violation for each in ends for violation in each.violations):
                print(violation, file=sys.stderr)
                failed += 1
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
