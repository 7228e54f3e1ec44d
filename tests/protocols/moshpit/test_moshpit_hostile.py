"""Moshpit among liars: what they say, call and hand in is refused, and they are named; the others come through."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

import pytest
import torch

from protocols.allreduce.parts import chunk_digest, part_message
from protocols.allreduce.plan import PlanInputs, make_plan, offer_message
from protocols.allreduce.reducer import Reducer
from protocols.base import Buffer, Header, Member, PeerId
from protocols.framing import FramedStream
from protocols.moshpit.grid import seeded_order
from protocols.moshpit.matchmaker import GroupMatchmaker
from protocols.moshpit.peer_tracker import DONE, TRAINING, PositionAnnouncement, group_key
from protocols.wire import Chunk, Contribute, Offer, PartDone, Plan, Reduced, WantPart
from tests.protocols.moshpit.test_moshpit import death_of, handed_on, named, outcomes, same_bits_in_a_group, swarm
from tests.sim.host import SimSigner
from tests.sim.moshpit_harness import RUN, MoshpitHarness, Told
from tests.sim.network import SimNetwork

LOSSES = ("nan", "infinity", "norm", "size", "huge-length", "endless-header", "garbage", "twice", "codec", "stale")


@pytest.mark.parametrize("lie", LOSSES)
def test_liar_is_blamed_and_others_commit(lie: str) -> None:
    pits = swarm(4, elements=3000, lies={1: lie})
    before = {peer: torch.cat(state) for peer, state in zip(pits.peers, pits.states, strict=True)}
    histories = pits.play(rounds=2)
    assert named(histories, "p01"), lie
    for peer in ("p00", "p02", "p03"):
        assert outcomes(histories[peer]) == ["committed"] * 2
        state = torch.cat(histories[peer][-1].states)
        assert bool(torch.isfinite(state).all()) and float(state.norm()) < 2 * float(before[peer].norm())


def test_state_with_other_norm_is_excluded_and_blamed() -> None:
    """Ten times as long is no state of this run; the others average without it."""
    pits = swarm(4)
    for vector in pits.states[2]:
        vector.mul_(10.0)
    histories = pits.play()
    said = [blame for history in histories.values() for blame in history[0].mean.blamed]
    assert any(blame.peer == "p02" and "norm" in blame.why for blame in said), "by others, or by itself as their caller"
    assert outcomes(histories["p02"]) == ["skipped"]
    for peer in ("p00", "p01", "p03"):
        assert histories[peer][0].mean.peers == ("p00", "p01", "p03")


def test_group_uses_the_runs_averaging_rule() -> None:
    """By the mean a state with its sign turned is a fifth of what all hold."""
    far = {}
    for rule in ("mean", "median"):
        pits = swarm(5, robust=rule)
        pits.tokens = [1000] * 5
        for vector in pits.states[4]:
            vector.neg_()
        honest = torch.stack([torch.cat(state) for state in pits.states[:4]]).mean(0)
        histories = pits.play()
        far[rule] = float((torch.cat(histories["p00"][0].states) - honest).norm() / honest.norm())
        assert bool(named(histories, "p04")) == (rule == "median")
    assert far["median"] < 0.9 * far["mean"]


def test_token_weight_is_capped_at_sixteen_medians() -> None:
    pits = swarm(5)
    pits.tokens = [1000] * 4 + [10**6]
    histories = pits.play()
    for peer in pits.peers[:4]:
        assert histories[peer][0].mean.weights["p04"] == 16_000
    assert named(histories, "p04")


# -- frames that are refused -------------------------------------------------------------------------------------------


Change: TypeAlias = Callable[[PeerId, Header], Header]
"""To whom, what the truth is -> what is said."""


class Twisted:
    """A stream whose owner says everything as `change` puts it."""

    def __init__(self, stream: FramedStream, change: Change) -> None:
        self._stream, self._change = stream, change

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    async def send(self, header: Header, payload: Buffer = b"") -> None:
        await self._stream.send(self._change(self._stream.peer, header), payload)


def twist(pits: MoshpitHarness, peer: PeerId, change: Change) -> None:
    """From the start, that peer says everything as `change` puts it."""

    def dress(network: SimNetwork) -> None:
        network.transports[peer].disguise = lambda method, stream, pipe: Twisted(stream, change)

    pits.before = dress


def spoken(change: Change) -> dict[PeerId, list[Told]]:
    """One round of three, of whom p02, which is the one to call the others, says everything as `change` puts it."""
    pits = swarm(3)
    assert seeded_order(group_key(RUN, "run", 0, (8,), 0, (0,)).lineage, pits.peers)[0] == "p02"
    twist(pits, "p02", change)
    return pits.play()


def of_kind(kind: type[Header], change: Callable[[Any], Header]) -> Change:
    return lambda peer, header: change(header) if isinstance(header, kind) else header


def forged(message: Any, field: str) -> Any:
    """A message whose offers nobody signed."""
    offers = tuple(replace(offer, signature=b"forged") for offer in getattr(message, field))
    return replace(message, **{field: offers})


def forged_first(plan: Plan) -> Plan:
    return replace(plan, offers=(replace(plan.offers[0], signature=b"forged"), *plan.offers[1:]))


def many_times(plan: Plan) -> Plan:
    """With its caller in so many lives that it alone is the median, signed by it all of them."""
    (mine,) = [offer for offer in plan.offers if offer.member.peer == "p02"]
    lives = [replace(mine, member=Member("p02", life), tokens=1) for life in range(1, 6)]
    signer = SimSigner("p02", 1)
    offers = [replace(offer, signature=signer.sign(offer_message(plan.key, offer))) for offer in lives]
    return make_plan(PlanInputs(plan.key, plan.bounds[-1], 4.0), [*plan.offers, *offers], 0.0)


def without_you(plan: Plan) -> Plan:
    return replace(plan, offers=plan.offers[-1:], bounds=plan.bounds[:1] + plan.bounds[-1:], reducers=(0,))


@pytest.mark.parametrize(
    "change, why",
    (
        (of_kind(PositionAnnouncement, lambda here: replace(here, run=bytes(32))), "another run"),
        (of_kind(PositionAnnouncement, lambda here: replace(here, scope="other")), "another run or scope"),
        (of_kind(PositionAnnouncement, lambda here: replace(here, sender=Member("p01"))), "says where p01 is"),
        (of_kind(PositionAnnouncement, lambda here: replace(here, index=(31,))), "stands at"),
        (of_kind(PositionAnnouncement, lambda here: forged(here, "offer")), "forged signature"),
        (of_kind(Plan, lambda plan: forged(plan, "offers")), "our own offer"),
        (of_kind(Plan, forged_first), "a forged offer of p00"),
        (of_kind(Plan, without_you), "our own offer"),
        (of_kind(Plan, many_times), "p02 is in it twice"),
        (of_kind(Plan, lambda plan: replace(plan, budget_seconds=1e5)), "times are not those"),
        (of_kind(Plan, lambda plan: replace(plan, reducers=(2, 2, 2))), "parts are not those"),
        (of_kind(Plan, lambda plan: replace(plan, ballot=1, reducers=(2, 2, 2))), "a second plan"),
        (of_kind(Plan, lambda plan: replace(plan, version=1, reducers=(2, 2, 2))), "a second plan"),
        (of_kind(PositionAnnouncement, lambda here: WantPart(bytes(32))), "on a control stream"),
        (of_kind(Contribute, lambda opening: replace(opening, key=replace(opening.key, run=bytes(32)))), "another run"),
        (of_kind(Contribute, lambda opening: replace(opening, codec="bf16")), "codec"),
    ),
)
def test_lying_frame_is_rejected_and_sender_blamed(change: Change, why: str) -> None:
    histories = spoken(change)
    assert any(why in said for said in named(histories, "p02")), named(histories, "p02")
    assert {"p00", "p01"} <= set(histories["p00"][0].mean.peers) or outcomes(histories["p00"]) == ["skipped"]
    assert all(told.seconds < 30.0 for peer in ("p00", "p01") for told in histories[peer])


def test_caller_sending_forged_plan_is_excluded() -> None:
    """The others give it up, and the next one calls."""
    histories = spoken(of_kind(Plan, lambda plan: forged(plan, "offers")))
    assert histories["p00"][0].mean.peers == histories["p01"][0].mean.peers == ("p00", "p01")
    assert outcomes(histories["p02"]) == ["skipped"]


class Mute(Twisted):
    """A stream of one that calls nobody, and says that it waits."""

    async def send(self, header: Header, payload: Buffer = b"") -> None:
        if not isinstance(header, Plan) and not (isinstance(header, PositionAnnouncement) and header.stage == DONE):
            await self._stream.send(header, payload)


@pytest.mark.parametrize("mute, outcome", ((2, "committed"), (3, "skipped")))
def test_silent_callers_are_skipped_up_to_a_limit(mute: int, outcome: str) -> None:
    pits = swarm(7)
    order = seeded_order(group_key(RUN, "run", 0, (8,), 0, (0,)).lineage, pits.peers)

    def dress(network: SimNetwork) -> None:
        for peer in order[:mute]:
            network.transports[peer].disguise = lambda method, stream, pipe: Mute(stream, lambda peer, header: header)

    pits.before = dress
    histories = pits.play()
    assert {outcomes(histories[peer])[0] for peer in order[mute:]} == {outcome}
    assert all(histories[peer][0].seconds < 10.0 for peer in order[mute:])


def test_caller_cannot_assign_one_part_twice() -> None:
    """Each of the honest would hold what another made of it, under one name of the group."""

    def two_ways(peer: PeerId, header: Header) -> Header:
        if isinstance(header, Plan) and peer == "p01":
            return replace(header, ballot=1, reducers=(1, 1, 2))
        return header

    same_bits_in_a_group(spoken(two_ways))


# -- what is handed in, given back and said of oneself -----------------------------------------------------------------


def test_state_exceeding_its_declared_norm_is_excluded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who declares what the others have and hands in ten times that is out."""
    signed = GroupMatchmaker._signed

    def understated(matchmaker: GroupMatchmaker) -> Offer:
        if matchmaker._context.me.peer == "p01":
            matchmaker._contribution = replace(matchmaker._contribution, norm=matchmaker._contribution.norm / 10)
        return signed(matchmaker)

    monkeypatch.setattr(GroupMatchmaker, "_signed", understated)
    pits = swarm(4, elements=3000)
    for vector in pits.states[1]:
        vector.mul_(10.0)
    histories = pits.play()
    assert any("norm above" in why for why in named(histories, "p01"))
    for peer in ("p00", "p02", "p03"):
        share = histories[peer][0].mean.contributions["p01"]
        assert share.chunks_counted <= share.chunks / 4, "of the part that it reduces"


def test_part_signed_as_another_reducer_is_rejected() -> None:
    """Another's signature makes two parts of one possible without a trace, and those whom its taker hands it to would
    blame the taker."""
    pits = swarm(3)

    def under_another_name(peer: PeerId, header: Header) -> Header:
        if not isinstance(header, PartDone):
            return header
        (mixing,) = pits.averagers["p02"]._moshpit.mixings.values()
        false = replace(header, reducer=0)
        return replace(
            false, signature=SimSigner("p00", 1).sign(part_message(mixing.key, mixing.resolved.digest, false))
        )

    twist(pits, "p02", under_another_name)
    histories = pits.play()
    assert any("did not make" in why for why in named(histories, "p02"))
    assert not named(histories, "p00") and not named(histories, "p01")
    assert outcomes(histories["p00"]) == outcomes(histories["p01"]) == ["skipped"]


def test_forwarded_part_needs_its_reducers_signature() -> None:
    """Where its reducer died: who hands it on could have made it."""
    number, giver, taker = handed_on()
    pits, kill = swarm(3, elements=60), death_of("p01", number)

    def its_own(peer: PeerId, header: Header) -> Header:
        if not isinstance(header, PartDone) or header.reducer != 1:
            return header
        (mixing,) = pits.averagers[giver]._moshpit.mixings.values()
        false = replace(header, reducer=mixing.resolved.peers.index(giver))
        return replace(
            false, signature=SimSigner(giver, 1).sign(part_message(mixing.key, mixing.resolved.digest, false))
        )

    def dress(network: SimNetwork) -> None:
        kill(network)
        network.transports[giver].disguise = lambda method, stream, pipe: Twisted(stream, its_own)

    pits.before = dress
    histories = pits.play()
    assert outcomes(histories[taker]) == ["skipped"] and outcomes(histories[giver]) == ["committed"]
    assert any("did not make" in why for why in named(histories, giver))


def test_mean_without_contributors_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The only one with work, who reduces all there is, says that it is the other's."""
    close = Reducer._close

    def nobodys(reducer: Reducer, index: int) -> tuple[int, dict[PeerId, str]]:
        mask, refused = close(reducer, index)
        reducer._digests[-1] = chunk_digest(mask ^ 3, reducer.held.chunk(index))
        return mask ^ 3, refused

    monkeypatch.setattr(Reducer, "_close", nobodys)
    pits = swarm(2)
    pits.tokens = [0, 1000]
    histories = pits.play()
    assert outcomes(histories["p00"]) == ["skipped"] and any("without any contribution" in why for why in named(histories, "p01"))


def test_repeated_leaving_claim_shortens_one_round() -> None:
    """A round that is called at once is one step of training."""
    pits = swarm(4, train_seconds=(10.0,) * 4)
    twist(pits, "p01", of_kind(PositionAnnouncement, lambda here: replace(here, leaving=True)))
    histories = pits.play(rounds=4)
    for peer in ("p00", "p02", "p03"):
        assert all(told.seconds > 9.0 for told in histories[peer][1:]), [told.seconds for told in histories[peer]]


def test_peer_always_about_to_come_is_awaited_less() -> None:
    """It says that it trains in the round of the others, and for how long: nobody can tell it from one that is slow."""
    pits = swarm(4, train_seconds=(10.0,) * 4)
    word = {"axis": 0, "stage": TRAINING, "holds": 1, "follows": "", "offer": (), "step_seconds": 1e3}
    twist(
        pits, "p01", of_kind(PositionAnnouncement, lambda here: replace(here, round=len(pits.histories["p00"]), **word))
    )
    histories = pits.play(rounds=5)
    for peer in ("p00", "p02", "p03"):
        assert histories[peer][0].seconds > 15.0, "or nobody waited"
        assert histories[peer][-1].seconds < 12.0, [told.seconds for told in histories[peer]]


class Withholding:
    """A stream on which no reduced chunk is ever sent."""

    def __init__(self, stream: FramedStream) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    async def send(self, header: Header, payload: Buffer = b"") -> None:
        if isinstance(header, Reduced):
            await asyncio.Event().wait()
        await self._stream.send(header, payload)


def beside(
    stream_of: type[Withholding], count: int, seconds: float, rounds: int, **options: Any
) -> dict[PeerId, list[Told]]:
    """What peers told that train for so long, of whom the last but one has such streams."""
    pits = swarm(count, elements=60_000, train_seconds=(seconds,) * count, **options)

    def dress(network: SimNetwork) -> None:
        network.transports[pits.peers[-2]].disguise = lambda method, stream, pipe: stream_of(stream)

    pits.before = dress
    return pits.play(rounds=rounds)


def test_withholding_reducer_does_not_spoil_every_group() -> None:
    """It would end all averaging in a swarm of one group, and with each time budgets grow."""
    histories = beside(Withholding, 4, 5.0, 8)
    for peer in ("p00", "p01", "p03"):
        assert outcomes(histories[peer]).count("committed") >= 5
    assert named(histories, "p02")
    same_bits_in_a_group(histories)


class Stalling(Withholding):
    """A stream on which no chunk of its own is ever sent."""

    async def send(self, header: Header, payload: Buffer = b"") -> None:
        if isinstance(header, Chunk):
            await asyncio.Event().wait()
        await self._stream.send(header, payload)


def test_stalling_contributor_does_not_delay_every_group() -> None:
    """A group waits for what is late for half of its budget, which is seconds at least."""
    histories = beside(Stalling, 4, 3.0, 8)
    for peer in ("p00", "p01", "p03"):
        assert sum(told.seconds > 6.0 for told in histories[peer]) <= 4, [told.seconds for told in histories[peer]]
        assert outcomes(histories[peer]).count("committed") == 8
    assert named(histories, "p02")
    same_bits_in_a_group(histories)


def test_stalled_contributor_counts_as_late_not_silent() -> None:
    """A claim of next to nothing stretches both; a group of two would have no mean at all before its round is over."""
    histories = beside(Stalling, 2, 3.0, 1, claims=(1.0, 12.5e6), round_seconds=600.0)
    assert outcomes(histories["p01"]) == ["committed"]
    assert any("late" in why for why in named(histories, "p00"))
