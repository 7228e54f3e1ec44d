"""Byzantine peers of independent protocols: a stream wrapper that changes what the honest code sends.

    nan … twice       each chunk of a state or a part, as in `tests.sim.byzantine.contributors`
    scaled            states and parts are multiplied by -1000
    reversed          states and parts are multiplied by -1; the norm is right, so no receiver can detect it
    replayed          each message has the sequence number of the one before to the same peer
    far-number        the first message has a far higher sequence number; the others have the right ones
    ahead             the round is a million too high
    round-back        the rounds go back
    hanging           a state is announced and never sent

A lie is either refused, and an honest receiver blames the liar in its report; or tolerated (`BORNE`), because no
receiver can detect it, or because it harms only the liar.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import torch

from protocols import wire
from protocols.base import Buffer, Header, PeerId
from protocols.moshpit.peer_tracker import PositionAnnouncement
from protocols.pairwise.push_sum import PushShare
from protocols.pairwise.state_swap import ExchangeMessage, ExchangeReply, ExchangeRequest
from protocols.streams.framing import FramedStream
from protocols.vectors.codec import codec, state_codec
from tests.sim.byzantine.contributors import ByzantineContributorStream
from tests.sim.pipe import SimPipe

FACTORS: Final = {"scaled": -1000.0, "reversed": -1.0}
AHEAD_ROUNDS = 10**6
_CHUNKS = ("nan", "infinity", "norm", "size", "endless-header", "garbage", "twice", "scaled")
REFUSED: Final = {
    "gossip": (*_CHUNKS, "replayed", "far-number", "round-back", "hanging"),
    "push_sum": _CHUNKS,
    "moshpit": _CHUNKS,
}
BORNE: Final = {
    "gossip": ("reversed", "ahead"),
    "push_sum": ("reversed", "ahead", "replayed", "far-number"),
    "moshpit": ("reversed", "ahead", "replayed", "hanging"),
}
INDEPENDENT_LIES: Final = {protocol: (*REFUSED[protocol], *BORNE[protocol]) for protocol in REFUSED}
"""Protocol -> its lies. The baselines, which tolerate no liar, are not in it."""


_CHANGES: Final[dict[tuple[str, type], Callable[[Any], Header]]] = {
    ("ahead", ExchangeRequest): lambda ask: _in_round(ask, ask.key.round + AHEAD_ROUNDS),
    ("ahead", PushShare): lambda give: _in_round(give, give.key.round + AHEAD_ROUNDS),
    ("ahead", ExchangeReply): lambda answer: replace(answer, round=AHEAD_ROUNDS),
    ("ahead", PositionAnnouncement): lambda here: replace(here, round=here.round + AHEAD_ROUNDS),
    ("replayed", PositionAnnouncement): lambda here: replace(here, number=1),
}


def _in_round(header: Any, number: int) -> Any:
    return replace(header, key=replace(header.key, round=number))


class ByzantinePeer:
    """One lying peer. `refused`: a receiver can detect the lie; `parts`: receivers average it, so no spread counts."""

    def __init__(self, protocol: str, lie: str, codec_name: str, chunk_elements: int) -> None:
        self.lie, self.refused, self.parts, self.lies = lie, lie in REFUSED[protocol], lie == "reversed", 0
        self._codec = state_codec(codec_name) if protocol == "moshpit" else codec(codec_name)
        self._chunk_elements, self._last = chunk_elements, defaultdict[PeerId, list[int]](list)

    def disguise(self, method: str, stream: FramedStream, pipe: SimPipe) -> ByzantineIndependentStream:
        return ByzantineIndependentStream(stream, pipe, self)

    def altered(self, peer: PeerId, header: Header) -> Header:
        if isinstance(header, ExchangeRequest | ExchangeReply | PushShare) and self.lie in (
            "replayed",
            "far-number",
            "round-back",
        ):
            return self._numbered(peer, header)
        change = _CHANGES.get((self.lie, type(header)))
        self.lies += change is not None
        return change(header) if change else header

    def _numbered(self, peer: PeerId, header: ExchangeMessage) -> ExchangeMessage:
        """The message with a false sequence number or round; the numbers sent to each peer are kept."""
        sent = self._last[peer]
        if not isinstance(header, ExchangeRequest | PushShare):
            self.lies += self.lie == "far-number"
            return replace(header, sequence=header.sequence + (self.lie == "far-number"))
        self.lies += bool(sent)  # the first message differs from no earlier one
        match self.lie:
            case "replayed" if sent:
                return replace(header, sequence=sent[-1])
            case "far-number" if not sent:
                header = replace(header, sequence=header.sequence + (1 << 39))
            case "round-back":
                header = _in_round(header, AHEAD_ROUNDS - len(sent))
        sent.append(header.sequence)
        return header

    def scaled(self, payload: Buffer) -> bytes:
        """A chunk of a state or a part, multiplied by the lie's factor; other payloads unchanged."""
        sizes = [each for each in range(self._chunk_elements, 0, -1) if self._codec.encoded_bytes(each) == len(payload)]
        if not sizes:
            return bytes(payload)  # no chunk of a vector
        vector = torch.empty(sizes[0])
        self._codec.decode(payload, vector)
        scaled = bytearray(len(payload))
        self._codec.encode(vector.mul_(FACTORS[self.lie]), memoryview(scaled))
        return bytes(scaled)


class ByzantineIndependentStream(ByzantineContributorStream):
    def __init__(self, stream: FramedStream, pipe: SimPipe, liar: ByzantinePeer) -> None:
        super().__init__(stream, pipe, liar.lie, None)  # type: ignore[arg-type]
        self._liar = liar

    async def send(self, header: Header, payload: Buffer = b"") -> None:
        if isinstance(header, wire.Chunk):
            return await self._send_chunk(header, payload)
        await self._stream.send(self._liar.altered(self._stream.peer, header), payload)

    async def _send_chunk(self, header: wire.Chunk | wire.Partial, payload: Buffer) -> None:
        liar = self._liar
        liar.lies += liar.lie in _CHUNKS or liar.lie in FACTORS or liar.lie == "hanging"
        if liar.lie in FACTORS:
            payload = liar.scaled(payload)
        elif liar.lie == "hanging":
            await asyncio.Event().wait()  # until the receiver's timeout
        await super()._send_chunk(header, payload)
