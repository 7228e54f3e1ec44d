"""Settings that `python -m node set` has changed. They are kept in the state directory, for later starts, too.

They win over `[peer]` in a run file, and lose against options and NODE_* variables.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from node.config import sizes
from node.config.peer_config import PeerConfig
from node.config.toml import ConfigError, suggestion

SETTINGS_FILE = "settings.json"
SETTABLE = {
    "upload-limit": "upload_limit_bytes_per_second",
    "download-limit": "download_limit_bytes_per_second",
}
"""Name of a setting -> key of the configuration."""
OFF = "off"
_MAX_BYTES = 1 << 12


def changed(config: PeerConfig, name: str, text: str) -> PeerConfig:
    """The configuration with another value of a setting.

    Raises:
        ConfigError: there is no such setting, or the value is bad.
    """
    if name not in SETTABLE:
        raise ConfigError(f"{name[:40]!r} cannot be set: {suggestion(name, list(SETTABLE))}", name)
    try:
        value = None if text.strip().lower() == OFF else sizes.rate(text)
    except ValueError as error:
        raise ConfigError(f"{name}: {error}; {OFF} for no limit", name) from None
    keys: dict[str, Any] = {SETTABLE[name]: value}
    return replace(config, **keys)


def overriding(config: PeerConfig, name: str) -> str:
    """The option or variable that sets this value at a start, and wins over the kept one; empty if there is none."""
    origin = config.origins.get(SETTABLE[name], "")
    return origin if origin.startswith(("flag ", "NODE_")) else ""


def with_kept(config: PeerConfig, state_dir: Path) -> tuple[PeerConfig, list[str]]:
    """The configuration with the settings that are kept in a state directory, and a line for each that is overridden.

    Raises:
        ConfigError: the file is damaged.
    """
    lines = []
    for name, text in read_settings(state_dir).items():
        if origin := overriding(config, name):
            lines.append(f"{origin} wins over the kept setting {name} = {text}")
        else:
            config = changed(config, name, text)
    return config, lines


def read_settings(state_dir: Path) -> Mapping[str, str]:
    """The kept settings; empty if there are none.

    Raises:
        ConfigError: the file is damaged.
    """
    file = state_dir / SETTINGS_FILE
    try:
        with file.open("rb") as opened:
            found = dict(json.loads(opened.read(_MAX_BYTES)))
        return {name: str(found[name]) for name in SETTABLE if name in found}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, RecursionError):
        raise ConfigError(f"{file} is damaged: delete it, and set again what you had set") from None


def packed(settings: Mapping[str, str]) -> bytes:
    """The content of the file that keeps these settings."""
    return json.dumps(dict(settings), indent=1).encode() + b"\n"
