"""Builds the job of a worker that trains one stage. Only runs with stages load this."""

from __future__ import annotations

from dataclasses import dataclass

from node.tasks.gpt_presets import VOCABULARY, Preset
from node.tasks.gpt_stage import GptStageTask
from node.tasks.paced_stage import ACTIVATION_BYTES, TARGET_BYTES, PacedStage
from node.tasks.partition import Partition
from node.tasks.spec import GptValues, PacedValues, WorkerSpec
from node.tasks.text import load
from node.training.build import Allocate, device_of
from node.training.inline_stage import StageCompute
from node.training.stage_learner import ActivationCodec, StageLearner
from protocols.registry import ACTIVATION_CODECS

FORWARD_SHARE = 1 / 3
"""Of the time that a paced stage takes for a microbatch."""


@dataclass(frozen=True, slots=True)
class StageSizes:
    """Sizes of what a stage takes and gives, in bytes, and the tokens of a microbatch."""

    activation_bytes: int
    target_bytes: int
    logit_bytes: int
    tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class StageJob:
    """A stage that is ready for training.

    Attributes:
        rest_seconds: time to sleep for each microbatch: a part before its forward, the rest before its backward.
        held_out: the evaluation sample; empty in stages other than 0, and if the task has none.
    """

    learner: StageCompute
    rest_seconds: float = 0.0
    held_out: bytes = b""
    timeout_seconds: float | None = None


def stage_sizes(spec: WorkerSpec) -> StageSizes:
    """The sizes that all stages of a run share."""
    values, stage = spec.values, spec.stage
    assert stage is not None
    if isinstance(values, GptValues):
        tokens = values.rows * values.shape.context
        activation_bytes = tokens * values.shape.width * ACTIVATION_CODECS[stage.activations]
        return StageSizes(activation_bytes, 4 * tokens, 4 * values.rows * VOCABULARY, tokens)
    assert isinstance(values, PacedValues)
    return StageSizes(ACTIVATION_BYTES, TARGET_BYTES, 0, max(1, values.tokens_per_step // spec.recipe.batches))


def build_stage(spec: WorkerSpec, allocate: Allocate, resume: bool) -> StageJob:
    """Load data and stage; see `node.training.build.build`.

    Raises:
        ValueError: data or device are missing or unsuitable. The message is one line.
    """
    values, stage, tokens = spec.values, spec.stage, stage_sizes(spec).tokens
    assert stage is not None
    if isinstance(values, PacedValues):
        paced = PacedStage(stage.elements, spec.stream_seed, tokens, stage.replica, allocate, resume)
        return StageJob(paced, values.step_seconds / spec.recipe.batches)
    assert isinstance(values, GptValues)
    device = device_of(spec.device)
    preset, partition = Preset(values.shape, values.rows, spec.recipe), Partition((), stage.bounds)
    text = load(spec.data, spec.held_out, spec.given_data(resume)) if stage.number == 0 else None
    task = GptStageTask(preset, partition, stage.number, spec.weights_seed, text)
    task.module.to(device)
    place, resume = (allocate, resume) if device == "cpu" else (None, False)
    codec = ActivationCodec(task.shape, stage.activations)
    learner = StageLearner(task, spec.recipe, codec, spec.stream_seed, place, resume)
    return StageJob(learner, held_out=text.held_out.numpy().tobytes() if text else b"")
