"""The live peers: those that completed a handshake with this peer and answer its heartbeats.

A peer watches another on a stream of its own: it greets, then sends a heartbeat each second, which the other peer
echoes. So liveness is two-way contact, as this peer sees it. libp2p's own "connected" says nothing: the connection of a
stopped process stays. A silent peer is suspected (`node.membership.failure_detector`). A peer whose stream breaks and
cannot be opened again is gone at once.

Up to `MAX_WATCHED` peers all watch each other. In a larger run a peer watches some (`node.membership.watching`), and
those that watch it are live for it as well. Of the others it knows that they exist: it greets one of them now and then.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from functools import partial
from statistics import median

from node.membership.choice import WatchChoice
from node.membership.failure_detector import FailureDetector
from node.membership.handshake import DUPLICATE_IDENTITY, HandshakeProtocol, LocalPeer
from node.membership.hello import (
    HELLO,
    Heartbeat,
    Hello,
    HelloRejected,
    PeerAddress,
    StageTeam,
    Welcome,
    sound,
)
from node.membership.host_monitor import MAX_OFFSET_SECONDS, HostMonitor
from node.membership.peer_record import DIAL_SECONDS, MAX_CONTACTS, MAX_FAILURES, PeerRecord, PeerTable
from node.membership.watchers import MAX_WATCHERS, Watchers
from node.membership.watching import Known, Lot, Role
from node.network.address_scope import has_moved
from node.outer import sketch as sketches
from node.outer.activity import Activity
from node.outer.sketch import Sketch
from node.runtime.bounded import count
from protocols import wire
from protocols.aio import Notifier, peer_timeout, task_group
from protocols.base import BadPayload, Clock, Deadline, Member, PeerError, PeerGone, PeerId, Signer, Stream, Transport

log = logging.getLogger(__name__)

WATCH_SECONDS = 86_400.0  # longest time that one stream is used. Another follows it.
ANSWER_SECONDS = 5.0
TICK_SECONDS = 0.25
DIALS_AT_ONCE = 16
INTRODUCED_DIALS_AT_ONCE = 4
INTRODUCED_DIAL_SECONDS = 0.25
MAX_REASONS = 256
RETRY_SECONDS = 0.05
CUT_FAILURES = 3  # tries in a row after which the connection to a peer that was live is closed: the next try dials
MAX_INTRODUCED_ADDRESSES = 6
"""Addresses of each introduced peer: those of all introduced peers together must fit into one greeting."""
MAX_BELIEVED_ADDRESSES = 4
PROBE_SECONDS = 2.0
"""Between two greetings of peers that are not watched. They show who is still there, and introduce others."""
MAX_PROBE_FAILURES = 2
MAX_ROUND_TRIP_SECONDS = 1.0  # the longest that a peer is given time for, if it is asked whether it is there

Reach = Callable[[PeerId, Sequence[str], Deadline], Awaitable[None]]
Drop = Callable[[PeerId, Deadline], Awaitable[None]]


class Membership:
    """`protocols.base.Members`. Does nothing before `run`."""

    def __init__(
        self,
        transport: Transport,
        local: LocalPeer,
        *,
        clock: Clock,
        signer: Signer,
        wanted: Callable[[], Iterable[PeerId]] = tuple,
        role: Callable[[Sequence[Known]], Role] | None = None,
        reach: Reach | None = None,
        drop: Drop | None = None,
        seen_at: Callable[[PeerId], str] = lambda peer: "",
        on_duplicate_identity: Callable[[str], None] = lambda line: None,
        say: Callable[[str], None] = log.warning,
    ) -> None:
        """`wanted` returns peers that are dialled again without limit, such as the roster's. `role` returns which
        of the known peers to watch, if they are too many; None: those that are wanted, and any others.

        `reach` connects the transport to a peer at one of its addresses, or raises a `PeerError`; `drop` closes the
        transport's connections to a peer, so that the next attempt dials it. None: the transport finds peers by itself.
        `seen_at` returns the address from which a peer has connected, which may not know it itself; or an empty text.
        """
        self.version = 0  # grows with every change in the set of live peers
        self.refused: Counter[str] = Counter()  # reasons for which peers were turned away, or broke a rule
        self.host_monitor = HostMonitor(clock, local.addresses, say)
        self._transport, self._local, self._on_duplicate_identity = transport, local, on_duplicate_identity
        self._wanted, self._reach, self._drop, self._seen_at = wanted, reach, drop, seen_at
        self._handshake = HandshakeProtocol(local, clock, signer, self._on_heard)
        self._away: set[PeerId] = set()  # live, and away as they say
        self._lot = Lot(hashlib.sha256(signer.sign(b"starling watch %d" % local.nonce)).digest())
        self._contacts = PeerTable(local.me.peer, wanted, self._on_forget, self._lot)
        self._watchers = Watchers(self._lot)
        self._choice = WatchChoice(self._contacts, self._lot, wanted, role)
        self._probed: PeerRecord | None = None  # the peer that is being greeted without being watched
        self._probed_at = -math.inf
        self._say, self._said = say, set[str]()
        self._changed, self._heard = Notifier(), Notifier()  # the latter is notified of each heartbeat
        self._group: asyncio.TaskGroup | None = None
        self._dials = asyncio.Semaphore(DIALS_AT_ONCE)
        self._introduced_dials = asyncio.Semaphore(INTRODUCED_DIALS_AT_ONCE)
        transport.serve(HELLO, self._serve)

    # -- what others see ----------------------------------------------------------------------------------------------

    def live(self) -> tuple[Member, ...]:
        """The live peers that are not away, and this one, in the order of their ids."""
        members = [contact.member for contact in self._contacts if contact.here and contact.member]
        return tuple(sorted((self._local.me, *members)))

    def met(self) -> Collection[PeerId]:
        return [contact.peer for contact in self._contacts if contact.hello]

    async def changed(self, since: int, deadline: Deadline) -> int:
        with suppress(TimeoutError):
            await self._changed.until(lambda: self.version > since, deadline)
        return self.version

    async def answers(self, peer: PeerId, within_seconds: float) -> bool:
        """Whether a peer echoes a heartbeat that is sent now. True if this one does not watch it, or was suspended."""
        contact, asked_at = self._contacts.get(peer), asyncio.get_running_loop().time()
        if contact is None or not contact.live or contact.handshake_at is None:
            return True
        contact.hurry.set()
        until = asked_at + within_seconds + 2 * min(contact.round_trip_seconds, MAX_ROUND_TRIP_SECONDS)
        has_answered = await self._heard.reached(lambda: contact.answered_at >= asked_at, until)
        return has_answered or asyncio.get_running_loop().time() > until + TICK_SECONDS

    def contacts(self) -> tuple[PeerRecord, ...]:
        """All known peers, for display. Callers must not change them."""
        return tuple(self._contacts)

    def contact(self, peer: PeerId) -> PeerRecord | None:
        return self._contacts.get(peer)

    def peers(self) -> list[PeerId]:
        """All known peers of this one's stage, the live ones first. Peers that are away serve only as a last resort."""
        here = any(contact.here for contact in self._contacts)
        known = [contact for contact in self._contacts if not (here and contact.said.idle == Activity.AWAY)]
        found = [contact.peer for contact in sorted(known, key=lambda each: not each.live)]
        if self._local.stage is None:
            return found
        return [peer for peer in found if self.stage_of(peer) == self._local.stage.seat.stage]

    def offset_seconds(self) -> float:
        """How far the others' wall clocks are ahead of ours: the median, within bounds; 0 if there are none."""
        offset = median(self._offsets() or [0.0])
        return max(-MAX_OFFSET_SECONDS, min(offset, MAX_OFFSET_SECONDS))

    def _offsets(self) -> list[float]:
        return [contact.offset_seconds for contact in self._contacts if contact.live and contact.round_trip_seconds]

    def compare(self, mine: Sketch) -> dict[PeerId, Sketch]:
        """From now on, send this sketch of our parameters; returns the latest sketch of each live peer."""
        self._handshake.sketch = sketches.pack(mine)
        received = {each.peer: sketches.unpack(each.said.sketch) for each in self._contacts if each.here}
        return {peer: numbers for peer, numbers in received.items() if numbers}

    def rounds(self) -> dict[PeerId, int]:
        """The round of each other peer that is live, and neither away nor leaving."""
        return {each.peer: each.said.round for each in self._contacts if each.here and not each.said.leaving}

    def announce_activity(self, activity: Activity) -> None:
        self._handshake.activity = activity
        if activity is Activity.AWAY:
            self._handshake.sketch = b""  # an old one would raise everybody's spread
        self._hurry()

    def _hurry(self) -> None:
        for contact in self._contacts:
            contact.hurry.set()

    def rests(self, peer: PeerId) -> bool:
        """Whether a peer trains nothing for now, as it says; this peer, too."""
        contact = self._contacts.get(peer)
        activity = self._handshake.activity if peer == self._local.me.peer else contact.said.idle if contact else 0
        return activity > Activity.WORK

    def _on_heard(self, contact: PeerRecord) -> None:
        self._heard.notify()
        if (contact.said.idle == Activity.AWAY) != (contact.peer in self._away):
            self._away ^= {contact.peer}
            self._bump()
        if self._local.stage and contact.hello and contact.said.round:
            self._local.stage.seats.hear(contact.peer, contact.hello.seats)

    # -- stages: `protocols.pipeline.stages.StageDirectory` -----------------------------------------------------------

    def stage_of(self, peer: PeerId) -> int | None:
        """The stage of a peer, this one included; None if it is not known. 0 for all in a run without stages."""
        if peer == self._local.me.peer:
            return self._local.stage.seat.stage if self._local.stage else 0
        contact = self._contacts.get(peer)
        return contact.stage if contact else None

    def rounds_of(self, peer: PeerId) -> int:
        """Training rounds that have ended at a peer of stage 0, as it says."""
        if peer == self._local.me.peer:
            return self._local.stage.rounds if self._local.stage else 0
        contact = self._contacts.get(peer)
        return contact.said.rounds if contact else 0

    def pulse(self) -> Heartbeat:
        """What this peer says of itself now."""
        return self._handshake.pulse(0)

    def announce_rounds(self, rounds: int) -> None:
        assert self._local.stage is not None
        self._local.stage.rounds = max(rounds, self._local.stage.rounds)
        self._hurry()

    def announce_rate(self, rate: float) -> None:
        assert self._local.stage is not None
        self._local.stage.rate = rate

    def announce_team(self, team: StageTeam | None) -> None:
        """Tell others what works in this peer's stage, from the next heartbeats on."""
        assert self._local.stage is not None
        self._local.stage.team = team

    def announce_placement(
        self, *, moving: int | None = None, held: Mapping[int, int] | None = None, arrived: int | None = None
    ) -> None:
        """Tell others at once to which stage this peer moves (`STAYS`: none), which backups it has (stage -> rounds in
        it), or in which round it has moved. What is None stays as it was.
        """
        assert self._local.stage is not None
        before = self._local.stage.placement
        self._local.stage.placement = replace(
            before,
            moving=before.moving if moving is None else moving,
            holds=before.holds if held is None else sum(1 << stage for stage in held),
            held=before.held if held is None else tuple(rounds for _, rounds in sorted(held.items())),
            arrived=before.arrived if arrived is None else arrived,
        )
        self._hurry()

    def add_candidate(
        self, peer: PeerId, addresses: Sequence[str] = (), introduced_by: PeerId = ""
    ) -> PeerRecord | None:
        """Note that a peer may be found at these addresses; returns its contact, if the table has a place for it."""
        contact = self._contacts.add(peer, addresses, introduced_by)
        due = contact and peer in self._choice and contact.is_due(asyncio.get_running_loop().time())
        if contact and due and self._group:
            contact.task = self._group.create_task(self._keep_contact(contact))
        return contact

    def _on_forget(self, contact: PeerRecord) -> None:
        contact.hello = None
        if contact.live:
            self._bump()
        self._away.discard(contact.peer)
        self._lot.forget(contact.peer)
        if contact.task:
            contact.task.cancel()

    # -- running ------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        async with task_group() as group:
            self._group = group
            try:
                for contact in self._contacts:
                    self.add_candidate(contact.peer)
                await self._tick()
            finally:
                self._group = None

    async def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            now = loop.time()
            gap = self.host_monitor.tick(now, TICK_SECONDS, self._offsets)
            self._choose(now)
            self._watchers.tick(now, slept=gap is not None)
            for contact in self._contacts:
                if gap and gap.anew:
                    contact.recheck(now, gap.doubtful)
                elif contact.peer not in self._choice:
                    self._unwatch(contact)
                elif contact.task is None:
                    self._wake(contact, now)
                elif contact.watching is None or contact.handshake_at is None:  # a dial has a deadline of its own
                    continue
                elif gap:
                    contact.detector.slept(now)
                elif now >= contact.detector.due():
                    self._set_live(contact, False, f"silent for {contact.detector.patience_seconds:.1f} s")
                    contact.end_watch()
            for peer in self._wanted():
                self.add_candidate(peer)
            self._probe_next(now)
            await asyncio.sleep(TICK_SECONDS)

    def _set_live(self, contact: PeerRecord, live: bool, why: str = "") -> None:
        contact.why = why
        if live != contact.live:
            contact.live, contact.lost_at = live, asyncio.get_running_loop().time()
            self._bump()
            gone = "has left" if contact.left else f"is out of sight: {why}" if contact.unwatched else f"is lost: {why}"
            log.info("%s %s", contact.peer, "is here" if live else gone)

    def _bump(self) -> None:
        self.version += 1
        self._changed.notify()

    # -- watching -----------------------------------------------------------------------------------------------------

    async def _keep_contact(self, contact: PeerRecord) -> None:
        """Watch one peer until that fails, then pause without a task; pauses grow from failure to failure."""
        contact.unwatched = False
        while True:
            contact.handshake_at = None
            if not contact.live and contact.is_doubtful():
                await self._disconnect(contact)
            why = await self._watched(contact)
            if contact.is_doubtful():
                await self._disconnect(contact)
                continue
            contact.cut = False
            if (until := contact.crowded_until) > asyncio.get_running_loop().time():
                self._set_live(contact, False, why)
                contact.rested, contact.task = (until, until), None
                return
            if contact.stream_ended(asyncio.get_running_loop().time()):
                await asyncio.sleep(RETRY_SECONDS)
                continue
            self._set_live(contact, False, why)
            contact.failures += 1
            log.debug("%s: try %d: %s", contact.peer, contact.failures, why)
            if contact.failures == CUT_FAILURES and contact.hello:
                await self._disconnect(contact)
            contact.back_off(asyncio.get_running_loop().time(), self._contacts.wants(contact.peer))
            return

    def _wake(self, contact: PeerRecord, now: float) -> None:
        """Try a pausing peer that is due or has called us; forget one that never answers and is not wanted."""
        if not contact.is_due(now):
            return
        if (
            contact.failures > MAX_FAILURES
            and not contact.retry_now.is_set()
            and not self._contacts.wants(contact.peer)
        ):
            self._contacts.forget(contact)
        else:
            self.add_candidate(contact.peer)

    async def _disconnect(self, contact: PeerRecord) -> None:
        if self._drop:
            with suppress(PeerError):
                await self._drop(contact.peer, asyncio.get_running_loop().time() + contact.patience_seconds)

    async def _watched(self, contact: PeerRecord) -> str:
        try:
            async with asyncio.timeout(None) as contact.watching:
                await self._watch(contact, contact.watching)
        except TimeoutError:
            return contact.why or "no answer in time"
        except BadPayload as error:
            contact.failures, contact.broke_rules = MAX_FAILURES, True
            self._set_live(contact, False, str(error))
            self._refuse(contact.peer, str(error))
            return str(error)
        except PeerError as error:
            return error.why
        finally:
            contact.watching = None
        return "its stream ended"

    async def _watch(self, contact: PeerRecord, limit: asyncio.Timeout) -> None:
        """Dial, greet and exchange heartbeats until the stream ends or `limit` is rescheduled to now."""
        loop, peer = asyncio.get_running_loop(), contact.peer
        async with AsyncExitStack() as dialling:
            if not contact.live:
                await self._turn(contact, dialling)
            limit.reschedule(loop.time() + contact.patience_seconds)
            if self._reach and contact.addresses and (contact.cut or not contact.live):
                await self._reach(peer, contact.addresses, loop.time() + contact.patience_seconds)
            async with self._transport.open(peer, HELLO, loop.time() + WATCH_SECONDS) as stream:
                await self._greet(contact, stream)
                await dialling.aclose()
                limit.reschedule(None)
                await self._handshake.exchange(contact, stream, self._on_refusal)

    async def _turn(self, contact: PeerRecord, dialling: AsyncExitStack) -> None:
        """Wait for a turn to dial. Peers known only from unverified introductions share a slow queue of their own."""
        if contact.introduced_by and contact.hello is None and not self._contacts.wants(contact.peer):
            await dialling.enter_async_context(self._introduced_dials)
            await asyncio.sleep(INTRODUCED_DIAL_SECONDS)
        else:
            await dialling.enter_async_context(self._dials)

    async def _greet(self, contact: PeerRecord, stream: Stream) -> None:
        welcome = await self._greeted(contact, stream)
        now = asyncio.get_running_loop().time()
        contact.detector = FailureDetector(now)
        contact.failures, contact.handshake_at = 0, now
        contact.stale = contact.cut = False
        self._set_live(contact, True)
        self.drop_unseated()
        self._introduced(contact, welcome)  # only now: a live peer is not forgotten in favour of those it introduces

    async def _greeted(self, contact: PeerRecord, stream: Stream) -> Welcome:
        await stream.send(self._handshake.hello())
        answer = await stream.receive(wire.MAX_HEADER_BYTES)
        if isinstance(answer, HelloRejected):
            self._on_refusal(contact.peer, answer)
        welcome = wire.expect(answer, Welcome)
        self._handshake.check(contact.peer, welcome.hello)
        if contact.is_older(welcome.hello):
            raise BadPayload("it greets from an older incarnation")
        self._meet(contact, welcome.hello)
        return welcome

    def _introduced(self, contact: PeerRecord, welcome: Welcome) -> None:
        for each in welcome.known:
            known = self._contacts.get(each.peer)
            if known is None or not known.addresses:  # such as a member of the roster that was only named so far
                self.add_candidate(each.peer, each.addresses[:MAX_BELIEVED_ADDRESSES], introduced_by=contact.peer)

    def _on_refusal(self, peer: PeerId, refusal: HelloRejected) -> None:
        """Raise for a peer's refusal, which may prove that another process has this peer's identity, or that another
        peer has its seat.
        """
        if self._local.stage:
            self._local.stage.seats.add(refusal.seats)
            self.drop_unseated()
            if contact := self._contacts.get(peer):
                contact.refusal = refusal, asyncio.get_running_loop().time()
        for other in refusal.other:
            if not self._handshake.is_duplicate(other):
                raise BadPayload("refuses this peer for another incarnation of it that it cannot prove")
            self._on_duplicate_identity(DUPLICATE_IDENTITY)
        raise PeerGone(peer, f"it refuses this peer: {refusal.why}")

    # -- which peers this one watches, and what it knows of the others ------------------------------------------------

    @property
    def watches_all(self) -> bool:
        """Whether this peer watches all others; in a large run it does not."""
        return self._choice.is_all

    def _choose(self, now: float) -> None:
        self._choice.renew(now)
        if self._contacts.is_full:
            self._say_once(f"the run has more peers than the {MAX_CONTACTS} that this one keeps in mind, drawn by lot")

    def _say_once(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            self._say(line)

    def _unwatch(self, contact: PeerRecord) -> None:
        if contact.task and contact is not self._probed:
            contact.task.cancel()
            contact.task, contact.handshake_at = None, None
        is_heard = contact.live and contact.peer in self._watchers
        contact.unwatched = not is_heard and not contact.failures
        if contact.live and not is_heard:
            self._set_live(contact, False, "neither of the two peers watches the other")

    def _probe_next(self, now: float) -> None:
        """Greet the peer that was not tried for longest, of those that are known and not watched."""
        if self._choice.is_all or self._probed or now < self._probed_at + PROBE_SECONDS or not self._group:
            return
        if contact := self._choice.next_to_greet():
            self._probed, self._probed_at = contact, now
            contact.task = self._group.create_task(self._probe(contact))

    async def _probe(self, contact: PeerRecord) -> None:
        contact.tried_at = asyncio.get_running_loop().time()
        deadline = contact.tried_at + DIAL_SECONDS
        try:
            if self._reach and contact.addresses:
                await self._reach(contact.peer, contact.addresses, deadline)
            async with (
                peer_timeout(DIAL_SECONDS, contact.peer, "it is greeted"),
                self._transport.open(contact.peer, HELLO, deadline) as stream,
            ):
                self._introduced(contact, await self._greeted(contact, stream))
            contact.failures = 0
        except PeerError as error:
            contact.failures, contact.why = contact.failures + 1, error.why
        finally:
            self._probed, contact.task = None, None
        if contact.failures >= MAX_PROBE_FAILURES and not self._contacts.wants(contact.peer):
            self._contacts.forget(contact)
        if not contact.live:
            await self._disconnect(contact)

    # -- being watched ------------------------------------------------------------------------------------------------

    async def _serve(self, peer: PeerId, stream: Stream) -> None:
        async with peer_timeout(ANSWER_SECONDS, peer, "it greets"):
            hello = wire.expect(await stream.receive(wire.MAX_HEADER_BYTES), Hello)
        try:
            self._handshake.check(peer, hello)
        except BadPayload as error:
            self._refuse(peer, str(error))
            return await stream.send(self._handshake.rejection(hello, str(error)))
        contact = self.add_candidate(peer, hello.addresses)
        if contact is None:
            return await stream.send(HelloRejected("this peer knows too many others"))
        if contact.hello and contact.is_older(hello):
            return await stream.send(HelloRejected("another incarnation of it is known", (contact.hello,)))
        self._meet(contact, hello)
        self.drop_unseated()
        await stream.send(Welcome(self._handshake.hello(), self._known(peer)))
        contact.called()
        try:
            await self._handshake.echo(contact, hello, stream, partial(self._answers, contact))
        finally:
            self._watchers.ended(peer, asyncio.get_running_loop().time())

    def _answers(self, contact: PeerRecord) -> bool:
        """Whether to answer a heartbeat of a peer that watches this one."""
        answers = self._watchers.hear(contact.peer, asyncio.get_running_loop().time(), self._choice.needed)
        if not answers:
            self._say_once(f"more than {MAX_WATCHERS} peers watch this one: it answers those that are drawn by lot")
        if answers and contact.peer not in self._choice:
            contact.failures, contact.unwatched = 0, False
            self._set_live(contact, True)
        return answers

    # -- greetings ----------------------------------------------------------------------------------------------------

    def _meet(self, contact: PeerRecord, hello: Hello) -> None:
        before, contact.hello = contact.hello, hello
        gone = set(before.addresses if before else ()) - set(hello.addresses)  # addresses that it no longer announces
        contact.addresses = sound((*hello.addresses, *(each for each in contact.addresses if each not in gone)))
        if before is not None and before.nonce == hello.nonce and has_moved(before.addresses, hello.addresses):
            # the present connection may be dead
            contact.recheck(asyncio.get_running_loop().time())
        if before is not None and before.nonce != hello.nonce:
            contact.broke_rules = False
            contact.end_watch()  # the watched stream belongs to its previous process
            self._set_live(contact, False, "it was started again")
            contact.said = replace(contact.said, leaving=False)
            contact.answered_at = -math.inf

    def drop_unseated(self) -> None:
        """Drop contacts whose stage has another first member by now. If they greet again, they are told of it."""
        if self._local.stage is None:
            return
        for contact in self._contacts:
            if contact.hello and contact.hello.seats and not self._local.stage.seats.counts(contact.hello.seats[0]):
                self._set_live(contact, False, "its stage has another first member")
                self._contacts.forget(contact)

    def _known(self, to: PeerId) -> tuple[PeerAddress, ...]:
        return tuple(PeerAddress(each.peer, self._addresses(each)) for each in self._choice.introduced(to))

    def _addresses(self, contact: PeerRecord) -> tuple[str, ...]:
        seen = filter(None, (self._seen_at(contact.peer),))
        return sound((*seen, *contact.addresses))[:MAX_INTRODUCED_ADDRESSES]

    def _refuse(self, peer: PeerId, why: str) -> None:
        new = count(self.refused, why, MAX_REASONS)
        log.log(logging.WARNING if new else logging.DEBUG, "%s: %s", peer, why)

    def goodbye(self) -> None:
        self._handshake.leaving = True
        self._hurry()
