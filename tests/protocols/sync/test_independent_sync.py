"""Fetching the state of one donor: whose is taken, what is refused, and what becomes of a donor that breaks off."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace

import pytest
import torch

from node.outer.independent_loop import ASTRAY_FACTOR, IndependentOptions, IndependentOuterLoop
from node.outer.outer_loop import OuterLoopDeps
from node.outer.round_history import LocalHistory
from node.outer.round_loops import run_independent_rounds
from node.outer.sgd import OuterSGD
from node.outer.sketch import Sketch, furthest, sketch
from node.reporting.report import RoundReport
from node.tasks.paced import Paced
from node.training.trainer import InlineTrainer
from protocols.base import AveragingResult, LocalProgress, Member, Outcome, PeerId, RoundKey, Settings, Vector
from protocols.stream_limiter import MAX_STREAMS
from protocols.sync.independent_sync import IndependentStateSync, eligible
from protocols.sync.requests import SYNC, SignedStateRef, StateAdvert
from protocols.sync.snapshot import Snapshot, SnapshotIndex, Snapshots
from protocols.sync.snapshot_download import StateUnavailable
from tests.sim import loop as simloop
from tests.sim.host import SimClock, sim_host
from tests.sim.network import SimNetwork
from tests.sim.pairs import Pairs, PairSession
from tests.sim.trace import Trace

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


@dataclass
class DonorCluster:
    """Donors, and a newcomer."""

    network: SimNetwork
    state_sync: dict[PeerId, IndependentStateSync]

    @property
    def newcomer(self) -> IndependentStateSync:
        return self.state_sync["newcomer"]

    async def fetch(self, seconds: float = 60.0, *order: PeerId) -> Snapshot:
        until = asyncio.get_running_loop().time() + seconds
        return await self.newcomer.fetch(lambda donors: order or donors, until)


def play(body: Callable[[DonorCluster], Awaitable[None]], **donors: Snapshot | None) -> None:
    """Args: a donor's snapshot; None: it is a newcomer as well."""

    async def main() -> None:
        network = SimNetwork(Trace())
        names = [*donors, "newcomer"]
        transports = {name: network.join(name, 1.25e6) for name in names}
        town = DonorCluster(network, {})
        for name in names:
            snapshots, mine = Snapshots(), donors.get(name)
            if mine:
                snapshots.put(mine)
            host = sim_host(network, transports[name], 1, {})
            settings = Settings("fp32", (ELEMENTS,))
            whole = bool(mine)
            town.state_sync[name] = IndependentStateSync(
                host, settings, snapshots, lambda: KEY, lambda: names, lambda whole=whole: whole
            )
        await body(town)
        assert network.bugs == []

    simloop.run(main())


def test_newcomer_fetches_state_signed_by_one_donor() -> None:
    async def body(town: DonorCluster) -> None:
        snapshot = await town.fetch()
        assert (value_of(snapshot), snapshot.round) == (2.0, 4)
        assert snapshot.lineage == snapshot.index.state_root(4)
        assert town.newcomer.take_bytes() == (8 * ELEMENTS, 0) and town.newcomer.take_bytes() == (0, 0)

    play(body, anna=state(1.0, 2), bert=state(2.0, 4), cora=state(3.0, 4), dora=None)


def test_fetch_may_name_the_donor() -> None:
    async def body(town: DonorCluster) -> None:
        assert value_of(await town.fetch(60.0, "anna")) == 1.0

    play(body, anna=state(1.0, 4), bert=state(2.0, 4))


def test_next_donor_replaces_a_dead_one() -> None:
    async def body(town: DonorCluster) -> None:
        asyncio.get_running_loop().call_later(1.0, town.network.kill, "anna")
        assert value_of(await town.fetch(60.0, "anna", "bert")) == 2.0
        named, _, _ = town.newcomer.accounting.take()
        assert {blame.peer for blame in named} == {"anna"}

    play(body, anna=state(1.0, 4), bert=state(2.0, 4))


def test_no_donor_with_state_is_state_unavailable() -> None:
    async def body(town: DonorCluster) -> None:
        with pytest.raises(StateUnavailable):
            await town.fetch()
        assert asyncio.get_running_loop().time() < 10.0

    play(body, anna=None, bert=None)


@pytest.mark.parametrize("lie", ["signature", "root", "round", "name", "run"])
def test_donor_with_invalid_advert_is_blamed_and_skipped(lie: str) -> None:
    async def body(town: DonorCluster) -> None:
        liar = town.state_sync["liar"]
        honest = liar._announcement

        def lying() -> StateAdvert:
            standing = honest()
            (vouched,) = standing.states
            match lie:
                case "signature":
                    return replace(standing, states=(replace(vouched, signature=b"!" * 32),))
                case "root":
                    return replace(standing, states=(replace(vouched, root=bytes(32)),))
                case "round":
                    return replace(standing, states=(replace(vouched, round=5),))
                case "name":
                    return replace(standing, sender=Member("zita"))
            return replace(standing, key=replace(KEY, run=b"x" * 32))

        liar._announcement = lying  # type: ignore[method-assign]
        assert value_of(await town.fetch()) == 1.0
        named, _, _ = town.newcomer.accounting.take()
        assert {blame.peer for blame in named} == {"liar"}

    play(body, liar=state(9.0, 4), zita=state(1.0, 4))


def test_donor_with_mismatched_index_root_is_skipped() -> None:
    async def body(town: DonorCluster) -> None:
        good = state(9.0, 4)
        theta = torch.full((ELEMENTS,), 7.0)
        wrong = Snapshot(good.lineage, 4, SnapshotIndex.of(theta, theta))
        town.state_sync["liar"]._context.snapshots.put(wrong)
        assert value_of(await town.fetch(60.0, "liar", "anna")) == 1.0
        named, _, _ = town.newcomer.accounting.take()
        assert any(blame.peer == "liar" and "state root" in blame.why for blame in named)

    play(body, anna=state(1.0, 4), liar=state(9.0, 4))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_non_finite_state_is_not_adopted(value: float) -> None:
    """It would be the newcomer's for good: nobody mixes with it, and its distance from others is no number."""

    async def body(town: DonorCluster) -> None:
        assert value_of(await town.fetch(60.0, "liar", "anna")) == 1.0
        named, _, _ = town.newcomer.accounting.take()
        assert [blame.peer for blame in named] == ["liar"] and "not finite" in named[0].why

    play(body, anna=state(1.0, 4), liar=state(value, 4))


def test_donor_not_asked_in_time_is_not_blamed() -> None:
    async def body(town: DonorCluster) -> None:
        asyncio.get_running_loop().call_later(1.7, town.network.kill, "anna")
        with pytest.raises(StateUnavailable, match="none of 1 donors"):
            await town.fetch(1.0, "anna", "bert")
        named, _, _ = town.newcomer.accounting.take()
        assert {blame.peer for blame in named} == {"anna"}

    play(body, anna=state(1.0, 4), bert=state(2.0, 4))


def test_user_is_told_after_five_failed_fetches() -> None:
    async def body(town: DonorCluster) -> None:
        said: list[str] = []
        town.newcomer.complain_to(said.append)
        snapshots, mine = town.state_sync["anna"]._context.snapshots, state(1.0, 4)
        for rounds in (4, 5):
            for _ in range(rounds):
                assert said == []
                with pytest.raises(StateUnavailable):
                    await town.fetch()
            snapshots.put(mine)
            await town.fetch()
            snapshots.drop(mine)
            town.state_sync["anna"]._donor._loans.clear()
        assert said == ["no peer here has a state: waiting for a peer that has one"]

    def away(town: DonorCluster) -> Awaitable[None]:
        town.state_sync["anna"]._context.snapshots._held.clear()
        return body(town)

    play(away, anna=state(0.0, 4))


def test_one_caller_leaves_streams_for_others() -> None:
    async def body(town: DonorCluster) -> None:
        until = asyncio.get_running_loop().time() + 60.0
        async with AsyncExitStack() as held:
            for _ in range(MAX_STREAMS):
                await held.enter_async_context(town.network.transports["hog"].open("anna", SYNC, until))
            assert value_of(await town.fetch(20.0, "anna")) == 1.0

    play(body, anna=state(1.0, 4), hog=None)


@pytest.mark.parametrize(
    "rounds, taken",
    [([3], [3]), ([3, 9], [3]), ([3, 4, 1 << 39], [3, 4]), ([1, 2, 3, 4], [1, 2]), ([], [])],
)
def test_rounds_beyond_the_median_are_not_believed(rounds: list[int], taken: list[int]) -> None:
    told = {
        f"p{index}": StateAdvert(KEY, Member(f"p{index}"), (SignedStateRef(bytes(32), number, b""),), True)
        for index, number in enumerate(rounds)
    }
    told["newcomer"] = StateAdvert(KEY, Member("newcomer"), (), False)
    told["liar"] = StateAdvert(KEY, Member("liar"), (SignedStateRef(bytes(32), 0, b""),), False)
    assert sorted(each.round for each in eligible(told).values()) == taken


# -- with a replica ---------------------------------------------------------------------------------------------------


def test_furthest_peer_is_the_same_for_all() -> None:
    one, three = sketch(torch.ones(500), b"s"), sketch(3 * torch.ones(500), b"s")
    far = {"a": one, "b": one, "c": three}
    assert furthest(far)[0] == "c"
    assert furthest({"b": far["c"], "a": far["a"]}) == furthest({"a": far["a"], "b": far["c"]})
    assert furthest({"a": far["a"], "b": far["c"]})[0] == "b", "of two, the later"
    assert math.isnan(furthest({"a": sketch(torch.zeros(5), b"s")})[1])


def lives(spread_limit: float, start: float, rounds: int) -> dict[PeerId, list[RoundReport]]:
    """Two peers that stand at 1, and one that starts at `start`; 0: it is a newcomer, with nothing."""
    told: dict[PeerId, list[RoundReport]] = {"anna": [], "bert": [], "zoe": []}
    sketches: dict[PeerId, Sketch] = {}

    async def live(network: SimNetwork, name: PeerId) -> None:
        host = sim_host(network, network.transports[name], 1, {})
        settings, snapshots = Settings("fp32", (1000,)), Snapshots(every_rounds=1)
        anchor = torch.full((1000,), 1.0 if name != "zoe" else start)
        trainer = InlineTrainer(Paced(1000, seed=1), 2, 1.0)
        await trainer.write(anchor)
        averager = Pairs(host, settings, Alone)
        course, outer = LocalHistory(averager.me, replace(KEY, round=0)), OuterSGD(1e-3, 0.0)

        def compare(mine: Sketch) -> dict[PeerId, Sketch]:
            sketches[name] = mine
            return {peer: each for peer, each in sketches.items() if peer != name}

        options = IndependentOptions(compare, spread_limit, newcomer=name == "zoe" and not start)
        deps = OuterLoopDeps(trainer, host.compute, anchor, snapshots)
        outer_loop = IndependentOuterLoop(course, averager, outer, deps, options)
        state_sync = IndependentStateSync(
            host, settings, snapshots, lambda: outer_loop.key, lambda: told, lambda: not outer_loop.seeks_state
        )
        await outer_loop.settle()
        goes_on = lambda: len(told[name]) < rounds  # noqa: E731
        async for report in run_independent_rounds(outer_loop, state_sync, SimClock().wall, goes_on):
            told[name].append(report)

    async def main() -> None:
        network = SimNetwork(Trace())
        for name in told:
            network.join(name)
        await asyncio.gather(*(live(network, name) for name in told))

    simloop.run(main())
    return told


class Alone(PairSession):
    """Nobody is met: nothing but fetching brings two together."""

    async def average(self, mine: Sequence[Vector], work: LocalProgress, into: Sequence[Vector]) -> AveragingResult:
        return AveragingResult(Outcome.SKIPPED)


def test_newcomer_trains_only_after_fetching_a_state() -> None:
    told = lives(math.inf, 0.0, 4)
    first, second = told["zoe"][:2]
    assert (first.outcome, first.bytes_downloaded, first.tokens) == ("superseded", 8000, 0)
    assert (second.outcome, second.parent) == ("skipped", first.lineage)
    assert all(report.outcome == "skipped" for report in told["anna"] + told["bert"])
    assert told["zoe"][-1].spread < 0.05


def test_outlying_peer_fetches_anothers_state() -> None:
    told = lives(0.3 / ASTRAY_FACTOR, 3.0, 5)
    outcomes = [report.outcome for report in told["zoe"]]
    assert outcomes.count("superseded") == 1 and told["zoe"][-1].spread < 0.05
    assert all(report.outcome == "skipped" for report in told["anna"] + told["bert"]), "they are not the furthest"


def test_nearby_peer_is_left_to_mixing() -> None:
    told = lives(3.0 / ASTRAY_FACTOR, 3.0, 4)
    assert {report.outcome for report in told["zoe"]} == {"skipped"}
