"""Shows passes to other peers of a private run, asks for theirs, and keeps strangers out. Revocations spread with it.

asker                           answerer
Present            ->
                   <-           Presented, or PassRefused   (both passes are checked: both may open streams)
WantRevocations    ->                                       (only if the digests of the two sets differ)
                   <-           RevocationList
RevocationList     ->

Redeem             ->                                       (to the peer that has made the ticket)
                   <-           Redeemed, or PassRefused

A peer that opens a stream to one that it has not met presents itself first. It does so before each greeting, too:
so two peers that meet after a partition compare their revocations. A peer whose set has grown presents itself again
to all live peers that may not have it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from node.membership.admission import (
    MAX_LINKS,
    MAX_REVOCATIONS,
    NO_PASS,
    Pass,
    PassLink,
    PrivateRun,
    Revocation,
    Revocations,
)
from node.membership.hello import BOOTSTRAP_METHOD, HELLO, MAX_NICKNAME_CHARACTERS, PASS_METHOD
from node.runtime.identity import public_key_of
from protocols import wire
from protocols.aio import loop_time, peer_timeout, task_group
from protocols.base import (
    BadPayload,
    Deadline,
    Header,
    NotAccepted,
    PeerError,
    PeerGone,
    PeerId,
    PeerSilent,
    Stream,
    Transport,
)
from protocols.peers.estimates import RecentDict
from protocols.streams.framing import CATCH_UP_METHODS
from protocols.wire import blob, digest, list_of, one, optional, register, text, uint

VISITORS_METHODS = CATCH_UP_METHODS | {BOOTSTRAP_METHOD}
MAX_ADMITTED = 1024
PRESENT_SECONDS, ANSWER_SECONDS = 5.0, 5.0
SPREAD_SECONDS = 1.0
PRIVATE = "this run is private: ask a member for a ticket (starling invite)"
_MAX_WHY_CHARACTERS = 200
_REVOCATION_BYTES = 256


@dataclass(frozen=True, slots=True)
class Present(Header):
    """Shows the sender's pass; answered with `Presented`, or with `PassRefused`."""

    run: bytes = digest()
    links: tuple[PassLink, ...] = list_of(one(PassLink), MAX_LINKS)
    revocations: bytes = digest()  # of the sender's set


@dataclass(frozen=True, slots=True)
class Presented(Header):
    links: tuple[PassLink, ...] = list_of(one(PassLink), MAX_LINKS)
    revocations: bytes = digest()


@dataclass(frozen=True, slots=True)
class PassRefused(Header):
    """Why; and the revocation that holds against the receiver, if there is one, which it can verify."""

    why: str = text(_MAX_WHY_CHARACTERS)
    revoked: tuple[Revocation, ...] = optional(one(Revocation), 1)


@dataclass(frozen=True, slots=True)
class WantRevocations(Header):
    run: bytes = digest()


@dataclass(frozen=True, slots=True)
class RevocationList(Header):
    """Announces all revocations that the sender knows: `size` bytes follow."""

    size: int = uint(MAX_REVOCATIONS * _REVOCATION_BYTES)


@dataclass(frozen=True, slots=True)
class Redeem(Header):
    """Asks for a pass for a ticket. The signature, by the ticket's key, is for the sender and the receiver only."""

    run: bytes = digest()
    ticket: bytes = digest()
    signature: bytes = blob(64)
    nickname: str = text(MAX_NICKNAME_CHARACTERS)


@dataclass(frozen=True, slots=True)
class Redeemed(Header):
    links: tuple[PassLink, ...] = list_of(one(PassLink), MAX_LINKS)
    nickname: str = text(MAX_NICKNAME_CHARACTERS)


register(208, (Present, Presented, PassRefused, WantRevocations, RevocationList, Redeem, Redeemed))

Answer = Callable[[PeerId, Redeem], Awaitable[Redeemed | PassRefused]]


class NotAdmitted(PeerGone):
    """A peer of a private run does not admit this one."""


class _Admitted:
    def __init__(self, shown: Pass) -> None:
        self.shown = shown
        self.synced = b""  # digest of this peer's revocations when the two last had the same


class PassExchange:
    """`node.streams.serving.Access` of a peer that may be in a private run. Open until it is closed.

    Closed, it serves no stranger. Before `enter`, it serves nobody at all.
    """

    def __init__(self, me: PeerId, now: Callable[[], float]) -> None:
        """`now` returns wall time, corrected by the others' clocks."""
        self.run: PrivateRun | None = None
        self.shown: Callable[[], Pass] = lambda: NO_PASS  # this peer's own
        self.answer_redeem: Answer = _no_ticket
        self.keep: Callable[[bytes], Coroutine[Any, Any, None]] = _forget  # saves the revocations
        self.on_barred: Callable[[Revocation], None] = lambda revocation: None  # this peer's own pass is revoked
        self.expel: Callable[[PeerId], None] = lambda peer: None  # ends all streams from and to a peer
        self.served: Callable[[], Collection[PeerId]] = tuple  # peers that have streams open
        self.revoked = Revocations(b"", b"")
        self.is_closed = False
        self._me, self._now = me, now
        self._transport: Transport | None = None
        self._admitted: RecentDict[PeerId, _Admitted] = RecentDict(MAX_ADMITTED)
        self._grown = asyncio.Event()
        self._saving: asyncio.Task[None] | None = None

    def serve(self, transport: Transport) -> None:
        self._transport = transport
        transport.serve(PASS_METHOD, self._serve)

    # -- the run ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Serve nobody until the run is known."""
        self.is_closed, self.run = True, None
        self._admitted.clear()

    def enter(self, run: PrivateRun, shown: Callable[[], Pass], saved: Collection[Revocation] = ()) -> None:
        """Be a peer of this run from now on, with this pass. Peers that were admitted before are judged again.

        `BadPayload` if the `saved` revocations are not of this run.
        """
        before = self.run and (self.run.run, self.run.founder)
        if before != (run.run, run.founder):
            self.revoked = Revocations(run.run, run.founder)
        self.revoked.merge(saved)
        self.is_closed, self.run, self.shown = True, run, shown
        self._judge_again()

    def open(self) -> None:
        """Let everybody in: the run is not private."""
        self.run, self.is_closed = None, False
        self._admitted.clear()

    def why_not(self, peer: PeerId, shown: Pass) -> str:
        """Why a peer is not admitted with a pass; empty if it is."""
        try:
            key = public_key_of(peer)
        except ValueError:
            return "its identity is not an Ed25519 key"
        assert self.run is not None
        return self.run.why_not(shown, key, self.revoked, self._now())

    def has_removed(self, peer: PeerId) -> bool:
        """Whether the founder has removed this peer itself: for good, whatever pass it shows.

        Two peers with the same revocations agree. Guests of a removed peer, and those whom another peer than the
        founder has removed, may come back with a pass from others.
        """
        try:
            return self.run is not None and self.revoked.has(public_key_of(peer), self.run.founder)
        except ValueError:  # rosters come from others
            return False

    def pass_of(self, peer: PeerId) -> Pass | None:
        """The pass that a peer has shown, if it is admitted; this peer's own, too."""
        if peer == self._me:
            return self.shown()
        found = self._entry(peer)
        return found.shown if found else None

    def _entry(self, peer: PeerId) -> _Admitted | None:
        """Of a peer that is admitted now."""
        entry = self._admitted.get(peer)
        if entry and any(link.not_after and self._now() > link.not_after for link in entry.shown.links):
            del self._admitted[peer]
            return None
        return entry

    def _admit(self, peer: PeerId, shown: Pass) -> str:
        """Why a peer is not admitted with a pass that it shows now; empty if it is. What it has shown before stays."""
        why = self.why_not(peer, shown)
        before = self._admitted.get(peer)
        if not why and (before is None or before.shown != shown):
            self._admitted[peer] = _Admitted(shown)
        return why

    def _judge_again(self) -> None:
        for peer, entry in list(self._admitted.items()):
            if self.why_not(peer, entry.shown):
                del self._admitted[peer]
                self.expel(peer)
        for peer in {*self.served()}.difference(self._admitted):  # it has open streams, and was forgotten
            self.expel(peer)
        if barring := self.revoked.barring(self.shown()):
            self.on_barred(barring)

    # -- `Access` -----------------------------------------------------------------------------------------------------

    def serves(self, peer: PeerId, method: str) -> bool:
        if not self.is_closed or method == PASS_METHOD:
            return self.is_closed or method != PASS_METHOD
        entry = self._entry(peer)
        if entry is None:
            return False
        self._admitted[peer] = entry  # the newest
        return method in VISITORS_METHODS or not entry.shown.is_visitors

    async def before(self, peer: PeerId, method: str, deadline: Deadline) -> None:
        if not self.is_closed or method == PASS_METHOD:
            return
        if self.run is None:
            raise PeerGone(peer, "this peer has no pass yet")
        entry = self._entry(peer)
        if method != HELLO and entry and not entry.shown.is_visitors:
            return
        try:
            await self.present(peer, deadline)
        except NotAccepted:
            if method != BOOTSTRAP_METHOD:  # by that a peer asks in which run another is, which may be open
                raise

    async def refused(self, peer: PeerId, method: str, deadline: Deadline) -> bool:
        if method == PASS_METHOD:
            return False
        if not self.is_closed:
            if method == BOOTSTRAP_METHOD:
                await self._ask_why(peer, deadline)
            return False
        with suppress(NotAccepted):
            await self.present(peer, deadline)
            return True
        return False

    # -- presenting ---------------------------------------------------------------------------------------------------

    async def present(self, peer: PeerId, deadline: Deadline) -> None:
        """Show this peer's pass, check the other's, and make the revocations of both the same.

        `PeerGone` if one of them does not admit the other, and for other failures, except a missed deadline: nothing
        of a caller's stream has been sent yet.
        """
        try:
            await self._present(peer, deadline)
        except BadPayload as error:
            raise PeerGone(peer, f"does not show its pass as it should: {error}") from None
        except PeerSilent as error:
            if loop_time() >= deadline:
                raise
            raise PeerGone(peer, f"does not show its pass: {error.why}") from None

    async def _present(self, peer: PeerId, deadline: Deadline) -> None:
        run, shown = self.run, self.shown()
        assert run is not None and self._transport is not None
        until = min(deadline, loop_time() + PRESENT_SECONDS)
        async with self._transport.open(peer, PASS_METHOD, until) as stream:
            await stream.send(Present(run.run, shown.links, self.revoked.digest))
            answer = await stream.receive(wire.MAX_HEADER_BYTES)
            if isinstance(answer, PassRefused):
                await self._learn([each for each in answer.revoked if shown.is_barred_by(each)])
                raise NotAdmitted(peer, f"it does not admit this peer: {answer.why}")
            presented = wire.expect(answer, Presented)
            if why := self._admit(peer, Pass(presented.links)):
                raise PeerGone(peer, f"it is not admitted to the run: {why}")
            same = self.revoked.digest
            if presented.revocations != same and not shown.is_visitors:
                await stream.send(WantRevocations(run.run))
                await self._learn(await _received(stream))
                same = self.revoked.digest
                await _send(stream, self.revoked)
            self._note_synced(peer, same)

    async def _ask_why(self, peer: PeerId, deadline: Deadline) -> None:
        """Raise `NotAdmitted` if a peer did not accept a stream because its run is private."""
        assert self._transport is not None
        until = min(deadline, loop_time() + PRESENT_SECONDS)
        with suppress(NotAccepted, PeerSilent, BadPayload):
            async with self._transport.open(peer, PASS_METHOD, until) as stream:
                await stream.send(Present(bytes(32), (), bytes(32)))
                answer = await stream.receive(wire.MAX_HEADER_BYTES)
                raise NotAdmitted(peer, wire.expect(answer, PassRefused).why)

    def _note_synced(self, peer: PeerId, same: bytes) -> None:
        if entry := self._admitted.get(peer):
            entry.synced = same

    async def _learn(self, revocations: Collection[Revocation]) -> None:
        if revocations and self.revoked.merge(revocations):
            await self._on_grown()

    async def _on_grown(self) -> None:
        self._grown.set()
        # In a task of its own: the stream that has brought the news may be one of those that end now.
        saving = asyncio.create_task(self.keep(self.revoked.encode()))
        self._saving = saving
        self._judge_again()
        await asyncio.shield(saving)

    async def revoke(self, revocation: Revocation) -> bool:
        """Add one of this peer's own; returns whether the set has it now.

        Then its subject's streams have ended, and it is saved.
        """
        if self.revoked.merge((revocation,)):
            await self._on_grown()
        return self.revoked.has(revocation.subject, revocation.issuer)

    async def spread(self, live: Callable[[], Collection[PeerId]]) -> None:
        """Tell the live peers of revocations that they may not know, for ever."""

        told: set[PeerId] = set()  # those that are being told: one that hangs does not delay the others

        async def tell(peer: PeerId) -> None:
            with suppress(PeerError):
                await self.present(peer, loop_time() + PRESENT_SECONDS)
            told.discard(peer)

        async with task_group() as group:
            while True:
                self._grown.clear()
                admitted = {peer: self._entry(peer) for peer in live()} if self.run else {}
                for peer, entry in admitted.items():
                    if entry and entry.synced != self.revoked.digest and peer not in told:
                        told.add(peer)
                        group.create_task(tell(peer))
                with suppress(TimeoutError):
                    async with asyncio.timeout(SPREAD_SECONDS):
                        await self._grown.wait()

    # -- answering ----------------------------------------------------------------------------------------------------

    async def _serve(self, peer: PeerId, stream: Stream) -> None:
        async with peer_timeout(ANSWER_SECONDS, peer, "it shows its pass"):
            request = await stream.receive(wire.MAX_HEADER_BYTES)
        if isinstance(request, Redeem):
            return await stream.send(await self.answer_redeem(peer, request))
        request = wire.expect(request, Present)
        shown = Pass(request.links)
        if self.run is None:
            raise PeerSilent(peer, "comes before this peer is in its run")
        if why := self._admit(peer, shown):
            bars = self.revoked.barring(shown)
            return await stream.send(PassRefused(why if shown.links else PRIVATE, (bars,) if bars else ()))
        await stream.send(Presented(self.shown().links, self.revoked.digest))
        if request.revocations == self.revoked.digest:
            return self._note_synced(peer, request.revocations)
        if not shown.is_visitors:
            async with peer_timeout(ANSWER_SECONDS, peer, "it compares revocations"):
                wire.expect(await stream.receive(wire.MAX_HEADER_BYTES), WantRevocations)
                await _send(stream, self.revoked)
                await self._learn(await _received(stream))


async def _send(stream: Stream, revoked: Revocations) -> None:
    data = revoked.encode()
    await stream.send(RevocationList(len(data)), data)


async def _received(stream: Stream) -> tuple[Revocation, ...]:
    data = bytearray(wire.expect(await stream.receive(wire.MAX_HEADER_BYTES), RevocationList).size)
    await stream.receive_into(memoryview(data))
    return Revocations.decode(bytes(data))


async def _forget(revocations: bytes) -> None:
    pass


async def _no_ticket(peer: PeerId, request: Redeem) -> PassRefused:
    return PassRefused("it has made no ticket")
