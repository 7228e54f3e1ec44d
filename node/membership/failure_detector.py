"""Adaptive failure detector: suspects a peer that is silent for much longer than its usual pauses. No I/O, no clock.

Accrual detectors (Hayashibara et al. 2004) turn the distribution of a peer's pauses into a level of suspicion. One
threshold is enough here: some deviations above the mean, as in TCP's retransmission timer (RFC 6298), within bounds.
"""

from __future__ import annotations

PULSE_SECONDS, SLOWEST_PULSE_SECONDS = 1.0, 2.0
PULSES_PER_SECOND = 12
"""Heartbeats of a peer that watches 12 to 24 others. It sends as many answers, and receives as many of both."""
GRACE_SECONDS = 2.0  # a peer may be at least this much later than usual
CEILING_SECONDS = 15.0
"""Upper bound. Where heartbeats queue behind vectors for seconds, a failure is detected later by as much."""
DEVIATIONS = 6.0
_GAIN = 1 / 8
_DEVIATION_GAIN = 1 / 4


def pulse_seconds(watched: int) -> float:
    """The pause between two heartbeats to one peer, for a peer that watches this many."""
    return min(max(PULSE_SECONDS, watched / PULSES_PER_SECOND), SLOWEST_PULSE_SECONDS)


class FailureDetector:
    def __init__(self, now: float) -> None:
        self._heard = now
        self._mean_seconds = PULSE_SECONDS
        self._deviation_seconds = 0.25

    def hear(self, now: float) -> None:
        pause = max(0.0, now - self._heard)
        self._deviation_seconds += _DEVIATION_GAIN * (abs(pause - self._mean_seconds) - self._deviation_seconds)
        self._mean_seconds += _GAIN * (pause - self._mean_seconds)
        self._heard = now

    def slept(self, now: float) -> None:
        """Restart the silence: this process was suspended, so the silence says nothing about the peer."""
        self._heard = now

    @property
    def patience_seconds(self) -> float:
        """At least `GRACE_SECONDS` more than its usual pause: 3 s if it sends a heartbeat each second."""
        grace_seconds = max(GRACE_SECONDS, DEVIATIONS * self._deviation_seconds)
        return min(self._mean_seconds + grace_seconds, CEILING_SECONDS)

    def due(self) -> float:
        return self._heard + self.patience_seconds
