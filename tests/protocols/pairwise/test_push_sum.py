"""Push-sum between peers: mass stays whatever becomes of streams, and nobody holds anybody up."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import pytest
import torch

from protocols.allreduce.parts import ReducedPart
from protocols.base import Member, Outcome, Settings
from protocols.codec import CODECS
from protocols.pairwise import share_sender as giving
from protocols.pairwise.push_sum import PushSum
from protocols.pairwise.share_receiver import MAX_TAKING
from protocols.pairwise.share_sender import split_share
from protocols.pairwise.shares import PUSH, PushShare
from protocols.vectors import VectorView
from tests.sim.byzantine.contributors import ByzantineContributorStream
from tests.sim.faults import Faults
from tests.sim.faults import Message as At
from tests.sim.gossip_harness import DONE, ROUND_SECONDS, GossipHarness, flat, head
from tests.sim.host import Hearsay, sim_host
from tests.sim.injection import Injector
from tests.sim.network import SimNetwork, Trace

REST_SECONDS = 60.0
"""Who cost a timeout may be spoken to again."""


def pushers(count: int, **options: Any) -> GossipHarness:
    return GossipHarness(count, protocol=PushSum, **options)


def weights(swarm: GossipHarness) -> list[float]:
    return [each.weighted.masses.weight for each in swarm.gossips]


def mass(swarm: GossipHarness) -> torch.Tensor:
    """Σ w·z over everybody."""
    return torch.stack([w * flat(state) for w, state in zip(weights(swarm), swarm.state, strict=True)]).sum(0)


def is_conserved(swarm: GossipHarness) -> bool:
    """Nothing is under way any more, and all is as it was."""
    assert not any(each.share_sender.kept for each in swarm.gossips)
    off = float((mass(swarm) - torch.stack(swarm.first).sum(0)).abs().max())
    return abs(sum(weights(swarm)) - swarm.count) < 1e-12 and off < 1e-5 * swarm.count


def play(swarm: GossipHarness, faults: Faults, rounds: int = 1, healed: int = 0) -> None:
    """So many rounds of everybody with these faults, then more without."""

    async def life(index: int, first: int, count: int) -> None:
        for number in range(first, first + count):
            await swarm.round(index, number)

    async def main() -> None:
        injector = Injector(faults, swarm.network, Hearsay(), lambda peer: None)
        injector.start()
        await asyncio.wait([swarm.start(index, life(index, 0, rounds)) for index in range(swarm.count)])
        await asyncio.sleep(5.0)
        if healed:
            injector.heal()
            await asyncio.sleep(REST_SECONDS)
            await asyncio.wait([swarm.start(index, life(index, rounds, healed)) for index in range(swarm.count)])
            await asyncio.sleep(REST_SECONDS)
            await settle(swarm, rounds + healed)

    swarm.run(main)


async def settle(swarm: GossipHarness, number: int) -> None:
    """One last round of each while the others are there: what became of all that was given is known then."""
    for index in range(swarm.count):
        others = [swarm.start(other, swarm.lending(other, 30.0)) for other in range(swarm.count) if other != index]
        await swarm.start(index, swarm.round(index, number))
        await asyncio.wait(others)


def test_share_moves_only_the_receiver() -> None:
    swarm = pushers(2)

    async def main() -> None:
        lending = swarm.start(0, swarm.lending(0, 30.0))
        await swarm.start(1, swarm.round(1))
        await asyncio.wait([lending])

    swarm.run(main)
    assert weights(swarm) == [1.5, 0.5] and not swarm.moved(1)
    expected = (swarm.first[0] + swarm.first[1] / 2) / 1.5
    assert float((flat(swarm.state[0]) - expected).abs().max()) < 1e-6
    assert is_conserved(swarm)
    (told,) = swarm.told[1]
    assert told.mean.outcome is Outcome.SKIPPED and told.ended - told.asked < 1.0, "nobody has given it anything"
    assert swarm.messages(0) == ["p1.0/0 to p0.0"]


def test_swarm_converges() -> None:
    swarm = pushers(6)
    before = swarm.spread()
    play(swarm, Faults(), rounds=10)
    assert is_conserved(swarm) and swarm.spread() < 0.1 * before
    counted = [name for index in range(6) for name in swarm.messages(index)]
    assert len(counted) == len(set(counted)) > 40
    assert max(each.ended - each.asked for told in swarm.told for each in told) < 1.0


@pytest.mark.parametrize("name", sorted(CODECS))
def test_sender_keeps_the_codec_loss(name: str) -> None:
    """Half of the state and what stays of it are the state, to the rounding of float32."""
    grain = CODECS[name].grain
    elements, chunk = 5 * grain + 30, grain * max(1, 64 // grain)
    given = torch.randn(elements, generator=torch.Generator().manual_seed(1)) + 1.0
    state, part = given.clone(), ReducedPart(CODECS[name], 0, elements, chunk)
    split_share(VectorView([state]), part)
    sent, room = torch.empty(elements), part.room()
    for index in range(part.chunks):
        low, high = part.elements(index)
        part.decode_chunk(index, None, room)
        sent[low:high] = room[: high - low]
    assert name == "fp32" or not torch.equal(sent, given)
    assert float(((state.double() + sent) / 2 - given).abs().max()) < 1e-6


@pytest.mark.parametrize("victim", (0, 1))
def test_stream_reset_at_any_message_conserves_mass(victim: int) -> None:
    calm = pushers(2, jitter=3)
    play(calm, Faults())
    for number in range(1, calm.network.nodes[f"p{victim}"].messages + 1):
        swarm = pushers(2, jitter=3)
        play(swarm, Faults().reset(f"p{victim}", at_message=number), healed=2)
        assert is_conserved(swarm), f"at message {number}"


@pytest.mark.parametrize("both", (True, False))
def test_silence_at_any_message_conserves_mass(both: bool) -> None:
    calm = pushers(2, jitter=3)
    play(calm, Faults())
    for number in range(1, calm.network.nodes["p0"].messages + 1, 1 + both):
        at = At("p0", number)
        faults = Faults().silence({"p0"}, {"p1"}, at) if both else Faults().silence_one_way("p0", "p1", at)
        swarm = pushers(2, jitter=3)
        play(swarm, faults, healed=3)
        assert is_conserved(swarm), f"at message {number}"
        assert all(each.ended - each.asked < 5.0 for told in swarm.told for each in told)


async def until_counted(swarm: GossipHarness) -> None:
    """Until p1 has counted what p0 gave, of which p0 does not know yet."""
    while swarm.gossips[1].weighted.masses.weight == 1.0:  # noqa: ASYNC110 - it tells nobody
        await asyncio.sleep(0.001)


def test_share_for_former_incarnation_returns_to_sender() -> None:
    swarm = pushers(2)

    async def main() -> None:
        lending = swarm.start(1, swarm.lending(1, 50.0))
        giving = swarm.start(0, swarm.round(0))
        await until_counted(swarm)
        swarm.network.block("p1", "p0")
        await asyncio.wait([giving])
        assert swarm.gossips[0].weighted.masses.weight == 0.5
        swarm.network.kill("p1")
        await asyncio.wait([lending])
        swarm.network.heal("p1", "p0")
        swarm.network.restart("p1")
        await asyncio.sleep(5.0)
        await swarm.start(0, swarm.round(0, 1))

    swarm.run(main)
    assert swarm.gossips[0].weighted.masses.weight == 1.0 and not swarm.gossips[0].share_sender.kept
    second = swarm.told[0][1]
    assert second.mean.outcome is Outcome.COMMITTED and list(second.mean.contributions) == ["p0"], "its own, of before"
    assert float((flat(swarm.state[0]) - swarm.first[0]).abs().max()) < 1e-6


def test_share_for_departed_peer_returns_and_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(giving, "BURIAL_SECONDS", 20.0)
    swarm = pushers(2)

    async def main() -> None:
        lending = swarm.start(1, swarm.lending(1, 50.0))
        giving = swarm.start(0, swarm.round(0))
        await until_counted(swarm)
        swarm.network.block("p1", "p0")
        await asyncio.wait([giving, lending])
        for number in range(1, 6):
            await swarm.start(0, swarm.round(0, number, train_seconds=10.0))

    swarm.run(main)
    assert swarm.gossips[0].weighted.masses.weight == 1.0 and swarm.gossips[0].half_exchanges == 1
    assert sum(told.half_exchanges for told in swarm.told[0]) == 1
    assert sum(told.mass_drift for told in swarm.told[0]) == 0.5


def test_receiver_without_state_declines_the_share() -> None:
    """p1 is between two rounds, p2 trains: it is given to p2."""
    swarm = pushers(3)

    async def main() -> None:
        lending = swarm.start(2, swarm.lending(2, 30.0))
        await swarm.start(0, swarm.round(0))
        await asyncio.wait([lending])

    swarm.run(main)
    assert weights(swarm) == [0.5, 1.0, 1.5] and is_conserved(swarm)


@pytest.mark.parametrize("lie", ("nan", "infinity", "norm", "size", "garbage"))
def test_liar_is_rejected_and_blamed(lie: str) -> None:
    disguise = {1: lambda method, stream, pipe: ByzantineContributorStream(stream, pipe, lie, None)}  # type: ignore[arg-type]
    swarm = pushers(2, disguises=disguise)
    swarm.rounds()
    (told,) = swarm.told[0]
    assert not swarm.moved(0) and told.mean.blamed[0].peer == "p1" and told.mean.blamed[0].why.startswith("refused")


def test_sender_of_invalid_share_gets_no_more() -> None:
    """Each share takes half of what is left to us along."""
    disguise = {1: lambda method, stream, pipe: ByzantineContributorStream(stream, pipe, "norm", None)}  # type: ignore[arg-type]
    swarm = pushers(2, disguises=disguise)
    swarm.rounds(4)
    refused = [number for number, told in enumerate(swarm.told[0]) if told.mean.blamed]
    assert refused == [0] and weights(swarm)[0] >= 0.25


@pytest.mark.parametrize(
    "change, why",
    [
        (lambda give: replace(give, weight=1e6), "a share of weight 1e"),
        (lambda give: replace(give, sender=Member("p7")), "in the name of p7"),
        (lambda give: replace(give, elements=give.elements + 1), "elements"),
        (lambda give: replace(give, codec="fp16"), "codec"),
        (lambda give: replace(give, key=replace(give.key, run=bytes(32))), "another run"),
    ],
)
def test_impossible_share_is_rejected_and_blamed(change: Any, why: str) -> None:
    class Forger(ByzantineContributorStream):
        async def send(self, header: Any, payload: Any = b"") -> None:
            await self._stream.send(change(header) if isinstance(header, PushShare) else header, payload)

    disguise = {1: lambda method, stream, pipe: Forger(stream, pipe, "", None)}  # type: ignore[arg-type]
    swarm = pushers(2, disguises=disguise)
    swarm.rounds()
    (told,) = swarm.told[0]
    assert not swarm.moved(0) and any(why in blame.why for blame in told.mean.blamed)


def test_busy_receiver_answers_before_whole_state_is_sent() -> None:
    """p1 is between two rounds; the state is 4.8 MB, of which 1 MiB is under way at most."""
    swarm = pushers(2, elements=600_000, chunk_elements=100_000)
    swarm.run(lambda: swarm.round(0))  # type: ignore[arg-type, return-value]
    (told,) = swarm.told[0]
    assert weights(swarm) == [1.0, 1.0] and is_conserved(swarm) and not told.mean.blamed
    assert told.ended - told.asked < 1.0 and told.mean.bytes_sent < 2e6


async def hang(swarm: GossipHarness, count: int, peer: str = "p1") -> None:
    """It promises p0 so many shares, and sends none."""
    loop, key = asyncio.get_running_loop(), head(0).key
    async with AsyncExitStack() as stack:
        for number in range(count):
            opened = swarm.network.transports[peer].open("p0", PUSH, loop.time() + 1e5)
            stream = await stack.enter_async_context(opened)
            await stream.send(PushShare(key, Member(peer), number, Member("p0"), 0.5, 48, "fp32"))
        await asyncio.sleep(ROUND_SECONDS)


def test_stalled_sender_takes_one_slot_then_is_refused() -> None:
    swarm = pushers(3)

    async def main() -> None:
        lending = swarm.start(0, swarm.lending(0, 90.0))
        hanging = swarm.start(1, hang(swarm, 2 * MAX_TAKING))
        await asyncio.sleep(1.0)
        assert len(swarm.network.nodes["p0"].ends) == 1
        await swarm.start(2, swarm.round(2))
        assert weights(swarm) == [1.5, 1.0, 0.5]
        await asyncio.sleep(1.0)
        assert not swarm.network.nodes["p0"].ends
        again = swarm.start(1, hang(swarm, 1))
        await asyncio.sleep(1.0)
        assert not swarm.network.nodes["p0"].ends
        again.cancel()
        await asyncio.wait([lending, hanging, again])

    swarm.run(main)


def test_concurrent_incoming_shares_are_bounded() -> None:
    """Each takes the memory of a state, and identities cost nothing."""
    swarm = pushers(MAX_TAKING + 3)

    async def main() -> None:
        lending = swarm.start(0, swarm.lending(0, 20.0))
        hanging = [swarm.start(index, hang(swarm, 1, f"p{index}")) for index in range(1, swarm.count)]
        await asyncio.sleep(1.0)
        assert len(swarm.network.nodes["p0"].ends) == MAX_TAKING
        await asyncio.wait([lending, *hanging])

    swarm.run(main)


def test_non_finite_state_is_not_sent() -> None:
    swarm = pushers(2)
    swarm.state[0][1][3] = torch.inf  # and not NaN, which is not even equal to itself
    swarm.rounds()
    assert not swarm.moved(1) and swarm.told[1][0].mean.outcome is Outcome.SKIPPED and not swarm.told[0][0].mean.blamed


def test_unsent_share_returns_and_unreachable_peer_rests() -> None:
    """No stream can be opened to p1: not a byte of the share has reached it."""
    swarm = pushers(2)
    swarm.network.link("p1", "p0").blocked = True

    async def main() -> None:
        for number in range(2):
            await swarm.start(0, swarm.round(0, number, train_seconds=0.1))

    swarm.run(main)
    assert weights(swarm) == [1.0, 1.0] and is_conserved(swarm)
    first, second = swarm.told[0]
    assert first.mean.blamed[0].peer == "p1" and first.ended - first.asked < 3.0
    assert second.ended - second.asked < 0.01


def test_finished_round_asks_nothing_about_shares() -> None:
    swarm = pushers(2)

    async def late() -> None:
        loop = asyncio.get_running_loop()
        async with swarm.gossips[0].enter(head(1), loop.time() + 20.0) as session:
            session.share(swarm.state[0])
            await asyncio.sleep(20.0)  # who cost a timeout may be spoken to again
            sent = swarm.network.nodes["p0"].messages
            await session.average(swarm.state[0], DONE, [torch.empty_like(each) for each in swarm.state[0]])
            assert loop.time() - session.deadline < 0.01 and swarm.network.nodes["p0"].messages == sent

    async def main() -> None:
        lending = swarm.start(1, swarm.lending(1, 60.0))
        giving = swarm.start(0, swarm.round(0))
        await until_counted(swarm)
        swarm.network.link("p1", "p0").blocked = True
        await asyncio.wait([giving])
        await swarm.start(0, late())
        await asyncio.wait([lending])

    swarm.run(main)


def test_broken_stream_does_not_change_the_link_estimate() -> None:
    swarm = pushers(2)
    before = swarm.gossips[0].weighted.patience.timeout_seconds("p1", 10**6)

    async def main() -> None:
        lending = swarm.start(1, swarm.lending(1, 60.0))
        giving = swarm.start(0, swarm.round(0))
        await until_counted(swarm)
        swarm.network.reset_streams("p0")
        await asyncio.wait([giving, lending])

    swarm.run(main)
    (told,) = swarm.told[0]
    assert told.mean.blamed[0].why == "no share: it did not say whether it has counted the share"
    assert swarm.gossips[0].weighted.patience.timeout_seconds("p1", 10**6) < before + 1.0


def test_stalled_peer_costs_only_its_own_timeout() -> None:
    """The lines to p1 are said to be very slow, and p1 is not to be spoken to; p2 takes a share and never says so."""

    class Mute(ByzantineContributorStream):
        async def send(self, header: Any, payload: Any = b"") -> None:
            await asyncio.Event().wait()

    swarm = pushers(3, disguises={2: lambda method, stream, pipe: Mute(stream, pipe, "", None)})  # type: ignore[arg-type]
    patience = swarm.gossips[0].weighted.patience
    for _ in range(12):
        patience.late("p1", 0.0, 1000.0)
        patience.took("p2", 384, 0.0, 1e-4)

    async def main() -> None:
        lending = swarm.start(2, swarm.lending(2, 60.0))
        await swarm.start(0, swarm.round(0))
        await asyncio.wait([lending])

    swarm.run(main)
    (told,) = swarm.told[0]
    assert 2.0 < told.ended - told.asked < 3.0


def test_invalid_settings_are_rejected() -> None:
    network = SimNetwork(Trace())
    with pytest.raises(ValueError, match="unknown schedule"):
        PushSum(sim_host(network, network.join("p0"), 0, {}), Settings("fp32", (8,), schedule="torus"))
