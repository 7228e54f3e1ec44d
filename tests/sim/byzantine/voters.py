"""Byzantine reducers and voters: what they send is changed, and signed again where the liar has the key."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from protocols import wire
from protocols.allreduce.parts import chunk_digest, part_digest, part_message
from protocols.allreduce.plan import plan_digest
from protocols.base import Buffer, Header, Member, PeerId, RoundKey, Signer
from protocols.consensus import record as records
from protocols.consensus.messages import Accept, Certificate, Signed
from protocols.streams.framing import FramedStream


class ByzantineVoterStream:
    """A stream that changes every message to which its lie applies.

    Args:
        dupes: the peers that get the second version, where the liar sends two.
        plans: the plans that this liar has sent or received, by digest; shared by all its streams.
    """

    def __init__(
        self,
        stream: FramedStream,
        lie: str,
        signer: Signer,
        dupes: Collection[PeerId],
        plans: dict[bytes, wire.Plan],
    ) -> None:
        self._plans = plans
        self._stream, self._lie, self._signer, self._dupes = stream, lie, signer, dupes
        self._opening: wire.Contribute | None = None
        self._masks: list[int] = []
        self._digests: list[bytes] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    async def receive(self, limit: int) -> Header:
        header = await self._stream.receive(limit)
        if isinstance(header, wire.Contribute):
            self._opening = header
        self._note(header)
        return header

    def _note(self, header: Header) -> None:
        if isinstance(header, wire.Plan):
            self._plans[plan_digest(header)] = header

    async def send(self, header: Header, payload: Buffer = b"") -> None:
        self._note(header)
        match self._lie:
            case "two-parts" if self._opening and self._stream.peer in self._dupes:
                header, payload = self._other_part(self._opening, header, payload)
            case "forged-certificate" if isinstance(header, Accept):
                await self._stream.send(forged(header.key, header.sender, self._members()))
            case "usurped-plan" if isinstance(header, wire.Ready) and header.offer.complete:
                await self._stream.send(usurped(header))
        await self._stream.send(header, payload)

    def _members(self) -> set[Member]:
        """The members of the plans that this liar knows: the roster, if every member contributes."""
        return {offer.member for plan in self._plans.values() for offer in plan.offers}

    def _other_part(self, opening: wire.Contribute, header: Header, payload: Buffer) -> tuple[Header, Buffer]:
        """Another mean than the other members get, sealed and signed correctly."""
        if isinstance(header, wire.Reduced):
            data = bytearray(payload)
            data[0] ^= 1  # the last bit of a number, or of a scale
            payload = bytes(data)
            self._masks.append(header.mask)
            self._digests.append(chunk_digest(header.mask, data))
        elif isinstance(header, wire.PartDone):
            low, high = self._plans[opening.plan].bounds[opening.part : opening.part + 2]
            done = replace(header, result=part_digest(low, high, self._masks, self._digests), signature=b"")
            signature = self._signer.sign(part_message(opening.key, opening.plan, done))
            header = replace(done, signature=signature)
        return header, payload


def made_up(key: RoundKey, roster: Collection[Member], state_root: bytes = bytes(32)) -> bytes:
    return records.encode(
        records.Record(key.lineage, state_root, key.round, records.Kind.SKIP, bytes(32), (), tuple(sorted(roster)))
    )


def forged(key: RoundKey, sender: Member, roster: Collection[Member], voters: Collection[Member] = ()) -> Certificate:
    """A certificate with invalid votes of `voters`, or of the sender alone, on a record with this roster."""
    votes = tuple(Signed(voter, bytes(32)) for voter in voters or (sender,))
    return Certificate(key, sender, 0, made_up(key, roster), votes)


def usurped(ready: wire.Ready) -> wire.Plan:
    return wire.Plan(ready.key, 0, 0, (ready.offer,), (0, 1), (0,), 0.0, 10.0)
