"""What of a peer's round travels where no anchor is shared, and how that, and what others bring, becomes its state.

    StateMixing     its own outer step, then the mean of stepped states: the step is linear, so that to average stepped
                    states is to step the averages
    PullMixing      what it brings to NoLoCo's step (`node.outer.noloco`), and then the step by the mean

Both ways others may average with a peer that still trains: a pseudo-gradient is measured from the parameters that the
trainer was written with, wherever the state has moved meanwhile.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

import torch

from node.outer.noloco import NoLoCo
from node.outer.outer_loop import diverged
from node.outer.sgd import pseudo_gradient
from node.storage.state import OuterState
from protocols.base import (
    AveragingResult,
    ClosingSession,
    Compute,
    Contribution,
    IndependentSession,
    LocalProgress,
    Outcome,
    PeerFault,
    PeerId,
    Trainer,
)
from protocols.sync.snapshot import Snapshot
from protocols.vectors import norm

OfferCallback = Callable[[LocalProgress], LocalProgress]
"""Makes of work what others hear of it."""
NOWHERE = "its own step led to parameters that are not finite: it is left out"
NO_MEAN = "the mean is not finite: it keeps its own state"


class MixingStrategy(ABC):
    """The state of one peer, through its rounds: `share`, `reclaim`, `mix`, and `begin` again.

    Attributes:
        held: of whom the state holds something that came in while it was lent, in this round.
        undone: exchanges of this round that are in nothing of ours any more: the others have moved, and we have not.
    """

    def __init__(self, state: OuterState, trainer: Trainer, compute: Compute, me: PeerId) -> None:
        self.held: Mapping[PeerId, Contribution] = {}
        self.undone = 0
        self._state, self._trainer, self._compute, self._me = state, trainer, compute, me
        self._origin = state.anchor.clone()  # what the trainer was written with
        self._delta = torch.empty_like(state.anchor)

    async def begin(self) -> None:
        """Let the trainer stand where the state does."""
        await self._trainer.write(self._state.anchor)
        await self._compute.run(lambda: self._origin.copy_(self._state.anchor), 8 * len(self._origin))

    async def take(self, snapshot: Snapshot) -> None:
        """Take up a state that was kept, or another peer's, between two rounds.

        Raises:
            OSError: it cannot be read; the state is what it was.
        """
        state = self._state
        await self._compute.run(lambda: self._delta.copy_(state.velocity), 8 * len(self._delta))
        try:
            await state.take(snapshot)
        except OSError:  # what was taken by then is no state
            state.anchor.copy_(self._origin)
            state.velocity.copy_(self._delta)
            raise
        await self.begin()

    @abstractmethod
    def share(self, session: IndependentSession) -> None:
        """Let others average with this peer while it trains."""

    async def reclaim(self, session: IndependentSession) -> None:
        """The training is over: what came in meanwhile is in the state, and nothing comes any more."""
        self.undone, self.held = 0, await session.reclaim()

    @abstractmethod
    async def mix(
        self, session: IndependentSession, work: LocalProgress, offer: OfferCallback
    ) -> tuple[AveragingResult, LocalProgress]:
        """Step along what was trained, and average with whom one meets.

        Returns:
            What became of the averaging, and the work as it counts: nothing, where it led nowhere.
        """

    async def close(self, session: ClosingSession, here: Collection[PeerId]) -> AveragingResult:
        """Closing exchanges with those who are here: whole states are averaged, parameters and momentum.

        Whatever travels in a round: nothing is made of it afterwards any more.
        """
        into = [self._origin, self._delta]
        return await self._adopted(await session.close([self._state.anchor, self._state.velocity], into, here))

    async def _adopted(self, mean: AveragingResult) -> AveragingResult:
        """What was averaged into `_origin` and `_delta` is our state, if it is anything good."""
        state, into = self._state, [self._origin, self._delta]
        if mean.outcome is not Outcome.COMMITTED:
            return replace(mean, outcome=Outcome.SKIPPED)
        if not await self._compute.run(lambda: math.isfinite(norm(into)), 8 * len(self._delta)):
            return self._given_up(mean, NO_MEAN)
        state.anchor, self._origin = self._origin, state.anchor
        state.velocity, self._delta = self._delta, state.velocity
        return mean

    async def _read(self) -> None:
        """The pseudo-gradient of this round, into `_delta`."""
        delta = self._delta
        await self._trainer.read(delta)
        await self._compute.run(lambda: pseudo_gradient(self._origin, delta, delta), 4 * len(delta))

    def _stand_still(self) -> None:
        """We stand where the training began, and nothing that came in meanwhile is in our state."""
        self._state.anchor.copy_(self._origin)
        self._state.velocity.zero_()
        self._undo(self.held)
        self.held = {}

    def _undo(self, held: Mapping[PeerId, Contribution]) -> None:
        """What was averaged with these is given up."""
        self.undone += sum(len(each.messages) for each in held.values())

    def _given_up(self, mean: AveragingResult, why: str) -> AveragingResult:
        self._undo(mean.contributions)
        blamed = (*mean.blamed, PeerFault(self._me, why))
        return replace(mean, outcome=Outcome.SKIPPED, contributions={}, weights={}, blamed=blamed)


class StateMixing(MixingStrategy):
    """Stepped states travel, parameters and momentum."""

    def share(self, session: IndependentSession) -> None:
        session.share([self._state.anchor, self._state.velocity])

    async def mix(
        self, session: IndependentSession, work: LocalProgress, offer: OfferCallback
    ) -> tuple[AveragingResult, LocalProgress]:
        stepped = not diverged(work) and await self._step(work)
        work = offer(work if stepped else nothing_of(work))
        mean = await self._average(session, work)
        return (mean if stepped else replace(mean, blamed=(*mean.blamed, PeerFault(self._me, NOWHERE)))), work

    async def _step(self, work: LocalProgress) -> bool:
        """Our own outer step along what was trained, if it was anything; False if it led nowhere."""
        if not work.tokens:
            return True
        await self._read()
        if await self._state.advance(self._delta):
            return True
        self._stand_still()
        return False

    async def _average(self, session: IndependentSession, work: LocalProgress) -> AveragingResult:
        """What comes of it is our state, if anything good does."""
        into = [self._origin, self._delta]
        return await self._adopted(await session.average([self._state.anchor, self._state.velocity], work, into))


class PullMixing(MixingStrategy):
    """What a peer brings to NoLoCo's step travels; parameters are pulled together through momenta that are its own.

    What was brought stays lent through the next round's training: the step is amended by what comes in by then.
    """

    def __init__(self, state: OuterState, trainer: Trainer, compute: Compute, me: PeerId, rule: NoLoCo) -> None:
        super().__init__(state, trainer, compute, me)
        self._rule = rule
        self._lent = torch.empty_like(state.anchor)  # the mean that the last step was taken by, as others move it
        self._stepped = False  # whether there is one; as it was, it is in `_delta`

    async def take(self, snapshot: Snapshot) -> None:
        self._stepped = False
        await super().take(snapshot)

    def share(self, session: IndependentSession) -> None:
        if self._stepped:
            session.share([self._lent])

    async def reclaim(self, session: IndependentSession) -> None:
        await super().reclaim(session)
        if self.held and not await self._compute.run(self._amend, 12 * len(self._lent)):
            self._undo(self.held)
            self.held = {}
        self._stepped = False

    def _amend(self) -> bool:
        torch.sub(self._lent, self._delta, out=self._delta)
        if not math.isfinite(norm([self._delta])):
            return False
        self._rule.amend(self._state.anchor, self._state.velocity, self._delta)
        return True

    async def mix(
        self, session: IndependentSession, work: LocalProgress, offer: OfferCallback
    ) -> tuple[AveragingResult, LocalProgress]:
        whole = not diverged(work) and await self._bring(work)
        if not whole:
            work = nothing_of(work)
            await self._bring(work)
        work = offer(work)
        mean = await self._average(session, work)
        if not await self._step():
            self._stand_still()
            return self._given_up(mean, NOWHERE), work
        return (mean if whole else replace(mean, blamed=(*mean.blamed, PeerFault(self._me, NOWHERE)))), work

    async def _bring(self, work: LocalProgress) -> bool:
        """Make what we bring, into `_delta`; who trained nothing has no pseudo-gradient. Whether it is finite."""
        if work.tokens:
            await self._read()
        else:
            self._delta.zero_()

        def make() -> bool:
            self._rule.offer(self._state.anchor, self._delta, self._delta)
            return math.isfinite(norm([self._delta]))

        return await self._compute.run(make, 12 * len(self._delta))

    async def _average(self, session: IndependentSession, work: LocalProgress) -> AveragingResult:
        """The mean to step by, into `_lent`: without others, what we bring."""
        mean = await session.average([self._delta], work, [self._lent])
        if mean.outcome is not Outcome.COMMITTED:
            mean = replace(mean, outcome=Outcome.SKIPPED)
        elif not await self._compute.run(lambda: math.isfinite(norm([self._lent])), 4 * len(self._lent)):
            mean = self._given_up(mean, NO_MEAN)
        if mean.outcome is Outcome.SKIPPED:
            await self._compute.run(lambda: self._lent.copy_(self._delta), 8 * len(self._lent))
        return mean

    async def _step(self) -> bool:
        """Step by the mean; False if that led nowhere."""
        if not await self._state.advance(self._lent):
            return False
        await self._compute.run(lambda: self._delta.copy_(self._lent), 8 * len(self._lent))
        self._stepped = True
        return True


def nothing_of(work: LocalProgress) -> LocalProgress:
    """That work, if it is worth nothing."""
    return replace(work, tokens=0, norm=0.0)
