"""Tokens of texts and conversations, and which of them are targets: in conversations only the assistant's turns.

A template with `{% generation %}` says itself which tokens are the assistant's. With any other, the conversation is
rendered up to each of the assistant's turns: where those are no prefixes of the whole, there is no way to know, and the
data are refused. Nothing ever trains on all tokens of a conversation without saying so.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from node.tasks.hf.corpus import Document, Messages
from node.tasks.hf.foreign import foreign
from node.tasks.hf.settings import ModelError

_PIECE = 256 << 10
"""Characters that are tokenised at once: the tokenizer takes some 100 bytes of memory for a token meanwhile."""
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


def begin_tokens(tokenizer: Any) -> list[int]:
    """The token with which this tokenizer begins each text; empty if it adds none."""
    first: list[int] = tokenizer("a")["input_ids"][:1]
    return first if first == [tokenizer.bos_token_id] else []


class Encoder:
    """Turns documents into tokens and masks, by the tokenizer of a model."""

    def __init__(self, tokenizer: Any, is_chat: bool) -> None:
        """
        Raises:
            ModelError: conversations, and the tokenizer has no template for them.
        """
        self._tokenizer, self._is_chat, self._begin = tokenizer, is_chat, begin_tokens(tokenizer)
        if is_chat and not isinstance(tokenizer.chat_template, str):
            raise ModelError('this model has no chat template: take its chat version, or hf.format = "text"')
        self._marks = is_chat and bool(_GENERATION.search(tokenizer.chat_template))

    def encode(self, document: Document) -> tuple[list[int], list[int]]:
        """Tokens, and for each 1 if it is a target, else 0.

        Raises:
            ModelError: the template does not say which tokens are the assistant's.
        """
        if isinstance(document.content, str):
            return self._text(document.content, document.begins, document.ends)
        with foreign("this model's chat template cannot take a conversation of the data"):
            return self._by_marks(document.content) if self._marks else self._by_prefixes(document.content)

    def _text(self, text: str, begins: bool, ends: bool) -> tuple[list[int], list[int]]:
        ids, end = list(self._begin) if begins else [], self._tokenizer.eos_token_id
        for piece in _pieces(text):
            ids += self._tokenizer(piece, add_special_tokens=False, verbose=False)["input_ids"]
        ids += [end] if ends and end is not None else []
        return ids, [1] * len(ids)

    def _by_marks(self, messages: Messages) -> tuple[list[int], list[int]]:
        found = self._tokenizer.apply_chat_template(
            messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        return list(found["input_ids"]), list(found["assistant_masks"])

    def _by_prefixes(self, messages: Messages) -> tuple[list[int], list[int]]:
        whole = self._render(messages)
        spans = []
        for index, message in enumerate(messages):
            if message["role"] == "assistant":
                before = self._render(messages[:index], ask=True)
                after = self._render(messages[: index + 1])
                if not (whole.startswith(before) and whole.startswith(after) and len(before) <= len(after)):
                    raise ModelError(
                        "this model's chat template does not say which tokens are the assistant's: an answer is "
                        "rendered in another way once others follow; take a template with {% generation %}"
                    )
                spans.append((len(before), len(after)))
        found = self._tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        mask = [
            int(any(low <= begin and begin < end <= high for low, high in spans))
            for begin, end in found["offset_mapping"]
        ]
        return found["input_ids"], mask

    def _render(self, messages: Messages, ask: bool = False) -> str:
        if not messages:
            return ""
        text: str = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=ask)
        return text


def _pieces(text: str) -> Iterator[str]:
    """Parts of a text, which end where lines do if they can."""
    low = 0
    while low < len(text):
        high = low + _PIECE
        if high < len(text):
            high = text.rfind("\n", low, high) + 1 or high
        yield text[low:high]
        low = high
