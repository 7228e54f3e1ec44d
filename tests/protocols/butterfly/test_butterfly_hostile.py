"""What a butterfly withstands: strangers and liars on its streams, attempts that are given up, rounds entered again."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from protocols.allreduce.all_reduce import Reducer
from protocols.allreduce.parts import ReducedPart
from protocols.base import (
    REQUESTER_IDLE_SECONDS,
    AveragingResult,
    Deadline,
    Head,
    Host,
    LocalProgress,
    Member,
    Outcome,
    PeerError,
    PeerId,
    Settings,
    StaticMembers,
    Vector,
)
from protocols.blobs.serving import BLOBS, WantBlob
from protocols.butterfly.averager import CONTROL, Butterfly
from protocols.butterfly.round import Round
from protocols.consensus import record as records
from protocols.consensus.messages import Propose
from protocols.consensus.record import Kind, Record, coordinators
from protocols.history.chain import genesis
from protocols.streams.endpoint import MAX_STREAMS, MAX_STREAMS_OF_ONE
from protocols.vectors.codec import codec
from protocols.vectors.views import norm
from tests.sim import loop as simloop
from tests.sim.averaging import RUN, ButterflyHarness
from tests.sim.host import sim_host
from tests.sim.network import Node, SimNetwork
from tests.sim.pipe import SimPipe
from tests.sim.trace import Trace
from tests.support.example_vectors import equal_norm_vectors
from tests.support.simulated import simulated
from tests.support.sync_cluster import fetch_part

STALE = 7.0
"""In the place of the mean before it comes."""


@dataclass
class Attempt:
    """The result of one attempt of one peer at the round."""

    peer: PeerId
    mean: AveragingResult
    into: Vector


@dataclass
class ButterflyGroup:
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
        seconds: float = 100.0,
        meanwhile: Callable[[Round], Coroutine[Any, Any, None]] | None = None,
    ) -> Outcome:
        """Enter the round and average; `meanwhile` is called when it is entered."""
        into = torch.full_like(vector, STALE)
        work = LocalProgress(10, 0.0, 1.0, norm([vector]), complete=True)
        deadline = asyncio.get_running_loop().time() + seconds
        async with self.averagers[peer].enter(self.head, deadline) as session, asyncio.TaskGroup() as group:
            if meanwhile:
                group.create_task(meanwhile(session))
            session.offer(work)
            await session.cut.wait()
            mean = await session.average([vector], work, [into])
        self.attempts.append(Attempt(peer, mean, into))
        return mean.outcome

    def play(self, main: Callable[[], Coroutine[Any, Any, None]]) -> None:
        simloop.run(main())
        assert not self.network.bugs

    async def until_decided(self, peer: PeerId, elements: int) -> None:
        """Attempt the round again and again, as a node does."""
        for number in range(4):
            outcome = await self.attempt(peer, torch.full((elements,), 1.0 + number / 10))
            if outcome not in (Outcome.UNDECIDED, Outcome.SUPERSEDED):
                return

    def blamed(self) -> dict[PeerId, set[str]]:
        """The peers that were blamed in any attempt, and why."""
        blames = [blame for attempt in self.attempts for blame in attempt.mean.blamed]
        return {blame.peer: {other.why for other in blames if other.peer == blame.peer} for blame in blames}

    def committed(self, *peers: PeerId) -> bool:
        """Whether exactly these peers ended with the same record and the same finite bits, none of them stale."""
        ended = {attempt.peer: attempt for attempt in self.attempts}
        last = list(ended.values())
        return (
            sorted(ended) == sorted(peers)
            and {attempt.mean.outcome for attempt in last} == {Outcome.COMMITTED}
            and len({attempt.mean.record for attempt in last}) == 1
            and len({attempt.into.numpy().tobytes() for attempt in last}) == 1
            and not (last[0].into == STALE).any()
        )


# -- strangers and liars on streams -----------------------------------------------------------------------------------


@simulated(ButterflyGroup, 1, Settings("fp32", (1 << 22,)))
async def test_non_members_cannot_hold_part_streams(group: ButterflyGroup) -> None:
    """Streams on which nothing is asked for or taken are closed; the limits hold, and others are served afterwards."""
    network, (me,), lineage = group.network, group.peers, group.head.key.lineage
    stranger, held = sim_host(network, network.join("zoe"), 1, {}), _part(0, 1 << 22)
    others = [sim_host(network, network.join(name), 1, {}) for name in ("yan", "xia")]
    wanted = held.result
    assert wanted is not None

    async def stays(host: Host, asks: bool) -> None:
        with suppress(PeerError):
            async with host.transport.open(me, BLOBS, asyncio.get_running_loop().time() + 1e5) as stream:
                if asks:
                    await stream.send(WantBlob(wanted.digest))
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

    group.averagers[me].part_cache.put(lineage, held)
    assert await streams(False, 4 * MAX_STREAMS, stranger) == [MAX_STREAMS_OF_ONE, 0]
    assert await streams(False, MAX_STREAMS, stranger, *others) == [MAX_STREAMS, 0]
    assert await streams(True, 1, stranger) == [1, 0]
    deadline = asyncio.get_running_loop().time() + 100.0
    empty = ReducedPart(held.codec, 0, held.high, held.chunk_elements)
    fetched = await fetch_part(stranger, me, wanted, empty, deadline)
    assert fetched.result == wanted


class CountingNetwork(SimNetwork):
    """Knows the method of each stream that was opened."""

    def __init__(self) -> None:
        super().__init__(Trace(), latency_seconds=0.001)
        self.opened: list[str] = []

    async def connect(self, node: Node, peer: PeerId, method: str, deadline: Deadline) -> SimPipe:
        self.opened.append(method)
        return await super().connect(node, peer, method, deadline)


@simulated(lambda: ButterflyGroup(2, Settings("fp32", (64,), 16), CountingNetwork()))
async def test_streams_reset_by_peer_are_reopened_with_backoff(group: ButterflyGroup) -> None:
    """One peer believes the other alive, which does not know it and closes its streams: tens of times in a minute."""
    ours, theirs = group.peers
    endpoint = group.averagers[theirs]._endpoint
    endpoint.host = replace(endpoint.host, members=StaticMembers([Member(theirs)]))
    await group.attempt(ours, torch.ones(64), seconds=60.0)
    assert isinstance(group.network, CountingNetwork)
    opened = group.network.opened.count(CONTROL)
    assert 2 <= opened <= 40, f"{opened} control streams in a minute"


# -- parts ------------------------------------------------------------------------------------------------------------


def _part(low: int, high: int) -> ReducedPart:
    """Ones, reduced by one member."""
    held = ReducedPart(codec("fp32"), low, high)
    for index in range(held.chunks):
        first, end = held.elements(index)
        held.codec.encode(torch.ones(end - first), held.chunk(index))
    held.masks = [1] * held.chunks
    held.seal([held.digest_of(index, 1) for index in range(held.chunks)])
    return held


# -- attempts that are given up, rounds entered again -----------------------------------------------------------------


@simulated(ButterflyGroup, 5, Settings("fp32", (100,), 100))
async def test_fork_keeps_part_locations_of_accepted_mean(group: ButterflyGroup) -> None:
    """Two are left: one has accepted a mean and has its part, the other fetches it from there; the fork commits."""
    network, head, (proposer, ours, theirs) = group.network, group.head, group.order[:3]
    held, vector = _part(0, 100), torch.ones(100)
    assert held.result is not None
    parts, peers, bounds = (held.result,), (proposer,), (0, 100)
    mean = Record(
        head.key.lineage, head.state_root, 0, Kind.MEAN, b"p" * 32, parts, head.roster, peers=peers, bounds=bounds
    )

    async def accepts(session: Round) -> None:
        session.vote.keep(held)
        session.vote.receive(proposer, Propose(head.key, Member(proposer), 0, records.encode(mean)))
        assert session.vote.paxos.accepted

    for peer in group.peers:
        if peer not in (ours, theirs):
            network.kill(peer)
    await asyncio.gather(group.attempt(ours, vector, meanwhile=accepts), group.attempt(theirs, vector))
    assert group.committed(ours, theirs), [attempt.mean.outcome for attempt in group.attempts]
    decided = group.attempts[0].mean.record
    assert isinstance(decided, Record)
    assert (decided.kind, decided.parts, decided.peers, decided.bounds) == (Kind.FORK, parts, peers, bounds)
    assert all(torch.equal(attempt.into, vector) for attempt in group.attempts)


@simulated(ButterflyGroup, 2, Settings("fp32", (64,), 16))
async def test_reentry_with_corrected_state_root_commits(group: ButterflyGroup) -> None:
    """A peer that entered with a wrong state root, and then with the right one, commits with the others."""
    mistaken = group.averagers[group.order[1]]
    async with mistaken.enter(replace(group.head, state_root=b"w" * 32), 5.0):
        await asyncio.sleep(1.0)
    await asyncio.gather(*(group.attempt(peer, torch.ones(64)) for peer in group.peers))
    assert group.committed(*group.peers), [attempt.mean for attempt in group.attempts]
    assert not group.blamed()


@simulated(ButterflyGroup, 3, Settings("fp32", (2_000_000,), 1 << 16))
async def test_returning_coordinator_sends_no_second_plan(group: ButterflyGroup) -> None:
    """It was superseded after it sent its plan; it waits for the next coordinator, and no peer blames it."""
    elements, proposer = 2_000_000, group.order[0]

    async def superseded(session: Round) -> None:
        await session.cut.wait()
        await asyncio.sleep(0.2)
        group.averagers[proposer].supersede()

    async def member(peer: PeerId) -> None:
        if peer == proposer:
            await group.attempt(peer, torch.ones(elements), meanwhile=superseded)
        await group.until_decided(peer, elements)

    await asyncio.gather(*(member(peer) for peer in group.peers))
    assert (group.attempts[0].peer, group.attempts[0].mean.outcome) == (proposer, Outcome.SUPERSEDED)
    assert group.committed(*group.peers), [attempt.mean.outcome for attempt in group.attempts]
    assert not [why for whys in group.blamed().values() for why in whys if "second plan" in why]


# -- reducers and strangers -------------------------------------------------------------------------------------------


def test_reducer_with_undecodable_part_is_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other peer is blamed; another reducer takes its part, and the round is committed."""
    close = Reducer._close

    def poisoned(self: Reducer, index: int) -> object:
        result = close(self, index)
        if self.task.host.me == "p02":
            data = self.part.chunk(index)
            data[0:4] = struct.pack("<f", float("nan"))
            self._digests[-1] = self.part.digest_of(index, result[0])
        return result

    monkeypatch.setattr(Reducer, "_close", poisoned)
    averaged = ButterflyHarness(equal_norm_vectors(4, 40_000, seed=5), [1000] * 4, [1e7] * 4).average()
    assert {mean.outcome for mean in averaged.means} == {Outcome.COMMITTED}
    assert {blame.peer for mean in averaged.means for blame in mean.blamed} == {"p02"}
    assert len({result.numpy().tobytes() for result in averaged.results}) == 1
