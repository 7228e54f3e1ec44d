"""The same training through the real protocol, in the simulator, and the comparison with the arithmetic in memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from benchmarks.journal import History
from benchmarks.laboratory.replicated import LabMember, train_replicated
from benchmarks.laboratory.runs import PEERS, PRESET, Run
from node.outer.state import OuterSGD
from protocols.base import Trainer
from tests.sim.scenario import Scenario
from tests.sim.world import World, play
from tests.support.inline_trainer import InlineTrainer


class LearningWorld(World):
    """The simulated swarm with real learners."""

    def __init__(self, run: Run, history: History, scenario: Scenario) -> None:
        super().__init__(scenario)
        self._run, self._history = run, history
        self._rounds_done = 0

    def trainer(self, index: int) -> InlineTrainer:
        return InlineTrainer(LabMember(self._run, index), self._run.inner_steps, step_seconds=1.0)

    def outer(self) -> OuterSGD:
        return self._run.outer_sgd()

    async def after_round(self, index: int, trainer: Trainer) -> None:
        if index == 0:
            assert isinstance(trainer, InlineTrainer)
            self._rounds_done += 1
            if self._run.is_evaluated(self._rounds_done):
                self._history.append((self._rounds_done * self._run.inner_steps, await trainer.evaluate()))


def through_the_protocol(
    run: Run, world: Callable[[Run, History, Scenario], World] | None = None
) -> tuple[History, list[list[float]]]:
    """Run peers of equal speed through averager, round and outer step. Returns history and weights of each round.

    Args:
        world: the simulated world; `LearningWorld` by default.

    Raises:
        RuntimeError: an invariant of the rounds was broken, so the losses would mean nothing.
    """
    scenario = Scenario(
        peers=run.peers,
        rounds=run.rounds,
        seed=run.seed,
        codec=run.codec,
        inner_steps=run.inner_steps,
        chunk_elements=1 << 18,
        uplinks=(12.5e6,) * run.peers,
        step_seconds=(1.0,) * run.peers,
    )
    history = History()
    outcome = play(scenario, partial(world or LearningWorld, run, history))
    if outcome.violations:
        raise RuntimeError(f"{run.name()}: {outcome.violations[0]}")
    rounds = zip(*outcome.histories.values(), strict=True)
    return history, [[report["weight"] for report in reports] for reports in rounds]


def check() -> int:
    """Compare the losses at equal weights: all contributions, half of them, and other codecs.

    Returns:
        0 if the largest difference is below 1e-4 nats per byte, else 1.
    """
    torch.set_num_threads(1)
    worst = 0.0
    for drop, encoding in ((0.0, "fp32"), (0.5, "fp32"), (0.0, "int8"), (0.0, "e3m0"), (0.0, "topk")):
        run = Run(PEERS, rounds=3, inner_steps=4, preset=PRESET, seed=0, drop=drop, codec=encoding, decay=0.5)
        history, weights = through_the_protocol(run)
        off = abs(history[-1][1] - train_replicated(run, weights)[-1][1])
        worst = max(worst, off)
        print(f"drop {drop}, {encoding}: {history[-1][1]:.6f} nats per byte, off by {off:.1e}; weights {weights}")
    print(f"largest difference in loss between the protocol and a plain mean: {worst:.1e}")
    return 0 if worst < 1e-4 else 1
