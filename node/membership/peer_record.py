"""What one peer knows of another: identity, liveness, addresses, and when to dial it again."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from node.membership.failure_detector import FailureDetector
from node.membership.hello import Heartbeat, Hello
from node.outer.activity import Activity
from protocols.base import Member, PeerId

AGAIN_SECONDS = 2.0
"""A peer whose stream broke counts as gone unless it accepts another within this time."""
DIAL_SECONDS = 7.0
"""More than the five seconds for which libp2p does not dial again after two crossed dials."""
NUDGED_SECONDS = 0.25
"""Least pause before dialling a peer that has called this one: the caller decides how often it calls."""
WANTED_PAUSE_SECONDS = 10.0
HINTED_PAUSE_SECONDS = 60.0
MAX_BREAKS = 2
MAX_FAILURES = 10
"""Failures in a row after which the table drops a peer that is not wanted."""


@dataclass(slots=True, eq=False)
class PeerRecord:
    """State that this peer keeps about one other peer."""

    peer: PeerId
    addresses: tuple[str, ...] = ()
    hello: Hello | None = None
    live: bool = False
    why: str = "not tried yet"
    leaving: bool = False  # it says that it is about to leave, or has
    offset_seconds: float = 0.0
    round_trip_seconds: float = 0.0
    round: int = 0
    sketch: bytes = b""
    rounds: int = 0
    rate: float = 0.0
    idle: int = 0
    told_by: PeerId = ""
    failures: int = 0  # attempts in a row that did not make it live
    breaks: int = 0  # streams in a row that broke soon after a handshake
    broke_rules: bool = False  # its process broke a rule, or too many streams: not dialled before the pause is over
    greeted: float | None = None  # time of the handshake in the present attempt
    stale: bool = False  # this machine slept or moved since the last handshake: the connection may be dead
    cut: bool = False  # the connection has been closed: the peer has to be dialled, though it still counts as live
    suspicion: FailureDetector = field(default_factory=lambda: FailureDetector(0.0))
    nudge: asyncio.Event = field(default_factory=asyncio.Event)  # dial it soon
    hurry: asyncio.Event = field(default_factory=asyncio.Event)  # send it a heartbeat at once
    watching: asyncio.Timeout | None = None  # rescheduled to now to end the stream on which it is watched
    task: asyncio.Task[None] | None = None  # watches the peer; None during a pause
    rested: tuple[float, float] = (0.0, 0.0)  # end of the pause if the peer calls this one, and in any case

    def hear(self, heartbeat: Heartbeat) -> None:
        self.round, self.leaving, self.sketch = heartbeat.round, heartbeat.leaving, heartbeat.sketch
        self.rounds, self.rate, self.idle = heartbeat.rounds, heartbeat.rate, heartbeat.idle

    @property
    def here(self) -> bool:
        """Whether others may count on it: it is live, and not away."""
        return self.live and self.idle < Activity.AWAY

    @property
    def left(self) -> bool:
        """Whether it said goodbye before it was gone. Otherwise a peer that is not live is lost."""
        return self.leaving and not self.live

    @property
    def stage(self) -> int | None:
        return self.hello.stage if self.hello else None

    @property
    def member(self) -> Member | None:
        return self.hello.member if self.hello else None

    @property
    def patience_seconds(self) -> float:
        """Time limit for the next attempt."""
        return AGAIN_SECONDS if self.live and not self.cut else DIAL_SECONDS

    def pause_seconds(self, wanted: bool) -> float:
        """Doubles from one failure to the next, up to a limit."""
        limit = WANTED_PAUSE_SECONDS if wanted else HINTED_PAUSE_SECONDS
        return float(min(limit, 0.5 * 2 ** min(self.failures, 10)))

    def rest(self, now: float, wanted: bool) -> None:
        self.nudge.clear()
        self.rested, self.task = (now + NUDGED_SECONDS, now + self.pause_seconds(wanted)), None

    def is_due(self, now: float) -> bool:
        return self.task is None and now >= self.rested[0 if self.nudge.is_set() else 1]

    def called(self) -> None:
        """Note that the peer has called this one, so it is probably reachable."""
        if not self.live and not self.broke_rules:
            self.nudge.set()

    def broke(self, now: float) -> bool:
        """Note the end of a stream; returns whether to open another before the peer counts as gone.

        A peer whose streams break repeatedly after the handshake gets none: it would be dialled, and count as live,
        for ever.
        """
        if self.greeted is None or not self.live:
            return False
        if now - self.greeted >= AGAIN_SECONDS:
            self.breaks, self.broke_rules = 0, False
        self.breaks += 1
        self.failures = self.breaks
        self.broke_rules |= self.breaks > MAX_BREAKS
        return not self.broke_rules

    def is_older(self, hello: Hello) -> bool:
        """Whether the greeting comes from another process of the peer that is not a later incarnation."""
        known = self.hello
        return known is not None and hello.nonce != known.nonce and hello.member.incarnation <= known.member.incarnation

    def doubt(self, now: float) -> None:
        """Ignore the silence so far and greet the peer again: this machine slept, or one of the two moved."""
        self.suspicion.slept(now)
        self.stale = self.hello is not None
        self.end_watch()
        self.nudge.set()

    def is_doubtful(self) -> bool:
        """Whether an attempt failed, or must fail, only because the old connection is dead. True only once."""
        doubtful = self.stale and self.greeted is None
        if doubtful:
            self.stale, self.cut = False, True
        return doubtful

    def end_watch(self) -> None:
        if self.watching is not None and not self.watching.expired():
            self.watching.reschedule(asyncio.get_running_loop().time())
