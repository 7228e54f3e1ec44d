"""Who may take part in a private run: passes, revocations, and the decision about a peer. Pure.

A pass is a chain of links from the run's founder to its holder, each signed by the holder of the one before:

    link          msgpack [1, run, issuer, subject, kind, serial, depth, not_after]
    revocation    msgpack [run, subject, issuer, time]

Signatures are over a tag and these bytes. Keys are raw Ed25519 keys. Nothing here is secret: only the holder of the
last subject's key can use a pass, because libp2p has authenticated each peer by its key.

A revocation holds if its issuer is the founder, or stands above the subject in the chain that is presented. A chain
with a revoked subject anywhere is refused: the guests of a revoked peer go, too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import msgpack

from node.runtime.identity import peer_id_of, verify
from protocols.base import BadPayload
from protocols.wire import blob, canonical_bytes, digest, from_canonical_bytes, list_of, one, uint

LINK_TAG, REVOKE_TAG = b"starling pass 1\n", b"starling revoke 1\n"
PEER, VISITOR = 0, 1  # Kinds of a link. A visitor may read the status and fetch the model, for a short time.
MAX_DEPTH = 3
MAX_LINKS = MAX_DEPTH + 2  # four peers, and a visitor of the last of them
VISIT_SECONDS = 600
MAX_REVOCATIONS = 1024
MAX_REVOCATIONS_OF_ONE = 64
"""Of one issuer that is not the founder, so that no member fills the set alone: it only grows."""
MAX_TIME = 1 << 40
REMOVED = "removed from the run"
_LINK_VERSION = 1

Inviters = Literal["members", "founder"]
Sign = Callable[[bytes], bytes]


@dataclass(frozen=True, slots=True)
class PassLink:
    """The issuer's statement that the subject may take part, and how many peers' links may follow."""

    version: int = uint(1 << 8)
    run: bytes = digest()
    issuer: bytes = digest()
    subject: bytes = digest()
    kind: int = uint(VISITOR)
    serial: bytes = blob(16, 16)
    depth: int = uint(MAX_DEPTH)
    not_after: int = uint(MAX_TIME)  # seconds since 1970; 0: never
    signature: bytes = blob(64)

    @property
    def signed(self) -> bytes:
        values = [getattr(self, name) for name in self.__slots__[:-1]]
        return LINK_TAG + bytes(msgpack.packb(values))


@dataclass(frozen=True, slots=True)
class Pass:
    """A chain of links. The founder's own has none."""

    links: tuple[PassLink, ...] = list_of(one(PassLink), MAX_LINKS)

    @property
    def is_visitors(self) -> bool:
        return bool(self.links) and self.links[-1].kind == VISITOR

    def is_barred_by(self, revocation: Revocation) -> bool:
        """Whether the issuer stands above the subject in this chain, as the founder does above all."""
        subjects, issuers = [link.subject for link in self.links], [link.issuer for link in self.links]
        place = subjects.index(revocation.subject) if revocation.subject in subjects else -1
        return revocation.issuer in issuers[: place + 1]

    def encode(self) -> bytes:
        return canonical_bytes(self)

    @staticmethod
    def decode(data: bytes) -> Pass:
        """Raises `BadPayload`, also for another spelling of a pass."""
        found = from_canonical_bytes(Pass, data)
        if found.encode() != data:
            raise BadPayload("a pass that is not in its canonical spelling")
        return found


NO_PASS = Pass(())


@dataclass(frozen=True, slots=True)
class Revocation:
    """The issuer's statement that the subject may no longer take part."""

    run: bytes = digest()
    subject: bytes = digest()
    issuer: bytes = digest()
    time: int = uint(MAX_TIME)  # seconds since 1970
    signature: bytes = blob(64)

    @property
    def signed(self) -> bytes:
        return REVOKE_TAG + bytes(msgpack.packb([self.run, self.subject, self.issuer, self.time]))


@dataclass(frozen=True, slots=True)
class _RevocationList:
    items: tuple[Revocation, ...] = list_of(one(Revocation), MAX_REVOCATIONS)


def issue_link(
    sign: Sign, subject: bytes, *, issuer: bytes, run: bytes, kind: int, serial: bytes, depth: int, not_after: int
) -> PassLink:
    draft = PassLink(_LINK_VERSION, run, issuer, subject, kind, serial, depth, not_after, b"")
    return replace(draft, signature=sign(draft.signed))


def revoke(sign: Sign, issuer: bytes, subject: bytes, *, run: bytes, time: int) -> Revocation:
    draft = Revocation(run, subject, issuer, time, b"")
    return replace(draft, signature=sign(draft.signed))


class Revocations:
    """Those of one run: a set that only grows, and that peers merge by union.

    Of the same issuer and subject, the earliest counts. All of the founder's have a place, up to `MAX_REVOCATIONS`.
    """

    def __init__(self, run: bytes, founder: bytes) -> None:
        self._run, self._founder = run, founder
        self._found: dict[tuple[bytes, bytes], Revocation] = {}  # by subject and issuer
        self.digest = hashlib.sha256(self.encode()).digest()

    def merge(self, others: Iterable[Revocation]) -> bool:
        """Add the genuine ones; returns whether the set has grown. `BadPayload` if one is forged or of another run."""
        new = [each for each in others if self._is_new(each)]
        for each in new:
            if each.run != self._run or not verify(peer_id_of(each.issuer), each.signed, each.signature):
                raise BadPayload("a revocation that is forged, or of another run")
        grown = False
        for each in new:
            key = (each.subject, each.issuer)
            if self._is_new(each) and (key in self._found or self._has_place(each.issuer)):
                self._found[key] = each
                grown = True
        if grown:
            self.digest = hashlib.sha256(self.encode()).digest()
        return grown

    def _is_new(self, revocation: Revocation) -> bool:
        before = self._found.get((revocation.subject, revocation.issuer))
        return before is None or (revocation.time, revocation.signature) < (before.time, before.signature)

    def _has_place(self, issuer: bytes) -> bool:
        of_founder = sum(key[1] == self._founder for key in self._found)
        if issuer == self._founder:
            if len(self._found) >= MAX_REVOCATIONS > of_founder:
                del self._found[next(key for key in self._found if key[1] != self._founder)]
            return of_founder < MAX_REVOCATIONS
        of_one = sum(key[1] == issuer for key in self._found)
        return len(self._found) < MAX_REVOCATIONS and of_one < MAX_REVOCATIONS_OF_ONE

    def barring(self, shown: Pass) -> Revocation | None:
        """A revocation that holds against a pass: its issuer stands above the subject, as the founder always does."""
        pairs = (
            (link.subject, above.issuer) for place, link in enumerate(shown.links, 1) for above in shown.links[:place]
        )
        return next((self._found[pair] for pair in pairs if pair in self._found), None)

    def has(self, subject: bytes, issuer: bytes) -> bool:
        return (subject, issuer) in self._found

    def encode(self) -> bytes:
        """Canonical bytes: the same for the same set."""
        return canonical_bytes(_RevocationList(tuple(self._found[key] for key in sorted(self._found))))

    @staticmethod
    def decode(data: bytes) -> tuple[Revocation, ...]:
        """Raises `BadPayload`. Nothing is verified yet."""
        return from_canonical_bytes(_RevocationList, data).items


@dataclass(frozen=True, slots=True)
class PrivateRun:
    """What decisions need to know of a run. Keys are 32 bytes."""

    run: bytes
    founder: bytes
    inviters: Inviters = "members"

    def why_not(self, shown: Pass, subject: bytes, revoked: Revocations, now: float) -> str:
        """Why the peer with this key is not admitted with the pass that it shows; empty if it is.

        `now` is wall time, corrected by the others' clocks. Signatures are verified last: strangers shall cost little.
        """
        if why := self._misfit(shown.links, subject):
            return why
        if any(link.not_after and now > link.not_after for link in shown.links):
            return "the pass has expired"
        if revoked.barring(shown):
            return REMOVED
        if not all(verify(peer_id_of(link.issuer), link.signed, link.signature) for link in shown.links):
            return "the pass is forged"
        return ""

    def _misfit(self, links: Sequence[PassLink], subject: bytes) -> str:
        """Why these links do not lead from the founder to the peer, even if they are genuine; empty if they do."""
        if not links:
            return "" if subject == self.founder else "there is no pass"
        if any(link.version != _LINK_VERSION or link.run != self.run for link in links):
            return "the pass is for another run"
        issuers = [self.founder, *(link.subject for link in links)]
        if issuers.pop() != subject or issuers != [link.issuer for link in links]:
            return "the pass is another peer's"
        left = self.first_depth + 1  # the depth of the next peer's link must be below; negative: no link may follow
        for link in links:
            if link.kind == VISITOR and (left < 0 or link.depth or not link.not_after):
                return "the pass gives a visitor too much"
            if link.kind == PEER and link.depth >= left:
                return "the pass was issued by a peer that may not invite"
            left = link.depth if link.kind == PEER else -1
        return ""

    @property
    def first_depth(self) -> int:
        """Depth of the links that the founder issues."""
        return MAX_DEPTH if self.inviters == "members" else 0

    def depth_below(self, holder: Pass) -> int:
        """Depth of the peers' links that the holder of a pass may issue; negative: it may issue none."""
        return holder.links[-1].depth - 1 if holder.links else self.first_depth
