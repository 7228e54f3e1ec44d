"""How fast a direct connection sends: as fast as its packets do not wait long for a line on the way.

TCP fills a line's queue until packets are dropped. On many home lines that is a second of data, behind which the small
messages of all programs wait, heartbeats too. So a connection whose packets take longer than they need to sends more
slowly, at a pacing rate that the kernel keeps. The idea is LEDBAT's (RFC 6817): a delay shows a full line before losses
do.
"""

from __future__ import annotations

import math
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass
from typing import Self

LOOK_SECONDS = 0.1
TARGET_SECONDS = 0.06
"""Packets may wait this long on the way, there and back, before a connection slows down."""
LEAST_BYTES = 48 << 10
"""A connection may always have this much on the way: it continues where others keep the queues full."""
SLOWER, FASTER = 0.8, 1.1
"""The most that a rate changes from one look to the next."""
FIRST_MULTIPLE = 1.5
"""A connection that slows down has reached a rate. It may have this multiple of it, before the change."""
_HELD_SHARE = 0.1
_SO_MAX_PACING_RATE = 47
_MOST_RATE = 2**32 - 2  # the next number means: not paced
_INFO_BYTES = 184


@dataclass(frozen=True, slots=True)
class PathState:
    """What TCP has measured of a connection."""

    round_trip_seconds: float
    least_round_trip_seconds: float  # of the last minutes
    acknowledged_bytes: int
    unacknowledged: bool  # whether something is sent and not acknowledged
    unsent: bool  # whether the kernel holds something that is still to be sent
    held_seconds: float  # that the other side's full buffer has kept it from being sent, since the beginning

    @classmethod
    def of(cls, sock: socket.socket) -> Self | None:
        """None where the kernel does not tell. The layout is that of Linux's `struct tcp_info`, from 4.10 on."""
        if not hasattr(socket, "TCP_INFO"):
            return None
        try:
            info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
        except OSError:
            return None  # no TCP socket
        if len(info) < _INFO_BYTES:
            return None
        sent, smoothed, unsent, least = (struct.unpack_from("=I", info, at)[0] for at in (24, 68, 144, 148))
        acknowledged, held = (struct.unpack_from("=Q", info, at)[0] for at in (120, 176))
        return cls(smoothed / 1e6, least / 1e6, acknowledged, bool(sent), bool(unsent), held / 1e6)


def next_rate(rate: float, delivered: float, round_trip_seconds: float, waited_seconds: float) -> float:
    """The pacing rate that follows `rate`, with which `delivered` was reached; bytes/s, infinite: not paced.

    `waited_seconds` of the round trip the packets have waited.
    """
    if waited_seconds <= TARGET_SECONDS:
        if delivered < rate / 2:
            return rate  # there was less to send, so a higher rate has not been tried
        return rate * (FASTER - (FASTER - 1) * waited_seconds / TARGET_SECONDS)
    least = LEAST_BYTES / round_trip_seconds
    if rate <= least:
        return min(least, FASTER * rate)
    change = FASTER - (FASTER - 1) * waited_seconds / TARGET_SECONDS
    return max(least, min(rate, FIRST_MULTIPLE * delivered) * max(change, SLOWER))


class Pacer:
    """Keeps the pacing rate of one connection."""

    def __init__(self, sock: socket.socket) -> None:
        self.rate = math.inf
        self.delivered = 0.0  # bytes/s that were acknowledged before the latest look
        self.is_waiting = False  # whether there was unsent data all that time, for which the other side had room
        self._socket = sock
        self._seen: tuple[float, PathState] | None = None  # the latest look

    def begin(self, now: float) -> None:
        """The connection sends from now on."""
        if path := PathState.of(self._socket):
            self._seen = now, path

    def look(self, now: float) -> bool:
        """Adjust the rate; to be called every `LOOK_SECONDS`. Returns whether the kernel has something to send."""
        path = PathState.of(self._socket)
        if path is None or self._seen is None:
            return False
        (then, before), self._seen = self._seen, (now, path)
        seconds = max(now - then, 1e-3)
        self.delivered = (path.acknowledged_bytes - before.acknowledged_bytes) / seconds
        has_room = path.held_seconds - before.held_seconds < _HELD_SHARE * seconds
        self.is_waiting = before.unsent and path.unsent and has_room
        waited = max(0.0, path.round_trip_seconds - path.least_round_trip_seconds)
        rate = next_rate(self.rate, self.delivered, path.round_trip_seconds, waited)
        if rate != self.rate:
            self.rate = rate
            with suppress(OSError):
                self._socket.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, int(min(rate, _MOST_RATE)))
        return path.unacknowledged or path.unsent
