"""The options of `join` that follow from the table of settings, and those that several commands share."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from node.config.multiaddrs import home_path
from node.config.peer_config import OUTPUT, RUN, SETTINGS, PeerConfig, option_name
from node.config.sizes import UNITS, in_unit
from node.config.toml import in_quotes

_Command = TypeVar("_Command", bound=Callable[..., Any])
_HINTS = get_type_hints(PeerConfig)
_DEFAULTS: dict[str, Any] = {field.name: field.default for field in fields(PeerConfig)}
_IN_UNITS = {"MB": "In megabytes per second, or with a unit, like 800kB.", "GB": "In gigabytes, or with a unit."}


OF_RUN = ("run", "private", "task", "protocol", "stages", "lora", "train", "inner")
"""Options of `join` about a run to start."""
USUAL = "Usual"  # First section of `join --help`


class CommandGroup(TyperGroup):
    """Commands whose help shows no type after a flag, which takes no value."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _as_shown(super().get_params(ctx))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command = super().get_command(ctx, cmd_name)
        if command is not None:
            _as_shown(command.get_params(ctx))
        return command


class JoinCommand(TyperCommand):
    """Its help shows the usual options first, then examples. Where a flag can be turned off, it is `--[no-]flag`.

    typer would give names a column of their own, and types another: in 80 columns, the words get 17.
    """

    def format_help(self, ctx: Any, formatter: Any) -> None:
        from rich.console import Console
        from rich.panel import Panel
        from rich.table import Table
        from rich.text import Text

        console, panels = Console(highlight=False), dict[str, Table]()
        for each in cast(list[Any], self.get_params(ctx)):
            if each.param_type_name == "argument":
                panels.setdefault(USUAL, Table.grid(padding=(0, 2))).add_row(Text("[TICKET]", "bold cyan"), each.help)
                continue
            name = each.opts[0].replace("--", "--[no-]", 1) if each.secondary_opts else each.opts[0]
            label = Text.assemble((name, "bold cyan"), (f" {each.display_type_rich(ctx)}".rstrip(), "yellow"))
            rows = panels.setdefault(each.rich_help_panel, Table.grid(padding=(0, 2)))
            rows.add_row(label, Text.from_markup(each.help))
        console.print(f"Usage: {ctx.command_path} [OPTIONS] [TICKET]\n\n{self.help}\n", markup=False)
        for title, rows in panels.items():
            rows.columns[0].no_wrap = True
            console.print(Panel(rows, title=title, title_align="left", border_style="dim"))
            if title == USUAL:
                console.print(f"{self.epilog}\n", markup=False)


def _as_shown(params: list[Any]) -> list[Any]:
    for each in params:
        each.hidden = getattr(each, "hidden", False) or each.name in ("install_completion", "show_completion")
        if getattr(each, "is_bool_flag", False):
            each.metavar = ""
    *own, help_option = params
    if own and all(getattr(each, "rich_help_panel", None) for each in own):  # else typer lists it before all others
        help_option.rich_help_panel = OUTPUT
    return params


def option(panel: str | None, text: str, *names: str, **more: Any) -> Any:
    """An optional option without a shown default; `panel` is the section of `--help` that lists it."""
    return typer.Option(*names, help=text, rich_help_panel=panel, show_default=False, **more)


def path(text: str) -> Path:
    """Parse a path from the command line. An empty one is an error: `Path` would read it as the current directory."""
    if not text.strip():
        raise typer.BadParameter("the path is empty: give one, or leave the option out")
    if text == os.environ.get("NODE_STATE_DIR"):  # as `join` reads it
        text = text.strip()
        if why := in_quotes(text):
            raise typer.BadParameter(f"NODE_STATE_DIR: {why}")
    try:
        return home_path(Path(text))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


# -- from the table ---------------------------------------------------------------------------------------------------


_USUAL = {
    "bootstrap": "Address of any peer of a run to join.",
    "run_id": "Join this run only; 12 digits do.",
    "nickname": "Name under which others show this peer.",
    "data": "Text to train on: a file or folder.",
    "page": "Serve a web page on this machine.",
    "upload_limit_bytes_per_second": "Send no faster: 1 (MB/s), or 800kB.",
    "hours": "Train only in 'mon-fri 18:00-08:00'.",
}
"""What that section says, in few words: the whole ones are in the table."""


def _place(key: str) -> int:
    return [*_USUAL].index(key) if key in _USUAL else len(_USUAL)


def with_settings(command: _Command) -> _Command:
    """Add an option for each setting of the machine to a command that takes them as keyword arguments."""
    signature = inspect.signature(command, eval_str=True)
    own = [each for each in signature.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
    first, rest = own[:1], own[1:]  # typer's context, and options after those of the table
    added = [_parameter(key) for key in sorted(SETTINGS, key=_place) if option_name(key)]
    command.__signature__ = signature.replace(parameters=[*first, *added, *rest])  # type: ignore[attr-defined]
    return command


def _parameter(key: str) -> inspect.Parameter:
    kind = _kind(key)
    return inspect.Parameter(
        key, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, _option(key, kind)]
    )


def shared(key: str) -> Any:
    """The annotation of another command's option that has the value of a setting, also by its variable."""
    made = option(None, SETTINGS[key].help, metavar=SETTINGS[key].metavar, envvar=f"NODE_{key.upper()}")
    kind = _kind(key)
    made.parser = path if kind is Path else None
    return Annotated[kind | None, made]


def _kind(key: str) -> Any:
    """The type of the option's value. What is not a plain one stays a text, which the table checks."""
    hint = _HINTS[key]
    if get_origin(hint) is tuple:
        return list[str]
    kinds = {*(get_args(hint) or (hint,))} - {type(None)}
    plain = kinds.pop() if len(kinds) == 1 and not SETTINGS[key].unit else str
    return plain if plain in (bool, int, float, Path) else str


def _option(key: str, kind: Any) -> Any:
    setting, name = SETTINGS[key], option_name(key)
    if kind is bool and setting.option is None:
        name = f"{name}/--no-{name.removeprefix('--')}"
    more: dict[str, Any] = {}
    if kind is Path:
        more["parser"] = path
    elif setting.unit:
        more["parser"] = lambda text: in_unit(text, setting.unit)
    elif kind in (int, float):
        more |= _range(key)
    if key in _USUAL:
        return option(USUAL, _USUAL[key], name, metavar=setting.metavar, **more)
    return option(setting.panel, _help(key, kind), name, metavar=setting.metavar, **more)


def _range(key: str) -> dict[str, Any]:
    bounds = PeerConfig.__pydantic_fields__[key].metadata  # type: ignore[attr-defined]
    found = {
        name: getattr(each, name)
        for each in bounds
        for name in ("ge", "le", "lt")
        if getattr(each, name, None) is not None
    }
    return {"min": found.get("ge"), "max": found.get("le", found["lt"] - 1 if "lt" in found else None)}


def _help(key: str, kind: Any) -> str:
    setting = SETTINGS[key]
    words = [setting.help]
    if get_origin(_HINTS[key]) is Literal:
        words.append(f"One of {', '.join(get_args(_HINTS[key]))}.")
    if get_origin(_HINTS[key]) is tuple:
        words.append("Repeatable.")
    if setting.unit:
        words.append(_IN_UNITS[setting.unit])
    if default := setting.default or default_text(key, kind):
        words.append(f"Default: {default}.")
    return " ".join(words)


def default_text(key: str, kind: Any) -> str:
    setting, value = SETTINGS[key], _DEFAULTS[key]
    if kind is bool:
        name = option_name(key).removeprefix("--")
        return "" if value is None or setting.option else f"--{name}" if value else f"--no-{name}"
    if value is None or value in ("", ()):
        return ""
    return f"{value / UNITS[setting.unit]:g}" if setting.unit else str(value)


# -- the run's --------------------------------------------------------------------------------------------------------

RunFileOption = Annotated[
    Path | None,
    option(RUN, "Settings of a new run, and in \\[peer] those of this machine.", metavar="FILE.toml", parser=path),
]
TicketArgument = Annotated[
    str | None,
    typer.Argument(metavar="TICKET", help="Join the private run of this ticket.", show_default=False),
]
TicketFileOption = Annotated[
    Path | None,
    option(
        RUN,
        "Read the ticket from a file, or with - from stdin. It may also be in the variable STARLING_TICKET. Other "
        "users of this machine see what is typed.",
        metavar="FILE",
        parser=path,
    ),
]
PrivateOption = Annotated[bool | None, option(USUAL, "Start a private run: others need a ticket.", "--private")]
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

# -- those of several commands ----------------------------------------------------------------------------------------

RunningPeerOption = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        envvar="NODE_STATE_DIR",
        help="State directory of the peer. Default: the only peer that runs on this machine.",
        parser=path,
    ),
]
StateDirsToReadOption = Annotated[
    list[Path] | None,
    option(
        None,
        "State directory to read; its peer need not be running. Repeatable in a run with stages: one of each stage. "
        "Default: the variable NODE_STATE_DIR, else the only one on this machine, or all of a run with stages.",
        metavar="DIR",
        parser=path,
    ),
]
ModelToReadOption = shared("model")
TemplateToReadOption = shared("template")
