"""Seconds until two peers on slow links have a held-out loss; and the share of the time in which a worker takes steps.

    python -m benchmarks.time_to_loss loss [--links 10,50,200] [--arms ddp …] [--loss 1.9] [--inner-steps 64] [--quick]
    python -m benchmarks.time_to_loss utilisation [--links 10,50,200,1000] [--arms …] [--inner-steps 8,32,128] [--quick]

Each peer is a process in a network namespace of its own; a token bucket limits each direction of its line. Needs root,
iproute2 and iptables; torchft comes with `make bench-peers`. `--json FILE` collects what is measured, `--plot FILE`
draws it. An arm more is a line in `ARMS`.

loss          real trainers, one thread each: the same small language model, text, tokens a step and AdamW, the same H.
              Counted is from the first step until the last peer has had the loss, which was chosen before. Between two
              evaluations the loss is taken to fall in a straight line. The evaluation after each round counts for all
              but DDP, which evaluates more often. The start is not counted
utilisation   Starling only. All trainers are paced (`node.tasks.paced`): two cores cannot hold the real ones. A step
              sleeps, so its length is known, and the share is steps times that length, over the time of whole rounds
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks.own_loop import Script, scripts
from node.tasks.recipe import Recipe
from tests.faults.network import Namespaces, Place, why_not
from tests.faults.shell import from_shell
from tests.sim.arguments import Parser, at_least_one, positive
from tests.support.real_swarm import RealPeer, RealSwarm, wait

PEERS = 2
PRESET = "w64"
MEGABIT = 1_000_000
START_SECONDS = 120.0
ELEMENTS, STEP_SECONDS, TOKENS = 10_000_000, 0.05, 1024
"""Of the paced trainers: an int8 vector of 10 MB, and 20 steps a second."""
WARM_ROUNDS, ROUNDS_SECONDS = 1, 500.0
RATES = (6e-3, 0.9, 0.5)
"""The learning rate of AdamW, and rate and momentum of the outer step of Starling and torchft."""


class Point(NamedTuple):
    """A held-out loss that a peer has had."""

    seconds: float
    steps: int
    loss: float


@dataclass(frozen=True, slots=True)
class Arm:
    """A row of the tables. Of Starling it has settings of the run; of another system it has none."""

    label: str
    run: Mapping[str, Any] = field(default_factory=dict)
    recipe: Mapping[str, Any] = field(default_factory=dict)
    needs: str = ""
    """A package without which it cannot run."""
    every: int = 0
    """Steps between two evaluations, if not H."""

    @property
    def rounds(self) -> int:
        """Number of rounds in H steps, each of which averages another fragment."""
        return int(self.recipe.get("fragments", 1))


_STREAM = {"overlap": "keep", "fragments": 4}
ARMS: dict[str, Arm] = {
    "ddp": Arm("synchronous data parallel (DDP, gloo), float32", every=8),
    "ddp-fp16": Arm("synchronous data parallel (DDP, gloo), float16", every=8),
    "hivemind": Arm("hivemind's Optimizer, local updates, float16", needs="hivemind"),
    "torchft": Arm("torchft's DiLoCo (gloo), float32", needs="torchft"),
    "plain-int8": Arm("Starling, plain DiLoCo, int8", {"codec": "int8"}, {"overlap": "off"}),
    "plain-int4": Arm("Starling, plain DiLoCo, int4", {"codec": "int4"}, {"overlap": "off"}),
    "keep-int8": Arm("Starling, overlap keep, int8", {"codec": "int8"}, {"overlap": "keep"}),
    "keep-int4": Arm("Starling, overlap keep, int4", {"codec": "int4"}, {"overlap": "keep"}),
    "stream-int8": Arm("Starling, overlap keep, 4 fragments, int8", {"codec": "int8"}, _STREAM),
    "stream-int4": Arm("Starling, overlap keep, 4 fragments, int4", {"codec": "int4"}, _STREAM),
}
QUICK_ARMS = ("ddp", "hivemind", "torchft", "plain-int8")


def is_ours(arm: Arm) -> bool:
    return bool(arm.run)


# -- pure parts -------------------------------------------------------------------------------------------------------


def first_at(points: Sequence[Point], loss: float) -> Point | None:
    """When a peer first had this loss: on the straight line between two evaluations. None: never."""
    for before, after in zip((None, *points), points, strict=False):
        if after.loss <= loss:
            if before is None or before.loss == after.loss:
                return after
            share = (before.loss - loss) / (before.loss - after.loss)
            seconds = before.seconds + share * (after.seconds - before.seconds)
            return Point(seconds, round(before.steps + share * (after.steps - before.steps)), loss)
    return None


def last_at(curves: Sequence[Sequence[Point]], loss: float) -> Point | None:
    """When the last peer first had this loss; None: one never had."""
    found = [point for curve in curves if (point := first_at(curve, loss))]
    return max(found) if len(found) == len(curves) else None


def own_curve(reports: Sequence[Mapping[str, Any]], began: float, tokens_per_step: int) -> list[Point]:
    """What a Starling peer's reports say about its held-out loss."""
    points, tokens = [], 0
    for each in reports:
        tokens += each["tokens"]
        if (loss := each["held_out_loss"]) is not None:
            points.append(Point(each["time"] - began, tokens // tokens_per_step, loss))
    return points


def utilisation(reports: Sequence[Mapping[str, Any]], warm: int, step_seconds: float, tokens_per_step: int) -> float:
    """The share of the time after the first `warm` rounds in which a paced worker has taken steps."""
    steps = sum(int(each["tokens"]) for each in reports[warm:]) / tokens_per_step
    return steps * step_seconds / float(reports[-1]["time"] - reports[warm - 1]["time"])


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def loss_table(rows: Sequence[Mapping[str, Any]], links: Sequence[float]) -> str:
    """Arm by link: seconds to the loss, and in brackets the steps of a peer until then."""
    found = {(row["arm"], row["megabits"]): row for row in rows}

    def cell(arm: str, link: float) -> str:
        row = found.get((arm, link), {"why": ""})
        return row["why"] if "why" in row else f"{row['seconds']:.1f} ({row['steps']})"

    arms = dict.fromkeys(row["arm"] for row in rows)
    header = ("seconds to the loss (steps of a peer)", *(f"{link:g} Mbit/s" for link in links))
    return table(header, [[ARMS[arm].label, *(cell(arm, link) for link in links)] for arm in arms])


def utilisation_table(rows: Sequence[Mapping[str, Any]], links: Sequence[float]) -> str:
    """Arm and H by link: the share of the time in which the worker takes steps."""
    found = {(row["arm"], row["inner_steps"], row["megabits"]): row["share"] for row in rows}
    cells = dict.fromkeys((row["arm"], row["inner_steps"]) for row in rows)
    header = ("utilisation, all trainers paced", "H", *(f"{link:g} Mbit/s" for link in links))
    return table(
        header,
        [
            [
                ARMS[arm].label,
                str(steps),
                *(f"{found[arm, steps, link]:.1%}" if (arm, steps, link) in found else "" for link in links),
            ]
            for arm, steps in cells
        ],
    )


def megabits(text: str) -> list[float]:
    """Mbit/s: `10,50,200`."""
    try:
        found = [float(each) for each in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of Mbit/s like 10,50,200") from None
    if not all(0.1 <= each <= 10_000 for each in found):
        raise argparse.ArgumentTypeError(f"{text!r}: each link has 0.1 to 10000 Mbit/s")
    return found


def several(text: str) -> list[int]:
    """Whole numbers: `8,32,128`."""
    return [at_least_one(each) for each in text.split(",")]


# -- the plays --------------------------------------------------------------------------------------------------------


@contextmanager
def shaped(megabits: float) -> Iterator[list[Place]]:
    """Places with lines of this rate in each direction."""
    with Namespaces() as network:
        places = [network.add(f"peer{rank}") for rank in range(PEERS)]
        for place in places:
            network.slow(place.name, int(megabits * MEGABIT))
        yield places


def _is_ready(peer: Script) -> bool:
    return any(line == "ready" for _, line in peer.lines)


def theirs(name: str, arm: Arm, recipe: Recipe, places: Sequence[Place], given: Callable[[Any], bool]) -> Any:
    """The curves of peers of another system, as soon as `given` has had enough of them."""
    with scripts() as start:
        peers: list[Script] = []
        for rank, place in enumerate(places):
            setup = {"system": name, "rank": rank, "peers": PEERS, "address": place.address, "preset": PRESET}
            setup |= {"store": places[0].address, "recipe": asdict(recipe)}
            command = ["-m", "benchmarks.time_to_loss_peer", json.dumps(setup), str(arm.every or recipe.inner_steps)]
            if peers:
                peers[0].until_lines(1, START_SECONDS)
                command.append(peers[0].lines[0][1])
            peers.append(start(place.name, *command, inside=place.inside))
        for peer in peers:
            peer.until("start", partial(_is_ready, peer), START_SECONDS)
        for peer in peers:
            peer.tell()

        def curves() -> list[list[Point]]:
            assert all(peer.running for peer in peers), "\n".join(peer.said()[-2000:] for peer in peers)
            lines = [[line for _, line in peer.lines if line.startswith("{")] for peer in peers]
            return [[Point(**json.loads(line)) for line in each] for each in lines]

        while not given(curves()):
            time.sleep(0.1)
        return curves()


class _ShapedSwarm(RealSwarm):
    """Peers in namespaces, which know what their lines carry."""

    def __init__(self, home: Path, run: str, places: Sequence[Place], megabits: float) -> None:
        self._places = {place.name: place for place in places}
        self._line = ("--bandwidth", f"{megabits / 8:g}")
        super().__init__(home, run, self._place)

    def _place(self, peer: RealPeer) -> None:
        place = self._places[peer.name]
        peer.inside, peer.listen = place.inside, f"/ip4/{place.address}/tcp/0"
        peer.environment["NODE_NICE"] = "0"

    def arguments(self, name: str) -> tuple[str, ...]:
        return self._line

    def all(self) -> list[RealPeer]:
        """All peers, in a run whose first round waits for them."""
        first, *others = self._places
        founder = self.found(first, "--wait-for", str(PEERS), *self._line, seconds=START_SECONDS)
        return [founder, *self.join(*others, via=founder, seconds=START_SECONDS)]


@contextmanager
def ours(run: str, places: Sequence[Place], megabits: float) -> Iterator[list[RealPeer]]:
    with tempfile.TemporaryDirectory() as home, _ShapedSwarm(Path(home), run, places, megabits) as swarm:
        yield swarm.all()


def run_file(top: Mapping[str, Any], recipe: Mapping[str, Any], **tables: Mapping[str, Any]) -> str:
    lines = [f"{key} = {json.dumps(value)}" for key, value in top.items()]
    for name, values in {"recipe": recipe, **tables}.items():
        lines += [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items() if value is not None)]
    return "\n".join(lines) + "\n"


def own_curves(arm: Arm, recipe: Recipe, places: Sequence[Place], rate: float, given: Callable[[Any], bool]) -> Any:
    """The curves of Starling's peers, as soon as `given` has had enough of them."""
    recipe = replace(recipe, inner_steps=recipe.inner_steps // arm.rounds)
    text = run_file({"seed": 0, "task": "gpt", **arm.run}, asdict(recipe) | dict(arm.recipe), gpt={"preset": PRESET})
    with ours(text, places, rate) as peers:

        def curves() -> list[list[Point]]:
            assert all(peer.running for peer in peers), "\n".join(peer.said()[-2000:] for peer in peers)
            reports = [peer.reports() for peer in peers]
            if not all(reports):
                return [[] for _ in peers]
            began = min(each[0]["time"] - each[0]["seconds_train"] - each[0]["seconds_average"] for each in reports)
            return [own_curve(each, began, TOKENS) for each in reports]

        while not given(curves()):
            time.sleep(0.1)
        return curves()


# -- the cases --------------------------------------------------------------------------------------------------------


def missing(arm: Arm) -> str:
    """Why an arm cannot be played here; empty if it can."""
    return f"{arm.needs} is not installed" if arm.needs and not find_spec(arm.needs) else ""


def measure_loss(options: argparse.Namespace, name: str, link: float) -> dict[str, Any]:
    """One arm over one link."""
    arm, row = ARMS[name], {"arm": name, "megabits": link, "inner_steps": options.inner_steps}
    if why := missing(arm):
        return row | {"why": why}
    recipe = Recipe(options.inner_steps, 10_000, *RATES, final_fraction=1.0)
    until = time.monotonic() + START_SECONDS + options.seconds
    load = os.getloadavg()[0]

    def given(curves: Sequence[Sequence[Point]]) -> bool:
        too_long = any(curve and curve[-1].seconds > options.seconds for curve in curves)
        return bool(last_at(curves, options.loss)) or too_long or time.monotonic() > until

    with shaped(link) as places:
        if is_ours(arm):
            curves = own_curves(arm, recipe, places, link, given)
        else:
            curves = theirs(name, arm, recipe, places, given)
    row |= {"load": load, "curves": curves}
    if found := last_at(curves, options.loss):
        return row | found._asdict()
    return row | {"why": f"not within {options.seconds:g} s"}


def measure_share(options: argparse.Namespace, name: str, steps: int, link: float) -> dict[str, Any]:
    """One arm of Starling, with rounds of so many steps, over one link."""
    arm, load = ARMS[name], os.getloadavg()[0]
    recipe = {"inner_steps": steps // arm.rounds, "rounds": 10_000, **arm.recipe}
    seconds = options.step_seconds
    tables = {"elements": ELEMENTS, "step_seconds": seconds, "tokens_per_step": TOKENS}
    warm = WARM_ROUNDS * arm.rounds
    count = warm + options.rounds * arm.rounds
    with (
        shaped(link) as places,
        ours(run_file({"task": "paced", **arm.run}, recipe, paced=tables), places, link) as peers,
    ):
        wait(f"{count} rounds", lambda: all(len(together(peer)) >= count for peer in peers), ROUNDS_SECONDS)
        shares = [utilisation(together(peer)[:count], warm, seconds, TOKENS) for peer in peers]
        exchange = median(each["seconds_average"] for peer in peers for each in together(peer)[warm:count])
    row = {"arm": name, "inner_steps": steps, "step_seconds": seconds, "megabits": link, "load": load}
    return row | {"share": sum(shares) / len(shares), "seconds_average": exchange}


def together(peer: RealPeer) -> list[Any]:
    """The peer's reports from the first mean of all on."""
    reports = peer.reports()
    first = next((place for place, each in enumerate(reports) if len(each["peers"]) == PEERS), len(reports))
    return reports[first:]


def play(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    if options.case == "loss":
        for link in options.links:
            for name in options.arms:
                yield measure_loss(options, name, link)
    else:
        for steps in options.inner_steps:
            for link in options.links:
                for name in options.arms:
                    yield measure_share(options, name, steps, link)


def told(row: Mapping[str, Any]) -> str:
    """A line about one play."""
    words = f"{row['arm']}, H {row['inner_steps']}, {row['megabits']:g} Mbit/s: "
    if "share" in row:
        return words + f"{row['share']:.1%}, a mean {row['seconds_average']:.2f} s, load {row['load']:.2f}"
    return words + (row.get("why") or f"{row['seconds']:.1f} s, {row['steps']} steps, load {row['load']:.2f}")


def arms(text: str) -> list[str]:
    """Names of arms: `ddp,plain-int8`."""
    names = text.split(",")
    if unknown := [name for name in names if name not in ARMS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not one of {', '.join(ARMS)}")
    return names


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("python -m benchmarks.time_to_loss", description=(__doc__ or "").partition("\n")[0])
    cases = parser.add_subparsers(dest="case", required=True)
    own = ",".join(name for name, arm in ARMS.items() if is_ours(arm))
    loss, share = cases.add_parser("loss"), cases.add_parser("utilisation")
    loss.add_argument("--links", type=megabits, help="Mbit/s (default 10,50,200)")
    loss.add_argument("--arms", type=arms, help=f"default {','.join(ARMS)}")
    loss.add_argument("--loss", type=positive, help="nats per byte that all must have (default 1.9)")
    loss.add_argument("--inner-steps", type=at_least_one, default=64, help="H (default %(default)s)")
    loss.add_argument("--seconds", type=positive, default=400.0, help="longest time of a play (default %(default)s)")
    share.add_argument("--links", type=megabits, help="Mbit/s (default 10,50,200,1000)")
    share.add_argument("--arms", type=arms, default=own, help="default %(default)s")
    share.add_argument(
        "--step-seconds", type=positive, default=STEP_SECONDS, help="of a paced step (default %(default)s)"
    )
    share.add_argument("--inner-steps", type=several, help="each H (default 8,32,128)")
    share.add_argument("--rounds", type=at_least_one, default=3, help="counted, after one (default %(default)s)")
    for each in (loss, share):
        each.add_argument("--quick", action="store_true", help="one link, in under three minutes")
        each.add_argument("--json", type=Path, help="append what is measured to this file")
        each.add_argument("--plot", type=Path, help="write a PNG")
    options = parser.parse_args(arguments)
    for name in options.arms or ():
        if why := missing(ARMS[name]):
            parser.error(f"--arms: {name}: {why}: `make bench-peers` installs the systems to compare with")
    fill(options)
    if options.case == "utilisation" and not all(is_ours(ARMS[name]) for name in options.arms):
        parser.error(f"utilisation is of Starling only: --arms is some of {own}")
    if why := why_not():
        parser.error(why)
    return options


def fill(options: argparse.Namespace) -> None:
    """Set what was not given, by --quick."""
    if options.case == "loss":
        options.links = options.links or ([50.0] if options.quick else [10.0, 50.0, 200.0])
        options.arms = options.arms or (list(QUICK_ARMS) if options.quick else list(ARMS))
        options.loss = options.loss or (2.4 if options.quick else 1.9)
    else:
        options.links = options.links or ([50.0] if options.quick else [10.0, 50.0, 200.0, 1000.0])
        options.inner_steps = options.inner_steps or ([32] if options.quick else [8, 32, 128])


def main(arguments: Sequence[str] | None = None) -> int:
    options = parsed(arguments)
    for path in filter(None, (options.json, options.plot)):  # an hour later it would be too late
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a").close()
    if options.case == "loss":
        print(f"two peers, {PRESET}, until both have had a held-out loss of {options.loss:g} nats per byte", flush=True)
    rows = []
    for row in play(options):
        rows.append(row)
        print(told(row), flush=True)
        if options.json:
            with options.json.open("a") as file:
                file.write(json.dumps({"case": options.case, **row}) + "\n")
    print((loss_table if options.case == "loss" else utilisation_table)(rows, options.links))
    if options.plot:
        from benchmarks.time_to_loss_plot import draw_curves, draw_shares

        if options.case == "loss":
            draw_curves(rows, {name: arm.label for name, arm in ARMS.items()}, options.loss, options.plot)
        else:
            draw_shares(rows, {name: arm.label for name, arm in ARMS.items()}, options.plot)
    return 1 if any(str(row.get("why", "")).startswith("not within") for row in rows) else 0


if __name__ == "__main__":
    sys.exit(from_shell(main, "python -m benchmarks.time_to_loss", cure=""))
