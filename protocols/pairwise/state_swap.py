"""One exchange of whole states between two peers: its frames, and how each end uses the other's state.

    initiator                  responder
    ExchangeRequest   →
                      ←        ExchangeReply: yes, or busy, at once
    chunks            →  ←     chunks: both ways at the same time, into scratch, checked as they come
    StateReceived     →        has everything, and knows that the initiator has: commits
    commits           ←        StateReceived
    StateReceived     →        knows that both have committed

Neither end commits before both have everything. If the stream breaks between the initiator's first `StateReceived` and
the reply to it, the initiator asks once more, on a new stream (`OutcomeQuery`). An end that has not committed by then
never will. Only if that query fails too may one end have committed alone. This is a half-finished exchange, which both
ends count.

Chunks belong to the exchange whose request opened their stream.
"""

# ruff: noqa: RUF009 - a field's bound is its default

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch

from protocols import wire
from protocols.aio import task_group, until_gone
from protocols.allreduce.parts import ReducedPart
from protocols.base import BadPayload, Compute, Deadline, Header, Member, Members, PeerId, PeerSilent, RoundKey, Stream
from protocols.pairwise.state_receiver import StateReceiver
from protocols.streams.chunks import send_vector
from protocols.vectors.views import LARGEST_FLOAT32, VectorView, norm
from protocols.wire import flag, one, register, text, uint

EXCHANGE = "starling/gossip/exchange/1"
HEADER_LIMIT = 512


@dataclass(frozen=True, slots=True)
class ExchangeMessage(Header):
    """What every message of an exchange says.

    Attributes:
        key: of the asker's round, which need not be the answerer's; its lineage is the root of the asker's own state.
        sender: the sending member.
        sequence: counts the requests of the asker's incarnation.
    """

    key: RoundKey = one(RoundKey)
    sender: Member = one(Member)
    sequence: int = uint(1 << 40)

    @property
    def name(self) -> str:
        """The unique name of the request, in the request itself and in `OutcomeQuery`."""
        return f"{self.sender.peer}.{self.sender.incarnation}/{self.sequence}"


@dataclass(frozen=True, slots=True)
class ExchangeRequest(ExchangeMessage):
    """Asks for an exchange of states with this many elements, in this codec."""

    elements: int = uint(1 << 48)
    codec: str = text(16)

    def rank(self) -> bytes:
        """Of two requests that cross, the lower rank wins. Both ends compute the same order, and no peer always
        wins.
        """
        return hashlib.sha256(wire.canonical_bytes(self)).digest()


@dataclass(frozen=True, slots=True)
class ExchangeReply(ExchangeMessage):
    """Whether the exchange begins. If not, the sender is busy: in another exchange, or between two rounds.

    Attributes:
        round: the last round that the sender completed; the asker's is in its request.
    """

    accepted: bool = flag()
    round: int = uint(1 << 40)


@dataclass(frozen=True, slots=True)
class StateReceived(ExchangeMessage):
    """The sender has the other's whole state, and it is valid. The module docstring says what this promises."""


@dataclass(frozen=True, slots=True)
class OutcomeQuery(ExchangeMessage):
    """Asks whether the receiver has moved, after no answer to `StateReceived`. If it has not, it must not any more."""


@dataclass(frozen=True, slots=True)
class OutcomeReply(ExchangeMessage):
    """Whether the answerer has moved."""

    moved: bool = flag()


register(64, (ExchangeRequest, ExchangeReply, StateReceived, OutcomeQuery, OutcomeReply))

MessageType = TypeVar("MessageType", bound=ExchangeMessage)


async def hear(stream: Stream, kind: type[MessageType], ask: ExchangeMessage) -> MessageType:
    """Receive the next message of the exchange that `ask` began.

    Raises:
        BadPayload: another message, or one of another exchange or sender.
        PeerSilent: the stream broke off.
    """
    message = wire.expect(await stream.receive(HEADER_LIMIT), kind)
    if (message.key, message.sequence) != (ask.key, ask.sequence) or message.sender.peer != stream.peer:
        raise BadPayload(f"{kind.__name__} of another exchange")
    return message


async def watch(members: Members, partner: Member, deadline: Deadline) -> None:
    """Wait until the partner is lost or the deadline has passed, then raise.

    Raises:
        PeerSilent: this incarnation of the partner is no longer considered live, or the deadline has passed.
    """
    gone = await until_gone(members, [partner], deadline)
    raise PeerSilent(partner.peer, "lost in the middle of it" if gone else "it did not end in time")


class StateSwap:
    """One end of an exchange. Until `state` is moved, the exchange reads it and nothing else may change it.

    The move: with own state x, and Q(x) what the partner decodes of it, x ← x − Q(x) + ½Q(x) + ½Q(y). The sum of both
    states is then unchanged, whatever the codec loses (up to the rounding of float32), so codec errors do not
    accumulate in the mean of all peers. Both ends then hold the same, except for their own x − Q(x); in fp32 they hold
    the same bits.

    Why one half, and not weights by tokens: a state is not the work of one round. With halves, the matrix of a pair is
    doubly stochastic, so the mean of all states is unchanged and all states approach it. With weights of the two peers
    that happen to meet, it is not: states of peers that once met a light one would count more for ever, and there would
    be no fixed mean to approach. Tokens already count: a peer that trained more has moved its own state further. To
    weigh states, weights must travel and be averaged with them. That is push-sum (`protocols.pairwise.mass_ledger`).

    Attributes:
        moved: the norm of the state's move; None if it was not moved.
        size_bytes, chunks: of one encoded state.
    """

    def __init__(self, state: VectorView, part: ReducedPart, compute: Compute) -> None:
        """
        Args:
            part: an empty encoded state of the same size, which takes the partner's.
        """
        self.state = state
        self.moved: float | None = None
        self._theirs = StateReceiver(part, compute)
        self._codec, self._compute = part.codec, compute
        self.size_bytes, self.chunks = part.size_bytes, part.chunks

    @property
    def begun(self) -> bool:
        """Whether any of the partner's state has arrived."""
        return self._theirs.begun

    @property
    def most(self) -> float:
        """An upper bound of `drift` that needs no computation."""
        ours = self._theirs.ours
        return (ours + self._theirs.norm) / 2 / ours if ours else 0.0

    async def transfer(self, stream: Stream) -> None:
        """Send our state and receive the partner's, both at once.

        Raises:
            BadPayload: the received data has a wrong size or order, NaN, or a norm far off.
            PeerSilent: the stream broke off, or our own state must not be sent.
        """
        await self._theirs.measure(stream, self.state)
        async with task_group() as group:
            group.create_task(send_vector(stream, self._theirs.part, self.state, self._compute))
            await self._theirs.take(stream)

    async def commit(self) -> None:
        """Move the whole state to the mean. Once begun, this completes even if the caller is cancelled."""
        await self._compute.run(partial(self._mix, True), 24 * self.state.size)

    async def drift(self) -> float:
        """The length of the move, done or not, as a share of the state's norm before."""
        moved, ours = self.moved, self._theirs.ours
        if moved is None:
            moved = await self._compute.run(partial(self._mix, False), 24 * self.state.size)
        return moved / ours if ours else 0.0

    def discard(self) -> None:
        """Free the partner's state; what is known of it and of the move remains."""
        self._theirs.part = ReducedPart(self._codec, 0, 0)

    def _mix(self, write: bool) -> float:
        """Compute the move of every element, and apply it if `write`; returns its L2 norm. Runs off the loop.

        Multiplications and additions stay separate, so that the bits are the same on every machine.
        """
        theirs, buffer = self._theirs.part, self._theirs.part.chunk_buffer()
        squares = 0.0
        for index, low, high, (scratch, sent, half, mixed) in theirs.pieces(4):
            mine, data = self.state.read(low, high, scratch), buffer(index)
            self._codec.encode(mine, data)
            self._codec.decode(data, sent)
            self._codec.decode(theirs.chunk(index), mixed)
            mixed.mul_(0.5).add_(torch.mul(sent, 0.5, out=half))
            mixed.add_(torch.sub(mine, sent, out=half)).clamp_(-LARGEST_FLOAT32, LARGEST_FLOAT32)
            squares += norm([torch.sub(mixed, mine, out=half)]) ** 2
            if write:
                self.state.write(low, mixed)
        moved = math.sqrt(squares)
        if write:
            self.moved = moved
        return moved


def exchange_id(peer: PeerId, ask: ExchangeRequest) -> str:
    """The unique name of the state that `peer` sent in this exchange."""
    return ask.name if peer == ask.sender.peer else f"{ask.name} by {peer}"
