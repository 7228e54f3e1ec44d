"""Draw the picture in the README: four real peers learn, and one of them is killed and started again.

    python -m benchmarks.picture [--out docs/images/run.png] [--rounds 30] [--inner-steps 30]

The peers are `join` processes on the loopback, each with its own worker and its own p2pd. They train the w64 preset on
the source of the standard library. One of them gets SIGKILL in the middle of a round; a few rounds later the same
command starts it again. Everything drawn is read from the peers' `rounds.jsonl`. The last line printed is JSON.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from bisect import bisect
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from tests.faults.shell import from_shell
from tests.sim.arguments import Parser, at_least_one
from tests.support.checkers import DECIDED, Report
from tests.support.real_swarm import RealPeer, RealSwarm, wait

NAMES = ("peer-1", "peer-2", "peer-3", "peer-4")
VICTIM = "peer-3"
PATIENT_SECONDS = 600.0
"""Limit of each wait. On a quiet machine with two cores the whole run takes about two minutes."""
LOSS, IN_MEAN, ABSENT, KILL, RESTART = "#0072b2", "#0072b2", "#b8b8b8", "#d55e00", "#00795a"
"""From Okabe and Ito, "Color Universal Design" (2008); grey for absence."""


@dataclass(frozen=True, slots=True)
class Run:
    """What the peers wrote, and when the victim was killed and started again.

    Attributes:
        losses: held-out loss after each round, nats per byte; the first entry belongs to round 1.
        ended: when each round was decided, seconds since 1970: the median over the peers.
        means: names of the peers whose work is in the mean of each round.
        same_bits: whether all reports of a round name the same parameters.
        decided_seconds: from the kill until the last survivor decided the round under way.
        counted_seconds: from the restart until the mean of a round held the victim's work again.
        cores, load: of the machine, when the victim was started again; other work counts in the load.
    """

    losses: tuple[float, ...]
    ended: tuple[float, ...]
    means: tuple[tuple[str, ...], ...]
    same_bits: bool
    killed: float
    restarted: float
    decided_seconds: float
    counted_seconds: float
    cores: int
    load: float


def play(home: Path, rounds: int, inner_steps: int) -> Run:
    """Run the swarm to its end. Returns the collected figures."""
    recipe = f'[recipe]\nrounds = {rounds}\ninner_steps = {inner_steps}\n[gpt]\npreset = "w64"\n'
    with RealSwarm(home, recipe, not_nice) as swarm:
        founder = swarm.found(NAMES[0], "--wait-for", str(len(NAMES)), seconds=PATIENT_SECONDS)
        swarm.join(*NAMES[1:], via=founder, seconds=PATIENT_SECONDS)
        victim = swarm[VICTIM]
        reached(founder, rounds // 4)
        time.sleep(0.5 * founder.last()["seconds_train"])
        killed = victim.strike()
        victim.leaves_nothing()
        reached(founder, rounds * 2 // 5)
        restarted, load = time.time(), os.getloadavg()[0]
        victim.start("--bootstrap", founder.address)
        wait("the end of the run", lambda: not swarm.running, PATIENT_SECONDS)
        return told(swarm.peers, killed, restarted, load)


def not_nice(peer: RealPeer) -> None:
    """Let training keep its priority: a niced worker hardly runs on a busy machine."""
    peer.environment["NODE_NICE"] = "0"


def reached(peer: RealPeer, rounds: int) -> None:
    """Wait until the peer has reported that many rounds."""
    wait(f"round {rounds}", lambda: peer.last()["round"] + 1 >= rounds, PATIENT_SECONDS)


def told(peers: Mapping[str, RealPeer], killed: float, restarted: float, load: float) -> Run:
    """Put the histories of all peers together.

    Raises:
        SystemExit: the run was too short for the victim to come back.
    """
    names = {peer.id: name for name, peer in peers.items()}
    rounds: dict[int, dict[str, Report]] = {}
    for name, peer in peers.items():
        for report in peer.reports():
            if report["outcome"] in DECIDED:
                rounds.setdefault(report["round"], {})[name] = report
    of_each = [rounds[number] for number in sorted(rounds)]
    ends = [median(each["time"] for name, each in reports.items() if name != VICTIM) for reports in of_each]
    means = [tuple(sorted(names[each] for each in reports[NAMES[0]]["peers"])) for reports in of_each]
    under_way = of_each[bisect(ends, killed)]
    back = [end for end, mean in zip(ends, means, strict=True) if end > restarted and VICTIM in mean]
    if not back:
        raise SystemExit(f"the run ended before the work of {VICTIM} counted again: give it more --rounds")
    return Run(
        losses=tuple(reports[NAMES[0]]["held_out_loss"] for reports in of_each),
        ended=tuple(ends),
        means=tuple(means),
        same_bits=all(len({each["params_hash"] for each in reports.values()}) == 1 for reports in of_each),
        killed=killed,
        restarted=restarted,
        decided_seconds=max(each["time"] for name, each in under_way.items() if name != VICTIM) - killed,
        counted_seconds=back[0] - restarted,
        cores=os.cpu_count() or 1,
        load=load,
    )


def draw(run: Run, path: Path) -> None:
    """Write the picture: the loss above, below it a lane for each peer with a dot for each round."""
    figure = Figure(figsize=(8.4, 4.6), dpi=140, layout=ConstrainedLayoutEngine(h_pad=0.05), facecolor="white")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3.0, 1.3))
    numbers = range(1, len(run.losses) + 1)
    above.plot(numbers, run.losses, "o-", color=LOSS, markersize=4, linewidth=1.8)
    above.set_ylabel("held-out loss\n(nats per byte)")
    above.set_title("Four peers train one model; one is killed and comes back", loc="left", weight="bold", fontsize=12)
    above.set_title(f"{run.cores} cores, load {run.load:.0f}", loc="right", fontsize=9, color="#666666")
    above.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    lanes(below, run)
    killed = f"{VICTIM} gets SIGKILL: the others decide\nthis round {run.decided_seconds:.1f} s later"
    restarted = f"{VICTIM} is started again: its work\ncounts {run.counted_seconds:.0f} s later"
    for moment, colour, height, text in ((run.killed, KILL, 0.98, killed), (run.restarted, RESTART, 0.74, restarted)):
        where = place(run.ended, moment)
        for axes in (above, below):
            axes.axvline(where, color=colour, linewidth=1.4, linestyle=(0, (4, 2)), zorder=1)
        behind = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
        label = above.text(where + 0.25, height, text, color=colour, va="top", bbox=behind, zorder=4)
        label.set_transform(above.get_xaxis_transform())
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, format="png", pil_kwargs={"optimize": True})


def lanes(axes: Axes, run: Run) -> None:
    """A filled dot where a peer's work is in the mean of the round, a ring where it is not."""
    for lane, name in enumerate(NAMES):
        for number, mean in enumerate(run.means, 1):
            face, edge = (IN_MEAN, IN_MEAN) if name in mean else ("white", ABSENT)
            axes.plot(number, lane, "o", markersize=6, markerfacecolor=face, markeredgecolor=edge, zorder=2)
    axes.set_yticks(range(len(NAMES)), NAMES)
    axes.set_ylim(len(NAMES) - 0.4, -0.6)
    axes.set_xlabel("round    (● the peer's work is in the mean of the round, ○ it is not)")
    axes.set_xticks([1, *range(5, len(run.means) + 1, 5)])
    axes.tick_params(axis="y", length=0)


def place(ended: Sequence[float], moment: float) -> float:
    """Where a moment lies on an axis of rounds: round n ends at n."""
    after = bisect(ended, moment)
    if not 0 < after < len(ended):
        return float(after)
    return after + (moment - ended[after - 1]) / (ended[after] - ended[after - 1])


def main(arguments: Sequence[str] | None = None) -> int:
    """Play once and draw it; returns 0 if all peers agreed in every round."""
    parser = Parser(prog="python -m benchmarks.picture", description="Draw the picture in the README.")
    parser.add_argument("--out", type=Path, default=Path("docs/images/run.png"))
    parser.add_argument("--rounds", type=at_least_one, default=30)
    parser.add_argument("--inner-steps", type=at_least_one, default=30)
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="starling-picture-") as home:
        run = play(Path(home), given.rounds, given.inner_steps)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    draw(run, given.out)
    summary: dict[str, Any] = asdict(run)
    print(json.dumps(summary))
    return 0 if run.same_bits else 1


if __name__ == "__main__":
    sys.exit(from_shell(main, "python -m benchmarks.picture", cure=""))
