"""Text from a trained model, a piece at a time, fit for a terminal: strangers had a hand in the model."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator

from node.export.trained_model import TrainedError, TrainedModel
from node.tasks.gpt import Gpt

_OBEYED = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff]")
"""What a terminal obeys, but for the tab and the end of a line."""


def write(model: TrainedModel, prompt: bytes, tokens: int, temperature: float, seed: int) -> Iterator[str]:
    """Continue a prompt by so many bytes: the likeliest at temperature 0, else drawn from a seed.

    Raises:
        TrainedError: the model writes no text, or there is no prompt.
    """
    gpt = model.manifest.config.gpt
    if gpt is None:
        raise TrainedError(f"this run trains {model.manifest.config.task}, which writes no text: gpt does")
    if not prompt:
        raise TrainedError("the prompt is empty: give the beginning of a text")
    module = Gpt(gpt.shape)
    module.load_state_dict(dict(model.tensors))
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for byte in module.stream(prompt, tokens, temperature, seed):
        yield harmless(decoder.decode(bytes([byte])))
    yield harmless(decoder.decode(b"", final=True))


def harmless(text: str) -> str:
    """Without anything that a terminal obeys."""
    return _OBEYED.sub("\ufffd", text)
