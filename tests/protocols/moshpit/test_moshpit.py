"""Moshpit over given states: exact means by tokens, groups that fail alone, and late, silent and dead peers."""

from __future__ import annotations

import asyncio

import pytest
import torch

from protocols.base import Outcome, PeerId
from tests.sim.averaging import killing
from tests.sim.contact import LIVENESS_SECONDS
from tests.sim.network import SimNetwork
from tests.support.long import long
from tests.support.moshpit import (
    assert_groups_hold_same_bits,
    blames_of,
    both_ways,
    distance,
    mean_of,
    message_count,
    moshpit_swarm,
    outcomes,
    part_from_another_member,
    spread,
)

# -- means ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count, most", ((2, 8), (3, 8), (8, 8), (4, 2), (9, 3), (12, 4), (8, 2)))
def test_full_grid_gives_the_exact_token_mean(count: int, most: int) -> None:
    """With unequal tokens, two vectors, and one to three axes. A mean by each peer's own tokens would be far off."""
    swarm = moshpit_swarm(count, most)
    mean = mean_of(swarm)
    histories = swarm.average()
    assert all(distance(state, mean) <= 1e-6 for state in swarm.states)
    assert {outcome for history in histories.values() for outcome in outcomes(history)} == {"committed"}
    assert all(
        not result.mean.blamed and not result.half_exchanges for history in histories.values() for result in history
    )
    assert_groups_hold_same_bits(histories)


def test_peer_without_tokens_takes_the_mean_unweighted() -> None:
    swarm = moshpit_swarm(3)
    swarm.tokens = [2000, 0, 3000]
    mean = mean_of(swarm)
    histories = swarm.average()
    assert all(distance(state, mean) <= 1e-6 for state in swarm.states)
    assert all("p01" not in history[0].mean.peers for history in histories.values())


def test_round_without_any_tokens_is_skipped() -> None:
    """The mean of nothing would be zero, and the states would be lost."""
    swarm = moshpit_swarm(3)
    swarm.tokens = [0, 0, 0]
    before = [torch.cat(state) for state in swarm.states]
    histories = swarm.average()
    assert all(outcomes(history) == ["skipped"] for history in histories.values())
    assert all(torch.equal(torch.cat(state), old) for state, old in zip(swarm.states, before, strict=True))


def test_grid_with_holes_approximates_and_keeps_mean() -> None:
    """With equal tokens the mean of all is unchanged, whatever the sizes of groups; the spread falls to a tenth."""
    swarm = moshpit_swarm(13, most=4)
    swarm.tokens = [1000] * 13
    mean, before = mean_of(swarm), spread(swarm)
    swarm.average(rounds=2)
    assert max(distance(state, mean) for state in swarm.states) < 0.1 * before
    assert float((mean_of(swarm) - mean).norm() / mean.norm()) < 1e-6


@pytest.mark.parametrize("name", ("fp16", "int8"))
def test_gradient_codec_is_not_used_for_states(name: str) -> None:
    """int8 is for pseudo-gradients only. fp16 loses at most 2**-11 of a number, once in each direction."""
    swarm = moshpit_swarm(4, most=2, codec=name)
    mean = mean_of(swarm)
    largest = max(float(vector.abs().max()) for state in swarm.states for vector in state)
    swarm.average()
    worst = max(float((torch.cat(state).double() - mean).abs().max()) for state in swarm.states)
    assert worst <= (4 * 2**-11 * largest if name == "fp16" else 1e-5)
    assert worst > 1e-5 or name == "int8"


def test_same_state_never_counts_twice() -> None:
    histories = moshpit_swarm(4, most=2).average(rounds=3)
    for history in histories.values():
        names = [name for result in history for each in result.mean.contributions.values() for name in each.messages]
        assert len(names) == len(set(names)) > 6
        assert all(len(name) <= 128 for name in names)


# -- time -------------------------------------------------------------------------------------------------------------


def test_slow_peer_is_cut_and_counts_partially() -> None:
    """The others do not wait for a peer of half their speed or less, and it is in every group all the same."""
    swarm = moshpit_swarm(4, train_seconds=(10.0, 10.0, 10.0, 60.0))
    histories = swarm.average(rounds=2)
    assert all(outcomes(history) == ["committed"] * 2 for history in histories.values())
    assert all(result.seconds < 16.0 and len(result.mean.peers) == 4 for result in histories["p00"])


def test_late_peer_jumps_to_the_others_round() -> None:
    """A peer whose round is behind jumps to the others' round, and commits it with them."""
    swarm = moshpit_swarm(4, round_seconds=60.0)

    def hold_up(network: SimNetwork) -> None:
        others = ("p00", "p01", "p02")
        both_ways(network.block, "p03", others)
        asyncio.get_running_loop().call_later(12.0, both_ways, network.heal, "p03", others)

    swarm.before = hold_up
    swarm.train_seconds = (3.0, 3.0, 3.0, 29.0)
    histories = swarm.average(rounds=8)
    rounds = [result.round for result in histories["p03"]]
    assert rounds == sorted(set(rounds)) and rounds[0] > 0, "it jumped"
    assert outcomes(histories["p03"])[-1] == "committed"
    assert_groups_hold_same_bits(histories)


# -- faults -----------------------------------------------------------------------------------------------------------


def test_death_in_one_group_spares_the_others() -> None:
    """A member dies in the data phase of its first group. That group has no result; the other groups have."""
    swarm = moshpit_swarm(4, most=2, elements=60_000)
    deaths: list[PeerId] = []

    def kill_in_data(network: SimNetwork) -> None:
        def watch(peer: PeerId, number: int, way: str, other: PeerId) -> None:
            data_phase = swarm.averagers["p03"]._moshpit.data_phases.values() if "p03" in swarm.averagers else ()
            if data_phase and not deaths:
                deaths.append("p03")
                network.kill("p03")

        network.watch = watch

    swarm.before = kill_in_data
    histories = swarm.average()
    groups = [name for peer in ("p00", "p01", "p02") for name in histories[peer][0].mean.contributions]
    assert deaths and groups
    assert_groups_hold_same_bits(histories)
    assert all(result.seconds < 20.0 for peer in ("p00", "p01", "p02") for result in histories[peer])
    completed = [peer for peer in ("p00", "p01", "p02") if histories[peer][0].mean.outcome == Outcome.COMMITTED]
    assert len(completed) >= 2, "those of the other group"


def test_link_slower_than_claimed_still_averages() -> None:
    """Budgets follow claims, which fall until a group has enough time; after that it rarely misses its budget."""
    swarm = moshpit_swarm(2, elements=60_000, chunk_elements=4096, train_seconds=(60.0,) * 2)

    def slow(network: SimNetwork) -> None:
        for node in network.nodes.values():
            node.slowness = 400.0

    swarm.before = slow
    histories = swarm.average(rounds=26)
    assert outcomes(histories["p00"])[:2] == ["skipped"] * 2, "otherwise no claim had to fall"
    assert outcomes(histories["p00"])[-20:].count("committed") >= 18


@pytest.mark.parametrize("sent_bytes", (400_000, 600_000))
def test_peer_silent_mid_round_costs_only_detection_time(sent_bytes: int) -> None:
    """Its streams stay open and its part does not arrive. The others wait neither for the end of the budget nor for
    each other's parts."""
    swarm = moshpit_swarm(4, elements=60_000, train_seconds=(2.0,) * 4)
    others = ("p00", "p01", "p03")

    def silence(network: SimNetwork) -> None:
        def watch(peer: PeerId, number: int, way: str, other: PeerId) -> None:
            if network.nodes["p02"].sent_bytes > sent_bytes:
                for each in others:
                    network.block("p02", each)

        network.watch = watch

    swarm.before = silence
    histories = swarm.average(rounds=2)
    assert all(histories[peer][0].seconds < 2.4 + LIVENESS_SECONDS + 2.0 for peer in others)
    assert blames_of({peer: histories[peer] for peer in others}, "p02")
    assert all(outcomes(histories[peer])[-1] == "committed" for peer in others)


@pytest.mark.parametrize("first", (0, *long(1, 2, 3)))
def test_death_at_every_message_is_survived(first: int) -> None:
    """The others end their round soon, and those that complete a group hold the same bits.

    The group has three members. `python -m tests.sim.crashes --protocol moshpit` tries larger swarms.
    """
    count = message_count(moshpit_swarm(3, elements=60), "p01")
    assert count > 40
    for number in range(1 + first, count + 1, 4):
        swarm = moshpit_swarm(3, elements=60)
        swarm.before = killing("p01", number)
        histories = swarm.average(rounds=2)
        assert_groups_hold_same_bits(histories)
        for peer in ("p00", "p02"):
            assert outcomes(histories[peer])[-1] == "committed", number
            assert all(result.seconds < 30.0 for result in histories[peer]), number
            assert all(bool(torch.isfinite(torch.cat(result.state)).all()) for result in histories[peer])


def test_part_of_dead_reducer_comes_from_another_member() -> None:
    """If one of them has got it. Only what its reducer made counts."""
    swarm = moshpit_swarm(3, elements=60)
    swarm.before = killing("p01", part_from_another_member()[0])
    histories = swarm.average()
    assert_groups_hold_same_bits(histories)
    assert all(outcomes(histories[peer]) == ["committed"] for peer in ("p00", "p02"))
    assert not any(histories[peer][0].half_exchanges for peer in ("p00", "p02"))


@pytest.mark.parametrize("way", ("both", "from", "to"))
def test_silence_costs_little_time(way: str) -> None:
    """From the middle of the first round on, a peer receives nothing, sends nothing, or both."""
    swarm = moshpit_swarm(4, train_seconds=(2.0,) * 4)

    def silence(network: SimNetwork) -> None:
        def cut() -> None:
            for peer in ("p00", "p01", "p03"):
                if way != "to":
                    network.block("p02", peer)
                if way != "from":
                    network.block(peer, "p02")

        asyncio.get_running_loop().call_later(2.1, cut)

    swarm.before = silence
    histories = swarm.average(rounds=3)
    assert_groups_hold_same_bits(histories)
    for peer in ("p00", "p01", "p03"):
        assert outcomes(histories[peer])[-1] == "committed"
        assert all(result.seconds < 30.0 for result in histories[peer])
    assert all(result.seconds < 60.0 for result in histories["p02"])


def test_disconnected_peer_blames_no_one_and_rejoins() -> None:
    """It received nothing, because of its own link, so it is in the others' group again in the next round."""
    for hundredths in range(197, 218, 5):
        swarm = moshpit_swarm(3, elements=60_000, chunk_elements=4096, train_seconds=(2.0,) * 3)

        def fault(network: SimNetwork, seconds: float = hundredths / 100) -> None:
            loop = asyncio.get_running_loop()
            for at, call in ((seconds, network.block), (seconds + 5.0, network.heal)):
                loop.call_later(at, both_ways, call, "p02", ("p00", "p01"))

        swarm.before = fault
        history = swarm.average(rounds=4)["p02"]
        began = [sum(result.seconds for result in history[:index]) for index in range(len(history))]
        since = [result for result, at in zip(history, began, strict=True) if at > hundredths / 100 + 5.0]
        assert since and outcomes(since) == ["committed"] * len(since), hundredths


def test_grid_shrinks_when_peers_leave() -> None:
    """Nine peers on 3 x 3. When five of them die, the other four form one group."""
    swarm = moshpit_swarm(9, most=8)

    def kill_some(network: SimNetwork) -> None:
        for peer in ("p04", "p05", "p06", "p07", "p08"):
            asyncio.get_running_loop().call_later(2.0, network.kill, peer)

    swarm.before = kill_some
    histories = swarm.average(rounds=3)
    shapes = {averager._moshpit.grid.shape for peer, averager in swarm.averagers.items() if peer < "p04"}
    assert shapes == {(8,)}
    assert all(result.seconds < 20.0 for peer in ("p00", "p01", "p02", "p03") for result in histories[peer])
    assert all(len(histories[peer][-1].mean.peers) == 4 for peer in ("p00", "p01", "p02", "p03"))
