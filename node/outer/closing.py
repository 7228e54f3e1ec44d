"""The end of a run with independent state: waits for the other peers, then runs the closing exchanges.

Each peer counts its own rounds, so peers reach the end of the run one after the other. A peer that has reached it waits
for the others, and meanwhile shares its state with them. It stops waiting if no peer has arrived for as long as its
last round of training took.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from node.outer.mixing import MixingStrategy
from node.outer.sketch import Sketch
from protocols.base import (
    AveragingResult,
    ClosingAverager,
    ClosingSession,
    Contribution,
    Head,
    Outcome,
    PeerId,
    RoundKey,
)

WAIT_FLOOR_SECONDS, WAIT_LIMIT_SECONDS = 20.0, 600.0
"""Bounds of the wait for other peers to reach the end. Within them, the wait is this peer's last training time."""
LOOK_SECONDS = 0.25
SKETCH_SECONDS = 3.0  # Longest wait for the other peers' new sketches, which are sent with heartbeats


@dataclass(slots=True)
class ClosingResult:
    # includes the exchanges that others began with this peer while it waited
    mean: AveragingResult = field(default_factory=lambda: AveragingResult(Outcome.SKIPPED))
    exchanges: int = 0  # this peer's own that took effect
    half_exchanges: int = 0
    mass_drift: float = 0.0
    # the last sketch of each participant before the exchanges; None if it had sent none
    sketches: Mapping[PeerId, Sketch | None] = field(default_factory=dict)

    def follows(self, last: AveragingResult) -> AveragingResult:
        sent, received = last.bytes_sent + self.mean.bytes_sent, last.bytes_received + self.mean.bytes_received
        both = joined(replace(last, bytes_sent=sent, bytes_received=received), self.mean.contributions)
        return replace(both, blamed=(*last.blamed, *self.mean.blamed))


class ClosingPhase:
    def __init__(self, averager: ClosingAverager, run_rounds: int, rounds: Callable[[], Mapping[PeerId, int]]) -> None:
        """`rounds` returns the round of each other peer that is live and does not leave."""
        self._averager, self._run_rounds, self.rounds = averager, run_rounds, rounds

    def is_due(self, round_number: int) -> bool:
        return round_number >= self._run_rounds and bool(self.rounds())

    def behind(self) -> tuple[PeerId, ...]:
        return tuple(peer for peer, number in self.rounds().items() if number < self._run_rounds)

    async def run(
        self,
        mixing: MixingStrategy,
        key: RoundKey,
        seconds: tuple[float, float],
        on_enter: Callable[[ClosingSession], None],
        sketches: Callable[[], Mapping[PeerId, Sketch]],
    ) -> ClosingResult:
        """Wait for the other peers, then average with those that have reached the end.

        `seconds` are the duration of the last round's training and the time limit of a round. `on_enter` gets the
        session; setting its `cut` ends the phase soon. `sketches` returns the last sketches of the others.
        """
        wait_seconds = min(max(WAIT_FLOOR_SECONDS, seconds[0]), WAIT_LIMIT_SECONDS)
        head = Head(key, (self._averager.me,), key.lineage, key.lineage)
        deadline = asyncio.get_running_loop().time() + 2 * wait_seconds + seconds[1]
        async with self._averager.enter(head, deadline) as session:
            on_enter(session)
            mixing.share(session)
            await self._gather(wait_seconds, session.cut)
            await mixing.reclaim(session)
            early, undone = mixing.held, mixing.undone
            here = [peer for peer, number in self.rounds().items() if number >= self._run_rounds]
            before = sketches()
            mean = await mixing.close(session, here)
        return ClosingResult(
            joined(mean, early),
            session.closing_exchanges,
            session.half_exchanges + undone + mixing.undone,
            session.mass_drift,
            {peer: before.get(peer) for peer in here},
        )

    async def _gather(self, wait_seconds: float, cut: asyncio.Event) -> None:
        """Wait until no peer is behind, or none has arrived for `wait_seconds`; at most twice that time in all."""
        loop = asyncio.get_running_loop()
        limit = loop.time() + 2 * wait_seconds
        until, behind = loop.time() + wait_seconds, set(self.behind())
        while behind and loop.time() < min(until, limit) and not cut.is_set():
            await asyncio.sleep(LOOK_SECONDS)
            now = set(self.behind())
            if behind - now:
                until = loop.time() + wait_seconds
            behind = now


def joined(mean: AveragingResult, held: Mapping[PeerId, Contribution]) -> AveragingResult:
    """Merge a mean with `held`, exchanges that other peers began. Neither may include reverted exchanges.

    If `held` is empty, a committed mean without contributions becomes SKIPPED.
    """
    if not held:
        nothing = mean.outcome is Outcome.COMMITTED and not mean.contributions
        return replace(mean, outcome=Outcome.SKIPPED, weights={}) if nothing else mean
    whole = dict(mean.contributions)
    for peer, early in held.items():
        late = whole.get(peer, early)
        messages = early.messages if late is early else early.messages + late.messages
        whole[peer] = Contribution(late.chunks_counted, late.chunks, messages)
    return replace(mean, outcome=Outcome.COMMITTED, contributions=whole)
