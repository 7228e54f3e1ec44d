"""The settings of this machine, each one field of `PeerConfig`: its type, bounds and default, and in words the rest.

From this table follow the options of `join`, the keys of `[peer]`, the variables `NODE_*`, what `set` can change, the
run file of `init` and docs/reference-settings.md. `node.config.peer_sources` reads the values.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass

from node.config import sizes
from node.config.multiaddrs import announced_address, bootstrap_source, home_path, listen_address
from node.config.toml import shown
from node.direct.messages import MAX_PORT, MIN_PORT
from node.machine.rules import WeeklyHours
from protocols.base import MAX_STAGES
from protocols.wire import MAX_ROSTER

RUN, MACHINE, PAUSES, OUTPUT = "The run", "This machine", "Pauses", "Output"  # Sections of `join --help`
DEFAULT_NICE = 10
DEFAULT_BANDWIDTH = 12.5e6
MAX_RANKS = MAX_NODES = 64


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is said of a setting beside its name, type and default."""

    help: str
    more: str = ""  # for run files and the reference page, which have room
    default: str = ""  # what holds if it is not set, where the value itself does not say so
    panel: str = MACHINE
    metavar: str | None = None
    option: str | None = None  # its name, if it is not the key's; empty: there is none
    unit: str = ""  # of a plain number in the option: a key of `node.config.sizes.UNITS`
    # Whether all peers of this machine share it, or it is one peer's own; a joiner's is not for run files.
    scope: Literal["machine", "peer", "joiner"] = "machine"
    settable: bool = False  # by the command `set`, while the peer runs
    only_hf: bool = False

    @property
    def description(self) -> str:
        """For run files and the reference page."""
        return " ".join(filter(None, (self.help, self.more, self.default and f"Default: {self.default}.")))


def setting(value: object, help: str, **more: Any) -> Any:
    """A field of the table with its default."""
    return dataclasses.field(default=value, metadata={"setting": Setting(help=help, **more)})


# -- checks of values -------------------------------------------------------------------------------------------------


def _split(separator: str) -> BeforeValidator:
    """Take a list as one string, too."""

    def parts(value: object) -> object:
        return tuple(filter(None, map(str.strip, value.split(separator)))) if isinstance(value, str) else value

    return BeforeValidator(parts)


def _threads(value: object) -> object:
    """Check the value before pydantic does, whose message would name only one of the two choices."""
    if value != "auto" and not re.fullmatch("[1-9][0-9]{0,2}", str(value)):
        raise ValueError(f'{shown(value)} must be "auto" or a whole number from 1 to 999')
    return value


def _direct_port(value: object) -> object:
    """Check the value before pydantic does, as for `_threads`."""
    is_port = re.fullmatch("[0-9]{4,5}", str(value)) and MIN_PORT <= int(str(value)) <= MAX_PORT
    if value not in ("off", 0, "0") and not is_port:
        raise ValueError(f'{shown(value)} must be "off", 0 for any free port, or a port from {MIN_PORT} to {MAX_PORT}')
    return value


def _joined(value: object) -> object:
    """One list of an option that was given several times, each time perhaps with a list."""
    return ",".join(map(str, value)) if isinstance(value, tuple | list) else value


def _nodes(value: object) -> object:
    """Check the value before pydantic does, as for `_threads`."""
    if value != "auto" and not (re.fullmatch("[1-9][0-9]?", str(value)) and int(str(value)) <= MAX_NODES):
        raise ValueError(f'{shown(value)} must be "auto" or a whole number from 1 to {MAX_NODES}')
    return value


def _rendezvous(text: str) -> str:
    found = re.fullmatch(r"(\[[0-9a-fA-F:]+\]|[\w.-]{1,253}):(\d{1,5})", text)
    if not found or not MIN_PORT <= int(found[2]) <= MAX_PORT:
        raise ValueError(f"{text[:60]!r} is not HOST:PORT with a port from {MIN_PORT} to {MAX_PORT}")
    if found[1] in ("0.0.0.0", "0") or not found[1].strip("[]:0"):
        raise ValueError(f"{found[1]} means every network: name one address of machine 0")
    return text


def _devices(names: tuple[str, ...]) -> tuple[str, ...]:
    for name in names:
        if not re.fullmatch(r"cpu|mps|cuda(:\d{1,2})?", name):
            raise ValueError(f"{name[:40]!r} is not the name of a device: cuda:0, cuda:1 and so on, cpu, or mps")
    kinds = {name.partition(":")[0] for name in names}
    if len(kinds) > 1:
        raise ValueError(f"devices of one peer are all of one kind, not {' and '.join(sorted(kinds))}")
    if len(names) > 1 and "mps" in kinds:
        raise ValueError("mps is one device: give it once")
    if len(names) > 1 and "cuda" in names:
        raise ValueError("several GPUs need their numbers: cuda:0,cuda:1 and so on")
    if len(names) > MAX_RANKS:
        raise ValueError(f"at most {MAX_RANKS} devices, not {len(names)}")
    return names


def _hours(text: str) -> str:
    WeeklyHours.parse(text)
    return text


def _page_host(text: str) -> str:
    if not re.fullmatch(r"[\w.-]{1,253}(:\d{1,5})?", text):
        raise ValueError(f"{text[:60]!r} is not the name of a host, such as box.example.net or box.example.net:8443")
    return text.lower()


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


_Path = Annotated[Path, AfterValidator(home_path)]
_Size = BeforeValidator(sizes.amount)
_Rate = Annotated[float | None, BeforeValidator(lambda value: None if value is None else sizes.rate(value))]
_Quota = Annotated[str | None, BeforeValidator(lambda value: None if value is None else sizes.quota(value))]
_PauseRule = Literal["pause", "ignore"]


# -- the table --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, config=ConfigDict(extra="forbid", allow_inf_nan=False))
class PeerConfig:
    """This machine's side of a run. Made by `node.config.peer_sources.load_peer`."""

    bootstrap: Annotated[tuple[Annotated[str, AfterValidator(bootstrap_source)], ...], _split(",")] = setting(
        (),
        "Address of any peer of the run to join, or @FILE to read addresses from a file.",
        more="An address is a multiaddr that ends in /p2p/<peer id>. The file has one per line, and may appear later.",
        default="resume the run in the state directory, or start a new run",
        panel=RUN,
        metavar="ADDR",
        scope="joiner",
    )
    run_id: Annotated[str, AfterValidator(_run_id)] | None = setting(
        None, "Join this run only. Its id, or at least the first 12 digits.", panel=RUN, metavar="HEX", scope="joiner"
    )
    stage: Annotated[int | None, Field(ge=0, lt=MAX_STAGES)] = setting(
        None,
        "Join this stage, from 0.",
        more="A restart keeps it.",
        default="the one with the least capacity",
        panel=RUN,
        metavar="K",
        scope="joiner",
    )
    rounds: Annotated[int | None, Field(ge=1)] = setting(
        None,
        "Number of rounds in a new run. With --bootstrap: leave after N rounds.",
        more="It overrides rounds in [recipe].",
        panel=RUN,
        metavar="N",
        scope="peer",
    )
    wait_for_peers: Annotated[int, Field(ge=1, le=MAX_ROSTER)] = setting(
        1,
        "Begin to train a new run once N peers have joined, this one included.",
        more="Without stages, with butterfly: once they are in the roster; of more than four, the first four.",
        panel=RUN,
        metavar="N",
        option="--wait-for",
        scope="peer",
    )
    new: bool = setting(
        False,
        "Start a new run even if the state directory holds one, which moves to past/.",
        panel=RUN,
        option="--new",
        scope="peer",
    )
    state_dir: _Path | None = setting(
        None,
        "Where the peer keeps its identity and checkpoints.",
        default="a free peer-N in ~/.local/state/starling",
        metavar="DIR",
        scope="peer",
    )
    listen: Annotated[tuple[Annotated[str, AfterValidator(listen_address)], ...], _split(","), Field(min_length=1)] = (
        setting(
            ("/ip4/0.0.0.0/tcp/0", "/ip6/::/tcp/0"),
            "Multiaddr to listen on.",
            default="any port",
            metavar="MADDR",
            scope="peer",
        )
    )
    announce: Annotated[tuple[Annotated[str, AfterValidator(announced_address)], ...], _split(",")] = setting(
        (),
        "Multiaddr at which others can dial this peer, in place of those that it finds itself.",
        metavar="MADDR",
        scope="peer",
    )
    addresses_file: _Path | None = setting(
        None,
        "Write this peer's addresses to a file, which others read with --bootstrap @FILE.",
        metavar="FILE",
        scope="peer",
    )
    nat: bool = setting(True, "Map ports at the router and use relays.", scope="peer")
    direct_port: Annotated[Literal["off"] | int, BeforeValidator(_direct_port)] = setting(
        0,
        "TCP port for bulk data from other peers: 0 takes a free one, off sends all data over libp2p.",
        metavar="PORT",
        scope="peer",
    )
    checkpoint_every: Annotated[int, Field(ge=1, le=1000)] = setting(
        5,
        "Rounds between two checkpoints; in a run with fragments, cycles of rounds that average all of them.",
        metavar="ROUNDS",
    )
    disk_limit_bytes: Annotated[float, _Size, Field(gt=0, le=1e15)] = setting(
        20e9, "Disk space that checkpoints may take.", metavar="GB", option="--disk-limit", unit="GB"
    )
    backup_bytes: Annotated[float, _Size, Field(ge=0, le=1e15)] = setting(
        float(4 << 30),
        "Disk space for backups of other stages, in a run with stages.",
        more="0: none. A stage takes 8 bytes for each of its parameters, and the largest one as much again.",
        default="4 GiB",
        metavar="BYTES",
        option="--backup-bytes",
    )
    bandwidth_bytes_per_second: Annotated[float, _Size, Field(gt=0, le=1e12)] = setting(
        DEFAULT_BANDWIDTH, "Upload rate of this machine.", metavar="MB/S", option="--bandwidth", unit="MB"
    )
    upload_limit_bytes_per_second: _Rate = setting(
        None, "Maximum upload rate.", metavar="MB/S", option="--upload-limit", unit="MB", settable=True
    )
    download_limit_bytes_per_second: _Rate = setting(
        None, "Maximum download rate.", metavar="MB/S", option="--download-limit", unit="MB", settable=True
    )
    quota: _Quota = setting(
        None, "Send and take at most this much in a day, week or month: 50GB/month.", metavar="SIZE/PERIOD"
    )
    relay: bool = setting(
        False,
        "Let others send data through this peer; no limit counts these bytes.",
        more="At most 4 GiB and 30 minutes a connection. Without it, a peer with nat only introduces others: 128 KiB "
        "and two minutes.",
    )
    own_loop: bool = setting(
        False,
        "Train by a script of your own, which attaches to this peer.",
        more="See docs/own-loop.md.",
        option="--own-loop",
        scope="peer",
    )
    device: Literal["auto", "cpu", "cuda", "mps"] = setting(
        "auto", "Where to train.", more="auto is cuda or mps if there is one, else cpu.", metavar="NAME"
    )
    devices: Annotated[tuple[str, ...], _split(","), BeforeValidator(_joined), AfterValidator(_devices)] = setting(
        (),
        "Train on these devices together: cuda:0,cuda:1 and so on.",
        more="cpu,cpu are two processes on the CPU; a GPU that is named twice has two processes.",
        default="all GPUs if --device is auto and this is the machine's only peer, else one device",
        metavar="NAMES",
    )
    ranks: Annotated[int | None, Field(ge=1, le=MAX_RANKS)] = setting(
        None,
        "Number of devices to train on together: the first GPUs, or processes on the CPU.",
        default="as many as --devices",
        metavar="N",
    )
    nodes: Annotated[Literal["auto"] | int, BeforeValidator(_nodes)] = setting(
        1,
        "Number of machines whose devices train as this one peer: a small cluster.",
        more="auto takes it, --node and --rendezvous from torchrun or Slurm.",
        metavar="N",
        scope="peer",
    )
    node: Annotated[int, Field(ge=0, lt=MAX_NODES)] = setting(
        0,
        "With --nodes: number of this machine. 0 runs the peer, the others lend it their devices.",
        metavar="K",
        scope="peer",
    )
    rendezvous: Annotated[str, AfterValidator(_rendezvous)] | None = setting(
        None,
        "With --nodes: where the machines meet, an address of machine 0 and a port.",
        more="Only in a network that you trust: this connection has no authentication.",
        metavar="HOST:PORT",
        scope="peer",
    )
    rendezvous_timeout_seconds: Annotated[float, Field(ge=1, le=1e6)] = setting(
        300.0,
        "With --nodes: longest time that a machine waits for the others.",
        metavar="SECONDS",
        option="--rendezvous-timeout",
        scope="peer",
    )
    shard: Literal["auto", "zero1", "zero2", "zero3"] = setting(
        "auto",
        "What several devices divide: zero1 the optimiser's state, zero2 also gradients, zero3 also parameters.",
        more="auto is the first of these that fits into the memory of each device.",
        metavar="NAME",
    )
    tensor_parallel: Annotated[int, Field(ge=1, le=MAX_RANKS)] = setting(
        1, "Divide each layer among K devices, by the plan of the model.", metavar="K"
    )
    offload: Literal["none", "optimizer", "parameters"] = setting(
        "none",
        "What GPUs keep in the memory of the host: the optimiser's state; with several and zero3 also parameters.",
        more="It makes steps slower.",
        metavar="WHAT",
    )
    threads: Annotated[Literal["auto"] | int, BeforeValidator(_threads)] = setting(
        "auto", "Training threads: a number, or auto to measure which is fastest.", metavar="N"
    )
    nice: Annotated[int, Field(ge=0, le=19)] = setting(
        DEFAULT_NICE,
        "Niceness of training, 0 to 19: higher leaves more of the processor to other programs.",
        metavar="N",
    )
    worker_timeout_seconds: Annotated[float | None, Field(ge=1, le=1e6)] = setting(
        None,
        "Longest time that training may show no sign of work before its process is replaced.",
        more="Signs are steps, processor time, and bytes read or written.",
        default="as the task says, or 600",
        metavar="SECONDS",
        option="--worker-timeout",
    )
    precision: Literal["auto", "float32", "bfloat16", "float16"] = setting(
        "auto",
        "Precision of training.",
        more="auto is bfloat16 where that is faster, else float32. float16 is for GPUs that lack bfloat16; its loss is "
        "scaled.",
        metavar="NAME",
    )
    data: _Path | None = setting(
        None,
        "Text to train on: a file, a folder, or with --task hf hub:ORG/NAME@REVISION.",
        more="For hf also rows of JSON, CSV and parquet.",
        default="the source of Python's standard library",
        metavar="PATH",
    )
    model: Annotated[str, AfterValidator(_model)] | None = setting(
        None,
        "Task hf: the model on this machine. A folder, or ORG/NAME@REVISION on the hub of Hugging Face.",
        metavar="MODEL",
        only_hf=True,
    )
    template: _Path | None = setting(
        None,
        "Task hf: a file with the chat template to use instead of the model's own.",
        more="All peers of a run need the same. It may also be given as template in [hf].",
        metavar="FILE",
        only_hf=True,
    )
    checkpointing: bool = setting(
        False,
        "Take less memory, and about a third more time.",
        more="The activations of each block are computed again in the backward pass; the results are the same bits.",
    )
    compile: bool = setting(
        False,
        "Task hf: have torch compile the model.",
        more="The first step takes minutes, later ones less.",
        only_hf=True,
    )
    held_out: _Path | None = setting(
        None,
        "Task hf, for a new run: texts to evaluate on, which all peers get, or none.",
        default="a part of --data if it is text, else none",
        metavar="FILE|none",
        only_hf=True,
    )
    hours: Annotated[tuple[Annotated[str, AfterValidator(_hours)], ...], _split(";")] = setting(
        (),
        "Hours of the week in which this peer trains, such as 'mon-fri 18:00-08:00' or 'sat-sun'.",
        more="In one text they are separated by semicolons.",
        default="always",
        panel=PAUSES,
        metavar="HOURS",
    )
    on_battery: _PauseRule = setting("pause", "What to do on battery.", panel=PAUSES, metavar="WHAT")
    on_metered: _PauseRule = setting("pause", "What to do on a metered network.", panel=PAUSES, metavar="WHAT")
    on_low_memory: _PauseRule = setting("pause", "What to do when memory is short.", panel=PAUSES, metavar="WHAT")
    on_heat: _PauseRule = setting("pause", "What to do when a sensor is at its limit.", panel=PAUSES, metavar="WHAT")
    when_in_use: _PauseRule = setting(
        "ignore", "What to do while the keyboard or the mouse is used.", panel=PAUSES, metavar="WHAT"
    )
    when_busy: _PauseRule = setting(
        "ignore", "What to do while other programs keep a quarter of the processor busy.", panel=PAUSES, metavar="WHAT"
    )
    page: bool = setting(
        False,
        "Serve a web page of this peer, on this machine only, and metrics for Prometheus.",
        panel=OUTPUT,
        scope="peer",
    )
    page_port: Annotated[int, Field(ge=MIN_PORT, le=MAX_PORT)] = setting(
        7717, "TCP port of the page; if it is taken, the next free one.", panel=OUTPUT, metavar="PORT", scope="peer"
    )
    page_hosts: Annotated[tuple[Annotated[str, AfterValidator(_page_host)], ...], _split(",")] = setting(
        (),
        "Further host names to which the page answers, for a proxy of one's own in front of it.",
        panel=OUTPUT,
        option="",
        scope="peer",
    )
    nickname: Annotated[str, AfterValidator(_nickname)] = setting(
        "", "Name under which other peers show this one.", panel=OUTPUT, metavar="NAME", scope="peer"
    )
    json: bool = setting(
        False, "Print each round's report to stdout as a line of JSON.", panel=OUTPUT, option="--json", scope="peer"
    )
    log_level: Literal["debug", "info", "warning", "error"] = setting(
        "info", "Lowest log level to print.", panel=OUTPUT, metavar="LEVEL"
    )
    # No settings: the user's own task, or hf, that this peer agrees to run by --task; and key -> source of its value.
    consent: str | None = None
    origins: Mapping[str, str] = Field(default_factory=dict)

    @property
    def claim_bytes_per_second(self) -> float:
        """What this peer declares to the run as its bandwidth: no more than its limits allow."""
        limits = (self.upload_limit_bytes_per_second, self.download_limit_bytes_per_second)
        return min((self.bandwidth_bytes_per_second, *(each for each in limits if each is not None)))

    @property
    def declares_line(self) -> bool:
        """Whether its user has said what this machine's line carries, or may carry."""
        keys = "bandwidth_bytes_per_second", "upload_limit_bytes_per_second", "download_limit_bytes_per_second"
        return any(self.origins.get(key, "default") != "default" for key in keys)


SETTINGS: Mapping[str, Setting] = {
    field.name: field.metadata["setting"] for field in fields(PeerConfig) if "setting" in field.metadata
}
FILE_KEYS = tuple(key for key, each in SETTINGS.items() if each.scope != "joiner")
"""Keys that `[peer]` may hold. A run file starts or resumes a run, so it has no addresses to join."""


def option_name(key: str) -> str:
    """The option that sets a value; empty if there is none."""
    option = SETTINGS[key].option
    return f"--{key.replace('_', '-')}" if option is None else option


SETTABLE = {option_name(key).removeprefix("--"): key for key, each in SETTINGS.items() if each.settable}
"""Name of a setting for the command `set` -> its key."""
