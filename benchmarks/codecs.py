"""What each codec costs in loss and saves in bytes, by the experiments of `benchmarks.learning`.

    python -m benchmarks.codecs --json FILE [--resume] [--seeds 5] [--preset w128] [--rounds R] [--inner-steps H]
                                [--show]

Four peers take equal steps; for each seed all codecs start from the same weights and text. The mean travels as float32,
and in every codec. topk runs with the preset's outer steps, and with those of its paper: learning rate 1, no momentum
(SparseLoCo, Sarfi et al. 2025). Losses are those of the outer parameters over held-out text, in nats per byte.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean

from benchmarks.book import Book, perform_all, spread
from benchmarks.laboratory.reference import Run
from benchmarks.learning import PEERS, perform
from node.config.task_tables import GptTable
from node.tasks.gpt import DEFAULT_PRESET, preset
from protocols.codec import codec
from tests.sim.arguments import Parser

PLAIN = (1.0, 0.0)
VARIANTS: tuple[tuple[str, tuple[float, float] | None], ...] = (
    ("fp32", None),
    ("int8", None),
    ("int4", None),
    ("e3m0", None),
    ("topk", None),
    ("topk", PLAIN),
    ("fp32", PLAIN),
)
"""Codecs, with learning rate and momentum of their outer steps. The first one is the reference."""


def trials(base: Run, seeds: range) -> dict[str, list[Run]]:
    """Variant -> one run per seed."""
    return {
        name + (" outer {:g}, {:g}".format(*outer) if outer else ""): [
            Run(base.peers, base.rounds, base.inner_steps, base.preset, seed, codec=name, outer=outer) for seed in seeds
        ]
        for name, outer in VARIANTS
    }


def round_bytes(run: Run, elements: int) -> float:
    """Bytes that a peer of this run sends in a round, without headers and votes."""
    used = codec(run.codec)
    both = used.encoded_bytes(elements) + used.reduced(run.peers).encoded_bytes(elements)
    return (run.peers - 1) / run.peers * both


def print_table(rows: dict[str, list[Run]], elements: int, book: Book) -> None:
    """Print the finished seeds, their mean, and its difference from the first row's, pair by pair."""
    first = next(iter(rows.values()))
    print(
        f"\n{PEERS} peers, {first[0].preset}, {first[0].rounds} rounds of {first[0].inner_steps} steps, nats per byte"
    )
    seeds = " ".join(f"seed {run.seed:>3}" for run in first)
    print(f"{'codec':<16} {'bytes':>10} {'less':>6} {seeds} {'mean':>8}  to {next(iter(rows))}")
    plain = round_bytes(first[0], elements)
    for name, runs in rows.items():
        pairs = [(run, other) for run, other in zip(runs, first, strict=True) if run in book and other in book]
        if not pairs:
            continue
        changes = [book.loss(run) / book.loss(other) - 1 for run, other in pairs]
        sent = round_bytes(runs[0], elements)
        values = " ".join(f"{book.loss(run):>8.4f}" if run in book else f"{'-':>8}" for run in runs)
        mean = fmean(book.loss(run) for run, _ in pairs)
        print(f"{name:<16} {sent:>10.0f} {plain / sent:>5.1f}x {values} {mean:>8.4f} {spread(changes, '+.2%'):>8}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(prog="python -m benchmarks.codecs", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--preset", default=DEFAULT_PRESET)
    parser.add_argument("--rounds", type=int, help="the preset's unless given")
    parser.add_argument("--inner-steps", type=int, help="of a round; the preset's unless given")
    parser.add_argument("--workers", type=int, help="runs at a time; unless given as many as cores")
    parser.add_argument("--json", type=Path, required=True, help="where the runs are kept")
    parser.add_argument("--resume", action="store_true", help="go on with the runs in that file")
    parser.add_argument("--show", action="store_true", help="print what is done, run nothing")
    options = parser.parse_args(arguments)
    if any(value is not None and value < 1 for value in (options.seeds, options.rounds, options.inner_steps)):
        parser.error("seeds, rounds and inner steps are at least 1")
    try:
        settings = preset(options.preset)
        book = Book(options.json, options.resume or options.show)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    rounds, steps = options.rounds or settings.recipe.rounds, options.inner_steps or settings.recipe.inner_steps
    rows = trials(Run(PEERS, rounds, steps, options.preset, 0), range(options.seeds))
    if not options.show:
        perform_all([run for runs in rows.values() for run in runs], book, perform, options.workers)
    print_table(rows, GptTable(**asdict(settings.shape), rows=settings.rows).elements, book)
    return 0


if __name__ == "__main__":
    sys.exit(main())
