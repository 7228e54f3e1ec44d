"""The data phase of clusters, in virtual time and without a vote: one mean at all, whatever is lost on the way."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

import pytest
import torch

from protocols.allreduce import clustered_plan as clustered
from protocols.allreduce.all_reduce import DATA
from protocols.allreduce.clustered_messages import (
    ContributePartial,
    member_offers,
)
from protocols.base import Buffer, Header, PeerError
from protocols.streams.framing import FramedStream
from protocols.vectors.robust import RobustAggregator
from protocols.vectors.views import norm
from protocols.wire import Contribute, Partial, Reduced
from tests.support.clustered_swarm import KEY, ClusteredSwarm
from tests.support.disguises import sending
from tests.support.long import diagonal, long
from tests.support.simulated import simulated


@pytest.mark.parametrize("sizes", [(1, 1, 1), (3, 3, 3), (1, 4, 2), (6,), (5, 1)])
@pytest.mark.parametrize("codec_name", ["fp32", "int8"])
@simulated(lambda sizes, codec_name: ClusteredSwarm(*sizes, codec_name=codec_name))
async def test_calm_round_holds_the_work_of_all(swarm: ClusteredSwarm) -> None:
    swarm.begin()
    assert not await swarm.whole()
    counted = swarm.check(swarm.names)
    assert set(counted.values()) == {swarm.chunks}
    await asyncio.sleep(swarm.versions[0].plan.budget_seconds)
    swarm.assert_nothing_left()


Lie: TypeAlias = Callable[[FramedStream, Header, Buffer], tuple[Header, Buffer]]
SIZES = (3, 3, 3)
VICTIMS = {"lead": "v0", "aggregator": "v1.1", "other aggregator": "v2.2"}


def struck(victim: str, number: int, fault: str) -> ClusteredSwarm:
    """A swarm in which a fault strikes a peer at its message of this number."""
    swarm = ClusteredSwarm(*SIZES, elements=300)

    def watch(mover: str, message: int, way: str, other: str) -> None:
        if (mover, message) != (victim, number):
            return
        others = [name for name in swarm.names if name != victim]
        if fault == "kill":
            swarm.network.kill(victim)
        elif fault == "silence":
            swarm.cut([victim], others)
        else:
            for name in others:
                swarm.network.block(victim, name)

    swarm.network.watch = watch
    return swarm


@diagonal("role, fault, first", list(VICTIMS), ["kill", "silence", "one-way"], range(1, 14, 2))
def test_fault_at_any_message_costs_the_work_on_its_way_only(role: str, fault: str, first: int) -> None:
    """The others have one mean, with all work but the victim's and what it had aggregated and not delivered."""
    victim = VICTIMS[role]
    for number in range(first, 110, 28):
        swarm = struck(victim, number, fault)

        async def play(swarm: ClusteredSwarm = swarm, number: int = number) -> None:
            swarm.begin()
            left = await swarm.whole(without=[victim])
            assert not left, f"message {number}: {left}"
            others = [name for name in swarm.names if name != victim]
            counted, lost = swarm.check(others), swarm.aggregated_chunks(victim)
            for name in others:
                of_victim = lost if name.split(".")[0] == victim.split(".")[0] else 0
                assert counted[name] >= swarm.chunks - of_victim, f"message {number}: {name} in {counted[name]}"
            assert swarm.now < 8.0, f"message {number}: {swarm.now:.1f} s"  # heartbeats miss a peer after 5 s

        swarm.play(play)


@pytest.mark.parametrize("seed", [*range(6), *long(*range(6, 60))])
def test_several_faults_leave_the_others_one_mean(seed: int) -> None:
    """Deaths and cuts in any order, as long as some voter is left to coordinate."""
    draw = random.Random(seed)
    swarm = ClusteredSwarm(*(draw.randint(1, 5) for _ in range(draw.randint(2, 4))), elements=300, seed=seed)
    victims = draw.sample(swarm.names[1:], k=min(3, len(swarm.names) - 1))
    at = {(victim, draw.randint(1, 80)): draw.choice(["kill", "silence"]) for victim in victims}

    def watch(mover: str, message: int, way: str, other: str) -> None:
        fault = at.get((mover, message))
        if fault == "kill":
            swarm.network.kill(mover)
        elif fault == "silence":
            swarm.cut([mover], [name for name in swarm.names if name != mover])

    async def play() -> None:
        swarm.begin()
        assert not await swarm.whole(without=victims)
        swarm.check([name for name in swarm.names if name not in victims])

    swarm.network.watch = watch
    swarm.play(play)


@simulated(ClusteredSwarm, 4, 4, 4, elements=3000)
async def test_repair_of_a_reducer_takes_kept_partials(swarm: ClusteredSwarm) -> None:
    """Members send nothing again: the aggregators have the means of their clusters."""
    swarm.begin()
    await asyncio.sleep(0.09)
    assert 0 < len(swarm.peers["v1"].exchange._partials[1].part.masks) < swarm.chunks // 3
    swarm.network.kill("v1")
    assert not await swarm.whole()
    counted = swarm.check([name for name in swarm.names if name != "v1"])
    assert all(count == swarm.chunks for name, count in counted.items() if name != "v1")
    for name in ("v0.1", "v2.3"):  # its vector once, partials and means of a third of the parts, and half of that again
        assert swarm.network.totals(name)[0] < 4 * 3000 * (1 + 1 / 3 + 1 + 0.5) + 6000


@pytest.mark.parametrize("sizes, after_seconds", [((3, 3, 3), 0.09), ((1, 1, 1), 0.06), ((2, 4), 0.09)])
@simulated(lambda sizes: ClusteredSwarm(*sizes, elements=3000))
async def test_reducer_that_is_taken_for_lost_lets_go_of_its_part(swarm: ClusteredSwarm, after_seconds: float) -> None:
    """It is alive, and the coordinator has given its part to another voter: its cluster follows that one, too."""
    swarm.begin()
    await asyncio.sleep(after_seconds)
    swarm.reassign(tuple(0 if each == 1 else each for each in swarm.versions[-1].plan.reducers))
    assert not await swarm.whole()
    counted = swarm.check(swarm.names)
    assert set(counted.values()) == {swarm.chunks}
    assert {held.done.reducer for held in swarm.parts("v0") if held.done} == {0, *range(2, len(swarm.clusters))}


@simulated(ClusteredSwarm, 3, 3, 3)
async def test_opening_of_a_stranger_is_refused(swarm: ClusteredSwarm) -> None:
    """Neither another cluster's members nor made-up offers, parts, clusters or codecs are served. A member of another
    cluster is not to blame: this peer may have been of that one before.
    """
    swarm.begin()
    plan, offers = swarm.inner[1].digest, member_offers(swarm.inner[1].plan.offers)
    honest = ContributePartial(KEY, plan, 0, "fp32", 1, offers, False)
    not_the_aggregator = next(name for name in swarm.clusters[1] if name != swarm.inner[1].reducer(0))
    openings: list[tuple[str, Header]] = [
        (not_the_aggregator, honest),
        ("v2.1", replace(honest, relays=True)),
        ("v1.1", replace(honest, cluster=3)),
        ("v1.1", replace(honest, part=3)),
        ("v1.1", replace(honest, codec="int8")),
        ("v0.1", Contribute(KEY, plan, 3, "fp32")),
        ("v2.1", Contribute(KEY, plan, 0, "fp32")),
    ]
    for peer, opening in openings:
        host = swarm.peers[peer].exchange.task.host
        with pytest.raises(PeerError):
            async with host.transport.open("v0", DATA, swarm.now + 1.0) as stream:
                await stream.send(opening)
                while True:
                    await stream.receive(512)
    assert len(swarm.network.transports["v0"].refused) == len(openings) - 1


@simulated(ClusteredSwarm, 6, 6)
async def test_one_member_fetches_for_all_after_an_aggregator_is_lost(swarm: ClusteredSwarm) -> None:
    """Else thirty members would ask one reducer for the same part. The lead, a voter, asks for itself."""
    swarm.begin()
    aggregator = swarm.inner[0].reducer(1)
    await asyncio.sleep(0.1)
    swarm.network.kill(aggregator)
    assert not await swarm.whole()
    swarm.check([name for name in swarm.names if name != aggregator])
    relaying = [name for name in swarm.clusters[0] for part in (1,) if part in swarm.peers[name].exchange._relays]
    assert {*relaying} - {aggregator, "v0"} <= {clustered.relays(swarm.inner[0], "v0", 1)[1]}


@pytest.mark.parametrize("is_genuine", [True, False])
def test_part_fetched_by_digest_is_passed_on(is_genuine: bool) -> None:
    """To mates that wait for it at this peer, which its reducer tells nothing; not with a forged statement."""
    swarm = ClusteredSwarm(3, 3, 3)

    async def withhold(stream: FramedStream, header: Header, payload: Buffer) -> None:
        if isinstance(header, Reduced) and stream.peer == "v1.1":
            await asyncio.sleep(60.0)
        await stream.send(header, payload)

    async def play() -> None:
        swarm.begin()
        assert swarm.inner[1].reducer(0) == "v1.1"
        await asyncio.sleep(1.0)
        exchange, mate = swarm.peers["v1.1"].exchange, swarm.peers["v1.2"].exchange
        fetched = swarm.peers["v2"].exchange.parts[0]
        assert 0 not in exchange.parts and 0 not in mate.parts and fetched.done
        if not is_genuine:
            fetched.done = replace(fetched.done, signature=b"forged")
        exchange.pass_on(0, fetched)
        await asyncio.sleep(0.1)
        held = [each.parts[0].result for each in (exchange, mate) if 0 in each.parts]
        assert held == ([fetched.result] * 2 if is_genuine else [])

    swarm.disguises["v0"] = sending(withhold)
    swarm.play(play)


@simulated(ClusteredSwarm, 3, 3, 3, 3)
async def test_late_reducer_leaves_a_fetched_part_unchanged(swarm: ClusteredSwarm) -> None:
    """What it sends an aggregator that has fetched the part meanwhile is a part of its own, which is received, too."""
    swarm.cut(["v1.1"], ["v0"])
    swarm.begin()
    assert (swarm.inner[1].reducer(0), swarm.versions[0].reducer(0)) == ("v1.1", "v0")
    await asyncio.sleep(1.9)
    exchange, fetched = swarm.peers["v1.1"].exchange, swarm.peers["v2"].exchange.parts[0]
    before = (fetched.result, list(fetched.masks), list(fetched.members))
    assert 0 not in exchange.parts
    exchange.pass_on(0, fetched)
    swarm.heal(["v1.1"], ["v0"])
    await asyncio.sleep(1.0)
    assert exchange.parts[0].done and exchange.parts[0] is not fetched and 0 not in exchange.failed
    assert all((each.result, each.masks, each.members) == before for each in (exchange.parts[0], fetched))


@simulated(ClusteredSwarm, 6, 5, 5, 5, 5)
async def test_slow_member_counts_as_far_as_its_chunks_came(swarm: ClusteredSwarm) -> None:
    """Its cluster waits for it once and a half as long as for most, and the other clusters lose nothing."""
    swarm.slow["v1.3"] = 3_000.0
    swarm.begin()
    assert not await swarm.whole(without=["v1.3"])
    counted = swarm.check([name for name in swarm.names if name != "v1.3"])
    lost = swarm.aggregated_chunks("v1.3")
    assert 0 < counted["v1.3"] < swarm.chunks
    for name, count in counted.items():
        if name != "v1.3":
            assert count >= swarm.chunks - (lost if name.startswith("v1") else 0), name
    assert swarm.now < 6.0


@simulated(ClusteredSwarm, 3, 3, 1, idle=["v2"])
async def test_empty_part_tells_nothing_of_the_others(swarm: ClusteredSwarm) -> None:
    """A lead that begins early has the empty parts at once. It waits for aggregators whose last step still runs."""
    swarm.late = {name: 1.5 for name in swarm.names if name != "v0"}
    swarm.begin()
    assert not await swarm.whole()
    counted = swarm.check(swarm.names)
    assert {name: count for name, count in counted.items() if count < swarm.chunks} == {"v2": 0}
    assert not swarm.named(swarm.inner[0].reducer(0))


@simulated(ClusteredSwarm, 3, 3, elements=4 * 4096, chunk=4096, codec_name="topk")
async def test_sparse_means_pass_both_levels(swarm: ClusteredSwarm) -> None:
    swarm.begin()
    assert not await swarm.whole()
    assert set(swarm.check(swarm.names).values()) == {4}


@simulated(ClusteredSwarm, 4, 2, 1, idle=["v0.1", "v1", "v2"])
async def test_peers_without_work_get_the_mean(swarm: ClusteredSwarm) -> None:
    swarm.begin()
    assert not await swarm.whole()
    counted = swarm.check(swarm.names)
    assert {name for name, count in counted.items() if not count} == {"v0.1", "v1", "v2"}
    assert {count for count in counted.values() if count} == {swarm.chunks}


# -- liars ------------------------------------------------------------------------------------------------------------


def flipped(stream: FramedStream, header: Header, payload: Buffer) -> tuple[Header, Buffer]:
    """An aggregator that changes the mean it relays."""
    if isinstance(header, Reduced) and header.index == 1:
        return header, bytes(payload[:-1]) + bytes([payload[-1] ^ 1])
    return header, payload


def overcounted(stream: FramedStream, header: Header, payload: Buffer) -> tuple[Header, Buffer]:
    """An aggregator that names a member without work as counted."""
    return (replace(header, mask=header.mask | 1 << 2), payload) if isinstance(header, Partial) else (header, payload)


def inflated(stream: FramedStream, header: Header, payload: Buffer) -> tuple[Header, Buffer]:
    """An aggregator whose partials are larger than any of its members' work may be."""
    if isinstance(header, Partial):
        return header, torch.full((len(payload) // 4,), 1e4).numpy().tobytes()
    return header, payload


def invented(stream: FramedStream, header: Header, payload: Buffer) -> tuple[Header, Buffer]:
    """An aggregator that gives a member a larger norm than it declared."""
    if isinstance(header, ContributePartial):
        first = replace(header.offers[0], norm=header.offers[0].norm * 2)
        return replace(header, offers=(first, *header.offers[1:])), payload
    return header, payload


@pytest.mark.parametrize(
    "lie, why",
    [(flipped, "digest"), (overcounted, "excluded"), (inflated, "norm above"), (invented, "its offers lead to")],
)
@simulated(lambda lie, why: ClusteredSwarm(4, 4, 4, idle=["v1.2"]))
async def test_lying_aggregator_costs_its_cluster_a_part_at_most(swarm: ClusteredSwarm, lie: Lie, why: str) -> None:
    """It is named, and changes neither the mean that others get nor the weights."""
    liar = "v1.1"

    async def send(stream: FramedStream, header: Header, payload: Buffer) -> None:
        await stream.send(*lie(stream, header, payload))

    swarm.disguises[liar] = sending(send)
    swarm.begin()
    others = [name for name in swarm.names if name != liar]
    assert not await swarm.whole(without=[liar])
    counted, lost = swarm.check(others), swarm.aggregated_chunks(liar)
    for name in others:
        of_liar = lost if name.startswith("v1") else 0
        assert counted[name] >= swarm.chunks - of_liar or name == "v1.2", name
    named = [fault for name in others for fault in swarm.named(name)]
    assert {fault.peer for fault in named} <= {liar} and any(why in fault.why for fault in named), named


@pytest.mark.parametrize("alike", [0.0, 0.5, 1.0])
def test_honest_mean_of_few_or_many_members_is_not_clipped(alike: float) -> None:
    """Raw, a mean of 31 has up to 5.6 times less norm than one contribution, or as much, if members agree."""
    sizes, draw = [1, 31, 31, 7, 1, 31, 2], torch.Generator().manual_seed(3)
    common = torch.randn(4000, generator=draw)
    means = []
    for size in sizes:
        own = torch.randn(size, 4000, generator=draw)
        means.append(math.sqrt(alike) * common + math.sqrt(1 - alike) * own.mean(0))
    judge = RobustAggregator("mean", [1.0] * len(sizes))
    norms, members = [norm([each]) for each in means], range(len(sizes))
    assert judge.is_clear(members, norms, sizes)
    liar = [*norms[:-1], 20 * norms[0]]
    assert not judge.is_clear(members, liar, sizes)
    into = torch.empty(4000)
    judge.average(members, liar, [*means[:-1], means[0] * 20], [float(size) for size in sizes], into, sizes)
    assert set(judge.named()) == {6}
