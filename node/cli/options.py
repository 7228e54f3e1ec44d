"""The options of `join`, and those that several commands share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from node.config.text import in_quotes

RUN, MACHINE, PAUSES, SHOWN = "The run", "This machine", "Pauses", "Output"


def option(panel: str, text: str, *names: str, **more: Any) -> Any:
    """An optional option without a shown default; `panel` is the section of `--help` that lists it."""
    return typer.Option(*names, help=text, rich_help_panel=panel, show_default=False, **more)


def place(text: str) -> Path:
    """Parse a path from the command line. An empty one is an error: `Path` would read it as the current directory."""
    if not text.strip():
        raise typer.BadParameter("the path is empty: give one, or leave the option out")
    if text == os.environ.get("NODE_STATE_DIR"):  # as `join` reads it
        text = text.strip()
        if why := in_quotes(text):
            raise typer.BadParameter(f"NODE_STATE_DIR: {why}")
    return Path(text)


RunFileOption = Annotated[
    Path | None,
    option(RUN, "Settings of a new run, and in \\[peer] those of this machine.", metavar="FILE.toml", parser=place),
]
TaskOption = Annotated[
    str | None,
    option(
        RUN,
        "What a new run trains: gpt (the default), paced, hf (a model of Hugging Face), or your own as module:factory. "
        "With --bootstrap: agree to the swarm's module:factory, or to hf.",
        metavar="NAME",
    ),
]
ProtocolOption = Annotated[
    str | None,
    option(
        RUN,
        "How the peers of a new run average: butterfly (the default), gossip, moshpit or push_sum; or a baseline: "
        "data_parallel, ring, parameter_server or parameter_server_async. docs/protocols.md says which to choose.",
        metavar="NAME",
    ),
]
StagesOption = Annotated[
    int | None,
    option(
        RUN,
        "Cut the model of a new run into N stages, of which each peer holds one. Default: 1, each peer holds it whole.",
        min=1,
        max=32,
        metavar="N",
    ),
]
TaskOfSwarmOption = Annotated[
    str | None,
    option(RUN, "What the swarm trains: gpt (the default), paced, hf, or your own as module:factory.", metavar="NAME"),
]
RunningPeerOption = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        envvar="NODE_STATE_DIR",
        help="State directory of the peer. Default: the only peer that runs on this machine.",
        parser=place,
    ),
]
StateDirsToReadOption = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="DIR",
        help="State directory to read; its peer need not be running. Repeatable in a run with stages: one of each "
        "stage. Default: the variable NODE_STATE_DIR, else the only one on this machine, or all of a run with stages.",
        show_default=False,
        parser=place,
    ),
]

BootstrapOption = Annotated[
    list[str] | None,
    option(
        RUN,
        "Address of any peer of the run to join, or @FILE to read addresses from a file; repeatable. Without it, "
        "resume the run in the state directory, or start a new run.",
        metavar="ADDR",
    ),
]
RunIdOption = Annotated[
    str | None, option(RUN, "Join this run only. Its id, or at least the first 12 digits.", metavar="HEX")
]
StageOption = Annotated[
    int | None,
    option(RUN, "Join this stage, from 0. Default: the one with the least capacity.", min=0, max=31, metavar="K"),
]
RoundsOption = Annotated[
    int | None,
    option(RUN, "Number of rounds in a new run. With --bootstrap: leave after N rounds.", min=1, metavar="N"),
]
WaitForPeersOption = Annotated[
    int | None,
    option(RUN, "Start a new run's first round once N peers are there.", "--wait-for", min=1, metavar="N"),
]
NewOption = Annotated[
    bool | None, option(RUN, "Start a new run even if the state directory holds one, which moves to past/.", "--new")
]
StateDirOption = Annotated[
    Path | None,
    option(
        MACHINE,
        "Where the peer keeps its identity and checkpoints. Default: a free peer-N in ~/.local/state/starling.",
        metavar="DIR",
        parser=place,
    ),
]
ListenOption = Annotated[
    list[str] | None, option(MACHINE, "Multiaddr to listen on; repeatable. Default: any port.", metavar="MADDR")
]
AnnounceOption = Annotated[
    list[str] | None,
    option(
        MACHINE,
        "Multiaddr at which others can dial this peer, in place of those that it finds itself; repeatable.",
        metavar="MADDR",
    ),
]
AddressesFileOption = Annotated[
    Path | None,
    option(
        MACHINE,
        "Write this peer's addresses to a file, which others read with --bootstrap @FILE.",
        metavar="FILE",
        parser=place,
    ),
]
NatOption = Annotated[
    bool | None, option(MACHINE, "Map ports at the router and use relays. Default: --nat.", "--nat/--no-nat")
]
DirectPortOption = Annotated[
    str | None,
    option(
        MACHINE,
        "TCP port for bulk data from other peers: 0 takes a free one, off sends all data over libp2p. Default: 0.",
        metavar="PORT",
    ),
]
CheckpointEveryOption = Annotated[
    int | None, option(MACHINE, "Rounds between two checkpoints. Default: 5.", min=1, metavar="ROUNDS")
]
DiskLimitOption = Annotated[
    float | None, option(MACHINE, "Disk space that checkpoints may take. Default: 20.", min=0.001, metavar="GB")
]
BandwidthOption = Annotated[
    float | None,
    option(MACHINE, "Upload rate of this machine in megabytes per second. Default: 12.5.", min=0.001, metavar="MB/S"),
]
UploadLimitOption = Annotated[
    str | None,
    option(MACHINE, "Send at most this much per second: megabytes, or with a unit, like 800kB.", metavar="MB/S"),
]
DownloadLimitOption = Annotated[
    str | None,
    option(MACHINE, "Take at most this much per second: megabytes, or with a unit, like 800kB.", metavar="MB/S"),
]
QuotaOption = Annotated[
    str | None,
    option(MACHINE, "Send and take at most this much in a day, week or month: 50GB/month.", metavar="SIZE/PERIOD"),
]
RelayOption = Annotated[
    bool | None,
    option(
        MACHINE,
        "Let others talk through this peer; no limit counts these bytes. Default: --relay, but with a limit or a quota "
        "--no-relay.",
        "--relay/--no-relay",
    ),
]
DeviceOption = Annotated[
    str | None, option(MACHINE, "Where to train: auto (the default), cpu, cuda or mps.", metavar="NAME")
]
ThreadsOption = Annotated[
    str | None,
    option(MACHINE, "Training threads: a number, or auto (the default) to measure which is fastest.", metavar="N"),
]
NiceOption = Annotated[
    int | None,
    option(
        MACHINE,
        "Niceness of training, 0 to 19: higher leaves more of the processor to other programs. Default: 10.",
        min=0,
        max=19,
        metavar="N",
    ),
]
WorkerTimeoutOption = Annotated[
    float | None,
    option(
        MACHINE,
        "Longest time that training may show no sign of work before its process is replaced. Default: 600.",
        min=1,
        max=1e6,
        metavar="SECONDS",
    ),
]
PrecisionOption = Annotated[
    str | None, option(MACHINE, "Precision of training: auto (the default), float32 or bfloat16.", metavar="NAME")
]
DataOption = Annotated[
    Path | None,
    option(
        MACHINE,
        "Text to train on: a file, a folder, or with --task hf hub:ORG/NAME@REVISION. Default: the source of Python's "
        "standard library.",
        metavar="PATH",
        parser=place,
    ),
]
HoursOption = Annotated[
    list[str] | None,
    option(
        PAUSES,
        "Hours of the week in which this peer trains, such as 'mon-fri 18:00-08:00' or 'sat-sun'; repeatable. "
        "Default: always.",
        metavar="HOURS",
    ),
]


def _pause_rule(when: str, default: str = "pause") -> Any:
    """An option that says what to do in some state of the machine: pause or ignore it."""
    choices = "pause (the default) or ignore it" if default == "pause" else "pause, or ignore it (the default)"
    return Annotated[str | None, option(PAUSES, f"{when}: {choices}.", metavar="WHAT")]


OnBatteryOption = _pause_rule("On battery")
OnMeteredOption = _pause_rule("On a metered network")
OnLowMemoryOption = _pause_rule("When memory is short")
OnHeatOption = _pause_rule("When a sensor is at its limit")
WhenInUseOption = _pause_rule("While the keyboard or the mouse is used", "ignore")
WhenBusyOption = _pause_rule("While other programs keep a quarter of the processor busy", "ignore")
TrainOption = Annotated[
    Literal["lora", "full"] | None,
    option(RUN, "With --task hf: train adapters (lora, the default), or the whole model (full)."),
]
LoraOption = Annotated[
    int | None, option(RUN, "With --task hf: rank of the adapters. Default: 16.", min=1, max=1024, metavar="RANK")
]
InnerOption = Annotated[
    Literal["adamw", "muon"] | None,
    option(
        RUN,
        "Optimiser of the inner steps: muon for hidden matrices, or adamw. Default: muon for gpt, adamw for hf and for "
        "your own tasks.",
    ),
]
ModelOption = Annotated[
    str | None,
    option(
        MACHINE,
        "With --task hf: the model on this machine. A folder, or ORG/NAME@REVISION on the hub of Hugging Face.",
        metavar="MODEL",
    ),
]
ModelToReadOption = Annotated[
    str | None,
    typer.Option(
        metavar="MODEL",
        envvar="NODE_MODEL",
        help="Of the task hf, the model on this machine: a folder, or ORG/NAME@REVISION on the hub of Hugging Face.",
        show_default=False,
    ),
]
_TEMPLATE = "Of the task hf, a file with the chat template to use instead of the model's own."
TemplateOption = Annotated[Path | None, option(MACHINE, _TEMPLATE, metavar="FILE", parser=place)]
TemplateToReadOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", envvar="NODE_TEMPLATE", help=_TEMPLATE, show_default=False, parser=place),
]
CheckpointingOption = Annotated[
    bool | None,
    option(
        MACHINE,
        "With --task hf: take less memory, and a third more time. Default: --no-checkpointing.",
        "--checkpointing/--no-checkpointing",
    ),
]
CompileOption = Annotated[
    bool | None,
    option(MACHINE, "With --task hf: have torch compile the model. Default: --no-compile.", "--compile/--no-compile"),
]
HeldOutOption = Annotated[
    Path | None,
    option(
        MACHINE,
        "With --task hf, for a new run: texts to evaluate on, which all peers get, or none. Default: a part of --data "
        "if it is text, else none.",
        metavar="FILE|none",
        parser=place,
    ),
]
PageOption = Annotated[
    bool | None,
    option(
        SHOWN,
        "Serve a web page of this peer, on this machine only, and metrics for Prometheus. Default: --no-page.",
        "--page/--no-page",
    ),
]
PagePortOption = Annotated[
    int | None,
    option(SHOWN, "TCP port of the page; if it is taken, the next free one. Default: 7717.", min=1024, max=65_535),
]
PageOfSwarmOption = Annotated[
    bool, typer.Option("--page/--no-page", help="Serve a web page of the first peer, on this machine only.")
]
NicknameOption = Annotated[str | None, option(SHOWN, "Name under which other peers show this one.", metavar="NAME")]
JsonOption = Annotated[bool | None, option(SHOWN, "Print each round's report to stdout as a line of JSON.", "--json")]
LogLevelOption = Annotated[
    str | None,
    option(SHOWN, "Lowest log level to print: debug, info, warning or error. Default: info.", metavar="LEVEL"),
]
