"""Gossip: pairs move to their mean, both ends or neither; slow, dead and busy peers do not delay the others."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import torch

from protocols.base import Member, Outcome, RoundKey
from protocols.pairwise.state_swap import ExchangeRequest
from protocols.vectors.codec import codec
from tests.sim.averaging import RUN, flat, head
from tests.sim.faults import Faults
from tests.sim.faults import Message as At
from tests.support.codecs import error_bound
from tests.support.pairwise import DONE, ROUND_SECONDS, PairwiseSwarm
from tests.support.simulated import simulated

# -- what an exchange does --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("elements", (1, 7, 24, 100))
def test_pair_reaches_identical_mean(elements: int) -> None:
    """Of parameters and momentum, with chunks that cross from one vector into the other and an odd last chunk."""
    swarm = PairwiseSwarm(2, elements)
    swarm.rounds()
    expected = (swarm.first[0] + swarm.first[1]) / 2
    assert torch.equal(flat(swarm.states[0]), flat(swarm.states[1]))
    assert float((flat(swarm.states[0]) - expected).abs().max()) < 1e-6
    for index, (result,) in enumerate(swarm.results):
        other = swarm.names[1 - index]
        assert result.mean.outcome is Outcome.COMMITTED and result.mean.peers == (other,)
        assert result.mean.weights == {swarm.names[index]: 0.5, other: 0.5}
        part = result.mean.contributions[other]
        assert part.chunks_counted == part.chunks == -(-2 * elements // 16) and len(part.messages) == 1
        assert not result.mean.blamed and not result.half_exchanges
        assert result.mean.bytes_sent > 8 * elements and result.mean.bytes_received > 8 * elements
    assert swarm.messages(0) != swarm.messages(1), "each state has a name of its own"


@pytest.mark.parametrize("name", ("fp32", "fp16", "bf16", "int8"))
def test_sum_of_states_is_conserved_by_every_codec(name: str) -> None:
    swarm = PairwiseSwarm(2, 500, name, chunk_elements=128)
    swarm.rounds(3)
    assert swarm.drift() < 1e-6
    bound = sum(error_bound(codec(name), each.float()).double() for each in swarm.first)
    if name != "int8":  # its bound is per block, and chunks split blocks
        assert bool(((flat(swarm.states[0]) - flat(swarm.states[1])).abs() <= bound + 1e-6).all())
    assert swarm.spread() < 0.05 * float(swarm.first[0].norm())


@simulated(PairwiseSwarm, 2)
async def test_state_is_lent_during_training(swarm: PairwiseSwarm) -> None:
    """The exchange moves it in place. The round that lent it is committed by this exchange alone."""
    lent = swarm.states[0]
    slow = swarm.start(0, swarm.round(0, train_seconds=30.0))
    await asyncio.wait([swarm.start(1, swarm.round(1))])
    assert torch.equal(flat(lent), flat(swarm.states[1])), "while it still trains"
    await asyncio.wait([slow])
    await swarm.settle()
    result = swarm.results[0][0]
    assert list(result.early) == ["p1"] and result.mean.contributions == {}
    assert result.mean.outcome is Outcome.COMMITTED and torch.equal(flat(swarm.states[0]), flat(lent))
    assert swarm.results[1][0].ended < 2.0
    assert result.mean.weights == {"p0": 0.5, "p1": 0.5}


def test_single_peer_skips_at_once() -> None:
    swarm = PairwiseSwarm(1)
    assert swarm.rounds() < 1.01
    assert swarm.results[0][0].mean.outcome is Outcome.SKIPPED and not swarm.results[0][0].mean.weights


def test_peer_between_rounds_answers_busy_at_once() -> None:
    """The asking peer tries for as long as one exchange may take, and then skips."""
    swarm = PairwiseSwarm(2)
    swarm.run_round(1)
    (result,) = swarm.results[1]
    assert result.mean.outcome is Outcome.SKIPPED and result.ended - result.asked < 3.0 and not result.mean.blamed
    assert not swarm.moved(0) and not swarm.moved(1)


@pytest.mark.parametrize("jitter", range(12))
def test_simultaneous_requests_become_one_exchange(jitter: int) -> None:
    swarm = PairwiseSwarm(2, jitter=jitter)
    swarm.rounds()
    assert all(len(swarm.messages(index)) == 1 for index in range(2))
    assert max(each[0].ended - each[0].asked for each in swarm.results) < 0.5


@pytest.mark.parametrize("jitter", range(6))
@pytest.mark.parametrize("count", (3, 5))
def test_cycle_of_requests_does_not_deadlock(count: int, jitter: int) -> None:
    """Every peer asks the next one at the same moment."""
    swarm = PairwiseSwarm(count, schedule="ring", jitter=jitter)
    swarm.rounds()
    met = [bool(swarm.messages(index)) for index in range(count)]
    assert sum(met) >= count - 1 and swarm.drift() < 1e-6
    assert max(each[0].ended - each[0].asked for each in swarm.results) < 2.5


def test_crossing_requests_are_ranked_fairly() -> None:
    key = RoundKey(RUN, "run", bytes(32), 0)
    ranks = [
        [ExchangeRequest(key, Member(peer), number, 8, "fp32").rank() for number in range(40)] for peer in ("p0", "p1")
    ]
    assert 8 < sum(one < other for one, other in zip(*ranks, strict=True)) < 32


@simulated(PairwiseSwarm, 1)
async def test_cut_comes_with_the_work_or_at_deadline(swarm: PairwiseSwarm) -> None:
    loop = asyncio.get_running_loop()
    async with swarm.gossips[0].enter(head(0), loop.time() + 7.0) as session:
        session.offer(replace(DONE, complete=False))
        assert not session.cut.is_set()
        await session.cut.wait()
        assert loop.time() == 7.0
    async with swarm.gossips[0].enter(head(1), loop.time() + 7.0) as session:
        session.offer(replace(DONE, complete=False, leaving=True))
        assert session.cut.is_set() and session.round == 1 and session.group == ""
    await swarm.settle()


# -- faults -----------------------------------------------------------------------------------------------------------


def messages_without_faults(jitter: int, peer: str) -> range:
    """The numbers of the messages that a peer of two sends and receives in a round without faults."""
    swarm = PairwiseSwarm(2, jitter=jitter)
    swarm.rounds()
    return range(1, swarm.network.nodes[peer].messages + 1)


def is_whole(swarm: PairwiseSwarm, index: int, others: list[int]) -> bool:
    """Whether all of its state, parameters and momentum, is as it was or the mean with one of the others."""
    now = flat(swarm.states[index])
    means = [swarm.first[index], *((swarm.first[index] + swarm.first[other]) / 2 for other in others)]
    return any(float((now - each).abs().max()) < 1e-6 for each in means)


@pytest.mark.parametrize("victim", (0, 1))
def test_partner_death_at_any_message_keeps_survivor_whole(victim: int) -> None:
    survivor = 1 - victim
    for number in messages_without_faults(3, f"p{victim}"):
        swarm = PairwiseSwarm(2, jitter=3)
        swarm.run_with_faults(Faults().crash(f"p{victim}", at_message=number))
        assert is_whole(swarm, survivor, [victim]), f"at message {number}"
        (result,) = swarm.results[survivor]
        assert result.ended - result.asked < 3.0, f"it cost more than one timeout at message {number}"
        assert swarm.moved(survivor) == bool(swarm.messages(survivor))


@pytest.mark.parametrize("jitter", (3, 4))
def test_stream_reset_at_any_message_is_atomic(jitter: int) -> None:
    """Both peers live and can ask each other for the outcome. Only the arrival of the last message stays unknown."""
    for victim in ("p0", "p1"):
        half_exchanges = 0
        for number in messages_without_faults(jitter, victim):
            swarm = PairwiseSwarm(2, jitter=jitter)
            swarm.run_with_faults(Faults().reset(victim, at_message=number))
            assert swarm.moved(0) == swarm.moved(1), f"at message {number} of {victim}"
            assert is_whole(swarm, 0, [1]) and is_whole(swarm, 1, [0])
            assert swarm.drift() < 1e-6
            half_exchanges += sum(gossip.half_exchanges for gossip in swarm.gossips)
        assert half_exchanges == 1


@pytest.mark.parametrize("both", (True, False))
def test_partner_silence_at_any_message_costs_one_timeout(both: bool) -> None:
    """Then both have moved or neither, or a peer counts that one end may have moved alone."""
    for number in messages_without_faults(3, "p0"):
        at = At("p0", number)
        faults = Faults().silence({"p0"}, {"p1"}, at) if both else Faults().silence_one_way("p0", "p1", at)
        swarm = PairwiseSwarm(2, jitter=3)
        swarm.run_with_faults(faults)
        for index in range(2):
            (result,) = swarm.results[index]
            assert result.ended - result.asked < 5.0, f"at message {number}"
            assert is_whole(swarm, index, [1 - index])
        if swarm.moved(0) != swarm.moved(1):
            assert sum(gossip.half_exchanges for gossip in swarm.gossips) > 0, f"at message {number}"
            drifts = [result.mass_drift for (result,) in swarm.results if result.half_exchanges]
            half = float((swarm.first[0] - swarm.first[1]).norm()) / 2
            assert not drifts or max(drifts) > 0.999 * half / max(float(first.norm()) for first in swarm.first)


@pytest.mark.parametrize("times, counts", ((15.9, True), (16.1, False)))
def test_state_beyond_sixteen_times_our_norm_is_rejected(times: float, counts: bool) -> None:
    swarm = PairwiseSwarm(2)
    for theirs, ours in zip(swarm.states[1], swarm.states[0], strict=True):
        theirs.copy_(ours).mul_(times)
    swarm.rounds()
    assert swarm.moved(0) == counts
    assert counts or any("16 times ours" in blame.why for result in swarm.results[0] for blame in result.mean.blamed)


@simulated(PairwiseSwarm, 4)
async def test_dead_partner_delays_no_other_peers(swarm: PairwiseSwarm) -> None:
    """p1 has stopped without notice. A peer that asks it loses one timeout; the others exchange as usual."""
    for other in ("p0", "p2", "p3"):
        swarm.network.link("p1", other).blocked = True

    await asyncio.wait([swarm.start(index, swarm.round(index)) for index in (0, 2, 3)])
    await swarm.settle()
    for index in (0, 2, 3):
        (result,) = swarm.results[index]
        assert result.ended - result.asked < 3.0
    assert sum(bool(swarm.messages(index)) for index in (0, 2, 3)) >= 2


def test_peer_that_timed_out_is_avoided_briefly() -> None:
    swarm = PairwiseSwarm(2)
    swarm.network.link("p1", "p0").blocked = True
    swarm.run(lambda: swarm.play_rounds(0, 2, train_seconds=0.1))
    first, second = swarm.results[0]
    assert first.mean.blamed[0].peer == "p1" and "did not answer in time" in first.mean.blamed[0].why
    assert 1.9 < first.ended - first.asked < 3.0 and second.ended - second.asked < 0.01


@simulated(PairwiseSwarm, 2, 25_000, chunk_elements=5_000)
async def test_link_slower_than_claimed_gets_more_time(swarm: PairwiseSwarm) -> None:
    """200 KB at 5 KB/s, where the peers claim 1 MB/s: forty seconds and more."""
    for node in swarm.network.nodes.values():
        node.slowness = 200.0

    for number in range(60):
        await asyncio.wait([swarm.start(index, swarm.round(index, number, 10.0)) for index in range(2)])
        if swarm.messages(0):
            break
    await swarm.settle()
    assert swarm.messages(0) and swarm.drift() < 1e-6
    assert all(result.ended - result.asked < ROUND_SECONDS for results in swarm.results for result in results)


def test_cancelled_round_leaves_its_state_unchanged() -> None:
    """A lent state does not change after its round is cancelled, at any moment of an exchange."""

    async def cancelled_after(swarm: PairwiseSwarm, seconds: float, seen: list[torch.Tensor]) -> None:
        try:
            async with asyncio.timeout(seconds):
                await swarm.lending(0, 50.0)
        except TimeoutError:
            seen.append(flat(swarm.states[0]))

    for hundredths in range(1, 30, 2):
        swarm, seen = PairwiseSwarm(2, 400), list[torch.Tensor]()

        async def main(
            swarm: PairwiseSwarm = swarm, seconds: float = 1.0 + hundredths / 100, seen: list[torch.Tensor] = seen
        ) -> None:
            lender = swarm.start(0, cancelled_after(swarm, seconds, seen))
            await asyncio.wait([lender, swarm.start(1, swarm.round(1))])

        swarm.run(main)
        assert torch.equal(flat(swarm.states[0]), seen[0])
        assert swarm.moved(0) == swarm.moved(1) and is_whole(swarm, 0, [1])
