"""What one peer knows of others: a record of each, in a table of bounded size, however many peers others introduce."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from node.membership.failure_detector import FailureDetector
from node.membership.hello import STAYS, UNPLACED, Heartbeat, Hello, HelloRejected, Placement, StageTeam, sound
from node.outer.activity import Activity
from protocols.base import Member, PeerId

AGAIN_SECONDS = 2.0  # a peer whose stream broke counts as gone unless it accepts another within this time
DIAL_SECONDS = 7.0  # more than the five seconds for which libp2p does not dial again after two crossed dials
RETRY_NOW_SECONDS = 0.25
"""Least pause before dialling a peer that has called this one: the caller decides how often it calls."""
WANTED_PAUSE_SECONDS = 10.0
UNWANTED_PAUSE_SECONDS = 60.0
MAX_BREAKS = 2
MAX_FAILURES = 10  # failures in a row after which the table drops a peer that is not wanted
MAX_CONTACTS = 2048
"""The most peers that a peer keeps in mind: those that greeted it, and a few that others have named."""
MAX_UNMET = 256  # peers that never answered
MAX_INTRODUCED_BY_ONE = 32  # peers introduced by one other peer that have never answered
MAX_PEER_CHARACTERS = 64
NOTHING_SAID = Heartbeat(0, 0.0, 0, False, b"", 0, 0.0, 0)


@dataclass(slots=True, eq=False)
class PeerRecord:
    peer: PeerId
    addresses: tuple[str, ...] = ()
    hello: Hello | None = None
    live: bool = False
    lost_at: float = 0.0  # when it was live for the last time; of a live one, since when it is
    why: str = "not tried yet"
    said: Heartbeat = NOTHING_SAID
    team: StageTeam | None = None  # what it said last of its stage; not in each heartbeat
    team_at: float = -math.inf  # when it said so
    moving_since: float = 0.0  # when it said for the first time that it moves to the stage of `moving`
    echoed: Heartbeat = NOTHING_SAID  # its latest answer to a heartbeat of this peer
    answered_at: float = -math.inf  # when this peer sent that heartbeat
    offset_seconds: float = 0.0  # its wall clock minus this peer's
    round_trip_seconds: float = 0.0
    refusal: tuple[HelloRejected, float] | None = None  # its latest refusal of this peer, and when
    introduced_by: PeerId = ""
    unwatched: bool = False  # in a run of many peers, neither of the two watches the other: it may be alive
    crowded_until: float = 0.0  # until then it has no room for this peer, as it says
    tried_at: float = -math.inf  # when this peer greeted it for the last time without watching it
    failures: int = 0  # attempts in a row that did not make it live
    breaks: int = 0  # streams in a row that broke soon after a handshake
    broke_rules: bool = False  # its process broke a rule, or too many streams: not dialled before the pause is over
    handshake_at: float | None = None  # time of the handshake in the present attempt
    stale: bool = False  # this machine slept or moved since the last handshake: the connection may be dead
    cut: bool = False  # the connection has been closed: the peer has to be dialled, though it still counts as live
    detector: FailureDetector = field(default_factory=lambda: FailureDetector(0.0))
    retry_now: asyncio.Event = field(default_factory=asyncio.Event)  # dial it soon
    hurry: asyncio.Event = field(default_factory=asyncio.Event)  # send it a heartbeat at once
    watching: asyncio.Timeout | None = None  # rescheduled to now to end the stream on which it is watched
    task: asyncio.Task[None] | None = None  # watches the peer; None during a pause
    rested: tuple[float, float] = (0.0, 0.0)  # end of the pause if the peer calls this one, and in any case

    @property
    def here(self) -> bool:
        """Whether others may count on it: it is live, and not away."""
        return self.live and self.said.idle < Activity.AWAY

    @property
    def left(self) -> bool:
        """Whether it said goodbye before it was gone. Otherwise a peer that is not live is lost."""
        return self.said.leaving and not self.live

    @property
    def stage(self) -> int | None:
        return self.hello.stage if self.hello else None

    @property
    def placement(self) -> Placement:
        return self.said.placement[0] if self.said.placement else UNPLACED

    @property
    def backups(self) -> dict[int, int]:
        """Stage -> training rounds in its backup, as the peer says."""
        stages = [stage for stage in range(self.placement.holds.bit_length()) if self.placement.holds >> stage & 1]
        return dict(zip(stages, self.placement.held, strict=True))

    @property
    def moving(self) -> int | None:
        """The stage that it says it will move to."""
        return self.placement.moving if self.placement.moving not in (STAYS, self.stage) else None

    @property
    def member(self) -> Member | None:
        return self.hello.member if self.hello else None

    @property
    def patience_seconds(self) -> float:
        return AGAIN_SECONDS if self.live and not self.cut else DIAL_SECONDS

    def hear(self, pulse: Heartbeat, now: float) -> None:
        before, self.said = self.placement.moving, pulse
        if self.placement.moving != before:
            self.moving_since = now
        for team in pulse.team:
            self.team, self.team_at = team, now

    def pause_seconds(self, wanted: bool) -> float:
        limit = WANTED_PAUSE_SECONDS if wanted else UNWANTED_PAUSE_SECONDS
        return float(min(limit, 0.5 * 2 ** min(self.failures, 10)))

    def back_off(self, now: float, wanted: bool) -> None:
        self.retry_now.clear()
        self.rested, self.task = (now + RETRY_NOW_SECONDS, now + self.pause_seconds(wanted)), None

    def is_due(self, now: float) -> bool:
        return self.task is None and now >= self.rested[0 if self.retry_now.is_set() else 1]

    def called(self) -> None:
        if not self.live and not self.broke_rules:
            self.retry_now.set()

    def stream_ended(self, now: float) -> bool:
        """Note the end of a stream; returns whether to open another before the peer counts as gone.

        Not if its streams break again and again after the handshake: it would be dialled, and count as live, for ever.
        """
        if self.handshake_at is None or not self.live:
            return False
        if now - self.handshake_at >= AGAIN_SECONDS:
            self.breaks, self.broke_rules = 0, False
        self.breaks += 1
        self.failures = self.breaks
        self.broke_rules |= self.breaks > MAX_BREAKS
        return not self.broke_rules

    def is_older(self, hello: Hello) -> bool:
        """Whether the greeting comes from another process of the peer that is not a later incarnation."""
        known = self.hello
        return known is not None and hello.nonce != known.nonce and hello.member.incarnation <= known.member.incarnation

    def recheck(self, now: float, doubtful: bool = True) -> None:
        """Ignore the silence so far and greet the peer again. Its connection is in doubt if this machine slept, or one
        of the two moved.
        """
        self.detector.slept(now)
        self.stale = self.hello is not None and (doubtful or self.stale)
        if doubtful or not self.live or self.handshake_at is not None:  # else it is being greeted already
            self.end_watch()
        self.retry_now.set()

    def is_doubtful(self) -> bool:
        """Whether an attempt failed, or must fail, only because the old connection is dead. True only once."""
        doubtful = self.stale and self.handshake_at is None
        if doubtful:
            self.stale, self.cut = False, True
        return doubtful

    def end_watch(self) -> None:
        if self.watching is not None and not self.watching.expired():
            self.watching.reschedule(asyncio.get_running_loop().time())


class PeerTable:
    def __init__(
        self,
        me: PeerId,
        wanted: Callable[[], Iterable[PeerId]],
        on_forget: Callable[[PeerRecord], None] = lambda contact: None,
        lot: Callable[[PeerId], bytes] = str.encode,
    ) -> None:
        """If there are too many peers, `lot` decides which are kept: those of the smallest values."""
        self._me, self._wanted, self._on_forget, self._lot = me, wanted, on_forget, lot
        self._contacts: dict[PeerId, PeerRecord] = {}
        self.is_full = False  # a peer that has answered was forgotten, or not added, because there were too many

    def __iter__(self) -> Iterator[PeerRecord]:
        return iter(tuple(self._contacts.values()))

    def __contains__(self, peer: PeerId) -> bool:
        return peer in self._contacts

    def get(self, peer: PeerId) -> PeerRecord | None:
        return self._contacts.get(peer)

    def wants(self, peer: PeerId) -> bool:
        return peer in set(self._wanted())

    def add(self, peer: PeerId, addresses: Sequence[str] = (), introduced_by: PeerId = "") -> PeerRecord | None:
        """Add addresses to a peer's record, and create the record if needed; None if there is no place for it."""
        if peer == self._me or len(peer) > MAX_PEER_CHARACTERS or not peer.isascii():
            return None
        contact = self._contacts.get(peer)
        if contact is None:
            if not self._has_room(peer, introduced_by):
                return None
            contact = self._contacts[peer] = PeerRecord(peer, introduced_by=introduced_by)
        contact.addresses = sound((*addresses, *contact.addresses))
        return contact

    def forget(self, contact: PeerRecord) -> None:
        if self._contacts.pop(contact.peer, None):
            self._on_forget(contact)

    def _has_room(self, peer: PeerId, introduced_by: PeerId) -> bool:
        wanted = set(self._wanted())
        outsiders = [each for each in self if each.peer not in wanted]
        if (
            introduced_by
            and sum(each.introduced_by == introduced_by and each.hello is None for each in outsiders)
            >= MAX_INTRODUCED_BY_ONE
        ):
            return False
        unmet = [each for each in outsiders if each.hello is None]
        if len(unmet) >= MAX_UNMET and peer not in wanted:
            self.forget(max(unmet, key=lambda each: each.failures))
        if len(self._contacts) < MAX_CONTACTS:
            return True
        spare = [each for each in outsiders if not each.live] or (outsiders if peer in wanted else [])
        if spare:
            last = max(spare, key=lambda each: (each.hello is None, each.failures, self._lot(each.peer)))
            self.is_full |= last.hello is not None
            self.forget(last)
        return bool(spare)
