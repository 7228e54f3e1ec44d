"""How far a peer is with catching up, how fast, and whether it gets closer. No I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from protocols.base import SyncStatus
from protocols.blobs.download import BlobDownload

METER_SECONDS = 15.0
LEAST_SECONDS = 10.0  # shorter passes say nothing about this peer's download rate
SAY_SECONDS = 600.0


class SyncProgress:
    """Collects the progress of a snapshot's download, and of replays, while the peer is catching up (`active`)."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.active = False
        self.download: BlobDownload | None = None
        self.rounds_here = self.rounds_whole = 0  # as in `SyncStatus`
        self.round_bytes = self.fetched_bytes = 0  # of one mean; since the process started
        self._now = now
        self._arrivals: deque[tuple[float, int]] = deque(maxlen=4096)

    def begin(self, rounds: int, round_bytes: int) -> None:
        """Begin another attempt, with so many rounds to replay, as far as is known, at `round_bytes` each."""
        self.active, self.rounds_here, self.rounds_whole, self.round_bytes = True, 0, rounds, round_bytes
        self.download = None

    def end(self) -> None:
        self.active, self.download = False, None

    def record_arrival(self, size: int) -> None:
        self.fetched_bytes += size
        self._arrivals.append((self._now(), size))

    def bytes_per_second(self) -> float:
        since = self._now() - METER_SECONDS
        while self._arrivals and self._arrivals[0][0] < since:
            self._arrivals.popleft()
        if len(self._arrivals) < 2:
            return 0.0
        seconds = max(1.0, self._now() - self._arrivals[0][0])
        return sum(size for _, size in self._arrivals) / seconds

    def progress(self) -> SyncStatus | None:
        """The current progress; None while the peer is not catching up."""
        if not self.active:
            return None
        rate, download = self.bytes_per_second(), self.download
        missing = download.missing_bytes if download else 0
        whole = download.size_bytes if download else 0
        here = whole - missing
        missing += (self.rounds_whole - self.rounds_here) * self.round_bytes
        return SyncStatus(
            here,
            whole,
            download.holders if download else 0,
            rate,
            self.rounds_here,
            self.rounds_whole,
            missing / rate if rate else None,
        )


class CatchUpTrend:
    """Detects that rounds are decided faster than this peer can fetch them, so that it never catches up."""

    def __init__(self) -> None:
        self._pass: tuple[float, int, int] | None = None  # the last pass: began, its goal, bytes fetched before
        self._ended = self._said = float("-inf")

    def begins(self, now: float, goal: int, fetched_bytes: int, round_bytes: int) -> str:
        """Begin another pass to the round `goal`, with so much fetched by this process so far.

        Returns one line for the operator if the last pass got no closer; else "".
        """
        line = ""
        if self._pass and now - self._ended < LEAST_SECONDS:
            began, before, fetched_before = self._pass
            line = _line(now - began, goal - before, fetched_bytes - fetched_before, round_bytes)
        self._pass = (now, goal, fetched_bytes)
        if not line or now - self._said < SAY_SECONDS:
            return ""
        self._said = now
        return line

    def ends(self, now: float) -> None:
        self._ended = now


def _line(seconds: float, rounds: int, fetched_bytes: int, round_bytes: int) -> str:
    if seconds < LEAST_SECONDS or rounds * round_bytes < fetched_bytes:
        return ""
    needed, had = rounds * round_bytes / seconds / 1e6, fetched_bytes / seconds / 1e6
    return (
        f"your connection is too slow for this run: in {seconds:.0f} s the others decided {rounds} rounds of "
        f"{round_bytes / 1e6:.3g} MB each, and {fetched_bytes / 1e6:.3g} MB came in; this peer keeps trying, but needs "
        f"more than {8 * needed:.3g} Mbit/s to catch up, and has {8 * had:.3g}"
    )
