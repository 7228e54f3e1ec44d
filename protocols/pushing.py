"""Push-sum between peers: each round a peer gives a share of its state away, one way, and is held up by nobody.

A protocol of its own, which a run chooses by its name, and not what gossip falls back to: shares carry weights, and all
peers of a run count them, or none. It is for lines that carry much one way and little the other, and for peers that
should not hold still for others: to give costs one upload, to take one download, and neither waits for the other. What
it costs: news flows one way, so that two shares bring two peers as near as one exchange does, and who is given nothing
learns nothing in that round.

A link that carries nothing at all in one direction carries no stream either. What remains is to give to others, and to
take back what was given: a share is kept, encoded, until its receiver says that it has counted it. Where no answer came
it is recalled in later rounds; if its receiver is in another life, it comes home. If its receiver has not been seen for
`BURIAL_SECONDS` it comes home, too, and may then count twice: that is told, as half exchanges are.

A state stands for x / w, the weights are in `protocols.pairs.pushsum.Book`; what travels is x / w, with the weight of
the share. A peer's own step moves x / w, so that it counts by the peer's weight at that moment, which is 1 on average.
Sources: Kempe et al. 2003; Assran et al. 2019 (SGP).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from protocols import wire
from protocols.base import (
    BadPayload,
    Deadline,
    Head,
    Host,
    Member,
    PeerError,
    PeerGone,
    PeerId,
    PeerSilent,
    Settings,
    Stream,
)
from protocols.codec import codec
from protocols.pairs import matching
from protocols.pairs.incoming import Incoming
from protocols.pairs.lending import LendingSession, cut_at
from protocols.pairs.patience import Patience
from protocols.pairs.pushsum import Book, Share
from protocols.pairs.shares import Give, Recall, Taken, blend, cast
from protocols.pairs.swap import HEADER_LIMIT, hear
from protocols.pairs.tempo import Tempo
from protocols.post import Ledger
from protocols.reducing.parts import HeldPart
from protocols.tasks import Bell, within
from protocols.vectors import Flat

PUSH = "starling/push-sum/share/1"
FIRST_FRAME_SECONDS = 10.0
BURIAL_SECONDS = 120.0
MAX_KEPT = 2
"""Shares of which nobody knows what became of them: who has so many gives no more until that is known."""
MAX_TAKING = 4
"""Shares that come in at once; others are told to go elsewhere."""
WEIGHT_SPREAD = 64.0
"""A share may weigh so many times as much as we do, and as a peer does at first."""


class PushSum:
    """`protocols.base.LooseAverager`.

    Attributes:
        book: the weights of this peer and of its shares; its values are 0: states stand elsewhere.
        half_exchanges: shares that came home without their receivers' word, since this peer began.
    """

    shares_anchor = False

    def __init__(self, host: Host, settings: Settings) -> None:
        """
        Raises:
            ValueError: there is no such schedule, or no such codec.
        """
        matching.known(settings.schedule)
        self.host, self.me, self.schedule = host, Member(host.me, settings.incarnation), settings.schedule
        self.ledger, self.rng, self.codec = Ledger(), host.rng("push-sum"), codec(settings.codec)
        self.book, self.tempo = Book(self.me, 0.0), Tempo()
        self.half_exchanges = 0
        self._patience, self._chunk_elements = Patience(settings.bandwidth), settings.chunk_elements
        self._session: LendingSession | None = None
        self._kept: dict[tuple[Member, int], tuple[Share[float], HeldPart]] = {}
        self._unseen: dict[Member, float] = {}
        self._turn, self._bell = asyncio.Lock(), Bell()  # whoever changes the state has its turn
        self._taking = 0
        self._giving: tuple[PeerId, ...] = ()
        host.transport.serve(PUSH, self._serve)

    @asynccontextmanager
    async def enter(self, head: Head, deadline: Deadline) -> AsyncIterator[LendingSession]:
        self._session = session = LendingSession(self, head, deadline)
        try:
            async with cut_at(session):
                yield session
        finally:
            session.state, self._session = None, None
            await self.at_rest()

    # -- what a session asks for --------------------------------------------------------------------------------------

    def partners(self) -> tuple[PeerId, ...]:
        return self._giving

    def opened(self) -> None:
        self._bell.ring()

    async def at_rest(self) -> None:
        async with self._turn:
            pass

    async def mix(self, session: LendingSession, state: Flat) -> None:
        """Settle earlier shares, then give one to each that the schedule names; what they do not take, to others."""
        await self._reclaim(session)
        loop, size_bytes = asyncio.get_running_loop(), self.codec.encoded_bytes(state.size)
        live = {member.peer: member for member in self.host.members.live() if member != self.me}
        seed = f"{session.key.run.hex()}/{session.key.scope}"
        named = matching.partners(self.schedule, tuple(live), self.me.peer, session.round, seed)
        others = self.rng.sample(sorted(set(live) - set(named)), len(live) - len(named))
        if not live:
            return
        first = (*named, *others)[0]
        until = min(session.deadline, loop.time() + self._patience.timeout_seconds(first, size_bytes))
        due = len(named)
        for peer in (*named, *others):
            if not due or len(self._kept) >= MAX_KEPT:
                break
            if self._patience.resting(peer, loop.time()):
                continue
            if loop.time() + self._patience.expected_seconds(peer, size_bytes) > until:
                break
            due -= await self._give(session, live[peer], until)

    # -- giving -------------------------------------------------------------------------------------------------------

    async def _give(self, session: LendingSession, to: Member, until: Deadline) -> bool:
        """Give half of what is here; False: it is home again, and somebody else may have it."""
        async with self._turn:
            state = session.state
            share = self.book.give(to) if state else None
            if share is None or state is None:
                return False
            part = HeldPart(self.codec, 0, state.size, self._chunk_elements)
            self._kept[to, share.sequence] = share, part
            await self.host.compute.run(partial(cast, state, part), 16 * state.size)
        self._giving = (to.peer,)
        try:
            counted = await self._send(session, share, part, until)
        finally:
            self._giving = ()
        if counted is not None:
            await self._answered(session, share, counted)
        return counted is not False

    async def _send(self, session: LendingSession, share: Share[float], part: HeldPart, until: Deadline) -> bool | None:
        """Whether it was counted; None: nobody knows."""
        peer, began = share.to.peer, asyncio.get_running_loop().time()
        elements = part.high - part.low
        give = Give(session.key, self.me, share.sequence, share.to, share.weight, elements, self.codec.name)
        try:
            async with (
                asyncio.timeout_at(min(until, began + self._patience.answer_seconds(peer))) as limit,
                self.host.transport.open(peer, PUSH, until) as stream,
                self.ledger.counting(stream),
            ):
                limit.reschedule(until)
                self._patience.answered(peer, 2 * (asyncio.get_running_loop().time() - began))
                await stream.send(give)
                for index in range(part.chunks):
                    data = part.chunk(index)
                    await stream.send(wire.Chunk(index, len(data)), data)
                counted = (await hear(stream, Taken, give)).counted
        except PeerGone as error:
            self.ledger.name(peer, f"no share: {error.why}")
            return False  # not a byte has reached it
        except (PeerError, BadPayload, TimeoutError):
            now = asyncio.get_running_loop().time()
            self.ledger.name(peer, "no share: no word of what became of it")
            self._patience.late(peer, now, now - began)
            return None
        if counted:
            self._patience.took(peer, part.size_bytes, asyncio.get_running_loop().time() - began)
        return counted

    async def _answered(self, session: LendingSession, share: Share[float], counted: bool) -> None:
        """The receiver's word is here: the share is its own, or ours again."""
        async with self._turn:
            _, part = self._kept.pop((share.to, share.sequence))
            before = self.book.weight
            self.book.answered(share.to, share.sequence, counted)
            if not counted and session.state:
                await self._blend(session.state, part, share.weight / (before + share.weight))

    async def _reclaim(self, session: LendingSession) -> None:
        """What became of shares that nobody has answered for."""
        now = asyncio.get_running_loop().time()
        live = {member.peer: member for member in self.host.members.live()}
        self._unseen = {to: self._unseen.get(to, now) for to, _ in self._kept if to not in live.values()}
        for share, _ in list(self._kept.values()):
            to = share.to
            if to in live.values():
                counted = None if self._patience.resting(to.peer, now) else await self._recall(session, share)
            elif to.peer in live:
                counted = False  # of an earlier life: it is over
            elif now - self._unseen[to] >= BURIAL_SECONDS:
                counted = False
                self.half_exchanges += 1
                session.count_half(share.weight / (self.book.weight + share.weight))
            else:
                continue
            if counted is not None:
                await self._answered(session, share, counted)
            if counted is False:  # a state of ours of an earlier round is in ours again
                name = f"{self.me.peer}.{self.me.incarnation}/{share.sequence} from {to.peer}.{to.incarnation}"
                session.count(self.me.peer, 1, name, share.weight / self.book.weight)

    async def _recall(self, session: LendingSession, share: Share[float]) -> bool | None:
        peer, began = share.to.peer, asyncio.get_running_loop().time()
        deadline = began + self._patience.answer_seconds(peer)
        recall = Recall(session.key, self.me, share.sequence, share.to)
        try:
            async with self.host.transport.open(peer, PUSH, deadline) as stream, self.ledger.counting(stream):
                await stream.send(recall)
                return (await hear(stream, Taken, recall)).counted
        except (PeerError, BadPayload):
            now = asyncio.get_running_loop().time()
            if now >= deadline:
                self._patience.late(peer, now, now - began)
            return None

    # -- taking -------------------------------------------------------------------------------------------------------

    async def _serve(self, peer: PeerId, stream: Stream) -> None:
        async with self.ledger.counting(stream):
            async with within(FIRST_FRAME_SECONDS, peer, "waiting for its first word"):
                message = await stream.receive(HEADER_LIMIT)
            if not isinstance(message, Give | Recall):
                raise BadPayload(f"{type(message).__name__} opens no share")
            self._admit(peer, message)
            session = self._session
            if isinstance(message, Recall) or session is None or session.state is None or self._taking >= MAX_TAKING:
                counted = self.book.recalled(message.sender, message.sequence)
            else:
                self._taking += 1
                try:
                    counted = await self._take(session, session.state, message, stream)
                finally:
                    self._taking -= 1
            await stream.send(Taken(message.key, self.me, message.sequence, counted))

    def _admit(self, peer: PeerId, message: Give | Recall) -> None:
        """
        Raises:
            BadPayload: of another sender, run or scope, or of another size or weight than can be.
            PeerSilent: of nobody who is known to be alive, or for another life of ours.
        """
        if message.sender.peer != peer or message.to.peer != self.me.peer:
            raise BadPayload(f"a share of {message.sender.peer} for {message.to.peer}")
        if message.sender not in self.host.members.live() or message.to != self.me:
            raise PeerSilent(peer, "not of a live member, or not for this life of ours")
        session = self._session
        if session and (message.key.run, message.key.scope) != (session.key.run, session.key.scope):
            raise BadPayload("a share of another run or scope")
        if isinstance(message, Give):
            if message.codec != self.codec.name:
                raise BadPayload(f"codec {message.codec!r} where the run uses {self.codec.name}")
            if message.weight > WEIGHT_SPREAD * max(1.0, self.book.weight):
                raise BadPayload(f"a share of weight {message.weight:g}, where we have {self.book.weight:g}")
            self.tempo.hear(peer, message.key.round)

    async def _take(self, session: LendingSession, state: Flat, give: Give, stream: Stream) -> bool:
        """Take a share in, and count it as soon as there is a state to count it in.

        Raises:
            BadPayload: it broke a rule.
            PeerSilent: the stream broke off, or there was no state any more.
        """
        if give.elements != state.size:
            raise BadPayload(f"a state of {give.elements} elements; the run's have {state.size}")
        theirs = Incoming(self.codec, state.size, self._chunk_elements, self.host.compute)
        async with self._turn:
            await theirs.measure(stream, state)
        await theirs.take(stream)
        while True:
            try:
                await self._bell.until(lambda: self._session is not None and bool(self._session.state), stream.deadline)
            except TimeoutError:
                raise PeerSilent(stream.peer, "no state to count it in") from None
            async with self._turn:
                session_now = self._session
                if session_now and session_now.state:
                    return await self._count(session_now, session_now.state, give, theirs.part)

    async def _count(self, session: LendingSession, state: Flat, give: Give, part: HeldPart) -> bool:
        before = self.book.weight
        share = Share(give.sender, give.to, give.sequence, 0.0, give.weight)
        counted = self.book.take(share)
        if self.book.weight == before:
            return counted  # recalled, or counted earlier
        part_of_us = give.weight / self.book.weight
        try:
            await self._blend(state, part, part_of_us)
        finally:
            session.count(give.sender.peer, part.chunks, give.told, part_of_us)
        return counted

    async def _blend(self, state: Flat, part: HeldPart, share: float) -> None:
        await self.host.compute.run(partial(blend, state, part, share), 16 * state.size)
