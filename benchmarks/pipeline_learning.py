"""Learning in a pipeline: real training on real text, with stages and without, at equal tokens.

    python -m benchmarks.pipeline_learning [--journal FILE] [--seeds 0:3] [--stages 2 3]
    python -m benchmarks.pipeline_learning --codecs bf16 int8 --stages 3 --peers 1
    python -m benchmarks.pipeline_learning --lookaheads 0 8 --stages 3 --peers 1 [--optimizer muon]

`whole`: 4 peers of DiLoCo, each with the whole model. `S stages`: 4 drivers, and 4 replicas of each later stage. Both
take 40 rounds of 50 inner steps of w64, with the inner rate 3e-3 and the outer step (.9, .5). A driver's step has the
tokens of a peer's step, as 8 microbatches of one row; so has the peer's. Activations travel as bf16. With `--codecs`
runs with stages are compared that differ in how activations and gradients travel, with `--lookaheads` in how many
microbatches of the next step a replica admits; `--peers` is their number in a stage.

`tests.sim.pipeline_world` provides the peers, the pipeline and the averaging, in virtual time. All runs of a seed start
from the same weights. The loss is that of the outer parameters of all stages, put together, over held-out text, in nats
per byte.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import get_args

import torch

from benchmarks.journal import History, RunJournal, perform_all
from node.outer.state import OuterSGD
from node.tasks.flat import flatten
from node.tasks.gpt import GptTask
from node.tasks.gpt_presets import Preset, preset
from node.tasks.gpt_stage import GptStage, GptStageTask, block_names
from node.tasks.partition import BlockCost, Partition, cut
from node.tasks.recipe import InnerOptimizerName, Recipe
from node.tasks.text import load
from node.training.activations import CODECS, ActivationCodec
from node.training.stage_learner import StageLearner
from node.training.task_learner import TaskLearner
from node.training.trainer import Learner, LocalTraining
from protocols.base import Buffer, Host, LocalProgress, Member, RoundKey, Trainer
from protocols.pipeline.job import Payload
from protocols.pipeline.settings import PipelineSettings
from tests.sim.arguments import Parser, at_least, at_least_one, seeds
from tests.sim.inline_stage import InlineStage
from tests.sim.pipeline_world import PipelineWorld
from tests.sim.scenario import Scenario
from tests.sim.world import RUN, World, play
from tests.support.inline_trainer import InlineTrainer

PRESET, PEERS, ROUNDS, INNER_STEPS, BATCHES = "w64", 4, 40, 50, 8
EVALUATION_ROUNDS = 5
JOURNAL = Path("benchmarks/runs/pipeline_learning.jsonl")
BOUND = 0.03
"""How much more loss a pipeline may have than the whole model."""
SMALL_BOUND = 0.005
"""How much more loss a codec or a lookahead may have than another."""
LAYER_COST, HEAD_COST = 1.0, 0.3
"""What a layer, and norm and head together, cost in the partition: given numbers, so that runs repeat."""


@dataclass(frozen=True, slots=True)
class StagedRun:
    """One training run, determined by its fields alone.

    Attributes:
        stages: 1 means peers with the whole model.
        peers: of each stage.
    """

    stages: int
    seed: int
    peers: int = PEERS
    rounds: int = ROUNDS
    inner_steps: int = INNER_STEPS
    codec: str = "bf16"  # of activations and gradients
    optimizer: InnerOptimizerName = "adamw"
    lookahead: int = 0

    def name(self) -> str:
        sizes = f"stages={self.stages} peers={self.peers} rounds={self.rounds} H={self.inner_steps}"
        more = "" if self.codec == "bf16" else f" {self.codec}"
        more += "" if self.optimizer == "adamw" else f" {self.optimizer}"
        more += f" A={self.lookahead}" if self.lookahead else ""
        return f"{PRESET} {sizes} B={BATCHES}{more} {self.seed}"

    @property
    def preset(self) -> Preset:
        """The preset with this run's changes: the tokens of a step in `BATCHES` microbatches."""
        given = preset(PRESET)
        recipe = Recipe(
            self.inner_steps, self.rounds, 3e-3, 0.9, 0.5, batches=BATCHES, inner_optimizer=self.optimizer,
            lookahead=self.lookahead or None,
        )  # fmt: skip
        return replace(given, rows=given.rows // BATCHES, recipe=recipe)

    def partition(self) -> Partition:
        """The cut into stages; one stage has all blocks."""
        names = block_names(self.preset.shape)
        seconds = [0.0, *(LAYER_COST for _ in names[2:]), HEAD_COST]
        blocks = [BlockCost(name, each, 2 * each, 0) for name, each in zip(names, seconds, strict=True)]
        return cut(blocks, self.stages)

    def stage_task(self, stage: int) -> GptStageTask:
        """A stage with its initial weights. Only stage 0 has data."""
        return GptStageTask(self.preset, self.partition(), stage, self.seed, load() if stage == 0 else None)

    def stream(self, number: int) -> int:
        """Seed of the data of a driver, or of a peer with the whole model."""
        return 1000 * self.seed + number


def initial_weights(run: StagedRun) -> dict[str, torch.Tensor]:
    """Of the whole model: those that a pipeline starts with. They do not depend on the cut."""
    return GptStage(run.preset.shape, 0, len(block_names(run.preset.shape)), run.seed).state_dict()


def _copy(vector: torch.Tensor, size: int) -> torch.Tensor:
    return vector.clone()


def evaluated(run: StagedRun, anchors: Sequence[torch.Tensor]) -> float:
    """Held-out loss of these outer parameters: one vector for each stage."""
    task = GptTask(run.preset, load())
    if run.stages == 1:
        flatten(task.module, partial(_copy, anchors[0]), resume=True)
        return task.evaluate()
    modules = [run.stage_task(stage).module for stage in range(run.stages)]
    for module, anchor in zip(modules, anchors, strict=True):
        flatten(module, partial(_copy, anchor), resume=True)
    task.module.load_state_dict({name: each for module in modules for name, each in module.state_dict().items()})
    return task.evaluate()


def exact(trainer: Trainer) -> Trainer:
    """A trainer that stops at H inner steps, so that all runs train on equally many tokens."""
    train = trainer.train

    async def stopped(
        key: RoundKey, cut: asyncio.Event, progress: Callable[[LocalProgress], None], surplus: bool = True
    ) -> LocalProgress:
        return await train(key, cut, progress, surplus=False)

    trainer.train = stopped  # type: ignore[method-assign]
    return trainer


class _Evaluation(World):
    """Evaluates the outer parameters as soon as a round of all stages is over."""

    def __init__(self, run: StagedRun, history: History, scenario: Scenario) -> None:
        super().__init__(scenario)
        self._run, self._history = run, history
        self._anchors: dict[int, dict[int, torch.Tensor]] = {}  # round -> stage -> outer parameters

    def outer(self) -> OuterSGD:
        recipe = self._run.preset.recipe
        return OuterSGD(recipe.outer_learning_rate, recipe.outer_momentum)

    async def after_round(self, index: int, trainer: Trainer) -> None:
        if index >= self._run.stages:
            return
        done = len(self.histories[self.peers[index]]) + 1
        anchors = self._anchors.setdefault(done, {})
        anchors[index] = self.replicas[self.peers[index]].anchor.clone()
        if len(anchors) == self._run.stages and (done % EVALUATION_ROUNDS == 0 or done == self._run.rounds):
            loss = evaluated(self._run, [anchors[stage] for stage in range(self._run.stages)])
            self._history.append((done * self._run.inner_steps, loss))


class WholeWorld(_Evaluation):
    """Peers that each hold the whole model."""

    def trainer_on(self, index: int, host: Host) -> Trainer:
        task = GptTask(self._run.preset, load())
        task.module.load_state_dict(initial_weights(self._run))
        learner = TaskLearner(task, self._run.preset.recipe, seed=self._run.stream(index))
        return exact(InlineTrainer(learner, self._run.inner_steps, step_seconds=1.0))


class RoundOfTokens(LocalTraining):
    """A driver's round that is complete at a number of tokens: with lookahead, steps hold B microbatches or more."""

    def __init__(self, learner: Learner, inner_steps: int, tokens: int) -> None:
        super().__init__(learner, inner_steps)
        self._due_tokens = tokens

    @property
    def complete(self) -> bool:
        return self.tokens >= self._due_tokens

    def due(self, soon: bool = False) -> bool:
        return super().due(soon) or self.complete


class StagedWorld(_Evaluation, PipelineWorld):
    """A pipeline of real stages: peer i is replica i div S of stage i mod S."""

    def __init__(self, run: StagedRun, history: History, scenario: Scenario) -> None:
        super().__init__(run, history, scenario)
        self._codec = ActivationCodec(run.stage_task(0).shape, run.codec)
        self.microbatch_tokens = self._codec.shape.tokens

    def pipeline(self) -> PipelineSettings:
        return PipelineSettings(RUN, self._run.stages, BATCHES, self._codec.sizes, self._run.lookahead)

    def replica_on(self, index: int, me: Member) -> InlineStage:
        replica = super().replica_on(index, me)
        if self.stage(me.peer) == 0 and self._run.lookahead:
            tokens = self._run.inner_steps * BATCHES * self.microbatch_tokens
            replica.local_training = RoundOfTokens(replica.compute, self._run.inner_steps, tokens)
        return replica

    def check_payload(self, data: Buffer, payload: Payload) -> None:
        self._codec.check(data, payload)

    def stage_compute(self, index: int, me: Member) -> StageLearner:
        number, stage = divmod(index, self._run.stages)
        return StageLearner(self._run.stage_task(stage), self._run.preset.recipe, self._codec, self._run.stream(number))

    def trainer_on(self, index: int, host: Host) -> Trainer:
        trainer = super().trainer_on(index, host)
        return exact(trainer) if self.stage(host.me) == 0 else trainer


def perform(run: StagedRun) -> tuple[History, float]:
    """Train a run; returns its history and the seconds that it took.

    Raises:
        RuntimeError: an invariant was broken, so the loss would mean nothing.
    """
    torch.set_num_threads(1)
    peers = run.peers * run.stages
    scenario = Scenario(
        peers=peers,
        rounds=run.rounds,
        seed=run.seed,
        codec="fp32",
        inner_steps=run.inner_steps,
        chunk_elements=1 << 18,
        uplinks=(12.5e6,) * peers,
        step_seconds=(1.0,) * peers,
        stages=run.stages,
        batches=BATCHES,
        lookahead=run.lookahead,
    )
    began, history = time.perf_counter(), History()
    world: Callable[..., World] = StagedWorld if run.stages > 1 else WholeWorld
    outcome = play(scenario, partial(world, run, history))
    if outcome.violations:
        raise RuntimeError(f"{run.name()}: {outcome.violations[0]}")
    return history, time.perf_counter() - began


def print_differences(
    runs: Sequence[StagedRun], journal: RunJournal, named: Callable[[StagedRun], str], bound: float
) -> bool:
    """Print a line per seed: the loss of each kind of run, and its distance from the first kind.

    `named` tells the kinds apart. Returns whether the bound holds for the means over the seeds.
    """
    first, *others = dict.fromkeys(map(named, runs))
    print(f"| seed | {first} |" + "".join(f" {each} | difference |" for each in others))
    print("|---|---|" + "---|---|" * len(others))
    found: dict[str, list[float]] = {each: [] for each in others}
    for seed in sorted({run.seed for run in runs}):
        loss = {named(run): journal.loss(run) for run in runs if run.seed == seed}
        row = f"| {seed} | {loss[first]:.4f} |"
        for each in others:
            found[each].append(loss[each] / loss[first] - 1)
            row += f" {loss[each]:.4f} | {found[each][-1]:+.2%} |"
        print(row)
    print("| mean | |" + "".join(f" | {fmean(each):+.2%} |" for each in found.values()))
    return all(fmean(each) <= bound for each in found.values())


def kind(run: StagedRun, differ_in: str) -> str:
    if differ_in == "codecs":
        return run.codec
    if differ_in == "lookaheads":
        return f"A = {run.lookahead}"
    return "whole model" if run.stages == 1 else f"{run.stages} stages"


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(prog="python -m benchmarks.pipeline_learning", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=seeds, default=range(3))
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 3], choices=range(2, 7), help="numbers of stages")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--codecs", nargs="+", choices=CODECS, help="compare these, in place of the whole model")
    instead.add_argument(
        "--lookaheads",
        nargs="+",
        type=partial(at_least, 0),
        metavar="A",
        help="compare these, in place of the whole model",
    )
    parser.add_argument(
        "--optimizer",
        choices=get_args(InnerOptimizerName),
        default="adamw",
        help="inner optimiser (default %(default)s)",
    )
    parser.add_argument("--peers", type=at_least_one, default=PEERS, help="of each stage (default %(default)s)")
    parser.add_argument("--journal", type=Path, default=JOURNAL, help="where the runs are kept (default %(default)s)")
    options = parser.parse_args(arguments)
    differ_in = next((each for each in ("codecs", "lookaheads") if getattr(options, each)), "stages")
    if differ_in != "stages" and len(options.stages) != 1:
        parser.error(f"--{differ_in} compares runs of one number of stages: give --stages 3, for instance")
    numbers = (1, *options.stages) if differ_in == "stages" else options.stages
    runs = [
        StagedRun(stages, seed, options.peers, codec=codec, optimizer=options.optimizer, lookahead=lookahead)
        for seed in options.seeds
        for stages in numbers
        for codec in options.codecs or ("bf16",)
        for lookahead in options.lookaheads or (0,)
    ]
    try:
        journal = RunJournal(options.journal)
        perform_all(runs, journal, perform)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    bound = BOUND if differ_in == "stages" else SMALL_BOUND
    return 0 if print_differences(runs, journal, partial(kind, differ_in=differ_in), bound) else 1


if __name__ == "__main__":
    sys.exit(main())
