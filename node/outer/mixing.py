"""The vectors that a peer with a state of its own exchanges, and how what it receives becomes part of that state.

    StateMixing     the peer's own outer step, then the mean of stepped states: the step is linear, so the mean of
                    stepped states is the step of the means
    PullMixing      the peer's contribution to NoLoCo's step (`node.outer.noloco`), then the step by the mean

With either, others may average with a peer that still trains: a pseudo-gradient is measured from the parameters that
the trainer was written with, wherever the state has moved meanwhile.
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
"""Returns the work as it is offered to other peers."""
NOWHERE = "its own step led to parameters that are not finite: it is left out"
NO_MEAN = "the mean is not finite: it keeps its own state"


class MixingStrategy(ABC):
    """Exchanges one peer's state in each round: `share`, `reclaim`, `mix`, and `begin` again.

    Attributes:
        held: peers whose vectors entered the state while it was shared, in this round.
        undone: exchanges of this round that this peer gave up: the others have moved, and this peer has not.
    """

    def __init__(self, state: OuterState, trainer: Trainer, compute: Compute, me: PeerId) -> None:
        self.held: Mapping[PeerId, Contribution] = {}
        self.undone = 0
        self._state, self._trainer, self._compute, self._me = state, trainer, compute, me
        self._origin = state.anchor.clone()  # what the trainer was written with
        self._delta = torch.empty_like(state.anchor)

    async def begin(self) -> None:
        """Write the state to the trainer, for the next round."""
        await self._trainer.write(self._state.anchor)
        await self._compute.run(lambda: self._origin.copy_(self._state.anchor), 8 * len(self._origin))

    async def take(self, snapshot: Snapshot) -> None:
        """Take a kept state, or another peer's, between two rounds.

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
        """Stop sharing after training: what arrived meanwhile is in the state."""
        self.undone, self.held = 0, await session.reclaim()

    @abstractmethod
    async def mix(
        self, session: IndependentSession, work: LocalProgress, offer: OfferCallback
    ) -> tuple[AveragingResult, LocalProgress]:
        """Step along what was trained, and average with the partners.

        Returns:
            What became of the averaging, and the work as it counts: none, where its step was not finite.
        """

    async def close(self, session: ClosingSession, here: Collection[PeerId]) -> AveragingResult:
        """Average whole states, parameters and momentum, with the peers that have come to the end of the run."""
        into = [self._origin, self._delta]
        return await self._adopt(await session.close([self._state.anchor, self._state.velocity], into, here))

    async def _adopt(self, mean: AveragingResult) -> AveragingResult:
        """Make the mean in `_origin` and `_delta` this peer's state, if it is committed and finite."""
        state, into = self._state, [self._origin, self._delta]
        if mean.outcome is not Outcome.COMMITTED:
            return replace(mean, outcome=Outcome.SKIPPED)
        if not await self._compute.run(lambda: math.isfinite(norm(into)), 8 * len(self._delta)):
            return self._give_up(mean, NO_MEAN)
        state.anchor, self._origin = self._origin, state.anchor
        state.velocity, self._delta = self._delta, state.velocity
        return mean

    async def _read(self) -> None:
        """Read the pseudo-gradient of this round into `_delta`."""
        delta = self._delta
        await self._trainer.read(delta)
        await self._compute.run(lambda: pseudo_gradient(self._origin, delta, delta), 4 * len(delta))

    def _revert(self) -> None:
        """Return to where the training began, and give up what arrived meanwhile."""
        self._state.anchor.copy_(self._origin)
        self._state.velocity.zero_()
        self._undo(self.held)
        self.held = {}

    def _undo(self, held: Mapping[PeerId, Contribution]) -> None:
        """Give up what was averaged with these peers."""
        self.undone += sum(len(each.messages) for each in held.values())

    def _give_up(self, mean: AveragingResult, why: str) -> AveragingResult:
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
        """Take the peer's own outer step along what was trained, if anything was; False if it was not finite."""
        if not work.tokens:
            return True
        await self._read()
        if await self._state.advance(self._delta):
            return True
        self._revert()
        return False

    async def _average(self, session: IndependentSession, work: LocalProgress) -> AveragingResult:
        """Average the state, parameters and momentum, with the partners."""
        into = [self._origin, self._delta]
        return await self._adopt(await session.average([self._state.anchor, self._state.velocity], work, into))


class PullMixing(MixingStrategy):
    """Contributions to NoLoCo's step travel; each peer's own momentum pulls the parameters together.

    A contribution stays shared through the next round's training: what arrives by then amends the step.
    """

    def __init__(self, state: OuterState, trainer: Trainer, compute: Compute, me: PeerId, rule: NoLoCo) -> None:
        super().__init__(state, trainer, compute, me)
        self._rule = rule
        self._shared = torch.empty_like(state.anchor)  # the mean of the last step, which exchanges since have moved
        self._stepped = False  # whether there was a step; its mean, as it was then, is in `_delta`

    async def take(self, snapshot: Snapshot) -> None:
        self._stepped = False
        await super().take(snapshot)

    def share(self, session: IndependentSession) -> None:
        if self._stepped:
            session.share([self._shared])

    async def reclaim(self, session: IndependentSession) -> None:
        await super().reclaim(session)
        if self.held and not await self._compute.run(self._amend, 12 * len(self._shared)):
            self._undo(self.held)
            self.held = {}
        self._stepped = False

    def _amend(self) -> bool:
        torch.sub(self._shared, self._delta, out=self._delta)
        if not math.isfinite(norm([self._delta])):
            return False
        self._rule.amend(self._state.anchor, self._state.velocity, self._delta)
        return True

    async def mix(
        self, session: IndependentSession, work: LocalProgress, offer: OfferCallback
    ) -> tuple[AveragingResult, LocalProgress]:
        whole = not diverged(work) and await self._contribute(work)
        if not whole:
            work = nothing_of(work)
            await self._contribute(work)
        work = offer(work)
        mean = await self._average(session, work)
        if not await self._step():
            self._revert()
            return self._give_up(mean, NOWHERE), work
        return (mean if whole else replace(mean, blamed=(*mean.blamed, PeerFault(self._me, NOWHERE)))), work

    async def _contribute(self, work: LocalProgress) -> bool:
        """Compute the contribution into `_delta`; returns whether it is finite. Without work, Δ is zero."""
        if work.tokens:
            await self._read()
        else:
            self._delta.zero_()

        def make() -> bool:
            self._rule.offer(self._state.anchor, self._delta, self._delta)
            return math.isfinite(norm([self._delta]))

        return await self._compute.run(make, 12 * len(self._delta))

    async def _average(self, session: IndependentSession, work: LocalProgress) -> AveragingResult:
        """Average the contributions into `_shared`; without partners it is this peer's own."""
        mean = await session.average([self._delta], work, [self._shared])
        if mean.outcome is not Outcome.COMMITTED:
            mean = replace(mean, outcome=Outcome.SKIPPED)
        elif not await self._compute.run(lambda: math.isfinite(norm([self._shared])), 4 * len(self._shared)):
            mean = self._give_up(mean, NO_MEAN)
        if mean.outcome is Outcome.SKIPPED:
            await self._compute.run(lambda: self._shared.copy_(self._delta), 8 * len(self._shared))
        return mean

    async def _step(self) -> bool:
        """Step by the mean; False if the result is not finite."""
        if not await self._state.advance(self._shared):
            return False
        await self._compute.run(lambda: self._delta.copy_(self._shared), 8 * len(self._shared))
        self._stepped = True
        return True


def nothing_of(work: LocalProgress) -> LocalProgress:
    """The work, without tokens: its step was not finite."""
    return replace(work, tokens=0, norm=0.0)
