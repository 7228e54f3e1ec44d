"""Generate text from a trained model, piece by piece. The text is sanitised for terminals: the model is untrusted."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator

from node.export.trained_model import TrainedError, TrainedModel
from node.tasks.gpt import Gpt

_OBEYED = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff]")
"""Control characters of a terminal, except tab and newline."""


def write(model: TrainedModel, prompt: bytes, tokens: int, temperature: float, seed: int) -> Iterator[str]:
    """Continue a prompt by `tokens` bytes: the likeliest at temperature 0, otherwise drawn with a seed.

    Raises:
        TrainedError: the model generates no text, or the prompt is empty.
    """
    gpt = model.manifest.config.gpt
    if gpt is None:
        raise TrainedError(f"this run trains {model.manifest.config.task}, which generates no text: only gpt does")
    if not prompt:
        raise TrainedError("the prompt is empty: give the beginning of a text")
    module = Gpt(gpt.shape)
    module.load_state_dict(dict(model.tensors))
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for byte in module.stream(prompt, tokens, temperature, seed):
        yield harmless(decoder.decode(bytes([byte])))
    yield harmless(decoder.decode(b"", final=True))


def harmless(text: str) -> str:
    """Replace all control characters of a terminal."""
    return _OBEYED.sub("\ufffd", text)
