"""One exchange of whole states between two peers: the frames, and what each end makes of the other's state.

    asker                    answerer
    Ask             →
                    ←        Answer: yes, or busy, at once
    chunks          →  ←     chunks: both ways at the same time, into scratch, checked as they come
    Whole           →        has everything, and now knows that the asker has: moves
    moves           ←        Whole
    Whole           →        knows that both have moved

Neither end commits before both have everything. If the stream breaks between the initiator's first `StateReceived` and
the reply to it, the initiator asks once more, on a new stream (`OutcomeQuery`): an end that has not committed by then
never will. Only if that fails, too, one end may have committed alone: a half-finished exchange, which both count.

Chunks are bound by the stream that they are on, which the question opens.
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
from protocols.base import (
    BadPayload,
    Compute,
    Deadline,
    Header,
    Member,
    Members,
    PeerId,
    PeerSilent,
    RoundKey,
    Stream,
)
from protocols.chunks import send_vector
from protocols.codec import Codec
from protocols.limits import LARGEST_FLOAT32
from protocols.pairwise.state_receiver import StateReceiver
from protocols.vectors import VectorView, norm
from protocols.wire import flag, one, register, text, uint

EXCHANGE = "starling/gossip/exchange/1"
HEADER_LIMIT = 512


@dataclass(frozen=True, slots=True)
class ExchangeMessage(Header):
    """What every message of an exchange says.

    Attributes:
        key: of the asker's round, which need not be the answerer's; its lineage is the root of the asker's own state.
        sender: in this life.
        sequence: counts the asker's questions, in this life.
    """

    key: RoundKey = one(RoundKey)
    sender: Member = one(Member)
    sequence: int = uint(1 << 40)

    @property
    def name(self) -> str:
        """Of the question, where it or `OutcomeQuery` says this: no other is called so."""
        return f"{self.sender.peer}.{self.sender.incarnation}/{self.sequence}"


@dataclass(frozen=True, slots=True)
class ExchangeRequest(ExchangeMessage):
    """Asks for an exchange of states of so many elements, in this codec."""

    elements: int = uint(1 << 48)
    codec: str = text(16)

    def rank(self) -> bytes:
        """Of two questions that cross, the lower goes on: both ends see the same order, and no peer is always first."""
        return hashlib.sha256(wire.body(self)).digest()


@dataclass(frozen=True, slots=True)
class ExchangeReply(ExchangeMessage):
    """Whether the exchange begins; if not, the sender is busy: in another one, or between two rounds.

    Attributes:
        round: that the sender has come to the end of last; the asker's is in its question.
    """

    accepted: bool = flag()
    round: int = uint(1 << 40)


@dataclass(frozen=True, slots=True)
class StateReceived(ExchangeMessage):
    """The sender has the other's state, all of it, and nothing is wrong with it; see above for what it promises."""


@dataclass(frozen=True, slots=True)
class OutcomeQuery(ExchangeMessage):
    """The asker had no answer to its `StateReceived`: has the receiver moved? If not, it must not any more."""


@dataclass(frozen=True, slots=True)
class OutcomeReply(ExchangeMessage):
    """Whether the answerer has moved."""

    moved: bool = flag()


MESSAGES: tuple[type[Header], ...] = (ExchangeRequest, ExchangeReply, StateReceived, OutcomeQuery, OutcomeReply)
register(64, MESSAGES)

MessageType = TypeVar("MessageType", bound=ExchangeMessage)


async def hear(stream: Stream, kind: type[MessageType], ask: ExchangeMessage) -> MessageType:
    """The next message of the exchange that `ask` began.

    Raises:
        BadPayload: another message, or of another exchange or sender.
        PeerSilent: the stream broke off.
    """
    message = wire.expect(await stream.receive(HEADER_LIMIT), kind)
    if (message.key, message.sequence) != (ask.key, ask.sequence) or message.sender.peer != stream.peer:
        raise BadPayload(f"{kind.__name__} of another exchange")
    return message


async def watch(members: Members, partner: Member, deadline: Deadline) -> None:
    """
    Raises:
        PeerSilent: the partner is not believed alive any more, in this life, or the deadline has passed.
    """
    gone = await until_gone(members, [partner], deadline)
    raise PeerSilent(partner.peer, "lost in the middle of it" if gone else "it did not end in time")


class StateSwap:
    """One end of an exchange. `state` is read until it is moved, and nobody else may change it meanwhile.

    The move: with own state x, and Q(x) what the partner decodes of it, x ← x − Q(x) + ½Q(x) + ½Q(y). Then the sum of
    both states stays what it was, whatever the codec loses (up to the rounding of float32), so errors of the codec do
    not add up in the mean of all; and both ends hold the same but for x − Q(x), their own rest: in fp32 the same bits.

    Why one half, and not weights by tokens: a state is not one round's work. The matrix of a pair with halves is doubly
    stochastic, so the mean of all states stays where it is, and all come near it. With weights of the two who happen to
    meet it is not: states of peers that once met a light one would count more for ever, and no fixed mean would be left
    to come near. Tokens have had their say before: who trained more has moved its own state further. To weigh states,
    weights have to travel and be averaged with them: that is push-sum (`protocols.pairwise.mass_ledger`).

    Attributes:
        moved: the norm of what the state was moved by; None: it was not.
        size_bytes, chunks: of one state, encoded.
    """

    def __init__(self, state: VectorView, codec: Codec, chunk_elements: int, compute: Compute) -> None:
        self.state = state
        self.moved: float | None = None
        self._theirs = StateReceiver(ReducedPart(codec, 0, state.size, chunk_elements), compute)
        self._part, self._codec, self._compute = self._theirs.part, codec, compute
        self.size_bytes, self.chunks = self._part.size_bytes, self._part.chunks

    @property
    def begun(self) -> bool:
        """Whether something of the partner's state has come."""
        return self._theirs.begun

    @property
    def most(self) -> float:
        """As `drift`, at most, without computing it."""
        ours = self._theirs.ours
        return (ours + self._theirs.norm) / 2 / ours if ours else 0.0

    async def transfer(self, stream: Stream) -> None:
        """Send our state and take theirs, both at once.

        Raises:
            BadPayload: what came breaks the rules: its size, its order, NaN, a norm far off.
            PeerSilent: the stream broke off, or our own state is none to give away.
        """
        await self._theirs.measure(stream, self.state)
        async with task_group() as group:
            group.create_task(send_vector(stream, self._part, self.state, self._compute))
            await self._theirs.take(stream)

    async def commit(self) -> None:
        """Put the state at the mean, all of it; once begun, it is done even if the caller is cancelled."""
        await self._compute.run(partial(self._mix, True), 24 * self.state.size)

    async def drift(self) -> float:
        """By how much it was moved, or would have been: as a share of its norm before."""
        moved, ours = self.moved, self._theirs.ours
        if moved is None:
            moved = await self._compute.run(partial(self._mix, False), 24 * self.state.size)
        return moved / ours if ours else 0.0

    def discard(self) -> None:
        """Their state is needed no more; what is known of it, and of the move, stays."""
        self._part = self._theirs.part = ReducedPart(self._codec, 0, 0)

    def _mix(self, write: bool) -> float:
        """Compute the move of every element, and apply it if `write`; returns its L2 norm. Runs off the loop.

        Multiplications and additions stay separate, so that the bits are the same on every machine.
        """
        theirs, buffer = self._part, self._part.chunk_buffer()
        squares = 0.0
        for index, low, high, (room, sent, half, mixed) in theirs.pieces(4):
            mine, data = self.state.read(low, high, room), buffer(index)
            self._codec.encode(mine, data)
            self._codec.decode(data, sent)
            theirs.decode_chunk(index, None, mixed)
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
    """The name of the state that `peer` sent in this exchange: never given twice."""
    return ask.name if peer == ask.sender.peer else f"{ask.name} by {peer}"
