"""`python -m benchmarks.private`: rounds of a private run beside those of an open one, in pairs on virtual time.

Both of a pair have the same seed, peers, lines and vectors. Virtual time shows what the exchange of passes delays, and
processor time what the check of each stream costs. The last line of output is one JSON object.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from protocols.base import PeerId
from tests.sim.arguments import Parser, at_least_one, seeds
from tests.sim.private import JOINERS, PrivateWorld
from tests.sim.process import prepare

WARM_ROUNDS = 2
LATENCY_SECONDS = (0.005, 0.08)  # of the lines of a pair, as its seed draws it


@dataclass(frozen=True, slots=True)
class Rounds:
    virtual_seconds: float  # of one round
    processor_seconds: float


class CalmRun(PrivateWorld):
    """A founder and `JOINERS` others without faults, in a private or in an open run."""

    def __init__(self, seed: int, directory: Path, private: bool) -> None:
        super().__init__(seed, directory)
        self.plan = replace(self.plan, crashes=False, partition=False, skew={}, removed=0, stubborn=set())
        self.network.latency_seconds = self.chance.uniform(*LATENCY_SECONDS)
        if not private:
            self.manifest.config.admission = None

    async def _invite(self, peer: PeerId) -> None:
        if self.manifest.config.admission:
            return await super()._invite(peer)
        self.begin(peer)

    async def measure(self, rounds: int) -> Rounds:
        await self._until_admitted(self.founder)
        for peer in self.peers[1 : JOINERS + 1]:
            await self._invite(peer)
            await self._until_admitted(peer)
        await self.until(self.whole, 150.0, "a roster of all")
        await self.rounds(WARM_ROUNDS)
        began, worked, first = self.now, time.process_time(), self.head(self.founder).key.round
        await self.rounds(rounds)
        count = self.head(self.founder).key.round - first
        return Rounds((self.now - began) / count, (time.process_time() - worked) / count)


def played(seed: int, rounds: int, *, private: bool) -> Rounds:
    with tempfile.TemporaryDirectory(prefix="starling-private-") as directory:
        world, found = CalmRun(seed, Path(directory), private), list[Rounds]()

        async def story() -> None:
            await asyncio.sleep(0.0)
            found.append(await world.measure(rounds))

        world.play(story)
    return found[0]


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(prog="python -m benchmarks.private", description="A private run beside an open one.")
    parser.add_argument("--seeds", type=seeds, default=range(5), help="one seed, or a range like 0:5")
    parser.add_argument("--rounds", type=at_least_one, default=20)
    options = parser.parse_args(arguments)
    pairs = []
    for seed in options.seeds:
        order = (True, False) if seed % 2 else (False, True)
        pair = {private: played(seed, options.rounds, private=private) for private in order}
        pairs.append((pair[False], pair[True]))
        print(f"seed {seed}: open {pair[False]}, private {pair[True]}")
    total = {
        what: {
            "open": round(fmean(getattr(one, what) for one, _ in pairs), 5),
            "private": round(fmean(getattr(other, what) for _, other in pairs), 5),
            "ratio": round(fmean(getattr(other, what) / getattr(one, what) for one, other in pairs), 4),
            "ratios": [round(getattr(other, what) / getattr(one, what), 4) for one, other in pairs],
        }
        for what in ("virtual_seconds", "processor_seconds")
    }
    print(json.dumps({"seeds": len(pairs), "rounds": options.rounds, **total}))
    return 0


if __name__ == "__main__":
    prepare()
    sys.exit(main())
