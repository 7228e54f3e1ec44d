"""Command-line parsing for tests and benchmarks: a wrong argument gives one clear line."""

from __future__ import annotations

import argparse
import math
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """Exits with status 2 after one line that names the mistake, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see --help)\n")


def at_least_one(text: str) -> int:
    return at_least(1, text)


def at_least(least: int, text: str) -> int:
    if not text.lstrip("-").isdigit() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
    return int(text)


def positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return number


def seeds(text: str) -> range:
    """`7` or `0:300`."""
    low, colon, high = text.partition(":")
    try:
        found = range(int(low), int(high)) if colon else range(int(low), int(low) + 1)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a seed nor a range like 0:300") from None
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} holds no seeds")
    return found
