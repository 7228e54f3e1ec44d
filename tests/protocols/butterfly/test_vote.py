"""What a member's vote keeps of a round: its lead, the parts that it waits for, how long the majority is gone."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from protocols import wire
from protocols.allreduce.plan import BUDGET_FLOOR_SECONDS
from protocols.base import Member, Settings
from protocols.butterfly import round as round_module
from protocols.butterfly.averager import Butterfly
from protocols.butterfly.round import ASK_SECONDS
from protocols.butterfly.vote import COMPLETE_SECONDS, FORK_BUDGETS, LATE_SECONDS, RoundVote
from protocols.consensus import record as records
from protocols.consensus.messages import Accept, Certificate, Prepare, Propose
from protocols.consensus.record import Kind, Record, coordinators
from protocols.history.chain import genesis
from protocols.streams.endpoint import RoundAccounting
from protocols.wire import ChunkSpan, PartDigest
from tests.sim.averaging import RUN
from tests.sim.host import SimSigner
from tests.sim.swarm import SimSwarm
from tests.support.simulated import on_virtual_time, simulated

SETTINGS = Settings("fp32", (64,), 16)
ROSTER = tuple(Member(f"p{index}") for index in range(3))
HEAD = genesis(RUN, "run", ROSTER, bytes(32))
ORDER = coordinators(HEAD.key.lineage, ROSTER)
POST: Any = SimpleNamespace(send=lambda *_: None, round_trip_seconds={})
NO_PARTS: Any = SimpleNamespace(get=lambda digest: None, put=lambda lineage, part: None)


def vote_of(me: Member) -> RoundVote:
    host = SimpleNamespace(signer=SimSigner(me.peer, 1), removed=lambda peer: False)
    endpoint: Any = SimpleNamespace(me=me, host=host, settings=SETTINGS, accounting=RoundAccounting())
    return RoundVote(
        endpoint=endpoint,
        head=HEAD,
        may_vote=True,
        post=POST,
        part_cache=NO_PARTS,
        on_rival=lambda peer: None,
    )


def part(digest: bytes) -> Any:
    return SimpleNamespace(result=PartDigest(digest, ()))


def proposal(digest: bytes) -> Record:
    parts, peers = (PartDigest(digest, (ChunkSpan(4, 1),)),), (ROSTER[0].peer,)
    return replace(records.extend(HEAD, Kind.MEAN, ROSTER), parts=parts, peers=peers, bounds=(0, 64))


@on_virtual_time
async def test_later_promise_ends_the_lead() -> None:
    vote = vote_of(Member(ORDER[0]))
    vote.progress()
    assert vote.leading == 0
    for _ in range(2):
        vote.receive(ORDER[1], Prepare(HEAD.key, Member(ORDER[1]), 1, ()))
        assert vote.leading is None and vote.paxos.promised == 1


@on_virtual_time
async def test_vote_waits_for_the_parts_of_the_latest_proposal() -> None:
    vote = vote_of(Member(ORDER[2]))
    for ballot, digest in ((0, b"a" * 32), (1, b"b" * 32)):
        data = records.encode(proposal(digest))
        vote.receive(ORDER[ballot], Propose(HEAD.key, Member(ORDER[ballot]), ballot, data))
        assert (vote.wanted, vote.proposed) == ((digest,), data)
    vote.keep(part(b"a" * 32))
    assert vote.paxos.accepted is None
    vote.keep(part(b"b" * 32))
    assert vote.paxos.accepted and vote.paxos.accepted.data == data


@on_virtual_time
async def test_last_sign_of_life_counts() -> None:
    vote = vote_of(ROSTER[0])
    vote.hear("p1")
    await asyncio.sleep(2.5)
    vote.hear("p1")
    assert vote.heard == {"p1": asyncio.get_running_loop().time()}


@pytest.mark.parametrize("back", [False, True], ids=["alone all the time", "the majority came back"])
@on_virtual_time
async def test_fork_is_sought_after_an_unbroken_time_alone(back: bool) -> None:
    vote, alone, patience_seconds = vote_of(ROSTER[0]), {ROSTER[0]}, FORK_BUDGETS * BUDGET_FLOOR_SECONDS
    vote.seek_fork(alone, None)
    await asyncio.sleep(patience_seconds - 1.0)
    vote.seek_fork({*ROSTER} if back else alone, None)
    await asyncio.sleep(2.0)
    vote.seek_fork(alone, None)
    assert bool(vote.paxos.ballot) is not back
    await asyncio.sleep(patience_seconds)
    vote.seek_fork(alone, None)
    assert vote.paxos.ballot


@on_virtual_time
async def test_successors_of_the_whole_roster_wait_little() -> None:
    successors = {replace(member, incarnation=1) for member in ROSTER}
    vote = vote_of(Member("p0", 1))
    vote.observers = {member.peer: member for member in successors if member.peer != "p0"}
    vote.seek_fork(successors, None)
    await asyncio.sleep(COMPLETE_SECONDS)
    before = vote.paxos.ballot
    vote.seek_fork(successors, None)
    assert vote.forks_only and (before, bool(vote._fork)) == (0, True)


@pytest.mark.parametrize("votes_in_time", (False, True))
@on_virtual_time
async def test_member_without_vote_gets_certificate_after_decision(votes_in_time: bool) -> None:
    """It may not hear the coordinator. One that has voted makes the certificate itself."""
    vote, others = vote_of(Member(ORDER[0])), [vote_of(Member(peer)) for peer in ORDER[1:]]
    sent = list[tuple[str, type[Any]]]()
    vote._post = SimpleNamespace(send=lambda peer, message: sent.append((peer, type(message))))  # type: ignore[assignment]
    vote.progress()
    skip = records.extend(HEAD, Kind.SKIP, ROSTER)
    vote.propose(0, skip)
    value = vote.tally.value(0, records.encode(skip))
    assert value
    for other in others[: 1 + votes_in_time]:
        me = other.paxos.me
        vote.receive(me.peer, Accept(HEAD.key, me, 0, value.digest, other.tally.sign(value, me)))
    assert vote.certificate and (ORDER[2], Certificate) not in sent
    await asyncio.sleep(LATE_SECONDS)
    assert [peer for peer, kind in sent if kind is Certificate] == ([] if votes_in_time else [ORDER[2]])


@simulated(SimSwarm)
async def test_newcomer_is_answered_once_in_each_incarnation(swarm: SimSwarm) -> None:
    """By a peer that may only fork: the newcomer may have come after it asked for admission."""
    host, sent = swarm.join("p0"), list[str]()
    async with Butterfly(host, replace(SETTINGS, incarnation=1)).enter(HEAD, 100.0) as session:
        session.post.send = lambda peer, message: sent.append(peer)  # type: ignore[method-assign]
        for incarnation, answers in ((1, 1), (1, 1), (2, 2)):
            session.take("p1", wire.AdmissionRequest(HEAD.key, Member("p1", incarnation), HEAD.state_root))
            assert session.vote.observers == {"p1": Member("p1", incarnation)} and len(sent) == answers


@simulated(SimSwarm)
async def test_member_behind_asks_peers_ahead_in_turn(swarm: SimSwarm) -> None:
    """One answer is enough. The next peer is asked at once if the one that was asked is gone."""
    hosts = [swarm.join(member.peer) for member in ROSTER]
    averager, asked = Butterfly(hosts[0], SETTINGS), list[tuple[str, float]]()
    async with averager.enter(HEAD, 100.0) as session:
        session.post.send = lambda peer, message: asked.append((peer, swarm.now))  # type: ignore[method-assign]
        await asyncio.sleep(1.0)
        asked.clear()
        for peer in ("p1", "p2", "p1"):
            later = replace(HEAD.key, lineage=b"l" * 32, round=HEAD.key.round + 1)
            averager._take(peer, Prepare(later, Member(peer), 0, ()))
        await asyncio.sleep(ASK_SECONDS / 2)
        assert [peer for peer, _ in asked] == ["p1"]
        swarm.network.kill("p1")
        await asyncio.sleep(ASK_SECONDS / 4)
        assert [peer for peer, _ in asked] == ["p1", "p2"]
        await asyncio.sleep(4 * ASK_SECONDS)
        assert len(asked) == 2


@pytest.mark.parametrize(
    ("most", "seen", "asked"), ((4, ORDER, ORDER), (3, ORDER, ORDER[:2]), (3, ORDER[1:], ORDER[1:]))
)
def test_full_roster_is_asked_for_admission_sparingly(
    most: int, seen: tuple[str, ...], asked: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first coordinators that the observer sees: they also tell it what was decided."""
    monkeypatch.setattr(round_module, "MAX_ROSTER", most)
    swarm, sent = SimSwarm(), list[str]()

    async def test() -> None:
        hosts = [swarm.join(peer) for peer in ("zoe", *seen)]
        async with Butterfly(hosts[0], SETTINGS).enter(HEAD, 100.0) as session:
            session.post.send = lambda peer, message: sent.append(peer)  # type: ignore[method-assign]
            await asyncio.sleep(1.0)

    swarm.play(test)
    assert sent == list(asked)
