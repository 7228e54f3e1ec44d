"""A model of a roster that rotates, and of liars that want a majority of it: the design in docs/rotation.md.

    python -m benchmarks.rotation [--liars .1 .2 .25] [--runs 400] [--draws 1024]

With each draw the voter of longest standing leaves, and a peer outside the roster gets its place. The share `--liars`
of all peers lie together. Who draws follows from the number of the draw:

lineage   the draw follows from the last record. A lying coordinator makes records until the draw suits it
kept      the draw follows from a value that the drawer committed to when it was admitted. A liar that does not like it
          withholds it, and the next voter draws
lost      as `kept`, but who withholds gives up its own place
sparing   as `lost`; the liars withhold only where what they give up is worth less than what they hope to win

Shows the share of liars among the voters after the last draw (mean of all runs, and the largest), the share of runs in
which they ever had a majority, and the median number of draws until then. Nothing is voted on here.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from tests.sim.arguments import Parser, at_least_one

VOTERS = 32
POLICIES = ("lineage", "kept", "lost", "sparing")


@dataclass(slots=True)
class Rotation:
    """The voters, those of longest standing first: whether each one lies. `chance`: the liars' share of all peers."""

    policy: str
    chance: float
    random: random.Random
    voters: list[bool]
    number: int = 0

    @classmethod
    def drawn(cls, policy: str, chance: float, seed: int) -> Rotation:
        rng = random.Random(f"rotation/{policy}/{chance}/{seed}")
        return cls(policy, chance, rng, [rng.random() < chance for _ in range(VOTERS)])

    def draw(self) -> None:
        """Give the place of longest standing, and those that liars gave up, to new peers."""
        self.number += 1
        first, withheld = self.random.randrange(VOTERS), list[int]()
        for turn in range(VOTERS):
            drawer = (first + turn) % VOTERS  # its place tells for how long it has been a voter
            comes = self.random.random() < self.chance
            if not self.voters[drawer] or not self._withholds(comes, drawer, (drawer + 1) % VOTERS):
                break
            withheld.append(drawer)
        if self.policy == "lineage" and self.voters[first]:
            comes, withheld = True, []
        gone = {0} | ({*withheld} if self.policy in ("lost", "sparing") else set())
        new = [comes, *(self.random.random() < self.chance for _ in range(len(gone) - 1))]
        self.voters = [lies for place, lies in enumerate(self.voters) if place not in gone] + new

    def _withholds(self, comes: bool, drawer: int, following: int) -> bool:
        """Whether a lying drawer withholds a draw by which a liar, or no liar, comes."""
        if comes or self.policy == "lineage":
            return False
        if self.policy != "sparing":
            return True
        tenure = drawer / VOTERS  # what is left of its time as a voter; 0: it leaves now in any case
        hope = self.chance * (2 if self.voters[following] else 1)  # a liar that follows has a second choice
        return tenure < hope

    @property
    def lies(self) -> bool:
        return 2 * sum(self.voters) > VOTERS


@dataclass(frozen=True, slots=True)
class Outcome:
    policy: str
    chance: float
    shares: Sequence[float]  # of liars among the voters after the last draw, of each run
    majorities: Sequence[int]  # the draw of the first lying majority, of each run that had one

    def row(self) -> str:
        runs, met = len(self.shares), self.majorities
        first = f"{median(met):.0f}" if met else "–"
        shares = f"{fmean(self.shares):.3f} | {max(self.shares):.3f}"
        return f"| {self.chance:g} | {self.policy} | {shares} | {len(met) / runs:.3f} | {first} |"


def play(policy: str, chance: float, runs: int, draws: int) -> Outcome:
    shares, majorities = list[float](), list[int]()
    for seed in range(runs):
        rotation = Rotation.drawn(policy, chance, seed)
        met = 0
        for _ in range(draws):
            rotation.draw()
            met = met or (rotation.number if rotation.lies else 0)
        shares.append(sum(rotation.voters) / VOTERS)
        majorities += [met] if met else []
    return Outcome(policy, chance, shares, majorities)


def outcomes(chances: Sequence[float], runs: int, draws: int) -> Iterator[Outcome]:
    for chance in chances:
        for policy in POLICIES:
            yield play(policy, chance, runs, draws)


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(prog="python -m benchmarks.rotation", description="A roster that rotates, and liars that want it.")
    parser.add_argument("--liars", type=float, nargs="+", default=[0.1, 0.2, 0.25], help="their share of all peers")
    parser.add_argument("--runs", type=at_least_one, default=400)
    parser.add_argument("--draws", type=at_least_one, default=1024)
    options = parser.parse_args(arguments)
    if not all(0.0 <= each <= 1.0 for each in options.liars):
        parser.error("a share of liars is from 0 to 1")
    print("| liars | draw | liars among the voters, mean | most | runs with a lying majority | draws until then |")
    print("|---|---|---|---|---|---|")
    for outcome in outcomes(options.liars, options.runs, options.draws):
        print(outcome.row(), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
