"""One training run of the laboratory: what determines it, its name, and how it is performed."""

from __future__ import annotations

import platform
import time
from dataclasses import asdict, dataclass
from typing import Literal

import torch

from benchmarks.book import History
from benchmarks.laboratory.reference import Run, alone, in_memory
from benchmarks.protocols import Arm, train

ArmName = Literal[
    "data-parallel", "alone", "alone-outer", "diloco", "moshpit", "gossip", "noloco", "push-sum", "butterfly"
]
ARMS: tuple[ArmName, ...] = ("data-parallel", "diloco", "alone", "alone-outer")
WITHOUT_COMMON_STATE: tuple[ArmName, ...] = ("moshpit", "gossip", "noloco", "push-sum")
PRESET, STEPS, PEERS, INNER_STEPS = "w64", 2000, 4, 25
"""The regime: steps of each peer, and the usual number of peers and of inner steps in a round."""
EVALUATION_STEPS = 200


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

    def fields(self) -> dict[str, object]:
        """What determines the run, for the journal."""
        return {"arm": self.arm, **asdict(self.run), "failure": self.failure}


def trial(
    arm: ArmName,
    seed: int,
    rate: float = 1.0,
    outer: tuple[float, float] | None = None,
    peers: int = PEERS,
    inner_steps: int = INNER_STEPS,
    optimizer: Literal["muon"] | None = None,
) -> LabRun:
    """A run in the regime. Arms without an outer step take none of its values, so that equal runs have equal names."""
    averages = arm not in ("data-parallel", "alone")
    steps = inner_steps if averages else INNER_STEPS
    count = 1 if arm.startswith("alone") else peers
    outer = outer if averages else None
    return LabRun(arm, Run(count, STEPS // steps, steps, PRESET, seed, outer=outer, rate=rate, optimizer=optimizer))


@dataclass(frozen=True, slots=True)
class Finished:
    """What a run came to, and what it took.

    Attributes:
        seconds, processor_seconds: of the whole run, evaluations included.
    """

    history: History
    seconds: float
    processor_seconds: float
    versions: dict[str, str]


def perform(given: LabRun) -> Finished:
    """Train on one thread, in memory: `python -m benchmarks.learning check` compares that with the protocol."""
    torch.set_num_threads(1)
    began, processor = time.perf_counter(), time.process_time()
    run = given.run
    evaluation_rounds = max(1, EVALUATION_STEPS // run.inner_steps)
    if given.arm == "alone":
        history = alone(run, EVALUATION_STEPS)
    elif given.arm in ("diloco", "alone-outer"):
        history = in_memory(run, evaluation_steps=EVALUATION_STEPS)
    else:
        sizes = (run.peers, run.rounds, run.inner_steps, run.preset, run.seed, given.failure)
        history = train(Arm(given.arm, *sizes, run.rate, run.outer, run.optimizer), evaluation_rounds)
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    return Finished(history, time.perf_counter() - began, time.process_time() - processor, versions)
