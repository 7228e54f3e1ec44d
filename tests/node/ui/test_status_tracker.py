"""What a peer reports about itself, from its start to its end."""

from __future__ import annotations

import asyncio
import json
import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from node.membership.hello import VERSION, Hello
from node.membership.peer_record import PeerRecord
from node.outer.round_history import LocalHistory
from node.reporting.report import RoundReport
from node.reporting.status import Status, SyncStatus, parse, to_json
from node.storage.journal import Journal
from node.ui.status_tracker import OuterLoopSources, RunLabels, StatusTracker
from protocols.base import LocalProgress, Member
from protocols.consensus.record import Kind
from protocols.history.chain import Chain
from protocols.sync.progress import SyncProgressLine
from tests.support.fake_rounds import RUN, line
from tests.support.simulated import on_virtual_time

ME = Member("me")
ROSTER = (Member("anna"), Member("bert"), ME)
REPORT = RoundReport(
    "r", "me", 0, 0, "a", "b", "c", "committed", ("me",), {}, {}, True, 0.5, 100, 2.5, "h", 2.0, 0.1, 0.2, 5, 6, 0.0,
    held_out_loss=3.5,
)  # fmt: skip
LABELS = RunLabels("tiny", "ab" * 32, rounds=10)
WORK = LocalProgress(50, 1.5, 2.0, 0.1)


def shown(status_tracker: StatusTracker) -> Status:
    """Its status, which is strict JSON and comes back."""
    return parse(json.loads(to_json(status_tracker.status()), parse_constant=pytest.fail))


def contact(peer: str, nickname: str | None, live: bool = True, addresses: tuple[str, ...] = ()) -> PeerRecord:
    hello = None if nickname is None else Hello(VERSION, RUN, Member(peer), 1, nickname, addresses, 0, (), b"")
    return PeerRecord(peer, addresses, hello, live)


def in_a_run(
    tmp_path: Path, roster: tuple[Member, ...] = ROSTER, contacts: tuple[PeerRecord, ...] = ()
) -> StatusTracker:
    status_tracker = StatusTracker("nick", Member("me", 4))
    for stage in stages(tmp_path, roster, contacts):
        stage(status_tracker)
    return status_tracker


def stages(
    tmp_path: Path, roster: tuple[Member, ...] = ROSTER, contacts: tuple[PeerRecord, ...] = ()
) -> tuple[Callable[[StatusTracker], None], ...]:
    """What a peer reports to its status tracker, step by step."""
    chain = Chain(RUN, "run", roster, b"0" * 32)
    membership = SimpleNamespace(contacts=lambda: contacts, host_monitor=SimpleNamespace(clock="an hour off"))
    lag, journal = SimpleNamespace(peek=lambda: 0.004), Journal(tmp_path / "rounds.jsonl")
    return (
        lambda tracker: tracker.set_network(tuple, lag),  # type: ignore[arg-type]
        lambda tracker: tracker.enter_run(LABELS),
        lambda tracker: tracker.join_swarm(chain, membership),  # type: ignore[arg-type]
        lambda tracker: tracker.start_outer_loop(OuterLoopSources(journal)),
    )


def test_status_fills_in_as_parts_arrive(tmp_path: Path) -> None:
    """In any order."""
    contacts = (contact("anna", "Anna"),)
    whole, parts = StatusTracker("nick", Member("me", 4)), stages(tmp_path, contacts=contacts)
    first = shown(whole)
    assert (first.state, first.nickname, first.pid) == ("starting", "nick", os.getpid()) and first.rss_bytes > 0
    for number, stage in enumerate(parts):
        alone = StatusTracker("nick", Member("me", 4))
        stage(alone), stage(whole)
        for status_tracker in (alone, whole):
            assert (shown(status_tracker).peers == ()) == (number < 2 or (status_tracker is alone and number > 2))
    status = shown(whole)
    assert (status.run, status.run_id, status.rounds, status.incarnation) == ("tiny", "ab" * 32, 10, 4)
    assert status.lineage == Chain(RUN, "run", ROSTER, b"0" * 32).head.key.lineage.hex()
    assert status.loop_lag_p99_seconds == 0.004 and status.clock == "an hour off" and status.syncing is None
    progress, journal = SyncProgressLine(1, 10, 3, 2.5, 0, 4, None), Journal(tmp_path / "rounds.jsonl")
    whole.start_outer_loop(OuterLoopSources(journal, sync_progress=lambda: progress))
    assert shown(whole).syncing == SyncStatus(1, 10, 3, 2.5, 0, 4, None)


def test_status_lists_members_and_met_peers(tmp_path: Path) -> None:
    contacts = (
        contact("anna", "Anna", addresses=("/ip4/192.0.2.1/tcp/1", "/ip4/192.0.2.2/tcp/1")),
        contact("bert", None, live=False),
        contact("cleo", "Cleo", live=False),
        contact("ghost", None, live=False),
    )
    peers = {line.peer: line for line in shown(in_a_run(tmp_path, contacts=contacts)).peers}
    assert list(peers) == ["anna", "bert", "cleo"]  # the peer has only heard of the ghost
    assert peers["anna"].member and peers["anna"].live and peers["anna"].address == "/ip4/192.0.2.1/tcp/1"
    assert peers["bert"].member and not peers["bert"].live and peers["bert"].nickname == ""
    assert not peers["cleo"].member


def test_peers_without_votes_all_show_as_members(tmp_path: Path) -> None:
    status_tracker = in_a_run(tmp_path, contacts=(contact("anna", "Anna"), contact("cleo", "Cleo", live=False)))
    chain, membership = status_tracker._chain, status_tracker._membership
    assert chain and membership
    status_tracker.join_swarm(LocalHistory(Member("me", 4), chain.head.key), membership)
    assert [line.member for line in shown(status_tracker).peers] == [True, True]


def test_live_peers_of_other_stages_show_as_members(tmp_path: Path) -> None:
    """The roster is of the peer's own stage."""

    def at(stage: int, peer: str, live: bool = True) -> PeerRecord:
        met = contact(peer, peer.title(), live)
        assert met.hello
        return replace(met, hello=replace(met.hello, stage=stage))

    contacts = (at(1, "anna"), contact("bert", None, live=False), at(1, "cleo"), at(0, "dora"), at(2, "emil", False))
    status_tracker = in_a_run(tmp_path, contacts=contacts)
    status_tracker.enter_run(replace(LABELS, stage=1, stages=3))
    status = shown(status_tracker)
    assert (status.stage, status.stages) == (1, 3)
    assert [(each.peer, each.stage, each.member) for each in status.peers] == [
        ("anna", 1, True),
        ("bert", 0, True),  # a member whose stage this peer has not heard yet
        ("cleo", 1, False),
        ("dora", 0, True),
        ("emil", 2, False),
    ]
    status_tracker.enter_run(LABELS)
    assert not shown(status_tracker).peers[3].member, "in a run without stages only the roster counts"


def test_status_names_the_awaited_peers(tmp_path: Path) -> None:
    status_tracker = in_a_run(tmp_path, contacts=(contact("anna", "Anna"), contact("12D3KooWverylong", None)))
    journal = Journal(tmp_path / "rounds.jsonl")
    status_tracker.start_outer_loop(OuterLoopSources(journal, lambda: ("anna", "12D3KooWverylong")))
    for state in ("starting", "joining", "syncing", "waiting"):
        status_tracker.set_state(state)
        assert shown(status_tracker).waiting_for == ()
    for phase in ("training", "averaging"):
        status_tracker.on_progress(phase, WORK)
        assert shown(status_tracker).waiting_for == ("Anna", "…rylong")
    status_tracker.start_outer_loop(OuterLoopSources(journal, lambda: ("anna", "me")))
    assert shown(status_tracker).waiting_for == (), "the peer itself is still at work"


@on_virtual_time
async def test_round_counts_once_and_last_loss_stays(tmp_path: Path) -> None:
    status_tracker = in_a_run(tmp_path)
    assert status_tracker._sources
    status_tracker.on_progress("training", WORK)
    status = shown(status_tracker)
    assert (status.state, status.tokens, status.tokens_per_second, status.loss) == ("training", 50, 25.0, 1.5)
    status_tracker._sources.journal.write(REPORT)
    status_tracker.reported(REPORT)
    status = shown(status_tracker)
    assert (status.tokens, status.tokens_per_second, status.loss) == (100, 50.0, 2.5)
    assert (status.held_out_loss, status.bytes_sent, status.bytes_received) == (3.5, 5, 6)
    status_tracker.reported(replace(REPORT, outcome="undecided", held_out_loss=math.nan, loss=2.0))
    status = shown(status_tracker)
    assert (status.held_out_loss, status.loss) == (3.5, 2.0)


def test_status_explains_absence_from_the_roster(tmp_path: Path) -> None:
    status_tracker = in_a_run(tmp_path, roster=ROSTER[:2], contacts=(contact("anna", "Anna"),))
    status_tracker.on_progress("training", WORK)
    assert "admitted" in shown(status_tracker).reason
    alone = in_a_run(tmp_path, roster=ROSTER[:2], contacts=(contact("anna", "Anna", live=False),))
    alone.on_progress("training", WORK)
    assert shown(alone).reason == "waiting for a member of the last round (Anna, bert)"
    member = in_a_run(tmp_path)
    member.on_progress("training", WORK)
    assert shown(member).reason == ""


@pytest.mark.parametrize("end", ["leaving", "finished"])
def test_leaving_state_is_not_overwritten(tmp_path: Path, end: str) -> None:
    status_tracker = in_a_run(tmp_path)
    status_tracker.set_state(end, "why")
    status_tracker.on_progress("averaging", WORK)
    status_tracker.set_state("syncing", "catching up with the other peers")
    assert (status_tracker.state, status_tracker.reason) == (end, "why") and shown(status_tracker).waiting_for == ()
    status_tracker.set_state("finished", "the run is over")
    assert (status_tracker.state, status_tracker.reason) == ("finished", "the run is over")


@on_virtual_time
async def test_eta_is_estimated_from_the_last_rounds(tmp_path: Path) -> None:
    status_tracker = in_a_run(tmp_path)
    chain = status_tracker._chain
    assert isinstance(chain, Chain)
    for seconds in (1000.0, 100.0, 10.0, 10.0, 10.0, 10.0, 10.0):
        await asyncio.sleep(seconds)
        status_tracker.reported(REPORT)
        if asyncio.get_running_loop().time() == 1000.0:
            assert shown(status_tracker).eta_seconds is None, "one round is too few"
    assert shown(status_tracker).eta_seconds == pytest.approx(10.0 * 10)
    chain.switch(chain.head.key.lineage, line(chain.head, 4, kind=Kind.SKIP))
    assert shown(status_tracker).eta_seconds == pytest.approx(6 * 10.0) and shown(status_tracker).round == 4
    status_tracker.enter_run(replace(LABELS, rounds=2))
    assert shown(status_tracker).eta_seconds == 0.0
    status_tracker.enter_run(replace(LABELS, rounds=0))
    assert shown(status_tracker).eta_seconds is None
