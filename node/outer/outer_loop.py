"""What both kinds of replica do in a round: train, offer the work while it grows, and tell what became of it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

import torch

from node.outer.noloco import NoLoCo
from node.outer.sgd import OuterSGD
from node.reporting.report import LapTimer, RoundReport, TrainingDelta
from node.storage.checkpoint_manager import CheckpointManager
from node.storage.state import OuterState
from protocols.base import (
    AveragingResult,
    AveragingSession,
    Compute,
    LocalProgress,
    Member,
    PeerId,
    RoundKey,
    Trainer,
    Vector,
)
from protocols.sync.snapshot import Snapshot, Snapshots
from protocols.wire import MAX_NORM

FIRST_ROUND_LIMIT_SECONDS = 3600.0
ROUND_LIMIT_MULTIPLE = 10.0
ROUND_LIMIT_FLOOR_SECONDS = 60.0
FIRST_STEP_SECONDS = 2.0
"""Who is asked to leave with nothing in hand waits so long for its first step, and goes with that."""


class OuterLoop:
    """A peer's outer state, and its work in one round after the other.

    Attributes:
        state: parameters and momentum.
        leaving: the round under way is this peer's last, and shall end at once.
        last: it is the last, and ends as any other.
        waiting_for: whom the round waits for, as far as this peer can tell.
        on_phase: called with `training` or `averaging` and what was trained so far, as a round goes on.
    """

    SHARES_ANCHOR: ClassVar[bool] = True
    """Whether all measure their work from one state."""

    def __init__(
        self, trainer: Trainer, outer: OuterSGD | NoLoCo, compute: Compute, anchor: Vector, snapshots: Snapshots | None,
        checkpoints: CheckpointManager | None,
    ) -> None:  # fmt: skip
        self.trainer = trainer
        self._compute, self._snapshots, self._checkpoints = compute, snapshots, checkpoints
        self.state = OuterState(anchor, torch.zeros_like(anchor), outer, compute)
        self.leaving = self.last = False
        self.on_phase: Callable[[str, LocalProgress], None] = lambda phase, work: None
        self.waiting_for: Callable[[], Sequence[PeerId]] = tuple
        self._empty_handed = False  # leaves even if it has nothing to hand in
        self._offer_again: Callable[[], None] = lambda: None
        self._limit_seconds = FIRST_ROUND_LIMIT_SECONDS
        self._trained = TrainingDelta()

    @property
    def anchor(self) -> Vector:
        """Outer parameters θ, float32 (n)."""
        return self.state.anchor

    @property
    def velocity(self) -> Vector:
        """Outer momentum m, float32 (n)."""
        return self.state.velocity

    async def start_from(self, snapshot: Snapshot) -> None:
        """Take up the state of a former life, where this peer stands; `settle` follows.

        Raises:
            OSError: it cannot be read.
        """
        await self.state.take(snapshot)
        await self.trainer.write(self.anchor)

    async def _keep(self, snapshots: Snapshots, key: RoundKey) -> None:
        """Keep the state as it stands, before the round of this key, if it is not kept yet."""
        if snapshots.get(key.lineage):
            return
        if self._checkpoints:
            await self._checkpoints.keep(self.state, key)
        else:
            await self.state.keep(snapshots, key)

    def leave(self) -> None:
        """Hand in what there is, as soon as the others can: this peer goes when the round is over."""
        self.leaving = True
        self._offer_again()
        asyncio.get_running_loop().call_later(FIRST_STEP_SECONDS, self._leave_with_nothing)

    def _leave_with_nothing(self) -> None:
        self._empty_handed = True
        self._offer_again()

    async def _train(
        self, session: AveragingSession, key: RoundKey, state_root: bytes, surplus: bool
    ) -> tuple[LocalProgress, list[int]]:
        """Train until the round is called.

        Args:
            key: of the round, as the trainer's schedule counts it.

        Returns:
            The work, and the tokens of each offer that was made of it.
        """
        offers: list[int] = []
        self.waiting_for = session.waiting_for

        def offer(work: LocalProgress) -> None:
            self._offer_again = lambda: session.offer(self._offered(work, state_root))
            session.offer(offered := self._offered(work, state_root))
            offers.append(offered.tokens)
            self._show("training", work)

        return await self.trainer.train(key, session.cut, offer, surplus), offers

    def _show(self, phase: str, work: LocalProgress) -> None:
        self._trained.hear(work)
        self.on_phase(phase, replace(work, tokens=self._trained.tokens, seconds=self._trained.seconds))

    def _offered(self, work: LocalProgress, state_root: bytes) -> LocalProgress:
        """Work as the others hear of it: bound to our state, and nothing if it diverged."""
        if diverged(work):
            work = replace(work, tokens=0, norm=0.0)
        if (self.leaving and (work.tokens or self._empty_handed)) or (self.last and work.complete):
            work = replace(work, complete=True, leaving=True)
        return replace(work, state_root=state_root)

    def _took(self, watch: LapTimer) -> None:
        """A round has gone well, which says how long another may take."""
        self._limit_seconds = max(ROUND_LIMIT_FLOOR_SECONDS, ROUND_LIMIT_MULTIPLE * watch.total())

    def _report(
        self, me: Member, key: RoundKey, lineage: bytes, anchor: bytes, mean: AveragingResult, work: LocalProgress,
        seconds: Mapping[str, float], time: float,
    ) -> RoundReport:  # fmt: skip
        """What became of the round that extends `key.lineage`, now that this peer stands at `lineage`."""
        trained_tokens, trained_seconds = self._trained.take()
        known = mean.contributions if self.SHARES_ANCHOR else {me.peer}  # else a state comes without its lineage
        counted = {
            p: (anchor.hex() if p in known else "", c.chunks_counted, c.chunks) for p, c in mean.contributions.items()
        }
        return RoundReport(
            run=key.run.hex(),
            peer=me.peer,
            incarnation=me.incarnation,
            round=key.round,
            parent=key.lineage.hex(),
            lineage=lineage.hex(),
            anchor_lineage=anchor.hex(),
            outcome=str(mean.outcome),
            peers=mean.peers,
            contributions=counted,
            blamed={blame.peer: blame.why for blame in mean.blamed},
            finite=True,
            weight=mean.weights.get(me.peer, math.nan if me.peer in mean.peers else 0.0),
            tokens=trained_tokens,
            loss=work.loss,
            params_hash=self.state.index.parameters_root.hex(),
            seconds_train=trained_seconds,
            seconds_wait=max(0.0, seconds["train"] - trained_seconds),
            seconds_average=seconds["average"],
            bytes_sent=mean.bytes_sent,
            bytes_received=mean.bytes_received,
            time=time,
        )


def diverged(work: LocalProgress) -> bool:
    """Not finite, or more than an offer can say: a plan that held such an offer would be refused by everybody."""
    return not work.norm <= MAX_NORM
