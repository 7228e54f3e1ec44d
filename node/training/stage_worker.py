"""A worker that trains one stage of a pipeline. Its jobs are commands; activations travel in `ActivationSlots`.

    python -m node.training.stage_worker MEMORY SOCKET      # as node.training.worker, whose commands it has, too

    do: a JobKind, number, loss, stale  inputs: its payloads        -> done: JobResult; result: its payloads; or lost
    do: begin, round                                                -> done: LocalProgress
    do: step, round, seconds                                        -> done: [complete, tokens, LocalProgress or null]
    do: work                                                        -> done: LocalProgress

Each job of a microbatch counts as a step in the shared counters. A job whose input does not decode is refused and
changes nothing.
"""

from __future__ import annotations

import mmap
import os
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

from node.runtime.notes import warn
from node.tasks.checkpointing import checkpoint_blocks
from node.tasks.gpt_presets import Preset
from node.tasks.gpt_stage import ActivationShape, GptStageTask
from node.tasks.paced_stage import SIZES, PacedStage, WrongWeights
from node.tasks.partition import Partition
from node.tasks.spec import GptValues, PacedValues, WorkerSpec
from node.tasks.text import load
from node.training import worker
from node.training.activations import ActivationCodec
from node.training.build import Allocate, Job, device_of
from node.training.shared import Shared
from node.training.stage_learner import StageCompute, StageLearner
from node.training.stage_replica import StageSeconds
from node.training.trainer import as_json
from node.training.worker import CommandRejected, Worker
from protocols.base import BadPayload, Buffer
from protocols.pipeline.job import JobKind, LeaseLost, StageJob, StageSizes

FORWARD_SHARE = 1 / 3
"""Of the time that a paced stage takes for a microbatch."""
_KINDS = {kind.value: kind for kind in JobKind}


def codec_of(spec: WorkerSpec) -> ActivationCodec | None:
    """How the activations of a run's stages travel; None for those of the paced task, which are hashes."""
    values = spec.values
    if not isinstance(values, GptValues):
        return None
    assert spec.stage
    shape = ActivationShape(values.rows, values.shape.context, values.shape.width)
    return ActivationCodec(shape, spec.stage.activations, spec.stage.gradients)


def sizes_of(codec: ActivationCodec | None) -> StageSizes:
    return codec.sizes if codec else SIZES


def build_stage(spec: WorkerSpec, allocate: Allocate, resume: bool) -> Job:
    """Load data and stage; see `node.training.build.build`. The job's `rest_seconds` are for each microbatch."""
    values, stage = spec.values, spec.stage
    assert stage is not None
    if isinstance(values, PacedValues):
        tokens = max(1, values.tokens_per_step // spec.recipe.batches)
        paced = PacedStage(stage.elements, spec.stream_seed, tokens, stage.replica, allocate, resume)
        return Job(paced, values.step_seconds / spec.recipe.batches)
    codec = codec_of(spec)
    assert isinstance(values, GptValues) and codec
    device = device_of(spec.device)
    if spec.precision in ("bfloat16", "float16") and not resume:
        warn(f"a stage computes in float32: --precision {spec.precision} is ignored")
    preset, partition = Preset(values.shape, values.rows, spec.recipe), Partition((), stage.bounds)
    text = load(spec.data, spec.held_out, spec.given_data(resume)) if stage.number == 0 else None
    task = GptStageTask(preset, partition, stage.number, spec.weights_seed, text)
    task.module.to(device)
    if spec.checkpointing:
        checkpoint_blocks(task.module.model.layers.values())
    place, resume = (allocate, resume) if device == "cpu" else (None, False)
    learner = StageLearner(task, spec.recipe, codec, spec.stream_seed, place, resume)
    if spec.checkpointing:
        learner.keep_graphs(0)
    return Job(learner, held_out=text.held_out.numpy().tobytes() if text else b"")


class ActivationSlots:
    """Two inputs of a job, then its result: one unnamed file that a peer and its worker share.

    Only one job runs at a time; the peer fills the inputs and reads the result inside the job's turn.
    """

    def __init__(self, descriptor: int, sizes: StageSizes) -> None:
        slot = max(sizes.activation_bytes, sizes.gradient_bytes, sizes.target_bytes, sizes.logit_bytes)
        total = 3 * slot + sizes.target_bytes
        if os.fstat(descriptor).st_size < total:
            os.ftruncate(descriptor, total)
        memory = memoryview(mmap.mmap(descriptor, total))
        self._inputs = memory[:slot], memory[slot : 2 * slot]
        self._result = memory[2 * slot :]

    def put(self, payloads: Iterable[Buffer]) -> None:
        for slot, payload in zip(self._inputs, payloads, strict=False):
            slot[: len(payload)] = payload

    def take(self, sizes: Iterable[int]) -> tuple[Buffer, ...]:
        """Valid until they are filled again."""
        return tuple(slot[:size] for slot, size in zip(self._inputs, sizes, strict=False))

    def answer(self, payloads: Iterable[Buffer]) -> None:
        low = 0
        for payload in payloads:
            self._result[low : low + len(payload)] = payload
            low += len(payload)

    def result(self, sizes: Iterable[int]) -> tuple[bytes, ...]:
        found, low = [], 0
        for size in sizes:
            found.append(bytes(self._result[low : low + size]))
            low += size
        return tuple(found)


class StageWorker(Worker):
    build = staticmethod(build_stage)

    def __init__(self, job: Job, shared: Shared, spec: WorkerSpec, tell: Callable[[str, Any], None]) -> None:
        assert spec.stage is not None
        learner: Any = job.learner
        self._learner: StageCompute = learner
        self._seconds = StageSeconds(FORWARD_SHARE * job.rest_seconds, (1 - FORWARD_SHARE) * job.rest_seconds)
        super().__init__(job, shared, spec, tell)
        self._sizes = sizes_of(codec_of(spec))
        self._slots = ActivationSlots(spec.stage.slots, self._sizes)
        self._round = -1

    def carry_out(self, do: str, *, carried: int | None = None, **fields: Any) -> Any:
        if do in _KINDS:
            do, fields = "run", fields | {"kind": _KINDS[do]}
        try:
            return super().carry_out(do, carried=carried, **fields)
        except (BadPayload, WrongWeights) as error:
            raise CommandRejected(str(error)) from error

    def do_run(self, kind: JobKind, number: int, loss: float, stale: bool) -> dict[str, Any]:
        try:
            time.sleep(self._seconds.of(kind))
            if kind is JobKind.DRAW:
                self._shared.claim(self._learner.position + 1)
            inputs = self._slots.take(map(self._sizes.of, kind.takes))
            result = self._learner.run(StageJob(kind, inputs, number, loss, stale), self._anchor)
            self._slots.answer(result.payloads)
            return {"given": len(result.payloads), "number": result.number, "loss": result.loss}
        except LeaseLost as lost:
            return {"lost": str(lost)}
        finally:
            if not kind.is_outer:
                self._shared.stepped()

    # -- the weights --------------------------------------------------------------------------------------------------

    def do_begin(self, round: int) -> dict[str, Any]:
        self._round = round
        self._local_training.begin(round)
        return as_json(self._local_training.work())

    def do_step(self, round: int, seconds: float) -> tuple[bool, int, dict[str, Any] | None]:
        local_training = self._local_training
        if round != self._round:  # this worker has replaced the one that began the round
            self.do_begin(round)
        local_training.step()
        local_training.spend(seconds)
        due = local_training.due()
        return local_training.complete, local_training.tokens, as_json(local_training.work()) if due else None

    def do_work(self) -> dict[str, Any]:
        if self._apart:
            self._shared.local.copy_(self._local_training.learner.vector)
        return as_json(self._local_training.work())

    def _take(self, carried: int) -> None:
        """The peer has written the parameters: what was accumulated belongs to the old ones."""
        super()._take(carried)
        self._learner.discard()


def main(arguments: list[str]) -> int:
    return worker.main(arguments, StageWorker)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
