"""Values that differ a little from a given one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any


def variants(value: Any) -> Iterator[Any]:
    """Values that differ from this one in a single leaf."""
    if is_dataclass(value):
        for field in fields(value):
            for other in variants(getattr(value, field.name)):
                yield replace(value, **{field.name: other})  # type: ignore[type-var]
    elif isinstance(value, tuple):
        if value:
            yield value[:-1]
        for index, item in enumerate(value):
            yield from ((*value[:index], other, *value[index + 1 :]) for other in variants(item))
    elif isinstance(value, bytes):
        yield bytes([value[0] ^ 1, *value[1:]]) if value else b"x"
    elif isinstance(value, str):
        yield value + "x"
    else:
        yield (not value) if isinstance(value, bool) else value + 1
