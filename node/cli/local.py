"""Commands that work on files: `init`, `export`, `generate`, `evaluate`, `data check`.

Only `export --bootstrap` contacts a peer.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from node.cli import options
from node.cli.remote import CommandError, PeerUnreachable, fetch, member_of
from node.reporting.status import to_json
from node.runtime.program import typed
from node.tasks.hf.settings import HfSettings, ModelError
from node.ui.control import home

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
    print(f"wrote {file}: edit it, then: {typed('join')} --run {file}", file=sys.stderr)
    return 0


@app.command()
def export(
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Directory to create; it must not exist yet.", parser=options.path)
    ],
    state_dir: options.StateDirsToReadOption = None,
    bootstrap: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ADDR",
            help="Fetch the model from the peer at this address instead; it may run anywhere. Repeatable. For a "
            "private run, --state-dir names the directory of one of its members.",
            show_default=False,
        ),
    ] = None,
    model: options.ModelToReadOption = None,
    template: options.TemplateToReadOption = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="Of a run of adapters, write the whole model, with the adapters in it.")
    ] = False,
    check: Annotated[
        bool,
        typer.Option(
            "--check/--no-check",
            help="Load the export again in a process of its own, and compare what it computes. It needs memory for one "
            "more copy of the model.",
        ),
    ] = True,
) -> int:
    """Export the newest checkpoint of a run's model as a directory that Hugging Face transformers can load."""
    member = member_of(state_dir[0]) if bootstrap and state_dir and len(state_dir) == 1 else None
    if bootstrap and state_dir and not member:
        raise CommandError(
            "--bootstrap fetches the model from that peer: leave out --state-dir. "
            f"(Only for a private run it names the directory of a member, which {state_dir[0]} is not.)"
        )
    trained = _fetched(bootstrap, model, member) if bootstrap else _trained(state_dir)
    from node.export import hugging_face as exporting

    unchecked = exporting.export(trained, out, model, merge, check, str(template or ""))
    told = f"wrote {out}: run {trained.manifest.run_id[:12]} after {trained.rounds[0]} rounds"
    print(told + (f"; it was not loaded again to compare ({unchecked})" if unchecked else ""), file=sys.stderr)
    return 0


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="Text to continue.")],
    state_dir: options.StateDirsToReadOption = None,
    tokens: Annotated[
        int, typer.Option(min=1, max=MAX_TOKENS, metavar="N", help="Bytes to write; of hf, tokens.")
    ] = 400,
    temperature: Annotated[
        float, typer.Option(min=0, max=100, metavar="T", help="Randomness of the text. 0: always the likeliest byte.")
    ] = 0.8,
    seed: Annotated[int, typer.Option(min=0, max=MAX_SEED, metavar="S", help="Seed of the random choices.")] = 0,
    model: options.ModelToReadOption = None,
    template: options.TemplateToReadOption = None,
) -> int:
    """Continue a text with the newest checkpoint of a run's model."""
    if temperature != temperature:
        raise CommandError("--temperature must be a number from 0 to 100")
    trained = _trained(state_dir)
    from node.export.fine_tuned import write

    text, other = prompt.encode(errors="surrogateescape"), str(template or "")
    for piece in write(trained, text, tokens, temperature, seed, model, other):
        print(piece, end="", flush=True)
    print()
    return 0


@app.command()
def evaluate(
    state_dir: options.StateDirsToReadOption = None,
    model: options.ModelToReadOption = None,
    template: options.TemplateToReadOption = None,
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="Texts to evaluate on: a file or a folder. Default: the run's held-out sample.",
            show_default=False,
            parser=options.path,
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    """Measure the loss of a fine-tuned model (task hf), and that of its base, on texts that it was not trained on."""
    trained = _trained(state_dir)
    from node.export.fine_tuned import load_fine_tuned

    tuned = load_fine_tuned(trained, model, str(template or ""))
    rows = tuned.rows(data, (state_dir or _state_dirs())[0] / "held-out.bin")
    loss, base = tuned.losses(rows)
    if json:
        print(to_json({"loss": loss, "base_loss": base, "rows": len(rows), "rounds": trained.rounds[0]}))
        return 0
    told = f", of its base {base:.4f}" if base == base else ""
    print(f"after {trained.rounds[0]} rounds: loss {loss:.4f} nats per token{told}, over {len(rows)} rows")
    return 0


data_app = typer.Typer(cls=options.CommandGroup, help="Look at data before training on them.")
app.add_typer(data_app, name="data")


@data_app.callback()
def data_commands() -> None:
    """Look at data before training on them."""


@data_app.command()
def check(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="File or folder of data.", parser=options.path)],
    model: options.ModelToReadOption = None,
    template: options.TemplateToReadOption = None,
    context: Annotated[int, typer.Option(min=8, max=1 << 17, metavar="N", help="Tokens of a row.")] = 1024,
    format: Annotated[str | None, typer.Option(metavar="text|chat", help="Default: by the first line.")] = None,
    pack: Annotated[bool, typer.Option("--pack/--no-pack", help="Whether several texts share a row.")] = True,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    """Tokenise data for a model as the task hf does, and print how much there is, and what is masked."""
    from node.tasks.hf.task import check_data, guessed_format

    if model is None:
        raise CommandError("data are counted in a model's tokens: give it by --model")
    try:
        kind = format or guessed_format(path)
        settings = HfSettings(context=context, rows=1, format=kind, pack=pack)  # type: ignore[arg-type]
        selection, counts, first = check_data(path, model, settings, str(template or ""))
    except ValueError as error:  # a ModelError is one
        raise CommandError(str(error)) from None
    if json:
        files = {"files": len(selection.files), "bytes": selection.size, "left_out": selection.left_out}
        print(to_json({**asdict(counts), "format": kind, **files}))
        return 0
    print(f"{'format':12}{kind}")
    lines = [*selection.lines(), *counts.lines(context), f"the first, with its targets in brackets: {first}"]
    print("\n".join(lines).encode(sys.stdout.encoding, "backslashreplace").decode(sys.stdout.encoding))
    return 0


def _fetched(addresses: Sequence[str], base: str | None, member: Path | None) -> TrainedModel:
    with tempfile.TemporaryDirectory() as directory:
        return _trained(fetch(addresses, Path(directory), base, member))


def _trained(state_dirs: Sequence[Path] | None) -> TrainedModel:
    """Load the model of these state directories. A warning about it goes to stderr."""
    from node.export.trained_model import load_trained

    try:
        model = load_trained(state_dirs or _state_dirs())
    except (ModelError, OSError) as error:
        raise PeerUnreachable(str(error)) from None
    if line := model.warning():
        print(line, file=sys.stderr)
    return model


def _state_dirs() -> list[Path]:
    """The state directory that the environment names, else the only one, or all if one run with stages has them.

    The environment names one: typer would split the value of a repeatable option at spaces, which a path may contain.
    """
    from node.export.trained_model import is_one_staged_run

    if given := os.environ.get("NODE_STATE_DIR"):
        return [options.path(given)]
    found = [each.parent for each in sorted(home().glob("*/manifest.bin"))]
    if not found:
        raise PeerUnreachable(f"no state directory in {home()} holds a run: give one with --state-dir")
    if len(found) > 1 and not is_one_staged_run(found):
        shown = " or ".join(map(str, found[:8]))
        raise CommandError(f"{len(found)} state directories hold a run: choose one with --state-dir {shown}")
    return found
