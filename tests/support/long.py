"""Matrices of parameters of which `make test` plays a sample, and `make sim` the rest."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest


def long(*values: Any) -> list[Any]:
    """These values of a parameter, or tuples of values of several, are of the long tests."""
    return [pytest.param(*(each if isinstance(each, tuple) else (each,)), marks=pytest.mark.long) for each in values]


def diagonal(names: str, *axes: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrise a test by all combinations. Those on the diagonal, with each value of each axis, are not long."""
    short = [tuple(axis[at % len(axis)] for axis in axes) for at in range(max(map(len, axes)))]
    cases = (
        pytest.param(*each, marks=() if each in short else pytest.mark.long)
        for each in product(*map(dict.fromkeys, axes))
    )
    return pytest.mark.parametrize(names, tuple(cases))
