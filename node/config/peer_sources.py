"""Where the settings of a machine come from.

Options > variables `NODE_*` > what `set` has saved in the state directory > `[peer]` of the run file > defaults. A list
in one string is separated by commas; an empty variable counts as not set.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from node.config.multiaddrs import ANY_PORT
from node.config.peer_config import FILE_KEYS, SETTABLE, SETTINGS, PeerConfig, option_name
from node.config.toml import BYTE_ORDER_MARKS, ConfigError, check_keys, in_quotes, one_line, read_toml, suggestion
from node.runtime.json_file import read_json

PREFIX = "NODE_"
SETTINGS_FILE = "settings.json"
OFF = "off"
_NOT_OURS = re.compile("NODE_(ENV|OPTIONS|PATH|VERSION|HOME|DEBUG|EXTRA_CA_CERTS|TLS_.*|NAME|IP|LABELS|RANK)")
"""Variables of Node.js, Kubernetes, Jenkins and torch's launchers."""
_PEER = TypeAdapter(PeerConfig)

_OF_WORKERS = (
    *("device", "devices", "ranks", "nodes", "shard", "tensor_parallel", "offload", "threads", "nice", "precision"),
    *("data", "model", "checkpointing", "compile"),
)
"""Settings of a worker, which with `own_loop` is the user's script."""


def load_peer(options: Mapping[str, object], environment: Mapping[str, str], file: Path | None) -> PeerConfig:
    """Load this machine's settings, with the source of each value, but without those that `set` has saved.

    `options` maps keys to values, or to None. Of the run file, only `[peer]` is read. Raises ConfigError, which names
    the source and the key.
    """
    values: dict[str, object] = {}
    origins = dict.fromkeys(SETTINGS, "default")
    for table, name in (
        (_file_table(file), lambda key: f"{file} [peer]"),
        (_environment_table(environment), _variable),
        (_option_table(options), lambda key: f"flag {option_name(key)}"),
    ):
        values.update(table)
        origins.update((key, name(key)) for key in table)
    try:
        config = _PEER.validate_python({**values, "origins": origins})
    except ValidationError as error:
        bad = one_line(error)
        origin = origins[bad.key.partition(".")[0]]  # pydantic's path may go on inside a table
        text = str(bad) if origin.endswith("[peer]") else _without_key(bad)
        raise ConfigError(f"{origin}: {text}", bad.key) from None
    if config.announce and all(ANY_PORT.search(each) for each in config.listen):
        port = (re.findall(r"/(?:tcp|udp)/(\d+)", config.announce[0]) or [4001])[0]
        what = f"{config.announce[0]} has a fixed port, but this peer would listen on any free one"
        raise ConfigError(f"{origins['announce']}: {what}: also give --listen /ip4/0.0.0.0/tcp/{port}", "announce")
    if origins["page_port"].startswith("flag ") and not config.page:
        raise ConfigError(f"{origins['page_port']}: no page is served: also give --page, or leave it out", "page_port")
    if config.relay and not config.nat and origins["relay"].startswith("flag "):
        raise ConfigError(f"{origins['relay']}: {origins['nat']} switches relaying off: leave one of them out", "relay")
    if config.own_loop and (key := next((each for each in _OF_WORKERS if origins[each].startswith("flag ")), "")):
        raise ConfigError(f"{origins[key]}: with --own-loop the script decides that: leave it out", key)
    names = config.devices
    if names and config.ranks not in (None, len(names)):
        raise ConfigError(
            f"{origins['ranks']}: {config.ranks} ranks, but {origins['devices']} names "
            f"{len(names)} device{'s' * (len(names) > 1)}: leave one of them out",
            "ranks",
        )
    if names and config.device != "auto" and origins["device"].startswith("flag "):
        raise ConfigError(
            f"{origins['device']}: {origins['devices']} names devices, too: leave one of them out", "device"
        )
    return config


def variables(file: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """The machine's settings in `[peer]` of a run file as variables, for peers that do not read the file.

    Those that `environment` sets already win over the file, and are left out.
    """
    table = _file_table(file)
    shared = [key for key, each in SETTINGS.items() if each.scope == "machine" and key in table]
    names = {_variable(key): _as_variable(key, table[key]) for key in shared}
    return {name: value for name, value in names.items() if not environment.get(name, "").strip()}


def _variable(key: str) -> str:
    return PREFIX + key.upper()


def _as_variable(key: str, value: object) -> str:
    """A value of the file in one string, which splits into the same list again."""
    if not isinstance(value, list):
        return str(value)
    return ("; " if key == "hours" else ",").join(str(each) for each in value)


def _without_key(error: ConfigError) -> str:
    return str(error).removeprefix(f'"{error.key}"').lstrip(": ")


def _file_table(file: Path | None) -> dict[str, Any]:
    tables = read_toml(file) if file else {}
    table = tables.get("peer", {})
    try:
        if not isinstance(table, dict):
            raise ConfigError('"peer" must be a table, [peer]', "peer")
        for key in table:
            if key in SETTINGS and key not in FILE_KEYS:
                option = option_name(key)
                raise ConfigError(f'"peer.{key}": a run file starts a run: to join one, give {option} instead', key)
        check_keys(table, FILE_KEYS, "peer")
        if isinstance(hf := tables.get("hf"), dict) and "template" in hf:  # each machine has its own copy of the file
            table = {"template": hf["template"], **table}
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}", error.key) from None
    return table


def _environment_table(environment: Mapping[str, str]) -> dict[str, str]:
    known = {_variable(key): key for key in SETTINGS}
    table = {}
    for name, value in sorted(environment.items()):
        if name in known and value.strip():
            if why := in_quotes(value.strip()):
                raise ConfigError(f"{name}: {why}", known[name])
            table[known[name]] = value.strip()
        elif name.startswith(BYTE_ORDER_MARKS) and PREFIX in name[:8]:
            raise ConfigError(
                f"{ascii(name)[1:-1][:80]} begins with a byte-order mark: save the file of variables without"
            )
        elif name.startswith(PREFIX) and name not in known and not _NOT_OURS.fullmatch(name):
            meant = suggestion(name.removeprefix(PREFIX), [key.upper() for key in SETTINGS], PREFIX)
            raise ConfigError(f'unknown variable "{ascii(name[:60])[1:-1]}": {meant}', name)
    return table


def _option_table(options: Mapping[str, object]) -> dict[str, object]:
    table = {key: value for key, value in options.items() if value is not None}
    check_keys(table, SETTINGS)
    return table


# -- settings that `set` changes while the peer runs, and saves in the state directory for later starts ---------------


def with_setting(config: PeerConfig, name: str, text: str) -> PeerConfig:
    """The configuration with another value of a setting that can be set. Raises ConfigError."""
    if name not in SETTABLE:
        raise ConfigError(f"{name[:40]!r} cannot be set: {suggestion(name, list(SETTABLE))}", name)
    values: dict[str, Any] = {SETTABLE[name]: None if text.strip().lower() == OFF else text}
    try:
        return replace(config, **values)
    except ValidationError as error:
        raise ConfigError(f"{name}: {_without_key(one_line(error))}; {OFF} for no limit", name) from None


def overriding(config: PeerConfig, name: str) -> str:
    """The option or variable that sets this value at a start, and wins over the saved one; empty if there is none."""
    origin = config.origins.get(SETTABLE[name], "")
    return origin if origin.startswith(("flag ", PREFIX)) else ""


def apply_saved(config: PeerConfig, state_dir: Path) -> tuple[PeerConfig, list[str]]:
    """The configuration with the settings that are saved in a state directory, and a line for each that is overridden.

    Raises ConfigError if their file is damaged.
    """
    lines = []
    for name, text in read_settings(state_dir).items():
        if origin := overriding(config, name):
            lines.append(f"{origin} wins over the saved setting {name} = {text}")
        else:
            config = with_setting(config, name, text)
    return config, lines


def read_settings(state_dir: Path) -> Mapping[str, str]:
    """The saved settings; empty if there are none. Raises ConfigError if their file is damaged."""
    file = state_dir / SETTINGS_FILE
    try:
        found = dict(read_json(file) or {})
    except (OSError, ValueError, TypeError):
        raise ConfigError(f"{file} is damaged: delete it, and set again what you had set") from None
    return {name: str(found[name]) for name in SETTABLE if name in found}


def serialize(settings: Mapping[str, str]) -> bytes:
    """The content of the file that keeps these settings."""
    return json.dumps(dict(settings), indent=1).encode() + b"\n"
