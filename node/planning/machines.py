"""The machines of a plan, as a person describes them.

    latency_seconds = 0.03        # one way; default .05

    [[peers]]
    count = 4
    speed = 1.0                   # this machine is 1
    upload = "1.25MB"             # a second
    download = "6MB"
    memory = "8GB"

Without PyTorch. Everything has a bound, and what cannot be used is said in one line.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from node.config.sizes import amount
from node.config.toml import ConfigError, check_keys, read_toml, shown

MOST_PEERS = 512
USUAL_LATENCY_SECONDS, MOST_LATENCY_SECONDS = 0.05, 10.0


@dataclass(frozen=True, slots=True)
class Machine:
    """One peer's machine. Rates are bytes/s; a limit that is not known is infinite."""

    upload: float
    download: float
    speed: float = 1.0
    memory: float = math.inf


@dataclass(frozen=True, slots=True)
class PlannedSwarm:
    peers: tuple[Machine, ...]
    latency_seconds: float = USUAL_LATENCY_SECONDS


_LIMITS = {"speed": (1e-3, 1e6), "upload": (1e3, 1e15), "download": (1e3, 1e15), "memory": (1e6, 1e15)}
_SIZES = ("upload", "download", "memory")


def load_machines(path: Path) -> PlannedSwarm:
    """Read a file of peers. Raises ConfigError, which names the file and the key."""
    file = read_toml(path)
    try:
        check_keys(file, ("latency_seconds", "peers"))
        latency_seconds = _number(
            "latency_seconds", file.get("latency_seconds", USUAL_LATENCY_SECONDS), 0.0, MOST_LATENCY_SECONDS
        )
        tables = file.get("peers")
        if not isinstance(tables, list) or not all(isinstance(each, dict) for each in tables) or not tables:
            raise ConfigError("no peers: write a table [[peers]] for each kind of machine", "peers")
        peers: list[Machine] = []
        for number, table in enumerate(tables, 1):
            peers += _machines(number, table)
            if len(peers) > MOST_PEERS:
                raise ConfigError(f"more than {MOST_PEERS} peers: leave some out", "count")
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}", error.key) from None
    return PlannedSwarm(tuple(peers), latency_seconds)


def machine(values: Mapping[str, Any]) -> Machine:
    """One machine of these values; a download that is not given is as fast as the upload. Raises ConfigError."""
    if values.get("upload") is None:
        raise ConfigError('"upload" is missing: what the machine can send in a second, like "1.25MB"', "upload")
    given: dict[str, float] = {}
    for key, value in values.items():
        if value is not None:
            try:
                given[key] = _number(key, amount(value) if key in _SIZES else value, *_LIMITS[key])
            except ConfigError:
                raise
            except ValueError as error:
                raise ConfigError(f"{key}: {error}", key) from None
    return Machine(**{"download": given["upload"], **given})


def _machines(number: int, table: Mapping[str, Any]) -> list[Machine]:
    try:
        check_keys(table, ("count", *(field.name for field in fields(Machine))))
        count = table.get("count", 1)
        if type(count) is not int or not 1 <= count <= MOST_PEERS:
            raise ConfigError(f'"count" must be a whole number from 1 to {MOST_PEERS}, not {shown(count)}', "count")
        return [machine({key: value for key, value in table.items() if key != "count"})] * count
    except ConfigError as error:
        raise ConfigError(f"[[peers]] number {number}: {error}", error.key) from None


def _number(key: str, value: object, least: float, most: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise ConfigError(f'"{key}" must be a number from {least:g} to {most:g}, not {shown(value)}', key)
    return float(value)
