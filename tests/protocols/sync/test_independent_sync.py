"""Fetching the state of one donor: which donor serves, what the newcomer refuses, and donors that break off."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import pytest
import torch

from node.outer.independent_loop import DRIFT_FACTOR, IndependentOuterLoop
from node.outer.round_history import LocalHistory
from node.outer.sketch import Sketch, furthest, sketch
from node.outer.state import OuterSGD, OuterState
from node.reporting.report import RoundReport
from node.tasks.paced import Paced
from protocols.base import Host, Member, PeerId, RoundKey, Settings
from protocols.pairwise.gossip import Gossip
from protocols.pairwise.shared_state import SharedStateSession
from protocols.streams.endpoint import MAX_STREAMS
from protocols.sync.independent_sync import IndependentStateSync, eligible
from protocols.sync.requests import SYNC, SignedStateRef, StateAdvert
from protocols.sync.snapshot import Snapshot, SnapshotIndex, Snapshots
from protocols.sync.snapshot_download import StateUnavailable
from protocols.vectors.views import VectorView
from tests.sim.host import SimClock
from tests.sim.swarm import SimSwarm
from tests.support.inline_trainer import InlineTrainer
from tests.support.simulated import simulated

KEY = RoundKey(b"r" * 32, "run", bytes(32), 5)
ELEMENTS = 300_000


def state(value: float, round_number: int, elements: int = ELEMENTS) -> Snapshot:
    theta, velocity = torch.full((elements,), value), torch.full((elements,), value / 2)
    index = SnapshotIndex.of(theta, velocity)
    snapshot = Snapshot(index.state_root(round_number), round_number, index)
    snapshot.fill(theta, velocity)
    return snapshot


def value_of(snapshot: Snapshot) -> float:
    theta, velocity = torch.empty(snapshot.index.elements), torch.empty(snapshot.index.elements)
    snapshot.copy(theta, velocity)
    assert theta.unique().numel() == 1 and velocity[0] == theta[0] / 2
    return float(theta[0])


class Donors(SimSwarm):
    """Donors and a newcomer.

    Args:
        states: (value, round) of a donor's state; None: this peer is a newcomer as well.
    """

    def __init__(self, **states: tuple[float, int] | None) -> None:
        super().__init__()
        self.state_sync: dict[PeerId, IndependentStateSync] = {}
        self._states = {**states, "newcomer": None}

    @property
    def newcomer(self) -> IndependentStateSync:
        return self.state_sync["newcomer"]

    async def set_up(self) -> None:
        for name, described in self._states.items():
            self.state_sync[name] = self._sync(self.join(name, 1.25e6), state(*described) if described else None)

    def _sync(self, host: Host, snapshot: Snapshot | None) -> IndependentStateSync:
        snapshots = Snapshots()
        if snapshot:
            snapshots.put(snapshot)
        settings = Settings("fp32", (ELEMENTS,))
        return IndependentStateSync(
            host,
            settings,
            snapshots=snapshots,
            key=lambda: KEY,
            hints=lambda: self._states,
            has_state=lambda: snapshot is not None,
        )

    async def fetch(self, *order: PeerId, seconds: float = 60.0) -> Snapshot:
        """The state that the newcomer gets of these donors, or of those that it chooses."""
        until = asyncio.get_running_loop().time() + seconds
        return await self.newcomer.fetch(lambda donors: order or donors, until)

    def blamed(self) -> dict[PeerId, str]:
        """The peers that the newcomer blamed, and why."""
        return {blame.peer: blame.why for blame in self.newcomer.accounting.take()[0]}


@simulated(Donors, anna=(1.0, 2), bert=(2.0, 4), cora=(3.0, 4), dora=None)
async def test_newcomer_fetches_newest_state_or_that_of_named_donor(donors: Donors) -> None:
    snapshot = await donors.fetch()
    assert (value_of(snapshot), snapshot.round) == (2.0, 4)
    assert snapshot.lineage == snapshot.index.state_root(4)
    assert donors.newcomer.take_bytes() == 8 * ELEMENTS and donors.newcomer.take_bytes() == 0
    assert value_of(await donors.fetch("anna")) == 1.0, "a fetch may name its donor"


@simulated(Donors, anna=(1.0, 4), bert=(2.0, 4))
async def test_next_donor_replaces_a_dead_one(donors: Donors) -> None:
    asyncio.get_running_loop().call_later(1.0, donors.network.kill, "anna")
    assert value_of(await donors.fetch("anna", "bert")) == 2.0
    assert donors.blamed().keys() == {"anna"}


def spoilt_state(**changes: Any) -> Callable[[StateAdvert], StateAdvert]:
    """A change of the one state that an advert offers."""
    return lambda advert: replace(advert, states=(replace(advert.states[0], **changes),))


INVALID_ADVERTS: dict[str, Callable[[StateAdvert], StateAdvert]] = {
    "signature": spoilt_state(signature=b"!" * 32),
    "root": spoilt_state(root=bytes(32)),
    "round": spoilt_state(round=5),
    "name": lambda advert: replace(advert, sender=Member("zita")),
    "run": lambda advert: replace(advert, key=replace(KEY, run=b"x" * 32)),
}


@pytest.mark.parametrize("spoil", INVALID_ADVERTS.values(), ids=INVALID_ADVERTS)
@simulated(Donors, liar=(9.0, 4), zita=(1.0, 4))
async def test_donor_with_invalid_advert_is_blamed_and_skipped(
    donors: Donors, spoil: Callable[[StateAdvert], StateAdvert]
) -> None:
    liar = donors.state_sync["liar"]
    honest = liar._announcement
    liar._announcement = lambda: spoil(honest())  # type: ignore[method-assign]
    assert value_of(await donors.fetch()) == 1.0
    assert donors.blamed().keys() == {"liar"}


@simulated(Donors, anna=(1.0, 4), liar=(9.0, 4))
async def test_donor_with_mismatched_index_root_is_skipped(donors: Donors) -> None:
    good = state(9.0, 4)
    theta = torch.full((ELEMENTS,), 7.0)
    wrong = Snapshot(good.lineage, 4, SnapshotIndex.of(theta, theta))
    donors.state_sync["liar"]._context.snapshots.put(wrong)
    assert value_of(await donors.fetch("liar", "anna")) == 1.0
    assert "state root" in donors.blamed()["liar"]


@pytest.mark.parametrize("value", [math.nan, math.inf])
@simulated(lambda value: Donors(anna=(1.0, 4), liar=(value, 4)))
async def test_non_finite_state_is_not_adopted(donors: Donors) -> None:
    """The newcomer would keep it for good: no peer mixes with it, and its distance from others is no number."""
    assert value_of(await donors.fetch("liar", "anna")) == 1.0
    (blame,) = donors.newcomer.accounting.take()[0]
    assert blame.peer == "liar" and "not finite" in blame.why


@simulated(Donors, anna=(1.0, 4), bert=(2.0, 4))
async def test_donor_not_asked_in_time_is_not_blamed(donors: Donors) -> None:
    asyncio.get_running_loop().call_later(1.7, donors.network.kill, "anna")
    with pytest.raises(StateUnavailable, match="none of 1 donors"):
        await donors.fetch("anna", "bert", seconds=1.0)
    assert donors.blamed().keys() == {"anna"}


@simulated(Donors, anna=(0.0, 4))
async def test_user_is_told_after_five_failed_fetches(donors: Donors) -> None:
    anna, snapshot, messages = donors.state_sync["anna"], state(1.0, 4), list[str]()
    donors.newcomer.complain_to(messages.append)
    snapshots = anna._context.snapshots
    snapshots._held.clear()
    for failures in (4, 5):
        for _ in range(failures):
            assert messages == []
            with pytest.raises(StateUnavailable):
                await donors.fetch()
        snapshots.put(snapshot)
        await donors.fetch()
        snapshots.drop(snapshot)
        snapshots._leases.clear()
    assert messages == ["no peer here has a state: waiting for a peer that has one"]


@simulated(Donors, anna=(1.0, 4), hog=None)
async def test_one_caller_leaves_streams_for_others(donors: Donors) -> None:
    until = asyncio.get_running_loop().time() + 60.0
    async with AsyncExitStack() as held:
        for _ in range(MAX_STREAMS):
            await held.enter_async_context(donors.network.transports["hog"].open("anna", SYNC, until))
        assert value_of(await donors.fetch("anna", seconds=20.0)) == 1.0


@pytest.mark.parametrize(
    "rounds, taken",
    [([3], [3]), ([3, 9], [3]), ([3, 4, 1 << 39], [3, 4]), ([1, 2, 3, 4], [1, 2]), ([], [])],
)
def test_rounds_beyond_the_median_are_not_believed(rounds: list[int], taken: list[int]) -> None:
    adverts = {
        f"p{index}": StateAdvert(KEY, Member(f"p{index}"), (SignedStateRef(bytes(32), number, b""),), True)
        for index, number in enumerate(rounds)
    }
    adverts["newcomer"] = StateAdvert(KEY, Member("newcomer"), (), False)
    adverts["liar"] = StateAdvert(KEY, Member("liar"), (SignedStateRef(bytes(32), 0, b""),), False)
    assert sorted(each.round for each in eligible(adverts).values()) == taken


# -- with a replica ---------------------------------------------------------------------------------------------------


def test_furthest_peer_is_the_same_for_all() -> None:
    one, three = sketch(torch.ones(500), b"s"), sketch(3 * torch.ones(500), b"s")
    far = {"a": one, "b": one, "c": three}
    assert furthest(far)[0] == "c"
    assert furthest({"b": far["c"], "a": far["a"]}) == furthest({"a": far["a"], "b": far["c"]})
    assert furthest({"a": far["a"], "b": far["c"]})[0] == "b", "of two, the later"
    assert math.isnan(furthest({"a": sketch(torch.zeros(5), b"s")})[1])


class Alone(Gossip):
    """Peers exchange nothing: only fetching brings two together."""

    async def mix(self, session: SharedStateSession, state: VectorView) -> None:
        pass


def play(spread_limit: float, start: float, rounds: int) -> dict[PeerId, list[RoundReport]]:
    """Two peers that stand at 1, and one that starts at `start`; 0: it is a newcomer, with nothing."""
    reports: dict[PeerId, list[RoundReport]] = {"anna": [], "bert": [], "zoe": []}
    sketches: dict[PeerId, Sketch] = {}

    async def live(host: Host) -> None:
        name = host.me
        settings, snapshots = Settings("fp32", (1000,)), Snapshots(every_rounds=1)
        anchor = torch.full((1000,), 1.0 if name != "zoe" else start)
        trainer = InlineTrainer(Paced(1000, seed=1), 2, 1.0)
        await trainer.write(anchor)
        averager = Alone(host, settings)
        outer, newcomer = OuterSGD(1e-3, 0.0), name == "zoe" and not start
        course = LocalHistory(averager.me, replace(KEY, round=0), lacks_state=newcomer)

        def compare(mine: Sketch) -> dict[PeerId, Sketch]:
            sketches[name] = mine
            return {peer: each for peer, each in sketches.items() if peer != name}

        outer_loop = IndependentOuterLoop(
            course,
            averager,
            state=OuterState(anchor, outer, host.compute),
            trainer=trainer,
            wall=SimClock().wall,
            snapshots=snapshots,
            compare=compare,
            spread_limit=spread_limit,
        )
        state_sync = IndependentStateSync(
            host,
            settings,
            snapshots=snapshots,
            key=lambda: outer_loop.key,
            hints=lambda: reports,
            has_state=lambda: not outer_loop.seeks_state,
        )
        await outer_loop.settle()
        goes_on = lambda: len(reports[name]) < rounds  # noqa: E731
        async for report in outer_loop.rounds(state_sync, goes_on):
            reports[name].append(report)

    async def main() -> None:
        await asyncio.gather(*(live(host) for host in [swarm.join(name) for name in reports]))

    swarm = SimSwarm()
    swarm.play(main)
    return reports


def test_newcomer_trains_only_after_fetching_a_state() -> None:
    reports = play(math.inf, 0.0, 4)
    first, second = reports["zoe"][:2]
    assert (first.outcome, first.bytes_downloaded, first.tokens) == ("superseded", 8000, 0)
    assert (second.outcome, second.parent) == ("skipped", first.lineage)
    assert all(report.outcome == "skipped" for report in reports["anna"] + reports["bert"])
    assert reports["zoe"][-1].spread < 0.05


def test_outlying_peer_fetches_anothers_state() -> None:
    reports = play(0.3 / DRIFT_FACTOR, 3.0, 5)
    outcomes = [report.outcome for report in reports["zoe"]]
    assert outcomes.count("superseded") == 1 and reports["zoe"][-1].spread < 0.05
    assert all(report.outcome == "skipped" for report in reports["anna"] + reports["bert"]), "they are not the furthest"


def test_nearby_peer_is_left_to_mixing() -> None:
    reports = play(3.0 / DRIFT_FACTOR, 3.0, 4)
    assert {report.outcome for report in reports["zoe"]} == {"skipped"}
