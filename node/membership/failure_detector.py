"""How long a silence means something: adaptive, from the pauses that were seen before. Pure.

Accrual detectors (Hayashibara et al. 2004) turn the distribution of a peer's pauses into a level of suspicion; here one
threshold is enough, some deviations above the mean as TCP's retransmission timer has it (RFC 6298), between bounds.
"""

from __future__ import annotations

PULSE_SECONDS = 1.0
FLOOR_SECONDS = 3.0
CEILING_SECONDS = 15.0
"""On a link where signs of life queue behind vectors for seconds, a death is noticed as much later."""
DEVIATIONS = 6.0
_GAIN = 1 / 8
_DEVIATION_GAIN = 1 / 4


class FailureDetector:
    """When a peer that is heard every second or so has been silent for too long.

    Args:
        now: seconds of the loop's time; the peer has just been heard.
    """

    def __init__(self, now: float) -> None:
        self._heard = now
        self._mean_seconds = PULSE_SECONDS
        self._deviation_seconds = 0.25

    def hear(self, now: float) -> None:
        """A sign of life has come."""
        pause = max(0.0, now - self._heard)
        self._deviation_seconds += _DEVIATION_GAIN * (abs(pause - self._mean_seconds) - self._deviation_seconds)
        self._mean_seconds += _GAIN * (pause - self._mean_seconds)
        self._heard = now

    def slept(self, now: float) -> None:
        """We did not look for a while ourselves: the silence says nothing about the peer."""
        self._heard = now

    @property
    def patience_seconds(self) -> float:
        """The silence that makes it suspect."""
        usual = self._mean_seconds + DEVIATIONS * self._deviation_seconds
        return min(max(usual, FLOOR_SECONDS), CEILING_SECONDS)

    def due(self) -> float:
        """The instant at which it becomes suspect, unless it is heard before."""
        return self._heard + self.patience_seconds
