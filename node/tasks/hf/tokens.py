"""Tokens of a text, tokenised at once or in parts. Special tokens that a person's text spells stay text."""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, TypeAlias

Span: TypeAlias = tuple[int, int]  # characters of a text that a token stands for, from and up to

WINDOW, OVERLAP = 256 << 10, 4 << 10
"""Characters that are tokenised at once: a tokenizer takes some 100 bytes of memory for a token meanwhile. Windows
overlap, because a word or a space at a border has other tokens than inside."""
_AGREED = 16
_GUARDS = ("\n", "x", ".", " ")
_PRIVATE = 0xF0000  # Unicode's private use area: no text means anything by these characters


def crossed(border: int, spans: Sequence[Span]) -> bool:
    """Whether a token reaches across this place in the text."""
    at = bisect_left(spans, border, key=lambda span: span[0])
    return at > 0 and spans[at - 1][1] > border


class ExactTokenizer:
    """A tokenizer of Hugging Face for texts of any length. `marks` stand for all that it has beside its vocabulary."""

    def __init__(self, tokenizer: Any) -> None:
        from tokenizers import Tokenizer

        added = list(tokenizer.added_tokens_decoder.items())
        fields = json.loads(tokenizer.backend_tokenizer.to_str())
        fields |= {"post_processor": None, "truncation": None, "padding": None}  # tokens stand for blanks in them, too
        self._backend = Tokenizer.from_str(json.dumps(fields))
        self.special = sorted({*tokenizer.all_special_tokens, *(each.content for _, each in added if each.special)})
        self._special_ids = {number for number, each in added if each.special} | set(tokenizer.all_special_ids)
        if tokenizer.unk_token is not None:
            self.special = [each for each in self.special if each != tokenizer.unk_token]
            self._special_ids -= {tokenizer.unk_token_id}
        self.marks = Marks(self.special, [each.content for _, each in added])

    def encode(self, text: str, literal: bool = True) -> tuple[list[int], list[Span]]:
        """Tokens of a text without those that begin or end it, and what each stands for."""
        ids, spans = self._encode(text[:WINDOW], literal)
        done, overlap = WINDOW, OVERLAP
        while done < len(text):
            low = max(0, done - overlap)
            found, places = self._encode(text[low : done + WINDOW], literal)
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

    def encode_on(self, text: str, literal: bool = True) -> tuple[list[int], list[Span]]:
        """Tokens of a text that continues another after the end of a line: without a space at the beginning."""
        for guard in _GUARDS:
            ids, spans = self.encode(guard + text, literal)
            first = next((at for at, (begin, _) in enumerate(spans) if begin >= len(guard)), len(ids))
            if all(end <= len(guard) for _, end in spans[:first]):
                return ids[first:], [(begin - len(guard), end - len(guard)) for begin, end in spans[first:]]
        return self.encode(text, literal)

    def encode_marked(self, text: str, borders: Sequence[int] = ()) -> tuple[list[int], list[Span]]:
        """Tokens of a text in which special tokens count, except those for which a mark stands."""
        ids, spans = self._encode_marked(text, continues=False)
        cuts = [each for each in borders if crossed(each, spans)]
        if not cuts:
            return ids, spans
        ids, spans = [], []
        for low, high in pairwise([0, *cuts, len(text)]):
            found, places = self._encode_marked(text[low:high], continues=low > 0)
            ids += found
            spans += [(begin + low, end + low) for begin, end in places]
        return ids, spans

    def _encode_marked(self, text: str, continues: bool) -> tuple[list[int], list[Span]]:
        ids, spans = self.encode_on(text, literal=False) if continues else self.encode(text, literal=False)
        places = [at for at, each in enumerate(text) if each in self.marks.texts]
        if not places:
            return ids, spans
        found, where, at, first = list[int](), list[Span](), 0, 0
        while at < len(ids) or first < len(places):
            begin, end = spans[at] if at < len(ids) else (len(text), len(text))
            place = places[first] if first < len(places) else len(text) + 1
            if place < begin:  # a normaliser has removed the mark
                begin, end = place, place + 1
            elif place >= end:
                found.append(ids[at])
                where.append(spans[at])
                at += 1
                continue
            while at < len(ids) and spans[at][0] < end:
                end, at = max(end, spans[at][1]), at + 1
            while first < len(places) and places[first] < end:
                first += 1
            plain = self.marks.restored(text[begin:end])
            ids_of_mark = self._plain(plain, continues=continues or begin > 0)
            found += ids_of_mark
            where += [(begin, end)] * len(ids_of_mark)
        return found, where

    def _plain(self, text: str, continues: bool) -> list[int]:
        """Tokens of a text in which nothing is a special or an added token."""
        ids, low = list[int](), 0
        # Cut in the middle of each name, so that no part of it is found.
        for high in (*(each.start() + 1 for each in self.marks.pattern.finditer(text)), len(text)):
            part = text[low:high]
            ids += (self.encode_on(part) if continues else self.encode(part))[0]
            low, continues = high, True
        return ids

    def _encode(self, text: str, literal: bool) -> tuple[list[int], list[Span]]:
        self._backend.encode_special_tokens = literal
        found = self._backend.encode(text, add_special_tokens=False)
        ids, spans = list(found.ids), list(found.offsets)
        if literal and not self._special_ids.isdisjoint(ids):
            return self._without_special(text, ids, spans)
        return ids, spans

    def _without_special(self, text: str, ids: list[int], spans: list[Span]) -> tuple[list[int], list[Span]]:
        """The same tokens with those of two parts in place of a special one."""
        found, places = list[int](), list[Span]()
        for token, (begin, end) in zip(ids, spans, strict=True):
            parts = [token]
            if token in self._special_ids and end - begin > 1:
                parts = self.encode_on(text[begin : begin + 1])[0] + self.encode_on(text[begin + 1 : end])[0]
            found += parts
            places += [(begin, end)] * len(parts)
        return found, places


def _agreement(
    ids: list[int], spans: list[Span], found: list[int], places: list[Span], low: int
) -> tuple[int, int] | None:
    """Where to go over from the first tokens to the others, which begin at `low`."""
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


class Marks:
    """Characters that stand for special tokens which a person's text spells, until the text is tokenised."""

    def __init__(self, special: list[str], others: list[str]) -> None:
        names = sorted({*special, *others}, key=lambda each: (-len(each), each))
        self.by_name = {name: chr(_PRIVATE + number) for number, name in enumerate(names) if name}
        self.texts = {mark: name for name, mark in self.by_name.items()}
        self._special = {name for name in special if name}
        self.pattern = re.compile("|".join(re.escape(each) for each in self.by_name if len(each) > 1) or "(?!)")

    def put(self, value: Any, all_tokens: bool) -> Any:
        """Put marks into all texts of a JSON value."""
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
        return text.translate({ord(mark): name for mark, name in self.texts.items()})
