"""The options of `join`, and those that several commands have: what each is called, takes and means."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

RUN, MACHINE, SHOWN = "The run", "This machine", "What is shown"


def option(panel: str, text: str, *names: str, **more: Any) -> Any:
    """One that nobody has to give; the panel is where `--help` shows it."""
    return typer.Option(*names, help=text, rich_help_panel=panel, show_default=False, **more)


def place(text: str) -> Path:
    """A path that somebody named: an empty one would be the current directory, which is `.`."""
    if not text.strip():
        raise typer.BadParameter("it is empty; name a place, or leave the option out")
    return Path(text)


RunFileOption = Annotated[
    Path | None, option(RUN, "Settings of a new run; in \\[peer], of this machine.", metavar="FILE.toml", parser=place)
]
TaskOption = Annotated[
    str | None,
    option(
        RUN,
        "What a new run trains: gpt (the default), paced, or your own, module:factory. With --bootstrap: agree to it.",
        metavar="NAME",
    ),
]
ProtocolOption = Annotated[
    str | None,
    option(
        RUN,
        "How the peers of a new run average: butterfly (the default), gossip, moshpit, push_sum; or a baseline: "
        "data_parallel, ring, parameter_server, parameter_server_async. Which when: docs/protocols.md.",
        metavar="NAME",
    ),
]
TaskOfSwarmOption = Annotated[
    str | None, option(RUN, "What they train: gpt (the default), paced, or your own, module:factory.", metavar="NAME")
]
RunningPeerOption = Annotated[
    Path | None,
    typer.Option(metavar="DIR", envvar="NODE_STATE_DIR", help="Which peer. Default: the one here.", parser=place),
]
StateDirToReadOption = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        envvar="NODE_STATE_DIR",
        help="Which peer's, running or not. Default: the one here.",
        parser=place,
    ),
]

BootstrapOption = Annotated[
    list[str] | None,
    option(
        RUN,
        "A peer's address, or @FILE that names some, perhaps later; repeatable. Without, a new run starts, or one held "
        "here goes on.",
        metavar="ADDR",
    ),
]
RunIdOption = Annotated[str | None, option(RUN, "Join this run only: its id, or the first 12 digits.", metavar="HEX")]
RoundsOption = Annotated[
    int | None, option(RUN, "Rounds of a new run; with --bootstrap, leave after so many.", min=1, metavar="N")
]
WaitForPeersOption = Annotated[
    int | None,
    option(RUN, "Start a new run's first round when so many peers are there.", "--wait-for", min=1, metavar="N"),
]
NewOption = Annotated[bool | None, option(RUN, "Start a new run even if the state directory holds one.", "--new")]
StateDirOption = Annotated[
    Path | None,
    option(
        MACHINE, "Identity and run. Default: a free peer-N in ~/.local/state/starling.", metavar="DIR", parser=place
    ),
]
ListenOption = Annotated[
    list[str] | None, option(MACHINE, "Multiaddr to listen on; repeatable. Default: any port.", metavar="MADDR")
]
AnnounceOption = Annotated[list[str] | None, option(MACHINE, "Multiaddr to tell others; repeatable.", metavar="MADDR")]
AddressesFileOption = Annotated[
    Path | None,
    option(
        MACHINE, "Keep this peer's addresses in a file, for --bootstrap @FILE of others.", metavar="FILE", parser=place
    ),
]
NatOption = Annotated[bool | None, option(MACHINE, "Map ports at the router and use relays.", "--nat/--no-nat")]
CheckpointEveryOption = Annotated[
    int | None, option(MACHINE, "Rounds between two checkpoints. Default: 5.", min=1, metavar="ROUNDS")
]
DiskLimitOption = Annotated[
    float | None, option(MACHINE, "What checkpoints may take of the disk. Default: 20.", min=0.001, metavar="GB")
]
BandwidthOption = Annotated[
    float | None,
    option(MACHINE, "Upload of this machine, megabytes per second. Default: 12.5.", min=0.001, metavar="MB/S"),
]
DeviceOption = Annotated[
    str | None, option(MACHINE, "Where to train: auto (the default), cpu, cuda or mps.", metavar="NAME")
]
ThreadsOption = Annotated[
    str | None, option(MACHINE, "Threads that train: a number, or auto, which measures; the default.", metavar="N")
]
NiceOption = Annotated[
    int | None,
    option(
        MACHINE, "How far training stands back for other programs, 0 to 19. Default: 10.", min=0, max=19, metavar="N"
    ),
]
PrecisionOption = Annotated[
    str | None, option(MACHINE, "Of training: auto, the default, float32, bfloat16.", metavar="NAME")
]
DataOption = Annotated[
    Path | None,
    option(MACHINE, "Text to train on: file or folder. Default: Python's own source.", metavar="PATH", parser=place),
]
NicknameOption = Annotated[str | None, option(SHOWN, "A name for people.", metavar="NAME")]
JsonOption = Annotated[bool | None, option(SHOWN, "Print each round's report on stdout, a line of JSON.", "--json")]
LogLevelOption = Annotated[str | None, option(SHOWN, "debug, info, warning or error. Default: info.", metavar="LEVEL")]
