"""Counts the bytes of all streams: by direction, by class of traffic, and by peer.

Counted is what Starling's own pipes write and read, over libp2p and over direct connections, with their framing. Not
counted are the headers of TCP and below, what p2pd adds and sends by itself, the directory's queries, and the 48 bytes
that open a direct connection.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from node.streams.byte_quota import ByteQuota
from protocols.aio import loop_time
from protocols.base import PeerId
from protocols.peers.estimates import RecentDict
from protocols.streams.framing import BULK_METHODS, CATCH_UP_METHODS

RATE_SECONDS = 5.0
_SAMPLE_SECONDS = 1.0
_MAX_PEERS = 256


class Direction(StrEnum):
    """Which way bytes go, as seen from this peer."""

    UPLOAD = "upload"
    DOWNLOAD = "download"


class TrafficClass(StrEnum):
    CONTROL = "control"
    ROUND = "round"
    CATCH_UP = "catch-up"


def class_of(method: str) -> TrafficClass:
    if method in CATCH_UP_METHODS:
        return TrafficClass.CATCH_UP
    return TrafficClass.ROUND if method in BULK_METHODS else TrafficClass.CONTROL


@dataclass(slots=True)
class ByteCounts:
    sent: int = 0
    received: int = 0


CountBytes = Callable[[int, int], None]
"""Counts bytes of one stream, sent and received. It costs a microsecond an operation, not for each byte."""

ByteTotals = dict[tuple[Direction, TrafficClass], int]


class ByteMeter:
    """The byte counts of one peer, which go to its quota, too. Not for several threads."""

    def __init__(self, now: Callable[[], float] = loop_time, quota: ByteQuota | None = None) -> None:
        self._now, self._quota = now, quota
        self._classes = {each: ByteCounts() for each in TrafficClass}
        self._peers: RecentDict[PeerId, ByteCounts] = RecentDict(_MAX_PEERS)
        self._samples: deque[tuple[float, ByteTotals]] = deque(maxlen=round(2 * RATE_SECONDS / _SAMPLE_SECONDS))
        self._started: float | None = None
        self._next_sample = float("-inf")

    def stream(self, peer: PeerId, method: str) -> CountBytes:
        counts = (self._classes[class_of(method)], self._peers.put_newest(peer, ByteCounts))

        def count(sent: int, received: int) -> None:
            self._note(sent + received)
            for each in counts:
                each.sent += sent
                each.received += received

        return count

    def totals(self) -> Mapping[tuple[Direction, TrafficClass], int]:
        sent = {(Direction.UPLOAD, each): counts.sent for each, counts in self._classes.items()}
        return sent | {(Direction.DOWNLOAD, each): counts.received for each, counts in self._classes.items()}

    def total(self, direction: Direction) -> int:
        return sum(count for (each, _), count in self.totals().items() if each is direction)

    def rates(self) -> Mapping[tuple[Direction, TrafficClass], float]:
        """Bytes per second, over about the last five seconds."""
        now, totals = self._now(), self.totals()
        recent = [each for each in self._samples if each[0] > now - RATE_SECONDS - _SAMPLE_SECONDS]
        if not recent or self._started is None:
            return dict.fromkeys(totals, 0.0)
        began, before = recent[0]
        seconds = max(min(RATE_SECONDS, now - self._started), now - began, _SAMPLE_SECONDS)
        return {key: (count - before[key]) / seconds for key, count in totals.items()}

    def peers(self) -> Mapping[PeerId, ByteCounts]:
        """By peer, for the 256 peers with the latest streams."""
        return {peer: ByteCounts(each.sent, each.received) for peer, each in self._peers.items()}

    def _note(self, count: int) -> None:
        """Remember the totals once a second, before bytes are added."""
        if self._quota:
            self._quota.count(count)
        now = self._now()
        if now < self._next_sample:
            return
        self._started = now if self._started is None else self._started
        self._next_sample = now + _SAMPLE_SECONDS
        self._samples.append((now, dict(self.totals())))


# -- how fast this peer's line sends -----------------------------------------------------------------------------------

SLOT_SECONDS = 0.2  # each connection that sends is looked at within it
WINDOW_SLOTS = 5
_LEAST_WINDOWS, _MOST_WINDOWS = 3, 20

NoteDelivery = Callable[[float, int, float, bool], None]
"""`UploadSpeed.note` of one peer."""


class UploadSpeed:
    """Sums up what direct connections deliver. Pure: the caller passes the time.

    A connection that has unsent data is slowed by its line, or by its peer's. If that is so of two peers at the same
    time, what all connections deliver together is taken for this peer's own upload.
    """

    def __init__(self) -> None:
        self._slot = 0
        self._rates: dict[int, float] = {}  # by connection, in this slot
        self._waiting: set[PeerId] = set()
        self._full: list[float] = []  # rates of slots in which the line was full
        self._windows: deque[float] = deque(maxlen=_MOST_WINDOWS)

    def note(self, peer: PeerId, now: float, connection: int, rate: float, is_waiting: bool) -> None:
        """A connection to the peer has delivered `rate` bytes/s since the last look, and had unsent data, or not."""
        if (slot := math.floor(now / SLOT_SECONDS)) != self._slot:
            self._end_slot()
            self._slot = slot
        self._rates[connection] = rate
        if is_waiting:
            self._waiting.add(peer)

    @property
    def bytes_per_second(self) -> float:
        """The most that was sent in a second of a full line, of the latest 20 s of them; nan: not known."""
        return max(self._windows) if len(self._windows) >= _LEAST_WINDOWS else math.nan

    def _end_slot(self) -> None:
        if len(self._waiting) > 1:
            self._full.append(math.fsum(self._rates.values()))
        if len(self._full) == WINDOW_SLOTS:
            self._windows.append(math.fsum(self._full) / WINDOW_SLOTS)
            self._full.clear()
        self._rates.clear()
        self._waiting.clear()
