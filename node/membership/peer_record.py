"""What one peer knows of another: who it is, whether it is there, and for how long to wait before trying it again."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from node.membership.failure_detector import FailureDetector
from node.membership.hello import Hello
from protocols.base import Member, PeerId

AGAIN_SECONDS = 2.0
"""A peer whose stream broke has so long to take another, before it counts as gone."""
DIAL_SECONDS = 7.0
"""More than the five for which libp2p does not dial again after two dials that crossed."""
NUDGED_SECONDS = 0.25
"""Before who calls us is tried again: it decides how often it calls."""
WANTED_PAUSE_SECONDS = 10.0
HINTED_PAUSE_SECONDS = 60.0
MAX_BREAKS = 2
MAX_FAILURES = 10
"""In a row, after which one that nobody wants is forgotten."""


@dataclass(slots=True, eq=False)
class PeerRecord:
    """One peer.

    Attributes:
        addresses: multiaddrs that it, or somebody else, says it can be found at.
        told_by: who told us of it; empty if nobody had to.
        hello: what it said of itself last; None before that.
        live: it answers us.
        why: in words, why it does not.
        offset_seconds: its wall clock less ours.
        round_trip_seconds: of its last echo.
        round: the one that it says it is in.
        sketch: what it says of its parameters, as it sent it.
        failures: tries in a row that did not make it live.
        breaks: in a row, of streams that broke soon after a handshake.
        offended: it broke a rule, or off too often, in its present life: no try before its time.
        greeted: when the present try got as far as a handshake; None before that.
        stale: since we met it last, we slept or moved: our connection to it may be dead.
        cut: that connection has been closed: it is to be dialled, though it still counts as live.
        nudge: set to try it soon.
        hurry: set to send it a pulse at once.
        watching: of the stream on which it is watched: moved to now, it ends.
        task: what tends it; None while it rests.
        rested: from when on it may be tried again, if it calls us; and from when on it is tried anyway.
    """

    peer: PeerId
    addresses: tuple[str, ...] = ()
    hello: Hello | None = None
    live: bool = False
    why: str = "not tried yet"
    leaving: bool = False
    offset_seconds: float = 0.0
    round_trip_seconds: float = 0.0
    round: int = 0
    sketch: bytes = b""
    told_by: PeerId = ""
    failures: int = 0
    breaks: int = 0
    offended: bool = False
    greeted: float | None = None
    stale: bool = False
    cut: bool = False
    suspicion: FailureDetector = field(default_factory=lambda: FailureDetector(0.0))
    nudge: asyncio.Event = field(default_factory=asyncio.Event)
    hurry: asyncio.Event = field(default_factory=asyncio.Event)
    watching: asyncio.Timeout | None = None
    task: asyncio.Task[None] | None = None
    rested: tuple[float, float] = (0.0, 0.0)

    @property
    def member(self) -> Member | None:
        """It in its present life."""
        return self.hello.member if self.hello else None

    @property
    def patience_seconds(self) -> float:
        """How long the next try may take."""
        return AGAIN_SECONDS if self.live and not self.cut else DIAL_SECONDS

    def pause_seconds(self, wanted: bool) -> float:
        """Until the next try; doubles from one failure to the next."""
        limit = WANTED_PAUSE_SECONDS if wanted else HINTED_PAUSE_SECONDS
        return float(min(limit, 0.5 * 2 ** min(self.failures, 10)))

    def rest(self, now: float, wanted: bool) -> None:
        """Leave it alone for a while."""
        self.nudge.clear()
        self.rested, self.task = (now + NUDGED_SECONDS, now + self.pause_seconds(wanted)), None

    def is_due(self, now: float) -> bool:
        """Whether to try it: it does not rest any more."""
        return self.task is None and now >= self.rested[0 if self.nudge.is_set() else 1]

    def called(self) -> None:
        """It has called us, so it can be called."""
        if not self.live and not self.offended:
            self.nudge.set()

    def broke(self, now: float) -> bool:
        """Its stream has ended; whether it is worth another one before the peer counts as gone.

        One that greets and breaks off again and again is not: it would be dialled, and be here, for ever.
        """
        if self.greeted is None or not self.live:
            return False
        if now - self.greeted >= AGAIN_SECONDS:
            self.breaks, self.offended = 0, False
        self.breaks += 1
        self.failures = self.breaks
        self.offended |= self.breaks > MAX_BREAKS
        return not self.offended

    def is_older(self, hello: Hello) -> bool:
        """Whether this is another life of the peer than the latest, and not a later one."""
        known = self.hello
        return known is not None and hello.life != known.life and hello.member.incarnation <= known.member.incarnation

    def doubt(self, now: float) -> None:
        """We slept, or moved: its silence says nothing, and it has to be greeted anew."""
        self.suspicion.slept(now)
        self.stale = self.hello is not None
        self.end_watch()
        self.nudge.set()

    def is_doubtful(self) -> bool:
        """Whether a try has failed, or is bound to fail, by an old connection alone; true once."""
        doubtful = self.stale and self.greeted is None
        if doubtful:
            self.stale, self.cut = False, True
        return doubtful

    def end_watch(self) -> None:
        """The stream on which it is watched is of no use any more."""
        if self.watching is not None and not self.watching.expired():
            self.watching.reschedule(asyncio.get_running_loop().time())
