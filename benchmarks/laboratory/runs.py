"""What determines a training run of the laboratory, and its name in the journal."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Literal

from node.outer.state import OuterSGD
from node.tasks.gpt_presets import Preset, preset
from node.tasks.recipe import InnerOptimizerName, Recipe

ArmName = Literal[
    "data-parallel", "alone", "alone-outer", "diloco", "moshpit", "gossip", "noloco", "push-sum", "butterfly"
]
ARMS: tuple[ArmName, ...] = ("data-parallel", "diloco", "alone", "alone-outer")
WITHOUT_COMMON_STATE: tuple[ArmName, ...] = ("moshpit", "gossip", "noloco", "push-sum")
PRESET, STEPS, PEERS, INNER_STEPS = "w64", 2000, 4, 25
"""The regime: steps of each peer, and the usual number of peers and of inner steps in a round."""

UNIT_RATES = {"w64": 3e-3, "w96": 2e-3, "w128": 2e-3, "w192": 2e-3, "w256": 2e-3}
"""Inner learning rates of the presets when the laboratory began."""

OuterStep = tuple[float, float]
"""Learning rate and momentum."""

Variant = Literal["", "zero", "restarts", "moments", "naive", "strided"]
"""What a run does differently.

zero        the cosine of the inner rate ends at zero, not at the recipe's `final_fraction`
restarts    the outer momentum begins at zero again after each quarter
moments     the peers average the moments of AdamW after each round
naive       with a delay, the peers go on from the outer parameters, and what they did meanwhile is lost
strided     a fragment has every n-th layer instead of neighbours
"""


@dataclass(frozen=True, slots=True)
class Run:
    """Simulated peers that train, determined by these fields alone.

    Attributes:
        drop: share of the contributions that are lost each round.
        late: weight with which a lost contribution counts in its peer's next one; 0 drops it.
        codec: the encoding of vectors on the wire.
        outer: learning rate and momentum of the outer steps; None for (.9, .5).
        rate: learning rate of the inner steps, as a multiple of `UNIT_RATES`.
        optimizer: of the inner steps.
        speeds: of each peer, relative to the fastest: its share of the inner steps; empty if all are equal.
        decay: share of the run, at its end, in which the outer step goes in equal parts to a plain mean of the
            parameters: learning rate 1, momentum 0.
        delay: inner steps that averaging takes. The peers take them meanwhile, and keep them (`recipe.overlap`); they
            are the first of the next round.
        kept: the share of those steps that stays in a peer's parameters when the mean arrives. All of them are handed
            in: its pseudo-gradient is measured from the outer parameters less the rest.
        fragments: of the vector, one of which is averaged in each round, in turn (`recipe.fragments`).
        averaged: the mean of the outer parameters after so many last rounds is evaluated; training is unchanged.
        variant: as `Variant` says; in memory only, as are averaged, kept and late.
        evaluation_steps: inner steps between two evaluations, rounded down to whole rounds. Not in the name.
    """

    peers: int
    rounds: int
    inner_steps: int
    preset: str
    seed: int
    drop: float = 0.0
    codec: str = "fp32"
    outer: OuterStep | None = None
    rate: float = 1.0
    optimizer: InnerOptimizerName = "adamw"
    speeds: tuple[float, ...] = ()
    decay: float = 0.0
    delay: int = 0
    kept: float = 1.0
    fragments: int = 1
    averaged: int = 1
    variant: Variant = ""
    late: float = 0.0
    evaluation_steps: int = 200

    def name(self) -> str:
        sizes = f"peers={self.peers} rounds={self.rounds} H={self.inner_steps} drop={self.drop}"
        rest = (
            self.codec if self.codec != "fp32" else "",
            "outer={:g},{:g}".format(*self.outer) if self.outer else "",
            f"rate={self.rate:g}" if self.rate != 1.0 else "",
            self.optimizer if self.optimizer != "adamw" else "",
            "speeds=" + ":".join(f"{each:g}" for each in self.speeds) if self.speeds else "",
            f"decay={self.decay:g}" if self.decay else "",
            f"delay={self.delay}" if self.delay else "",
            f"kept={self.kept:g}" if self.kept != 1.0 else "",
            f"fragments={self.fragments}" if self.fragments > 1 else "",
            f"averaged={self.averaged}" if self.averaged > 1 else "",
            self.variant,
            f"late={self.late:g}" if self.late else "",
        )
        return " ".join((self.preset, sizes, str(self.seed), *filter(None, rest)))

    @property
    def settings(self) -> Preset:
        """The preset, with this run's recipe."""
        given = preset(self.preset)
        return replace(given, recipe=self._recipe(given.recipe))

    def _recipe(self, recipe: Recipe) -> Recipe:
        outer, momentum = self.outer or (0.9, 0.5)
        return replace(
            recipe,
            inner_steps=self.inner_steps,
            rounds=self.rounds,
            learning_rate=self.rate * UNIT_RATES.get(self.preset, recipe.learning_rate),
            outer_learning_rate=outer,
            outer_momentum=momentum,
            outer_decay=self.decay or None,
            inner_optimizer=self.optimizer,
            final_fraction=0.0 if self.variant == "zero" else recipe.final_fraction,
        )

    def steps_of(self, peer: int) -> int:
        """Inner steps that a peer takes in a round."""
        return round(self.inner_steps * self.speeds[peer]) if self.speeds else self.inner_steps

    def outer_sgd(self) -> OuterSGD:
        recipe = self.settings.recipe
        rate, momentum, parts = recipe.outer_learning_rate, recipe.outer_momentum, self.fragments
        return OuterSGD(rate, momentum, self.rounds, self.decay, fragments=parts)

    def is_evaluated(self, rounds_done: int) -> bool:
        """Whether there is an evaluation after this many rounds."""
        every = max(1, self.evaluation_steps // self.inner_steps)
        return rounds_done % every == 0 or rounds_done == self.rounds

    def lost(self, round_number: int) -> list[int]:
        """The peers whose contributions are lost in a round."""
        draw = random.Random(f"{self.seed}/drop/{round_number}")
        return draw.sample(range(self.peers), int(self.drop * self.peers))


@dataclass(frozen=True, slots=True)
class LabRun:
    """A run of one arm, determined by its fields alone.

    Attributes:
        failure: probability that a peer meets no other in a round; for `butterfly`, which is diloco under failures, and
            the arms without a common state.
    """

    arm: ArmName
    run: Run
    failure: float = 0.0

    def name(self) -> str:
        return f"{self.arm} {self.run.name()}" + (f" failure={self.failure:g}" if self.failure else "")

    def with_seeds(self, seeds: Iterable[int]) -> tuple[LabRun, ...]:
        """The same run with each of these seeds."""
        return tuple(replace(self, run=replace(self.run, seed=seed)) for seed in seeds)

    def fields(self) -> dict[str, object]:
        """What determines the run, for the journal."""
        return {"arm": self.arm, **asdict(self.run), "failure": self.failure}

    def up(self, round_number: int) -> list[bool]:
        """Which peers are up in a round, the same with every arm. If none would be, all are drawn again."""
        draw = random.Random(f"{self.run.seed}/down/{self.failure}/{round_number}")
        while True:
            found = [draw.random() >= self.failure for _ in range(self.run.peers)]
            if any(found):
                return found


def trial(
    arm: ArmName,
    seed: int,
    rate: float = 1.0,
    outer: OuterStep | None = None,
    peers: int = PEERS,
    inner_steps: int = INNER_STEPS,
    optimizer: InnerOptimizerName = "adamw",
    decay: float = 0.0,
) -> LabRun:
    """A run in the regime. Arms without an outer step take none of its values, so that equal runs have equal names."""
    averages = arm not in ("data-parallel", "alone")
    steps = inner_steps if averages else INNER_STEPS
    count = 1 if arm.startswith("alone") else peers
    more = {"outer": outer, "decay": decay} if averages else {}
    return LabRun(arm, Run(count, STEPS // steps, steps, PRESET, seed, rate=rate, optimizer=optimizer, **more))  # type: ignore[arg-type]


def swarm_run(
    seed: int, rate: float, outer: OuterStep, decay: float = 0.0, optimizer: InnerOptimizerName = "adamw"
) -> LabRun:
    """A run of the size of `make swarm`."""
    given = Run(PEERS, 14, 50, "w128", seed, outer=outer, rate=rate, optimizer=optimizer, decay=decay)
    return LabRun("diloco", given)
