"""Moshpit among liars: what they announce, call and contribute is refused and blamed, and the others commit."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
import torch

from protocols.allreduce.all_reduce import Reducer
from protocols.allreduce.parts import part_message
from protocols.base import Buffer, Header, PeerId
from protocols.moshpit.grid import seeded_order
from protocols.moshpit.matchmaker import GroupMatchmaker
from protocols.moshpit.peer_tracker import DONE, TRAINING, PositionAnnouncement, group_key
from protocols.streams.framing import FramedStream
from protocols.wire import Chunk, Offer, PartDone, Plan, Reduced
from tests.sim.averaging import RUN, AveragingSwarm, RoundResult, killing
from tests.sim.host import SimSigner
from tests.sim.network import SimNetwork
from tests.support.disguises import Disguise, changing, changing_kind, sending
from tests.support.moshpit import (
    assert_groups_hold_same_bits,
    blames_of,
    moshpit_swarm,
    outcomes,
    part_from_another_member,
)


def test_state_with_other_norm_is_excluded_and_blamed() -> None:
    """A state ten times as long is none of this run; the others average without it."""
    swarm = moshpit_swarm(4)
    for vector in swarm.states[2]:
        vector.mul_(10.0)
    histories = swarm.average()
    blames = [blame for history in histories.values() for blame in history[0].mean.blamed]
    assert any(blame.peer == "p02" and "norm" in blame.why for blame in blames), (
        "by others, or by itself if it called the group"
    )
    assert outcomes(histories["p02"]) == ["skipped"]
    for peer in ("p00", "p01", "p03"):
        assert histories[peer][0].mean.peers == ("p00", "p01", "p03")


def test_group_uses_the_runs_averaging_rule() -> None:
    """With the mean, a state with its sign turned is a fifth of the result; with the median it is excluded."""
    far = {}
    for rule in ("mean", "median"):
        swarm = moshpit_swarm(5, robust=rule)
        swarm.tokens = [1000] * 5
        for vector in swarm.states[4]:
            vector.neg_()
        honest = torch.stack([torch.cat(state) for state in swarm.states[:4]]).mean(0)
        histories = swarm.average()
        far[rule] = float((torch.cat(histories["p00"][0].state) - honest).norm() / honest.norm())
        assert bool(blames_of(histories, "p04")) == (rule == "median")
    assert far["median"] < 0.9 * far["mean"]


# -- frames that are refused ------------------------------------------------------------------------------------------


def disguised(swarm: AveragingSwarm, disguises: dict[PeerId, Disguise]) -> AveragingSwarm:
    """The swarm, in which these peers send what their disguises make of their messages."""

    def dress(network: SimNetwork) -> None:
        for peer, disguise in disguises.items():
            network.transports[peer].disguise = disguise

    swarm.before = dress
    return swarm


def play_with_lying_caller(disguise: Disguise) -> dict[PeerId, list[RoundResult]]:
    """One round of three peers. The caller of their group, p02, has this disguise."""
    swarm = moshpit_swarm(3)
    assert seeded_order(group_key(RUN, "run", 0, (8,), 0, (0,)).lineage, swarm.names)[0] == "p02"
    return disguised(swarm, {"p02": disguise}).average()


@pytest.mark.parametrize("silent, outcome", ((2, "committed"), (3, "skipped")))
def test_silent_callers_are_skipped_up_to_a_limit(silent: int, outcome: str) -> None:
    """They send no plan, and announce that they wait."""

    async def send_no_plan(stream: FramedStream, header: Header, payload: Buffer) -> None:
        if not isinstance(header, Plan) and not (isinstance(header, PositionAnnouncement) and header.stage == DONE):
            await stream.send(header, payload)

    swarm = moshpit_swarm(7)
    order = seeded_order(group_key(RUN, "run", 0, (8,), 0, (0,)).lineage, swarm.names)
    histories = disguised(swarm, dict.fromkeys(order[:silent], sending(send_no_plan))).average()
    assert {outcomes(histories[peer])[0] for peer in order[silent:]} == {outcome}
    assert all(histories[peer][0].seconds < 10.0 for peer in order[silent:])


def test_caller_cannot_assign_one_part_twice() -> None:
    """Otherwise honest members would hold different results under one name of the group."""

    def two_ways(peer: PeerId, header: Header) -> Header:
        if isinstance(header, Plan) and peer == "p01":
            return replace(header, ballot=1, reducers=(1, 1, 2))
        return header

    assert_groups_hold_same_bits(play_with_lying_caller(changing(two_ways)))


# -- contributions, reduced parts and announcements -------------------------------------------------------------------


def test_state_exceeding_its_declared_norm_is_excluded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that declares the norm of the others and contributes ten times as much is excluded."""
    signed = GroupMatchmaker._signed

    def understated(matchmaker: GroupMatchmaker) -> Offer:
        if matchmaker._moshpit.me.peer == "p01":
            matchmaker._contribution = replace(matchmaker._contribution, norm=matchmaker._contribution.norm / 10)
        return signed(matchmaker)

    monkeypatch.setattr(GroupMatchmaker, "_signed", understated)
    swarm = moshpit_swarm(4, elements=3000)
    for vector in swarm.states[1]:
        vector.mul_(10.0)
    histories = swarm.average()
    assert any("norm above" in why for why in blames_of(histories, "p01"))
    for peer in ("p00", "p02", "p03"):
        share = histories[peer][0].mean.contributions["p01"]
        assert share.chunks_counted <= share.chunks / 4, "of the part that it reduces"


def signing_as(swarm: AveragingSwarm, liar: PeerId, reducer: PeerId, of_part: int | None = None) -> Disguise:
    """The disguise of a peer that states parts, or those of one reducer only, as made and signed by this reducer."""

    def under_another_name(peer: PeerId, header: Header) -> Header:
        if not isinstance(header, PartDone) or of_part not in (None, header.reducer):
            return header
        (data_phase,) = swarm.averagers[liar]._moshpit.data_phases.values()
        false = replace(header, reducer=data_phase.resolved.peers.index(reducer))
        message = part_message(data_phase.key, data_phase.resolved.digest, false)
        return replace(false, signature=SimSigner(reducer, 1).sign(message))

    return changing(under_another_name)


def test_part_signed_as_another_reducer_is_rejected() -> None:
    """Otherwise a reducer could make two versions of a part without a trace, and members that forward one would be
    blamed."""
    swarm = moshpit_swarm(3)
    histories = disguised(swarm, {"p02": signing_as(swarm, "p02", "p00")}).average()
    assert any("did not make" in why for why in blames_of(histories, "p02"))
    assert not blames_of(histories, "p00") and not blames_of(histories, "p01")
    assert outcomes(histories["p00"]) == outcomes(histories["p01"]) == ["skipped"]


def test_forwarded_part_needs_its_reducers_signature() -> None:
    """Its reducer is dead, and the member that forwards it could have made it."""
    number, giver, taker = part_from_another_member()
    swarm = moshpit_swarm(3, elements=60)

    def dress(network: SimNetwork) -> None:
        killing("p01", number)(network)
        network.transports[giver].disguise = signing_as(swarm, giver, giver, of_part=1)

    swarm.before = dress
    histories = swarm.average()
    assert outcomes(histories[taker]) == ["skipped"] and outcomes(histories[giver]) == ["committed"]
    assert any("did not make" in why for why in blames_of(histories, giver))


def test_mean_without_contributors_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The only contributor reduces everything, and states that another peer contributed it."""
    close = Reducer._close

    def without_contributor(reducer: Reducer, index: int) -> tuple[int, dict[PeerId, str]]:
        mask, refused = close(reducer, index)
        reducer._digests[-1] = reducer.part.digest_of(index, mask ^ 3)
        return mask ^ 3, refused

    monkeypatch.setattr(Reducer, "_close", without_contributor)
    swarm = moshpit_swarm(2)
    swarm.tokens = [0, 1000]
    histories = swarm.average()
    assert outcomes(histories["p00"]) == ["skipped"] and any(
        "without any contribution" in why for why in blames_of(histories, "p01")
    )


def test_peer_always_about_to_come_is_awaited_less() -> None:
    """It announces that it trains in the others' round, and for how long: like a slow peer."""
    swarm = moshpit_swarm(4, train_seconds=(10.0,) * 4)
    fields = {"axis": 0, "stage": TRAINING, "holds": 1, "follows": "", "offer": (), "step_seconds": 1e3}
    always_training = changing_kind(
        PositionAnnouncement, lambda announcement: replace(announcement, round=len(swarm.histories["p00"]), **fields)
    )
    histories = disguised(swarm, {"p01": always_training}).average(rounds=5)
    for peer in ("p00", "p02", "p03"):
        assert histories[peer][0].seconds > 15.0, "otherwise no peer waited"
        assert histories[peer][-1].seconds < 12.0, [result.seconds for result in histories[peer]]


def never_sending(kind: type[Header]) -> Disguise:
    """The disguise of a peer whose messages of this kind never leave."""

    async def send(stream: FramedStream, header: Header, payload: Buffer) -> None:
        if isinstance(header, kind):
            await asyncio.Event().wait()
        await stream.send(header, payload)

    return sending(send)


def play_beside(
    kind: type[Header], count: int, seconds: float, rounds: int, **options: Any
) -> dict[PeerId, list[RoundResult]]:
    """Rounds of peers that train for this long. The last but one never sends messages of this kind."""
    swarm = moshpit_swarm(count, elements=60_000, chunk_elements=4096, train_seconds=(seconds,) * count, **options)
    return disguised(swarm, {swarm.names[-2]: never_sending(kind)}).average(rounds=rounds)


@pytest.mark.parametrize("kind, seconds, committed, late", ((Reduced, 5.0, 5, 8), (Chunk, 3.0, 8, 4)))
def test_peer_withholding_data_does_not_spoil_every_group(
    kind: type[Header], seconds: float, committed: int, late: int
) -> None:
    """A reducer would stop all averaging in a swarm of one group, and each failure would raise the budgets. For late
    contributions a group waits for half of its budget, which is seconds at least."""
    histories = play_beside(kind, 4, seconds, 8)
    for peer in ("p00", "p01", "p03"):
        assert outcomes(histories[peer]).count("committed") >= committed
        assert sum(result.seconds > 2 * seconds for result in histories[peer]) <= late
    assert blames_of(histories, "p02")
    assert_groups_hold_same_bits(histories)


def test_stalled_contributor_counts_as_late_not_silent() -> None:
    """A claimed bandwidth near zero stretches the budget: a group of two would have no mean before its round ends."""
    histories = play_beside(Chunk, 2, 3.0, 1, claims=(1.0, 12.5e6), round_seconds=600.0)
    assert outcomes(histories["p01"]) == ["committed"]
    assert any("late" in why for why in blames_of(histories, "p00"))
