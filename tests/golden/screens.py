"""What the views of a peer and of a swarm draw, character for character, and their lines without a terminal.

python -m tests.golden.screens > tests/golden/screens.txt      # after a change of a view; read what differs
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType

from node.reporting.report import RoundEvaluation, RoundReport
from node.reporting.status import PeerStatus
from node.reporting.swarm import CountedRounds, swarm_status
from node.ui.swarm_summary import SwarmSummary
from node.ui.swarm_view import evaluated_line as evaluated_swarm_line
from node.ui.swarm_view import picture, sample, summary
from node.ui.swarm_view import plain_line as swarm_line
from node.ui.terminal import evaluated_line, plain_line, render, render_swarm, syncing_line
from protocols.base import SyncStatus
from tests.support.status_examples import PEER, REPORT, STATUS

FILE = Path(__file__).with_name("screens.txt")
SIX = tuple(f"peer-{number}" for number in range(1, 7))
OTHERS = (
    PeerStatus(PEER, "bob", True, True, 5, "", stage=1, route="direct"),
    PeerStatus("12D3KooWabcdefghij", "", False, True, 5, "", stage=2),
    PeerStatus("12D3KooWzzzzzzzzzz", "carol", True, False, 4, ""),
    PeerStatus("12D3KooWyyyyyyyyyy", "dave", False, False, 4, "", left=True),
)
BUSY = replace(
    STATUS, peers=OTHERS, loss=1.923, held_out_loss=2.041, eta_seconds=92.0, tokens=1_203_344,
    tokens_per_second=3912.4, bytes_sent=48_100_000, rss_bytes=792_000_000,
)  # fmt: skip
CATCHING_UP = SyncStatus(412_000_000, 800_000_000, 3, 11_200_000.0, 1, 4, 35.2)


def text(shown: RenderableType, width: int) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(shown)
    assert isinstance(console.file, io.StringIO)
    return "".join(f"{line.rstrip()}\n" for line in console.file.getvalue().splitlines())


def report(number: int, **changes: Any) -> RoundReport:
    plain = replace(
        REPORT, peer=PEER, round=number, peers=("p", "q", "s"), tokens=31232, loss=5.2 * 0.8**number, seconds_train=8.2,
        seconds_average=0.6, bytes_sent=3_100_000, bytes_received=12_100_000, held_out_loss=1.2 + 4 * 0.8**number,
    )  # fmt: skip
    return replace(plain, **changes)


def swarm_report(name: str, number: int, stages: int = 1, **changes: Any) -> RoundReport:
    """Each stage has a lineage of its own, and only stage 0 a loss; peer i is in stage i mod `stages`."""
    stage = SIX.index(name) % stages
    plain = replace(
        REPORT, peer=f"id-of-{name}", round=number, lineage=f"l{number + 1}-{stage}",
        params_hash=f"h{number + 1}-{stage}", peers=SIX[stage::stages], tokens=1000, seconds_wait=0.1,
        seconds_average=0.5, bytes_sent=10, bytes_received=20,
        time=100.0 + 3 * number, held_out_loss=math.nan if stage else 3.0 / (number + 1), stage=stage, stages=stages,
    )  # fmt: skip
    return replace(plain, **changes)


def story(rounds: int, stages: int = 1, names: tuple[str, ...] = SIX) -> SwarmSummary:
    """A swarm of which all peers have reported all rounds, and left in good order."""
    tally = SwarmSummary(names, stages)
    for number in range(rounds):
        for name in reversed(names):  # stage 0 is the last to report
            tally.add(name, swarm_report(name, number, stages))
        assert len(list(tally.complete(names))) == 1
    for each in tally.tracks.values():
        each.well = True
    return tally


def _peer_screens() -> Iterator[tuple[str, str]]:
    reports = [report(number) for number in range(6)]
    for width in (60, 80, 120):
        yield f"a peer at work, {width} columns", text(render(BUSY, reports, width), width)
    usual = text(render(BUSY, (), 100), 100).splitlines(keepends=True)
    cases: dict[str, dict[str, Any]] = {
        "in stages": {"stage": 1, "stages": 3},
        "in clusters": {"clusters": True},
        "alone": {"peers": ()},
        "alone on this machine": {"peers": (), "addresses": STATUS.addresses[:1]},
        "that has finished": {"peers": (), "state": "finished"},
        "of which little is known": {"loss": math.nan, "tokens_per_second": math.nan, "rounds": 0, "waiting_for": ()},
        "with independent state": {"protocol": "gossip", "spread": 0.0123, "spread_limit": 0.02},
        "with all lines": {
            "protocol": "butterfly", "checkpoint_age_seconds": 125.0, "limits": "at most 1 MB/s", "clock": "off",
            "peers": (OTHERS[0], replace(OTHERS[0], route="libp2p", route_reason="a firewall")),
        },
        "that is full": {"peers": OTHERS * 5, "waiting_for": ("bob",) * 6},
        "that catches up": {"state": "syncing", "syncing": CATCHING_UP},
    }  # fmt: skip
    for what, changes in cases.items():
        lines = text(render(replace(BUSY, **changes), (), 100), 100).splitlines(keepends=True)
        yield f"what differs of a peer {what}", "".join(line for line in lines if line not in usual)


def _peer_lines() -> Iterator[str]:
    for outcome in ("committed", "alone", "skipped", "superseded", "fork"):
        yield plain_line(report(3, outcome=outcome), 16)
    yield plain_line(report(0, outcome="skipped", tokens=0, loss=math.nan, held_out_loss=math.nan), 16)
    yield plain_line(report(5, outcome="undecided", loss=math.nan, held_out_loss=math.nan), 16)
    yield plain_line(report(12, outcome="fork"), alone=True)
    yield plain_line(report(3, stage=1, stages=3))
    yield plain_line(report(3, contributors=24))
    yield evaluated_line(RoundEvaluation(3, "", 2.1345, 24, 0.0), 16)
    yield plain_line(report(3, peers=("p", PEER), spread=1.504, spread_limit=0.02))
    yield plain_line(report(3, peers=(), spread=0.0, spread_limit=0.02))
    whole = replace(CATCHING_UP, bytes_here=CATCHING_UP.bytes_whole)
    for each in (
        CATCHING_UP, replace(CATCHING_UP, donors=1, eta_seconds=None), whole, replace(whole, rounds_whole=0),
        SyncStatus(0, 0, 0, 0.0, 0, 0, None),
    ):  # fmt: skip
        yield syncing_line(replace(BUSY, syncing=each))


def _swarm_screens() -> Iterator[tuple[str, str]]:
    for stages in (1, 3):
        tally, words = story(3, stages), dict.fromkeys(SIX, "starts")
        statuses = {SIX[1]: replace(STATUS, stage=1 % stages, stages=stages)}
        yield f"a swarm at work, in {stages} stages", text(picture(tally, words, statuses, 80), 80)
        yield f"its end, in {stages} stages", text(summary(tally, dict.fromkeys(SIX, "left"), 200.0), 110)
    many = [f"peer-{number}" for number in range(1, 19)]
    starting = picture(SwarmSummary(many, 2), dict.fromkeys(many, "exit code 1"), {"peer-1": BUSY}, 40)
    yield "a swarm that starts, on a narrow terminal", text(starting, 40)
    yield "what a model writes", text(sample("def f():\n    \x1b[2Jreturn [bold]x\r\n"), 80)


def _status_of_swarm() -> Iterator[tuple[str, str]]:
    mine, counted = replace(BUSY, state="training", reason="", version="0.2.0+checkout", device="cpu"), CountedRounds()
    for number in range(7):
        counted.add(report(number, peers=(PEER, "12D3KooWabcdefghij") if number % 3 else (PEER,)))
    rests = replace(mine, state="waiting", reason="no script is attached, so it rests", version="0.3.0")
    gpu = replace(mine, version="0.3.0", device="NVIDIA GeForce RTX 4090")
    answers = {"12D3KooWabcdefghij": (gpu, 4.0), "12D3KooWbbbbbbbbbb": (rests, 9.0)}
    others = replace(mine, peer=PEER, peers=(*OTHERS[1:], PeerStatus("12D3KooWbbbbbbbbbb", "eve", True, True, 5, "")))
    view = swarm_status(others, answers, counted, asked=True, unreadable={}, update="update it")
    for width in (80, 130):
        yield f"the swarm as a peer knows it, {width} columns", text(render_swarm(view, width), width)
    many = tuple(replace(OTHERS[0], peer=f"12D3KooW{number:010}", nickname="") for number in range(70))
    crowd = swarm_status(replace(mine, peers=many, stages=3), {}, counted, unreadable={})
    lines = text(render_swarm(crowd, 100, staged=True), 100).splitlines(keepends=True)
    yield "the beginning and the end of a large swarm in stages", "".join((*lines[:4], *lines[-3:]))


def _swarm_lines() -> Iterator[str]:
    for stages in (1, 3):
        yield from (swarm_line(each, 16) for each in story(2, stages).rounds)
    tally = story(1)
    tally.add(SIX[0], swarm_report(SIX[0], 1, outcome="skipped", held_out_loss=math.nan, peers=()))
    tally.add(SIX[0], swarm_report(SIX[0], 2, spread=0.011, spread_limit=0.02))
    tally.add(SIX[1], swarm_report(SIX[1], 2, spread=0.024, spread_limit=0.02))
    yield from (swarm_line(each, 16) for each in tally.complete(()))
    yield swarm_line(replace(tally.rounds[0], held_out_loss=math.nan, tokens_per_second=0.0, in_mean=0), 16)
    yield evaluated_swarm_line(tally.rounds[0], 16)


def screens() -> str:
    lines = {"lines of a peer": _peer_lines(), "lines of a swarm": _swarm_lines()}
    shown = [
        *_peer_screens(),
        *_status_of_swarm(),
        *_swarm_screens(),
        *((name, "\n".join(each) + "\n") for name, each in lines.items()),
    ]
    return "\n".join(f"== {name}\n{each}" for name, each in shown)


if __name__ == "__main__":
    print(screens(), end="")
