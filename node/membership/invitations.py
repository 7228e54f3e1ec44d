"""Tickets to a private run, and the issuer's account of who has used them. Pure.

    ticket        "starling1" and base32, lower case, of the bytes below and the first 4 of their SHA-256
    for anybody   1, run 32, issuer's key 32, seed 32, not_after 5, addresses of the issuer without its peer id
    for a peer    2, run 32, size 2, the peer's pass, addresses of members
    address       size 1, a multiaddr in bytes; at most 3

The seed is that of an Ed25519 key. It is neither stored by the issuer nor ever sent: a joiner proves that it has it by
a signature over the run, the issuer and its own key. So a witness of the exchange cannot redeem the ticket.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from multiaddr import Multiaddr

from node.membership.admission import NO_PASS, Pass, PassLink
from node.runtime.identity import peer_id_of
from protocols.base import BadPayload, PeerId
from protocols.wire import canonical_bytes, from_canonical_bytes

PREFIX = "starling1"
REDEEM_TAG = b"starling redeem 1\n"
MAX_ADDRESSES, MAX_CHARACTERS = 3, 4096
MAX_USES, MAX_TICKETS = 100, 200
MISTYPED = "this ticket is mistyped or incomplete: copy it whole, from starling1 to its end"
_FOR_ANYBODY, _FOR_PEER = 1, 2
_KEY, _TIME, _CHECK = 32, 5, 4


class TicketError(ValueError):
    """A ticket that cannot be used. The message is one line for the user."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """An invitation. Either it has a seed and an issuer, who counts its uses, or the pass of one peer."""

    run: bytes
    issuer: bytes  # its key
    not_after: int = 0  # seconds since 1970; 0: never
    seed: bytes = field(default=b"", repr=False)
    shown: Pass = NO_PASS
    addresses: tuple[str, ...] = ()  # multiaddrs that end in /p2p/<peer id>

    @property
    def key(self) -> bytes:
        """The ticket's public key, by which the issuer knows it."""
        return _public(self.seed)

    def redeem(self, asker: bytes) -> bytes:
        """The signature that lets the peer with this key, and no other, redeem the ticket."""
        return Ed25519PrivateKey.from_private_bytes(self.seed).sign(redeemed_part(self.run, self.issuer, asker))

    def encode(self) -> str:
        addresses = [_without_peer(each) if self.seed else each for each in self.addresses[:MAX_ADDRESSES]]
        if self.seed:
            body = bytes((_FOR_ANYBODY,)) + self.run + self.issuer + self.seed + self.not_after.to_bytes(_TIME, "big")
        else:
            shown = self.shown.encode()
            body = bytes((_FOR_PEER,)) + self.run + len(shown).to_bytes(2, "big") + shown
        packed = [Multiaddr(each).to_bytes() for each in addresses]
        body += b"".join(bytes((len(each),)) + each for each in packed if len(each) < 256)
        body += hashlib.sha256(body).digest()[:_CHECK]
        return PREFIX + _spelled(body)


def read_ticket(text: str) -> Ticket:
    """Read a ticket as a user has pasted it, perhaps in several lines. Raises TicketError."""
    text = "".join(text[: 2 * MAX_CHARACTERS].split()).strip("\"'").lower()
    if not text.startswith(PREFIX) or len(text) > MAX_CHARACTERS:
        raise TicketError(MISTYPED)
    code = text.removeprefix(PREFIX)
    try:
        body = base64.b32decode(code.upper() + "=" * (-len(code) % 8))
        body, check = body[:-_CHECK], body[-_CHECK:]
        if hashlib.sha256(body).digest()[:_CHECK] != check or _spelled(body + check) != code:
            raise TicketError(MISTYPED)
        return _decoded(_Reader(body))
    except (binascii.Error, ValueError, BadPayload) as error:
        raise error if isinstance(error, _NotKnown) else TicketError(MISTYPED) from None


class _NotKnown(TicketError):
    pass


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._left = data

    def take(self, count: int) -> bytes:
        taken, self._left = self._left[:count], self._left[count:]
        if len(taken) < count:
            raise TicketError(MISTYPED)
        return taken

    def addresses(self) -> list[str]:
        found: list[str] = []
        while self._left and len(found) < MAX_ADDRESSES:
            found.append(str(Multiaddr(self.take(self.take(1)[0]))))
        if self._left:
            raise TicketError(MISTYPED)
        return found


def _decoded(reader: _Reader) -> Ticket:
    kind = reader.take(1)[0]
    run = reader.take(_KEY)
    if kind == _FOR_ANYBODY:
        issuer, seed = reader.take(_KEY), reader.take(_KEY)
        not_after = int.from_bytes(reader.take(_TIME), "big")
        at = tuple(f"{each}/p2p/{peer_id_of(issuer)}" for each in reader.addresses())
        return Ticket(run, issuer, not_after, seed, addresses=at)
    if kind == _FOR_PEER:
        shown = Pass.decode(reader.take(int.from_bytes(reader.take(2), "big")))
        if not shown.links:
            raise TicketError(MISTYPED)
        return Ticket(run, shown.links[-1].issuer, shown=shown, addresses=tuple(reader.addresses()))
    raise _NotKnown("this ticket is of a later version of Starling: update this one")


def redeemed_part(run: bytes, issuer: bytes, asker: bytes) -> bytes:
    return REDEEM_TAG + run + issuer + asker


def _public(seed: bytes) -> bytes:
    return Ed25519PrivateKey.from_private_bytes(seed).public_key().public_bytes_raw()


def _spelled(body: bytes) -> str:
    return base64.b32encode(body).decode().rstrip("=").lower()


def _without_peer(address: str) -> str:
    return address.rpartition("/p2p/")[0]


# -- the issuer's account ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Invite:
    """A ticket that this peer has made, as it remembers it: without the seed."""

    number: int  # from 1
    key: bytes  # the ticket's public key
    uses: int
    not_after: int
    void: bool = False
    links: tuple[PassLink, ...] = ()  # those that were issued for it, one for each peer

    @property
    def used_by(self) -> tuple[PeerId, ...]:
        return tuple(peer_id_of(link.subject) for link in self.links)


@dataclass(frozen=True, slots=True)
class Invitations:
    """All tickets that this peer has made in one run. A value: it changes by being replaced."""

    run: bytes
    invites: tuple[Invite, ...] = ()

    def add(self, key: bytes, uses: int, not_after: int, now: float) -> Invitations:
        """With one more, at the end. `TicketError` if there are too many."""
        kept = self.invites
        if len(kept) >= MAX_TICKETS:  # those that cannot be used again, and whose peers have their passes
            kept = tuple(each for each in kept if not each.void and now <= each.not_after)
        if len(kept) >= MAX_TICKETS:
            raise TicketError(f"{MAX_TICKETS} tickets can be used: revoke some of them first (starling revoke NUMBER)")
        number = max((each.number for each in self.invites), default=0) + 1
        return replace(self, invites=(*kept, Invite(number, key, uses, not_after)))

    def find(self, key: bytes) -> Invite | None:
        return next((each for each in self.invites if each.key == key), None)

    def why_not(self, key: bytes, subject: bytes, now: float) -> str:
        """Why the peer with the key `subject` may not redeem a ticket; empty if it may."""
        found = self.find(key)
        if found is None:
            return "this peer has made no such ticket: ask for another"
        if found.void:
            return "this ticket was revoked: ask the one who sent it for another"
        if any(link.subject == subject for link in found.links):
            return ""
        if now > found.not_after:
            return "this ticket has expired: ask the one who sent it for another"
        if len(found.links) >= found.uses:
            last = peer_id_of(found.links[-1].subject)
            return (
                f"this ticket was used by another peer (…{last[-6:]}): ask for another, and say so if that was not you"
            )
        return ""

    def redeemed(self, key: bytes, link: PassLink) -> Invitations:
        changed = (replace(each, links=(*each.links, link)) if each.key == key else each for each in self.invites)
        return replace(self, invites=tuple(changed))

    def voided(self, number: int) -> Invitations:
        changed = (replace(each, void=True) if each.number == number else each for each in self.invites)
        return replace(self, invites=tuple(changed))

    def as_json(self) -> dict[str, Any]:
        return {
            "run": self.run.hex(),
            "invites": [
                {
                    "number": each.number,
                    "key": each.key.hex(),
                    "uses": each.uses,
                    "not_after": each.not_after,
                    "void": each.void,
                    "links": [canonical_bytes(link).hex() for link in each.links],
                }
                for each in self.invites
            ],
        }

    @staticmethod
    def of_json(data: Mapping[str, Any]) -> Invitations:
        """Raises ValueError, KeyError, TypeError or BadPayload if it is damaged."""
        return Invitations(
            bytes.fromhex(data["run"]),
            tuple(
                Invite(
                    int(each["number"]),
                    bytes.fromhex(each["key"]),
                    int(each["uses"]),
                    int(each["not_after"]),
                    bool(each["void"]),
                    tuple(from_canonical_bytes(PassLink, bytes.fromhex(link)) for link in each["links"]),
                )
                for each in data["invites"]
            ),
        )
