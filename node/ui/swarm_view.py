"""The views of the command `swarm`: a live view, a line per round, and a summary. No I/O."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Literal

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from node.reporting.status import Status, short
from node.ui.swarm_summary import PeerSummary, StageSummary, SwarmRound, SwarmSummary
from node.ui.terminal import STYLES, count, duration, number, percent, size, sparkline

_SHOWN_PEERS = 16
_SAMPLE_CHARACTERS = 1000
_LEAST_WIDTHS = {"peer": 7, "stage": 5}  # Columns that a narrow terminal does not cut: they tell the rows apart


def plain_line(done: SwarmRound, rounds: int) -> str:
    """One aligned line for a round of the swarm."""
    return (
        f"round {done.number + 1:>{len(str(rounds))}}/{rounds}  held out {number(done.held_out_loss)}"
        f"  {count(done.tokens_per_second):>6} tokens/s  {duration(done.seconds):>8}"
        f"  {_outcome(done)}"
    )


def evaluated_line(done: SwarmRound, rounds: int) -> str:
    """Of a round that has a line already: with stages its loss comes later."""
    return f"round {done.number + 1:>{len(str(rounds))}}/{rounds}  held out {number(done.held_out_loss)}"


def _outcome(done: SwarmRound) -> str:
    if not math.isnan(done.spread):  # the peers averaged with different others
        return f"mixed, at most {percent(done.spread)} from the mean"
    where = " in stage 0" if done.stages > 1 else ""
    if done.in_mean:
        return f"mean of {done.in_mean}{where}"
    return f"{'nothing to apply' if done.tokens_per_second else 'nothing was trained'}{where}"


def picture(
    tally: SwarmSummary, words: Mapping[str, str], statuses: Mapping[str, Status], width: int
) -> RenderableType:
    """The live view. `words`: name -> what the peer does, shown if its status is not known."""
    headings = ("peer", *_staged(tally, "stage"), "state", "round", "loss", "tokens/s", "sent", "received")
    table = _table(headings, left=("peer", "state"))
    for name, track in list(tally.tracks.items())[:_SHOWN_PEERS]:
        status = statuses.get(name)
        cells = _cells(status) if status else (Text(words[name]),)
        table.add_row(Text(name), *_staged(tally, str(track.stage)), *cells)
    rest = len(tally.tracks) - _SHOWN_PEERS
    rounds = max((each.rounds for each in statuses.values()), default=0)
    return Group(
        _title(tally, rounds, width), _losses(tally, width), table, *([Text(f"and {rest} more")] if rest > 0 else [])
    )


def _table(headings: Sequence[str], left: Collection[str]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for heading in headings:
        justify: Literal["left", "right"] = "left" if heading in left else "right"
        least = _LEAST_WIDTHS.get(heading)
        table.add_column(heading, justify=justify, no_wrap=True, overflow="ellipsis", min_width=least)
    return table


def _staged(tally: SwarmSummary, cell: str) -> tuple[str, ...]:
    """The cell of a column that only a run with stages has."""
    return (cell,) if len(tally.stage_numbers) > 1 else ()


def _cells(status: Status) -> tuple[RenderableType, ...]:
    return (
        Text(status.state, style=STYLES.get(status.state, "white")),
        str(min(status.round + 1, status.rounds or status.round + 1)),  # people count from one
        number(status.loss),
        count(status.tokens_per_second),
        size(status.bytes_sent),
        size(status.bytes_received),
    )


def _title(tally: SwarmSummary, rounds: int, width: int) -> Text:
    done = tally.rounds[-1].number + 1 if tally.rounds else 0
    of = "".join(_staged(tally, f" in {len(tally.stage_numbers)} stages"))
    text = Text.assemble(("starling swarm", "bold"), f"  {len(tally.tracks)} peers{of}  ", no_wrap=True)
    text.append(f"round {done} of {rounds} " if rounds else "", style="dim")
    text.append("─" * max(0, width - len(text)), style="dim")
    return text


def _losses(tally: SwarmSummary, width: int) -> Text:
    if not tally.losses:
        return Text("held out  –")
    bars = sparkline(tally.losses, max(10, width - 32))
    return Text.assemble(f"held out  {number(tally.first_loss)} ", (bars, "green"), f" {number(tally.losses[-1])}")


def summary(tally: SwarmSummary, ends: Mapping[str, str], seconds: float) -> RenderableType:
    """The table at the end. `ends`: name -> how the peer's process ended."""
    headings = ("rounds", "tokens", "training", "averaging", "sent", "received", "parameters", "end")
    table = _table(("peer", "", *_staged(tally, "stage"), *headings), left=("peer", "", "parameters", "end"))
    for track in tally.tracks.values():
        name, peer, *cells = map(Text, _track(track))
        end = Text(ends[track.name], style="" if track.well else "yellow")
        table.add_row(name, peer, *_staged(tally, str(track.stage)), *cells, end)
    return Group("", table, "", Text(_verdict(tally, seconds)))


def _track(track: PeerSummary) -> tuple[str, ...]:
    totals = track.totals
    return (
        track.name,
        short(track.peer),
        str(track.rounds),
        count(totals.tokens),
        duration(totals.seconds_train),
        duration(totals.seconds_average),
        size(totals.bytes_sent),
        size(totals.bytes_received),
        track.params_hash[:8],
    )


def _verdict(tally: SwarmSummary, seconds: float) -> str:
    end = tally.as_json()
    first, last = end["loss_first"], end["loss_last"]
    agree = _apart(tally) or _agreement(tally.stages)
    fell = f"; held-out loss {first:.3f} -> {last:.3f}" if math.isfinite(last) else ""
    return f"{end['rounds']} rounds in {duration(seconds)}: {agree}{fell}"


def _agreement(stages: Sequence[StageSummary]) -> str:
    apart = [str(each.stage) for each in stages if not each.agree]
    if len(stages) == 1:
        return "the peers do not all agree" if apart else "all peers agree, bit for bit"
    if not apart:
        return f"all {len(stages)} stages agree, bit for bit"
    *others, last = apart
    return f"stages {', '.join(others)} and {last} do not agree" if others else f"stage {last} does not agree"


def _apart(tally: SwarmSummary) -> str:
    """The spread of peers with independent state; empty with replicated state."""
    spread, limit = tally.spread
    if math.isnan(limit):
        return ""
    where = f"a peer is {percent(spread)} from the mean of all" if math.isfinite(spread) else "the spread is not known"
    if spread == 0:
        where = "all peers hold the same parameters"
    return f"{where}, the limit is {percent(limit)}"


def sample(text: str) -> RenderableType:
    """Text that the model wrote, as a block, without terminal control codes."""
    shown = "".join(each if each.isprintable() or each == "\n" else "·" for each in text[:_SAMPLE_CHARACTERS])
    return Group("", Text("the model writes:", style="dim"), Text(shown))
