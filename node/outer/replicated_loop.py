"""One outer round of one peer: train, average, step, report; and catching up with what was decided without it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from node.outer.catch_up import CatchUp, CatchUpResult
from node.outer.outer_loop import OuterLoop, diverged
from node.outer.sgd import OuterSGD, pseudo_gradient
from node.reporting.report import LapTimer, RoundReport
from node.storage.checkpoint_manager import CheckpointManager
from node.storage.error_feedback import ErrorFeedback
from protocols.base import (
    Averager,
    AveragingResult,
    Compute,
    Deadline,
    Head,
    LocalProgress,
    Member,
    Outcome,
    PeerFault,
    Trainer,
    Vector,
)
from protocols.consensus import record as records
from protocols.consensus.record import Kind
from protocols.history.chain import UNSETTLED, Chain, certificate_in
from protocols.history.fork_choice import Branch
from protocols.sync.chain_sync import ChainSync
from protocols.sync.snapshot import Snapshots

__all__ = ["ReplicatedOuterLoop", "RoundReport"]

KEEP_COUNTED = 4096
"""Of so many rounds a peer knows what of its work was counted in them: what a switch of branch would cost."""
PROOF_SHARE = 1 / 3
"""Of the time to catch up: contacts that show heads and prove nothing may not take what fetching the state needs."""


@dataclass(frozen=True, slots=True)
class _Round:
    """What a round came to here: the mean, if it was applied or nothing had to be, and this peer's work."""

    head: Head
    mean: AveragingResult
    work: LocalProgress
    kind: int | None = None
    finite: bool = True


class ReplicatedOuterLoop(OuterLoop):
    """The outer state of one peer, which all members share, and its rounds."""

    def __init__(
        self,
        chain: Chain,
        trainer: Trainer,
        averager: Averager,
        outer: OuterSGD,
        compute: Compute,
        anchor: Vector,
        snapshots: Snapshots | None = None,
        checkpoints: CheckpointManager | None = None,
        feedback: ErrorFeedback | None = None,
    ) -> None:
        """
        Args:
            anchor: outer parameters that the run starts from, float32 (n); from now on they are ours. A newcomer, who
                has to fetch them, may bring any.
            snapshots: where to keep some, for this peer and for others; None keeps none.
            checkpoints: makes checkpoints of them; they are its snapshots then.
            feedback: of a codec that needs it.
        """
        super().__init__(trainer, outer, compute, anchor, snapshots, checkpoints)
        self.chain, self.averager, self.feedback = chain, averager, feedback
        self._delta, self._mean = torch.empty_like(anchor), torch.empty_like(anchor)
        self._counted: dict[bytes, int] = {}  # lineage -> tokens of ours in the round that led to it

    def recall(self, counted: Mapping[bytes, int]) -> None:
        """Tokens of this peer's work that former lives had counted, by lineage: what a switch of branch would cost."""
        self._counted.update(list(counted.items())[-KEEP_COUNTED:])

    async def settle(self) -> None:
        """Compute the state root of the outer state as it stands."""
        await self.state.hash()
        await self._settled()

    async def _settled(self) -> None:
        """The state is hashed: vouch for it at the head, and keep a snapshot where one is due."""
        key = self.chain.head.key
        self.chain.settle(self.state.root(key.round))
        if self._snapshots and key.round % self._snapshots.every_rounds == 0:
            await self._keep_head(self._snapshots)

    async def _keep_head(self, snapshots: Snapshots) -> None:
        """Keep the state as it stands, if it is the head's."""
        if not self._lacks_state():
            await self._keep(snapshots, self.chain.head.key)

    async def keep(self) -> None:
        """Make a checkpoint of where this peer stands, between two rounds, if it makes any."""
        if self._checkpoints:
            await self._keep_head(self._checkpoints.snapshots)

    def took_part(self, report: RoundReport) -> bool:
        """Whether that was a round of this peer's: not one that it only watched, or that was skipped."""
        return report.peer in report.peers

    def _lacks_state(self) -> bool:
        """Whether the head's state is known not to be the one that we hold: a newcomer's, before it has caught up."""
        head = self.chain.at(self.chain.head.key.lineage)
        return head is not None and head.state_root not in (UNSETTLED, self.chain.head.state_root)

    # -- a round ------------------------------------------------------------------------------------------------------

    async def run_round(self, me: Member, wall: Callable[[], float]) -> RoundReport:
        """Train, average and step once. One that is not in the head's roster looks on and asks to be admitted."""
        head, watch = self.chain.head, LapTimer()
        deadline = watch.began + self._limit_seconds
        async with self.averager.enter(head, deadline) as session:
            surplus = len(head.roster) > 1  # alone, there is nobody to be waited for: as many steps each time
            due = replace(head.key, round=self.chain.trained)
            work, offers = await self._train(session, due, head.state_root, surplus)
            watch.lap("train")
            self._show("averaging", work)
            await self._outgoing(work)
            sent = await self.feedback.outgoing(self._delta) if self.feedback else self._delta
            work = self._offered(work, head.state_root)
            mean = await session.average([sent], work, [self._mean])
            self._offer_again = lambda: None
            watch.lap("average")
        done = await self._apply(head, mean, work, offers[:2] == [0, work.tokens])
        if mean.outcome is Outcome.COMMITTED:  # a round that ran into its limit must not raise it
            self._took(watch)
        return self._told(me, done, watch.seconds, wall())

    def _offered(self, work: LocalProgress, state_root: bytes) -> LocalProgress:
        offered = super()._offered(work, state_root)
        return self.feedback.offered(offered) if self.feedback else offered

    async def _outgoing(self, work: LocalProgress) -> None:
        if diverged(work):  # start again from the anchor, bring nothing
            await self.trainer.write(self.anchor)
        await self.trainer.read(self._delta)
        cost_bytes = 4 * len(self.anchor)
        await self._compute.run(lambda: pseudo_gradient(self.anchor, self._delta, self._delta), cost_bytes)

    async def _apply(self, head: Head, mean: AveragingResult, work: LocalProgress, one_step: bool) -> _Round:
        """Move to what was decided: the chain, and the state if the round has a mean; else training just goes on."""
        data = mean.certificate
        if mean.outcome not in (Outcome.COMMITTED, Outcome.SKIPPED) or not data:
            return _Round(head, mean, work)
        record = records.decode(certificate_in(head, data).record)
        if record.state_root != head.state_root:  # what was decided starts from a state that is not ours
            blame = PeerFault(self.averager.me.peer, "its state is not the one that the others hold")
            mean = AveragingResult(
                Outcome.SUPERSEDED,
                blamed=(*mean.blamed, blame),
                bytes_sent=mean.bytes_sent,
                bytes_received=mean.bytes_received,
            )
            return _Round(head, mean, work)
        self.chain.extend(data)
        finite = True
        if mean.outcome is Outcome.COMMITTED:
            finite = await self.state.step(self._mean)
            if self.feedback:
                await self.feedback.conclude(self.averager.me.peer, mean, self._delta)
            await self._start_again(mean, work, one_step)
        await self._settled()
        return _Round(head, mean, work, record.kind, finite)

    async def _start_again(self, mean: AveragingResult, work: LocalProgress, one_step: bool) -> None:
        """Put the trainer at the new anchor.

        Work that the mean does not hold is dropped: it is a step in the direction that the others' mean took already,
        and kept, it is taken twice. Only who had nothing to offer when the round was called, being in the middle of its
        first step, keeps that step: it stands in the plan with no weight, or not at all.
        """
        me = self.averager.me.peer
        weight = mean.weights.get(me)
        late = weight == 0 or (weight is None and one_step and me not in mean.peers)
        if late and work.tokens > 0:
            local = self._mean  # free now: the local parameters to go on from
            await self._compute.run(lambda: torch.sub(self.anchor, self._delta, out=local), 12 * len(self.anchor))
            await self.trainer.write(local, anchor=self.anchor, tokens=work.tokens)
        else:
            await self.trainer.write(self.anchor)
        if me in mean.peers:
            self._counted[self.chain.head.key.lineage] = work.tokens
            if len(self._counted) > KEEP_COUNTED:
                del self._counted[next(iter(self._counted))]

    def _told(self, me: Member, done: _Round, seconds: dict[str, float], time: float) -> RoundReport:
        head, mean = done.head, done.mean
        lineage = self.chain.head.key.lineage
        report = self._report(me, head.key, lineage, head.anchor, mean, done.work, seconds, time)
        if done.kind == Kind.FORK:
            report = replace(report, outcome="fork")
        elif mean.outcome is Outcome.COMMITTED and head.roster == (me,):
            report = replace(report, outcome="alone")
        return replace(report, finite=done.finite)

    # -- catching up --------------------------------------------------------------------------------------------------

    async def catch_up(self, sync: ChainSync, wall: Callable[[], float], deadline: Deadline) -> RoundReport:
        """Go over to the best branch that others can prove, and fetch its state; a newcomer fetches that of its head.

        What was trained since the anchor is dropped. Never raises for what other peers do: `undecided`, nothing has
        changed, and it is worth another try. The branch may have grown meanwhile: the next round tells.
        """
        head, watch = self.chain.head, LapTimer()
        seconds = deadline - watch.began
        branch = await sync.better(watch.began + PROOF_SHARE * seconds)
        deadline = max(deadline, watch.began + watch.total() + (1 - PROOF_SHARE) * seconds)  # a long way takes longer
        chain = self.chain.copy()
        if branch:
            chain.switch(branch.ancestor.key.lineage, branch.links)
        reached = None
        if branch or self._lacks_state():
            held = self._snapshots.held() if self._snapshots else ()
            reached = await CatchUp(sync.fetcher, chain, self.state, head.key.lineage, held, self._mean, deadline).run()
        lost_rounds, lost_tokens = await self._adopt(branch, reached) if reached else (0, 0)
        blamed, sent, received = sync.accounting.take()
        downloaded, parts = sync.take_bytes()
        outcome = Outcome.SUPERSEDED if reached else Outcome.UNDECIDED
        mean = AveragingResult(outcome, blamed=blamed, bytes_sent=sent, bytes_received=received + parts)
        done = _Round(head, mean, LocalProgress(0, math.nan, 0.0, 0.0), finite=reached.finite if reached else True)
        report = self._told(self.averager.me, done, {"train": 0.0, "average": watch.total()}, wall())
        return replace(
            report,
            lost_rounds=lost_rounds,
            lost_tokens=lost_tokens,
            replayed_rounds=reached.replayed_rounds if reached else 0,
            bytes_downloaded=downloaded,
        )

    async def _adopt(self, branch: Branch | None, reached: CatchUpResult) -> tuple[int, int]:
        """Make it ours; returns rounds and tokens that this costs."""
        await self.state.take(reached.state)
        if self.feedback:
            self.feedback.forget()
        lost = self.chain.switch(branch.ancestor.key.lineage, branch.links) if branch else ()
        if self._snapshots:
            self._snapshots.prune(self.chain)
            if reached.snapshot and self._checkpoints:
                self._checkpoints.take(reached.snapshot)
            elif reached.snapshot:
                self._snapshots.put(reached.snapshot)
        await self._settled()
        await self.trainer.write(self.anchor)
        return len(lost), sum(self._counted.pop(link.lineage, 0) for link in lost)
