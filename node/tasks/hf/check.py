"""Look at a peer's data as the task hf will: how much there is, and which tokens are targets."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

from node.tasks.hf.chat import Encoder
from node.tasks.hf.corpus import data_files, read_documents
from node.tasks.hf.data_set import is_streamed
from node.tasks.hf.digests import template_digest, tokenizer_digest
from node.tasks.hf.model import load_tokenizer
from node.tasks.hf.rows import RowCounts, prepare
from node.tasks.hf.settings import HfSettings, ModelError
from node.tasks.hf.source import find_model

_SHOWN_TOKENS = 60


def guessed_format(path: Path) -> str:
    """`chat` if the first document is a conversation, else `text`.

    Raises:
        ModelError: the path is missing or empty.
    """
    if is_streamed(path):
        raise ModelError("data check reads files and folders: download a file of the data set, and give that")
    files = data_files(path)
    if files[0].suffix not in (".jsonl", ".json", ".parquet"):
        return "text"
    try:
        next(read_documents(files[:1], True), None)
    except ModelError:
        return "text"
    return "chat"


def check_data(path: Path, model: str, settings: HfSettings) -> tuple[RowCounts, str]:
    """Prepare the data, or find them prepared; returns the counts, and the beginning of a document with its targets.

    Raises:
        ModelError: model or data cannot be used.
    """
    folder = find_model(model, weights=False)
    tokenizer, is_chat = load_tokenizer(folder), settings.format == "chat"
    encoder, files = Encoder(tokenizer, is_chat), data_files(path)
    digest = tokenizer_digest(folder.path, tokenizer) + (template_digest(tokenizer) if is_chat else "")
    data = prepare(files, encoder, settings, digest)
    first = next(islice(read_documents(files, is_chat), 1))
    tokens, mask = (each[:_SHOWN_TOKENS] for each in encoder.encode(first))
    shown, inside = [], False
    for token, target in zip(tokens, mask, strict=True):
        if bool(target) != inside:
            shown.append("[" if target else "]")
            inside = bool(target)
        shown.append(str(tokenizer.decode([token])))
    text = "".join(shown) + ("]" if inside else "")
    return data.counts, "the first, with its targets in brackets: " + ascii(text)[1:-1]
