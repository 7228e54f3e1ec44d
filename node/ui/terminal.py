"""The view of a running peer: live on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from itertools import pairwise
from typing import Literal

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from node.reporting.report import RoundEvaluation, RoundReport, add_loss
from node.reporting.status import (
    MAX_NAME,
    OTHERS_REDUCE,
    PeerStatus,
    Status,
    join_command,
    not_direct,
    printable,
    short,
    to_json,
    who_joins,
)
from node.reporting.swarm import SwarmRow, SwarmStatus, name_of, state_words
from node.ui.screen import Screen

MAX_REPORTS = 1000
_SHOWN_PEERS = 8
_SHOWN_ROWS = 64
_SHOWN_NAMES = 4
_SHOWN_STAGES = 32
STYLES = {
    "training": "green",
    "averaging": "cyan",
    "syncing": "cyan",
    "waiting": "yellow",
    "joining": "yellow",
    "paused": "yellow",
    "moving": "yellow",
}
_OUTCOMES = {
    "alone": "alone",
    "skipped": "skipped: no contribution counted",
    "undecided": "not decided, training continues",
    "superseded": "caught up with the others",
    "fork": "continued without a majority",
}


class Terminal:
    """`node.reporting.status.EventSink` over the process's stdout and stderr. Never blocks, never raises."""

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json
        self._screen = Screen(as_json)
        self.log_style, self.is_live = self._screen.log_style, self._screen.is_live
        self.say, self.log, self.close = self._screen.say, self._screen.log, self._screen.close
        self._reports: deque[RoundReport] = deque(maxlen=MAX_REPORTS)
        self._status: Callable[[], Status] | None = None

    def report(self, report: RoundReport) -> None:
        if not self.is_live:
            status = self._status() if self._status else None
            alone = status is not None and not any(each.member for each in status.peers if each.stage == status.stage)
            self.log(plain_line(report, status.rounds if status else 0, alone))
        if self._as_json:
            self._screen.data(to_json(report))
        self._reports.append(report)

    def evaluated(self, evaluation: RoundEvaluation) -> None:
        if not self.is_live:
            self.log(evaluated_line(evaluation, self._status().rounds if self._status else 0))
        if self._as_json:
            self._screen.data(to_json(evaluation))
        add_loss(self._reports, evaluation)

    def showing(self, status: Callable[[], Status]) -> AbstractAsyncContextManager[None]:
        """Show a peer until the context ends; the last view stays on the screen."""
        self._status = status
        return self._screen.showing(
            lambda width: render(status(), tuple(self._reports), width), lambda: syncing_line(status())
        )


# -- rendering, without I/O -------------------------------------------------------------------------------------------


def plain_line(report: RoundReport, rounds: int = 0, alone: bool = False) -> str:
    """One aligned line for a round of a run of `rounds`, 0 if not known.

    `alone`: the roster has no other peer now, as also after a restart, when a peer succeeds its earlier incarnation.
    With stages it is the roster of this peer's stage.
    """
    of = f"/{rounds}" if rounds else ""
    width = 2 * len(str(rounds)) + 1 if rounds else 4
    seconds = report.seconds_train + report.seconds_wait + report.seconds_average
    speed = report.tokens / report.seconds_train if report.seconds_train > 0 else math.nan
    outcome = _OUTCOMES.get(report.outcome, f"mean of {report.in_mean}")
    if report.outcome == "skipped" and not report.tokens:  # as while a founder waits for others
        outcome = "nothing was trained"
    if not math.isnan(report.spread):
        outcome = _mixed(report)
    outcome = "continues alone" if alone and report.outcome == "fork" else outcome
    if report.stages > 1:
        outcome += f" in stage {report.stage}"
    now = f"{report.round + 1}{of}"  # people count from one
    return (
        f"round {now:>{width}}  loss {number(report.loss)}  held out {number(report.held_out_loss)}"
        f"  {count(speed):>6} tokens/s  {duration(seconds):>8}"
        f"  sent {size(report.bytes_sent):>8}  received {size(report.bytes_received):>8}  {outcome}"
    )


def evaluated_line(evaluation: RoundEvaluation, rounds: int = 0) -> str:
    """Of a round that has a line already. With stages its loss is measured beside the next round."""
    of = f"/{rounds}" if rounds else ""
    width = 2 * len(str(rounds)) + 1 if rounds else 4
    now = f"{evaluation.evaluated + 1}{of}"
    mean = f"mean of {evaluation.samples} microbatches"
    return f"round {now:>{width}}  held out {number(evaluation.held_out_loss)}, {mean}"


def _mixed(report: RoundReport) -> str:
    others = len([peer for peer in report.peers if peer != report.peer])
    met = f"mixed with {others}" if others else "mixed with no peer"
    return f"{met}, at most {percent(report.spread)} from the mean"


def syncing_line(status: Status) -> str:
    """Progress of a peer that catches up; empty in other states."""
    each = status.syncing
    if each is None:
        return ""
    words = []
    if each.bytes_here < each.bytes_whole:
        donors = f"{each.donors} peer{'s' * (each.donors != 1)}"
        words.append(f"{size(each.bytes_here)} of {size(each.bytes_whole)} of the state, from {donors}")
    elif each.rounds_whole:
        words.append(f"{each.rounds_here} of {each.rounds_whole} rounds replayed")
    else:
        words.append("the state has arrived" if each.bytes_whole else "looking for peers with the state")
    words.append(f"{size(each.bytes_per_second)}/s")
    if each.eta_seconds is not None:
        words.append(f"about {duration(each.eta_seconds)} left")
    return f"catching up: {'   '.join(words)}"


def render(status: Status, reports: Sequence[RoundReport], width: int) -> RenderableType:
    rows = Table.grid(padding=(0, 2, 0, 0), expand=False)
    rows.add_column(style="dim", no_wrap=True)
    rows.add_column(overflow="fold")
    columns = max(10, width - 13)
    if status.waiting_for:
        rows.add_row("waits for", _names(status.waiting_for))
    if line := syncing_line(status):
        rows.add_row("state", line.removeprefix("catching up: "))
    if status.stages > 1:
        rows.add_row("stage", _stage(status))
    rows.add_row("round", _progress(status, columns))
    rows.add_row("loss", _losses(status, reports, columns))
    if status.protocol:
        rows.add_row("protocol", _protocol(status))
    rows.add_row("speed", f"{count(status.tokens_per_second)} tokens/s   {count(status.tokens)} tokens so far")
    rows.add_row("network", f"{size(status.bytes_sent)} sent   {size(status.bytes_received)} received")
    for name in ("limits", "move", "lost", "backups"):
        if text := getattr(status, name):
            rows.add_row(name, printable(text))
    rows.add_row("machine", _machine(status))
    if status.checkpoint_age_seconds is not None:
        rows.add_row("checkpoint", f"{duration(status.checkpoint_age_seconds)} old")
    if status.clock:
        rows.add_row("clock", Text(printable(status.clock), style="yellow"))
    return Group(_title(status, width), _state(status), rows, *_peers(status, width), *_invitation(status))


def _title(status: Status, width: int) -> RenderableType:
    name = printable(status.nickname)[:MAX_NAME] or short(status.peer)
    run = " ".join(filter(None, ("run", printable(status.run)[:24], status.run_id[:8])))
    text = Text.assemble(("starling", "bold"), f"  {name}", (f"  {run} ", "dim"), no_wrap=True, overflow="ellipsis")
    text.append("─" * max(0, width - len(text)), style="dim")
    return text


def _state(status: Status) -> RenderableType:
    text = Text.assemble((status.state, f"bold {STYLES.get(status.state, 'white')}"))
    if status.reason:
        text.append(f": {printable(status.reason, 200)}")
    return text


def _names(names: Sequence[str]) -> Text:
    rest = len(names) - _SHOWN_NAMES
    shown = ", ".join(printable(each)[:40] for each in names[:_SHOWN_NAMES])
    return Text(f"{shown} and {rest} more" if rest > 0 else shown)


def _stage(status: Status) -> Text:
    """This peer's stage, and how many peers each stage has. Stages count from 0, as in the option --stage."""
    stages = min(status.stages, _SHOWN_STAGES)  # a stranger's status may name any number
    live = [sum(each.live for each in status.peers if each.stage == stage) for stage in range(stages)]
    if 0 <= status.stage < stages:
        live[status.stage] += 1  # this peer
    text = Text(f"{status.stage} (of 0 to {status.stages - 1})   live peers in each: ")
    return text.append(", ".join(map(str, live)), style="" if all(live) else "yellow")


def _progress(status: Status, columns: int) -> RenderableType:
    now = status.round + 1  # people count from one
    text = f"{min(now, status.rounds)} of {status.rounds}" if status.rounds else str(now)
    going = status.eta_seconds is not None and status.state not in ("leaving", "finished")
    eta = f"about {duration(status.eta_seconds or 0.0)} left" if going else ""
    bar_width = min(40, columns - len(text) - len(eta) - 6)
    if not status.rounds or bar_width < 5:
        return Text("   ".join(filter(None, (text, eta))))
    grid = Table.grid(padding=(0, 2, 0, 0))
    done = ProgressBar(total=status.rounds, completed=min(status.round, status.rounds), width=bar_width)
    grid.add_row(text, done, eta)
    return grid


def _losses(status: Status, reports: Sequence[RoundReport], columns: int) -> Text:
    text = Text(f"{number(status.loss)} training   ")
    text.append(number(status.held_out_loss), style="bold")
    text.append(" held out")
    curve = [each.held_out_loss for each in reports if math.isfinite(each.held_out_loss)]
    ends = f"  {number(curve[0])} → {number(curve[-1])}" if curve else ""
    bars = sparkline(curve, min(32, columns - len(text) - len(ends) - 3))
    if len(curve) > 1 and bars:
        text.append("   ").append(bars, style="green").append(ends, style="dim")
    return text


def _protocol(status: Status) -> Text:
    text = printable(status.protocol, 32)
    if math.isfinite(status.spread):
        text += f"   at most {percent(status.spread)} from the mean of all, the limit is {percent(status.spread_limit)}"
    return Text(text)


def _machine(status: Status) -> str:
    return f"{size(status.rss_bytes)} memory   {1000 * status.loop_lag_p99_seconds:.0f} ms loop lag (p99)"


def _peers(status: Status, width: int) -> list[RenderableType]:
    if not status.peers:
        return []
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False, pad_edge=False)
    staged = status.stages > 1
    for no_wrap in (True,) * ((5 if width >= 70 else 4) + staged):
        table.add_column(no_wrap=no_wrap, overflow="ellipsis")
    order = sorted(status.peers, key=lambda each: (not each.live, each.left, not each.member, each.stage, each.peer))
    for each in order[:_SHOWN_PEERS]:
        table.add_row(*_peer(each, staged, status.clusters)[: len(table.columns)])
    live = sum(each.live for each in order)
    left = sum(each.left for each in order)
    counts = ((live, "live"), (left, "left"), (len(order) - live - left, "lost"))
    now = ", ".join(f"{number} {word}" for number, word in counts if number or word == "live")
    slow = not_direct(order)
    lines = [Text(f"Data goes to {slow}", style="dim", overflow="fold")] if slow else []
    heading = Text(f"\n{len(order)} other peer{'s' * (len(order) != 1)}, {now}", style="bold")
    rest = len(order) - _SHOWN_PEERS
    return [heading, table, *([Text(f"and {rest} more", style="dim")] if rest > 0 else []), *lines]


def _peer(line: PeerStatus, staged: bool, clusters: bool) -> tuple[Text, ...]:
    mark = Text("○ left", style="dim") if line.left else Text("○ lost", style="yellow")
    mark = Text("● live", style="green") if line.live else mark
    name = Text(printable(line.nickname)[:MAX_NAME] or short(line.peer))
    with_vote, without = ("voter", "associate") if clusters else ("member", "observer")
    role = Text(with_vote if line.member else without, style="" if line.member else "dim")
    if line.route:
        role.append(f", {printable(line.route)[: len(OTHERS_REDUCE)]}", style="dim")
    stage = (Text(f"stage {line.stage}"),) if staged else ()
    return mark, name, *stage, Text(f"round {line.round + 1}"), role, Text(short(printable(line.peer)), style="dim")


_SWARM_HEADINGS = ("name", "state", "stage", "round", "counted", "tokens/s", "data", "version", "device")
_NUMBERS = ("stage", "round", "counted", "tokens/s")
_WIDE = 110  # A narrower terminal shows no devices, and no build of a version
_LEAST_STATE = 12


def render_swarm(swarm: SwarmStatus, width: int, staged: bool = False) -> RenderableType:
    """The table of `status --swarm`. `staged`: whether the run has stages."""
    speed = f"{count(swarm.tokens_per_second)} tokens/s" + (" in this stage" if staged else "")
    title = Text.assemble(("the swarm", "bold"), f"  {swarm.here} of {swarm.known} peers here   {speed}")
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    wide = width >= _WIDE
    headings = [each for each in _SWARM_HEADINGS if (staged or each != "stage") and (wide or each != "device")]
    rows = [_swarm_cells(each, swarm.counted_of, wide) for each in swarm.rows[:_SHOWN_ROWS]]
    others = sum(max(len(each), *(len(row[each]) for row in rows)) + 2 for each in headings if each != "state")
    for heading in headings:
        justify: Literal["left", "right"] = "right" if heading in _NUMBERS else "left"
        most = max(_LEAST_STATE, width - others) if heading == "state" else None
        table.add_column(heading, justify=justify, no_wrap=True, overflow="ellipsis", max_width=most)
    for row in rows:
        table.add_row(*(row[heading] for heading in headings))
    lines = [Text(f"and {len(swarm.rows) - _SHOWN_ROWS} more", style="dim")] if len(swarm.rows) > _SHOWN_ROWS else []
    if not swarm.asked:
        lines.append(Text("Not all live peers have answered yet.", style="dim"))
    if swarm.newer:
        lines.append(Text(printable(swarm.newer), style="yellow", overflow="fold"))
    return Group(title, table, *lines)


def _swarm_cells(row: SwarmRow, rounds: int, wide: bool) -> dict[str, Text]:
    style = STYLES.get(row.state, "") if row.live else "dim" if row.left else "yellow"
    version = row.version if wide else row.version.partition("+")[0]
    cells = {
        "name": name_of(row),
        "stage": str(row.stage),
        "round": str(row.round + 1),
        "counted": "–" if row.counted is None or not rounds else f"{row.counted} of {rounds}",
        "tokens/s": count(row.tokens_per_second) if math.isfinite(row.tokens_per_second) else "–",
        "data": row.route,
        "version": version,
        "device": row.device,
    }
    shown = {heading: Text(printable(cell, 80) or "–") for heading, cell in cells.items()}
    return shown | {"state": Text(state_words(row), style=style)}


def _invitation(status: Status) -> list[RenderableType]:
    command = join_command(status)
    if status.peers or command is None or status.state == "finished":
        return []
    line, where = command
    return [Text(f"\nNo other peer has joined yet. {who_joins(where)}", style="dim"), Text(line, overflow="fold")]


_BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw at most `width` bars; the lowest value has the lowest bar. More values than bars are averaged in groups."""
    if width < 1 or not values:
        return ""
    bins = min(width, len(values))
    edges = [index * len(values) // bins for index in range(bins + 1)]
    means = [math.fsum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, span = min(means), max(means) - min(means)
    return "".join(_BARS[round((each - low) / span * (len(_BARS) - 1)) if span else 0] for each in means)


def number(value: float) -> str:
    """A loss, always five characters wide."""
    return f"{value:5.3f}"[:5] if math.isfinite(value) else "    –"


def count(value: float) -> str:
    """A count in readable form: 950, 12,345, 4.56 M."""
    if abs(value) < 99_999.5:
        return f"{value:,.0f}"
    return _scaled(value, ("", " k", " M", " G", " T"))


def percent(share: float) -> str:
    """A share of one as a percentage with two digits: .0123 is 1.2 %."""
    if not math.isfinite(share):
        return "– %"
    return f"{100 * share:.2g} %" if share < 0.995 else f"{100 * share:,.0f} %"


def size(size_bytes: float) -> str:
    """A number of bytes, in units of powers of 1000."""
    return _scaled(size_bytes, (" B", " kB", " MB", " GB", " TB"))


def _scaled(value: float, units: Sequence[str]) -> str:
    if not math.isfinite(value):
        return "–"
    step = 0
    while abs(value) >= 999.5 and step < len(units) - 1:
        value, step = value / 1000, step + 1
    digits = 0 if step == 0 or abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
    return f"{value:.{digits}f}{units[step]}"


def duration(seconds: float) -> str:
    """A duration in readable form: 3.2 s, 45 s, 2 min 5 s, 3 h 12 min, 2 d 3 h."""
    if not math.isfinite(seconds):
        return "–"
    if seconds < 9.95:
        return f"{max(0.0, seconds):.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if minutes else f"{rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 24 else f"{hours // 24} d {hours % 24} h"
