"""Butterfly all-reduce for a roster with one shared anchor: call, scatter, reduce, gather, one record.

A session lives as long as the round. While the trainer works, offers travel and the coordinator calls the round
(`protocols.calling`); the data phase runs (`protocols.reduce`); the parts, each signed by its reducer, make up the
record that everybody who holds them computes alike, and whose hash is the next lineage.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

from protocols import plan as planning
from protocols import record as records
from protocols import wire
from protocols.base import (
    BadPayload,
    Deadline,
    Head,
    Header,
    Host,
    Mean,
    Member,
    Outcome,
    PeerError,
    PeerId,
    PeerSilent,
    RoundKey,
    Settings,
    Stream,
    Vector,
    Work,
)
from protocols.calling import Call, Terrain
from protocols.codec import codec
from protocols.parts import Held, Task, seal
from protocols.post import Ledger, Post
from protocols.reduce import Reducer, contribute
from protocols.tasks import Bell, together
from protocols.vectors import Flat

CONTROL = "starling/butterfly/control/1"
DATA = "starling/butterfly/data/1"
MIN_BANDWIDTH = 1e3
FIRST_FRAME_SECONDS = 10.0


class Butterfly:
    """`protocols.base.Averager`."""

    def __init__(self, host: Host, settings: Settings) -> None:
        self.host, self.settings = host, settings
        self.codec = codec(settings.codec)
        self.me = Member(host.me, settings.incarnation)
        self.ledger = Ledger()
        self.bandwidth = settings.bandwidth
        # The last round's session stays: who was slow to hand in fetches the reduced parts from it.
        self._sessions: dict[int, _Session] = {}
        self._entered = Bell()
        self._round = -1
        host.transport.serve(CONTROL, self._on_control)
        host.transport.serve(DATA, self._on_data)

    @asynccontextmanager
    async def enter(self, head: Head, deadline: Deadline) -> AsyncIterator[_Session]:
        key, roster = head.key, head.roster
        if self.me not in roster:
            raise ValueError(f"{self.me} is not in the roster of round {key.round}")
        settings = self.settings
        terrain = Terrain(
            key=key,
            me=self.me,
            roster=roster,
            elements=settings.elements[key.fragment],
            bytes_per_element=self.codec.encoded_bytes(1 << 20) / (1 << 20),
            bandwidth=self.bandwidth,
            deadline=deadline,
        )
        async with together() as group:
            session = _Session(self, terrain, Post(self.host, CONTROL, self.ledger, group, deadline))
            calling = group.create_task(session.call.run())
            self._round = key.round
            self._sessions = {number: old for number, old in self._sessions.items() if number == key.round - 1}
            self._sessions[key.round] = session
            self._entered.ring()
            try:
                yield session
            finally:
                session.call.close()
                calling.cancel()

    def learn_bandwidth(self, in_time: bool) -> None:
        """Claim less after a data phase that did not end in time, and slowly more again: budgets follow the claims."""
        factor = 1.25 if in_time else 0.5
        self.bandwidth = max(MIN_BANDWIDTH, min(self.settings.bandwidth, factor * self.bandwidth))

    async def _on_control(self, peer: PeerId, stream: Stream) -> None:
        async with self.ledger.counting(stream):
            message = await _first(stream)
            if not isinstance(message, wire.Ready | wire.Plan):
                raise BadPayload(f"{type(message).__name__} on a control stream")
            session = await self._session_for(stream, message.key)
            if session is None:
                raise BadPayload(f"a stale {type(message).__name__} of round {message.key.round}")
            if isinstance(message, wire.Ready):
                session.call.on_ready(peer, message.offer)
            else:
                session.call.on_plan(peer, message)

    async def _on_data(self, peer: PeerId, stream: Stream) -> None:
        async with self.ledger.counting(stream):
            opening = wire.expect(await _first(stream), wire.Contribute)
            session = await self._session_for(stream, opening.key)
            if session is None:
                raise BadPayload(f"a stale contribution to round {opening.key.round}")
            try:
                reducer = await session.reducer_for(peer, opening)
                await reducer.serve(peer, stream)
            except BadPayload as error:
                session.lose(peer, f"refused: {error}")  # it will not hand in anything else: nobody waits for it
                raise

    async def _session_for(self, stream: Stream, key: RoundKey) -> _Session | None:
        """The session that a frame is bound to, waited for if its sender is ahead of us; None if it is long over.

        Only live members may wait here, and only a round ahead: a stranger would hold a stream for nothing.

        Raises:
            BadPayload: the frame is of another run, scope, lineage or fragment, or of a round that nobody can be in.
            PeerSilent: we did not enter that round in time, or its sender is no live member.
        """
        if key.round > self._round + 1 >= 1:
            raise BadPayload(f"a frame of round {key.round}, where round {self._round} is under way")
        if all(member.peer != stream.peer for member in self.host.members.live()):
            raise PeerSilent(stream.peer, "not a live member")
        try:
            await self._entered.until(lambda: key.round <= self._round, stream.deadline)
        except TimeoutError:
            raise PeerSilent(stream.peer, f"round {key.round} did not begin here") from None
        session = self._sessions.get(key.round)
        if session is not None and session.key != key:
            raise BadPayload(f"a frame of another run or lineage, round {key.round}")
        return session


class _Session:
    """One round: `protocols.base.Session`."""

    def __init__(self, owner: Butterfly, terrain: Terrain, post: Post) -> None:
        self.key = terrain.key
        self.call = Call(owner.host, terrain, post, owner.ledger)
        self.cut = self.call.cut
        self._owner, self._host, self._ledger, self._terrain = owner, owner.host, owner.ledger, terrain
        self._reducers: dict[int, Reducer] = {}
        self._begun = Bell()

    def ready(self, work: Work) -> None:
        self.call.ready(work)

    async def mean(self, mine: Sequence[Vector], work: Work, into: Sequence[Vector]) -> Mean:
        source, target = Flat(mine), Flat(into)
        if not source.size == target.size == self._terrain.elements:
            raise ValueError(f"{source.size} and {target.size} elements; the run averages {self._terrain.elements}")
        await self.cut.wait()  # it is set at the round's deadline at the latest
        terms, me = self.call.terms, self._host.me
        if terms is None or me not in terms.peers:
            return self._finish(Mean(Outcome.UNDECIDED))
        settings = self._owner.settings
        held = Held(self._owner.codec, terms.plan.bounds, settings.chunk_elements)
        deadline = self.call.hand_in_until()
        task = Task(self.key, terms, me, source, held, self._host.compute, self._host.signer, deadline)
        parts = await self._exchange(task)
        self._owner.learn_bandwidth(parts is not None)
        if parts is None or not await self._decode(task, target):
            return self._finish(Mean(Outcome.UNDECIDED))
        return self._finish(self._committed(terms, parts))

    async def _decode(self, task: Task, target: Flat) -> bool:
        """Decode the mean part by part; False if a reducer sent what does not decode."""
        for part in range(task.held.parts):
            low, high = task.terms.part(part)
            try:
                await self._host.compute.run(partial(task.held.decode, part, target), 4 * (high - low))
            except BadPayload as error:
                self._ledger.name(task.terms.reducer(part), f"refused as a reducer: {error}")
                return False
        return True

    # -- the data phase -----------------------------------------------------------------------------------------------

    def lose(self, peer: PeerId, why: str) -> None:
        """Expect nothing of a peer that broke a rule."""
        for reducer in self._reducers.values():
            reducer.lose(peer, why)

    async def reducer_for(self, peer: PeerId, opening: wire.Contribute) -> Reducer:
        """The reducer that a data stream is meant for, once our own data phase has begun.

        Raises:
            BadPayload: another plan or codec, or a part that we do not reduce.
            PeerSilent: our data phase did not begin before the round's deadline.
        """
        try:
            await self._begun.until(lambda: bool(self._reducers), self._terrain.deadline)
        except TimeoutError:
            raise PeerSilent(peer, "the data phase did not begin here") from None
        terms, codec = self.call.terms, self._owner.settings.codec
        if terms is None or opening.plan != terms.digest or opening.part not in self._reducers:
            raise BadPayload("a contribution to another plan or another part")
        if opening.codec != codec:
            raise BadPayload(f"codec {opening.codec!r} where the run uses {codec}")
        return self._reducers[opening.part]

    async def _exchange(self, task: Task) -> list[wire.Part] | None:
        """Run the data phase; None if a part could not be had."""
        jobs: list[asyncio.Task[wire.Part | None]] = []
        self._reducers = {
            part: Reducer(task, part)
            for part, index in enumerate(task.terms.plan.reducers)
            if task.terms.peers[index] == task.me
        }
        self._begun.ring()
        async with together() as group:
            for part in range(task.held.parts):
                if part in self._reducers:
                    jobs.append(group.create_task(self._reduce(self._reducers[part])))
                else:
                    jobs.append(group.create_task(self._contribute(task, part)))
        parts = [job.result() for job in jobs]
        whole = [part for part in parts if part is not None]
        return whole if len(whole) == len(parts) else None

    async def _reduce(self, reducer: Reducer) -> wire.Part:
        done = await reducer.run()
        for peer, why in reducer.lost.items():
            self._ledger.name(peer, why)
        return done.result

    async def _contribute(self, task: Task, part: int) -> wire.Part | None:
        if not task.held.chunks(part):
            return seal([], [])
        reducer = task.terms.reducer(part)
        try:
            async with (
                self._host.transport.open(reducer, DATA, task.deadline) as stream,
                self._ledger.counting(stream),
            ):
                return (await contribute(task, part, stream)).result
        except BadPayload:
            return None
        except PeerError as error:
            self._ledger.name(reducer, f"lost as a reducer: {error.why}")
            return None

    # -- the end ------------------------------------------------------------------------------------------------------

    def _finish(self, mean: Mean) -> Mean:
        names, sent, received = self._ledger.take()
        return replace(mean, blamed=(*names, *mean.blamed), bytes_sent=sent, bytes_received=received)

    def _committed(self, terms: planning.Terms, parts: Sequence[wire.Part]) -> Mean:
        record = records.Record(
            parent=self.key.lineage,
            state_root=terms.plan.offers[0].state_root,
            round=self.key.round,
            kind=records.Kind.MEAN,
            plan=terms.digest,
            parts=tuple(parts),
            roster=self._next_roster(terms, parts),
            peers=terms.peers,
            bounds=terms.plan.bounds,
        )
        return Mean(
            Outcome.COMMITTED,
            record=records.encode(record),
            contributions=records.contributions(terms.peers, parts),
            weights=dict(zip(terms.peers, terms.weights, strict=True)),
            blamed=terms.clamped,
        )

    def _next_roster(self, terms: planning.Terms, parts: Sequence[wire.Part]) -> tuple[Member, ...]:
        """Who took part to the end: a member whose contribution was refused or broke off has lost the others' step."""
        return tuple(
            offer.member
            for bit, offer in enumerate(terms.plan.offers)
            if terms.weights[bit] == 0 or records.whole(bit, parts)
        )


async def _first(stream: Stream) -> Header:
    """The first frame of a stream, which its opener has at hand when it opens it."""
    try:
        async with asyncio.timeout(FIRST_FRAME_SECONDS):
            return await stream.receive(wire.MAX_HEADER_BYTES)
    except TimeoutError:
        raise PeerSilent(stream.peer, "opened a stream and said nothing") from None
