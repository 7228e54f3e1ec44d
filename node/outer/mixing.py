"""Mixing strategies: which vectors a peer with independent state exchanges, and how it applies the mean.

    StateMixing     takes the peer's own outer step, then averages the stepped states. The step is linear, so the mean
                    of stepped states is the step of the mean state by the mean pseudo-gradient.
    PullMixing      averages the peers' contributions to NoLoCo's step (`node.outer.noloco`), then steps by the mean.

With either, other peers may average with a peer while it trains. Its pseudo-gradient is measured from the parameters
that its trainer started from, even if averaging has changed its state since.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

import torch

from node.outer.noloco import NoLoCo
from node.outer.outer_loop import diverged
from node.outer.state import OuterState, pseudo_gradient
from protocols.base import (
    AveragingResult,
    ClosingSession,
    Contribution,
    IndependentSession,
    LocalProgress,
    Outcome,
    PeerFault,
    PeerId,
    Trainer,
)
from protocols.sync.snapshot import Snapshot
from protocols.vectors.views import norm

OfferCallback = Callable[[LocalProgress], LocalProgress]  # Returns the work as it is offered to other peers
NOWHERE = "its own step led to parameters that are not finite: it is left out"
NO_MEAN = "the mean is not finite: it keeps its own state"


class MixingStrategy(ABC):
    """Exchanges one peer's state in each round: `share`, `reclaim`, `mix`, and `begin` again."""

    def __init__(self, state: OuterState, trainer: Trainer, me: PeerId) -> None:
        self.held: Mapping[PeerId, Contribution] = {}  # of peers that averaged with the shared state in this round
        self.undone = 0  # exchanges of this round that this peer reverted, and its partners did not
        self._state, self._trainer, self._compute, self._me = state, trainer, state.compute, me
        self._origin = state.anchor.clone()  # the parameters that the trainer starts from
        self._delta = torch.empty_like(state.anchor)

    async def begin(self) -> None:
        await self._trainer.write(self._state.anchor)
        await self._compute.run(lambda: self._origin.copy_(self._state.anchor), 8 * len(self._origin))

    async def take(self, snapshot: Snapshot) -> None:
        """Replace the state by that of a snapshot, this peer's or another peer's, between two rounds.

        Raises OSError, with the state unchanged, if the snapshot cannot be read.
        """
        state = self._state
        await self._compute.run(lambda: self._delta.copy_(state.velocity), 8 * len(self._delta))
        try:
            await state.take(snapshot)
        except OSError:  # the state is incomplete
            state.anchor.copy_(self._origin)
            state.velocity.copy_(self._delta)
            raise
        await self.begin()

    @abstractmethod
    def share(self, session: IndependentSession) -> None:
        """Let other peers average with this peer while it trains."""

    async def reclaim(self, session: IndependentSession) -> None:
        """Stop sharing. The state includes the exchanges that took place meanwhile."""
        self.undone, self.held = 0, await session.reclaim()

    @abstractmethod
    async def mix(
        self, session: IndependentSession, work: LocalProgress, offer: OfferCallback, trained: int
    ) -> tuple[AveragingResult, LocalProgress]:
        """Take the outer step, and average with the partners; `trained` is the number of rounds before this one.

        Also returns the work that counts: none if the step was not finite.
        """

    async def close(self, session: ClosingSession, here: Collection[PeerId]) -> AveragingResult:
        """Average whole states, parameters and momentum, with the peers that have reached the end of the run."""
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
        delta = self._delta
        await self._trainer.read(delta)
        await self._compute.run(lambda: pseudo_gradient(self._origin, delta, delta), 4 * len(delta))

    def _revert(self) -> None:
        """Return to the state at the start of the training, and revert the exchanges since."""
        self._state.anchor.copy_(self._origin)
        self._state.velocity.zero_()
        self._undo(self.held)
        self.held = {}

    def _undo(self, held: Mapping[PeerId, Contribution]) -> None:
        self.undone += sum(len(each.messages) for each in held.values())

    def _give_up(self, mean: AveragingResult, why: str) -> AveragingResult:
        self._undo(mean.contributions)
        blamed = (*mean.blamed, PeerFault(self._me, why))
        return replace(mean, outcome=Outcome.SKIPPED, contributions={}, weights={}, blamed=blamed)


class StateMixing(MixingStrategy):
    def share(self, session: IndependentSession) -> None:
        session.share([self._state.anchor, self._state.velocity])

    async def mix(
        self, session: IndependentSession, work: LocalProgress, offer: OfferCallback, trained: int
    ) -> tuple[AveragingResult, LocalProgress]:
        stepped = not diverged(work) and await self._step(work, trained)
        work = offer(work if stepped else nothing_of(work))
        mean = await session.average([self._state.anchor, self._state.velocity], work, [self._origin, self._delta])
        mean = await self._adopt(mean)
        return (mean if stepped else replace(mean, blamed=(*mean.blamed, PeerFault(self._me, NOWHERE)))), work

    async def _step(self, work: LocalProgress, trained: int) -> bool:
        """Returns whether the result is finite."""
        if not work.tokens:
            return True
        await self._read()
        if await self._state.advance(self._delta, trained):
            return True
        self._revert()
        return False


class PullMixing(MixingStrategy):
    """Exchanges contributions to NoLoCo's step. Each peer's own momentum pulls the parameters together.

    The mean of the contributions stays shared during the training of the next round. Exchanges in that time correct the
    step afterwards.
    """

    def __init__(self, state: OuterState, trainer: Trainer, me: PeerId, rule: NoLoCo) -> None:
        super().__init__(state, trainer, me)
        self._rule = rule
        self._shared = torch.empty_like(state.anchor)  # the mean of the last step, as changed by exchanges since
        self._stepped = False  # whether there was a step; `_delta` then holds its original mean

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
        self, session: IndependentSession, work: LocalProgress, offer: OfferCallback, trained: int
    ) -> tuple[AveragingResult, LocalProgress]:
        whole = not diverged(work) and await self._contribute(work)
        if not whole:
            work = nothing_of(work)
            await self._contribute(work)
        work = offer(work)
        mean = await self._average(session, work)
        if not await self._step(trained):
            self._revert()
            return self._give_up(mean, NOWHERE), work
        return (mean if whole else replace(mean, blamed=(*mean.blamed, PeerFault(self._me, NOWHERE)))), work

    async def _contribute(self, work: LocalProgress) -> bool:
        """Compute the contribution into `_delta`; Δ is zero without work. Returns whether it is finite."""
        if work.tokens:
            await self._read()
        else:
            self._delta.zero_()

        def make() -> bool:
            self._rule.offer(self._state.anchor, self._delta, self._delta)
            return math.isfinite(norm([self._delta]))

        return await self._compute.run(make, 12 * len(self._delta))

    async def _average(self, session: IndependentSession, work: LocalProgress) -> AveragingResult:
        """Average the contributions into `_shared`, which without partners gets this peer's own contribution."""
        mean = await session.average([self._delta], work, [self._shared])
        if mean.outcome is not Outcome.COMMITTED:
            mean = replace(mean, outcome=Outcome.SKIPPED)
        elif not await self._compute.run(lambda: math.isfinite(norm([self._shared])), 4 * len(self._shared)):
            mean = self._give_up(mean, NO_MEAN)
        if mean.outcome is Outcome.SKIPPED:
            await self._compute.run(lambda: self._shared.copy_(self._delta), 8 * len(self._shared))
        return mean

    async def _step(self, trained: int) -> bool:
        """Returns whether the result is finite."""
        if not await self._state.advance(self._shared, trained):
            return False
        await self._compute.run(lambda: self._delta.copy_(self._shared), 8 * len(self._shared))
        self._stepped = True
        return True


def nothing_of(work: LocalProgress) -> LocalProgress:
    return replace(work, tokens=0, norm=0.0)
