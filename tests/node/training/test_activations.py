"""What travels between stages is refused or decodes to finite numbers, whatever the bytes are."""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Callable

import pytest
import torch

from node.tasks.gpt_presets import GptConfig, Preset
from node.tasks.gpt_stage import ActivationShape, GptStageTask
from node.tasks.partition import Partition
from node.tasks.recipe import Recipe
from node.training.activations import CODECS, ActivationCodec
from node.training.stage_learner import StageLearner
from protocols.base import BadPayload
from protocols.pipeline.job import JobKind, LeaseLost, Payload, StageJob
from tests.support.long import long

SHAPE = ActivationShape(rows=2, positions=8, width=16)
FLOATS = (0.0, -0.0, 1e-45, 1e-38, 1.0, -1.0, 2e36, 2.7e36, 3.4e38, -1e30, math.inf, -math.inf, math.nan)


@pytest.mark.parametrize("name", CODECS)
def test_codec_keeps_numbers_and_refuses_what_is_not_finite(name: str) -> None:
    codec = ActivationCodec(SHAPE, name)
    x = torch.randn(2, 8, 16) * torch.logspace(-30, 30, 16).view(2, 8, 1)
    x[0, 0], x[0, 1] = 0.0, 1e-44
    data = codec.encode(x)
    assert len(data) == codec.sizes.activation_bytes == codec.sizes.gradient_bytes
    error = (codec.decode(data) - x).abs()
    assert bool((error <= 0.004 * x.abs().amax(2, keepdim=True) + 1e-44).all())
    for value in (math.nan, math.inf, -math.inf):
        x[1, 2, 3] = value
        with pytest.raises(LeaseLost, match="not finite"):
            codec.encode(x)
    with pytest.raises(BadPayload, match="an activation of 7 bytes"):
        codec.decode(bytes(7))
    with pytest.raises(BadPayload, match="vocabulary"):
        codec.decode_targets(codec.encode_targets(torch.full((2, 8), 256)), 256)


def test_int8_has_half_the_bytes_and_gradients_their_own_codec() -> None:
    sizes = ActivationCodec(ActivationShape(1, 128, 64), "int8", "bf16").sizes
    assert (sizes.activation_bytes, sizes.gradient_bytes) == (128 * (64 + 4), 128 * 64 * 2)
    codec = ActivationCodec(SHAPE, "bf16", "int8")
    data = codec.encode(torch.ones(2, 8, 16), Payload.GRADIENT)
    assert len(data) == 2 * 8 * (16 + 4) and bool((codec.decode(data, Payload.GRADIENT) == 1).all())


@pytest.mark.parametrize(
    ("at", "value", "why"),
    [
        (0, struct.pack("f", math.nan), "a scale"),
        (0, struct.pack("f", math.inf), "a scale"),
        (0, struct.pack("f", -1.0), "a scale"),
        (0, struct.pack("f", 3e38), "a scale"),
        (0, bytes(4), "scale is 0"),
        (64, b"\x80", "the code -128"),
    ],
)
def test_int8_that_no_sender_makes_is_refused(at: int, value: bytes, why: str) -> None:
    codec = ActivationCodec(SHAPE, "int8")
    data = bytearray(codec.encode(torch.ones(2, 8, 16)))
    data[at : at + len(value)] = value
    with pytest.raises(BadPayload, match=why):
        codec.check(data, Payload.GRADIENT)


def stages(codec: ActivationCodec) -> list[StageLearner]:
    """The middle and the last stage of three."""
    recipe = Recipe(5, 1, 1e-2, 0.9, 0.5)
    preset = Preset(GptConfig(layers=1, width=16, heads=2, context=8), rows=2, recipe=recipe)
    tasks = [GptStageTask(preset, Partition((), (0, 1, 2, 3)), stage) for stage in (1, 2)]
    return [StageLearner(task, recipe, codec) for task in tasks]


def hostile(rng: random.Random, honest: Callable[[], bytes]) -> bytes:
    """Noise, or an honest payload with some floats or bytes overwritten, or all of it by one float."""
    data = bytearray(honest())
    match rng.randrange(4):
        case 0:
            return rng.randbytes(len(data) + rng.choice((0, 0, 0, -1, 1)))
        case 1:
            return struct.pack("f", rng.choice(FLOATS)) * (len(data) // 4)
        case 2:
            for _ in range(rng.randint(1, 8)):
                at = 4 * rng.randrange(len(data) // 4)
                data[at : at + 4] = struct.pack("f", rng.choice(FLOATS))
        case _:
            for _ in range(rng.randint(1, 8)):
                data[rng.randrange(len(data))] = rng.choice((0, 127, 128, 255))
    return bytes(data)


@pytest.mark.parametrize("payloads", (200, *long(10_000)))
@pytest.mark.parametrize("name", CODECS)
def test_hostile_payload_is_refused_or_computed(name: str, payloads: int) -> None:
    """No error but those two; what a stage then gives decodes, and its weights stay finite."""
    codec, rng = ActivationCodec(SHAPE, name), random.Random(payloads)
    middle, last = stages(codec)
    targets, refused = codec.encode_targets(torch.zeros(2, 8)), 0

    def honest() -> bytes:
        return codec.encode(torch.randn(2, 8, 16))

    torch.manual_seed(0)
    for number in range(payloads):
        data = hostile(rng, honest)
        kind = rng.choice((JobKind.FORWARD, JobKind.BACKWARD, JobKind.LOSS, JobKind.OUTER_FORWARD))
        taken = {JobKind.LOSS: (data, targets), JobKind.BACKWARD: (honest(), data)}.get(kind, (data,))
        try:
            for given in (last if kind is JobKind.LOSS else middle).run(StageJob(kind, taken)).payloads:
                codec.check(given, kind.gives[0])
        except BadPayload:
            refused += 1
        except LeaseLost:
            pass
        if number % 5 == 0:
            middle.step(0, number), last.step(0, number)
            assert bool(torch.isfinite(middle.vector).all() and torch.isfinite(last.vector).all())
    assert payloads / 4 < refused < payloads
