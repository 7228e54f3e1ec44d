"""Commands that need no swarm: a run file to begin with; the model in a peer's directory, taken out or tried."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from node.cli import options
from node.cli.remote import CommandError, PeerUnreachable

if TYPE_CHECKING:
    from node.export.trained_model import TrainedModel

MAX_TOKENS = 1_000_000
MAX_SEED = (1 << 63) - 1

app = typer.Typer()


@app.command()
def init(
    file: Annotated[Path, typer.Argument(metavar="FILE.toml", help="A file that is not there yet.")] = Path("run.toml"),
) -> int:
    """Write a run file with every setting of a new run, what it means and its default."""
    from node.config.run_file import run_file

    try:
        with file.open("x", encoding="utf-8") as opened:
            opened.write(run_file())
    except FileExistsError:
        raise CommandError(f"{file} is there already, and nothing is overwritten: give another name") from None
    except OSError as error:
        with suppress(OSError):
            file.unlink()  # what fitted on a full disk is no run file
        raise CommandError(f"{file} cannot be written ({error.strerror}): give a path that can") from None
    print(f"wrote {file}: edit it, then: python -m node join --run {file}", file=sys.stderr)
    return 0


@app.command()
def export(
    out: Annotated[Path, typer.Option(metavar="DIR", help="A directory that is not there yet.", parser=options.place)],
    state_dir: options.StateDirToReadOption = None,
) -> int:
    """Take the model of the newest checkpoint out: a directory that Hugging Face transformers loads."""
    model = _trained(state_dir)
    from node.export import hugging_face as exporting

    try:
        exporting.export(model, out)
    except exporting.ExportError as error:
        raise CommandError(str(error)) from None
    print(f"wrote {out}: run {model.manifest.run_id[:12]} after {model.checkpoint.round} rounds", file=sys.stderr)
    return 0


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="The beginning of a text.")],
    state_dir: options.StateDirToReadOption = None,
    tokens: Annotated[int, typer.Option(min=1, max=MAX_TOKENS, metavar="N", help="Bytes to write.")] = 400,
    temperature: Annotated[
        float, typer.Option(min=0, max=100, metavar="T", help="0: always the likeliest byte.")
    ] = 0.8,
    seed: Annotated[int, typer.Option(min=0, max=MAX_SEED, metavar="S", help="Of what is drawn.")] = 0,
) -> int:
    """Let the model of the newest checkpoint continue a text, on this machine."""
    if temperature != temperature:
        raise CommandError("--temperature must be a number from 0 to 100")
    model = _trained(state_dir)
    from node.export.generation import write
    from node.export.trained_model import TrainedError

    try:
        for piece in write(model, prompt.encode(errors="surrogateescape"), tokens, temperature, seed):
            print(piece, end="", flush=True)
    except TrainedError as error:
        raise CommandError(str(error)) from None
    print()
    return 0


def _trained(state_dir: Path | None) -> TrainedModel:
    from node.export.trained_model import TrainedError, load_trained

    try:
        return load_trained(state_dir or _the_one_here())
    except (TrainedError, OSError) as error:
        raise PeerUnreachable(str(error)) from None


def _the_one_here() -> Path:
    from node.ui.control import home

    found = [each.parent for each in sorted(home().glob("*/manifest.bin"))]
    if not found:
        raise PeerUnreachable(f"no peer was in a run in {home()}: give its directory by --state-dir")
    if len(found) > 1:
        shown = " or ".join(map(str, found[:8]))
        raise CommandError(f"{len(found)} peers were in runs here: choose one by --state-dir {shown}")
    return found[0]
