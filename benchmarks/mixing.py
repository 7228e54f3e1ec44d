"""How fast averaging mixes in memory while peers fail: only which peer averages with which, without a network.

    python -m benchmarks.mixing table [--peers 512 768 900 1024] [--failures 0 .001 .005 .01] [--json]
    python -m benchmarks.mixing plot --file build/mixing.png
    python -m benchmarks.mixing groups [--trials 20000]

table   rounds until the variance over the peers is below 1e-4 and 1e-9, for protocols x peers x failures. In each round
        each peer is down with the failure probability. Beside it are the figures of Ryabinin et al. 2021 (Moshpit SGD),
        with one number per peer, ten trials and at most fifty rounds, as here
plot    the variance, round by round
groups  one round of random groups against its exact factor, (groups − 1) / (N − 1). Beyond 2 % the exit code is 1
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.mixers import MIXERS, TooMany, Trial, random_groups, simulate
from tests.sim.arguments import Parser, at_least_one

BOUNDS = (1e-4, 1e-9)
PEERS, FAILURES = (512, 768, 900, 1024), (0.0, 0.001, 0.005, 0.01)
THEIRS = ("all-reduce", "ring", "push-sum", "groups of 32", "Moshpit 32 x 32")
PAPER: dict[tuple[int, float], tuple[str, ...]] = {
    (512, 0.0): ("1.0 1.0", "50 50", "15.6 47.6", "3.0 6.1", "3.6 8.2"),
    (512, 0.001): ("1.6 1.6", "50 50", "15.6 47.6", "3.0 6.3", "3.3 8.5"),
    (512, 0.005): ("10.9 10.9", "50 50", "15.6 47.8", "3.0 6.3", "3.9 8.8"),
    (512, 0.01): ("41.7 41.7", "50 50", "15.6 47.8", "3.0 6.6", "3.9 8.8"),
    (768, 0.0): ("1.0 1.0", "50 50", "13.8 43.2", "3.0 6.2", "3.0 6.0"),
    (768, 0.001): ("1.8 1.8", "50 50", "13.8 43.2", "3.0 6.5", "3.0 6.0"),
    (768, 0.005): ("28.7 28.7", "50 50", "14.1 43.2", "3.0 6.6", "3.0 6.6"),
    (768, 0.01): ("50 50", "50 50", "14.2 43.9", "3.0 7.0", "3.0 6.9"),
    (900, 0.0): ("1.0 1.0", "50 50", "14.7 45.0", "3.0 6.4", "2.9 5.0"),
    (900, 0.001): ("1.8 1.8", "50 50", "14.7 45.0", "3.0 6.3", "2.9 5.1"),
    (900, 0.005): ("50 50", "50 50", "14.7 45.2", "3.0 6.7", "3.1 5.9"),
    (900, 0.01): ("50 50", "50 50", "14.9 45.6", "3.1 7.0", "3.0 6.5"),
    (1024, 0.0): ("- 1.0", "- 50", "", "- 6.2", "- 2.0"),
    (1024, 0.005): ("- 42.6", "- 50", "", "- 6.7", "- 5.0"),
}
"""Rounds to 1e-4 and to 1e-9 as the authors print them (their repository, plot_results.ipynb, commit 78fb4da). Their
gossip stands beside our ring, their SGP beside our push-sum. N = 1024 is from the paper. 50 means not reached."""
GROUPS = ((16, 4), (32, 8), (48, 4), (128, 32), (1024, 32))
GROUPS_BOUND = 0.02
PANELS = ((1024, 0.0), (1024, 0.005), (768, 0.005))
COLOURS = {
    "all-reduce": "#000000",
    "ring": "#9ad2f3",
    "torus": "#56b4e9",
    "exponential": "#0072b2",
    "one-peer exponential": "#009e73",
    "random matching": "#2f5597",
    "push-sum": "#7fd1b9",
    "groups of 32": "#8c8c8c",
    "Moshpit 32 x 32": "#d55e00",
    "Moshpit 8 x 8 x 8": "#b06000",
    "Moshpit seats of 32": "#e69f00",
    "Moshpit seats of 8": "#cc79a7",
}
"""A colour per family: all-reduce, gossip, push-sum, random groups, Moshpit."""
STYLES = ("-", "--", "-.", ":")
DRAWN_TO = 1e-12


def mixed(
    name: str, peers: int, failure: float, options: argparse.Namespace, until: float = BOUNDS[-1]
) -> list[Trial] | None:
    """The trials of one cell of the table; None if there are more peers than cells of a grid."""
    try:
        return [
            simulate(MIXERS[name], peers, failure, options.rounds, seed, options.elements, until)
            for seed in range(options.trials)
        ]
    except TooMany:
        return None


def row(name: str, peers: int, failure: float, options: argparse.Namespace) -> dict[str, Any] | None:
    """The content of one cell of the table."""
    trials = mixed(name, peers, failure, options)
    if trials is None:
        return None
    return {
        "protocol": name,
        "peers": peers,
        "failure": failure,
        "rounds": [sum(trial.rounds_to(bound) for trial in trials) / len(trials) for bound in BOUNDS],
        "reached": [sum(trial.variances[-1] < bound for trial in trials) for bound in BOUNDS],
        "drift": max(trial.drift for trial in trials),
    }


def rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for peers in options.peers:
        for failure in options.failures:
            for name in options.only or MIXERS:
                if found := row(name, peers, failure, options):
                    yield found


def print_table(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Print a line per protocol: our figures and the paper's."""
    print(f"rounds to a variance of {BOUNDS[0]:g} and {BOUNDS[1]:g}, means of {options.trials} trials; at most")
    print(f"{options.rounds} are played, > means that not all trials reached it. drift: largest move of the mean\n")
    print(f"{'N':>5} {'failure':>7}  {'protocol':<22} {'1e-4':>6} {'1e-9':>6}  {'paper: 1e-4':>11} {'1e-9':>5}  drift")
    found = []
    for each in rows(options):
        found.append(each)
        key = (each["peers"], each["failure"])
        theirs = dict(zip(THEIRS, PAPER.get(key, ()), strict=False)).get(each["protocol"], "").split() or ("", "")
        ours = [
            ("" if reached == options.trials else ">") + f"{mean:.1f}"
            for mean, reached in zip(each["rounds"], each["reached"], strict=True)
        ]
        print(
            f"{key[0]:>5} {key[1]:>7g}  {each['protocol']:<22} {ours[0]:>6} {ours[1]:>6}  {theirs[0]:>11}"
            f" {theirs[1]:>5}  {each['drift']:.1g}",
            flush=True,
        )
    return found


def groups_factor(peers: int, size: int, trials: int) -> tuple[float, float]:
    """The factor of the variance in one round of random groups: measured, and exact."""
    start = torch.Generator().manual_seed(peers)
    values = torch.randn(peers, 8, dtype=torch.float64, generator=start)
    up, before = torch.ones(peers, dtype=torch.bool), values.var(0, correction=0).sum()
    mix = random_groups(size)(peers, random.Random(f"{peers}/{size}"))
    after = sum(mix(number, up, values).var(0, correction=0).sum() for number in range(trials)) / trials
    return float(after / before), (peers // size - 1) / (peers - 1)


def print_groups(trials: int) -> tuple[list[dict[str, float]], bool]:
    """Print all factors. Returns whether they are within the bound."""
    print(f"random groups, {trials} trials of one round: what is left of the variance\n")
    print(f"{'N':>5} {'size':>4} {'groups':>6} {'measured':>9} {'exact':>9} {'off':>7}")
    found = []
    for peers, size in GROUPS:
        measured, exact = groups_factor(peers, size, trials)
        found.append({"peers": peers, "size": size, "measured": measured, "exact": exact})
        off = measured / exact - 1
        print(f"{peers:>5} {size:>4} {peers // size:>6} {measured:>9.6f} {exact:>9.6f} {off:>+7.2%}", flush=True)
    return found, all(abs(each["measured"] / each["exact"] - 1) < GROUPS_BOUND for each in found)


def draw(options: argparse.Namespace) -> None:
    """Plot the variance by rounds, averaged over the trials. Raises OSError if the file cannot be written."""
    figure = Figure(figsize=(15.0, 4.8), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(PANELS), sharey=True)
    for axes, (peers, failure) in zip(panels, PANELS, strict=True):
        for place, name in enumerate(options.only or MIXERS):
            if trials := mixed(name, peers, failure, options, DRAWN_TO):
                style = STYLES[place % len(STYLES)]
                axes.semilogy(_course(trials), label=name, color=COLOURS[name], linestyle=style, linewidth=1.7)
        axes.set(title=f"{peers} peers, down with p = {failure:g}", xlabel="round", xlim=(0, 40), ylim=(1e-10, 2.0))
        axes.axhline(BOUNDS[-1], color="#8c8c8c", linewidth=0.8)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("variance over the peers")
    panels[-1].legend(loc="upper left", bbox_to_anchor=(1.02, 1.0), frameon=False)
    figure.savefig(options.file)


def _course(trials: Sequence[Trial]) -> list[float]:
    """Mean variance after each round. A trial that has reached the bound keeps its last variance."""
    length = max(len(trial.variances) for trial in trials)
    held = [[*trial.variances, *(trial.variances[-1],) * (length - len(trial.variances))] for trial in trials]
    return [max(sum(each) / len(each), 1e-17) for each in zip(*held, strict=True)]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("python -m benchmarks.mixing", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=("table", "plot", "groups"))
    parser.add_argument("--peers", type=at_least_one, nargs="+", default=PEERS, help="default %(default)s")
    parser.add_argument("--failures", type=float, nargs="+", default=FAILURES, help="default %(default)s")
    parser.add_argument("--only", choices=tuple(MIXERS), nargs="+", help="these protocols alone")
    parser.add_argument("--trials", type=at_least_one, help="default 10; of groups 20000")
    parser.add_argument("--rounds", type=at_least_one, default=50, help="at most (default %(default)s)")
    parser.add_argument("--elements", type=at_least_one, default=1, help="of each peer's vector (default %(default)s)")
    parser.add_argument("--file", type=Path, default=Path("build/mixing.png"), help="of plot (default %(default)s)")
    parser.add_argument("--json", action="store_true", help="one JSON object with everything, as the last line")
    options = parser.parse_args(arguments)
    if not all(0 <= failure < 1 for failure in options.failures):
        parser.error("argument --failures: probabilities from 0 to below 1")
    options.trials = options.trials or (20_000 if options.what == "groups" else 10)
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    torch.set_num_threads(1)
    held, result = True, list[Any]()
    if options.what == "plot":
        options.file.parent.mkdir(parents=True, exist_ok=True)
        draw(options)
        print(options.file)
    elif options.what == "groups":
        result, held = print_groups(options.trials)
    else:
        result = print_table(options)
    if options.json:
        print(json.dumps({**vars(options), "file": str(options.file), "result": result}))
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
