"""The end of a run of peers that share no anchor: waiting for the others to come to it, and closing exchanges.

Rounds are each peer's own, so that peers come to the end one after the other. Who is there waits for the others while
its state stays lent to them, and no longer than its last round of training took since somebody came last.
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
"""For the others to come to the end: as long as this peer trained in its last round, within these."""
LOOK_SECONDS = 0.25
TOLD_SECONDS = 3.0
"""Sketches travel with pulses: so long, and until all have told another than before, their new ones are waited for."""


@dataclass(slots=True)
class ClosingResult:
    """What came of closing exchanges.

    Attributes:
        mean: of the exchanges, those included that others had with the state while it waited.
        exchanges: that held, of this peer's own.
        half_exchanges, mass_drift: as in a session.
        told: of the others that were there for it, the sketches that they had told before it.
    """

    mean: AveragingResult = field(default_factory=lambda: AveragingResult(Outcome.SKIPPED))
    exchanges: int = 0
    half_exchanges: int = 0
    mass_drift: float = 0.0
    told: Mapping[PeerId, Sketch | None] = field(default_factory=dict)

    def follows(self, last: AveragingResult) -> AveragingResult:
        """The last round's mean and these exchanges as one."""
        bytes_sent, bytes_received = (
            last.bytes_sent + self.mean.bytes_sent,
            last.bytes_received + self.mean.bytes_received,
        )
        both = joined(replace(last, bytes_sent=bytes_sent, bytes_received=bytes_received), self.mean.contributions)
        return replace(both, blamed=(*last.blamed, *self.mean.blamed))


class ClosingPhase:
    """Attributes:
    rounds: of each of the others who is here and not about to leave, the round that it is in.
    """

    def __init__(self, averager: ClosingAverager, run_rounds: int, rounds: Callable[[], Mapping[PeerId, int]]) -> None:
        """
        Args:
            run_rounds: so many rounds is the run long.
        """
        self._averager, self._run_rounds, self.rounds = averager, run_rounds, rounds

    def is_due(self, round_number: int) -> bool:
        """Whether a peer that is about to begin this round is through, and not alone."""
        return round_number >= self._run_rounds and bool(self.rounds())

    def behind(self) -> tuple[PeerId, ...]:
        """Who has not come to the end."""
        return tuple(peer for peer, number in self.rounds().items() if number < self._run_rounds)

    async def run(
        self,
        mixing: MixingStrategy,
        key: RoundKey,
        seconds: tuple[float, float],
        on_enter: Callable[[ClosingSession], None],
        told: Callable[[], Mapping[PeerId, Sketch]],
    ) -> ClosingResult:
        """Wait for the others, then average with those who are there.

        Args:
            key: of the last round, in which all of this counts.
            seconds: that the last round of training took, and that a round may take.
            on_enter: called with the session: setting its `cut` ends this soon.
            told: the sketches that the others have told.
        """
        wait_seconds = min(max(WAIT_FLOOR_SECONDS, seconds[0]), WAIT_LIMIT_SECONDS)
        head = Head(key, (self._averager.me,), key.lineage, key.lineage)
        deadline = asyncio.get_running_loop().time() + 2 * wait_seconds + seconds[1]
        async with self._averager.enter(head, deadline) as session:
            on_enter(session)
            mixing.share(session)
            await self._gathered(wait_seconds, session.cut)
            await mixing.reclaim(session)
            early, undone = mixing.held, mixing.undone
            here = [peer for peer, number in self.rounds().items() if number >= self._run_rounds]
            before = told()
            mean = await mixing.close(session, here)
        return ClosingResult(
            joined(mean, early),
            session.closing_exchanges,
            session.half_exchanges + undone + mixing.undone,
            session.mass_drift,
            {peer: before.get(peer) for peer in here},
        )

    async def _gathered(self, wait_seconds: float, cut: asyncio.Event) -> None:
        """Wait until nobody is behind any more, or nobody has come for so long; twice that in all."""
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
    """A mean, and exchanges beside it: they count, too, unless they were given up since."""
    if not held:
        nothing = mean.outcome is Outcome.COMMITTED and not mean.contributions
        return replace(mean, outcome=Outcome.SKIPPED, weights={}) if nothing else mean
    whole = dict(mean.contributions)
    for peer, early in held.items():
        late = whole.get(peer, early)
        messages = early.messages if late is early else early.messages + late.messages
        whole[peer] = Contribution(late.chunks_counted, late.chunks, messages)
    return replace(mean, outcome=Outcome.COMMITTED, contributions=whole)
