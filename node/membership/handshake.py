"""The stream on which one peer watches another: a verified handshake, then heartbeats and their echoes."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from node.membership.failure_detector import pulse_seconds
from node.membership.hello import (
    MAX_ADDRESSES,
    STAYS,
    UNPLACED,
    VERSION,
    Crowded,
    Heartbeat,
    Hello,
    HelloRejected,
    Placement,
    SeatsView,
    StageSeat,
    StageTeam,
    signed_part,
)
from node.membership.peer_record import PeerRecord
from node.membership.seats import SeatLine, Seats
from node.outer.activity import Activity
from protocols import wire
from protocols.aio import peer_timeout, task_group
from protocols.base import BadPayload, Clock, Member, PeerGone, PeerId, Signer, Stream

CROWDED_SECONDS = 15.0  # a peer that has no room for another watcher is left alone for this long
IDLE_SECONDS = 60.0  # the peer stops serving a watcher that sends no heartbeat for this long
TEAM_PULSES = 4
"""Of so many heartbeats on a stream, the first says what works in the sender's stage: that changes slowly."""
GAP_SECONDS = 0.05
"""Least pause between two answers to one peer. Heartbeats that come faster wait, which slows down their sender."""
QUICK_SECONDS = 2.0
"""An echo that took longer may have waited behind vectors: the clock offset is not measured from it."""
DUPLICATE_IDENTITY = (
    "another process runs with this identity: two peers cannot share one; stop one, or give it its own --state-dir"
)


@dataclass(slots=True)
class LocalStage:
    line: SeatLine  # of the stage's first member, with which this peer entered
    seats: Seats
    has_begun: Callable[[], bool] = lambda: False  # whether the stage has decided a round at this peer
    is_member: Callable[[], bool] = lambda: False  # whether this peer is in the stage's roster
    rounds: int = 0  # of stage 0: training rounds that have ended at this peer
    rate: float = 0.0  # microbatches/s that this peer can compute; 0 if it is not known yet
    placement: Placement = UNPLACED
    team: StageTeam | None = None  # if this peer does not watch all others

    @property
    def seat(self) -> StageSeat:
        return self.line[0]

    def placed(self) -> Placement:
        return replace(self.placement, member=self.is_member())

    def shown(self, me: PeerId) -> SeatLine:
        """What greetings show of the seat, which is final once the stage has decided a round."""
        if self.has_begun() and self.seats.counts(self.seat):
            self.line = self.seats.begun(me, self.line)
        return self.line


@dataclass(frozen=True, slots=True)
class LocalPeer:
    """What this peer announces about itself in greetings and heartbeats."""

    me: Member
    run: bytes  # hash of the manifest
    nonce: int  # drawn when the process started
    nickname: str
    addresses: Callable[[], Sequence[str]]
    round: Callable[[], int]
    stage: LocalStage | None = None


class HandshakeProtocol:
    def __init__(self, local: LocalPeer, clock: Clock, signer: Signer, on_heard: Callable[[PeerRecord], None]) -> None:
        self.leaving, self.sketch, self.activity = False, b"", Activity.WORK  # sent with each heartbeat
        self._on_heard = on_heard  # called after each heartbeat of a contact
        self._local, self._clock, self._signer = local, clock, signer
        self._number = self._watched = 0

    def hello(self) -> Hello:
        local = self._local
        addresses = tuple(local.addresses())[:MAX_ADDRESSES]
        stage, seats = (local.stage.seat.stage, local.stage.shown(local.me.peer)) if local.stage else (0, ())
        hello = Hello(VERSION, local.run, local.me, local.nonce, local.nickname, addresses, stage, seats, b"")
        return replace(hello, signature=self._signer.sign(signed_part(hello)))

    def is_duplicate(self, hello: Hello) -> bool:
        """Whether this greeting proves that another process, not an earlier incarnation, runs with this identity."""
        local = self._local
        same = (hello.run, hello.member.peer) == (local.run, local.me.peer)
        later = hello.nonce != local.nonce and hello.member.incarnation >= local.me.incarnation
        return same and later and self._is_signed(hello)

    def _is_signed(self, hello: Hello) -> bool:
        return self._signer.verify(hello.member.peer, signed_part(hello), hello.signature)

    def pulse(self, number: int, sent: int = 0) -> Heartbeat:
        """The next heartbeat to one peer, to which so many were sent before."""
        stage, wall, round_number = self._local.stage, self._clock.wall(), self._local.round()
        rounds, rate, placement = (stage.rounds, stage.rate, (stage.placed(),)) if stage else (0, 0.0, ())
        idle = self.activity.value
        seats = stage.seats.shown() if stage else ()
        team = (stage.team,) if stage and stage.team and sent % TEAM_PULSES == 0 else ()
        leaving, sketch = self.leaving, self.sketch
        return Heartbeat(number, wall, round_number, leaving, sketch, rounds, rate, idle, placement, seats, team)

    def _take(self, contact: PeerRecord, pulse: Heartbeat) -> None:
        stages = self._local.stage.seats.stages if self._local.stage else 0
        if (pulse.placement or pulse.team) and not stages:
            raise BadPayload("speaks of stages in a run without them")
        for placement in pulse.placement:
            if STAYS != placement.moving >= stages or placement.holds >> stages:
                raise BadPayload(f"moves to a stage, or has a backup of one, that is none of the run's {stages}")
            if len(placement.held) != placement.holds.bit_count():
                raise BadPayload(f"has {placement.holds.bit_count()} backups, and says {len(placement.held)} ages")
        contact.hear(pulse, asyncio.get_running_loop().time())
        self._on_heard(contact)

    def check(self, peer: PeerId, hello: Hello) -> None:
        """The message of `BadPayload` is meant for the peer's user."""
        if hello.version != VERSION:
            raise BadPayload(f"runs protocol {hello.version}, this peer {VERSION}: update the older one")
        if hello.run != self._local.run:
            raise BadPayload(f"is in another run ({hello.run.hex()[:12]}), not in {self._local.run.hex()[:12]}")
        if hello.member.peer != peer:
            raise BadPayload(f"greets in the name of {hello.member.peer}")
        if not self._is_signed(hello):
            raise BadPayload("greets without a signature of its own")
        if self._local.stage:
            self._local.stage.seats.judge(hello)

    def rejection(self, hello: Hello, why: str) -> HelloRejected:
        """The answer to a greeting that `check` has refused."""
        stage = self._local.stage
        if stage is None or hello.run != self._local.run:
            return HelloRejected(why[:200])
        view = SeatsView(stage.seat.stage, stage.seats.shown())
        return HelloRejected(why[:200], seats=stage.seats.line(hello.stage), view=(view,))

    async def exchange(
        self, contact: PeerRecord, stream: Stream, on_refusal: Callable[[PeerId, HelloRejected], None]
    ) -> None:
        """Send heartbeats and receive their echoes until the stream ends. `on_refusal` raises."""
        sent: dict[int, float] = {}
        self._watched += 1
        try:
            async with task_group() as group:
                group.create_task(self._send(contact, stream, sent))
                await self._receive(contact, stream, sent, on_refusal)
        finally:
            self._watched -= 1

    async def _send(self, contact: PeerRecord, stream: Stream, sent: dict[int, float]) -> None:
        for before in itertools.count():
            self._number += 1
            sent[self._number] = asyncio.get_running_loop().time()
            await stream.send(self.pulse(self._number, before))
            with suppress(TimeoutError):
                async with asyncio.timeout(pulse_seconds(self._watched)):
                    await contact.hurry.wait()
            contact.hurry.clear()

    async def _receive(
        self,
        contact: PeerRecord,
        stream: Stream,
        sent: dict[int, float],
        on_refusal: Callable[[PeerId, HelloRejected], None],
    ) -> None:
        while True:
            echo = await stream.receive(wire.MAX_HEADER_BYTES)
            if isinstance(echo, HelloRejected):
                on_refusal(contact.peer, echo)
            if isinstance(echo, Crowded):
                contact.crowded_until = asyncio.get_running_loop().time() + CROWDED_SECONDS
                raise PeerGone(contact.peer, "it is watched by as many peers as it answers")
            pulse = wire.expect(echo, Heartbeat)
            began = sent.pop(pulse.number, None)
            if began is None:
                raise BadPayload("an echo of a pulse that was not sent")
            for older in [number for number in sent if number < pulse.number]:
                del sent[older]
            self._hear(contact, pulse, began)

    def _hear(self, contact: PeerRecord, echo: Heartbeat, began: float) -> None:
        now = asyncio.get_running_loop().time()
        contact.detector.hear(now)
        contact.echoed, contact.answered_at = echo, began
        self._take(contact, echo)
        contact.round_trip_seconds = now - began
        if contact.round_trip_seconds <= QUICK_SECONDS:
            contact.offset_seconds = echo.wall - (self._clock.wall() - contact.round_trip_seconds / 2)

    async def echo(self, contact: PeerRecord, hello: Hello, stream: Stream, answers: Callable[[], bool]) -> None:
        """Answer heartbeats until the watcher leaves, another process of the same peer completes a handshake, or this
        peer has too many watchers: `answers`, called at each heartbeat, returns whether to answer it.
        """
        for before in itertools.count():
            async with peer_timeout(IDLE_SECONDS, contact.peer, "it sends pulses"):
                pulse = wire.expect(await stream.receive(wire.MAX_HEADER_BYTES), Heartbeat)
            if contact.hello is None:
                return  # the table has dropped this peer; it may greet again
            if contact.hello.nonce != hello.nonce:
                return await stream.send(HelloRejected("another incarnation of it is known", (contact.hello,)))
            if not answers():
                return await stream.send(Crowded())
            self._take(contact, pulse)
            contact.called()
            await stream.send(self.pulse(pulse.number, before))
            await asyncio.sleep(GAP_SECONDS)
