"""A pipeline of real stages that stands still in mid-step: each peer has an anchor, other weights, and a gradient."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import astuple
from statistics import fmean

import torch
from torch.nn import functional

from node.tasks.gpt import Gpt
from node.tasks.gpt_presets import GptConfig, Preset
from node.tasks.gpt_stage import GptStage, GptStageTask, block_names
from node.tasks.partition import BlockCost, cut
from node.tasks.recipe import Recipe
from node.tasks.text import Text
from node.training.activations import ActivationCodec
from node.training.stage_learner import StageLearner
from node.training.stage_replica import LeasedStage, OuterVersion, StageSeconds
from protocols.base import Deadline, Member, PeerId, Settings
from protocols.pipeline.driving import PipelineDriver
from protocols.pipeline.held_out import HeldOutLoss
from protocols.pipeline.job import JobResult, StageJob
from protocols.pipeline.serving import StageServer
from protocols.pipeline.settings import PipelineSettings
from protocols.streams.endpoint import ProtocolEndpoint
from tests.sim.inline_stage import InlineStage, accumulate
from tests.sim.swarm import SimSwarm
from tests.support.statedir_fixtures import assemble

RUN, SEED = bytes(range(32)), 3
RECIPE = Recipe(inner_steps=4, rounds=2, learning_rate=3e-3, outer_learning_rate=0.9, outer_momentum=0.5, batches=4)
PRESET = Preset(GptConfig(layers=2, width=16, heads=2, context=12), rows=3, recipe=RECIPE)
JOB_SECONDS = 0.1


def text() -> Text:
    rng = random.Random(1)
    words = ["gossip", "butterfly", "peer", "round", "stage", "lease", "the", "of", "and", "counts"]
    training, held_out = (" ".join(rng.choices(words, k=k)).encode() for k in (400, 80))
    return Text(*(torch.frombuffer(bytearray(each), dtype=torch.uint8) for each in (training, held_out)))


class _Counted(InlineStage):
    on_job: Callable[[], None]

    async def run(self, job: StageJob) -> JobResult:
        self.on_job()
        return await super().run(job)


class _Replica:
    def __init__(self, stage: int, stages: int) -> None:
        names = block_names(PRESET.shape)
        cuts = cut([BlockCost(name, 1.0, 2.0, 4) for name in names], stages)
        self.task = GptStageTask(PRESET, cuts, stage, SEED, text() if stage == 0 else None)
        self.codec = ActivationCodec(self.task.shape, "fp32")
        self.learner = StageLearner(self.task, RECIPE, self.codec, SEED)
        self.inline = _Counted(self.learner, RECIPE.inner_steps, StageSeconds(outer=JOB_SECONDS))
        self.local_training = self.inline.local_training
        noise = torch.randn(self.learner.vector.shape, generator=torch.Generator().manual_seed(stage))
        self.learner.vector.add_(0.1 * noise)

    def state(self) -> list[object]:
        """All that training continues from, in a form that can be compared."""
        learner = self.learner
        tensors = [learner.vector, learner._optimizer._gradients[0], self.local_training.anchor]
        counts = astuple(learner._accumulated), learner.position, repr(self.local_training.work())
        return [*(tensor.numpy().tobytes() for tensor in tensors), *counts]


class OuterSwarm(SimSwarm):
    """Peers p0, p1, …, each in the stage that `layout` says. p0 evaluates."""

    seed, grace_seconds = SEED, 1.0

    def __init__(self, layout: Sequence[int], stages: int | None = None) -> None:
        super().__init__()
        self.stages = stages or max(layout) + 1
        self.layout = {f"p{index}": stage for index, stage in enumerate(layout)}
        self.trained = dict.fromkeys(self.layout, 1)
        self.changing: set[PeerId] = set()  # peers that write a new mean now
        self.jobs = dict.fromkeys(self.layout, 0)
        self.on_job: Callable[[PeerId], None] = lambda peer: None
        self.job_seconds = JOB_SECONDS
        self.replicas = {peer: _Replica(stage, self.stages) for peer, stage in self.layout.items()}
        self.settings = PipelineSettings(RUN, self.stages, RECIPE.batches, self.replicas["p0"].codec.sizes)
        self._accumulate()

    def rests(self, peer: PeerId) -> bool:
        """None does."""
        return False

    async def set_up(self) -> None:
        self.endpoints = {peer: self._join(peer) for peer in self.layout}

    async def finish(self) -> None:
        assert self.left() == (1, 0), "tasks and streams are left over"

    def left(self) -> tuple[int, int]:
        return len(asyncio.all_tasks()), sum(len(node.ends) for node in self.network.nodes.values())

    def _join(self, peer: PeerId) -> ProtocolEndpoint:
        host = self.join(peer)
        replica, stage = self.replicas[peer], self.layout[peer]
        endpoint = ProtocolEndpoint(host, Settings("fp32", replica.learner.layout.sizes()))

        def begins() -> None:
            self.jobs[peer] += 1
            replica.inline.seconds = StageSeconds(outer=self.job_seconds)
            self.on_job(peer)

        replica.inline.on_job, work = begins, LeasedStage(replica.inline, lambda: self.version(peer))
        if stage:
            trained = lambda: self.trained[peer]  # noqa: E731
            StageServer(endpoint, self.settings, stage=stage, work=work, drivers=lambda: 1, trained=trained)
        elif peer == "p0":
            self.client = PipelineDriver(endpoint, self.settings, work=work, directory=self)
        return endpoint

    def stage_of(self, peer: PeerId) -> int | None:
        return self.layout.get(peer)

    def rounds_of(self, peer: PeerId) -> int:
        return 0

    def member(self, peer: PeerId) -> Member:
        return self.network.nodes[peer].member

    def version(self, peer: PeerId) -> OuterVersion | None:
        return None if peer in self.changing else OuterVersion(self.trained[peer], self.trained[peer])

    async def evaluate(self, trained: int = 1, seconds: float = 600.0) -> float:
        found = HeldOutLoss(trained)
        await self.client.evaluate(found, self.deadline(seconds))
        return found.mean

    def deadline(self, seconds: float) -> Deadline:
        return self.now + seconds

    # -- the whole model ----------------------------------------------------------------------------------------------

    def whole(self) -> Gpt:
        """The whole model with the weights of all anchors: those that a pipeline starts with."""
        return assemble(PRESET.shape, [GptStage(PRESET.shape, 0, PRESET.shape.layers + 2, SEED)])

    def expected(self) -> float:
        losses = self.expected_losses()
        assert len(losses) >= 8
        return fmean(losses)

    def expected_losses(self) -> list[float]:
        """Of each held-out microbatch."""
        task, whole = self.replicas["p0"].task, self.whole()
        losses: list[float] = []
        while batch := task.held_out(len(losses)):
            inputs, targets = batch
            with torch.no_grad():
                losses.append(float(functional.cross_entropy(whole(inputs).flatten(0, 1), targets.flatten())))
        return losses

    def _accumulate(self) -> None:
        """One microbatch through the first replica of each stage: half-done steps."""
        firsts = [next((p for p, s in self.layout.items() if s == stage), None) for stage in range(self.stages)]
        if None in firsts:
            return
        accumulate([self.replicas[peer].learner for peer in firsts if peer])
