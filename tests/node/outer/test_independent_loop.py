"""One round of a peer that shares no anchor, with a session that follows a script."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from typing import cast

import pytest
import torch

from node.outer import outer_loop as labour
from node.outer.noloco import NoLoCo
from node.outer.sketch import Sketch, sketch
from node.reporting.report import RoundReport
from protocols.base import Contribution, Deadline, PeerId, Vector
from protocols.streams.endpoint import RoundAccounting
from protocols.sync.independent_sync import IndependentStateSync, Order
from protocols.sync.snapshot import MemoryBuffer, Snapshot, SnapshotBuffer, SnapshotIndex, Snapshots, buffer_bytes
from tests.sim import loop as simloop
from tests.support.inline_trainer import ELEMENTS, STEP
from tests.support.scripted_peers import (
    FROM_BERT,
    KEY,
    ME,
    OUTER,
    STEPS,
    Exchange,
    IndependentPeer,
    half,
    holds,
    stepped,
)
from tests.support.simulated import on_virtual_time


def test_single_peer_steps_by_itself() -> None:
    peer = IndependentPeer(Exchange(), Exchange())
    first, second = peer.play(2)
    theta, velocity = stepped(2)
    assert holds(peer.outer_loop.anchor, theta) and holds(peer.outer_loop.state.velocity, velocity)
    assert [first.outcome, second.outcome] == ["skipped", "skipped"]
    assert holds(peer.learner.vector, theta), "the trainer goes on from the new state"
    assert (first.peers, first.spread, first.tokens) == ((), 0.0, 400)


def test_chain_links_own_states() -> None:
    peer = IndependentPeer(Exchange(), Exchange(average=half))
    first, second = peer.play(2)
    assert [first.round, second.round] == [0, 1]
    assert second.parent == first.lineage != first.parent
    assert second.lineage == peer.outer_loop.key.lineage.hex() == peer.outer_loop.state.root(2).hex()
    assert [seen.head.roster for seen in peer.seen] == [(ME,), (ME,)]


def test_state_after_own_step_is_averaged_and_replaced() -> None:
    peer = IndependentPeer(Exchange(average=half))
    (report,) = peer.play()
    theta, velocity = stepped(1)
    brought = peer.seen[0].brought
    assert holds(brought[0], theta) and holds(brought[1], velocity)
    assert holds(peer.outer_loop.anchor, theta / 2) and holds(peer.outer_loop.state.velocity, velocity / 2)
    assert holds(peer.learner.vector, theta / 2)
    assert (report.outcome, report.peers, report.messages) == ("committed", ("cora",), ("cora/1",))
    assert (report.half_exchanges, report.mass_drift, report.bytes_sent) == (2, 0.25, 7)


def test_exchange_during_training_keeps_the_work() -> None:
    def add(state: Sequence[Vector]) -> Mapping[PeerId, Contribution]:
        state[0].add_(1.0)
        state[1].add_(0.25)
        return FROM_BERT

    peer = IndependentPeer(Exchange(add))
    (report,) = peer.play()
    theta, velocity = torch.full((1,), 2.0), torch.full((1,), 0.25)
    OUTER.step(theta, velocity, torch.full((1,), STEPS * STEP))  # the same work, from the state as it is now
    assert holds(peer.outer_loop.anchor, float(theta)) and holds(peer.outer_loop.state.velocity, float(velocity))
    assert (report.outcome, report.peers, report.messages) == ("committed", ("bert",), ("bert/7",))


def test_both_kinds_of_exchange_are_reported() -> None:
    (report,) = IndependentPeer(Exchange(lambda state: FROM_BERT, half)).play()
    assert report.peers == ("cora", "bert") and report.messages == ("cora/1", "bert/7")
    assert {lineage for lineage, *_ in report.contributions.values()} == {""}, "what their states were is not known"


def test_peer_jumps_to_the_others_round() -> None:
    peer = IndependentPeer(Exchange(average=half, rounds=3), Exchange())
    first, second = peer.play(2)
    assert (first.round, first.group, second.round) == (3, "ggg", 4)
    assert second.parent == first.lineage


@pytest.mark.parametrize("step_size", [math.nan, math.inf, 3e38])
def test_diverged_work_is_left_out(step_size: float) -> None:
    peer = IndependentPeer(Exchange())
    peer.learner.step_size = step_size
    (report,) = peer.play()
    assert holds(peer.outer_loop.anchor, 1.0) and holds(peer.learner.vector, 1.0)
    assert report.finite and "not finite" in report.blamed["anna"]
    assert peer.seen[0].work.tokens == 0


@on_virtual_time
async def test_report_flags_non_finite_parameters() -> None:
    """No input should lead to such parameters; if one does, the report shows it."""
    peer = IndependentPeer(Exchange(average=half), Exchange())
    (report,) = await peer.rounds()
    assert report.finite
    peer.outer_loop.anchor[3] = math.nan
    peer.outer_loop._mixing._origin[3] = math.nan
    assert not (await peer.outer_loop.run_round()).finite


@pytest.mark.parametrize(
    "rule, alone",
    [
        pytest.param(None, stepped(1), id="sgd"),
        pytest.param(NoLoCo(0.5, 0.5, 0.5), (1.0 - STEPS * STEP / 2, STEPS * STEP / 2), id="noloco"),
    ],
)
def test_non_finite_mean_is_not_applied(rule: NoLoCo | None, alone: tuple[float, float]) -> None:
    """The state is as after the peer's step alone."""
    peer = IndependentPeer(Exchange(average=lambda mine, into: [each.fill_(math.inf) for each in into]), rule=rule)
    (report,) = peer.play()
    assert holds(peer.outer_loop.anchor, alone[0]) and holds(peer.outer_loop.state.velocity, alone[1])
    assert (report.outcome, report.messages) == ("skipped", ()) and "not finite" in report.blamed["anna"]
    assert report.half_exchanges == 2 + 1, "the others have moved"


def test_non_finite_step_reverts_exchange_during_training() -> None:
    def meanwhile(state: Sequence[Vector]) -> Mapping[PeerId, Contribution]:
        state[0].fill_(-3.4e38)  # finite, and too large for one more step
        state[1].fill_(3.4e38)
        return FROM_BERT

    peer = IndependentPeer(Exchange(meanwhile))
    (report,) = peer.play()
    assert holds(peer.outer_loop.anchor, 1.0)
    assert (report.outcome, report.messages) == ("skipped", ()) and "not finite" in report.blamed["anna"]
    assert report.half_exchanges == 2 + 1, "bert has moved"


def test_spread_is_computed_from_live_peers_sketches() -> None:
    seen = []

    def compare(mine: Sketch) -> Mapping[PeerId, Sketch]:
        seen.append(mine)
        return {"bert": tuple(3 * each for each in mine)}

    peer = IndependentPeer(Exchange(), compare=compare)
    (report,) = peer.play()
    assert seen == [sketch(peer.outer_loop.anchor, KEY.run)]
    assert report.spread == pytest.approx(0.5)


@on_virtual_time
async def test_leaver_hands_in_partial_work() -> None:
    peer = IndependentPeer(Exchange(average=half))
    asyncio.get_running_loop().call_later(0.7, peer.outer_loop.leave)
    (report,) = await peer.rounds()
    assert peer.seen[0].work.leaving and report.tokens == 200


def test_snapshots_follow_own_round_numbers() -> None:
    snapshots = Snapshots(every_rounds=2)
    peer = IndependentPeer(Exchange(), Exchange(), snapshots=snapshots)
    _, second = peer.play(2)
    newest = snapshots.held()[0]
    assert (newest.round, newest.lineage.hex()) == (2, second.lineage)
    assert newest.index.state_root(2) == newest.lineage


def test_skipped_snapshot_round_is_made_up() -> None:
    snapshots = Snapshots(every_rounds=5)
    peer = IndependentPeer(
        Exchange(average=half, rounds=2), Exchange(average=half, rounds=3), Exchange(), Exchange(), snapshots=snapshots
    )
    peer.play(4)
    assert [each.round for each in snapshots.held()] == [7, 0]


@on_virtual_time
async def test_peer_starts_from_a_kept_state() -> None:
    snapshots = Snapshots(every_rounds=1)
    (report,) = await IndependentPeer(Exchange(average=half), snapshots=snapshots).rounds()
    peer = IndependentPeer(Exchange())
    await peer.outer_loop.start_from(snapshots.held()[0])
    (again,) = await peer.rounds()
    assert (again.parent, again.round) == (report.lineage, 1)
    theta, _ = stepped(1)
    assert not holds(peer.outer_loop.anchor, theta)


# -- how long a round may take ----------------------------------------------------------------------------------------


def test_round_cut_by_others_does_not_set_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a peer that joins at the end of a round is cut in all its own rounds, with no time left to mix."""
    monkeypatch.setattr(labour, "ROUND_LIMIT_FLOOR_SECONDS", 0.0)
    peer = IndependentPeer(Exchange(average=half, hurried=True), Exchange(average=half), Exchange(average=half))
    peer.play(3)
    first, second, third = (seen.limit_seconds for seen in peer.seen)
    assert pytest.approx(first) == second == labour.FIRST_ROUND_LIMIT_SECONDS
    assert third == pytest.approx(labour.ROUND_LIMIT_MULTIPLE * STEPS * 0.5, rel=0.01)


def test_own_time_limit_doubles_after_a_cut() -> None:
    """The peer's machine has become slow: with the same limit it would never mix again."""
    peer = IndependentPeer(*(Exchange() for _ in range(4)))
    peer.outer_loop._limit_seconds = 1.5
    peer.play(4)
    assert [seen.limit_seconds for seen in peer.seen] == pytest.approx([1.5, 3.0, 6.0, 6.0])


# -- another's state --------------------------------------------------------------------------------------------------


class Torn(MemoryBuffer):
    """A buffer on a disk that fails after the parameters."""

    def read(self, offset: int, into: memoryview) -> None:
        if offset:
            raise OSError(5, "Input/output error")
        super().read(offset, into)


class OneDonor:
    """The part of `IndependentStateSync` that an outer loop uses."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.accounting, self._snapshot = RoundAccounting(), snapshot

    async def fetch(self, order: Order, deadline: Deadline) -> Snapshot:
        return self._snapshot

    def take_bytes(self) -> tuple[int, int]:
        return 0, 0


def another(round_number: int, buffer_type: type[MemoryBuffer] = MemoryBuffer) -> Snapshot:
    """The state of a donor whose parameters are all nine."""
    theta, velocity = torch.full((ELEMENTS,), 9.0), torch.full((ELEMENTS,), 1.0)
    index = SnapshotIndex.of(theta, velocity)
    held: SnapshotBuffer = buffer_type(buffer_bytes(ELEMENTS))
    snapshot = Snapshot(index.state_root(round_number), round_number, index, held)
    snapshot.fill(theta, velocity)
    return snapshot


def fetched(peer: IndependentPeer, rounds: int, snapshot: Snapshot) -> RoundReport:
    """The report of fetching this snapshot after `rounds` rounds of the peer's own."""

    async def main() -> RoundReport:
        await peer.rounds(rounds)
        until = asyncio.get_running_loop().time() + 10.0
        return await peer.outer_loop.catch_up(cast(IndependentStateSync, OneDonor(snapshot)), until)

    return simloop.run(main())


def test_truncated_state_download_changes_nothing() -> None:
    peer = IndependentPeer(Exchange())
    report = fetched(peer, 1, another(7, Torn))
    theta, velocity = stepped(1)
    assert report.outcome == "undecided" and peer.outer_loop.key.round == 1
    assert holds(peer.outer_loop.anchor, theta) and holds(peer.outer_loop.state.velocity, velocity)
    assert holds(peer.learner.vector, theta)


def test_adopting_anothers_state_drops_own_snapshots() -> None:
    """So that a restarted peer does not go back to its former state."""
    snapshots = Snapshots(every_rounds=1, keep=3)
    peer, donors = IndependentPeer(Exchange(), Exchange(), snapshots=snapshots), another(1)
    report = fetched(peer, 2, donors)
    assert report.outcome == "superseded" and holds(peer.outer_loop.anchor, 9.0) and peer.outer_loop.key.round == 2
    assert [each.lineage for each in snapshots.held()] == [peer.outer_loop.key.lineage, donors.lineage]
