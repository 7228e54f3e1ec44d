"""What a peer of a run with stages trains with: its part of the pipeline, behind the interface of a trainer."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from node.config.manifest import Manifest
from node.membership.membership import Membership
from node.reporting.report import RoundReport
from node.tasks.gpt_stage import ActivationShape
from node.training.leased_stage import LeasedStage
from node.training.pipeline_text import generate
from node.training.process import WorkerError
from node.training.remote_stage import RemoteStage
from node.training.stage_trainer import DrivingTrainer, ServingTrainer, StageTraining
from protocols.aio import loop_time
from protocols.base import BadPayload, Host, LocalProgress, Member, RoundKey, Settings, Vector
from protocols.endpoint import ProtocolEndpoint
from protocols.pipeline.driving import PipelineDriver
from protocols.pipeline.outer import OuterClient, OuterServer
from protocols.pipeline.serving import StageServer
from protocols.pipeline.settings import PipelineEvent, PipelineSettings
from protocols.pipeline.stages import StageClock, StageMembers, by_stage
from protocols.pipeline.work import LeaseLost

EVALUATION_SECONDS = 60.0
"""An evaluation or a text that takes longer is given up: the next round must not wait for it."""


@dataclass(frozen=True, slots=True)
class PipelinePeer:
    """A peer in a run with stages.

    Attributes:
        host: of the whole run's members.
        trained: returns the training rounds of this peer's chain.
        is_member: returns whether what this peer trains counts.
    """

    me: Member
    stage: int
    host: Host
    membership: Membership
    trained: Callable[[], int]
    is_member: Callable[[], bool]


class PipelineTrainer:
    """`protocols.base.Trainer` over one stage, and all else that a session and its checkpoints ask of a trainer.

    Attributes:
        host: with the members of this peer's stage: what the averaging and the sync of the stage use.
    """

    def __init__(self, remote: RemoteStage, peer: PipelinePeer, manifest: Manifest) -> None:
        """
        Args:
            remote: computes; its worker has started.
        """
        assert manifest.stages
        self._remote, self._peer, self._manifest = remote, peer, manifest
        self._stages = len(manifest.stages)
        self.host = replace(peer.host, members=StageMembers(peer.host.members, peer.membership, peer.stage, peer.me))
        self.layout = remote.layout
        self._work = LeasedStage(remote)
        self._abandoned: Counter[str] = Counter()
        self._reported = 0
        self._written = peer.trained()  # training rounds whose result the anchor has
        sizes, config = remote.sizes, manifest.config
        run = bytes.fromhex(manifest.run_id)
        self._settings = PipelineSettings(
            run, self._stages, config.recipe.batches, sizes.activation_bytes, sizes.target_bytes, sizes.logit_bytes
        )
        settings = Settings(config.codec, manifest.elements_of(peer.stage), incarnation=peer.me.incarnation)
        self._endpoint = ProtocolEndpoint(peer.host, settings)
        self._driver: PipelineDriver | None = None
        self._trainer = self._driving() if peer.stage == 0 else self._serving()
        remote.on_lost = self._trainer.void

    def _training(self) -> StageTraining:
        peer = self._peer
        return StageTraining(
            peer.me, peer.stage, self._remote, peer.is_member, self._watch, lambda: self._work.usual_seconds
        )

    def _driving(self) -> DrivingTrainer:
        membership = self._peer.membership
        driver = self._driver = PipelineDriver(self._endpoint, self._settings, self._work, membership, self._watch)
        self._outer = OuterClient(self._endpoint, self._settings, self._remote, membership)
        return DrivingTrainer(self._training(), driver, membership.announce_rounds)

    def _serving(self) -> ServingTrainer:
        stage, clock = self._peer.stage, StageClock(self._peer.membership)
        server = StageServer(
            self._endpoint, self._settings, stage, self._work, lambda: len(self._drivers()), self._watch
        )
        OuterServer(self._endpoint, self._settings, stage, self._remote, lambda: self._written)
        return ServingTrainer(self._training(), server, lambda: clock.rounds(self._drivers()))

    def _drivers(self) -> tuple[Member, ...]:
        return by_stage(self._peer.host.members.live(), self._peer.membership, self._stages)[0]

    def _watch(self, event: PipelineEvent) -> None:
        if event.kind == "abandoned":
            self._abandoned[_cause(event.why)] += 1
        elif event.kind == "stepped" and self._work.usual_seconds:
            self._peer.membership.announce_rate(1 / self._work.usual_seconds)

    # -- training -----------------------------------------------------------------------------------------------------

    async def train(
        self, key: RoundKey, cut: asyncio.Event, progress: Callable[[LocalProgress], None], surplus: bool = True
    ) -> LocalProgress:
        """Train until `cut` is set; see `protocols.base.Trainer`."""
        if self._peer.is_member():
            self._written = key.round  # skipped rounds write nothing, and yet the anchor has the result of all before
        return await self._trainer.train(key, cut, progress, surplus)

    async def read(self, into: Vector, fragment: int = 0) -> None:
        """Copy the local parameters out, between two jobs."""
        await self._trainer.read(into, fragment)

    async def write(self, source: Vector, fragment: int = 0, anchor: Vector | None = None, tokens: int = 0) -> None:
        """Replace the local parameters and their anchor, between two jobs."""
        await self._trainer.write(source, fragment, anchor, tokens)
        self._written = self._peer.trained()

    def anchor(self, fragment: int = 0) -> Vector:
        """The anchor itself; see `RemoteTrainer.anchor`."""
        return self._remote.anchor(fragment)

    # -- evaluation and text ------------------------------------------------------------------------------------------

    async def evaluate(self) -> float:
        """Held-out loss of the outer parameters of all stages; nan in other stages than 0, which have no data.

        Raises:
            WorkerError, TimeoutError: the worker or a stage was away.
        """
        if self._driver is None:
            return float("nan")
        try:
            return await self._outer.evaluate(self._written, loop_time() + EVALUATION_SECONDS)
        except LeaseLost as error:
            raise WorkerError(str(error)) from None

    async def generate(self, prompt: bytes, tokens: int, temperature: float = 0.0, seed: int = 0) -> bytes:
        """Continue `prompt` by `tokens` bytes; see `RemoteTrainer.generate`. Stage 0 only.

        Raises:
            WorkerError, TimeoutError: the task generates no text, or the worker or a stage was away.
        """
        gpt = self._manifest.config.gpt
        if self._driver is None or gpt is None:
            raise WorkerError("only stage 0 generates text, of the task gpt")
        deadline = loop_time() + EVALUATION_SECONDS
        logits = partial(self._logits, deadline=deadline)
        shape = ActivationShape(gpt.rows, gpt.context, gpt.width)
        try:
            return await generate(prompt, tokens, temperature, seed, logits, shape)
        except (LeaseLost, BadPayload, ValueError) as error:
            raise WorkerError(str(error)) from None

    async def _logits(self, tokens: bytes, position: int, deadline: float) -> bytes:
        return await self._outer.logits(tokens, position, self._written, deadline)

    # -- reports ------------------------------------------------------------------------------------------------------

    def waiting_reason(self) -> str:
        """Why this peer trains nothing now: the stages without a live peer; empty if there are none."""
        empty = self._driver.without_replicas if self._driver else () if self._drivers() else (0,)
        names = " and ".join(map(str, empty))
        return f"stage {names} has nobody: nothing is trained until a peer of it is back" if empty else ""

    def annotate(self, report: RoundReport) -> RoundReport:
        """The report with what only a pipeline knows, and with the bytes and the blame of its streams."""
        blamed, sent, received = self._endpoint.accounting.take()
        counted, self._reported = self._work.counted - self._reported, self._work.counted
        abandoned, self._abandoned = dict(self._abandoned), Counter()
        stage = self._peer.stage
        return replace(
            report,
            stage=stage,
            stages=self._stages,
            microbatches=counted,
            abandoned=abandoned,
            blamed={**report.blamed, **{blame.peer: blame.why for blame in blamed}},
            bytes_sent=report.bytes_sent + sent,
            bytes_received=report.bytes_received + received,
        )

    # -- the worker ---------------------------------------------------------------------------------------------------

    @property
    def threads(self) -> int:
        """Threads that the worker computes with."""
        return self._remote.threads

    @property
    def pid(self) -> int | None:
        """The worker's process id; None while there is none."""
        return self._remote.pid

    async def load(self, path: Path | None, position: int, threads: int = 0) -> None:
        """Have the worker load its optimiser's state; see `RemoteTrainer.load`."""
        await self._remote.load(path, position, threads)


def _cause(why: str) -> str:
    """A reason without the parts that differ from peer to peer, so that causes can be counted."""
    return why.partition(":")[0][:80]
