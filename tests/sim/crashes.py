"""`python -m tests.sim.crashes`: one simulated run for each message of a round, with a fault at that message.

A run without faults lists the messages that each peer sends and receives in the second round. Then the round is
simulated again for each message, with a fault just before the message takes effect:

    crash      the peer is killed
    silence    all links of the peer are blocked, in both directions
    one-way    the link that the message crosses is blocked in that direction
    stall      that link delays everything for some seconds

With `--end` (gossip and push-sum), the messages are those of the closing exchanges. Every live peer ends
its run within the time limit, no contribution counts twice, and push-sum creates no mass, and loses only that of dead
peers.

The histories of all peers, dead ones included, must keep the invariants of `tests.support.checkers`. Every peer that is
in touch with a majority must decide that round and the next, and remove dead peers from the roster. The last line of
output is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from protocols.base import PeerId
from protocols.pairwise.push_sum import PushSum
from protocols.registry import INDEPENDENT_PROTOCOLS, REPLICATED_PROTOCOLS
from tests.sim.arguments import Parser, at_least, at_least_one
from tests.sim.independent_world import SPREAD_BOUND, IndependentWorld, world_of
from tests.sim.message_fault import (
    KINDS,
    LIMIT_SECONDS,
    PAIRS,
    MessageFault,
    Recording,
    Verdict,
    combinations,
    enumerate_points,
    named,
    small,
    strike,
)
from tests.sim.process import prepare
from tests.sim.scenario import Scenario
from tests.sim.world import World
from tests.support.checkers import Violation

MAX_VIOLATIONS = 20
CLOSING = ("gossip", "push_sum")


ENDS_SECONDS = 120.0
"""In these runs, whose rounds take 3 s: two waits of 20 s, and three closing steps of about 7 s, with some margin."""
FAR = 1e-9
"""Tolerance of sums of weights, which are sums of powers of 1/2."""


class RecordingEnd(Recording):
    def _watch(self, peer: PeerId, number: int, way: str, other: PeerId) -> None:
        outer_loop = self.replicas.get(peer)
        if outer_loop is not None and outer_loop.key.round >= self.scenario.rounds:  # type: ignore[attr-defined]
            self.record(peer, number, way, other)


class StruckEnd(MessageFault, IndependentWorld):
    """A run with a fault in its closing exchanges, until all live peers have ended it."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        self.endless = False

    def satisfied(self) -> bool:
        return all(self.ended(peer) for peer in self.able())

    def ended(self, peer: PeerId) -> bool:
        history = self.histories[peer]
        return bool(history) and history[-1]["round"] >= self.scenario.rounds - 1

    def judge(self) -> Iterator[Violation]:
        last = self.scenario.rounds - 1
        if not self.injector.struck:
            yield Violation("missed", "", last, "the fault never happened: the run differs from the one without it")
        for peer in self.able():
            if not self.ended(peer):
                yield Violation("ends", peer, last, f"its run is not over {LIMIT_SECONDS:g} s after all began")
            elif (seconds := self.histories[peer][-1]["seconds_average"]) > ENDS_SECONDS:
                yield Violation("ends", peer, last, f"it ends {seconds:.0f} s after its last training")
        if (spread := self.spread()) > SPREAD_BOUND:
            yield Violation("spread", "", last, f"{spread:.3f} at the end, not at most {SPREAD_BOUND}")
        yield from self._conserved()

    def spread(self) -> float:
        dead = {peer for peer in self.peers if not self.network.nodes[peer].process.alive}
        kept, self.replicas = self.replicas, {peer: each for peer, each in self.replicas.items() if peer not in dead}
        try:
            return super().spread()
        finally:
            self.replicas = kept

    def _conserved(self) -> Iterator[Violation]:
        """The weights at the peers are at most their number; with those in transit, at least."""
        held = [outer_loop.averager for outer_loop in self.replicas.values()]
        books = [averager.masses for averager in held if isinstance(averager, PushSum)]
        if books:
            here, whole = sum(masses.weight for masses in books), sum(masses.mass for masses in books)
            if not here - FAR <= len(books) <= whole + FAR:
                what = f"weights of {here} are here, {whole} with what is on its way, and {len(books)} there were"
                yield Violation("conserved", "", self.scenario.rounds - 1, what)


def survey(verdicts: Iterable[Verdict]) -> dict[str, Any]:
    outcomes: Counter[str] = Counter()
    ways: Counter[str] = Counter()
    result: dict[str, Any] = {"points": 0, "failed": 0, "violations": []}
    for verdict in verdicts:
        result["points"] += 1
        result["failed"] += bool(verdict.violations)
        outcomes[verdict.outcome] += 1
        ways.update(point.way for point in verdict.points)
        where = ",".join(str(point) for point in verdict.points)
        room = MAX_VIOLATIONS - len(result["violations"])
        result["violations"] += [{"at": where, **each.as_dict()} for each in verdict.violations[:room]]
    result.update(sent=ways["sent"], received=ways["received"])
    result.update(decided=result["points"] - outcomes["undecided"], undecided=outcomes["undecided"])
    result["outcomes"] = dict(sorted(outcomes.items()))
    return result


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = Parser(prog="python -m tests.sim.crashes", description="A fault at every message of a round.")
    parser.add_argument(
        "--protocol", choices=sorted([*REPLICATED_PROTOCOLS, *INDEPENDENT_PROTOCOLS]), default="butterfly"
    )
    parser.add_argument("--peers", type=partial(at_least, 2), default=3)
    parser.add_argument("--kind", choices=KINDS, default="crash")
    parser.add_argument("--seed", type=int, default=0, help="of latencies and of the order of messages")
    parser.add_argument("--directory", action="store_true", help="Moshpit: in pairs, found in the directory")
    parser.add_argument("--stages", type=at_least_one, default=1, help="of a pipeline: peer i is in stage i mod stages")
    parser.add_argument("--chains", action="store_true", help="stages pass activations on to each other")
    parser.add_argument("--end", action="store_true", help="gossip and push_sum: in the closing exchanges of the run")
    parser.add_argument("--overlap", action="store_true", dest="overlaps", help="train on while the round averages")
    parser.add_argument("--fragments", type=at_least_one, default=1, help="of the vector, averaged in turn")
    parser.add_argument("--pairs", action="store_true", help="two at once, at two peers")
    parser.add_argument(
        "--sample", type=at_least_one, help=f"play a drawn sample of this many; of pairs, {PAIRS} unless given"
    )
    parser.add_argument("--only", help="one point, or a pair: p1:17 or p1:17,p2:30; prints its trace")
    options = parser.parse_args(arguments)
    try:
        _scenario(options)
    except ValueError as error:
        parser.error(str(error))
    if options.end and options.protocol not in CLOSING:
        parser.error(f"argument --end: {options.protocol} has no closing exchanges, {' and '.join(CLOSING)} have")
    return options


def _scenario(options: argparse.Namespace) -> Scenario:
    scenario = small(options.peers, options.protocol, options.seed, options.stages)
    if options.overlaps:  # steps that are shorter than averaging, or there would be nothing to overlap
        steps = tuple(seconds / 20 for seconds in scenario.step_seconds or ())
        scenario = replace(scenario, overlaps=True, step_seconds=steps, inner_steps=16)
    return replace(scenario, directory=options.directory, fragments=options.fragments, chains=options.chains)


def replay(options: argparse.Namespace, verdict: Verdict) -> str:
    where = ",".join(str(point) for point in verdict.points)
    directory = (" --directory" if options.directory else "") + (" --end" if options.end else "")
    directory += (f" --stages {options.stages}" if options.stages > 1 else "") + " --overlap" * options.overlaps
    directory += " --chains" * options.chains
    directory += f" --fragments {options.fragments}" if options.fragments > 1 else ""
    return (
        f"python -m tests.sim.crashes --protocol {options.protocol} --peers {options.peers} --kind {options.kind}"
        f" --seed {options.seed} --only {where}{directory}"
    )


def _reported(options: argparse.Namespace, verdicts: Iterable[Verdict]) -> Iterator[Verdict]:
    failed = 0
    for verdict in verdicts:
        failed += bool(verdict.violations)
        if options.only:
            print("\n".join(verdict.trace), file=sys.stderr)
        if verdict.violations and failed <= 3:
            print("\n".join(str(violation) for violation in verdict.violations[:5]), file=sys.stderr)
            print(f"replay: {replay(options, verdict)}", file=sys.stderr)
        yield verdict


def main(arguments: list[str] | None = None, world_type: type[World] | None = None) -> int:
    options = _parse(arguments)
    world_type = world_type or world_of(options.protocol, options.stages)
    prepare()
    began = time.monotonic()
    scenario = _scenario(options)
    recording, struck = (RecordingEnd, StruckEnd) if options.end else (Recording, MessageFault)
    points = enumerate_points(scenario, world_type, recording)
    try:
        chosen = (
            named(points, options.only)
            if options.only
            else combinations(points, options.pairs, options.sample, options.seed)
        )
    except ValueError as error:
        print(f"python -m tests.sim.crashes: {error}", file=sys.stderr)
        return 2
    judge = partial(strike, scenario, options.kind, world_type=world_type, struck_type=struck)
    result = survey(_reported(options, map(judge, chosen)))
    seconds = time.monotonic() - began
    about = {"protocol": options.protocol, "peers": options.peers, "kind": options.kind, "pairs": options.pairs}
    rates = {"real_seconds": round(seconds, 3), "points_per_minute": round(60.0 * result["points"] / seconds, 1)}
    print(json.dumps({**about, "messages": len(points), **result, **rates}))
    return 1 if result["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
