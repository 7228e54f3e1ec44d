"""The boundary to transformers, peft, tokenizers and the hub's client: whatever they raise becomes one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from node.tasks.hf.settings import ModelError


@contextmanager
def foreign(what: str, remedy: str = "") -> Iterator[None]:
    """Turn every error of the libraries into a `ModelError`. Their types have no common base: some are bare
    Exceptions.
    """
    try:
        yield
    except (ModelError, MemoryError):
        raise
    except Exception as error:
        raise ModelError(f"{what}: {_short(error)}{remedy}") from error


def _short(error: Exception) -> str:
    words = " ".join(f"{type(error).__name__}: {error}".split())
    return "".join(each if each.isprintable() else "?" for each in words)[:300]
