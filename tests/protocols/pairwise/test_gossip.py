"""Gossip: pairs come to their mean, both ends or none; nobody waits for who is slow, dead, busy or lying."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from protocols import wire
from protocols.base import Member, Outcome, PeerError, RoundKey, Settings
from protocols.codec import codec
from protocols.framing import FramedStream
from protocols.pairwise.gossip import Gossip
from protocols.pairwise.matching import pairwise
from protocols.pairwise.state_swap import (
    EXCHANGE,
    HEADER_LIMIT,
    ExchangeMessage,
    ExchangeReply,
    ExchangeRequest,
    OutcomeQuery,
    OutcomeReply,
    StateReceived,
    StateSwap,
)
from protocols.vectors import VectorView
from tests.sim.byzantine.contributors import ByzantineContributorStream
from tests.sim.faults import Faults
from tests.sim.faults import Message as At
from tests.sim.gossip_harness import DONE, ROUND_SECONDS, RUN, GossipHarness, flat, head
from tests.sim.host import Hearsay, sim_host
from tests.sim.injection import Injector
from tests.sim.network import SimNetwork, Trace
from tests.sim.pipe import SimPipe

# -- what an exchange does ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("elements", (1, 7, 24, 100))
def test_pair_reaches_identical_mean(elements: int) -> None:
    """Parameters and momentum; chunks that cross from one vector into the other; an odd last one."""
    swarm = GossipHarness(2, elements)
    swarm.rounds()
    expected = (swarm.first[0] + swarm.first[1]) / 2
    assert torch.equal(flat(swarm.state[0]), flat(swarm.state[1]))
    assert float((flat(swarm.state[0]) - expected).abs().max()) < 1e-6
    for index, (told,) in enumerate(swarm.told):
        other = swarm.names[1 - index]
        assert told.mean.outcome is Outcome.COMMITTED and told.mean.peers == (other,)
        assert told.mean.weights == {swarm.names[index]: 0.5, other: 0.5}
        part = told.mean.contributions[other]
        assert part.chunks_counted == part.chunks == -(-2 * elements // 16) and len(part.messages) == 1
        assert not told.mean.blamed and not told.half_exchanges
        assert told.mean.bytes_sent > 8 * elements and told.mean.bytes_received > 8 * elements
    assert swarm.messages(0) != swarm.messages(1), "each state has a name of its own"


@pytest.mark.parametrize("name", ("fp32", "fp16", "bf16", "int8"))
def test_sum_of_states_is_conserved_by_every_codec(name: str) -> None:
    swarm = GossipHarness(2, 500, name, chunk_elements=128)
    swarm.rounds(3)
    assert swarm.drift() < 1e-6
    used = codec(name)
    first = [torch.cat([each[:500], each[500:]]).float() for each in swarm.first]
    rest = sum(used.error_bound(each).double() for each in first)
    assert isinstance(rest, torch.Tensor)
    if name != "int8":  # whose bound is of blocks, and chunks cut those
        assert bool(((flat(swarm.state[0]) - flat(swarm.state[1])).abs() <= rest + 1e-6).all())
    assert swarm.spread() < 0.05 * float(swarm.first[0].norm())


@pytest.mark.parametrize("schedule", ("random", "ring", "exponential", "one-peer-exponential"))
@pytest.mark.parametrize("count", (3, 4, 7))
def test_exchanges_match_the_mixing_matrices(schedule: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever met whom and when: the states are those of W, the product of the pairs in the order in which they met."""
    swarm, pairs = GossipHarness(count, schedule=schedule, jitter=1), dict[str, tuple[int, int]]()
    for index, gossip in enumerate(swarm.gossips):
        before = gossip.exchanges.move

        async def move(exchange: Any, index: int = index, before: Any = before) -> None:
            await before(exchange)
            pairs[exchange.ask.name] = (index, int(exchange.partner.peer[1:]))

        monkeypatch.setattr(gossip.exchanges, "move", move)
    swarm.rounds(3, stagger_seconds=0.1)
    expected = pairwise(count, list(pairs.values())) @ torch.stack(swarm.first)
    assert float((torch.stack([flat(each) for each in swarm.state]) - expected).abs().max()) < 2e-6
    assert swarm.drift() < 1e-6 and len(pairs) >= count
    counted = [name for index in range(count) for name in swarm.messages(index)]
    assert len(counted) == len(set(counted)) == 2 * len(pairs), "each state that was sent counts once"


def test_swarm_converges() -> None:
    swarm = GossipHarness(8)
    before = swarm.spread()
    swarm.rounds(8, stagger_seconds=0.13)
    assert swarm.spread() < 0.1 * before and swarm.drift() < 1e-6
    assert all(told.mean.outcome is Outcome.COMMITTED for each in swarm.told for told in each)
    assert max(told.ended - told.asked for each in swarm.told for told in each) < 2.5, "nobody waits for anybody's work"


def test_state_is_lent_during_training() -> None:
    """The exchange moves it in place; it is told when the state is taken back, and a round in which nobody else came
    is committed by it."""
    swarm = GossipHarness(2)
    lent = swarm.state[0]

    async def play() -> None:
        slow = swarm.start(0, swarm.round(0, train_seconds=30.0))
        fast = swarm.start(1, swarm.round(1))
        await asyncio.wait([fast])
        assert torch.equal(flat(lent), flat(swarm.state[1])), "while it still trains"
        await asyncio.wait([slow])

    swarm.run(play)
    told = swarm.told[0][0]
    assert list(told.early) == ["p1"] and told.mean.contributions == {}
    assert told.mean.outcome is Outcome.COMMITTED and torch.equal(flat(swarm.state[0]), flat(lent))
    assert swarm.told[1][0].ended < 2.0
    assert told.mean.weights == {"p0": 0.5, "p1": 0.5}


def test_single_peer_skips_at_once() -> None:
    swarm = GossipHarness(1)
    assert swarm.rounds() < 1.01
    assert swarm.told[0][0].mean.outcome is Outcome.SKIPPED and not swarm.told[0][0].mean.weights


def test_peer_between_rounds_answers_busy_at_once() -> None:
    """The other one asks on while nobody else is there, for as long as one exchange may take, and skips."""
    swarm = GossipHarness(2)

    async def play() -> None:
        await swarm.start(1, swarm.round(1))

    swarm.run(play)
    told = swarm.told[1][0]
    assert told.mean.outcome is Outcome.SKIPPED and told.ended - told.asked < 3.0 and not told.mean.blamed
    assert not swarm.moved(0) and not swarm.moved(1)


@pytest.mark.parametrize("jitter", range(12))
def test_simultaneous_requests_become_one_exchange(jitter: int) -> None:
    swarm = GossipHarness(2, jitter=jitter)
    swarm.rounds()
    assert all(len(swarm.messages(index)) == 1 for index in range(2))
    assert max(each[0].ended - each[0].asked for each in swarm.told) < 0.5


@pytest.mark.parametrize("jitter", range(6))
@pytest.mark.parametrize("count", (3, 5))
def test_cycle_of_requests_does_not_deadlock(count: int, jitter: int) -> None:
    """Everybody asks the next one at the same moment."""
    swarm = GossipHarness(count, schedule="ring", jitter=jitter)
    swarm.rounds()
    met = [bool(swarm.messages(index)) for index in range(count)]
    assert sum(met) >= count - 1 and swarm.drift() < 1e-6
    assert max(each[0].ended - each[0].asked for each in swarm.told) < 2.5


def test_crossing_requests_are_ranked_fairly() -> None:
    key = RoundKey(RUN, "run", bytes(32), 0)
    asked = [
        [ExchangeRequest(key, Member(peer), number, 8, "fp32").rank() for number in range(40)] for peer in ("p0", "p1")
    ]
    first = sum(one < other for one, other in zip(*asked, strict=True))
    assert 8 < first < 32


def test_cut_comes_with_the_work_or_at_deadline() -> None:
    swarm = GossipHarness(1)

    async def play() -> None:
        loop = asyncio.get_running_loop()
        async with swarm.gossips[0].enter(head(0), loop.time() + 7.0) as session:
            session.offer(replace(DONE, complete=False))
            assert not session.cut.is_set()
            await session.cut.wait()
            assert loop.time() == 7.0
        async with swarm.gossips[0].enter(head(1), loop.time() + 7.0) as session:
            session.offer(replace(DONE, complete=False, leaving=True))
            assert session.cut.is_set() and session.round == 1 and session.group == ""

    swarm.run(play)


def test_non_finite_state_is_not_sent() -> None:
    swarm = GossipHarness(2)
    swarm.state[0][1][3] = torch.inf  # and not NaN, which is not even equal to itself
    swarm.rounds()
    assert not swarm.moved(1) and all(told.mean.outcome is Outcome.SKIPPED for (told,) in swarm.told)


def test_invalid_settings_are_rejected() -> None:
    network = SimNetwork(Trace())
    host = sim_host(network, network.join("p0"), 0, {})
    with pytest.raises(ValueError, match="unknown schedule 'torus'"):
        Gossip(host, Settings("fp32", (8,), schedule="torus"))
    with pytest.raises(ValueError, match="unknown codec"):
        Gossip(host, Settings("fp8", (8,)))


# -- what goes wrong --------------------------------------------------------------------------------------------------


def count_messages(count: int, jitter: int) -> dict[str, int]:
    """How many messages each peer sends and receives in a round without faults."""
    swarm = GossipHarness(count, jitter=jitter)
    swarm.rounds()
    return {name: swarm.network.nodes[name].messages for name in swarm.names}


def struck(swarm: GossipHarness, faults: Faults) -> None:
    """One round of everybody, with these faults."""

    async def play() -> None:
        Injector(faults, swarm.network, Hearsay(), lambda peer: None).start()
        await asyncio.wait([swarm.start(index, swarm.round(index)) for index in range(swarm.count)])

    swarm.run(play)


def is_whole(swarm: GossipHarness, index: int, others: list[int]) -> bool:
    """Its state is as it was, or the mean with one of the others: all of it, parameters and momentum."""
    now = flat(swarm.state[index])
    means = [swarm.first[index], *((swarm.first[index] + swarm.first[other]) / 2 for other in others)]
    return any(float((now - each).abs().max()) < 1e-6 for each in means)


@pytest.mark.parametrize("victim", (0, 1))
def test_partner_death_at_any_message_keeps_survivor_whole(victim: int) -> None:
    survivor = 1 - victim
    for number in range(1, count_messages(2, 3)[f"p{victim}"] + 1):
        swarm = GossipHarness(2, jitter=3)
        struck(swarm, Faults().crash(f"p{victim}", at_message=number))
        assert is_whole(swarm, survivor, [victim]), f"at message {number}"
        (told,) = swarm.told[survivor]
        assert told.ended - told.asked < 3.0, f"it cost more than one timeout at message {number}"
        assert swarm.moved(survivor) == bool(swarm.messages(survivor))


@pytest.mark.parametrize("jitter", (3, 4))
def test_stream_reset_at_any_message_is_atomic(jitter: int) -> None:
    """Both live, and can ask each other what became of it; only of the last word nobody knows whether it came."""
    for victim in range(2):
        doubts = 0
        for number in range(1, count_messages(2, jitter)[f"p{victim}"] + 1):
            swarm = GossipHarness(2, jitter=jitter)
            struck(swarm, Faults().reset(f"p{victim}", at_message=number))
            assert swarm.moved(0) == swarm.moved(1), f"at message {number} of p{victim}"
            assert is_whole(swarm, 0, [1]) and is_whole(swarm, 1, [0])
            assert swarm.drift() < 1e-6
            doubts += sum(gossip.half_exchanges for gossip in swarm.gossips)
        assert doubts == 1


@pytest.mark.parametrize("both", (True, False))
def test_partner_silence_at_any_message_costs_one_timeout(both: bool) -> None:
    """Then either both have moved or neither, or somebody knows that one end may have moved alone."""
    for number in range(1, count_messages(2, 3)["p0"] + 1):
        faults = Faults()
        at = At("p0", number)
        faults = faults.silence({"p0"}, {"p1"}, at) if both else faults.silence_one_way("p0", "p1", at)
        swarm = GossipHarness(2, jitter=3)
        struck(swarm, faults)
        for index in range(2):
            (told,) = swarm.told[index]
            assert told.ended - told.asked < 5.0, f"at message {number}"
            assert is_whole(swarm, index, [1 - index])
        if swarm.moved(0) != swarm.moved(1):
            assert sum(gossip.half_exchanges for gossip in swarm.gossips) > 0, f"at message {number}"
            drifts = [told.mass_drift for each in swarm.told for told in each if told.half_exchanges]
            half = float((swarm.first[0] - swarm.first[1]).norm()) / 2
            assert not drifts or max(drifts) > 0.999 * half / max(float(first.norm()) for first in swarm.first)


@pytest.mark.parametrize("times, counts", ((15.9, True), (16.1, False)))
def test_state_beyond_sixteen_times_our_norm_is_rejected(times: float, counts: bool) -> None:
    swarm = GossipHarness(2)
    for theirs, ours in zip(swarm.state[1], swarm.state[0], strict=True):
        theirs.copy_(ours).mul_(times)
    swarm.rounds()
    assert swarm.moved(0) == counts
    assert counts or any("16 times ours" in blame.why for told in swarm.told[0] for blame in told.mean.blamed)


def test_dead_partner_delays_no_other_peers() -> None:
    """p0 asks p1, who has stopped without a word; p2 and p3 meet as if nothing was."""
    swarm = GossipHarness(4)
    swarm.network.link("p1", "p0").blocked = swarm.network.link("p1", "p2").blocked = True
    swarm.network.link("p1", "p3").blocked = True

    async def play() -> None:
        await asyncio.wait([swarm.start(index, swarm.round(index)) for index in (0, 2, 3)])

    swarm.run(play)
    for index in (0, 2, 3):
        (told,) = swarm.told[index]
        assert told.ended - told.asked < 3.0
    assert sum(bool(swarm.messages(index)) for index in (0, 2, 3)) >= 2


def test_peer_that_timed_out_is_avoided_briefly() -> None:
    swarm = GossipHarness(2)
    swarm.network.link("p1", "p0").blocked = True

    async def play() -> None:
        await swarm.start(0, swarm.round(0, 0, train_seconds=0.1))
        await swarm.start(0, swarm.round(0, 1, train_seconds=0.1))

    swarm.run(play)
    first, second = swarm.told[0]
    assert first.mean.blamed[0].peer == "p1" and "did not answer in time" in first.mean.blamed[0].why
    assert 1.9 < first.ended - first.asked < 3.0 and second.ended - second.asked < 0.01


def test_link_slower_than_claimed_gets_more_time() -> None:
    """200 KB at 5 KB/s where 1 MB/s was said: forty seconds and more."""
    swarm = GossipHarness(2, 25_000, chunk_elements=5_000)
    for node in swarm.network.nodes.values():
        node.slowness = 200.0

    async def play() -> None:
        for number in range(60):
            await asyncio.wait([swarm.start(index, swarm.round(index, number, 10.0)) for index in range(2)])
            if swarm.messages(0):
                return

    swarm.run(play)
    assert swarm.messages(0) and swarm.drift() < 1e-6
    assert all(each.ended - each.asked < ROUND_SECONDS for told in swarm.told for each in told)


def test_cancelled_round_leaves_its_state_unchanged() -> None:
    """Cancelled at any moment of an exchange: what it lent does not change after that."""
    for hundredths in range(1, 30, 2):
        swarm, seen = GossipHarness(2, 400), list[torch.Tensor]()

        async def leaving(
            swarm: GossipHarness = swarm, seconds: float = 1.0 + hundredths / 100, seen: Any = seen
        ) -> None:
            try:
                async with asyncio.timeout(seconds):
                    await swarm.lending(0, 50.0)
            except TimeoutError:
                seen.append(flat(swarm.state[0]))

        async def play(swarm: GossipHarness = swarm, leaving: Callable[..., Any] = leaving) -> None:
            await asyncio.wait([swarm.start(0, leaving()), swarm.start(1, swarm.round(1))])

        swarm.run(play)
        assert torch.equal(flat(swarm.state[0]), seen[0])
        assert swarm.moved(0) == swarm.moved(1) and is_whole(swarm, 0, [1])


# -- liars ------------------------------------------------------------------------------------------------------------


def liar(lie: str) -> Callable[[str, FramedStream, SimPipe], ByzantineContributorStream]:
    return lambda method, stream, pipe: ByzantineContributorStream(stream, pipe, lie, None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "lie", ("nan", "infinity", "norm", "size", "huge-length", "endless-header", "garbage", "twice")
)
@pytest.mark.parametrize("seed", range(2))
def test_lying_partner_is_blamed_and_nothing_moves(lie: str, seed: int) -> None:
    swarm = GossipHarness(2, codec="fp32", disguises={1: liar(lie)}, jitter=seed)
    swarm.rounds()
    (told,) = swarm.told[0]
    assert not swarm.moved(0) and told.mean.outcome is Outcome.SKIPPED
    assert told.mean.blamed[0].peer == "p1" and told.mean.blamed[0].why.startswith("refused")
    assert told.ended - told.asked < 15.0


class Forger(ByzantineContributorStream):
    """Alters one kind of message on its way out."""

    def __init__(self, stream: FramedStream, pipe: SimPipe, kind: type, change: Callable[[Any], Any]) -> None:
        super().__init__(stream, pipe, "", None)  # type: ignore[arg-type]
        self._kind, self._change = kind, change

    async def send(self, header: Any, payload: Any = b"") -> None:
        await self._stream.send(self._change(header) if isinstance(header, self._kind) else header, payload)


FORGERIES: dict[str, tuple[type, Callable[[Any], Any]]] = {
    "another's question": (ExchangeRequest, lambda ask: replace(ask, sender=Member("p7"))),
    "another run": (ExchangeRequest, lambda ask: replace(ask, key=replace(ask.key, run=bytes(32)))),
    "another scope": (ExchangeRequest, lambda ask: replace(ask, key=replace(ask.key, scope="stage/1"))),
    "another size": (ExchangeRequest, lambda ask: replace(ask, elements=ask.elements + 1)),
    "another codec": (ExchangeRequest, lambda ask: replace(ask, codec="fp16")),
    "another answer": (ExchangeReply, lambda answer: replace(answer, sequence=answer.sequence + 1)),
    "an answer of another": (ExchangeReply, lambda answer: replace(answer, sender=Member("p7"))),
    "a last word of another round": (StateReceived, lambda word: replace(word, key=replace(word.key, round=9))),
    "no last word": (StateReceived, lambda word: wire.Availability(True)),
}


def play_late(swarm: GossipHarness, late: int) -> None:
    """One round of each; one of them trains for longer."""

    async def play() -> None:
        await asyncio.wait(
            [swarm.start(index, swarm.round(index, 0, 1.0 + 20 * (index == late))) for index in range(2)]
        )

    swarm.run(play)


@pytest.mark.parametrize("forgery", FORGERIES)
def test_forged_messages_are_rejected_and_blamed(forgery: str) -> None:
    kind, change = FORGERIES[forgery]
    named = False
    for late in (0, 1):  # the other one asks
        swarm = GossipHarness(2, disguises={1: lambda method, stream, pipe: Forger(stream, pipe, kind, change)})
        play_late(swarm, late)
        (told,) = swarm.told[0]
        named |= any(blame.peer == "p1" and blame.why.startswith("refused") for blame in told.mean.blamed)
        if late == 0 and kind is ExchangeRequest:
            assert not swarm.moved(0)
    assert named


async def knock(swarm: GossipHarness, *messages: ExchangeMessage) -> list[str]:
    """p1, without any honest code, says these to p0, each on a stream of its own; what comes back."""
    loop, found = asyncio.get_running_loop(), []
    for message in messages:
        try:
            transport = swarm.network.transports["p1"]
            async with transport.open("p0", EXCHANGE, loop.time() + 3.0) as stream:
                await stream.send(message)
                answer = await stream.receive(HEADER_LIMIT)
            found.append(str(getattr(answer, "accepted", getattr(answer, "moved", None))))
        except PeerError:
            found.append("refused")
    return found


def play_knocks(
    *messages: ExchangeMessage, prepare: Callable[[GossipHarness], None] = lambda swarm: None
) -> tuple[GossipHarness, list[str]]:
    swarm, found = GossipHarness(2), list[str]()
    prepare(swarm)

    async def play() -> None:
        lending = swarm.start(0, swarm.lending(0, 60.0))
        await asyncio.sleep(0.1)
        found.extend(await swarm.start(1, knock(swarm, *messages)))
        await asyncio.wait([lending])

    swarm.run(play)
    return swarm, found


KEY = RoundKey(RUN, "run", bytes(32), 5)
QUESTION = ExchangeRequest(KEY, Member("p1"), 100, 48, "fp32")


def blamed(swarm: GossipHarness) -> str:
    return " ".join(f"{blame.peer} {blame.why}" for blame in swarm.gossips[0].accounting.take()[0])


def test_request_counts_once() -> None:
    swarm, found = play_knocks(QUESTION, QUESTION)
    assert found == ["True", "refused"] and "p1 refused: question 100 is asked again" in blamed(swarm)


def test_stale_request_is_rejected_but_overtaken_one_accepted() -> None:
    swarm, found = play_knocks(QUESTION, replace(QUESTION, sequence=99), replace(QUESTION, sequence=20))
    assert found == ["True", "True", "refused"] and "question 20 is stale" in blamed(swarm)


def test_request_of_earlier_round_is_rejected() -> None:
    later = replace(QUESTION, sequence=101, key=replace(KEY, round=4))
    swarm, found = play_knocks(QUESTION, later)
    assert found == ["True", "refused"] and "after one of round 5" in blamed(swarm)


def test_request_of_other_incarnation_is_rejected_without_blame() -> None:
    swarm, found = play_knocks(replace(QUESTION, sender=Member("p1", 3)))
    assert found == ["refused"] and blamed(swarm) == "", "it may be late, and honest"


def test_outcome_query_before_request_settles_nothing() -> None:
    _, found = play_knocks(OutcomeQuery(KEY, Member("p1"), 100), QUESTION)
    assert found == ["False", "True"]


def test_outcome_not_moved_is_binding() -> None:
    """Its question what became of it overtakes its last word, which then comes too late."""
    swarm, found = GossipHarness(2), list[str]()

    async def initiator() -> None:
        loop, exchanges = asyncio.get_running_loop(), swarm.gossips[1].exchanges
        async with swarm.network.transports["p1"].open("p0", EXCHANGE, loop.time() + 3.0) as stream:
            await stream.send(QUESTION)
            await stream.receive(HEADER_LIMIT)
            await StateSwap(VectorView(swarm.state[1]), exchanges.codec, 16, exchanges.host.compute).transfer(stream)
            found.extend(await knock(swarm, OutcomeQuery(KEY, Member("p1"), QUESTION.sequence)))
            with pytest.raises(PeerError):
                await stream.send(StateReceived(KEY, Member("p1"), QUESTION.sequence))
                await stream.receive(HEADER_LIMIT)

    async def play() -> None:
        lending = swarm.start(0, swarm.lending(0, 20.0))
        await asyncio.sleep(0.1)
        await swarm.start(1, initiator())
        await asyncio.wait([lending])

    swarm.run(play)
    assert found == ["False"] and not swarm.moved(0) and swarm.told[0][0].early == {}


def test_only_a_request_opens_an_exchange() -> None:
    swarm, found = play_knocks(StateReceived(KEY, Member("p1"), 1), OutcomeReply(KEY, Member("p1"), 1, True))
    assert found == ["refused"] * 2 and "opens no exchange" in blamed(swarm)


def test_silent_initiator_costs_only_its_own_exchange() -> None:
    """p1 asks and is silent: p0 is free again after one timeout, and p1 is left alone then."""
    swarm = GossipHarness(2)
    found: list[str] = []

    async def silent() -> None:
        loop = asyncio.get_running_loop()
        async with swarm.network.transports["p1"].open("p0", EXCHANGE, loop.time() + 50.0) as stream:
            await stream.send(QUESTION)
            await stream.receive(HEADER_LIMIT)
            assert swarm.gossips[0].exchanges.exchange
            await asyncio.sleep(4.0)
            assert swarm.gossips[0].exchanges.exchange is None
            found.extend(await knock(swarm, replace(QUESTION, sequence=101)))

    async def play() -> None:
        lending = swarm.start(0, swarm.lending(0, 20.0))
        await asyncio.sleep(0.1)
        await asyncio.wait([swarm.start(1, silent()), lending])

    swarm.run(play)
    assert found == ["False"] and not swarm.moved(0)
