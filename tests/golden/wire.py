"""The numbers of all messages, and the bounds of their fields.

    python -m tests.golden.wire > tests/golden/wire.txt      # after a new kind

If a line differs, peers of two versions refuse each other's messages: raise `node.membership.hello.VERSION`.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import get_args, get_type_hints

from protocols import wire
from protocols.consensus.record import Record
from tests.support.wire_examples import KINDS

FILE = Path(__file__).with_name("wire.txt")


def contained(kind: type) -> set[type]:
    """The dataclasses of specs in the fields of this one, and in theirs."""
    hints = [get_type_hints(kind)[name] for name in wire.described(kind)]
    each_hint = (each for hint in hints for each in (hint, *get_args(hint)))
    direct = {each for each in each_hint if isinstance(each, type) and dataclasses.is_dataclass(each)}
    return direct.union(*map(contained, direct))


def table() -> str:
    """Every message of the product with its number, then what they contain: the bounds of each field."""
    of_product = [kind for kind in KINDS if kind.__module__.startswith(("node", "protocols"))]
    numbers = {kind: wire._NUMBER[kind] for kind in sorted(of_product, key=wire._NUMBER.__getitem__)}
    inner = {Record}.union(*map(contained, (*numbers, Record)))  # it travels encoded in others
    lines = []
    for kind in (*numbers, *sorted(inner, key=lambda kind: kind.__name__)):
        lines.append(f"{numbers.get(kind, '')} {kind.__name__}".lstrip())
        lines += [f"    {name}: {what}" for name, what in wire.described(kind).items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(table(), end="")
