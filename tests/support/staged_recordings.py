"""A made-up recording of six peers in three stages, on which the judge's rules of stages are tried."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.faults.recording import Event, Incarnation, Recording
from tests.faults.scenarios import SCENARIOS
from tests.support.checkers import Report
from tests.support.recordings import BEGAN, voted, voted_report

STAGES, ROUNDS, TOKENS = 3, 30, 110
NAMES = ("a", "b", "c", "d", "e", "f")
"""Peer i is in stage i mod 3."""
IDS = {name: f"12D3KooW-{name}" for name in NAMES}
MICROBATCHES = 16


def staged_report(name: str, number: int, **changes: Any) -> Report:
    """A peer's report of round `number` of its stage, averaged by both its peers."""
    stage = NAMES.index(name) % STAGES
    ids = tuple(IDS[each] for each in NAMES[stage::STAGES])
    own: Report = {
        "peer": IDS[name],
        "parent": f"S{stage} L{number}",
        "lineage": f"S{stage} L{number + 1}",
        "anchor_lineage": f"S{stage} L{number}",
        "peers": ids,
        "contributions": {each: (f"S{stage} L{number}", 4, 4) for each in ids},
        "params_hash": f"S{stage} {number + 1}",
        "stage": stage,
        "stages": STAGES,
        "microbatches": MICROBATCHES + stage,
        "held_out_loss": 3.0 - number / 100 if stage == 0 else None,
    }
    return {**voted_report("anna", number), **own, **changes}


def staged() -> Recording:
    """30 rounds of 1 s with 110 tokens of each driver; e is killed at 10 s, and started again at 15 s; all is well."""
    histories: dict[str, list[Report]] = {name: [staged_report(name, n) for n in range(ROUNDS)] for name in NAMES}
    killed, again = range(10, 15), range(15, ROUNDS)
    histories["e"] = [staged_report("e", n, incarnation=int(n in again)) for n in range(ROUNDS) if n not in killed]
    for number in killed:
        left = {"peers": (IDS["b"],), "contributions": {IDS["b"]: (f"S1 L{number}", 4, 4)}, "microbatches": 40}
        histories["b"][number].update(left)
    whole: tuple[Incarnation, ...] = (Incarnation(BEGAN - 9, BEGAN + 31, 0, 0),)
    incarnations = dict.fromkeys(NAMES, whole)
    incarnations["e"] = (Incarnation(BEGAN - 9, BEGAN + 10, -9, -9), Incarnation(BEGAN + 14, BEGAN + 31, 0, 0))
    return replace(
        voted(),
        scenario="stages",
        limits=replace(SCENARIOS["stages"].limits, recovery_seconds=5.0),
        should=NAMES,
        ids=IDS,
        events=(
            Event(BEGAN + 10, "SIGKILL to peer", ("e",), "fault"),
            Event(BEGAN + 14, "started, through d", ("e",), "start"),
            Event(BEGAN + 30, "asked to finish", NAMES, "end"),
        ),
        histories=histories,
        logs=dict.fromkeys(NAMES, ""),
        incarnations=incarnations,
        left={name: () for name in NAMES},
        stages=STAGES,
        samples=samples(),
    )


def samples(share: float = 0.5) -> dict[str, list[tuple[float, int]]]:
    """What drivers say once a second: 110 tokens/s each, and `share` of that from 10 to 15 s."""
    found: dict[str, list[tuple[float, int]]] = {}
    for name in NAMES[::STAGES]:
        tokens = 0.0
        for second in range(ROUNDS + 1):
            found.setdefault(name, []).append((BEGAN + second, round(tokens)))
            tokens += TOKENS * (share if 10 <= second < 15 else 1.0)
    return found
