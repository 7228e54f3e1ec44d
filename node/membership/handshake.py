"""The stream on which one peer watches another: greetings that are checked, heartbeats and their echoes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from node.membership.failure_detector import PULSE_SECONDS
from node.membership.hello import MAX_ADDRESSES, VERSION, Heartbeat, Hello, HelloRejected, signed_part
from node.membership.peer_record import PeerRecord
from protocols import wire
from protocols.aio import peer_timeout, task_group
from protocols.base import BadPayload, Clock, Member, PeerId, Signer, Stream

IDLE_SECONDS = 60.0
"""A peer that watches us and sends no heartbeat for so long is not served any more."""
GAP_SECONDS = 0.05
"""Between two answers to one peer: more heartbeats than that wait, which slows their sender down."""
QUICK_SECONDS = 2.0
"""An echo that took longer, having waited behind vectors, says nothing of a clock."""
DUPLICATE_IDENTITY = (
    "another process runs with this identity: two peers cannot share one; stop one, or give it its own --state-dir"
)


@dataclass(frozen=True, slots=True)
class LocalPeer:
    """What this peer says of itself in its greetings.

    Attributes:
        me: in this life.
        run: hash of the manifest, 32 bytes.
        life: drawn at random when the process started.
        addresses: where it can be dialled, as of now.
        round: the one it is in.
    """

    me: Member
    run: bytes
    life: int
    nickname: str
    addresses: Callable[[], Sequence[str]]
    round: Callable[[], int]


class HandshakeProtocol:
    """One peer's side of all such streams.

    Attributes:
        leaving: what heartbeats say: this peer is about to leave.
        sketch: what they say of its parameters (`node.outer.sketch`); empty: nothing.
    """

    def __init__(self, who: LocalPeer, clock: Clock, signer: Signer) -> None:
        self.leaving, self.sketch = False, b""
        self._who, self._clock, self._signer = who, clock, signer
        self._number = 0

    def hello(self) -> Hello:
        """What this peer says of itself now."""
        who = self._who
        addresses = tuple(who.addresses())[:MAX_ADDRESSES]
        hello = Hello(VERSION, who.run, who.me, who.life, who.nickname, addresses, b"")
        return replace(hello, signature=self._signer.sign(signed_part(hello)))

    def is_duplicate(self, hello: Hello) -> bool:
        """Whether this proves another life of ours in this run, one that is not earlier than this one."""
        who = self._who
        same = (hello.run, hello.member.peer) == (who.run, who.me.peer)
        later = hello.life != who.life and hello.member.incarnation >= who.me.incarnation
        return same and later and self._is_signed(hello)

    def _is_signed(self, hello: Hello) -> bool:
        return self._signer.verify(hello.member.peer, signed_part(hello), hello.signature)

    def _pulse(self, number: int) -> Heartbeat:
        return Heartbeat(number, self._clock.wall(), self._who.round(), self.leaving, self.sketch)

    def check(self, peer: PeerId, hello: Hello) -> None:
        """Refuse a peer that cannot be in this run.

        Raises:
            BadPayload: with a reason that the peer's user understands.
        """
        if hello.version != VERSION:
            raise BadPayload(
                f"speaks version {hello.version} of Starling, this peer speaks {VERSION}: update the older"
            )
        if hello.run != self._who.run:
            raise BadPayload(f"is in another run ({hello.run.hex()[:12]}), not in {self._who.run.hex()[:12]}")
        if hello.member.peer != peer:
            raise BadPayload(f"greets in the name of {hello.member.peer}")
        if not self._is_signed(hello):
            raise BadPayload("greets without a signature of its own")

    async def exchange(
        self, contact: PeerRecord, stream: Stream, on_refusal: Callable[[PeerId, HelloRejected], None]
    ) -> None:
        """Send pulses and take their echoes until the stream ends.

        Args:
            on_refusal: raises.
        """
        sent: dict[int, float] = {}

        async def send() -> None:
            while True:
                self._number += 1
                sent[self._number] = asyncio.get_running_loop().time()
                await stream.send(self._pulse(self._number))
                with suppress(TimeoutError):
                    async with asyncio.timeout(PULSE_SECONDS):
                        await contact.hurry.wait()
                contact.hurry.clear()

        async with task_group() as group:
            group.create_task(send())
            while True:
                echo = await stream.receive(wire.MAX_HEADER_BYTES)
                if isinstance(echo, HelloRejected):
                    on_refusal(contact.peer, echo)
                pulse = wire.expect(echo, Heartbeat)
                began = sent.pop(pulse.number, None)
                if began is None:
                    raise BadPayload("an echo of a pulse that was not sent")
                for older in [number for number in sent if number < pulse.number]:
                    del sent[older]
                self._hear(contact, pulse, began)

    def _hear(self, contact: PeerRecord, echo: Heartbeat, began: float) -> None:
        now = asyncio.get_running_loop().time()
        contact.suspicion.hear(now)
        contact.round, contact.leaving, contact.sketch = echo.round, echo.leaving, echo.sketch
        contact.round_trip_seconds = now - began
        if contact.round_trip_seconds <= QUICK_SECONDS:
            contact.offset_seconds = echo.wall - (self._clock.wall() - contact.round_trip_seconds / 2)

    async def echo(self, contact: PeerRecord, hello: Hello, stream: Stream) -> None:
        """Answer pulses until the watcher goes, or turns out to be a life that another has followed."""
        while True:
            async with peer_timeout(IDLE_SECONDS, contact.peer, "it sends pulses"):
                pulse = wire.expect(await stream.receive(wire.MAX_HEADER_BYTES), Heartbeat)
            if contact.hello is None:
                return  # forgotten: it may greet us again
            if contact.hello.life != hello.life:
                return await stream.send(HelloRejected("another life of it is known here", (contact.hello,)))
            contact.round, contact.leaving, contact.sketch = pulse.round, pulse.leaving, pulse.sketch
            contact.called()
            await stream.send(self._pulse(pulse.number))
            await asyncio.sleep(GAP_SECONDS)
