"""One exchange of whole states between two peers: its frames, and how each end receives and uses the other's state.

    initiator                  responder
    ExchangeRequest   →
                      ←        ExchangeReply: yes, or busy, at once
    chunks            →  ←     chunks: both ways at the same time, into scratch, checked as they come
    StateReceived     →        has everything, and knows that the initiator has: commits
    commits           ←        StateReceived
    StateReceived     →        knows that both have committed

Neither end commits before both have everything. If the stream breaks between the initiator's first `StateReceived` and
the reply to it, the initiator asks once more, on a new stream (`OutcomeQuery`). An end that has not committed by then
never will. Only if that query fails too may one end have committed alone: a half-finished exchange, which both count.
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
from protocols.aio import task_group
from protocols.allreduce.parts import ReducedPart
from protocols.base import BadPayload, Compute, Header, Member, PeerSilent, RoundKey, Stream, Vector
from protocols.streams.chunks import receive_chunk, send_vector
from protocols.vectors.views import LARGEST_FLOAT32, VectorView, norm
from protocols.wire import flag, one, register, text, uint

EXCHANGE = "starling/gossip/exchange/1"
HEADER_LIMIT = 512
PAIR_NORM_SPREAD = 16.0
"""A state is refused if its norm is more than this many times ours. If ours is 0, only `wire.MAX_NORM` limits it."""


@dataclass(frozen=True, slots=True)
class ExchangeMessage(Header):
    key: RoundKey = one(RoundKey)  # of the asker's round; its lineage is the root of the asker's own state
    sender: Member = one(Member)
    sequence: int = uint(1 << 40)  # counts the requests of the asker's incarnation

    @property
    def name(self) -> str:
        """The unique name of the request, in the request itself and in `OutcomeQuery`."""
        return f"{self.sender.peer}.{self.sender.incarnation}/{self.sequence}"


@dataclass(frozen=True, slots=True)
class ExchangeRequest(ExchangeMessage):
    elements: int = uint(1 << 48)
    codec: str = text(16)

    def rank(self) -> bytes:
        """Of two requests that cross, the lower rank wins: at both ends the same one, and no peer always wins."""
        return hashlib.sha256(wire.canonical_bytes(self)).digest()


@dataclass(frozen=True, slots=True)
class ExchangeReply(ExchangeMessage):
    """Whether the exchange begins. If not, the sender is busy: in another exchange, or between two rounds."""

    accepted: bool = flag()
    round: int = uint(1 << 40)  # the last that the sender completed; the asker's is in its request


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
    """Receive the next message of the exchange that `ask` began; `BadPayload` if it is of another one or sender."""
    message = wire.expect(await stream.receive(HEADER_LIMIT), kind)
    if (message.key, message.sequence) != (ask.key, ask.sequence) or message.sender.peer != stream.peer:
        raise BadPayload(f"{kind.__name__} of another exchange")
    return message


class StateReceiver:
    """Receives another peer's encoded state into `part`, and compares it with our own state, chunk by chunk."""

    def __init__(self, part: ReducedPart, compute: Compute) -> None:
        self.part = part
        self.begun = False  # a first header has arrived
        self.ours = math.nan  # L2 norm of our state
        self._compute, self._squares, self._limit = compute, 0.0, 0.0

    @property
    def norm(self) -> float:
        return math.sqrt(self._squares)

    async def measure(self, stream: Stream, state: VectorView) -> None:
        """Compute the norm of our own state, which limits that of the peer's. Only a finite state is for others."""
        self.ours = await self._compute.run(partial(state_norm, state, self.part), 4 * state.size)
        if not math.isfinite(self.ours):
            raise PeerSilent(stream.peer, "our own state is not finite: it is not for others")
        self._limit = PAIR_NORM_SPREAD * self.ours if self.ours > 0 else wire.MAX_NORM

    async def take(self, stream: Stream) -> None:
        """Receive all chunks. `BadPayload`: wrong size or order, an element that is not finite, or too large a norm."""
        scratch = self.part.scratch_vector()
        for index in range(self.part.chunks):
            data = self.part.chunk(index)
            await receive_chunk(stream, index, data, self._on_header)
            await self._compute.run(partial(self._check, index, scratch), 2 * len(data))

    def _on_header(self, header: Header) -> None:
        self.begun = True

    def _check(self, index: int, scratch: Vector) -> None:
        self._squares += norm([self.part.decoded(index, scratch)]) ** 2
        if not self._squares <= self._limit * self._limit:
            raise BadPayload(f"a state of norm above {self._limit:.3g}, {PAIR_NORM_SPREAD:g} times ours")


def state_norm(state: VectorView, part: ReducedPart) -> float:
    """L2 norm of a state, read in the chunks of `part`. Not finite if an element is not."""
    pieces = (state.read(low, high, scratch) for _, low, high, (scratch,) in part.pieces(1))
    return math.sqrt(math.fsum(norm([piece]) ** 2 for piece in pieces))


class StateSwap:
    """One end of an exchange. Until `state` is moved, the exchange reads it and nothing else may change it.

    The move: with own state x, and Q(x) what the partner decodes of it, x ← x − Q(x) + ½Q(x) + ½Q(y). The sum of both
    states is unchanged, whatever the codec loses. In fp32 both ends then hold the same bits. With one half, and not
    weights by tokens, a pair's matrix is doubly stochastic, so all states approach their mean. To weigh states is push-
    sum.
    """

    def __init__(self, state: VectorView, part: ReducedPart, compute: Compute) -> None:
        """`part` is an empty encoded state of the same size, which takes the partner's."""
        self.state = state
        self.moved: float | None = None  # the norm of the state's move
        self._theirs = StateReceiver(part, compute)
        self._codec, self._compute = part.codec, compute
        self.size_bytes, self.chunks = part.size_bytes, part.chunks

    @property
    def begun(self) -> bool:
        return self._theirs.begun

    @property
    def most(self) -> float:
        ours = self._theirs.ours
        return (ours + self._theirs.norm) / 2 / ours if ours else 0.0

    async def transfer(self, stream: Stream) -> None:
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
        self._theirs.part = ReducedPart(self._codec, 0, 0)

    def _mix(self, write: bool) -> float:
        """Compute the move, apply it if `write`; returns its L2 norm. Separate operations: the same bits everywhere."""
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
