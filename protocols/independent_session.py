"""The part that all sessions of protocols with independent state share."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from protocols.base import AveragingResult, Contribution, Deadline, Head, LocalProgress, Outcome, PeerId, Vector
from protocols.streams.control_channel import RoundAccounting


class SessionBase:
    """An `IndependentSession` without `average`. Its shared state is not averaged with.

    `cut` is set when this peer's own work is complete, and when it rests: it then averages with what it has.
    """

    def __init__(self, head: Head, deadline: Deadline, accounting: RoundAccounting) -> None:
        self.head, self.deadline = head, deadline
        self.cut = asyncio.Event()
        self.round, self.group = head.key.round, ""
        self.half_exchanges, self.mass_drift = 0, 0.0
        self._accounting = accounting

    def offer(self, work: LocalProgress) -> None:
        if work.complete or work.leaving or work.resting:
            self.cut.set()

    def share(self, state: Sequence[Vector]) -> None:
        """Without effect: peers average only during `average`."""

    async def reclaim(self) -> Mapping[PeerId, Contribution]:
        return {}

    def count_half(self, drift: float) -> None:
        """Count an exchange that may have moved one end only, by this share of the state's norm."""
        self.half_exchanges += 1
        self.mass_drift += drift

    def _result(
        self, committed: bool, contributions: Mapping[PeerId, Contribution], weights: Mapping[PeerId, float]
    ) -> AveragingResult:
        """The result of `average`, with the bytes and the blamed peers since the last one."""
        outcome, record, certificate = Outcome.COMMITTED if committed else Outcome.SKIPPED, b"", b""
        return AveragingResult(outcome, record, certificate, contributions, weights, *self._accounting.take())
