"""How far a peer is with catching up, how fast, and whether it gets closer. No I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

METER_SECONDS = 15.0
LEAST_SECONDS = 10.0
"""Shorter passes say nothing about this peer's download rate."""
SAY_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class SyncProgressLine:
    """How much of the state has arrived.

    Attributes:
        bytes_here, bytes_whole: bytes of the snapshot that have arrived, and in total; 0 if no snapshot is needed.
        donors: number of peers that are sending it.
        bytes_per_second: recent rate of everything that is fetched.
        rounds_here, rounds_whole: rounds after the snapshot that have arrived, and that are known.
        eta_seconds: time until the last known round has arrived; None if nothing arrives.
    """

    bytes_here: int
    bytes_whole: int
    donors: int
    bytes_per_second: float
    rounds_here: int
    rounds_whole: int
    eta_seconds: float | None


class SyncProgress:
    """Collects the progress of downloads and of replays.

    The other attributes are as in `SyncProgressLine`.

    Attributes:
        active: whether the peer is catching up.
        round_bytes: bytes to fetch for one mean.
        fetched_bytes: bytes fetched since the process started.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self.active = False
        self.bytes_here = self.bytes_whole = self.donors = self.rounds_here = self.rounds_whole = 0
        self.round_bytes = self.fetched_bytes = 0
        self._now = now
        self._came: deque[tuple[float, int]] = deque(maxlen=4096)

    def begin(self, rounds: int, round_bytes: int) -> None:
        """Begin another attempt.

        Args:
            rounds: number of rounds to replay, as far as it is known.
            round_bytes: bytes to fetch for one mean.
        """
        self.active, self.rounds_here, self.rounds_whole, self.round_bytes = True, 0, rounds, round_bytes
        self.bytes_here = self.bytes_whole = self.donors = 0

    def end(self) -> None:
        self.active = False

    def came(self, size: int) -> None:
        """Count fetched bytes."""
        self.fetched_bytes += size
        self._came.append((self._now(), size))

    def bytes_per_second(self) -> float:
        """The recent download rate."""
        since = self._now() - METER_SECONDS
        while self._came and self._came[0][0] < since:
            self._came.popleft()
        if len(self._came) < 2:
            return 0.0
        seconds = max(1.0, self._now() - self._came[0][0])
        return sum(size for _, size in self._came) / seconds

    def progress(self) -> SyncProgressLine | None:
        """The current progress; None while the peer is not catching up."""
        if not self.active:
            return None
        rate = self.bytes_per_second()
        missing = self.bytes_whole - self.bytes_here + (self.rounds_whole - self.rounds_here) * self.round_bytes
        return SyncProgressLine(
            self.bytes_here,
            self.bytes_whole,
            self.donors,
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
        """Begin another pass.

        Args:
            goal: the round that the pass leads to.
            fetched_bytes: fetched by this process so far.
            round_bytes: of one mean.

        Returns:
            One line for the operator if the last pass got no closer; else "".
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
        """Record that the pass has reached its goal."""
        self._ended = now


def _line(seconds: float, rounds: int, fetched_bytes: int, round_bytes: int) -> str:
    if seconds < LEAST_SECONDS or rounds * round_bytes < fetched_bytes:
        return ""
    needed, had = rounds * round_bytes / seconds / 1e6, fetched_bytes / seconds / 1e6
    return (
        f"this peer's line is too slow for the run: in {seconds:.0f} s the others decided {rounds} rounds of "
        f"{round_bytes / 1e6:.3g} MB each, and {fetched_bytes / 1e6:.3g} MB came in; it goes on trying, but needs more "
        f"than {8 * needed:.3g} Mbit/s to catch up, and has {8 * had:.3g}"
    )
