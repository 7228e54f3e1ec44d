"""Situations that the page shows: name -> how to bring a scripted page into it, and the headline that it must show."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from node.reporting.status import PeerStatus
from protocols.base import SyncStatus
from tests.support.scripted_page import ScriptedPage
from tests.support.status_examples import REPORT

ROUNDS = 61
HOSTILE = "<img src=x onerror=alert(1)><script>alert(2)</script>"


@dataclass(frozen=True, slots=True)
class View:
    """A situation.

    Attributes:
        headline: how the page's first heading begins.
    """

    set_up: Callable[[ScriptedPage], None]
    headline: str


def peer(number: int, **changes: Any) -> PeerStatus:
    """A peer of the run."""
    each = PeerStatus(f"12D3KooW{number:06d}", f"laptop-{number}", True, True, ROUNDS - 1, "", route="direct")
    return replace(each, **changes)


def said(page: ScriptedPage, number: int, **changes: Any) -> None:
    """Let a peer of the run say what it does."""
    usual: dict[str, Any] = {
        "state": "training",
        "reason": "",
        "tokens_per_second": 12_000.0 + 400 * number,
        "version": "0.2.0+g1f3c2ab",
    }
    usual |= {"device": "NVIDIA GeForce RTX 4090" if number % 3 else "cpu", "peers": (), "addresses": ()}
    page.answers[f"12D3KooW{number:06d}"] = replace(page.status, **usual | changes), 7.0


def rounds(page: ScriptedPage, first: int, last: int, outcomes: Mapping[int, str] | None = None) -> None:
    """Report rounds with a falling loss."""
    for each in range(first, last):
        page.time += 65
        loss = 1.4 + 1.6 * math.exp(-each / 15) + 0.03 * math.sin(each)
        outcome = (outcomes or {}).get(each, "committed")
        page.feed.report(
            replace(
                REPORT,
                round=each,
                loss=loss,
                held_out_loss=loss - 0.08,
                outcome=outcome,
                time=page.time,
                peers=("p", "q", "r", "s"),
                blamed={},
                seconds_train=52.0,
                bytes_sent=24_000_000,
                bytes_received=25_000_000,
            )
        )
        here = [f"12D3KooW{number:06d}" for number in range(64) if (each + number) % 9]
        page.counted.add(replace(REPORT, outcome=outcome, peers=(page.status.peer, *here)))


def start(page: ScriptedPage) -> None:
    page.show(
        state="starting", reason="the model is built", waiting_for=(), round=0, rounds=200, peers=(), addresses=()
    )
    page.show(run="", run_id="", loss=math.nan, held_out_loss=math.nan, tokens=0, tokens_per_second=0.0)


def training(page: ScriptedPage) -> None:
    page.show(state="training", reason="", waiting_for=(), round=ROUNDS - 1, rounds=200, eta_seconds=8400.0)
    page.show(peers=tuple(peer(number) for number in range(3)), tokens=14_200_000, tokens_per_second=48_211.0)
    page.show(
        rss_bytes=1_234_000_000, checkpoint_age_seconds=190.0, nickname="ada", run="starling", protocol="butterfly"
    )
    page.extras |= {
        "network_bytes": {
            "round": {"upload": 1_450_000_000, "download": 1_500_000_000},
            "control": {"upload": 3_000_000},
        },
        "peer_bytes": {f"12D3KooW{number:06d}": (480_000_000, 510_000_000) for number in range(3)},
        "cpu_cores": 1.7,
        "temperature_celsius": 61.0,
    }
    page.show(version="0.2.0+g1f3c2ab", device="cpu")
    said(page, 0)
    said(page, 1, state="averaging")
    said(page, 2, state="waiting", reason="no script is attached, so it rests")
    rounds(page, 0, ROUNDS - 1)
    page.feed.say("laptop-2 is here")
    page.feed.say("checkpoint of round 60 written")
    page.feed.show_text(b"def mean(values):\n    return sum(values) / len(values)\n")


def fault(page: ScriptedPage) -> None:
    training(page)
    rounds(page, ROUNDS - 1, ROUNDS + 2, {ROUNDS: "undecided", ROUNDS + 1: "skipped"})
    page.show(
        state="waiting",
        reason="waiting for a member of the last round (laptop-1, laptop-2)",
        waiting_for=("laptop-1", "laptop-2"),
    )
    gone = [peer(1, live=False, left=True), peer(2, live=False, route="libp2p", route_reason="connection refused")]
    page.show(peers=(peer(0, route="libp2p", route_reason="no answer within 2 s"), *gone), eta_seconds=None)
    page.show(clock="this machine's clock is 41 s behind the others': set it")


def paused(page: ScriptedPage) -> None:
    training(page)
    page.show(state="paused", reason="on battery since 14:02", eta_seconds=None, tokens_per_second=0.0)


def crowd(page: ScriptedPage) -> None:
    training(page)
    page.show(peers=tuple(peer(number, live=number % 7 != 3, member=number % 5 != 4) for number in range(31)))
    for number in range(31):
        said(page, number, version="0.3.0" if number % 4 else "0.2.0")


def stages(page: ScriptedPage) -> None:
    training(page)
    page.show(stage=1, stages=3, peers=tuple(peer(number, stage=number % 3) for number in range(8)))


def catching_up(page: ScriptedPage) -> None:
    start(page)
    page.show(state="syncing", reason="", peers=(peer(0), peer(1)))
    page.show(syncing=SyncStatus(412_000_000, 1_000_000_000, 2, 11_000_000.0, 0, 4, 53.0))


def hostile(page: ScriptedPage) -> None:
    training(page)
    page.show(reason=HOSTILE, nickname=HOSTILE, run=HOSTILE, waiting_for=(HOSTILE,), clock=HOSTILE, private=True)
    page.show(peers=(peer(0, nickname=HOSTILE, route=HOSTILE, route_reason=HOSTILE), peer(1)))
    said(page, 0, state=HOSTILE, reason=HOSTILE, version=HOSTILE, device=HOSTILE, tokens_per_second=1e300)
    said(page, 1, version="9.9.9; rm -rf ~", device="x" * 512, tokens_per_second=math.nan)
    page.feed.say(HOSTILE)
    page.feed.show_text(HOSTILE.encode())


VIEWS = {
    "start": View(start, "Starting"),
    "training": View(training, "Training round 61 of 200 – about 2 h 20 min left"),
    "fault": View(fault, "Waiting"),
    "paused": View(paused, "Paused"),
    "32-peers": View(crowd, "Training round 61"),
    "stages": View(stages, "Training round 61"),
    "catching-up": View(catching_up, "Catching up: 412 MB of 1.00 GB"),
    "hostile": View(hostile, "Training round 61"),
}
