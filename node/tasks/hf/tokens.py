"""Tokens of a text: the same whether it is tokenised at once or in parts, and with special tokens only where meant.

A tokenizer looks for its special tokens in every text. Those that a person's text spells stay text here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

Span: TypeAlias = tuple[int, int]
"""Characters of a text that a token stands for, from and up to."""

WINDOW, OVERLAP = 256 << 10, 4 << 10
"""Characters that are tokenised at once: a tokenizer takes some 100 bytes of memory for a token meanwhile. Windows
overlap, because a word or a space at a border has other tokens than inside."""
_AGREED = 16
_GUARDS = ("\n", "x", ".", " ")
_PRIVATE = 0xF0000
"""Unicode's private use area: no text means anything by these characters."""


def encode(tokenizer: Any, text: str, literal: bool = True) -> tuple[list[int], list[Span]]:
    """Tokens of a text without those that begin or end it, and what each stands for.

    Args:
        literal: special tokens that the text spells are text.
    """
    ids, spans = _encode(tokenizer, text[:WINDOW], literal)
    done, overlap = WINDOW, OVERLAP
    while done < len(text):
        low = max(0, done - overlap)
        found, places = _encode(tokenizer, text[low : done + WINDOW], literal)
        places = [(begin + low, end + low) for begin, end in places]
        if low == 0:
            ids, spans = found, places
        elif cut := _agreement(ids, spans, found, places, low):
            ids, spans = ids[: cut[0]] + found[cut[1] :], spans[: cut[0]] + places[cut[1] :]
        else:
            overlap *= 4
            continue
        done, overlap = done + WINDOW, OVERLAP
    return ids, spans


def _encode(tokenizer: Any, text: str, literal: bool) -> tuple[list[int], list[Span]]:
    found = tokenizer(
        text, add_special_tokens=False, return_offsets_mapping=True, verbose=False, split_special_tokens=literal
    )
    ids, spans = list(found["input_ids"]), [(int(begin), int(end)) for begin, end in found["offset_mapping"]]
    if literal and (spelled := set(ids) & (set(tokenizer.all_special_ids) - {tokenizer.unk_token_id})):
        return _without(tokenizer, text, spelled, (ids, spans))
    return ids, spans


def _without(
    tokenizer: Any, text: str, spelled: set[int], found: tuple[list[int], list[Span]]
) -> tuple[list[int], list[Span]]:
    """The same tokens with those of two parts in place of a special one.

    Unigram models have special tokens among their pieces, and find them in a text without looking for them.
    """
    ids, spans = list[int](), list[Span]()
    for token, (begin, end) in zip(*found, strict=True):
        parts = [token]
        if token in spelled and end - begin > 1:
            parts = encode_on(tokenizer, text[begin : begin + 1]) + encode_on(tokenizer, text[begin + 1 : end])
        ids += parts
        spans += [(begin, end)] * len(parts)
    return ids, spans


def _agreement(
    ids: list[int], spans: list[Span], found: list[int], places: list[Span], low: int
) -> tuple[int, int] | None:
    """Where to go over from the first tokens to the others, which begin at `low`: in the middle of many equal ones."""
    first = next((at for at, (begin, _) in enumerate(spans) if begin > low), len(spans))
    where = {(*span, token): at for at, (span, token) in enumerate(zip(places, found, strict=True))}
    run = 0
    for old in range(first, len(ids)):
        new = where.get((*spans[old], ids[old]))
        follows = run and new is not None and old and where.get((*spans[old - 1], ids[old - 1])) == new - 1
        run = run + 1 if follows else int(new is not None)
        if run == 2 * _AGREED:
            assert new is not None
            old, new = old - _AGREED, new - _AGREED
            while spans[old][0] < spans[old - 1][1]:  # several tokens of one character
                old, new = old - 1, new - 1
            return old, new
    return None


def encode_on(tokenizer: Any, text: str) -> list[int]:
    """Tokens of a text that continues another, after the end of a line: without a space that some begin texts with."""
    for guard in _GUARDS:
        ids, spans = encode(tokenizer, guard + text)
        first = next((at for at, (begin, _) in enumerate(spans) if begin >= len(guard)), len(ids))
        if all(end <= len(guard) for _, end in spans[:first]):
            return ids[first:]
    return encode(tokenizer, text)[0]


class Marks:
    """Characters that stand for special tokens which a person's text spells, until the text is tokenised."""

    def __init__(self, special: list[str], others: list[str]) -> None:
        """
        Args:
            special: the tokenizer's special tokens.
            others: those that it was given beside them, such as tags around thoughts.
        """
        names = sorted({*special, *others}, key=lambda each: (-len(each), each))
        self.by_name = {name: chr(_PRIVATE + number) for number, name in enumerate(names) if name}
        self.texts = {mark: name for name, mark in self.by_name.items()}
        self._special = {name for name in special if name}

    def put(self, value: Any, all_tokens: bool) -> Any:
        """Put marks into all texts of a JSON value.

        Args:
            all_tokens: into an answer only those of special tokens: it may hold tags that the model writes.
        """
        if isinstance(value, dict):
            return {name: self.put(each, all_tokens) for name, each in value.items()}
        if isinstance(value, list):
            return [self.put(each, all_tokens) for each in value]
        if not isinstance(value, str):
            return value
        for name, mark in self.by_name.items():
            if (all_tokens or name in self._special) and name in value:
                value = value.replace(name, mark)
        return value

    def restored(self, text: str) -> str:
        """The text without marks."""
        return text.translate({ord(mark): name for mark, name in self.texts.items()})


def encode_marked(tokenizer: Any, text: str, marks: Mapping[str, str]) -> tuple[list[int], list[Span]]:
    """Tokens of a text in which special tokens count, except those for which a mark stands.

    Args:
        marks: mark -> what it stands for.
    """
    ids, spans = encode(tokenizer, text, literal=False)
    places = [at for at, each in enumerate(text) if each in marks]
    if not places:
        return ids, spans
    found, where, at = list[int](), list[Span](), 0
    while at < len(ids) or places:
        begin, end = spans[at] if at < len(ids) else (len(text), len(text))
        if places and places[0] < begin:  # a normaliser has removed the mark
            begin = end = places[0]
            end += 1
        elif not places or places[0] >= end:
            found.append(ids[at])
            where.append(spans[at])
            at += 1
            continue
        while at < len(ids) and spans[at][0] < end:
            end, at = max(end, spans[at][1]), at + 1
        places = [each for each in places if each >= end]
        plain = "".join(marks.get(each, each) for each in text[begin:end])
        literal = encode_on(tokenizer, plain) if begin else encode(tokenizer, plain)[0]
        found += literal
        where += [(begin, end)] * len(literal)
    return found, where
