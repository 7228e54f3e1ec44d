"""One outer round of one peer: train, average, step, report."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from node.outer import OuterSGD, pseudo_gradient
from protocols.base import Averager, Compute, Head, Mean, Member, Outcome, Trainer, Vector, Work
from protocols.chain import Chain, state_root
from protocols.vectors import root
from protocols.wire import MAX_NORM

FIRST_ROUND_LIMIT_SECONDS = 3600.0
ROUND_LIMIT_MULTIPLE = 10.0
ROUND_LIMIT_FLOOR_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class RoundReport:
    """What became of one round at one peer. Ids and hashes are hex but for peer ids; times are seconds."""

    run: str
    peer: str
    incarnation: int
    round: int
    parent: str
    lineage: str
    anchor_lineage: str
    outcome: str
    peers: tuple[str, ...]
    contributions: dict[str, tuple[str, int, int]]
    blamed: dict[str, str]
    finite: bool
    weight: float
    tokens: int
    loss: float
    params_hash: str
    seconds_train: float
    seconds_wait: float
    seconds_average: float
    bytes_sent: int
    bytes_received: int
    time: float


class Replica:
    """The outer state of one peer, and its rounds.

    Attributes:
        anchor: outer parameters θ, float32 (n).
        velocity: outer momentum m, float32 (n).
    """

    def __init__(
        self, chain: Chain, trainer: Trainer, averager: Averager, outer: OuterSGD, compute: Compute, anchor: Vector
    ) -> None:
        self.chain, self.trainer, self.averager, self.outer = chain, trainer, averager, outer
        self.anchor, self.velocity = anchor, torch.zeros_like(anchor)
        self._compute = compute
        self._delta, self._mean = torch.empty_like(anchor), torch.empty_like(anchor)
        self._limit_seconds = FIRST_ROUND_LIMIT_SECONDS
        self._params_hash = b""

    async def settle(self) -> None:
        """Compute the state root of the outer state as it stands."""
        cost_bytes = 4 * len(self.anchor)
        self._params_hash = await self._compute.run(lambda: root([self.anchor]), cost_bytes)
        velocity = await self._compute.run(lambda: root([self.velocity]), cost_bytes)
        self.chain.settle(state_root(self._params_hash, velocity, self.chain.head.key.round))

    async def run_round(self, me: Member, wall: Callable[[], float]) -> RoundReport:
        """Train, average and step once.

        Raises:
            ValueError: this peer is not in the roster of the head: it has been left out, and must join again.
        """
        head, watch = self.chain.head, _Watch()
        deadline = watch.began + self._limit_seconds
        async with self.averager.enter(head, deadline) as session:

            def offer(work: Work) -> None:
                session.ready(_offered(work, head))

            work = await self.trainer.train(head.key, session.cut, offer)
            watch.lap("train")
            await self._outgoing(work)
            work = _offered(work, head)
            mean = await session.mean([self._delta], work, [self._mean])
            watch.lap("average")
        finite = await self._apply(mean, work)
        if mean.outcome is Outcome.COMMITTED:  # a round that ran into its limit must not raise it
            self._limit_seconds = max(ROUND_LIMIT_FLOOR_SECONDS, ROUND_LIMIT_MULTIPLE * watch.total())
        return self._report(me, head, mean, work, finite, watch.seconds, wall())

    async def _outgoing(self, work: Work) -> None:
        if _diverged(work):  # start again from the anchor, bring nothing
            await self.trainer.write(self.anchor)
        await self.trainer.read(self._delta)
        cost_bytes = 4 * len(self.anchor)
        await self._compute.run(lambda: pseudo_gradient(self.anchor, self._delta, self._delta), cost_bytes)

    async def _apply(self, mean: Mean, work: Work) -> bool:
        """Move to a decided round's state.

        Work that the mean does not hold is dropped: it is a step in the direction that the others' mean took already,
        and kept, it is taken twice. Only who had nothing to offer when the round was called, being in the middle of its
        first step, keeps that step.
        """
        if mean.outcome is not Outcome.COMMITTED:
            return True
        self.chain.extend(mean.record)
        cost_bytes = 12 * len(self.anchor)
        finite = await self._compute.run(lambda: self.outer.step(self.anchor, self.velocity, self._mean), cost_bytes)
        await self.settle()
        if mean.weights.get(self.averager.me.peer) == 0 and work.tokens > 0:
            local = self._mean  # free now: the local parameters to go on from
            await self._compute.run(lambda: torch.sub(self.anchor, self._delta, out=local), cost_bytes)
            await self.trainer.write(local, anchor=self.anchor, tokens=work.tokens)
        else:
            await self.trainer.write(self.anchor)
        return finite

    def _report(
        self, me: Member, head: Head, mean: Mean, work: Work, finite: bool, seconds: dict[str, float], time: float
    ) -> RoundReport:
        decided = mean.outcome is Outcome.COMMITTED
        anchor = head.key.lineage.hex()
        return RoundReport(
            run=head.key.run.hex(),
            peer=me.peer,
            incarnation=me.incarnation,
            round=head.key.round,
            parent=anchor,
            lineage=self.chain.head.key.lineage.hex() if decided else anchor,
            anchor_lineage=anchor,
            outcome="alone" if decided and head.roster == (me,) else str(mean.outcome),
            peers=mean.peers,
            contributions={p: (anchor, c.chunks_counted, c.chunks) for p, c in mean.contributions.items()},
            blamed={blame.peer: blame.why for blame in mean.blamed},
            finite=finite,
            weight=mean.weights.get(me.peer, 0.0),
            tokens=work.tokens,
            loss=work.loss,
            params_hash=self._params_hash.hex(),
            seconds_train=work.seconds,
            seconds_wait=max(0.0, seconds["train"] - work.seconds),
            seconds_average=seconds["average"],
            bytes_sent=mean.bytes_sent,
            bytes_received=mean.bytes_received,
            time=time,
        )


def _diverged(work: Work) -> bool:
    """Not finite, or more than an offer can say: a plan that held such an offer would be refused by everybody."""
    return not work.norm <= MAX_NORM


def _offered(work: Work, head: Head) -> Work:
    """Work as the others hear of it: bound to our state, and nothing if it diverged."""
    if _diverged(work):
        work = replace(work, tokens=0, norm=0.0)
    return replace(work, state_root=head.state_root)


class _Watch:
    """Laps of a round by the running loop's time."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.began = self._mark = self._loop.time()
        self.seconds: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now = self._loop.time()
        self.seconds[name], self._mark = now - self._mark, now

    def total(self) -> float:
        return self._loop.time() - self.began
