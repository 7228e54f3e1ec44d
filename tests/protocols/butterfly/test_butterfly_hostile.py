"""What a butterfly withstands: strangers and liars on its streams, attempts that are given up, rounds entered again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from protocols import wire
from protocols.allreduce.parts import ReducedPart, chunk_digest, seal
from protocols.base import (
    AveragingResult,
    BadPayload,
    Deadline,
    Head,
    Host,
    LocalProgress,
    Member,
    Outcome,
    PeerError,
    PeerId,
    Settings,
    Stream,
    Vector,
)
from protocols.butterfly.averager import CONTROL, Butterfly
from protocols.butterfly.part_cache import PARTS, fetch_part
from protocols.butterfly.session import ButterflySession
from protocols.codec import codec
from protocols.consensus import record as records
from protocols.consensus.messages import Propose
from protocols.consensus.record import Kind, Record, coordinators
from protocols.history.chain import genesis
from protocols.limits import REQUESTER_IDLE_SECONDS
from protocols.static_members import StaticMembers
from protocols.stream_limiter import MAX_STREAMS, MAX_STREAMS_OF_ONE
from protocols.vectors import norm
from tests.sim import loop as simloop
from tests.sim.butterfly_harness import RUN
from tests.sim.host import sim_host
from tests.sim.network import Node, SimNetwork
from tests.sim.pipe import SimPipe
from tests.sim.trace import Trace

STALE = 7.0
"""What is in the place of the mean before it comes."""


@dataclass
class Attempt:
    """What came of one attempt of one peer at the round."""

    peer: PeerId
    mean: AveragingResult
    into: Vector


@dataclass
class Company:
    """Peers in one network before their first round, and all attempts at it that have ended."""

    count: int
    settings: Settings
    network: SimNetwork = field(default_factory=lambda: SimNetwork(Trace()))
    attempts: list[Attempt] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.peers = tuple(f"p{index:02}" for index in range(self.count))
        self.head: Head = genesis(RUN, "run", tuple(Member(peer) for peer in self.peers), bytes(32))
        self.order = coordinators(self.head.key.lineage, self.head.roster)
        self.averagers = {
            peer: Butterfly(sim_host(self.network, self.network.join(peer), 1, {}), self.settings)
            for peer in self.peers
        }

    async def attempt(
        self,
        peer: PeerId,
        vector: Vector,
        tokens: int = 10,
        seconds: float = 100.0,
        complete: bool = True,
        meanwhile: Callable[[ButterflySession], Coroutine[Any, Any, None]] | None = None,
    ) -> Outcome:
        """Enter the round and average; `meanwhile` is called when it is entered."""
        into = torch.full_like(vector, STALE)
        work = LocalProgress(tokens, 0.0, 1.0, norm([vector]) if tokens else 0.0, complete=complete)
        deadline = asyncio.get_running_loop().time() + seconds
        async with self.averagers[peer].enter(self.head, deadline) as session, asyncio.TaskGroup() as group:
            if meanwhile:
                group.create_task(meanwhile(session))
            session.offer(work)
            await session.cut.wait()
            mean = await session.average([vector], work, [into])
        self.attempts.append(Attempt(peer, mean, into))
        return mean.outcome

    async def until_decided(self, peer: PeerId, elements: int) -> None:
        """Again and again, as a node does."""
        for number in range(4):
            outcome = await self.attempt(peer, torch.full((elements,), 1.0 + number / 10))
            if outcome not in (Outcome.UNDECIDED, Outcome.SUPERSEDED):
                return

    def named(self) -> dict[PeerId, set[str]]:
        """Who was named in any attempt, and why."""
        blames = [blame for attempt in self.attempts for blame in attempt.mean.blamed]
        return {blame.peer: {other.why for other in blames if other.peer == blame.peer} for blame in blames}

    def committed(self, *peers: PeerId) -> bool:
        """Whether just these ended with the same record and the same finite bits, none of them stale."""
        ended = {attempt.peer: attempt for attempt in self.attempts}
        last = list(ended.values())
        return (
            not self.network.bugs
            and sorted(ended) == sorted(peers)
            and {attempt.mean.outcome for attempt in last} == {Outcome.COMMITTED}
            and len({attempt.mean.record for attempt in last}) == 1
            and len({attempt.into.numpy().tobytes() for attempt in last}) == 1
            and not (last[0].into == STALE).any()
        )


# -- strangers and liars on streams -----------------------------------------------------------------------------------


def test_unexpected_control_frame_is_blamed_without_crash() -> None:
    """Nothing is due there: its sender is named, by all others, and they commit the round without it."""
    company = Company(3, Settings("fp32", (64,), 16))
    liar, honest = company.peers[-1], company.peers[:-1]

    async def answers(peer: PeerId, stream: Stream) -> None:
        await stream.send(wire.Availability(True))
        await asyncio.sleep(1.0)

    async def main() -> None:
        company.network.nodes[liar].handlers[CONTROL] = answers
        await asyncio.gather(*(company.attempt(peer, torch.ones(64)) for peer in honest))

    simloop.run(main())
    assert company.committed(*honest)
    for attempt in company.attempts:
        assert liar in {blame.peer for blame in attempt.mean.blamed}, f"{attempt.peer} named {attempt.mean.blamed}"
    assert set(company.named()) == {liar}


def test_non_members_cannot_hold_part_streams() -> None:
    """Who asks for nothing, or takes nothing, is sent away; so many are served at a time, and then others again."""
    company = Company(1, Settings("fp32", (1 << 22,)))
    network, (me,), lineage = company.network, company.peers, company.head.key.lineage
    stranger, held = sim_host(network, network.join("zoe"), 1, {}), _part(0, 1 << 22)
    others = [sim_host(network, network.join(name), 1, {}) for name in ("yan", "xia")]
    wanted = held.result
    assert wanted is not None

    async def stays(host: Host, asks: bool) -> None:
        with suppress(PeerError):
            async with host.transport.open(me, PARTS, asyncio.get_running_loop().time() + 1e5) as stream:
                if asks:
                    await stream.send(wire.WantPart(wanted.digest))
                await asyncio.sleep(1e5)

    async def streams(asks: bool, count: int, *hosts: Host) -> list[int]:
        """Held by us at first, and after that time."""
        tasks = [asyncio.get_running_loop().create_task(stays(host, asks)) for host in hosts for _ in range(count)]
        counts = []
        for seconds in (5.0, 2 * REQUESTER_IDLE_SECONDS):
            await asyncio.sleep(seconds)
            counts.append(len(network.nodes[me].ends))
        for task in tasks:
            task.cancel()
        return counts

    async def main() -> ReducedPart:
        company.averagers[me].part_cache.put(lineage, held)
        assert await streams(False, 4 * MAX_STREAMS, stranger) == [MAX_STREAMS_OF_ONE, 0]
        assert await streams(False, MAX_STREAMS, stranger, *others) == [MAX_STREAMS, 0]
        assert await streams(True, 1, stranger) == [1, 0]
        deadline = asyncio.get_running_loop().time() + 100.0
        return await fetch_part(stranger, me, wanted, held.codec, (0, held.high, held.chunk_elements), deadline)

    assert simloop.run(main()).result == wanted
    assert not network.bugs


def test_streams_reset_by_peer_are_reopened_with_backoff() -> None:
    """The one believes the other alive, who does not believe it, and sends it away: some tens of times in a minute."""
    opened: list[str] = []

    class Counting(SimNetwork):
        async def connect(self, node: Node, peer: PeerId, method: str, deadline: Deadline) -> SimPipe:
            opened.append(method)
            return await super().connect(node, peer, method, deadline)

    company = Company(2, Settings("fp32", (64,), 16), Counting(Trace(), latency_seconds=0.001))
    ours, theirs = company.peers
    endpoint = company.averagers[theirs]._endpoint
    endpoint.host = replace(endpoint.host, members=StaticMembers([Member(theirs)]))

    async def main() -> None:
        await company.attempt(ours, torch.ones(64), seconds=60.0)

    simloop.run(main())
    assert 2 <= opened.count(CONTROL) <= 40, f"{opened.count(CONTROL)} control streams in a minute"
    assert not company.network.bugs


# -- parts ------------------------------------------------------------------------------------------------------------


def _part(low: int, high: int) -> ReducedPart:
    """Ones, reduced by one member."""
    held = ReducedPart(codec("fp32"), low, high)
    for index in range(held.chunks):
        first, end = held.elements(index)
        held.codec.encode(torch.ones(end - first), held.chunk(index))
    held.masks = [1] * held.chunks
    held.result = seal(low, high, held.masks, [chunk_digest(1, held.chunk(index)) for index in range(held.chunks)])
    return held


def test_equal_parts_at_different_offsets_stay_distinct() -> None:
    """The mean is zero throughout; a member that came late fetches its parts, and every element is written."""
    elements = 4096
    company = Company(4, Settings("int8", (elements,), 256))

    async def member(peer: PeerId, late: bool) -> None:
        await asyncio.sleep(0.6 if late else 0.0)
        await company.attempt(peer, torch.zeros(elements), tokens=1, complete=not late)

    async def main() -> None:
        await asyncio.gather(*(member(peer, peer == company.peers[-1]) for peer in company.peers))

    simloop.run(main())
    for attempt in company.attempts:
        stale = int((attempt.into == STALE).sum())
        assert not stale, f"{attempt.peer} kept {stale} of {elements} elements of what was there before"
    assert company.committed(*company.peers)
    assert seal(0, 10, [1], [bytes(32)]) != seal(10, 20, [1], [bytes(32)])


@pytest.mark.parametrize(
    ("wrong", "why"),
    (
        ({"parts": (), "bounds": (), "peers": ()}, "not of the whole vector"),
        ({"peers": ()}, "not of the whole vector"),
        ({"bounds": (0, 60, 99)}, "not of the whole vector"),
        ({"bounds": (0, 60, 60, 100)}, "not of the whole vector"),
        ({"kind": Kind.SKIP, "bounds": ()}, "not of the whole vector"),
        ({"bounds": (0, 50, 100)}, "part 0 at another place"),
        ({"state_root": b"?" * 32}, "of another state"),
        ({}, ""),
    ),
)
def test_proposal_must_cover_vector_with_placed_parts(wrong: dict[str, Any], why: str) -> None:
    """Or it is refused by who holds all of it; without anything wrong, it is accepted."""
    company = Company(3, Settings("fp32", (100,), 100))
    head, (proposer, ours) = company.head, company.order[:2]
    part_cache, held = company.averagers[ours].part_cache, [_part(0, 60), _part(60, 100)]
    results = tuple(part.result for part in held if part.result)
    record = Record(
        head.key.lineage, head.state_root, 0, Kind.MEAN, b"p" * 32, results, head.roster, (proposer,), (0, 60, 100)
    )
    proposal = Propose(head.key, Member(proposer), 0, records.encode(replace(record, **wrong)))

    async def main() -> None:
        for part in held:
            part_cache.put(head.key.lineage, part)
        async with company.averagers[ours].enter(head, 10.0) as session:
            session.decision.holds(bytes(32), [], part_cache.of(head.key.lineage))
            with pytest.raises(BadPayload, match=why) if why else nullcontext():
                session.take(proposer, proposal)
            assert bool(session.decision.vote.accepted) is not bool(why)

    simloop.run(main())


# -- attempts that are given up, rounds entered again -----------------------------------------------------------------


def test_fork_keeps_part_locations_of_accepted_mean() -> None:
    """Two are left: one has accepted a mean and has its part, the other fetches it from there; the fork commits."""
    elements = 100
    company = Company(5, Settings("fp32", (elements,), elements))
    network, head, (proposer, ours, theirs) = company.network, company.head, company.order[:3]
    held = _part(0, elements)
    assert held.result is not None
    parts, peers, bounds = (held.result,), (proposer,), (0, elements)
    mean = Record(
        head.key.lineage, head.state_root, 0, Kind.MEAN, b"p" * 32, parts, head.roster, peers=peers, bounds=bounds
    )

    async def accepts(session: ButterflySession) -> None:
        session.decision.holds(bytes(32), [], company.averagers[ours].part_cache.of(head.key.lineage))
        session.decision.receive(proposer, Propose(head.key, Member(proposer), 0, records.encode(mean)))
        assert session.decision.vote.accepted

    async def main() -> None:
        company.averagers[ours].part_cache.put(head.key.lineage, held)
        for peer in company.peers:
            if peer not in (ours, theirs):
                network.kill(peer)
        vector = torch.ones(elements)
        await asyncio.gather(company.attempt(ours, vector, meanwhile=accepts), company.attempt(theirs, vector))

    simloop.run(main())
    assert company.committed(ours, theirs), [attempt.mean.outcome for attempt in company.attempts]
    decided = records.decode(company.attempts[0].mean.record)
    assert (decided.kind, decided.parts, decided.peers, decided.bounds) == (Kind.FORK, parts, peers, bounds)
    assert all(torch.equal(attempt.into, torch.ones(elements)) for attempt in company.attempts)


def test_reentry_with_corrected_state_root_commits() -> None:
    """Who once entered it with a wrong state root, and then has the right one, commits with the others."""
    company = Company(2, Settings("fp32", (64,), 16))
    mistaken = company.averagers[company.order[1]]

    async def main() -> None:
        async with mistaken.enter(replace(company.head, state_root=b"w" * 32), 5.0):
            await asyncio.sleep(1.0)
        await asyncio.gather(*(company.attempt(peer, torch.ones(64)) for peer in company.peers))

    simloop.run(main())
    assert company.committed(*company.peers), [attempt.mean for attempt in company.attempts]
    assert not company.named()


def test_returning_coordinator_sends_no_second_plan() -> None:
    """It was superseded after it sent its plan; it waits for the next coordinator, and nobody calls it a liar."""
    elements = 2_000_000
    company = Company(3, Settings("fp32", (elements,), 1 << 16))
    proposer = company.order[0]

    async def superseded(session: ButterflySession) -> None:
        await session.cut.wait()
        await asyncio.sleep(0.2)
        company.averagers[proposer].supersede()

    async def member(peer: PeerId) -> None:
        if peer == proposer:
            await company.attempt(peer, torch.ones(elements), meanwhile=superseded)
        await company.until_decided(peer, elements)

    async def main() -> None:
        await asyncio.gather(*(member(peer) for peer in company.peers))

    simloop.run(main())
    assert (company.attempts[0].peer, company.attempts[0].mean.outcome) == (proposer, Outcome.SUPERSEDED)
    assert company.committed(*company.peers), [attempt.mean.outcome for attempt in company.attempts]
    assert not [why for whys in company.named().values() for why in whys if "second plan" in why]
