"""The commands `init`, `export` and `generate`, which work on files. Only `export --bootstrap` contacts a peer."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from node.cli import options
from node.cli.remote import CommandError, PeerUnreachable, fetch

if TYPE_CHECKING:
    from node.export.trained_model import TrainedModel

MAX_TOKENS = 1_000_000
MAX_SEED = (1 << 63) - 1

app = typer.Typer()


@app.command()
def init(
    file: Annotated[Path, typer.Argument(metavar="FILE.toml", help="File to create; it must not exist yet.")] = Path(
        "run.toml"
    ),
) -> int:
    """Write a run file that lists every setting with its meaning and its default, for you to edit."""
    from node.config.run_file import run_file

    try:
        with file.open("x", encoding="utf-8") as opened:
            opened.write(run_file())
    except FileExistsError:
        raise CommandError(f"{file} exists already and is not overwritten: give another name") from None
    except OSError as error:
        with suppress(OSError):
            file.unlink()  # on a full disk it is incomplete
        raise CommandError(f"{file} cannot be written ({error.strerror}): give a writable path") from None
    print(f"wrote {file}: edit it, then: python -m node join --run {file}", file=sys.stderr)
    return 0


@app.command()
def export(
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Directory to create; it must not exist yet.", parser=options.place)
    ],
    state_dir: options.StateDirsToReadOption = None,
    bootstrap: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ADDR",
            help="Fetch the model from the peer at this address instead; it may run anywhere. Repeatable.",
            show_default=False,
        ),
    ] = None,
) -> int:
    """Export the newest checkpoint of a run's model as a directory that Hugging Face transformers can load."""
    if bootstrap and state_dir:
        raise CommandError("--bootstrap and --state-dir name different models: give one of them")
    model = _fetched(bootstrap) if bootstrap else _trained(state_dir)
    from node.export import hugging_face as exporting

    try:
        exporting.export(model, out)
    except exporting.ExportError as error:
        raise CommandError(str(error)) from None
    print(f"wrote {out}: run {model.manifest.run_id[:12]} after {model.rounds[0]} rounds", file=sys.stderr)
    return 0


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="Text to continue.")],
    state_dir: options.StateDirsToReadOption = None,
    tokens: Annotated[int, typer.Option(min=1, max=MAX_TOKENS, metavar="N", help="Number of bytes to write.")] = 400,
    temperature: Annotated[
        float, typer.Option(min=0, max=100, metavar="T", help="Randomness of the text. 0: always the likeliest byte.")
    ] = 0.8,
    seed: Annotated[int, typer.Option(min=0, max=MAX_SEED, metavar="S", help="Seed of the random choices.")] = 0,
) -> int:
    """Continue a text with the newest checkpoint of a run's model."""
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


def _fetched(addresses: Sequence[str]) -> TrainedModel:
    with tempfile.TemporaryDirectory() as directory:
        return _trained(fetch(addresses, Path(directory)))


def _trained(state_dirs: Sequence[Path] | None) -> TrainedModel:
    """Load the model of these state directories. A warning about it goes to stderr.

    Raises:
        CommandError: several directories here could be meant.
        PeerUnreachable: there is no model in the directories.
    """
    from node.export.trained_model import TrainedError, load_trained

    try:
        model = load_trained(state_dirs or _state_dirs())
    except (TrainedError, OSError) as error:
        raise PeerUnreachable(str(error)) from None
    if line := model.warning():
        print(line, file=sys.stderr)
    return model


def _state_dirs() -> list[Path]:
    """The state directory that the environment names, else the only one here, or all if one run with stages has them.

    The environment names one: typer would split the value of a repeatable option at spaces, which a path may contain.
    """
    from node.export.trained_model import is_one_staged_run
    from node.ui.control import home

    if given := os.environ.get("NODE_STATE_DIR"):
        return [options.place(given)]
    found = [each.parent for each in sorted(home().glob("*/manifest.bin"))]
    if not found:
        raise PeerUnreachable(f"no state directory in {home()} holds a run: give one with --state-dir")
    if len(found) > 1 and not is_one_staged_run(found):
        shown = " or ".join(map(str, found[:8]))
        raise CommandError(f"{len(found)} state directories here hold a run: choose one with --state-dir {shown}")
    return found
