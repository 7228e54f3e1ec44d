"""Rounds one after the other: when a peer catches up in between, and which report counts the cost of that."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from node.outer.outer_loop import PAUSE_SECONDS
from node.outer.replicated_loop import MAX_PASSES, ReplicatedOuterLoop
from node.reporting.report import RoundReport
from protocols.base import Member
from tests.sim import loop as simloop
from tests.support.status_examples import REPORT

ME = Member("anna")
TRIED = replace(
    REPORT, outcome="undecided", blamed={"bert": "lost as a donor", "q": "lies"}, bytes_sent=100, bytes_received=200,
    bytes_downloaded=300,
)  # fmt: skip


class Scripted:
    """An outer loop whose rounds and attempts to catch up return the reports of a script."""

    def __init__(self) -> None:
        self.script: list[tuple[str, RoundReport]] = []
        self.me = ME
        self.chain = SimpleNamespace(head=SimpleNamespace(roster=()), lacks_state=False)
        self.may_be_away = self.may_not_decide = False

    async def keep(self) -> None:
        """Nothing: it has no state."""

    async def catch_up(self, *_: Any) -> RoundReport:
        report = self._next("catch up")
        await asyncio.sleep(report.seconds_average)
        return report

    async def run_round(self, *_: Any) -> RoundReport:
        return self._next("round")

    def _next(self, what: str) -> RoundReport:
        expected, report = self.script.pop(0)
        assert what == expected
        return report


def play(*script: tuple[str, RoundReport], outer_loop: Any = None) -> list[RoundReport]:
    outer_loop = outer_loop or Scripted()
    outer_loop.script = list(script)
    sync: Any = SimpleNamespace(stranded=False)

    async def main() -> list[RoundReport]:
        reports = ReplicatedOuterLoop.rounds(outer_loop, sync, lambda: bool(outer_loop.script))
        return [report async for report in reports]

    return simloop.run(main(), limit_seconds=100 * PAUSE_SECONDS)


def test_failed_catch_up_is_merged_into_next_report() -> None:
    undecided = replace(REPORT, outcome="undecided")
    first, second, third = play(
        ("catch up", TRIED), ("round", undecided), ("catch up", TRIED), ("round", REPORT), ("round", REPORT)
    )
    for report, alone in ((first, undecided), (second, REPORT)):
        assert report.blamed == {"q": "lies", "bert": "lost as a donor"}, "the first reason stays"
        assert (report.bytes_sent, report.bytes_received, report.bytes_downloaded) == (105, 206, 300)
        costs = {name: getattr(report, name) for name in ("blamed", "bytes_sent", "bytes_received", "bytes_downloaded")}
        assert report == replace(alone, **costs), "and nothing else of it"
    assert third == REPORT, "the cost is reported once"


def test_voter_without_the_state_of_the_head_enters_no_round() -> None:
    """Its own state would become that of the head, and no other peer could follow."""
    caught_up, outer_loop = replace(TRIED, outcome="superseded"), Scripted()
    outer_loop.may_not_decide = True
    assert play(*[("catch up", TRIED)] * 3, ("catch up", caught_up), outer_loop=outer_loop) == [caught_up]


def test_successful_catch_up_has_its_own_report() -> None:
    caught_up = replace(TRIED, outcome="superseded")
    assert play(("catch up", caught_up), ("round", REPORT), ("round", REPORT)) == [caught_up, REPORT, REPORT]


def test_long_catch_up_is_followed_by_another() -> None:
    far = replace(TRIED, outcome="superseded", seconds_average=30.0, replayed_rounds=8)
    near = replace(far, seconds_average=2.0, replayed_rounds=2, bytes_downloaded=0)
    quick = replace(far, seconds_average=0.5)
    for last in (near, quick):
        assert play(("catch up", far), ("catch up", last), ("round", REPORT)) == [far, last, REPORT]
    first, then = play(("catch up", far), ("catch up", TRIED), ("round", REPORT))
    assert first == far and then.outcome == REPORT.outcome, "there was nothing more"


def test_endless_catch_up_ends_with_a_round() -> None:
    far = replace(TRIED, outcome="superseded", seconds_average=1.0, replayed_rounds=8)
    done = play(*[("catch up", far)] * MAX_PASSES, ("round", REPORT))
    assert done == [*[far] * MAX_PASSES, REPORT]
