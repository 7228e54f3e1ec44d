"""Liars against the vote: what they say is refused, they are named, and the others decide the same."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

import pytest

from protocols.base import Head, Member, Outcome, PeerError, PeerId, RoundKey
from protocols.butterfly.averager import CONTROL
from protocols.consensus.messages import Accept, Prepare, Promise, Propose, VoteMessage
from protocols.consensus.record import coordinators
from protocols.history.chain import genesis
from tests.sim.averaging import RUN, Averaged, ButterflyHarness
from tests.sim.byzantine.voters import forged, made_up
from tests.sim.host import sim_host
from tests.sim.network import SimNetwork
from tests.support.example_vectors import equal_norm_vectors
from tests.support.long import diagonal

COUNT = 4
PEERS = tuple(f"p{index:02}" for index in range(COUNT))
ROSTER = tuple(Member(peer) for peer in PEERS)
HEAD: Head = genesis(RUN, "run", ROSTER, bytes(32))
FIRST = PEERS.index(coordinators(HEAD.key.lineage, ROSTER)[0])
"""Who coordinates ballot 0."""
OTHERS = tuple(index for index in range(COUNT) if index != FIRST)


def average(
    lies: dict[int, str] | None = None,
    before: Callable[[SimNetwork], None] = lambda network: None,
    codec: str = "fp32",
) -> Averaged:
    given = equal_norm_vectors(COUNT, 4000, seed=5)
    group = ButterflyHarness(
        given, [1000] * COUNT, [1e7] * COUNT, codec=codec, chunk_elements=256, lies=lies or {}, before=before
    )
    return group.average()


def agreed(averaged: Averaged, honest: list[int]) -> bool:
    """Whether all honest peers committed the same record, and the same bits."""
    return (
        {averaged.means[index].outcome for index in honest} == {Outcome.COMMITTED}
        and len({averaged.means[index].record for index in honest}) == 1
        and len({averaged.results[index].numpy().tobytes() for index in honest}) == 1
    )


def named(averaged: Averaged, peer: PeerId, why: str) -> list[PeerId]:
    """Who named a peer, for this reason."""
    return [
        PEERS[index]
        for index, mean in enumerate(averaged.means)
        if any(blame.peer == peer and why in blame.why for blame in mean.blamed)
    ]


def blamed(averaged: Averaged, honest: list[int]) -> set[PeerId]:
    return {blame.peer for index in honest for blame in averaged.means[index].blamed}


@diagonal("liar, codec", range(COUNT), ("fp32", "int8"))
def test_reducer_signing_two_results_is_blamed(liar: int, codec: str) -> None:
    """By everybody who was given one and fetched the other; and the vote is on one of them."""
    averaged = average({liar: "two-parts"}, codec=codec)
    honest = [index for index in range(COUNT) if index != liar]
    assert agreed(averaged, honest)
    convicting = named(averaged, PEERS[liar], "signed two different results")
    dupe = honest[-1]
    fetched = [index for index in honest if index != dupe] if dupe == FIRST else [dupe]
    assert set(convicting) >= {PEERS[index] for index in fetched}, f"{PEERS[liar]} was convicted by {convicting}"
    assert blamed(averaged, honest) == {PEERS[liar]}


@diagonal(
    "lie, liar",
    (
        ("forged-certificate", "a certificate with invalid votes"),
        ("usurped-plan", "which does not coordinate ballot 0"),
    ),
    OTHERS,
)
def test_lying_voter_is_rejected_and_blamed(lie: tuple[str, str], liar: int) -> None:
    """And the round is committed with its work, which was no lie. What it says comes before all is decided."""
    name, why = lie

    def hasty(network: SimNetwork) -> None:
        for peer in PEERS:
            network.link(PEERS[liar], peer).latency_seconds = 0.001

    averaged = average({liar: name}, hasty)
    honest = [index for index in range(COUNT) if index != liar]
    assert agreed(averaged, honest)
    assert len(averaged.means[honest[0]].peers) == COUNT
    naming = named(averaged, PEERS[liar], why)
    assert set(naming) == {PEERS[index] for index in honest}, f"{PEERS[liar]} was named by {naming}"
    assert blamed(averaged, honest) == {PEERS[liar]}


# -- votes of who has none --------------------------------------------------------------------------------------------


def votes(key: RoundKey, sender: Member) -> dict[str, VoteMessage]:
    record = made_up(key, [sender])
    return {
        "accept": Accept(key, sender, 0, bytes(32), bytes(32)),
        "promise": Promise(key, sender, 1, 0, b"", bytes(32), ()),
        "prepare": Prepare(key, sender, 1, ()),
        "propose": Propose(key, sender, 0, record),
    }


def speaking(peer: PeerId, message: VoteMessage) -> Callable[[SimNetwork], None]:
    """What makes a peer, or a stranger of that name, say something to everybody as the round begins."""

    def before(network: SimNetwork) -> None:
        transport = network.transports.get(peer) or network.join(peer)
        host, loop = sim_host(network, transport, 1, {}), asyncio.get_running_loop()

        async def say(to: PeerId) -> None:
            with suppress(PeerError):
                async with host.transport.open(to, CONTROL, loop.time() + 30.0) as stream:
                    await stream.send(message)
                    await stream.receive(64)

        network.said = [loop.create_task(say(to)) for to in PEERS if to != peer]  # type: ignore[attr-defined]

    return before


@pytest.mark.parametrize("kind", ("accept", "promise", "prepare", "propose"))
def test_vote_of_non_member_is_rejected_and_blamed(kind: str) -> None:
    averaged = average(before=speaking("zoe", votes(HEAD.key, Member("zoe"))[kind]))
    assert agreed(averaged, list(range(COUNT)))
    assert len(averaged.means[0].peers) == COUNT
    assert set(named(averaged, "zoe", "a vote of a peer outside the roster")) == set(PEERS)
    assert blamed(averaged, list(range(COUNT))) == {"zoe"}


def test_idle_skip_while_others_work_is_rejected() -> None:
    """It is what a coordinator proposes when everybody rests. Nobody votes for it, and the round has its mean."""
    skip = Propose(HEAD.key, Member(PEERS[FIRST]), 0, made_up(HEAD.key, ROSTER))
    averaged = average(before=speaking(PEERS[FIRST], skip))
    assert agreed(averaged, list(range(COUNT))) and len(averaged.means[0].peers) == COUNT
    assert set(named(averaged, PEERS[FIRST], "proposed to skip a round in which this member has work")) == {
        PEERS[index] for index in OTHERS
    }


@pytest.mark.parametrize("voters", ((), ROSTER, ROSTER[:3]))
def test_non_member_certificate_is_rejected_and_blamed(voters: tuple[Member, ...]) -> None:
    """Whatever votes the certificate claims to have."""
    averaged = average(before=speaking("zoe", forged(HEAD.key, Member("zoe"), ROSTER, voters)))
    assert agreed(averaged, list(range(COUNT)))
    assert set(named(averaged, "zoe", "a certificate with invalid votes")) == set(PEERS)
    assert blamed(averaged, list(range(COUNT))) == {"zoe"}


def test_certificate_of_invalid_record_is_rejected_and_blamed() -> None:
    """It would leave a stranger alone with the lineage."""
    zoe = Member("zoe")
    averaged = average(before=speaking("zoe", forged(HEAD.key, zoe, [zoe], ROSTER)))
    assert agreed(averaged, list(range(COUNT)))
    assert set(named(averaged, "zoe", "a certificate of a record that may not be decided")) == set(PEERS)
    assert blamed(averaged, list(range(COUNT))) == {"zoe"}
