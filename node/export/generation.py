"""Generate text from a trained model, piece by piece. The text is sanitised for terminals: the model is untrusted."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator

from node.export.fine_tuned import load_fine_tuned
from node.export.trained_model import TrainedError, TrainedModel
from node.tasks.gpt import Gpt

_OBEYED = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff]")
"""Control characters of a terminal, except tab and newline."""


def write(
    model: TrainedModel,
    prompt: bytes,
    tokens: int,
    temperature: float,
    seed: int,
    base: str | None = None,
    template: str = "",
) -> Iterator[str]:
    """Continue a prompt by `tokens` bytes or tokens: the likeliest at temperature 0, otherwise drawn with a seed."""
    gpt = model.manifest.config.gpt
    if not prompt:
        raise TrainedError("the prompt is empty: give the beginning of a text")
    if model.manifest.config.hf:
        tuned = load_fine_tuned(model, base, template)
        yield from map(harmless, tuned.continue_text(prompt.decode(errors="replace"), tokens, temperature, seed))
        return
    if gpt is None:
        task = model.manifest.config.task
        raise TrainedError(f"this run trains {task}, which generates no text: only gpt and hf do")
    module = Gpt(gpt.shape)
    module.load_state_dict(dict(model.tensors))
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for byte in module.stream(prompt, tokens, temperature, seed):
        yield harmless(decoder.decode(bytes([byte])))
    yield harmless(decoder.decode(b"", final=True))


def harmless(text: str) -> str:
    """Replace all control characters of a terminal."""
    return _OBEYED.sub("\ufffd", text)
