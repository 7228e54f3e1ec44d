"""`python -m tests.sim.reducers`: the cost of a reducer's death to its Moshpit group.

A group of k members averages for three rounds. The simulation is repeated for each message of the first averaging,
from the end of training on, and each time the member that sends or receives the message is killed at it. One line for
each k:

    points      messages at which a member was killed
    none lost   share of the points at which all survivors still had the mean of that round
    all lost    share at which no survivor had it
    rounds      share of the survivors' rounds without a mean, among those with a death
    seconds     the longest delay of a survivor's round, compared with a round without a death
    after       share of the survivors' next rounds without a mean
    later       the same for the rounds after those

No work is lost: a survivor without a mean continues from its own state. The exit code is 1 if any later round has no
mean.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from dataclasses import dataclass

import torch

from protocols.base import PeerId
from tests.sim.arguments import Parser, at_least, at_least_one
from tests.sim.faults import Faults
from tests.sim.host import DirectoryFaults
from tests.sim.injection import Injector
from tests.sim.moshpit_harness import MoshpitHarness
from tests.sim.network import SimNetwork
from tests.sim.process import prepare

ELEMENTS, CHUNK_ELEMENTS = 96, 16
TRAIN_SECONDS = 1.0
ROUNDS = 3


@dataclass(slots=True)
class Losses:
    """Counts over deaths in groups of one size."""

    points: int = 0
    none_lost: int = 0
    all_lost: int = 0
    rounds: int = 0
    lost_rounds: int = 0
    lost_after: int = 0
    lost_later: int = 0
    most_seconds: float = 0.0

    def add(self, outcomes: list[list[str]], seconds: float) -> None:
        """Add one death: the outcomes of each survivor's rounds, and the longest delay of a first round."""
        lost = sum(each[0] != "committed" for each in outcomes)
        self.points += 1
        self.none_lost += not lost
        self.all_lost += lost == len(outcomes)
        self.rounds += len(outcomes)
        self.lost_rounds += lost
        self.lost_after += sum(each[1] != "committed" for each in outcomes)
        self.lost_later += sum(each[2] != "committed" for each in outcomes)
        self.most_seconds = max(self.most_seconds, seconds)


def group(size: int) -> MoshpitHarness:
    generator = torch.Generator().manual_seed(size)
    states = [[torch.randn(ELEMENTS, generator=generator)] for _ in range(size)]
    return MoshpitHarness(states, [1000] * size, [TRAIN_SECONDS] * size, chunk_elements=CHUNK_ELEMENTS)


def messages(size: int) -> tuple[list[tuple[PeerId, int]], float]:
    """The messages of the first averaging, from a run without deaths, and the longest first round in seconds."""
    harness, found = group(size), []

    def watch(network: SimNetwork) -> None:
        def heard(peer: PeerId, number: int, way: str, other: PeerId) -> None:
            over = any(harness.histories.values())
            if asyncio.get_running_loop().time() >= TRAIN_SECONDS and not over:
                found.append((peer, number))

        network.watch = heard

    harness.before = watch
    histories = harness.play(1)
    return found, max(history[0].seconds for history in histories.values())


def losses(size: int, sample: int | None = None) -> Losses:
    points, whole_seconds = messages(size)
    if sample and sample < len(points):
        points = random.Random(f"sample/{size}").sample(points, sample)
    found = Losses()
    for peer, number in points:
        harness = group(size)
        faults = Faults().crash(peer, at_message=number)

        def kill(network: SimNetwork, faults: Faults = faults) -> None:
            Injector(faults, network, DirectoryFaults(), lambda peer: None).start()

        harness.before = kill
        survivors = [history for each, history in harness.play(ROUNDS).items() if each != peer]
        outcomes = [[str(result.mean.outcome) for result in history] for history in survivors]
        found.add(outcomes, max(history[0].seconds for history in survivors) - whole_seconds)
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(prog="python -m tests.sim.reducers", description="Deaths of reducers in Moshpit's groups.")
    parser.add_argument("--sizes", type=_sizes, default=[3, 4, 6, 8], help="of groups, with commas between them")
    parser.add_argument("--sample", type=at_least_one, help="play a drawn sample of this many points")
    options = parser.parse_args(arguments)
    prepare()
    later = 0
    print("size  points  none lost  all lost  rounds  seconds  after  later")
    for size in options.sizes:
        found = losses(size, options.sample)
        none, all_of_it = found.none_lost / found.points, found.all_lost / found.points
        now, after, at_last = (each / found.rounds for each in (found.lost_rounds, found.lost_after, found.lost_later))
        print(
            f"{size:4}  {found.points:6}  {none:9.1%}  {all_of_it:8.1%}  {now:6.1%}"
            f"  {found.most_seconds:7.1f}  {after:5.1%}  {at_last:5.1%}",
            flush=True,
        )
        later += found.lost_later
    return 1 if later else 0


def _sizes(text: str) -> list[int]:
    sizes = [at_least(3, each) for each in text.split(",")]
    if max(sizes) > 8:
        raise argparse.ArgumentTypeError(f"a group has at most 8 members, not {max(sizes)}")
    return sizes


if __name__ == "__main__":
    sys.exit(main())
