"""What a peer of a run with stages trains with: its part of the pipeline."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial

import torch

from node.config.manifest import Manifest
from node.membership.membership import Membership
from node.reporting.report import RoundReport
from node.session.round_evaluator import RoundEvaluator
from node.tasks.gpt import next_token
from node.tasks.gpt_presets import VOCABULARY
from node.tasks.gpt_stage import ActivationShape
from node.training.process import WorkerError
from node.training.remote import SAMPLE_PROMPT
from node.training.remote_stage import RemoteStage
from node.training.stage_replica import LeasedStage, OuterVersion
from node.training.stage_trainer import DrivingTrainer, ServingTrainer, StageTraining
from protocols.aio import loop_time, run_with_helper
from protocols.base import BadPayload, Buffer, Host, Member, Settings
from protocols.history.chain import UNSETTLED, Chain
from protocols.pipeline.backups import RENEW_ROUNDS
from protocols.pipeline.driving import PipelineDriver
from protocols.pipeline.held_out import HeldOutLoss, usual_samples
from protocols.pipeline.job import LeaseLost, Payload, VersionPassed
from protocols.pipeline.serving import StageServer
from protocols.pipeline.settings import PipelineEvent, PipelineSettings
from protocols.pipeline.stages import StageClock, StageMembers, by_stage, lacks_majority
from protocols.pipeline.ways import Chains, Way
from protocols.streams.endpoint import ProtocolEndpoint

LAST_DRIVER_SECONDS = 60.0  # A stage whose own rounds are over leaves if stage 0 has no live peer for this time
EVALUATION_SECONDS, TEXT_SECONDS = 600.0, 60.0  # longest time for one
EMPTY_SECONDS, LOOK_SECONDS = 5.0, 0.25
"""An evaluation ends sooner if a stage has no live peer for `EMPTY_SECONDS`. It looks every `LOOK_SECONDS`."""

BACKUP_SECONDS = 420.0
"""Longest wait for a backup from which this stage is to begin again: until it is lost, and a holder has come."""


class PipelineSession:
    """One stage's `trainer`, and all else that a session asks of it.

    `remote`, whose worker has started, computes. `host` is of the members of all stages, `chain` of this peer's stage.
    `upload` is what this peer's line sends, bytes/s; 0 if it is not known.
    """

    sample_prompt = SAMPLE_PROMPT

    def __init__(
        self,
        remote: RemoteStage,
        manifest: Manifest,
        *,
        me: Member,
        stage: int,
        host: Host,
        membership: Membership,
        chain: Chain,
        is_leaving: Callable[[], bool],
        upload: Callable[[], float],
        say: Callable[[str], None],
        refilled: Callable[[], Mapping[int, int]] = dict,
    ) -> None:
        """`refilled` returns the rounds that were lost in each stage that has begun again."""
        assert manifest.stages
        self._remote, self._manifest, self._me, self.stage = remote, manifest, me, stage
        self._membership, self._chain, self._is_leaving = membership, chain, is_leaving
        self._refilled = refilled
        self._live, self._stages = host.members.live, len(manifest.stages)
        # what the averaging and the sync of the stage use
        self.host = replace(host, members=StageMembers(host.members, membership, stage, me))
        self.change: Callable[[], int | None] = lambda: 0  # as `OuterLoop.change`
        self._work = LeasedStage(remote, self._version)
        self._abandoned: Counter[str] = Counter()
        self._reported = 0, 0.0
        self._driven_at = self._began_at = loop_time()
        self._clock: Callable[[], int] = lambda: 0
        config, run = manifest.config, bytes.fromhex(manifest.run_id)
        self._settings = PipelineSettings(
            run, self._stages, config.recipe.batches, remote.sizes, config.recipe.lookahead or 0
        )
        settings = Settings(config.codec, manifest.elements_of(stage), incarnation=me.incarnation)
        self._endpoint = ProtocolEndpoint(host, settings)
        self._driver: PipelineDriver | None = None
        self.evaluator = RoundEvaluator(self._evaluate)
        usual_seconds = lambda: self._work.usual_seconds  # noqa: E731
        training = StageTraining(
            me, stage, remote, self._is_member, self._lacks_majority, self._watch, job_seconds=usual_seconds
        )
        on_way = lambda way: say(way.line)  # noqa: E731
        self.trainer = self._driving(training, upload, on_way) if stage == 0 else self._serving(training)
        remote.on_lost, remote.on_restored = self.trainer.lose, self.trainer.resume

    def _is_member(self) -> bool:
        """Whether what this peer trains counts."""
        return self._me in self._chain.head.roster and not self._chain.lacks_state

    def _lacks_majority(self) -> bool:
        return lacks_majority(self._chain.head.roster, self._live())

    def awaits_backup(self) -> bool:
        """Whether the stage had better begin again from a backup: a live peer's is newer by more rounds than a refill
        loses. Only for a while, since perhaps no holder can leave its own stage.
        """
        held = [each.backups.get(self.stage, 0) for each in self._membership.contacts() if each.here]
        is_newer = max(held, default=0) > self._chain.trained + RENEW_ROUNDS
        return is_newer and loop_time() < self._began_at + BACKUP_SECONDS

    def _trained(self) -> int:
        return settled_rounds(self._chain)

    def _version(self) -> OuterVersion | None:
        change = self.change()
        return None if change is None else OuterVersion(self._trained(), change)

    def _check(self, data: Buffer, payload: Payload) -> None:
        """Raises `BadPayload` if what another replica gave does not decode."""
        if self._remote.codec:
            self._remote.codec.check(data, payload)

    def _driving(
        self, training: StageTraining, upload: Callable[[], float], on_way: Callable[[Way], None]
    ) -> DrivingTrainer:
        membership = self._membership
        driver = self._driver = PipelineDriver(
            self._endpoint,
            self._settings,
            work=self._work,
            directory=membership,
            check=self._check,
            chains=Chains.AUTO,
            upload=upload,
            job_seconds=training.job_seconds,
            on_way=on_way,
            watch=self._watch,
        )
        return DrivingTrainer(training, driver, membership.announce_rounds)

    def _serving(self, training: StageTraining) -> ServingTrainer:
        stage, clock = self.stage, StageClock(self._membership)
        server = StageServer(
            self._endpoint,
            self._settings,
            stage=stage,
            work=self._work,
            drivers=lambda: len(self._drivers()),
            trained=self._trained,
            check=self._check,
            watch=self._watch,
        )
        self._clock = lambda: clock.rounds(self._drivers(), loop_time())
        return ServingTrainer(training, server.admission, self._clock, self._manifest.config.recipe.rounds)

    def _drivers(self) -> tuple[Member, ...]:
        return by_stage(self._live(), self._membership, self._stages)[0]

    def _watch(self, event: PipelineEvent) -> None:
        if event.kind == "abandoned":
            self._abandoned[_cause(event.why)] += 1
        elif event.kind == "stepped" and self._work.usual_seconds:
            self._membership.announce_rate(1 / self._work.usual_seconds)

    # -- evaluation and text ------------------------------------------------------------------------------------------

    @property
    def evaluates(self) -> bool:
        """Only stage 0 has data."""
        return self._driver is not None

    def begin_evaluation(self, report: RoundReport) -> None:
        """Evaluate the outer parameters that this round has led to, beside the next round."""
        recipe = self._manifest.config.recipe
        self.evaluator.start(report, HeldOutLoss(self._trained(), usual_samples(recipe.inner_steps, recipe.batches)))

    async def _evaluate(self, found: HeldOutLoss) -> None:
        """Raises WorkerError, TimeoutError if the worker or a stage was away; `VersionPassed`."""
        assert self._driver is not None
        try:
            evaluation = self._driver.evaluate(found, loop_time() + EVALUATION_SECONDS)
            await run_with_helper(evaluation, self._until_pointless())
        except VersionPassed:
            raise
        except LeaseLost as error:
            raise WorkerError(str(error)) from None

    async def _until_pointless(self) -> None:
        """Raises `TimeoutError` if this peer leaves, or a stage has been without a live peer for some seconds."""
        assert self._driver is not None
        looks = 0
        while looks < EMPTY_SECONDS / LOOK_SECONDS:
            if self._is_leaving():
                raise TimeoutError("this peer leaves")
            looks = looks + 1 if self._driver.without_replicas else 0
            await asyncio.sleep(LOOK_SECONDS)
        raise TimeoutError(self.waiting_reason())

    async def generate(self, prompt: bytes, tokens: int, temperature: float = 0.0, seed: int = 0) -> bytes:
        """See `RemoteTrainer.generate`; stage 0 only. Raises WorkerError, TimeoutError."""
        gpt = self._manifest.config.gpt
        if self._driver is None or gpt is None:
            raise WorkerError("only stage 0 generates text, of the task gpt")
        deadline = loop_time() + TEXT_SECONDS
        logits = partial(self._logits, self._driver, deadline)
        shape = ActivationShape(gpt.rows, gpt.context, gpt.width)
        try:
            text = generate(prompt, tokens, temperature, seed, logits, shape)
            return await run_with_helper(text, self._until_pointless())
        except (LeaseLost, BadPayload, ValueError) as error:
            raise WorkerError(str(error)) from None

    async def _logits(self, driver: PipelineDriver, deadline: float, tokens: bytes, position: int) -> bytes:
        return await driver.logits(tokens, position, self._trained(), deadline)

    # -- the run's end ------------------------------------------------------------------------------------------------

    def is_run_over(self) -> bool:
        """Whether stage 0 needs this peer no longer, once this peer's own rounds are over.

        If stage 0 has no live peer, it is over after `LAST_DRIVER_SECONDS`: its peers may have left long ago.
        """
        if self.stage == 0:
            return True
        now, rounds = loop_time(), self._clock()
        if self._drivers():
            self._driven_at = now
        return rounds >= self._manifest.config.recipe.rounds or now - self._driven_at > LAST_DRIVER_SECONDS

    # -- reports ------------------------------------------------------------------------------------------------------

    def waiting_reason(self) -> str:
        """Why this peer trains nothing now: the stages without a live peer; empty if there are none."""
        empty = self._driver.without_replicas if self._driver else () if self._drivers() else (0,)
        names = " and ".join(map(str, empty))
        verb = "has" if len(empty) == 1 else "have"
        return f"stage {names} {verb} no live peer; training waits until one joins" if empty else ""

    def announce_decided(self) -> None:
        """In stage 0, announce how many rounds have been decided.

        Not every cut announces its round. The evaluation that follows waits for the other stages' outer steps, and
        those for this; after the run's last round, nothing else would say that its training is over.
        """
        if self._driver:
            self._membership.announce_rounds(self._trained())

    def annotate(self, report: RoundReport) -> RoundReport:
        """The report with what only a pipeline knows, and with the bytes and the blame of its streams."""
        blamed, sent, received = self._endpoint.accounting.take()
        counted, seconds = self._work.counted - self._reported[0], self._work.computed_seconds - self._reported[1]
        self._reported = self._work.counted, self._work.computed_seconds
        abandoned, self._abandoned = dict(self._abandoned), Counter()
        return replace(
            report,
            stage=self.stage,
            stages=self._stages,
            seconds_compute=seconds,
            microbatches=counted,
            abandoned=abandoned,
            refilled={str(stage): rounds for stage, rounds in self._refilled().items()},
            blamed={**report.blamed, **{blame.peer: blame.why for blame in blamed}},
            bytes_sent=report.bytes_sent + sent,
            bytes_received=report.bytes_received + received,
        )

    @property
    def threads(self) -> int:
        return self._remote.threads


def settled_rounds(chain: Chain) -> int:
    """Training rounds whose result a peer's outer parameters have; 0 if it lacks the head's state.

    Skipped rounds count: they have changed nothing. The last one does not count while its outer step is under way.
    """
    return 0 if chain.lacks_state else chain.trained - (chain.head.state_root == UNSETTLED)


def _cause(why: str) -> str:
    """A reason without the parts that differ from peer to peer, so that causes can be counted."""
    return why.partition(":")[0][:80]


async def generate(
    prompt: bytes,
    tokens: int,
    temperature: float,
    seed: int,
    logits: Callable[[bytes, int], Awaitable[bytes]],
    shape: ActivationShape,
) -> bytes:
    """Continue `prompt` by `tokens` bytes, as `Gpt.generate` does. Of a long prompt only the last `positions` are used.

    The context travels through the pipeline as row 0 of a microbatch, byte after byte; the rest is zeros, which no used
    position sees. `logits` takes the inputs of one microbatch, uint8 (rows * positions), and a position, counted from
    1; it returns that position's logits, float32 (rows, 256). Raises `ValueError` if the prompt is empty, and
    `BadPayload` if the logits have a wrong size, or are not finite.
    """
    if not prompt:
        raise ValueError("the prompt is empty")
    generator = torch.Generator().manual_seed(seed)
    text = bytearray(prompt[-shape.positions :])
    start = len(text)
    for _ in range(tokens):
        seen = bytes(text[-shape.positions :])
        answer = await logits(seen.ljust(shape.tokens, b"\0"), len(seen))
        text.append(next_token(_first_row(answer, shape.rows), temperature, generator))
    return bytes(text[start:])


def _first_row(logits: Buffer, rows: int) -> torch.Tensor:
    """float32 (256)."""
    if len(logits) != 4 * rows * VOCABULARY:
        raise BadPayload(f"logits of {len(logits)} bytes where {4 * rows * VOCABULARY} are due")
    row = torch.frombuffer(bytearray(logits), dtype=torch.float32)[:VOCABULARY]
    if not bool(torch.isfinite(row).all()):
        raise BadPayload("logits that are not finite")
    return row
