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
from typing import Any

import pytest

from node._version import VERSION
from node.direct.routes import Route, RouteKind
from node.membership import hello
from node.membership.hello import Hello
from node.membership.peer_record import PeerRecord
from node.outer.round_history import LocalHistory
from node.reporting.report import RoundReport
from node.reporting.status import OTHERS_REDUCE, Status, not_direct, parse, to_json
from node.session.stage_mover import MoveRefused
from node.session.status_tracker import StatusTracker
from node.storage.journal import Journal
from protocols.base import LinkFault, LocalProgress, Member, SyncStatus
from protocols.consensus.record import Kind
from protocols.history.chain import Chain
from tests.support.fake_rounds import RUN, line
from tests.support.session_cluster import status_tracker
from tests.support.simulated import on_virtual_time

ME = Member("me")
ROSTER = (Member("anna"), Member("bert"), ME)
REPORT = RoundReport(
    "r", "me", 0, 0, "a", "b", "c", "committed", ("me",), {}, {}, True, 0.5, 100, 2.5, "h", 2.0, 0.1, 0.2, 5, 6, 0.0,
    held_out_loss=3.5,
)  # fmt: skip
WORK = LocalProgress(50, 1.5, 2.0, 0.1)


def shown(tracker: StatusTracker) -> Status:
    """Its status, which is strict JSON and comes back."""
    return parse(json.loads(to_json(tracker.status()), parse_constant=pytest.fail))


def contact(peer: str, nickname: str | None, live: bool = True, addresses: tuple[str, ...] = ()) -> PeerRecord:
    said = None if nickname is None else Hello(hello.VERSION, RUN, Member(peer), 1, nickname, addresses, 0, (), b"")
    return PeerRecord(peer, addresses, said, live)


def manifest(rounds: int = 10, stages: int = 1) -> Any:
    recipe = SimpleNamespace(rounds=rounds)
    config = SimpleNamespace(
        name="tiny", consent_task="", admission=None, clusters=None, voters=None, protocol="butterfly", recipe=recipe,
        stages=stages,
    )  # fmt: skip
    return SimpleNamespace(run_id="ab" * 32, config=config)


def in_a_run(
    tmp_path: Path, roster: tuple[Member, ...] = ROSTER, contacts: tuple[PeerRecord, ...] = (), **changes: Any
) -> StatusTracker:
    tracker = status_tracker(Member("me", 4))
    tracker.enter_run(manifest())
    tracker.enter_session(**session(tmp_path, roster, contacts) | changes)
    return tracker


def session(
    tmp_path: Path, roster: tuple[Member, ...] = ROSTER, contacts: tuple[PeerRecord, ...] = ()
) -> dict[str, Any]:
    return {
        "history": Chain(RUN, "run", roster, b"0" * 32),
        "membership": SimpleNamespace(contacts=lambda: contacts, host_monitor=SimpleNamespace(clock="an hour off")),
        "loop": SimpleNamespace(waiting_for=tuple, awaits_members=False),
        "sync": SimpleNamespace(sync_progress=SimpleNamespace(progress=lambda: None), joiners=2),
        "worker": SimpleNamespace(
            pid=None, restarts=0, device="cpu", resting_reason="no script is attached, so it rests"
        ),
        "pipeline": None,
        "checkpoints": SimpleNamespace(age_seconds=lambda wall: 7.0, problem="disk full"),
        "journal": Journal(tmp_path / "rounds.jsonl"),
    }


def test_status_fills_in_as_parts_arrive(tmp_path: Path) -> None:
    """In any order."""
    parts: tuple[Callable[[StatusTracker], None], ...] = (
        lambda tracker: setattr(tracker, "lag", SimpleNamespace(peek=lambda: 0.004)),
        lambda tracker: tracker.enter_run(manifest()),
        lambda tracker: tracker.enter_session(**session(tmp_path, contacts=(contact("anna", "Anna"),))),
    )
    whole = status_tracker(Member("me", 4))
    first = shown(whole)
    assert (first.state, first.nickname, first.pid) == ("starting", "me", os.getpid()) and first.rss_bytes > 0
    for number, part in enumerate(parts):
        alone = status_tracker(Member("me", 4))
        part(alone), part(whole)
        assert [shown(each).peers == () for each in (alone, whole)] == [number < 2] * 2
    status = shown(whole)
    assert (status.run, status.run_id, status.rounds, status.incarnation) == ("tiny", "ab" * 32, 10, 4)
    assert status.lineage == Chain(RUN, "run", ROSTER, b"0" * 32).head.key.lineage.hex()
    assert status.loop_lag_p99_seconds == 0.004 and status.clock == "an hour off" and status.syncing is None
    assert (status.joiners, status.checkpoint_age_seconds, status.checkpoint_problem) == (2, 7.0, "disk full")
    assert (status.version, status.device) == (VERSION, "cpu")
    progress = SyncStatus(1, 10, 3, 2.5, 0, 4, None)
    sync = SimpleNamespace(sync_progress=SimpleNamespace(progress=lambda: progress), joiners=0)
    assert shown(in_a_run(tmp_path, sync=sync)).syncing == SyncStatus(1, 10, 3, 2.5, 0, 4, None)


def test_move_is_refused_without_stages_or_a_session() -> None:
    tracker = status_tracker(Member("me", 4))
    with pytest.raises(MoveRefused, match="this peer is starting: ask again when it trains"):
        tracker.move(1)
    tracker.enter_run(SimpleNamespace(**vars(manifest()), stages=None))  # type: ignore[arg-type]
    with pytest.raises(MoveRefused, match="this run has no stages"):
        tracker.move(1)


def test_moving_peer_is_shown_as_moving(tmp_path: Path) -> None:
    """Until it leaves the run, whatever its rounds do meanwhile; afterwards what became of it stays."""
    tracker = in_a_run(tmp_path)
    mover: Any = SimpleNamespace(target=2, phase="its state is fetched", problem="")
    tracker.mover = mover
    assert (shown(tracker).state, shown(tracker).move) == ("moving", "moving to stage 2")
    tracker.set_state("moving", "finishing the round")
    tracker.set_state("averaging")
    assert tracker.state == "moving"
    tracker.set_state("leaving")
    tracker.set_state("moving")
    assert tracker.state == "leaving"
    tracker.begin_again(Member("me", 5))
    mover.target, mover.problem = None, "not moved to stage 2: why"
    assert (shown(tracker).state, shown(tracker).incarnation) == ("joining", 5)
    assert shown(tracker).move == "not moved to stage 2: why"


def test_status_lists_members_and_met_peers(tmp_path: Path) -> None:
    contacts = (
        contact("anna", "Anna", addresses=("/ip4/192.0.2.1/tcp/1", "/ip4/192.0.2.2/tcp/1")),
        contact("bert", None, live=False),
        contact("cleo", "Cleo", live=False),
        contact("ghost", None, live=False),
        unwatched := contact("dora", "Dora", live=False),
    )
    unwatched.unwatched = True  # nor is she lost
    peers = {line.peer: line for line in shown(in_a_run(tmp_path, contacts=contacts)).peers}
    assert list(peers) == ["anna", "bert", "cleo"]  # the peer has only heard of the ghost
    assert peers["anna"].member and peers["anna"].live and peers["anna"].address == "/ip4/192.0.2.1/tcp/1"
    assert peers["bert"].member and not peers["bert"].live and peers["bert"].nickname == ""
    assert not peers["cleo"].member


def test_ways_of_data_name_pairs_that_exchange_none(tmp_path: Path) -> None:
    contacts = (contact("anna", "Anna"), contact("bert", "Bert"))
    faults = (LinkFault("anna", "bert", 9), LinkFault("anna", "me", 9), LinkFault("bert", "me", 0))
    head = replace(Chain(RUN, "run", ROSTER, b"0" * 32).head, complaints=faults)
    tracker = in_a_run(tmp_path, contacts=contacts, history=SimpleNamespace(head=head, trained=0))
    why = "it is reached through a relay"
    routes = {peer: Route(RouteKind.LIBP2P, why) for peer in ("anna", "bert")}
    tracker.transport = SimpleNamespace(routes=routes, addresses=(), hidden_addresses=(), daemon_pid=None)  # type: ignore[assignment]
    status = shown(tracker)
    assert [each.route for each in status.peers] == [OTHERS_REDUCE, "libp2p"], "a fault that is over is tried again"
    assert not_direct(status.peers) == f"Anna by way of other members (and 1 more): {why}"
    assert not_direct(status.peers[1:]) == f"Bert over libp2p: {why}"


def test_peers_without_votes_all_show_as_members(tmp_path: Path) -> None:
    contacts = (contact("anna", "Anna"), contact("cleo", "Cleo", live=False))
    history = LocalHistory(Member("me", 4), Chain(RUN, "run", ROSTER, b"0" * 32).head.key)
    assert [line.member for line in shown(in_a_run(tmp_path, contacts=contacts, history=history)).peers] == [True, True]


def test_live_peers_of_other_stages_show_as_members(tmp_path: Path) -> None:
    """The roster is of the peer's own stage."""

    def at(stage: int, peer: str, live: bool = True) -> PeerRecord:
        met = contact(peer, peer.title(), live)
        assert met.hello
        return replace(met, hello=replace(met.hello, stage=stage))

    contacts = (at(1, "anna"), contact("bert", None, live=False), at(1, "cleo"), at(0, "dora"), at(2, "emil", False))
    tracker = in_a_run(tmp_path, contacts=contacts)
    tracker.enter_run(manifest(stages=3))
    tracker.stage = 1
    status = shown(tracker)
    assert (status.stage, status.stages) == (1, 3)
    assert [(each.peer, each.stage, each.member) for each in status.peers] == [
        ("anna", 1, True),
        ("bert", 0, True),  # a member whose stage this peer has not heard yet
        ("cleo", 1, False),
        ("dora", 0, True),
        ("emil", 2, False),
    ]
    tracker.stage = None
    assert not shown(tracker).peers[3].member, "in a run without stages only the roster counts"


def test_status_names_the_awaited_peers(tmp_path: Path) -> None:
    contacts = (contact("anna", "Anna"), contact("12D3KooWverylong", None))
    loop = SimpleNamespace(waiting_for=lambda: ("anna", "12D3KooWverylong"), is_overlapped=False, awaits_members=False)
    tracker = in_a_run(tmp_path, contacts=contacts, loop=loop)
    for state in ("starting", "joining", "syncing", "waiting"):
        tracker.set_state(state)
        assert shown(tracker).waiting_for == ()
    for phase in ("training", "averaging"):
        tracker.on_progress(phase, WORK)
        assert shown(tracker).waiting_for == ("Anna", "…rylong")
    loop.waiting_for = lambda: ("anna", "me")
    assert shown(tracker).waiting_for == (), "the peer itself is still at work"
    tracker.set_state("training")
    loop.awaits_members = True
    assert (shown(tracker).state, shown(tracker).reason) == ("waiting", "for the other peers to be admitted")
    loop.awaits_members, loop.is_overlapped = False, True
    tracker.set_state("averaging")
    assert (shown(tracker).state, shown(tracker).reason) == ("averaging", "training continues meanwhile")


@on_virtual_time
async def test_round_counts_once_and_last_loss_stays(tmp_path: Path) -> None:
    tracker = in_a_run(tmp_path)
    tracker.on_progress("training", WORK)
    status = shown(tracker)
    assert (status.state, status.tokens, status.tokens_per_second, status.loss) == ("training", 50, 25.0, 1.5)
    tracker._journal.write(REPORT)
    tracker.reported(REPORT)
    status = shown(tracker)
    assert (status.tokens, status.tokens_per_second, status.loss) == (100, 50.0, 2.5)
    assert (status.held_out_loss, status.bytes_sent, status.bytes_received) == (3.5, 5, 6)
    tracker.reported(replace(REPORT, outcome="undecided", held_out_loss=math.nan, loss=2.0))
    status = shown(tracker)
    assert (status.held_out_loss, status.loss) == (3.5, 2.0)


def test_status_explains_absence_from_the_roster(tmp_path: Path) -> None:
    tracker = in_a_run(tmp_path, roster=ROSTER[:2], contacts=(contact("anna", "Anna"),))
    tracker.on_progress("training", WORK)
    assert "admitted" in shown(tracker).reason
    tracker.lead = lambda: "anna"
    tracker.on_progress("training", WORK)
    assert shown(tracker).reason == "without a vote: contributes through Anna"
    alone = in_a_run(tmp_path, roster=ROSTER[:2], contacts=(contact("anna", "Anna", live=False),))
    alone.on_progress("training", WORK)
    assert shown(alone).reason == "waiting for a member of the last round (Anna, bert)"
    member = in_a_run(tmp_path)
    member.on_progress("training", WORK)
    assert shown(member).reason == ""


def test_peer_without_a_script_says_that_it_rests(tmp_path: Path) -> None:
    tracker = in_a_run(tmp_path)
    tracker.on_progress("training", replace(WORK, resting=True))
    assert (shown(tracker).state, shown(tracker).reason) == ("waiting", "no script is attached, so it rests")
    tracker.on_progress("training", WORK)
    assert (shown(tracker).state, shown(tracker).reason) == ("training", "")


@pytest.mark.parametrize("end", ["leaving", "finished"])
def test_leaving_state_is_not_overwritten(tmp_path: Path, end: str) -> None:
    tracker = in_a_run(tmp_path)
    tracker.set_state(end, "why")
    tracker.on_progress("averaging", WORK)
    tracker.set_state("syncing", "catching up with the other peers")
    assert (tracker.state, tracker.reason) == (end, "why") and shown(tracker).waiting_for == ()
    tracker.set_state("finished", "the run is over")
    assert (tracker.state, tracker.reason) == ("finished", "the run is over")


@on_virtual_time
async def test_eta_is_estimated_from_the_last_rounds(tmp_path: Path) -> None:
    tracker = in_a_run(tmp_path)
    chain = tracker._history
    assert isinstance(chain, Chain)
    for seconds in (1000.0, 100.0, 10.0, 10.0, 10.0, 10.0, 10.0):
        await asyncio.sleep(seconds)
        tracker.reported(REPORT)
        if asyncio.get_running_loop().time() == 1000.0:
            assert shown(tracker).eta_seconds is None, "one round is too few"
    assert shown(tracker).eta_seconds == pytest.approx(10.0 * 10)
    chain.switch(chain.head.key.lineage, line(chain.head, 4, kind=Kind.SKIP))
    assert shown(tracker).eta_seconds == pytest.approx(6 * 10.0) and shown(tracker).round == 4
    tracker.enter_run(manifest(rounds=2))
    assert shown(tracker).eta_seconds == 0.0


@pytest.mark.parametrize(
    ("members", "clusters", "voters", "why"),
    [
        (31, None, None, "admitted at the end of a round"),
        (32, None, None, "the roster is full (32): its work does not count"),
        (32, True, None, "asks the voters for a place"),
        (8, True, 8, "asks the voters for a place"),
        (7, True, 8, "admitted at the end of a round"),
    ],
)
@on_virtual_time
async def test_peer_outside_a_full_roster_says_whether_its_work_counts(
    members: int, clusters: bool | None, voters: int | None, why: str
) -> None:
    tracker, run = status_tracker(ME), manifest()
    run.config.clusters, run.config.voters = clusters, voters
    tracker.enter_run(run)
    assert why in tracker._why_outside(members)
