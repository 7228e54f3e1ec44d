"""Made-up recordings of three peers, on which the judge of `tests.faults`, its figures and its timeline are tried."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from tests.faults.judge import judge
from tests.faults.recording import Event, Incarnation, Limits, Recording
from tests.support.checkers import Report

BEGAN = 1_000.0
PEERS = ("anna", "bert", "cleo")
IDS = {name: f"12D3KooW-{name}" for name in PEERS}
NO_CONTRIBUTIONS: dict[str, Any] = {"peers": (), "contributions": {}}
SPREAD, SPREAD_LIMIT = 0.1, 0.02


def voted_report(name: str, number: int, peers: tuple[str, ...] = PEERS, **changes: Any) -> Report:
    """A butterfly peer's report of round `number`, averaged by `peers`; it ends `number` + 1 s after the beginning."""
    ids = tuple(IDS[each] for each in peers)
    ordinary: Report = {
        "run": "run",
        "peer": IDS[name],
        "incarnation": 0,
        "round": number,
        "parent": f"L{number}",
        "lineage": f"L{number + 1}",
        "anchor_lineage": f"L{number}",
        "outcome": "committed",
        "peers": ids,
        "contributions": {each: (f"L{number}", 4, 4) for each in ids},
        "finite": True,
        "weight": 100.0,
        "tokens": 110,
        "params_hash": f"params {number + 1}",
        "time": BEGAN + number + 1,
        "seconds_train": 0.7,
        "seconds_wait": 0.1,
        "seconds_average": 0.19,
        "rss_bytes": 600_000_000,
        "open_files": 30,
        "tasks": 20,
    }
    return {**ordinary, **changes}


def mixed_report(name: str, number: int, **changes: Any) -> Report:
    """A gossip peer's report of round `number`, in which it counted a message of the peer before it in `PEERS`."""
    partner = IDS[PEERS[PEERS.index(name) - 1]]
    own: Report = {
        "parent": f"{name} {number}",
        "lineage": f"{name} {number + 1}",
        "anchor_lineage": f"{name} {number}",
        "peers": (partner,),
        "contributions": {partner: (f"{name} {number}", 4, 4)},
        "messages": (f"{partner} {number}",),
        "group": "",
        "weight": 0.5,
        "tokens": 100,
        "params_hash": f"{name} {number + 1}",
        "half_exchanges": 0,
        "spread": SPREAD,
        "spread_limit": SPREAD_LIMIT,
    }
    return {**voted_report(name, number), **own, **changes}


def voted() -> Recording:
    """Butterfly: 30 rounds of 1 s with 100 tokens of each peer; calm until 10 s, healed at 20 s; nothing is wrong."""
    log = '{"event": "round 3 decided", "level": "warning", "logger": "node.session.peer"}\n'
    return Recording(
        scenario="made-up",
        seed=7,
        protocol="butterfly",
        task="paced",
        limits=Limits(recovery_seconds=5.0),
        calm=(BEGAN, BEGAN + 10),
        healed=BEGAN + 20,
        ended=BEGAN + 30,
        should=PEERS,
        ids=IDS,
        events=(
            Event(BEGAN - 9, "started", PEERS, "start"),
            Event(BEGAN + 10, "cut off", ("bert",), "fault"),
            Event(BEGAN + 20, "healed", ("bert",), "heal"),
            Event(BEGAN + 30, "asked to finish", PEERS, "end"),
        ),
        histories={name: [voted_report(name, number) for number in range(30)] for name in PEERS},
        logs=dict.fromkeys(PEERS, log),
        incarnations=dict.fromkeys(PEERS, (Incarnation(BEGAN - 9, BEGAN + 31, 0, 0),)),
        left={name: () for name in PEERS},
    )


def mixed() -> Recording:
    """Gossip: the same times and incarnations; each peer mixes with the peer before it in every round."""
    histories = {name: [mixed_report(name, number) for number in range(30)] for name in PEERS}
    return replace(voted(), protocol="gossip", histories=histories)


def history(play: Recording, name: str) -> list[Report]:
    """The reports of a peer, which a test changes in place."""
    found = play.histories[name]
    assert isinstance(found, list)
    return found


def with_incarnations(play: Recording, name: str, *incarnations: Incarnation) -> Recording:
    """The recording with other processes of one peer."""
    return replace(play, incarnations={**play.incarnations, name: incarnations})


def after_death(pause_seconds: float = 0.0) -> Recording:
    """Butterfly: cleo is killed at 15 s. Round 15 takes `pause_seconds` longer; nothing after `ended` is reported."""
    play = voted()
    del history(play, "cleo")[15:]
    for name in ("anna", "bert"):
        history(play, name)[15:] = [voted_report(name, number, ("anna", "bert")) for number in range(15, 30)]
        for each in history(play, name)[15:]:
            each["time"] += pause_seconds
        history(play, name)[:] = [each for each in history(play, name) if each["time"] <= play.ended]
    killed = Incarnation(BEGAN - 9, BEGAN + 15, -9, -9)
    return with_incarnations(replace(play, should=("anna", "bert")), "cleo", killed)


def skip_mixing(reports: list[Report]) -> None:
    """Make these reports of rounds in which a gossip peer met no other."""
    for each in reports:
        each.update(outcome="skipped", messages=(), weight=0.0, **NO_CONTRIBUTIONS)


def found(play: Recording) -> list[tuple[str, str]]:
    verdict = judge(play)
    assert verdict.verdict == ("fail" if verdict.violations else "pass")
    json.dumps(verdict.as_dict(), allow_nan=False)
    return [(each["invariant"], each["peer"]) for each in verdict.violations]


def detail(play: Recording) -> str:
    return "; ".join(each["detail"] for each in judge(play).violations)
