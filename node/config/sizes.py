"""Sizes as people write them: 500kB, 1.5 MB/s, 50GB/month. Units are powers of 1000; a number without one is bytes."""

from __future__ import annotations

import re

from node.config.toml import shown

LEAST_RATE = 65_536.0  # Least cap in bytes per second. Peers do not wait for bulk data that comes at less.
LEAST_QUOTA = 1e8
MOST_BYTES = 1e15
PERIODS = ("day", "week", "month")
UNITS = {"": 1.0, "B": 1.0, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
_DIGITS = r"(?:\d{1,18}(?:\.\d{0,9})?|\.\d{1,9})(?:e\d{1,2})?"
_NUMBER = re.compile(_DIGITS, re.IGNORECASE)
_SIZE = re.compile(rf"({_DIGITS})\s*([kmgt]?b?)", re.IGNORECASE)

_BITS = re.compile(r"[KMGT]b\s*(/\s*s)?\s*$")
"""A unit in which providers give the speed of a line: 10Mb/s are 1.25 MB/s."""


def size_bytes(text: str) -> float | None:
    """The number of bytes that a text names; None if it names none."""
    found = _SIZE.fullmatch(text.strip())
    unit = found[2].upper() if found else ""
    return float(found[1]) * UNITS[f"{unit}B" if unit in ("K", "M", "G", "T") else unit] if found else None


def in_unit(text: str, unit: str) -> str:
    """A size from the command line, where a plain number has this unit."""
    return f"{text}{unit}" if _NUMBER.fullmatch(text.strip()) else text


def _not_in_bits(value: object) -> None:
    if _BITS.search(str(value)):
        raise ValueError(f"{shown(value)} may mean bits, and sizes are in bytes, of 8 bits each; try 1.5MB or 800kB")


def amount(value: object) -> object:
    """Read a number of bytes, or of bytes per second, if it is a text like 1.5MB. Raises ValueError."""
    if not isinstance(value, str):
        return value
    _not_in_bits(value)
    found = size_bytes(re.sub(r"\s*/\s*s$", "", value.strip()))
    if found is None:
        raise ValueError(f"{shown(value)} is not a number of bytes; try 1.5MB")
    return found


def rate(value: object) -> object:
    """Read a cap: bytes per second, as a number or as a text like 1.5MB/s. Raises ValueError."""
    _not_in_bits(value)
    found = None if isinstance(value, bool) else size_bytes(re.sub(r"\s*/\s*s$", "", str(value).strip()))
    if found is None:
        raise ValueError(f"{shown(value)} is not a data rate; try 1.5MB or 800kB")
    if found < LEAST_RATE:
        raise ValueError(f"{shown(value)} must be at least 66kB/s, because peers do not wait for less; try 1.5MB")
    if found > MOST_BYTES:
        raise ValueError(f"{shown(value)} must be below 1000TB/s; try 1.5MB")
    return found


def quota(value: object) -> object:
    """Check a quota like 50GB/month, and return it in normal form. Raises ValueError."""
    size, _, period = str(value).partition("/")
    found, period = size_bytes(size), period.strip().lower()
    if found is None or period not in PERIODS or found < LEAST_QUOTA:
        what = "a size of at least 100MB and a period, /day, /week or /month"
        raise ValueError(f"{shown(value)} must be {what}: like 50GB/month")
    if found > MOST_BYTES:
        raise ValueError(f"{shown(value)} must be below 1000TB; try 50GB/month")
    return f"{found:.0f}B/{period}"


def quota_parts(text: str) -> tuple[int, str]:
    """The bytes and the period of a quota in normal form."""
    size, _, period = text.partition("/")
    return int(size_bytes(size) or 0), period


def megabytes(count: float) -> str:
    """A number of bytes in megabytes, to three digits."""
    return f"{count / 1e6:.3g} MB"
