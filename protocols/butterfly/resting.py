"""Which members of a roster rest in a round, as they have signed it to all the others."""

# ruff: noqa: RUF009 - a field's bound is its default

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from protocols.base import BadPayload, Header, Member, PeerId, RoundKey, Signer
from protocols.wire import blob, canonical_bytes, flag, one, register, uint


@dataclass(frozen=True, slots=True)
class Resting(Header):
    """A member's signed statement to the whole roster that it rests, or that it works again.

    Only a higher `number` than before is taken: no statement of an earlier attempt at the round can be played again.
    """

    key: RoundKey = one(RoundKey)
    member: Member = one(Member)
    number: int = uint(1 << 40)
    rests: bool = flag()
    signature: bytes = blob(128)

    def signed(self) -> bytes:
        return b"starling resting" + canonical_bytes(replace(self, signature=b""))


register(192, (Resting,))


class RestingMembers:
    """What the members of a roster have said in one round about resting. It outlives the attempts at the round."""

    def __init__(self) -> None:
        self._last: dict[PeerId, Resting] = {}

    def peers(self) -> frozenset[PeerId]:
        return frozenset(peer for peer, statement in self._last.items() if statement.rests)

    def has_rested(self, peer: PeerId) -> bool:
        """Whether a member has said in this round that it rests, even if it works again."""
        return peer in self._last

    def state(self, key: RoundKey, me: Member, rests: bool, signer: Signer) -> Resting:
        known = self._last.get(me.peer)
        statement = Resting(key, me, known.number + 1 if known else 1, rests, b"")
        self._last[me.peer] = statement = replace(statement, signature=signer.sign(statement.signed()))
        return statement

    def take(self, statement: Resting, verify: Callable[[PeerId, bytes, bytes], bool]) -> bool:
        """Take a member's statement; whether it is newer than those before. Raises BadPayload if forged."""
        peer = statement.member.peer
        known = self._last.get(peer)
        if known and statement.number <= known.number:
            return False
        if not verify(peer, statement.signed(), statement.signature):
            raise BadPayload("a statement about resting with a forged signature")
        self._last[peer] = statement
        return True
