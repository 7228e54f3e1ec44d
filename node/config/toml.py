"""Shared by both configurations: reading the run file, canonical bytes, and one-line errors.

A run file is TOML. Its table `[peer]` is about this machine (`node.config.peer_config`); everything else is about the
run that all peers share (`node.config.run_config`).
"""

from __future__ import annotations

import codecs
import difflib
import json
import re
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import asdict
from datetime import date, time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

_MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),  # begins like UTF-16's
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
BYTE_ORDER_MARKS = ("\ufeff", "\udcef\udcbb\udcbf")  # As text, and as Python reads it where variables are ASCII


def decoded(data: bytes, errors: str = "strict") -> str:
    """The text of a file: in UTF-8, or as its byte-order mark says (PowerShell's > writes UTF-16).

    `errors` is as in `bytes.decode`. Raises ValueError if it is not text; its message does not name the file.
    """
    mark, encoding = next((each for each in _MARKS if data.startswith(each[0])), (b"", "utf-8"))
    try:
        text = data[len(mark) :].decode(encoding, errors)
    except UnicodeDecodeError:
        raise ValueError(f"not text in {encoding.upper().removesuffix('-LE').removesuffix('-BE')}") from None
    if "\0" in text and errors == "strict":
        raise ValueError("has zero bytes, as UTF-16 without a byte-order mark has: save it as UTF-8")
    return text


def in_quotes(value: str) -> str:
    """What is wrong with a variable's value in quotes; empty if it has none.

    A shell takes quotes away, but `docker --env-file` passes them on. The value may be meant with them or without.
    """
    if len(value) > 1 and value[0] == value[-1] and value[0] in "\"'":
        return (
            f"its value is in quotes, and they are part of it, as with docker's --env-file: write {value[1:-1][:200]}"
        )
    return ""


if TYPE_CHECKING:
    from _typeshed import DataclassInstance

MAX_BYTES = 1 << 16  # Largest size of a run file, a configuration or a manifest
_SHOWN = 60
_LINE = 500
_PLAIN = (
    ("Value error, ", ""),
    (" after validation|, (got|unable to) .*", ""),
    (r"\b[A-Z]\w+ should\b", "must"),
    ("Input is not a valid path.*", "must be a path"),
    ("Unable to parse input string as an integer.*", "must be a whole number"),
    ("greater than or equal to", "at least"),
    ("less than or equal to", "at most"),
    ("greater than", "more than"),
    ("a valid string", "a text"),
    ("a valid boolean", "true or false"),
    ("a valid (tuple|array|list)", "a list"),
    ("a valid integer", "a whole number"),
    ("a valid number", "a number"),
)
"""Pattern in pydantic's messages -> plainer words."""


class ConfigError(ValueError):
    """A configuration that cannot be used. The message is one line: what, why, what to do.

    `key` is the dotted name of the wrong value; empty if the error is not about a single one.
    """

    def __init__(self, message: str, key: str = "") -> None:
        super().__init__(message)
        self.key = key


def read_toml(path: Path) -> dict[str, Any]:
    """Read a run file of at most `MAX_BYTES`. Raises ConfigError, which names the file."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}: give the path of a run file") from None
    if len(content) > MAX_BYTES:
        raise ConfigError(f"{path}: longer than {MAX_BYTES >> 10} KiB: is it a run file?")
    try:
        return tomllib.loads(decoded(content))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid TOML: {' '.join(str(error).split())}") from None
    except ValueError as error:
        raise ConfigError(f"{path}: {error}: is it a run file?") from None


def check_keys(table: Mapping[str, object], known: Collection[str], name: str = "") -> None:
    """Raise ConfigError for the first unknown key in the table `name`, or in the root."""
    for key in table:
        if key not in known:
            where = f" in [{name}]" if name else ""
            raise ConfigError(f'unknown key "{_cut(key)}"{where}: {suggestion(key, known)}', _dotted(name, key))


def suggestion(word: str, known: Collection[str], prefix: str = "") -> str:
    """A hint for a misspelt word: the nearest known word, or all of them, each after the common `prefix`."""
    word = word[:_SHOWN]
    beginnings = [each for each in known if word and each.startswith(word)]
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.6) or beginnings
    return f'did you mean "{prefix}{near[0]}"?' if near else f"there are {', '.join(prefix + each for each in known)}"


def one_line(error: ValidationError) -> ConfigError:
    """The first error that pydantic found, as a one-line error."""
    found = error.errors(include_url=False)[0]
    place = [str(part) for part in found["loc"] if not isinstance(part, int)]
    key = ".".join(place)
    where = f'"{_cut(place[-1])}"' if place else ""
    if len(place) > 1:
        where += f" in [{_cut('.'.join(place[:-1]))}]"
    if found["type"] == "value_error":
        text = str(found["ctx"]["error"])[:_LINE]
        if place and isinstance(found["input"], dict):  # about a whole table: the text starts with the value's name
            return ConfigError(f"[{_cut(key)}]: {text}", _dotted(key, text.split()[0]))
        return ConfigError(f"{where}: {text}" if where else text, key)
    if found["type"] == "missing":
        few = isinstance(found["loc"][-1], int)  # an item of a list is missing
        return ConfigError(f"{where} has too few items" if few else f"{where} is missing", key)
    if found["type"] == "unexpected_keyword_argument":
        return ConfigError(f"unknown key {where}", key)
    own_words = found["type"] in {"too_long", "too_short", "json_invalid"}
    wish = plain(found["msg"])
    return ConfigError(f"{where} {wish}".strip() + ("" if own_words else f", not {shown(found['input'])}"), key)


def plain(wish: str) -> str:
    """Replace pydantic's wording: "Input should be a valid integer, unable …" becomes "must be a whole number"."""
    for pattern, words in _PLAIN:
        wish = re.sub(pattern, words, wish)
    return wish


def canonical(values: DataclassInstance) -> bytes:
    """Encode a dataclass as canonical bytes, the same on every machine, for hashing and signing.

    The bytes are JSON in ASCII: keys sorted, no spaces, floats as by Python's repr (the shortest form that reads back
    exactly), bytes in hex, fields that are None left out.
    """
    tree = asdict(values, dict_factory=lambda items: {key: value for key, value in items if value is not None})
    return json.dumps(tree, sort_keys=True, separators=(",", ":"), allow_nan=False, default=bytes.hex).encode("ascii")


def _dotted(table: str, key: str) -> str:
    return f"{table}.{key}" if table else key


def _cut(text: str) -> str:
    """Untrusted text, shortened and printable."""
    return repr(text[:_SHOWN])[1:-1]


def shown(value: object) -> str:
    """An untrusted value in a few characters. The content of a container is left out: it may nest too deep to print."""
    if isinstance(value, Mapping):
        return "a table"
    if isinstance(value, list | tuple):
        return "a list"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, date | time):
        return f"the date or time {value}"
    text = repr(value) if not isinstance(value, int) or value.bit_length() < 256 else "a number of many digits"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
