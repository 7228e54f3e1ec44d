"""Reports of rounds of replicated state: what each says, and that together they count all work once."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from typing import Any

import pytest

from node.outer.state import OuterSGD
from node.reporting.report import RoundReport, Totals, TrainingDelta
from node.reporting.status import to_json
from protocols.base import AveragingResult, Contribution, LocalProgress, Member, Outcome, PeerFault, Vector
from protocols.consensus import record as records
from protocols.vectors.views import root
from tests.sim.host import EPOCH
from tests.support.scripted_peers import (
    ME,
    OTHER,
    RUN,
    Peer,
    Script,
    committed,
    lost,
    play,
    play_rounds,
    skipped,
    weighed,
)
from tests.support.simulated import on_virtual_time

GENESIS = records.genesis(RUN).hex()


@on_virtual_time
async def test_committed_round_is_reported_in_full() -> None:
    end = AveragingResult(
        Outcome.COMMITTED,
        contributions={"anna": Contribution(3, 4), "bert": Contribution(4, 4), "cleo": Contribution(0, 4)},
        weights={"anna": 350.0, "bert": 100.0},
        blamed=(PeerFault("cleo", "late"),),
        bytes_sent=11,
        bytes_received=22,
    )
    peer = Peer(Script(end=end, cut_seconds=2.2, mean_seconds=3.0))
    await asyncio.sleep(100)
    (report,) = await peer.rounds()
    assert replace(report, seconds_average=0.0, time=0.0) == RoundReport(
        run=RUN.hex(),
        peer="anna",
        incarnation=0,
        round=0,
        parent=GENESIS,
        lineage=records.lineage(peer.chain.records[-1]).hex(),
        anchor_lineage=GENESIS,
        outcome="committed",
        peers=("anna", "bert"),
        contributions={"anna": (GENESIS, 3, 4), "bert": (GENESIS, 4, 4), "cleo": (GENESIS, 0, 4)},
        blamed={"cleo": "late"},
        finite=True,
        weight=350.0,
        tokens=500,
        loss=2.5,
        params_hash=root([peer.outer_loop.anchor]).hex(),
        seconds_train=2.5,
        seconds_wait=0.0,
        seconds_average=0.0,
        bytes_sent=11,
        bytes_received=22,
        time=0.0,
    )
    assert report.seconds_average == pytest.approx(3.0, rel=1e-6)
    assert report.time == pytest.approx(EPOCH + 105.5, abs=1e-3)


def test_capped_weight_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "node.outer")
    one = AveragingResult(Outcome.COMMITTED, weights={"anna": 300.0, "bert": 100.0}, capped={"anna": 5000})
    play_rounds(committed(), Script(end=one), Script(end=one))
    assert [record.getMessage() for record in caplog.records] == [
        "the 5,000 tokens of this peer count as 300 in round 1, "
        "the most that this run lets one member count beside the others (max_weight)"
    ]


def test_undecided_round_is_reported_in_full() -> None:
    end = AveragingResult(Outcome.UNDECIDED, blamed=(PeerFault("bert", "lost"),), bytes_sent=5)
    _, (before, report) = play_rounds(committed(), lost(end=end))
    assert (report.outcome, report.round, report.weight, report.peers) == ("undecided", 1, 0.0, ())
    assert report.parent == report.lineage == report.anchor_lineage == before.lineage
    assert report.params_hash == before.params_hash
    assert (report.blamed, report.bytes_sent, report.finite) == ({"bert": "lost"}, 5, True)


def test_contributions_are_labelled_with_their_anchor() -> None:
    end = AveragingResult(Outcome.COMMITTED, contributions={"anna": Contribution(4, 4)})
    _, (first, second, third) = play_rounds(committed(), skipped(), Script(end=end))
    assert third.contributions == {"anna": (first.lineage, 4, 4)} and second.lineage != first.lineage


def test_unknown_weight_is_reported_as_null() -> None:
    """The members decided another plan than this peer received, so it knows the peers of the mean, not the weights."""
    means = [AveragingResult(Outcome.COMMITTED, contributions={name: Contribution(1, 4)}) for name in ("anna", "bert")]
    _, (counted, not_counted) = play_rounds(*(Script(end=mean) for mean in means))
    assert math.isnan(counted.weight) and '"weight":null' in to_json(counted)
    assert counted.peers == ("anna",) and not_counted.weight == 0.0


@pytest.mark.parametrize(
    "roster, outcome, expected",
    [
        pytest.param((ME,), Outcome.COMMITTED, "alone", id="single member"),
        pytest.param((ME, OTHER), Outcome.COMMITTED, "committed", id="two members"),
        pytest.param((Member("anna", 1),), Outcome.COMMITTED, "committed", id="another incarnation"),
        pytest.param((ME,), Outcome.UNDECIDED, "undecided", id="single member, undecided"),
    ],
)
def test_single_member_commit_is_reported_as_alone(roster: tuple[Member, ...], outcome: Outcome, expected: str) -> None:
    (report,) = play(Peer(Script(outcome=outcome), roster=roster).rounds())
    assert report.outcome == expected


@pytest.mark.parametrize("bad", [math.nan, math.inf, 3e38])
def test_non_finite_parameters_are_reported(bad: float) -> None:
    def spoil(mine: Vector, into: Vector) -> None:
        into.copy_(mine)[7] = bad

    reports = play(Peer(committed(), committed(average=spoil), outer=OuterSGD(1.5, 0.9)).rounds())
    assert [report.finite for report in reports] == [True, False]


def test_wait_time_excludes_training_time() -> None:
    peer = Peer(committed(cut_seconds=2.0))
    train = peer.trainer.train

    async def slow_to_start(*args: Any, **options: Any) -> LocalProgress:
        await asyncio.sleep(1.25)
        return await train(*args, **options)

    peer.trainer.train = slow_to_start  # type: ignore[method-assign]
    (report,) = play(peer.rounds())
    assert (report.seconds_train, report.seconds_wait) == pytest.approx((1.0, 1.25))


@pytest.mark.parametrize(
    "scripts",
    [
        pytest.param([committed(), committed()], id="committed"),
        pytest.param([lost(), lost(Outcome.SUPERSEDED), skipped(), committed(), committed()], id="undecided first"),
        pytest.param([weighed(0.0), lost(), weighed(800.0), committed()], id="late"),
        pytest.param([lost(), weighed(0.0), weighed(0.0), skipped(), committed()], id="late repeatedly"),
    ],
)
def test_reports_sum_to_the_work_trained(scripts: list[Script]) -> None:
    """Four steps of 100 tokens and half a second in each round, counted once, for any outcome."""
    peer, totals = Peer(*map(replace, scripts)), Totals()
    shown: list[tuple[int, float]] = []
    peer.outer_loop.on_progress = lambda phase, work: shown.append((work.tokens, work.seconds))
    reports = play(peer.rounds())
    for report in reports:
        totals.add(report)
        assert (report.tokens, report.seconds_train) == pytest.approx((400, 2.0))
    assert (totals.tokens, totals.seconds_train) == pytest.approx((400 * len(reports), 2.0 * len(reports)))
    assert max(shown) == pytest.approx((400, 2.0)), "a round under way shows no more either"


def test_work_of_dead_worker_is_counted_once() -> None:
    """The next worker begins with nothing, or with carried work; neither is subtracted or counted again."""
    trained = TrainingDelta()
    for tokens, seconds, carried in ((0, 0.0, 0), (300, 3.0, 0), (0, 0.0, 0), (40, 1.0, 0)):
        trained.hear(LocalProgress(tokens, 1.0, seconds, 1.0, carried=carried))
    assert trained.take() == (340, 4.0)
    for tokens, seconds, carried in ((40, 1.0, 0), (0, 0.0, 0), (40, 0.0, 40), (90, 1.5, 40)):
        trained.hear(LocalProgress(tokens, 1.0, seconds, 1.0, carried=carried))
    assert trained.take() == (50, 1.5)
