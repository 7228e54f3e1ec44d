"""How a peer's session in a run ends, whenever it is asked to, and what it reports meanwhile. On virtual time."""

from __future__ import annotations

import asyncio
import gc
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from node.outer.activity import Activity
from node.reporting.event_feed import EventFeed
from node.reporting.report import RoundReport
from node.session.discovery import SCOPE
from node.session.peer_session import (
    FINISH_SECONDS,
    LAST_TEXT_SECONDS,
    LINGER_SECONDS,
    MAX_LAST_ROUNDS,
    OBSERVER_SECONDS,
    PeerSession,
    SessionOutcome,
)
from node.session.round_evaluator import RoundEvaluator
from node.storage.journal import Journal
from node.training.process import WorkerError
from protocols.allreduce.parts import ReducedPart
from protocols.base import LocalProgress, Member
from protocols.pipeline.held_out import LEAST_SAMPLES, HeldOutLoss
from tests.sim import loop as simloop
from tests.sim.host import DirectoryFaults, SimClock
from tests.support.history import History
from tests.support.long import long
from tests.support.session_cluster import Directory, SessionCluster, SessionPeer, View, status_tracker
from tests.support.simulated import on_virtual_time
from tests.support.waiting import now, until

alone = pytest.mark.parametrize("founders", ["a"])


# -- the end of the run, and of a share of it --------------------------------------------------------------------------


@on_virtual_time
async def test_session_ends_with_the_run(cluster: SessionCluster) -> None:
    peers = cluster.all()
    await cluster.end()
    for peer in peers:
        assert peer.outcomes == ["committed"] * 4
        assert [line["round"] for line in peer.lines()] == [0, 1, 2, 3]
        assert all(line["held_out_loss"] is not None and line["threads"] == 3 for line in peer.lines())
        assert (peer.status_tracker.state, peer.status_tracker.reason) == ("finished", "the run is over")
        assert (peer.state.path / "sample.txt").read_bytes() == b"def something"
        assert not (peer.state.path / "peers.json").exists()
    assert len({peer.chain.head.key.lineage for peer in peers}) == 1
    assert max(peer.ended or math.inf for peer in peers) < 60.0


@pytest.mark.long
@on_virtual_time
async def test_rounds_leave_no_reference_cycles(cluster: SessionCluster) -> None:
    """Reduced parts above all: until the collector runs, a hundred rounds would hold a hundred times the state."""
    peers, parts = cluster.all(run_rounds=16), []
    peers[-1].view.on_report = lambda _: parts.append(sum(type(each) is ReducedPart for each in gc.get_objects()))
    gc.disable()
    try:
        await cluster.end()
    finally:
        gc.enable()
    a_round = len(peers) ** 2
    assert 0 < max(parts[8:]) <= max(parts[:8]) + a_round  # some peers report before others


@on_virtual_time
async def test_member_that_rests_by_itself_is_not_waited_for(cluster: SessionCluster) -> None:
    """As one whose script is away."""
    a, b, c = cluster.all()

    async def rest(key: object, cut: asyncio.Event, progress: Callable[[LocalProgress], None], surplus: bool) -> object:
        progress(LocalProgress(0, math.nan, 0.0, 0.0, resting=True))
        await cut.wait()
        return LocalProgress(0, math.nan, 0.0, 0.0)

    c.trainer.train = rest  # type: ignore[assignment]
    await cluster.end()
    for report in (*a.view.reports, *b.view.reports):
        assert report.peers == ("a", "b") and report.seconds_train + report.seconds_wait < 2.3, (
            "2.4 s with c as a straggler"
        )


@alone
@on_virtual_time
async def test_finished_run_is_left_at_once(cluster: SessionCluster) -> None:
    (peer,) = cluster.all("a", run_rounds=0)
    await cluster.end()
    assert peer.outcomes == [] and (peer.ended or math.inf) < 1.0


@alone
@on_virtual_time
async def test_founder_and_later_joiners_end_together(cluster: SessionCluster) -> None:
    first = cluster.add("a", run_rounds=8)
    await until(lambda: len(first.view.reports) == 2)
    others = cluster.all("bc", run_rounds=8)
    await cluster.end()
    assert {peer.chain.head.key.lineage for peer in others} == {first.chain.head.key.lineage}
    for peer in others:
        reports = peer.view.reports
        assert reports[0].outcome == "superseded" and not math.isnan(reports[0].held_out_loss)
        assert reports[-1].outcome == "committed" and "a" in reports[-1].peers


@on_virtual_time
async def test_stops_after_max_rounds(cluster: SessionCluster) -> None:
    a, b = cluster.all("ab", run_rounds=6)
    c = cluster.add("c", run_rounds=6, rounds=2)
    await cluster.end("c")
    assert c.outcomes == ["committed"] * 2 and all("c" in report.peers for report in c.view.reports)
    assert c.status_tracker.state == "finished" and set(c.state.peers()) == {"a", "b"}
    for peer in (a, b):
        assert {each.peer: each.said.leaving for each in peer.members.contacts()}["c"], "it said goodbye"
    await cluster.end()
    for peer in (a, b):
        assert peer.outcomes == ["committed"] * 6, "a peer that leaves in good order costs the others no round"
        assert {member.peer for member in peer.chain.head.roster} == {"a", "b"}


@alone
@on_virtual_time
async def test_rounds_of_a_pipeline_do_not_wait_for_evaluations(cluster: SessionCluster) -> None:
    """But the peer waits for that of the last one. A newer one ends an older one, whose loss counts if it is enough.

    Each round lasts for two seconds. Rounds 0, 1 and 2 find enough, too little and nothing until the next has ended.
    """
    said, every_seconds = list[str](), iter([0.24, 0.3, math.inf, 3.0])

    async def evaluate(found: HeldOutLoss) -> None:
        said.append("evaluates")
        every = next(every_seconds)
        for index in range(LEAST_SAMPLES + 1):
            await asyncio.sleep(every)
            found.add(index, float(found.trained))
        raise TimeoutError("a stage is away")

    def begin(report: RoundReport) -> None:
        evaluator.start(report, HeldOutLoss(report.round))

    evaluator = RoundEvaluator(evaluate)
    pipeline: Any = SimpleNamespace(
        announce_decided=lambda: said.append("announced"),
        annotate=lambda report: report,
        begin_evaluation=begin,
        evaluator=evaluator,
        is_run_over=lambda: True,
        waiting_reason=str,
    )
    peer = cluster.add("a", run_rounds=4)
    peer.session._pipeline, evaluator.on_end = pipeline, peer.session._evaluated_beside
    await cluster.end()
    times = [report.time for report in peer.view.reports]
    assert max(later - earlier for earlier, later in pairwise(times)) < 2.1
    assert said == ["announced", "evaluates"] * 4, "the evaluation waits for outer steps after that announcement"
    lines = peer.lines()
    assert [each.get("round", "-") for each in lines] == [0, 1, "-", 2, 3, "-"]
    losses = [(each["evaluated"], each["held_out_loss"], each["samples"]) for each in lines if "evaluated" in each]
    assert losses == [(0, 0.0, 8), (3, 3.0, 9)] and not peer.session.outcome.failure("")
    (*_, last), read = peer.view.reports, Journal(peer.state.rounds).recent()
    assert lines[-1]["lineage"] == last.lineage
    assert [each.held_out_loss for each in read] == pytest.approx([0.0, math.nan, math.nan, 3.0], nan_ok=True)
    assert History(peer.state.rounds).reports()[0]["held_out_loss"] == 0.0


# -- being asked to leave ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after_seconds", [1.0, 2.05, 2.3, *long(1.7, 2.2, 3.0, 4.0)])
@on_virtual_time
async def test_leave_at_any_moment_ends_with_a_decision(cluster: SessionCluster, after_seconds: float) -> None:
    """If it is too late to leave in this round, that is the decision of the next one, which may hold no work yet."""
    a, b, c = cluster.all(run_rounds=6)
    await asyncio.sleep(after_seconds)
    began = now()
    c.session.leave()
    c.session.leave()
    await cluster.end("c")
    assert now() - began <= FINISH_SECONDS and c.view.said == []
    assert c.outcomes and set(c.outcomes[:-1]) <= {"committed"} and c.outcomes[-1] in ("committed", "skipped")
    assert c.status_tracker.state == "finished"
    await cluster.end()
    for peer in (a, b):
        assert len(peer.outcomes) == 6 and peer.outcomes.count("committed") >= 5
        assert len(peer.chain.head.roster) == 2


@on_virtual_time
async def test_leave_between_rounds_starts_few_more_rounds(cluster: SessionCluster) -> None:
    a, b, c = cluster.all(run_rounds=6)
    c.view.on_report = lambda report: c.session.leave()
    await cluster.end("c")
    assert len(c.view.reports) <= 1 + MAX_LAST_ROUNDS and (c.ended or math.inf) <= 3.0 + FINISH_SECONDS
    await cluster.end()
    assert a.outcomes == b.outcomes and a.outcomes.count("committed") >= 5 and len(a.outcomes) == 6


@pytest.mark.parametrize("founders", ["ab"])
@pytest.mark.parametrize("step_seconds", [0.002, 0.02, 0.2])
@on_virtual_time
async def test_leaver_without_work_is_out_of_the_roster_however_short_rounds_are(
    cluster: SessionCluster, step_seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a script's peer whose script was killed. Where no fork is allowed, the other could decide nothing any more."""
    a, b = (cluster.add(name, 600, step_seconds=step_seconds) for name in "ab")
    await until(lambda: len(b.outcomes) >= 3)
    rest = b.trainer.rest
    monkeypatch.setattr(b.trainer, "rest", lambda resting: rest(True))
    rest(True)
    await until(lambda: any(report.weight == 0 for report in b.view.reports))
    b.session.leave()
    await cluster.end("b")
    await until(lambda: a.chain.head.roster == (a.outer_loop.me,), 1.0)


@alone
@pytest.mark.parametrize(
    ("wait", "after_seconds", "state", "reason", "outcomes"),
    [(1, 0.5, "training", "", ["alone"]), (5, 30.0, "waiting", "5 peers", [])],
    ids=["training", "waiting for peers"],
)
@on_virtual_time
async def test_leave_alone_ends_within_a_round(
    cluster: SessionCluster, wait: int, after_seconds: float, state: str, reason: str, outcomes: list[str]
) -> None:
    peer = cluster.add("a", run_rounds=6, wait=wait)
    await asyncio.sleep(after_seconds)
    assert peer.status_tracker.state == state and reason in peer.status_tracker.reason
    peer.session.leave()
    await cluster.end()
    assert now() - after_seconds <= 1.0 and (peer.outcomes, peer.status_tracker.state) == (outcomes, "finished")


@on_virtual_time
async def test_waiting_ends_when_enough_peers_join(cluster: SessionCluster) -> None:
    first = cluster.add("a", wait=3, run_rounds=3)
    await asyncio.sleep(20.0)
    assert first.outcomes == []
    cluster.all("bc", wait=3, run_rounds=3)
    await cluster.end()
    assert first.outcomes == ["committed"] * 3


@alone
@on_virtual_time
async def test_leave_during_catch_up_is_immediate(cluster: SessionCluster) -> None:
    """It is an observer, and the peers that it asks for the state do not answer any more."""
    first = cluster.add("a", run_rounds=50)
    await until(lambda: len(first.view.reports) == 3)
    newcomer = cluster.add("d", run_rounds=50)
    await until(lambda: newcomer.status_tracker.state == "syncing")
    cluster.cut("d", cluster.peers)
    await asyncio.sleep(5.0)
    began = now()
    newcomer.session.leave()
    await cluster.end("d")
    assert now() - began <= OBSERVER_SECONDS + 0.1
    first.session.leave()
    await cluster.end("a")


@on_virtual_time
async def test_disconnected_leaver_abandons_its_round(cluster: SessionCluster) -> None:
    a, b, c = cluster.all(run_rounds=50)
    await asyncio.sleep(3.0)
    cluster.cut("c", cluster.peers)
    await asyncio.sleep(0.1)
    began = now()
    c.session.leave()
    await cluster.end("c")
    assert now() - began == pytest.approx(FINISH_SECONDS, abs=0.2)
    assert c.view.said == ["the round did not end in time: leaving without it"]
    rounds = len(a.view.reports)
    await asyncio.sleep(60.0)
    assert len(a.view.reports) > rounds + 5 and len(a.chain.head.roster) == 2
    for peer in (a, b):
        peer.session.leave()
    await cluster.end()


@on_virtual_time
async def test_all_peers_leave_together_in_time(cluster: SessionCluster) -> None:
    peers = cluster.all(run_rounds=50)
    await asyncio.sleep(3.0)
    for peer in peers:
        peer.session.leave()
    await cluster.end(seconds=FINISH_SECONDS + 0.5)
    assert all(set(peer.outcomes) <= {"committed", "skipped"} and not peer.view.said for peer in peers)
    hashes = {(each.lineage, each.params_hash) for peer in peers for each in peer.view.reports}
    assert len(hashes) == len({lineage for lineage, _ in hashes})  # some take part in one round more than others


@on_virtual_time
async def test_killed_peer_does_not_delay_the_end(cluster: SessionCluster) -> None:
    a, b, _ = cluster.all(run_rounds=5)
    await asyncio.sleep(3.0)
    cluster.network.kill("c")
    await cluster.end("ab")
    assert a.chain.head.key == b.chain.head.key and len(a.chain.head.roster) == 2


# -- after the last round ----------------------------------------------------------------------------------------------


@on_virtual_time
async def test_others_wait_for_peer_missing_last_round(cluster: SessionCluster) -> None:
    """It is live and can still fetch what was decided. The others do not wait for a peer that stays silent."""
    a, b, c = cluster.all(run_rounds=3)
    await until(lambda: len(c.view.reports) == 2)
    cluster.cut("c", cluster.peers)
    await until(lambda: len(a.view.reports) == 3)
    cluster.heal("c", cluster.peers)
    await cluster.end()
    assert {peer.chain.head.key.lineage for peer in (b, c)} == {a.chain.head.key.lineage}
    assert c.outcomes[-1] == "superseded" and not math.isnan(c.view.reports[-1].held_out_loss)


def contact(name: str, round_number: int, **changes: Any) -> SimpleNamespace:
    values = {"peer": name, "live": True, "leaving": False, "stage": 0} | changes
    said = SimpleNamespace(round=round_number, leaving=values.pop("leaving"))
    return SimpleNamespace(here=values["live"], said=said, **values)


async def lingered(
    contacts: Sequence[Any], later: Callable[[PeerSession], object] | None = None, stage: int = 0
) -> float:
    roster = tuple(Member(name) for name in "abc")
    chain = SimpleNamespace(
        head=SimpleNamespace(key=SimpleNamespace(round=5), roster=roster[1:]), members=lambda limit: roster, trained=5
    )
    membership: Any = SimpleNamespace(contacts=lambda: contacts, goodbye=lambda: None, stage_of=lambda peer: stage)
    loop: Any = SimpleNamespace(chain=chain, leave=lambda: None, me=Member("me"))
    unused: Any = None
    session = PeerSession(
        loop,
        unused,
        trainer=unused,
        membership=membership,
        state=unused,
        disk=unused,
        status_tracker=status_tracker(Member("me")),
        view=EventFeed(View(), now),
        on_report=unused,
        run_rounds=5,
    )
    if later:
        asyncio.get_running_loop().call_later(3.0, later, session)
    began = now()
    await session._linger()
    return now() - began


@pytest.mark.parametrize(
    ("contacts", "seconds"),
    [
        ([], 0.0),
        ([contact("a", 5), contact("b", 6)], 0.0),
        ([contact("a", 4)], LINGER_SECONDS),
        ([contact("x", 3)], LINGER_SECONDS),  # an observer that was in no roster yet
        ([contact("a", 4, live=False), contact("b", 4, leaving=True)], 0.0),
    ],
    ids=["none", "caught up", "lagging", "lagging observer", "dead or leaving"],
)
def test_lingering_waits_for_lagging_peers_up_to_limit(contacts: Any, seconds: float) -> None:
    assert simloop.run(lingered(contacts)) == pytest.approx(seconds, abs=0.2)


def test_lingering_ends_on_catch_up_or_leave() -> None:
    slow = contact("a", 4)
    assert simloop.run(lingered([slow], lambda session: setattr(slow.said, "round", 5))) == pytest.approx(3.0, abs=0.2)
    assert simloop.run(lingered([contact("a", 4)], PeerSession.leave)) == pytest.approx(3.0, abs=0.2)


def test_later_stages_stay_for_the_text_of_stage_0_which_waits_for_none_of_them() -> None:
    first, later = contact("a", 6), contact("b", 4, stage=1)
    assert simloop.run(lingered([first], stage=1)) == pytest.approx(LAST_TEXT_SECONDS, abs=0.2)
    left = lingered([first], lambda session: setattr(first, "here", False), stage=1)
    assert simloop.run(left) == pytest.approx(3.0, abs=0.2)
    assert simloop.run(lingered([later])) == pytest.approx(0.0, abs=0.2)


@pytest.mark.parametrize(("founders", "last_rounds"), [("abc", MAX_LAST_ROUNDS), ("a", 0), ("bc", 0)])
@on_virtual_time
async def test_farewell_rounds_are_few_and_only_for_members(cluster: SessionCluster, last_rounds: int) -> None:
    session = SessionPeer(cluster, "a", 0.1, run_rounds=9).session
    assert all(session._should_continue() for _ in range(5))
    session.leave()
    session._outer_loop.has_announced_leaving = True
    assert [session._should_continue() for _ in range(5)] == [True] * last_rounds + [False] * (5 - last_rounds)


# -- reports and records -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [WorkerError("the worker died"), TimeoutError()], ids=["died", "no answer"])
@on_virtual_time
async def test_failed_evaluation_costs_no_report(cluster: SessionCluster, error: Exception) -> None:
    peers = cluster.all(run_rounds=3)
    peers[0].trainer.broken = error
    await cluster.end()
    for peer in peers:
        assert peer.outcomes == ["committed"] * 3 and len(peer.lines()) == 3
    assert [line["held_out_loss"] for line in peers[0].lines()] == [None] * 3
    assert not (peers[0].state.path / "sample.txt").exists()
    why = str(error) or "TimeoutError"
    assert [each.session.outcome.failure("") for each in peers] == [f"none of 3 evaluations worked ({why})", "", ""]


@pytest.mark.parametrize(
    ("rounds", "changes", "pauses", "failure"),
    [
        (3, {"weight": 0.0}, False, "none of 3 rounds counted what this peer trained (the worker hangs)"),
        (3, {"outcome": "superseded", "peers": ()}, False, "none of 3 rounds counted what this peer trained (the"),
        (3, {"outcome": "superseded", "peers": (), "tokens": 0}, False, ""),
        (1, {"weight": 0.0}, False, ""),
        (3, {"weight": 0.0}, True, ""),
        (3, {"weight": math.nan}, False, ""),
    ],
    ids=["no weight", "always too late", "a joiner catches up", "a single round", "paused", "weight not known"],
)
@alone
@on_virtual_time
async def test_session_whose_work_never_counts_fails(
    cluster: SessionCluster, rounds: int, changes: dict[str, Any], pauses: bool, failure: str
) -> None:
    peer = cluster.add("a", run_rounds=1)
    await cluster.end()
    (report,) = peer.view.reports
    assert peer.session.outcome.failure("the worker hangs") == ""
    peer.session.outcome, peer.session._is_member = SessionOutcome(), True
    peer.outer_loop.activity.set(Activity.REST if pauses else Activity.WORK)
    for _ in range(rounds):
        await peer.session._report(replace(report, params_hash="the same", **changes))
    found = peer.session.outcome.failure("the worker hangs")
    assert found.startswith(failure) if failure else not found


@pytest.mark.parametrize(("rounds", "fails"), [(9, False), (10, True)])
def test_newcomer_may_train_uncounted_until_it_is_admitted(rounds: int, fails: bool) -> None:
    outcome = SessionOutcome()
    for _ in range(rounds):
        outcome.round(100, False, is_member=False)
    assert bool(outcome.failure("")) is fails


@alone
@on_virtual_time
async def test_loss_is_reported_only_when_state_changed(cluster: SessionCluster) -> None:
    peer = cluster.add("a", run_rounds=3)
    await cluster.end()
    (first, *_), evaluated = peer.view.reports, peer.trainer.evaluated
    assert evaluated == 3
    hashes = [peer.view.reports[-1].params_hash, "moved", "moved", "again"]
    for params_hash in hashes:
        for outcome in ("undecided", "superseded", "fork"):
            await peer.session._report(replace(first, params_hash=params_hash, outcome=outcome, held_out_loss=math.nan))
    evaluations = [not math.isnan(report.held_out_loss) for report in peer.view.reports[3:]]
    assert evaluations == [False] * 3 + [True] + [False] * 5 + [True] + [False] * 2
    assert peer.trainer.evaluated == evaluated + 2
    for wanted, more in ((Activity.REST, 2), (Activity.WORK, 3)):
        peer.outer_loop.activity.set(wanted)
        await peer.session._report(replace(first, params_hash="while it rests", held_out_loss=math.nan))
        assert peer.trainer.evaluated == evaluated + more


INVALID = (
    b"", b"\xff", b"nonsense", b"7", b"{}", b'{"a": 1}', b"null", b"[" * 4000, b'["' + b"x" * 4000 + b'"]',
    b'[1, null, ["x"], "\\ud800", "/ip4/\\u001b[2J"]',
)  # fmt: skip


@on_virtual_time
async def test_invalid_directory_records_are_ignored(cluster: SessionCluster) -> None:
    ghosts = {f"ghost{number}": value for number, value in enumerate(INVALID)}
    others = {"b": b"nonsense", "": b"{}", **{"x" * (1000 + number): value for number, value in enumerate(INVALID)}}
    for name, value in (ghosts | others).items():
        await Directory(cluster.entries, name, SimClock(), DirectoryFaults()).announce(SCOPE, value, 1e6, 1e6)
    peers = cluster.all(run_rounds=3)
    await until(lambda: ghosts.keys() <= {each.peer for each in peers[0].members.contacts()})
    await cluster.end()
    assert all(peer.outcomes == ["committed"] * 3 for peer in peers)
    for each in peers[0].members.contacts():
        assert len(each.peer) < 1000 and not set(each.addresses) - {"/ip4/10.0.0.1/tcp/1"}


@on_virtual_time
async def test_met_peers_are_remembered_with_addresses(cluster: SessionCluster) -> None:
    peers = cluster.all(run_rounds=50)
    await until(lambda: len(peers[0].view.reports) == 12)
    assert peers[0].state.peers() == {name: ("/ip4/10.0.0.1/tcp/1",) for name in "bc"}
    for peer in peers:
        peer.session.leave()
    await cluster.end()
    assert set(peers[0].state.peers()) <= {"b", "c"}, "they can be asked when this peer comes back"
