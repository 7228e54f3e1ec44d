"""What one peer is told about itself: where it finds the others, its machine, what it shows.

Sources: flags > environment `NODE_*` > table `[peer]` of the run file > defaults. Lists are separated by commas where
they come as one string; an empty variable counts as not set.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal

from multiaddr import Multiaddr  # type: ignore[import-untyped]
from multiaddr.exceptions import StringParseError  # type: ignore[import-untyped]
from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from node.config.toml import ConfigError, check_keys, one_line, read_toml, shown, suggestion
from node.membership.hello import MAX_ADDRESS_CHARACTERS
from protocols.wire import MAX_ROSTER

PREFIX = "NODE_"
_NOT_OURS = re.compile("NODE_(ENV|OPTIONS|PATH|VERSION|HOME|DEBUG|EXTRA_CA_CERTS|TLS_.*|NAME|IP|LABELS|RANK)")
"""Variables that Node.js, Kubernetes, Jenkins and launchers of torch set for themselves."""
DEFAULT_NICE = 10
_PLACE = "/ip4/192.0.2.7/tcp/31337"
_EXAMPLE = f"{_PLACE}/p2p/12D3Koo…"
_CODEPOINT = re.compile(r"Codepoint U\+([0-9A-F]{4,6})")
_NUMBER_AS_NAME = re.compile(r"/dns[46]?/(\d+\.\d+\.\d+\.\d+)/")
_OPEN_PORT = re.compile("/(tcp|udp)/0(/|$)")
_ANYWHERE = re.compile(r"/ip4/0\.0\.0\.0/|/ip6/::/")
FILE_SIGN = "@"
"""What `bootstrap` has before the path of a file that holds addresses."""


def _split(value: object) -> object:
    if not isinstance(value, str):
        return value
    return tuple(part.strip() for part in value.split(",") if part.strip())


def _multiaddr(address: str, example: str) -> str:
    if not address.startswith("/"):
        raise ValueError(f"{address!r} is not a multiaddr{_rewritten(address, example)}")
    try:
        parsed = str(Multiaddr(address))
    except StringParseError as error:
        why = _CODEPOINT.sub(lambda found: ascii(chr(int(found[1], 16))), " ".join(error.message.split()))
        raise ValueError(f"{address!r}: {why}; give one like {example}") from None
    if not parsed:
        raise ValueError(f"{address!r} is empty: give one like {example}")
    if number := _NUMBER_AS_NAME.match(parsed):
        raise ValueError(f"{parsed}: {number[1]} is an address and no name: write /ip4/ in place of /dns/")
    return parsed


def _rewritten(address: str, example: str) -> str:
    """What the address would be as a multiaddr, for those who wrote host:port or a bare peer id."""
    found = re.fullmatch(r"(?:\w+://)?([\w.-]+|\[[\da-fA-F:]+\]):(\d{1,5})(/p2p/\w+)?/?", address)
    if not found:
        return f": give one like {example}"
    host, port, peer = found.groups()
    kind = "ip6" if host[0] == "[" else "ip4" if re.fullmatch(r"[\d.]+", host) else "dns"
    who = "" if example is _PLACE else peer or "/p2p/<its peer id>"
    return f": write /{kind}/{host.strip('[]')}/tcp/{port}{who}"


def _bootstrap(source: str) -> str:
    if source.startswith(FILE_SIGN):
        return _file(source)
    try:
        return peer_address(source)
    except ValueError as error:
        if os.path.isfile(source):
            raise ValueError(
                f"{source!r} is a file: to have addresses read from it, write {FILE_SIGN}{source}"
            ) from None
        raise error


def _file(source: str) -> str:
    path = _home(Path(source.removeprefix(FILE_SIGN)))
    if os.path.isdir(path):  # an empty name, too
        raise ValueError(f"{source!r} names no file: write {FILE_SIGN} and the path of a file that holds addresses")
    return f"{FILE_SIGN}{path}"


def peer_address(address: str) -> str:
    """A multiaddr at which others can be asked, as it is spelt.

    Raises:
        ValueError: it is none; one line says what it should be.
    """
    address = _multiaddr(address, _EXAMPLE)
    if not re.search("/p2p/[^/]+$", address):
        why = "does not say which peer it is: it must end in /p2p/<its peer id>"
        raise ValueError(f"{address} {why}; copy the whole address from the peer's join line")
    if address.startswith("/p2p/"):
        raise ValueError(f"{address} does not say where the peer is: give its whole address, like {_EXAMPLE}")
    if _ANYWHERE.match(address) or "/tcp/0/" in address:
        raise ValueError(f"nobody can be reached at {address}: give the peer's own address and port")
    return address


def _listen(address: str) -> str:
    address = _multiaddr(address, _PLACE)
    if "/p2p/" in address:
        raise ValueError(f"{address} names a peer: listen on the part before /p2p/")
    return address


def _announce(address: str) -> str:
    address = _multiaddr(address, _PLACE)
    if "/p2p/" in address:
        raise ValueError(f"{address} names a peer: announce the part before /p2p/")
    if _ANYWHERE.match(address) or _OPEN_PORT.search(address):
        raise ValueError(f"others cannot reach {address}: announce a public address and a fixed port")
    if not re.search("/(tcp|udp)/", address):
        raise ValueError(f"{address} has no port: write {address.rstrip('/')}/tcp/<the port that others dial>")
    if not address.isascii():
        raise ValueError(f"{address}: others take names in ASCII only: write the one that begins with xn--")
    if len(address) > MAX_ADDRESS_CHARACTERS:
        raise ValueError(f"{address[:60]}… is longer than {MAX_ADDRESS_CHARACTERS} characters: others do not take it")
    return address


def _threads(value: object) -> object:
    """Before pydantic's own choice between the two, whose message would speak of one of them only."""
    if value != "auto" and not re.fullmatch("[1-9][0-9]{0,2}", str(value)):
        raise ValueError(f'{shown(value)} must be "auto" or a whole number from 1 to 999')
    return value


def _run_id(text: str) -> str:
    if not re.fullmatch("[0-9a-f]{12,64}", text.lower()):
        raise ValueError(f"{text[:70]!r} is not the id of a run: 64 hex digits, or at least the first 12 of them")
    return text.lower()


def _home(path: Path) -> Path:
    if "\0" in str(path):
        raise ValueError(f"{str(path)!r} is no path")
    try:
        return path.expanduser()
    except RuntimeError:
        raise ValueError(f"{str(path)!r}: there is no such home directory, give the whole path") from None


def _nickname(text: str) -> str:
    if len(text) > 32 or not text.isprintable():
        raise ValueError(f"{text[:40]!r} must be at most 32 printable characters")
    return text


@dataclass(frozen=True, slots=True, kw_only=True, config=ConfigDict(extra="forbid", allow_inf_nan=False))
class PeerConfig:
    """This machine's side of a run. Made by `load_peer`.

    Attributes:
        bootstrap: multiaddrs of peers of the run, each ending in /p2p/<peer id>, or @ and the path of a file that holds
            such, one a line, and may come later; none: found a run.
        run_id: of the run that is meant, 64 hex digits or at least the first 12; others are refused.
        state_dir: where identity and checkpoints are kept; None: the first free peer-N of this user.
        rounds: leave after so many; of who starts a run: the run has so many, whatever [recipe] says.
        listen: multiaddrs to listen on.
        announce: multiaddrs to tell others, instead of those that are found.
        addresses_file: where this peer keeps its addresses, for others to read by --bootstrap @PATH.
        device: where to train; auto takes cuda or mps where there is one.
        threads: of the worker: a number, or auto, which measures.
        nice: the worker leaves busy cores to other programs: 0 not at all, 19 the most.
        precision: of training; auto is bfloat16 where that pays, else float32.
        data: text file or folder to train on; None: the standard library's source.
        nickname: of this peer, for people.
        bandwidth_bytes_per_second: of this machine's upload.
        wait_for_peers: a founder begins the first round when so many are there, itself included.
        nat: whether to map ports and use relays.
        checkpoint_every: rounds between two checkpoints.
        disk_limit_bytes: that checkpoints may take.
        new: found a run even if there is one to go on with.
        log_level: of what is told about the peer's inner life.
        json: print JSON lines instead of text.
        consent: name of the user's own task that this peer is to run; given to its command alone, by --task.
        origins: key -> where its value came from.
    """

    bootstrap: Annotated[tuple[Annotated[str, AfterValidator(_bootstrap)], ...], BeforeValidator(_split)] = ()
    run_id: Annotated[str, AfterValidator(_run_id)] | None = None
    state_dir: Annotated[Path, AfterValidator(_home)] | None = None
    rounds: int | None = Field(default=None, ge=1)
    listen: Annotated[
        tuple[Annotated[str, AfterValidator(_listen)], ...], BeforeValidator(_split), Field(min_length=1)
    ] = ("/ip4/0.0.0.0/tcp/0", "/ip6/::/tcp/0")
    announce: Annotated[tuple[Annotated[str, AfterValidator(_announce)], ...], BeforeValidator(_split)] = ()
    addresses_file: Annotated[Path, AfterValidator(_home)] | None = None
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    threads: Annotated[Literal["auto"] | int, BeforeValidator(_threads)] = "auto"
    nice: int = Field(default=DEFAULT_NICE, ge=0, le=19)
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    data: Annotated[Path, AfterValidator(_home)] | None = None
    nickname: Annotated[str, AfterValidator(_nickname)] = ""
    bandwidth_bytes_per_second: float = Field(default=12.5e6, gt=0, le=1e12)
    wait_for_peers: int = Field(default=1, ge=1, le=MAX_ROSTER)
    nat: bool = True
    checkpoint_every: int = Field(default=5, ge=1, le=1000)
    disk_limit_bytes: float = Field(default=20e9, gt=0, le=1e15)
    new: bool = False
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    json: bool = False
    consent: str | None = None
    origins: Mapping[str, str] = Field(default_factory=dict)


_PEER = TypeAdapter(PeerConfig)
_OF_THE_MACHINE = (
    "device", "threads", "nice", "precision", "data", "bandwidth_bytes_per_second", "checkpoint_every",
    "disk_limit_bytes", "log_level",
)  # fmt: skip
KEYS = tuple(field.name for field in fields(PeerConfig) if field.name not in ("consent", "origins"))
_OF_JOINERS = ("bootstrap", "run_id")
FILE_KEYS = tuple(key for key in KEYS if key not in _OF_JOINERS)
"""What `[peer]` may hold: a run file starts a run, or goes on with it."""


def load_peer(flags: Mapping[str, object], environment: Mapping[str, str], file: Path | None) -> PeerConfig:
    """This peer's configuration, and where each of its values came from.

    Args:
        flags: values by key; None: not given.
        environment: all of it; what does not begin with `NODE_` is none of ours.
        file: run file, of which the table `[peer]` is read.

    Raises:
        ConfigError: a file that cannot be read, an unknown key, a bad value; names its source and the key.
    """
    values: dict[str, object] = {}
    origins = dict.fromkeys(KEYS, "default")
    for table, origin in (
        (_file_table(file), f"{file} [peer]"),
        (_environment_table(environment), PREFIX),
        (_flag_table(flags), "flag --"),
    ):
        values.update(table)
        origins.update((key, _origin(origin, key)) for key in table)
    try:
        config = _PEER.validate_python({**values, "origins": origins})
    except ValidationError as error:
        bad = one_line(error)
        origin = origins[bad.key.partition(".")[0]]  # of a table where none belongs, it names what is in it, too
        text = str(bad) if origin.endswith("[peer]") else str(bad).removeprefix(f'"{bad.key}"').lstrip(": ")
        raise ConfigError(f"{origin}: {text}", bad.key) from None
    if config.announce and all(_OPEN_PORT.search(each) for each in config.listen):
        port = (re.findall(r"/(?:tcp|udp)/(\d+)", config.announce[0]) or [4001])[0]
        what = f"{config.announce[0]} has a fixed port, and this peer would listen on any that is free"
        raise ConfigError(f"{origins['announce']}: {what}: give --listen /ip4/0.0.0.0/tcp/{port}, too", "announce")
    return config


def variables(file: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """What `[peer]` of a run file says of the machine, as variables: for peers there that are not given the file.

    Args:
        environment: what it says already is left out: it wins over the file.

    Raises:
        ConfigError: as `load_peer` does.
    """
    table = _file_table(file)
    names = {PREFIX + key.upper(): str(table[key]) for key in _OF_THE_MACHINE if key in table}
    return {name: value for name, value in names.items() if not environment.get(name, "").strip()}


def _origin(source: str, key: str) -> str:
    if source == PREFIX:
        return PREFIX + key.upper()
    return source + key.replace("_", "-") if source.endswith("--") else source


def _file_table(file: Path | None) -> dict[str, Any]:
    table = read_toml(file).get("peer", {}) if file else {}
    try:
        if not isinstance(table, dict):
            raise ConfigError('"peer" must be a table, [peer]', "peer")
        for key in table:
            if key in _OF_JOINERS:
                flag = "--" + key.replace("_", "-")
                raise ConfigError(f'"peer.{key}": a run file is for who starts a run; who joins one gives {flag}', key)
        check_keys(table, FILE_KEYS, "peer")
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}", error.key) from None
    return table


def _environment_table(environment: Mapping[str, str]) -> dict[str, str]:
    known = {PREFIX + key.upper(): key for key in KEYS}
    table = {}
    for name, value in sorted(environment.items()):
        if name in known and value.strip():
            table[known[name]] = value.strip()
        elif name.startswith(PREFIX) and name not in known and not _NOT_OURS.fullmatch(name):
            meant = suggestion(name.removeprefix(PREFIX), [key.upper() for key in KEYS], PREFIX)
            raise ConfigError(f'unknown variable "{ascii(name[:60])[1:-1]}": {meant}', name)
    return table


def _flag_table(flags: Mapping[str, object]) -> dict[str, object]:
    table = {key: value for key, value in flags.items() if value is not None}
    check_keys(table, KEYS)
    return table
