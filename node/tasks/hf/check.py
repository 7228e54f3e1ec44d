"""Look at a peer's data as the task hf will: how much there is, and which tokens are targets."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from node.tasks.files import Selection, look, select
from node.tasks.hf.chat import Encoder
from node.tasks.hf.corpus import read_documents
from node.tasks.hf.data_set import is_streamed
from node.tasks.hf.model import load_tokenizer
from node.tasks.hf.rows import RowCounts, prepare
from node.tasks.hf.settings import HfSettings, ModelError
from node.tasks.hf.source import find_model, template_digest, tokenizer_digest

_SHOWN_TOKENS = 60


def guessed_format(path: Path) -> str:
    """`chat` if the first document is a conversation, else `text`."""
    if is_streamed(path):
        raise ModelError("data check reads files and folders: download a file of the data set, and give that")
    files = select(path).files
    if look(files[0]).kind == "text":
        return "text"
    try:
        next(read_documents(files[:1], True), None)
    except ModelError:
        return "text"
    return "chat"


@dataclass(frozen=True, slots=True)
class DataCheck:
    """What a peer's data hold. `first` is the beginning of the first document, with its targets in brackets."""

    files: Selection
    counts: RowCounts
    first: str

    def lines(self, context: int) -> list[str]:
        return [
            *self.files.lines(),
            *self.counts.lines(context),
            f"the first, with its targets in brackets: {self.first}",
        ]


def check_data(path: Path, model: str, settings: HfSettings, template: str = "") -> DataCheck:
    """Prepare the data, or find them prepared, as a peer of the task does."""
    selection = select(path)
    folder = find_model(model, weights=False)
    tokenizer, is_chat = load_tokenizer(folder, template), settings.format == "chat"
    encoder, files = Encoder(tokenizer, is_chat), selection.files
    digest = tokenizer_digest(folder.path, tokenizer) + (template_digest(tokenizer) if is_chat else "")
    data = prepare(files, encoder, settings, digest)
    first = next(read_documents(files, is_chat))
    sequences = encoder.encode(first)
    return DataCheck(selection, data.counts, _shown(tokenizer, *(sequences[0] if sequences else ([], []))))


def _shown(tokenizer: Any, tokens: list[int], mask: list[int]) -> str:
    """The text of the first tokens. A character may have several tokens, so the beginning is decoded as a whole."""
    tokens, mask = tokens[:_SHOWN_TOKENS], mask[:_SHOWN_TOKENS]
    changes = [at for at in range(1, len(mask)) if bool(mask[at]) != bool(mask[at - 1])]
    text, parts = "", []
    for low, high in pairwise([0, *changes, len(mask)]):
        before, text = text, str(tokenizer.decode(tokens[:high]))
        text = text.rstrip("\ufffd") if high < len(mask) or len(tokens) == _SHOWN_TOKENS else text  # cut characters
        part = text[len(before) :]
        parts.append(f"[{part}]" if mask[low] else part)
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in "".join(parts))
