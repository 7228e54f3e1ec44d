"""The configuration of one peer: where it finds the others, its machine, its output.

Sources: flags > environment `NODE_*` > table `[peer]` of the run file > defaults. A list in one string is separated by
commas; an empty variable counts as not set.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from node.config import sizes
from node.config.multiaddrs import ANY_PORT, announced_address, bootstrap_source, home_path, listen_address
from node.config.text import BYTE_ORDER_MARKS, in_quotes
from node.config.toml import ConfigError, check_keys, one_line, read_toml, shown, suggestion
from node.direct.messages import MAX_PORT, MIN_PORT
from node.machine.hours import WeeklyHours
from protocols.base import MAX_STAGES
from protocols.wire import MAX_ROSTER

PREFIX = "NODE_"
_NOT_OURS = re.compile("NODE_(ENV|OPTIONS|PATH|VERSION|HOME|DEBUG|EXTRA_CA_CERTS|TLS_.*|NAME|IP|LABELS|RANK)")
"""Variables of Node.js, Kubernetes, Jenkins and torch's launchers."""
DEFAULT_NICE = 10
DEFAULT_BANDWIDTH = 12.5e6


def _split(value: object) -> object:
    if not isinstance(value, str):
        return value
    return tuple(part.strip() for part in value.split(",") if part.strip())


def _threads(value: object) -> object:
    """Check the value before pydantic does, whose message would name only one of the two choices."""
    if value != "auto" and not re.fullmatch("[1-9][0-9]{0,2}", str(value)):
        raise ValueError(f'{shown(value)} must be "auto" or a whole number from 1 to 999')
    return value


def _direct_port(value: object) -> object:
    """Check the value before pydantic does, as for `_threads`."""
    if value not in ("off", 0, "0") and not (
        re.fullmatch("[0-9]{4,5}", str(value)) and 1024 <= int(str(value)) <= 65_535
    ):
        raise ValueError(f'{shown(value)} must be "off", 0 for any free port, or a port from {MIN_PORT} to {MAX_PORT}')
    return value


def _split_hours(value: object) -> object:
    """Split at semicolons, because days are separated by commas."""
    return tuple(part.strip() for part in value.split(";") if part.strip()) if isinstance(value, str) else value


def _hours(text: str) -> str:
    WeeklyHours.parse(text)
    return text


def _page_host(text: str) -> str:
    if not re.fullmatch(r"[\w.-]{1,253}(:\d{1,5})?", text):
        raise ValueError(f"{text[:60]!r} is not the name of a host, such as box.example.net or box.example.net:8443")
    return text.lower()


def _rate(value: object) -> object:
    return None if value is None else sizes.rate(value)


def _quota(value: object) -> object:
    return None if value is None else sizes.quota(value)


def _run_id(text: str) -> str:
    if not re.fullmatch("[0-9a-f]{12,64}", text.lower()):
        raise ValueError(f"{text[:70]!r} is not the id of a run: 64 hex digits, or at least the first 12 of them")
    return text.lower()


def _model(text: str) -> str:
    if not 0 < len(text) <= 1024 or not text.isprintable():
        raise ValueError(f"{text[:40]!r} is neither a folder nor ORG/NAME@REVISION")
    return str(home_path(Path(text))) if text.startswith("~") else text


def _nickname(text: str) -> str:
    if len(text) > 32 or not text.isprintable():
        raise ValueError(f"{text[:40]!r} must be at most 32 printable characters")
    return text


@dataclass(frozen=True, slots=True, kw_only=True, config=ConfigDict(extra="forbid", allow_inf_nan=False))
class PeerConfig:
    """This machine's side of a run. Made by `load_peer`. The run file quotes the descriptions below.

    Attributes:
        bootstrap: multiaddrs of peers of the run, each ending in /p2p/<peer id>, or @ and the path of a file that holds
            such addresses, one per line, and may appear later; empty: start or resume a run.
        run_id: id of the run to join, 64 hex digits or at least the first 12; other runs are refused.
        stage: stage to join, from 0, in a run with stages; None: the one with the least capacity. A restart keeps it.
        state_dir: directory of the identity and the checkpoints; None: the first free peer-N of this user.
        rounds: rounds after which this peer leaves; for a peer that starts a run: the run's rounds, instead of those in
            [recipe].
        listen: multiaddrs to listen on.
        announce: multiaddrs at which others can dial this peer, instead of those that it finds itself.
        addresses_file: file that this peer writes its addresses to, for others to read with --bootstrap @PATH.
        device: device to train on; auto is cuda or mps if there is one, else cpu.
        threads: training threads: a number, or auto, which measures how many are fastest.
        nice: niceness of training, from 0 to 19; the higher, the more of a busy processor is left to other programs.
        worker_timeout_seconds: longest time that training may show no sign of work, in seconds, before its process is
            replaced: no step, no processor time, nothing read or written; None: as the task says, or 600.
        precision: precision of training; auto is bfloat16 where that is faster, else float32.
        data: text file or folder to train on; None: the standard library's source. For hf also rows of JSON, CSV and
            parquet, and hub:ORG/NAME@REVISION for a data set on the hub.
        model: model of the task hf on this machine: a folder, or ORG/NAME@REVISION on the hub of Hugging Face.
        template: file with the chat template for the task hf, instead of the model's own; all peers of a run need the
            same. It may also be given as template in [hf].
        checkpointing: whether to save memory in training the task hf, at the price of a third more time.
        compile: whether torch compiles the model of the task hf: the first step takes minutes, later ones less.
        held_out: for the peer that starts a run of the task hf: file whose texts are the run's held-out sample, which
            all peers get; none: no sample; None: a part of the founder's own data, or with conversations no sample.
        nickname: name under which other peers show this one.
        bandwidth_bytes_per_second: upload rate of this machine, in bytes per second.
        upload_limit_bytes_per_second: most bytes per second that this peer sends; None: no limit.
        download_limit_bytes_per_second: most bytes per second that this peer takes; None: no limit.
        quota: most bytes that this peer sends and takes in a period, like 50GB/month, /week or /day; None: no limit.
        relay: whether others may talk through this peer, which no limit counts; None: only without limits and quota.
        wait_for_peers: peers that must be there, this one included, before a new run's first round begins.
        nat: whether to map ports at the router and use relays.
        direct_port: TCP port on which this peer takes bulk data, 0 for any free one, or off: all data goes over libp2p.
        checkpoint_every: rounds between two checkpoints.
        disk_limit_bytes: disk space that checkpoints may take, in bytes.
        hours: hours of the week in which this peer may train, such as "mon-fri 18:00-08:00" or "sat-sun", separated by
            semicolons in one text; empty: always.
        on_battery, on_metered, on_low_memory, on_heat: what to do on battery, on a metered network, when memory is
            short, and when a sensor is at its limit: pause or ignore it.
        when_in_use: what to do while the keyboard or the mouse is used: pause or ignore it.
        when_busy: what to do while other programs keep a quarter of the processor busy: pause or ignore it.
        page: whether to serve a web page of this peer, on this machine only, and metrics for Prometheus.
        page_port: TCP port of the page; if it is taken, the next free one.
        page_hosts: further host names to which the page answers, for a proxy of one's own in front of it.
        new: start a new run even if the state directory holds one.
        log_level: lowest level of log lines to print.
        json: print JSON lines instead of text.
        consent: name of the user's own task that this peer agrees to run; set only by --task.
        origins: key -> source of its value.
    """

    bootstrap: Annotated[tuple[Annotated[str, AfterValidator(bootstrap_source)], ...], BeforeValidator(_split)] = ()
    run_id: Annotated[str, AfterValidator(_run_id)] | None = None
    stage: int | None = Field(default=None, ge=0, lt=MAX_STAGES)
    state_dir: Annotated[Path, AfterValidator(home_path)] | None = None
    rounds: int | None = Field(default=None, ge=1)
    listen: Annotated[
        tuple[Annotated[str, AfterValidator(listen_address)], ...], BeforeValidator(_split), Field(min_length=1)
    ] = ("/ip4/0.0.0.0/tcp/0", "/ip6/::/tcp/0")
    announce: Annotated[tuple[Annotated[str, AfterValidator(announced_address)], ...], BeforeValidator(_split)] = ()
    addresses_file: Annotated[Path, AfterValidator(home_path)] | None = None
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    threads: Annotated[Literal["auto"] | int, BeforeValidator(_threads)] = "auto"
    nice: int = Field(default=DEFAULT_NICE, ge=0, le=19)
    worker_timeout_seconds: float | None = Field(default=None, ge=1, le=1e6)
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    data: Annotated[Path, AfterValidator(home_path)] | None = None
    model: Annotated[str, AfterValidator(_model)] | None = None
    template: Annotated[Path, AfterValidator(home_path)] | None = None
    checkpointing: bool = False
    compile: bool = False
    held_out: Annotated[Path, AfterValidator(home_path)] | None = None
    nickname: Annotated[str, AfterValidator(_nickname)] = ""
    bandwidth_bytes_per_second: float = Field(default=DEFAULT_BANDWIDTH, gt=0, le=1e12)
    upload_limit_bytes_per_second: Annotated[float | None, BeforeValidator(_rate)] = None
    download_limit_bytes_per_second: Annotated[float | None, BeforeValidator(_rate)] = None
    quota: Annotated[str | None, BeforeValidator(_quota)] = None
    relay: bool | None = None
    wait_for_peers: int = Field(default=1, ge=1, le=MAX_ROSTER)
    nat: bool = True
    direct_port: Annotated[Literal["off"] | int, BeforeValidator(_direct_port)] = 0
    checkpoint_every: int = Field(default=5, ge=1, le=1000)
    disk_limit_bytes: float = Field(default=20e9, gt=0, le=1e15)
    hours: Annotated[tuple[Annotated[str, AfterValidator(_hours)], ...], BeforeValidator(_split_hours)] = ()
    on_battery: Literal["pause", "ignore"] = "pause"
    on_metered: Literal["pause", "ignore"] = "pause"
    on_low_memory: Literal["pause", "ignore"] = "pause"
    on_heat: Literal["pause", "ignore"] = "pause"
    when_in_use: Literal["pause", "ignore"] = "ignore"
    when_busy: Literal["pause", "ignore"] = "ignore"
    page: bool = False
    page_port: int = Field(default=7717, ge=MIN_PORT, le=MAX_PORT)
    page_hosts: Annotated[tuple[Annotated[str, AfterValidator(_page_host)], ...], BeforeValidator(_split)] = ()
    new: bool = False
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    json: bool = False
    consent: str | None = None
    origins: Mapping[str, str] = Field(default_factory=dict)

    @property
    def claim_bytes_per_second(self) -> float:
        """What this peer declares to the run as its bandwidth: no more than its limits allow."""
        limits = (self.upload_limit_bytes_per_second, self.download_limit_bytes_per_second)
        return min((self.bandwidth_bytes_per_second, *(each for each in limits if each is not None)))

    @property
    def relays(self) -> bool:
        """Whether others may talk through this peer."""
        limits = (self.upload_limit_bytes_per_second, self.download_limit_bytes_per_second, self.quota)
        return self.nat and (self.relay if self.relay is not None else not any(limits))


_PEER = TypeAdapter(PeerConfig)
_OF_THE_MACHINE = (
    "device", "threads", "nice", "worker_timeout_seconds", "precision", "data", "model", "template", "checkpointing",
    "compile", "held_out", "bandwidth_bytes_per_second", "checkpoint_every", "disk_limit_bytes", "hours",
    "on_battery", "on_metered", "on_low_memory", "on_heat", "when_in_use", "when_busy", "log_level",
    "upload_limit_bytes_per_second", "download_limit_bytes_per_second", "quota", "relay",
)  # fmt: skip
KEYS = tuple(field.name for field in fields(PeerConfig) if field.name not in ("consent", "origins"))
_OF_JOINERS = ("bootstrap", "run_id", "stage")
FILE_KEYS = tuple(key for key in KEYS if key not in _OF_JOINERS)
"""Keys that `[peer]` may hold. A run file starts or resumes a run, so it has no addresses to join."""


def load_peer(flags: Mapping[str, object], environment: Mapping[str, str], file: Path | None) -> PeerConfig:
    """Load this peer's configuration, with the source of each value.

    Args:
        flags: key -> value; None for an option that was not given.
        environment: all variables; those that do not begin with `NODE_` are ignored.
        file: run file, of which only the table `[peer]` is read.

    Raises:
        ConfigError: the file cannot be read, a key is unknown or a value is bad; names the source and the key.
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
        origin = origins[bad.key.partition(".")[0]]  # pydantic's path may go on inside a table
        text = str(bad) if origin.endswith("[peer]") else str(bad).removeprefix(f'"{bad.key}"').lstrip(": ")
        raise ConfigError(f"{origin}: {text}", bad.key) from None
    if config.announce and all(ANY_PORT.search(each) for each in config.listen):
        port = (re.findall(r"/(?:tcp|udp)/(\d+)", config.announce[0]) or [4001])[0]
        what = f"{config.announce[0]} has a fixed port, but this peer would listen on any free one"
        raise ConfigError(f"{origins['announce']}: {what}: also give --listen /ip4/0.0.0.0/tcp/{port}", "announce")
    return config


def variables(file: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """The machine's settings in `[peer]` of a run file as variables, for peers that do not read the file.

    Args:
        environment: variables that are set already and win over the file; these are left out.

    Raises:
        ConfigError: as `load_peer` does.
    """
    table = _file_table(file)
    names = {PREFIX + key.upper(): _as_variable(key, table[key]) for key in _OF_THE_MACHINE if key in table}
    return {name: value for name, value in names.items() if not environment.get(name, "").strip()}


def _as_variable(key: str, value: object) -> str:
    """A value of the file in one string, which splits into the same list again."""
    if not isinstance(value, list):
        return str(value)
    return ("; " if key == "hours" else ",").join(str(each) for each in value)


def _origin(source: str, key: str) -> str:
    if source == PREFIX:
        return PREFIX + key.upper()
    return source + key.replace("_", "-") if source.endswith("--") else source


def _file_table(file: Path | None) -> dict[str, Any]:
    tables = read_toml(file) if file else {}
    table = tables.get("peer", {})
    try:
        if not isinstance(table, dict):
            raise ConfigError('"peer" must be a table, [peer]', "peer")
        for key in table:
            if key in _OF_JOINERS:
                flag = "--" + key.replace("_", "-")
                raise ConfigError(f'"peer.{key}": a run file starts a run: to join one, give {flag} instead', key)
        check_keys(table, FILE_KEYS, "peer")
        if isinstance(hf := tables.get("hf"), dict) and "template" in hf:  # each machine has its own copy of the file
            table = {"template": hf["template"], **table}
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}", error.key) from None
    return table


def _environment_table(environment: Mapping[str, str]) -> dict[str, str]:
    known = {PREFIX + key.upper(): key for key in KEYS}
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
            meant = suggestion(name.removeprefix(PREFIX), [key.upper() for key in KEYS], PREFIX)
            raise ConfigError(f'unknown variable "{ascii(name[:60])[1:-1]}": {meant}', name)
    return table


def _flag_table(flags: Mapping[str, object]) -> dict[str, object]:
    table = {key: value for key, value in flags.items() if value is not None}
    check_keys(table, KEYS)
    return table
