"""The judge of `tests.faults`: healthy recordings pass, and one planted violation of each rule is found and named."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.faults.independent import APART
from tests.faults.judge import Verdict, judge
from tests.faults.recording import Incarnation, Limits, Recording
from tests.support.independent_checkers import mixed as last_to_mix
from tests.support.recordings import (
    BEGAN,
    IDS,
    NO_CONTRIBUTIONS,
    PEERS,
    SPREAD,
    SPREAD_LIMIT,
    after_death,
    detail,
    found,
    history,
    mixed,
    mixed_report,
    skip_mixing,
    voted,
    with_incarnations,
)

Change = Callable[[Recording], Recording]


def says(names: str, since: int, until: int | None = None, **changes: Any) -> Change:
    """These peers' reports of rounds `since` to before `until`, or of that round alone, are other ones."""

    def change(play: Recording) -> Recording:
        for name in names.split():
            for each in history(play, name)[since : until or since + 1]:
                each.update(changes)
        return play

    return change


def but(**changes: Any) -> Change:
    """The recording is another."""
    return lambda play: replace(play, **changes)


def ended(*incarnations: Incarnation) -> Change:
    """These are anna's processes."""
    return lambda play: with_incarnations(play, "anna", *incarnations)


def logs(line: str) -> Change:
    """Cleo's log has one line more."""
    return lambda play: replace(play, logs={**play.logs, "cleo": f"{play.logs['cleo']}{line}\nand so on\n"})


def warns(event: str) -> Change:
    return logs(json.dumps({"event": event, "level": "warning"}))


def alone(play: Recording) -> Recording:
    """Bert mixes with no other any more."""
    skip_mixing(history(play, "bert")[20:])
    return play


def without_cleo(play: Recording) -> Recording:
    """The others go on without cleo once all is healed."""
    del history(play, "cleo")[20:]
    return says("anna bert", 20, 30, peers=(IDS["anna"], IDS["bert"]))(play)


def test_healthy_recordings_pass() -> None:
    verdict = judge(voted())
    assert replace(verdict, goodput=round(verdict.goodput, 9)) == Verdict(
        "made-up", 7, "pass", [], 30, 0, 1.0, 1.0, 1.0, {}, {}
    )
    verdict = judge(mixed())
    assert (verdict.verdict, verdict.violations) == ("pass", [])
    assert verdict.recovery_seconds == 1.0 and verdict.goodput == pytest.approx(1.0)
    assert verdict.measures["spread_at_the_end"] == {"median": SPREAD, "worst": SPREAD, "trials": 3}
    assert verdict.measures["half_exchanges"]["worst"] == 0
    assert found(after_death()) == []
    assert found(warns(KILLED_WORKER)(voted())) == [], "the harness kills workers"
    assert found(says("bert", 29, open_files=1_000)(voted())) == [], "of three reports, the median"
    forks = says(ALL, 11, 14, outcome="fork")(voted())
    assert found(replace(forks, limits=Limits(5.0, forks=True))) == []
    close = says(ALL, 25, 30, spread=SPREAD_LIMIT)(mixed())
    assert found(replace(close, task="gpt")) == [], "a spread that falls again"


# -- planted violations -----------------------------------------------------------------------------------------------

ALL, PAIR = " ".join(PEERS), (IDS["anna"], IDS["bert"])
KILLED_WORKER = "worker 31 ended (killed by signal 9; last output: none): another is started"
FAILED = {
    "event": "a handler failed",
    "level": "error",
    "exception": 'Traceback (most recent call last):\n  File "x"\nE: 1',
}
BLAMED = {IDS["cleo"]: "its state is not the one that the others hold"}
STATE: dict[str, Any] = {"outcome": "superseded", "blamed": BLAMED}
FORK: dict[str, Any] = {"outcome": "fork", "lineage": "B30", "params_hash": "b30", "peers": (IDS["bert"],)}
ONE, LOOSE = "butterfly", "gossip"
PLANTED: list[tuple[str, list[Change], str, str, str]] = [
    # Histories; which violations there are is the checkers' matter.
    (ONE, [says("bert", 8, params_hash="params 8'")], "same-bits", "bert", "those of anna"),
    (ONE, [says("cleo", 12, **STATE, **NO_CONTRIBUTIONS)], "same-bits", "cleo", "its state is not"),
    (ONE, [says("bert", 29, **FORK)], "one-branch", "bert", "not on the branch of anna"),
    (LOOSE, [says("cleo", 22, round=20)], "never-back", "cleo", "round 20 where 22 is due"),
    (ONE, [says(ALL, 4, peers=(*IDS.values(), "12D3KooW-eve"))], "stranger", "anna", "eve is none of the peers"),
    (ONE, [says("bert", 0, peer="12D3KooW-dave")], "stranger", "…W-dave", "dave is none of the peers"),
    (ONE, [says(ALL, 11, 14, outcome="fork")], "fork", "anna", "went on without most of its roster"),
    # Progress
    (ONE, [without_cleo], "progress", "", "no round with anna, bert, cleo in it; due within 5 s"),
    (ONE, [says("bert", 20, 30, weight=0.0)], "progress", "", "no round with anna, bert, cleo in it"),
    (ONE, [says(ALL, 20, 26, peers=PAIR)], "progress", "", "the first round after 7.0 s"),
    (LOOSE, [alone], "progress", "", "no mixing with anna, bert, cleo in it; due within 5 s"),
    (ONE, [but(should=())], "progress", "", "no round with no peer in it"),
    (ONE, [but(stuck=("trap send Chunk: not within 60 s",))], "stuck", "", "trap send Chunk: not within 60 s"),
    # The spread at the end
    (LOOSE, [says(ALL, 20, 30, spread=1.01 * APART * math.sqrt(2))], "spread", "", "apart at the end"),
    (LOOSE, [but(task="gpt")], "spread", "", "0.1000 apart at the end; at most 0.0200"),
    (LOOSE, [says(ALL, 0, 30, spread=None)], "spread", "", "nan apart at the end"),
    # Processes and logs
    (LOOSE, [but(left={"bert": ("python -m node.training.worker 7 8",)})], "orphan", "bert", "worker 7 8"),
    (ONE, [ended(Incarnation(BEGAN - 9, BEGAN + 31, -9, 0))], "exit-code", "anna", "1 ended with SIGKILL, not exit"),
    (ONE, [ended(Incarnation(BEGAN - 9, BEGAN + 28, 0, 0))], "exit-code", "anna", "ended 2.0 s before it was asked to"),
    (ONE, [ended()], "exit-code", "anna", "ended unseen after 0 incarnations"),
    (ONE, [says("bert", 20, 30, incarnation=1)], "exit-code", "bert", "ended unseen after 1 incarnations"),
    (ONE, [logs('Traceback (most recent call last):\n  File "x.py", line 3\nE: 17\nmore')], "log", "cleo", "E: 17"),
    (ONE, [logs(json.dumps(FAILED))], "log", "cleo", "a handler failed E: 1"),
    (ONE, [logs('{"event": "all is lost", "level": "critical"}')], "log", "cleo", "all is lost"),
    (ONE, [logs("Task exception was never retrieved")], "log", "cleo", "never retrieved"),
    (ONE, [logs("Task was destroyed but it is pending!")], "log", "cleo", "Task was destroyed"),
    (ONE, [logs("RuntimeWarning: coroutine 'f' was never awaited")], "log", "cleo", "was never awaited"),
    (ONE, [warns(KILLED_WORKER.replace("signal 9", "signal 11"))], "log", "cleo", "worker 31 ended"),
    (ONE, [warns("p2pd 32 ended (exit code 2; …)")], "log", "cleo", "p2pd 32 ended"),
    # Resources
    (ONE, [says("bert", 28, 30, open_files=46)], "level", "bert", "open_files 46"),
    (ONE, [says("bert", 28, 30, tasks=34)], "level", "bert", "tasks 34"),
    (ONE, [says("bert", 28, 30, rss_bytes=841_000_000)], "level", "bert", "rss_bytes 841,000,000"),
]  # fmt: skip


@pytest.mark.parametrize(
    "protocol, changes, invariant, name, words",
    PLANTED,
    ids=[f"{protocol}-{invariant}-{words}" for protocol, _, invariant, _, words in PLANTED],
)
def test_planted_violation_is_found_and_named(
    protocol: str, changes: list[Change], invariant: str, name: str, words: str
) -> None:
    play = voted() if protocol == ONE else mixed()
    for change in changes:
        play = change(play)
    assert (invariant, name) in found(play)
    text = detail(play)
    assert words in text and "12D3KooW-anna" not in text and len(text) < 900


# -- recovery ---------------------------------------------------------------------------------------------------------


def late_report(play: Recording) -> Recording:
    history(play, "cleo")[20]["time"] += 0.75
    return play


def alone_for_a_while(play: Recording) -> Recording:
    skip_mixing(history(play, "anna")[20:23])
    return play


@pytest.mark.parametrize(
    "healthy, change, seconds",
    [
        (voted, says(ALL, 20, 23, peers=PAIR), 4.0),
        (mixed, alone_for_a_while, 4.0),
        (voted, but(healed=BEGAN + 20.5), 1.5),
        (mixed, but(healed=BEGAN + 20.5), 1.5),
        (voted, late_report, 1.75),
    ],
    ids=["without-a-peer", "alone", "under-way-when-healed", "mixing-when-healed", "last-report"],
)
def test_recovery_takes_a_new_round_with_all(healthy: Callable[[], Recording], change: Change, seconds: float) -> None:
    assert judge(change(healthy())).recovery_seconds == seconds


def test_disjoint_pairs_do_not_count_as_mixed() -> None:
    pairs = {"a": "b", "b": "a", "c": "d", "d": "c"}
    reports = [{**mixed_report("anna", 1), "peer": peer, "peers": (other,)} for peer, other in pairs.items()]
    assert last_to_mix(reports, "abcd") is None and last_to_mix(reports[:2], "ab") is reports[1]
    bridge = {**reports[0], "peers": ("b", "c"), "time": BEGAN + 9}
    assert last_to_mix([*reports, bridge], "abcd") is bridge
    assert last_to_mix(reports[:1], "a") is None and last_to_mix([], "") is None


def test_long_rounds_extend_the_recovery_limit() -> None:
    aims = {"recovery_seconds": 30.0}
    assert Limits(aims=aims).beside((5.0, 10.0)) == Limits(aims=aims), "a minute is enough for rounds of one second"
    assert Limits(aims=aims).beside((5.0, 125.0)) == Limits(120.0, aims)
