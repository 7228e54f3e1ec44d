"""A peer's side of a private run: its pass, the tickets that it makes, the members that it knows, and removals.

It does nothing in an open run, except that it refuses the commands `invite` and `revoke`.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from node.config.manifest import Manifest, ManifestError, unseal
from node.membership.admission import (
    NO_PASS,
    PEER,
    VISIT_SECONDS,
    VISITOR,
    Pass,
    PassLink,
    PrivateRun,
    Revocation,
    issue_link,
    revoke,
)
from node.membership.hello import PASS_METHOD
from node.membership.invitations import (
    MAX_USES,
    Invitations,
    Ticket,
    redeemed_part,
)
from node.membership.pass_exchange import PRIVATE, PassExchange, PassRefused, Redeem, Redeemed
from node.membership.peer_record import PeerRecord
from node.network.address_scope import Scope, scope
from node.reporting.status import MAX_NAME, printable, short
from node.runtime.identity import Identity, is_peer_id, load, peer_id_of, public_key_of, verify
from node.runtime.program import typed
from node.session.fatal import FatalPeerError, NotInvited
from node.session.status_tracker import StatusTracker
from node.session.swarm_poller import SwarmPoller
from node.storage.pass_files import PassFiles
from node.storage.statedir import StateDir, StateError
from protocols import wire
from protocols.aio import loop_time
from protocols.base import BadPayload, Clock, Compute, Deadline, PeerError, PeerId, PeerSilent, Transport

CONNECT_SECONDS = 8.0
RETRY_SECONDS = (1.0, 2.0, 5.0, 10.0)
OPEN = "this run is open: others join by the line that status prints; join --private starts a private one"
NARROW = "this ticket works in your own network only: nobody outside can reach a member (starling doctor)"
_WHOLE_ID = ": give the whole id of a new peer (its page and status --json show it, and join if it refuses a ticket)"
_STARTING = "the peer is starting: ask again in a few seconds"

DialAddress = Callable[[str, Deadline], Awaitable[PeerId]]


def private_run(manifest: Manifest) -> PrivateRun | None:
    """What admission needs to know of a run; None if it is open."""
    if manifest.config.admission is None:
        return None
    inviters = manifest.config.inviters or "members"
    return PrivateRun(bytes.fromhex(manifest.run_id), public_key_of(manifest.founder.peer), inviters)


def is_private(directory: Path) -> bool:
    """Whether a state directory is of a private run."""
    manifest = read_manifest(directory)
    return manifest is not None and private_run(manifest) is not None


def visitors_access(directory: Path, visitor: PeerId, clock: Clock) -> PassExchange:
    """Access to a private run for an identity that exists only for a visit.

    The key of the state directory, whose peer may run, signs its passes, each for ten minutes. Raises FatalPeerError.
    """
    manifest = read_manifest(directory)
    run = private_run(manifest) if manifest else None
    if run is None:
        raise FatalPeerError(f"{directory} is not of a private run: leave --state-dir out")
    signer, store = load(directory / "identity.key"), PassFiles(directory)
    exchange = PassExchange(visitor, clock.wall)
    try:
        own = NO_PASS if public_key_of(signer.peer_id) == run.founder else store.shown(run.run)
        if own is None:
            raise NotInvited(f"{directory} holds no pass to its run: {PRIVATE}")
        links = own.links

        def shown() -> Pass:
            until = int(clock.wall()) + VISIT_SECONDS
            return Pass((*links, _link(signer, public_key_of(visitor), run.run, VISITOR, 0, until)))

        _enter(exchange, run, shown, store)
    except StateError as error:
        raise FatalPeerError(str(error)) from None
    return exchange


def _enter(exchange: PassExchange, run: PrivateRun, shown: Callable[[], Pass], store: PassFiles) -> None:
    """Be in a run with the removals that a directory holds. Raises StateError."""
    try:
        exchange.enter(run, shown, store.revocations(run.run))
    except BadPayload:
        raise StateError(f"{store.revoked} is damaged: delete it, and others tell who was removed") from None


def read_manifest(directory: Path) -> Manifest | None:
    """That of the run which a state directory holds; None if there is none, or if this version cannot read it."""
    try:
        sealed = (directory / "manifest.bin").read_bytes()
        return unseal(sealed, verify)
    except (OSError, ManifestError):
        return None


def _link(signer: Identity, subject: bytes, run: bytes, kind: int, depth: int, not_after: int = 0) -> PassLink:
    key, serial = public_key_of(signer.peer_id), secrets.token_bytes(16)
    return issue_link(
        signer.sign, subject, issuer=key, run=run, kind=kind, serial=serial, depth=depth, not_after=not_after
    )


class PrivateMembership:
    """Composes `PassExchange` with this peer's files, key and user. Commands raise ValueError with a line."""

    def __init__(
        self, state: StateDir, files: Compute, clock: Clock, nickname: str, say: Callable[[str], None]
    ) -> None:
        self.exchange = PassExchange(state.identity.peer_id, self.now)
        self.offset_seconds: Callable[[], float] = lambda: 0.0
        self.contacts: Callable[[], Sequence[PeerRecord]] = tuple
        self._identity, self._me = state.identity, state.identity.peer_id
        self._key = public_key_of(self._me)
        self._files, self._store = files, PassFiles(state.path)
        self._clock, self._nickname, self._say = clock, nickname, say
        self._pass = NO_PASS
        self._invitations = Invitations(b"")
        self._changing = asyncio.Lock()
        self._inviter = ""  # nickname of the peer that has redeemed this one's ticket, as it said
        self._is_new = False  # the pass is of this start
        self._manifest: Manifest | None = None
        self.exchange.answer_redeem = self._answer_redeem
        self.exchange.keep = self._keep_revocations

    def now(self) -> float:
        """Wall time, corrected by the others' clocks."""
        return self._clock.wall() + self.offset_seconds()

    # -- into the run -------------------------------------------------------------------------------------------------

    def prepare(self, ticket: Ticket | None, held: Manifest | None, founds_private: bool) -> None:
        """Close before anything is served, if the run will be private; `held` is the run of the state directory."""
        run = private_run(held) if held else None
        if ticket:
            if ticket.issuer == self._key:
                raise FatalPeerError("this peer has made this ticket itself: another peer joins by it")
            kept = ticket.shown if ticket.shown.links else self._store.shown(ticket.run)
            self.exchange.close()
            if kept and (kept.links[-1].issuer == ticket.issuer or ticket.shown.links):
                self._accept(ticket.run, kept)
        elif run and run.founder == self._key:
            self._enter(run, NO_PASS)
        elif run and (kept := self._store.shown(run.run)):
            self._enter(run, kept)
        elif founds_private:
            self.exchange.close()

    def _enter(self, run: PrivateRun, shown: Pass) -> None:
        self._pass = shown
        _enter(self.exchange, run, lambda: self._pass, self._store)

    def _accept(self, run: bytes, shown: Pass) -> None:
        """Use a pass before the manifest is there. Whether its first issuer is the founder, the manifest will tell."""
        self._enter(PrivateRun(run, shown.links[0].issuer), shown)
        if why := self.exchange.why_not(self._me, shown):
            raise NotInvited(f"the pass for this run does not admit this peer ({why}): ask for another ticket")

    async def redeem(self, ticket: Ticket, transport: Transport, connect: DialAddress) -> None:
        """Get a pass for a ticket from the peer that has made it, however long that is away. Raises FatalPeerError."""
        if self.exchange.run is not None:  # there is a pass already
            if ticket.shown.links:
                await self._files.run(partial(self._store.keep_pass, ticket.shown), 0)
                self._is_new = True
            return
        issuer, said = peer_id_of(ticket.issuer), False
        attempt = 0
        while (redeemed := await self._redeemed_at(ticket, issuer, transport, connect)) is None:
            if not said:
                at = f"{len(ticket.addresses)} address{'es' * (len(ticket.addresses) != 1)}"
                who = f"the peer that made this ticket ({short(issuer)})"
                self._say(f"{who} cannot be reached at {at}: it must run (retrying)")
                said = True
            await asyncio.sleep(RETRY_SECONDS[min(attempt, len(RETRY_SECONDS) - 1)])
            attempt += 1
        shown = Pass(redeemed.links)
        if not shown.links or shown.links[-1].issuer != ticket.issuer:
            raise NotInvited("the peer that made this ticket has issued no pass for it: ask another member")
        self._accept(ticket.run, shown)
        await self._files.run(partial(self._store.keep_pass, shown), 0)
        self._inviter, self._is_new = printable(redeemed.nickname)[:MAX_NAME], True

    async def _redeemed_at(
        self, ticket: Ticket, issuer: PeerId, transport: Transport, connect: DialAddress
    ) -> Redeemed | None:
        """The issuer's answer; None if it cannot be reached now."""
        request = Redeem(ticket.run, ticket.key, ticket.redeem(self._key), self._nickname)
        for address in ticket.addresses:
            until = loop_time() + CONNECT_SECONDS
            try:
                await connect(address, until)
                async with transport.open(issuer, PASS_METHOD, until) as stream:
                    await stream.send(request)
                    answer = await stream.receive(wire.MAX_HEADER_BYTES)
            except (PeerError, BadPayload, ValueError):
                continue
            if isinstance(answer, Redeemed):
                return answer
            if isinstance(answer, PassRefused):
                raise NotInvited(printable(answer.why))
        return None

    def enter(self, manifest: Manifest) -> None:
        """Be in this run from now on. Raises FatalPeerError if it is private and this peer has no pass."""
        self._manifest, run = manifest, private_run(manifest)
        if run is None:
            return self.exchange.open()
        shown = NO_PASS if run.founder == self._key else self._pass if self._pass.links else None
        if shown is None:
            raise NotInvited(PRIVATE)
        self._enter(run, shown)
        self._invitations = self._store.invitations(run.run)
        if why := self.exchange.why_not(self._me, shown):
            raise NotInvited(f"this peer's pass does not admit it to the run ({why}): ask a member for a ticket")
        if self._is_new:
            self._say(self._admitted_line(manifest))
            self._is_new = False

    def _admitted_line(self, manifest: Manifest) -> str:
        founder, inviter = manifest.founder.peer, peer_id_of(self._pass.links[-1].issuer)
        named = f"{self._inviter} ({short(inviter)})".lstrip()
        run = f"run {printable(manifest.config.name)} ({manifest.run_id[:6]}…)"
        if inviter == founder:
            return f"{run}, founded by {named}, who invited you: admitted"
        return f"{run}, founded by {short(founder)}; {named} invited you: admitted"

    async def _keep_revocations(self, encoded: bytes) -> None:
        if self._manifest is None:  # the directory is of another run, or of none
            return
        try:
            await self._files.run(partial(self._store.keep_revocations, encoded), 0)
        except StateError as error:
            self._say(f"{error}; until it is saved, who was removed is known to this peer only while it runs")

    # -- tickets ------------------------------------------------------------------------------------------------------

    def _require_run(self) -> PrivateRun:
        if self._manifest is None:
            raise ValueError(_STARTING)
        if self.exchange.run is None:
            raise ValueError(OPEN)
        return self.exchange.run

    async def invite(self, uses: int, seconds: float, peer: PeerId, addresses: Sequence[str]) -> Mapping[str, object]:
        """Make a ticket for `uses` peers, or for one whose id is known; `addresses` are this peer's."""
        run = self._require_run()
        depth = run.depth_below(self._pass)
        if depth < 0:
            only = "in this run only the founder invites" if run.inviters == "founder" else "this peer may not invite"
            raise ValueError(f"{only}: ask {short(peer_id_of(run.founder))}")
        if peer:
            return self._invite_one(run, peer, depth, addresses)
        if not 1 <= uses <= MAX_USES:
            raise ValueError(f"a ticket is for 1 to {MAX_USES} peers, not {uses}")
        key = Ed25519PrivateKey.generate()
        until = int(self.now() + seconds)
        async with self._changing:
            changed = self._invitations.add(key.public_key().public_bytes_raw(), uses, until, self.now())
            await self._files.run(partial(self._store.keep_invitations, changed), 0)
            self._invitations = changed
        ticket = Ticket(run.run, self._key, until, key.private_bytes_raw(), addresses=_best(addresses))
        whom = "one person" if uses == 1 else f"{uses} people"
        return _answer(
            ticket, f"For {whom}, until {day(until, seconds)}.", addresses, number=changed.invites[-1].number
        )

    def _invite_one(self, run: PrivateRun, who: str, depth: int, addresses: Sequence[str]) -> Mapping[str, object]:
        if (peer := self._one_peer(who, _WHOLE_ID)) == self._me:
            raise ValueError("this is the id of this peer itself: give that of the peer that is to join")
        shown = Pass((*self._pass.links, _link(self._identity, public_key_of(peer), run.run, PEER, depth)))
        ticket = Ticket(run.run, self._key, shown=shown, addresses=_best(addresses))
        return _answer(ticket, f"For {short(peer)} only, without an end.", addresses)

    async def _answer_redeem(self, peer: PeerId, request: Redeem) -> Redeemed | PassRefused:
        run, key = self.exchange.run, public_key_of(peer)
        if self._manifest is None:  # it starts: the joiner asks again
            raise PeerSilent(peer, "asks for a pass too early")
        if run is None or request.run != run.run:
            return PassRefused("this ticket is for a run that its maker is not in: ask for another")
        if not verify(peer_id_of(request.ticket), redeemed_part(run.run, self._key, key), request.signature):
            return PassRefused("this ticket is another peer's: ask for one of your own")
        async with self._changing:
            if why := self._invitations.why_not(request.ticket, key, self.now()):
                return PassRefused(why)
            invite = self._invitations.find(request.ticket)
            assert invite is not None
            link = next((each for each in invite.links if each.subject == key), None)
            if link is None:
                link = _link(self._identity, key, run.run, PEER, run.depth_below(self._pass))
                changed = self._invitations.redeemed(request.ticket, link)
                try:
                    await self._files.run(partial(self._store.keep_invitations, changed), 0)
                except StateError as error:
                    self._say(f"a joiner has to wait: {error}")
                    raise PeerSilent(peer, "cannot be admitted now") from None
                self._invitations = changed
                name = f"{printable(request.nickname)[:MAX_NAME]} ({short(peer)})".lstrip()
                self._say(f"{name} was admitted with ticket {invite.number}")
        return Redeemed((*self._pass.links, link), self._nickname)

    # -- members ------------------------------------------------------------------------------------------------------

    def members(self, versions: Mapping[PeerId, str], routes: Mapping[PeerId, str]) -> Mapping[str, object]:
        """Who is known in the run, with each one's inviter; and this peer's tickets."""
        run = self._require_run()
        rows = [self._row(self._me, self._nickname, versions, live=True, route="")]
        for each in self.contacts():
            if self.exchange.pass_of(each.peer):
                name = each.hello.nickname if each.hello else ""
                rows.append(self._row(each.peer, name, versions, live=each.live, route=routes.get(each.peer, "")))
        now = self.now()
        tickets = [
            {
                "number": each.number,
                "left": 0 if each.void or now > each.not_after else each.uses - len(each.links),
                "not_after": each.not_after,
                "void": each.void,
                "used_by": each.used_by,
            }
            for each in self._invitations.invites
        ]
        return {"ok": True, "founder": peer_id_of(run.founder), "members": rows, "tickets": tickets}

    def _row(
        self, peer: PeerId, name: str, versions: Mapping[PeerId, str], *, live: bool, route: str
    ) -> dict[str, object]:
        shown = self.exchange.pass_of(peer) or NO_PASS
        return {
            "peer": peer,
            "nickname": printable(name),
            "me": peer == self._me,
            "live": live,
            "invited_by": peer_id_of(shown.links[-1].issuer) if shown.links else "",
            "version": versions.get(peer, ""),
            "route": route,
        }

    async def revoke(self, who: str) -> str:
        """Remove a peer, by its nickname, its id or the end of it, or void a ticket by its number."""
        run = self._require_run()
        if any(str(each.number) == who for each in self._invitations.invites):
            async with self._changing:
                changed = self._invitations.voided(int(who))
                await self._files.run(partial(self._store.keep_invitations, changed), 0)
                self._invitations = changed
            return f"ticket {who} cannot be used any more; who has used it stays"
        if (peer := self._one_peer(who)) == self._me:
            raise ValueError("this peer cannot remove itself: it leaves by starling finish")
        key, shown = public_key_of(peer), self.exchange.pass_of(peer)
        above = {link.issuer for link in shown.links} if shown else self._guests_issuer(key)
        if key == run.founder:
            raise ValueError("the founder of a run cannot be removed from it")
        if self._key not in above | {run.founder}:
            raise ValueError(f"only a peer that {self._named(peer)} came through can remove it, and the founder")
        made = revoke(self._identity.sign, self._key, key, run=run.run, time=int(self.now()))
        if not await self.exchange.revoke(made):
            raise ValueError("this peer has removed as many others as a member may: ask the founder")
        return f"{self._named(peer)} was removed, and with it whom it invited: all members refuse it from now on"

    def _guests_issuer(self, key: bytes) -> set[bytes]:
        own = any(link.subject == key for each in self._invitations.invites for link in each.links)
        return {self._key} if own else set()

    def _one_peer(self, who: str, otherwise: str = "") -> PeerId:
        """The peer with this nickname, this id or this end of an id. ValueError, ending in `otherwise`, if none has."""
        names = {each.peer: each.hello.nickname if each.hello else "" for each in self.contacts()}
        names[self._me] = self._nickname
        guests = {peer for each in self._invitations.invites for peer in each.used_by}
        wanted = who.removeprefix("…")
        found = {peer for peer in {*names, *guests} if peer == wanted or (len(wanted) >= 6 and peer.endswith(wanted))}
        found = found or {peer for peer, name in names.items() if who and name == who}
        if not found and is_peer_id(who):
            found = {who}
        if len(found) > 1:
            raise ValueError(
                f"{len(found)} members are called {printable(who, MAX_NAME)}: give an id from starling members"
            )
        if not found:
            raise ValueError(f"no member {printable(who, 60) or repr(who)} is known here{otherwise}")
        return found.pop()

    def _named(self, peer: PeerId) -> str:
        name = next((each.hello.nickname for each in self.contacts() if each.peer == peer and each.hello), "")
        return f"{printable(name)[:MAX_NAME]} ({short(peer)})".lstrip()

    def removed_line(self, revocation: Revocation) -> str:
        """For the user of this peer, against whose pass the revocation holds."""
        issuer = peer_id_of(revocation.issuer)
        name = next((each.hello.nickname for each in self.contacts() if each.peer == issuer and each.hello), "")
        by = printable(name)[:MAX_NAME] or short(issuer)
        if revocation.subject == self._key:
            return f"this peer was removed from the run by {by} on {day(revocation.time)}: it leaves"
        gone = short(peer_id_of(revocation.subject))
        return f"{gone}, through whom this peer was invited, was removed from the run by {by}: ask for another ticket"


class PrivateCommands:
    """`invite`, `members` and `revoke` for the control socket."""

    def __init__(self, private: PrivateMembership, tracker: StatusTracker, swarm: SwarmPoller) -> None:
        self._private, self._tracker, self._swarm = private, tracker, swarm

    async def carry_out(self, request: Mapping[str, Any]) -> Mapping[str, object] | None:
        """Carry out a request, as `node.session.processes.carry_out` does; None if it is another one."""
        try:
            match request:
                case {"do": "invite", "uses": int(uses), "seconds": int() | float() as seconds, "peer": str(peer)}:
                    return await self._private.invite(uses, seconds, peer, self._tracker.addresses())
                case {"do": "members"}:
                    return self._members()
                case {"do": "revoke", "who": str(who)}:
                    return {"ok": True, "line": await self._private.revoke(who)}
        except (ValueError, OverflowError, StateError) as error:
            return {"ok": False, "line": str(error)}
        return None

    def _members(self) -> Mapping[str, object]:
        self._swarm.want()  # for the versions
        rows = self._swarm.view().rows
        versions, routes = {each.peer: each.version for each in rows}, {each.peer: each.route for each in rows}
        return self._private.members(versions, routes)


def _best(addresses: Collection[str]) -> tuple[str, ...]:
    """The addresses for a ticket: those that work from everywhere first."""
    return tuple(sorted(addresses, key=scope)[:3])


def _answer(ticket: Ticket, words: str, addresses: Collection[str], **more: object) -> Mapping[str, object]:
    if not addresses:
        raise ValueError("this peer knows none of its own addresses yet: ask again in a few seconds")
    narrow = NARROW if min(map(scope, addresses)) != Scope.ANYWHERE else ""
    text = ticket.encode()
    return {"ok": True, "ticket": text, "command": typed(f"join {text}"), "line": words, "warning": narrow, **more}


def day(seconds: float, length: float = 1e9) -> str:
    """A date in this machine's time zone, with the time of day if it is less than two days off."""
    at = datetime.fromtimestamp(seconds)
    return f"{at.day} {at:%B}" + (f" {at:%H:%M}" if length < 2 * 86400 else "")
