"""The command `plan`: which way to train a model on some machines, before anything is started."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from node.cli import options
from node.cli.remote import CommandError
from node.config.sizes import in_unit
from node.config.toml import ConfigError
from node.planning.machines import (
    MOST_LATENCY_SECONDS,
    MOST_PEERS,
    USUAL_LATENCY_SECONDS,
    PlannedSwarm,
    load_machines,
    machine,
)
from node.reporting.status import to_json
from node.runtime.clock import monotonic_seconds
from node.runtime.program import typed

if TYPE_CHECKING:
    from node.planning.costs import Outlook

app = typer.Typer()


@app.command()
def plan(
    *,
    run: options.RunFileOption = None,
    machines: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.toml",
            help="The peers' machines: a table \\[\\[peers]] for each kind, with count, speed (this machine is 1), "
            "upload, download and memory; and latency_seconds.",
            show_default=False,
            parser=options.path,
        ),
    ] = None,
    peers: Annotated[
        int | None,
        typer.Option(min=1, max=MOST_PEERS, metavar="N", help="Instead: so many equal machines.", show_default=False),
    ] = None,
    upload: Annotated[
        str | None,
        typer.Option(metavar="MB/S", help="Of each of these, a second: 1.25, or 800kB.", show_default=False),
    ] = None,
    download: Annotated[
        str | None, typer.Option(metavar="MB/S", help="Default: as --upload.", show_default=False)
    ] = None,
    memory: Annotated[
        str | None, typer.Option(metavar="GB", help="Of each. Default: not looked at.", show_default=False)
    ] = None,
    latency_seconds: Annotated[
        float | None,
        typer.Option(
            "--latency-seconds",
            metavar="S",
            help=f"One way between two of these. Default: {USUAL_LATENCY_SECONDS}.",
            show_default=False,
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    """Say how fast a model would train on some machines, whole or in stages, and which to take. Starts nothing."""
    if machines and any(each is not None for each in (peers, upload, download, memory, latency_seconds)):
        raise CommandError("--machines names all machines: leave --peers and what is about them out")
    try:
        those = load_machines(machines) if machines else _equal(peers, upload, download, memory, latency_seconds)
        from node.planning.outlook import best, measured_model, outlooks, table

        model = measured_model(run, monotonic_seconds)
    except ConfigError as error:
        raise CommandError(str(error)) from None
    found, work = outlooks(model, those), model.whole
    taken = best(found)
    told = {
        "parameters": work.parameters,
        "step_tokens": work.step_tokens,
        "step_seconds": work.step_seconds,
        "ways": [asdict(each) for each in found],
        "best": taken.way if taken else None,
    }
    if not json:
        print(f"{work.parameters:,} parameters; a step of {work.step_tokens:,} tokens takes this machine ", end="")
        print(f"{work.step_seconds:.2g} s\n\n{table(found)}\n")
    if taken is None:
        refused = CommandError("none of these ways can train this model on these machines: the table says why")
        refused.found = told
        raise refused
    print(to_json(told) if json else f"take: {taken.way}: {_command(taken, run, model.stages)}")
    return 0


def _equal(
    peers: int | None, upload: str | None, download: str | None, memory: str | None, latency_seconds: float | None
) -> PlannedSwarm:
    if peers is None or upload is None:
        raise ConfigError("which machines? give --machines FILE.toml, or --peers N and --upload MB/S")
    sizes = {"upload": (upload, "MB"), "download": (download, "MB"), "memory": (memory, "GB")}
    each = machine({name: text and in_unit(text, unit) for name, (text, unit) in sizes.items()})
    seconds = USUAL_LATENCY_SECONDS if latency_seconds is None else latency_seconds
    if not 0 <= seconds <= MOST_LATENCY_SECONDS:
        raise ConfigError(f"--latency-seconds must be from 0 to {MOST_LATENCY_SECONDS:g}, not {seconds:g}")
    return PlannedSwarm((each,) * peers, seconds)


def _command(taken: Outlook, run: Path | None, stages: int) -> str:
    """What starts such a run. `stages` are those of its file."""
    line = typed("join") + (f" --run {shlex.quote(str(run))}" if run else "")
    if taken.stages != stages:
        line += f" --stages {taken.stages}"
    if not taken.overlaps:
        return line
    return f"{line} --bandwidth MB/S\nwith its upload: the founder then chooses whether rounds overlap, and how"
