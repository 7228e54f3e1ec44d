"""One round of Moshpit at one peer: take a cell, train until the round is called, then average along each axis."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from functools import partial

from protocols import wire
from protocols.aio import Notifier, loop_time
from protocols.allreduce.all_reduce import next_claim
from protocols.base import AveragingResult, Deadline, Head, LocalProgress, Member, PeerId, Vector
from protocols.independent_session import SessionBase
from protocols.moshpit.grid import next_cell, seeded_order
from protocols.moshpit.group_allreduce import GroupAllReduce, GroupResult, counted
from protocols.moshpit.matchmaker import GroupContribution, GroupMatchmaker
from protocols.moshpit.peer_tracker import DONE, TRAINING, UNHEARD_SECONDS, WAITING, PositionAnnouncement
from protocols.moshpit.state import MoshpitState
from protocols.vectors import VectorView, norm

SETTLE_SECONDS = 0.25
"""The pause between two announcements of a new cell, so that a hundred joiners do not cause a hundred of them."""
HASTE = 0.5
"""The waiting time for one peer in a group is limited to about this share of this peer's training time."""


class MoshpitSession(SessionBase):
    """`protocols.base.IndependentSession` for Moshpit."""

    def __init__(self, moshpit: MoshpitState, head: Head, deadline: Deadline) -> None:
        super().__init__(head, deadline, moshpit.context.accounting)
        self._moshpit, self._context, self._tracker = moshpit, moshpit.context, moshpit.context.tracker
        self._began = loop_time()
        self._cut_at = self._complete_at = math.inf
        self._work = LocalProgress(0, math.nan, 0.0, 0.0)
        self._news = Notifier()
        self._told: dict[Member, int] = {}
        self._matchmaker: GroupMatchmaker | None = None
        self._mixing: GroupAllReduce | None = None
        self._axis, self._stage, self._follows = 0, TRAINING, ""
        self._offer: tuple[wire.Offer, ...] = ()
        self._members: set[PeerId] = set()
        self._stirred = 0
        moshpit.begin(self.round)
        self._grid, self._index = moshpit.assign_cell(head.key, self.round)
        moshpit.numbered += 1
        self._mine = self._word()
        moshpit.set_next_group(self._mine.coming.lineage)
        self._late = asyncio.get_running_loop().call_at(deadline, self._end)

    # -- the contract -------------------------------------------------------------------------------------------------

    def offer(self, work: LocalProgress) -> None:
        self._work = work
        if work.complete and self._complete_at == math.inf:
            self._complete_at = loop_time()
        self._say()
        self._stir()

    def waiting_for(self) -> tuple[PeerId, ...]:
        """First the peers that still train, then those that may still come to the group, then the missing reducers."""
        if self._mixing:
            return self._mixing.missing()
        if self._matchmaker:
            return tuple(latest.sender.peer for latest in self._matchmaker.missing())
        present = self._tracker.present(self.round, loop_time())
        ready = {each.sender.peer for each in self._tracker.words() if each.complete and each.round >= self.round}
        return tuple(peer for peer in present if peer not in ready and peer != self._context.me.peer)

    async def average(self, mine: Sequence[Vector], work: LocalProgress, into: Sequence[Vector]) -> AveragingResult:
        if [len(vector) for vector in mine] != [len(vector) for vector in into]:
            raise ValueError(f"{[len(vector) for vector in mine]} elements into {[len(vector) for vector in into]}")
        await self.cut.wait()
        self._work = work
        results = await self._along_all(mine, into)
        self.round = max(self.round, self._tracker.ahead(self.round) - 1)  # go on in the round that others have reached
        weights = {peer: weight for result in reversed(results) for peer, weight in result.weights.items()}
        return self._result(bool(results), counted(results), weights)

    # -- the groups ---------------------------------------------------------------------------------------------------

    async def _along_all(self, mine: Sequence[Vector], into: Sequence[Vector]) -> list[GroupResult]:
        """Average with one group along each axis. The result is in `into`, unless all groups failed."""
        compute = self._context.host.compute
        state, free, spare = mine, into, self._moshpit.spare_buffers(into)
        weight, began = float(self._work.tokens), min(self._cut_at, loop_time())
        results: list[GroupResult] = []
        cost_bytes = 4 * sum(len(vector) for vector in mine)
        for axis in range(len(self._mine.shape)):
            size = await compute.run(partial(norm, state), cost_bytes)
            if loop_time() >= self.deadline or not size < wire.MAX_NORM:
                break
            contribution = GroupContribution(cost_bytes // 4, weight, size, self._moshpit.bandwidth)
            came = loop_time()
            result = await self._along(axis, contribution, VectorView(state), VectorView(free), came - began)
            began = came
            if result:
                results.append(result)
                weight = result.weight
                state, free = free, spare if free is into else into
        self._axis, self._stage = len(self._mine.shape) - 1, DONE
        self._say()  # even after an early end, so that no peer waits for us
        if results and state is not into:
            await compute.run(lambda: [a.copy_(b) for a, b in zip(into, state, strict=True)], 2 * cost_bytes)
        return results

    async def _along(
        self, axis: int, contribution: GroupContribution, source: VectorView, target: VectorView, spent_seconds: float
    ) -> GroupResult | None:
        """Average with the group along one axis. Returns None if there is none, or it fails at this peer."""
        moshpit, context = self._moshpit, self._context
        self._axis = axis
        moshpit.narrow(self._mine.key(axis).lineage)
        self._matchmaker = matchmaker = GroupMatchmaker(
            context, self._mine, axis, contribution, self._wait, self.deadline
        )
        expected = 0 if moshpit.sees_all else self._mine.shape[axis]
        resolved = await matchmaker.terms_of(spent_seconds, HASTE * (self._cut_at - self._began), expected)
        if resolved:
            for peer in resolved.peers:  # the caller may know members that this peer does not
                moshpit.meet(peer, matchmaker.key.lineage)
            self._look()
            self._mixing = GroupAllReduce(context, matchmaker.key, resolved, source, target, self.deadline)
            moshpit.keep(self._mixing)
        moshpit.close(matchmaker.key.lineage)
        self._pass(seeded_order(matchmaker.key.lineage, resolved.peers) if resolved else [context.me.peer])
        result = await self._mixing.run() if self._mixing else None
        if self._mixing:
            await self._account(self._mixing, result, source, target)
        self._mixing = None
        return result

    async def _account(
        self, mixing: GroupAllReduce, result: GroupResult | None, source: VectorView, target: VectorView
    ) -> None:
        """Record the outcome of a group: the next bandwidth claim, the group's name, or a half exchange."""
        if mixing.in_time is not None:
            self._moshpit.bandwidth = next_claim(
                self._moshpit.bandwidth, self._context.settings.bandwidth, mixing.in_time
            )
        if result:
            self.group = mixing.name
        if result is None or result.torn:  # other members may hold more of the mean than this peer, or less
            self.half_exchanges += 1
            moved_by = partial(mixing.moved, source, target)
            self.mass_drift += await self._context.host.compute.run(moved_by, 8 * source.size)

    def _wait(self, caller: PeerId, offer: wire.Offer) -> None:
        """Announce the caller that this peer follows, and its offer."""
        self._stage, self._follows, self._offer = WAITING, caller, (offer,)
        self._say()

    def _pass(self, members: Sequence[PeerId]) -> None:
        """Announce that this peer is in a group with these members, so no other group along this axis can have it."""
        moshpit, me = self._moshpit, self._context.me.peer
        self._stage, self._follows, self._offer = DONE, "", ()
        if not moshpit.sees_all:
            self._index = moshpit.index = next_cell(self._index, self._axis, members.index(me), self._grid.shape)
        self._say()

    # -- in the background --------------------------------------------------------------------------------------------

    async def live(self) -> None:
        """Take a cell, announce it, and set `cut` when the training should stop."""
        while not self.cut.is_set():
            self._look()
            self.round = self._tracker.ahead(self.round)
            self._grid, self._index = self._moshpit.assign_cell(self.head.key, self.round)
            self._say()
            worked = self._work.tokens > 0
            due = self._tracker.due(self._mine, self._complete_at, self._began, worked, loop_time())
            if due is not None and due <= loop_time():
                break
            rest, stirred = loop_time() + SETTLE_SECONDS, self._stirred
            await self._news.reached(self.cut.is_set, min(rest, due or rest))
            rest += UNHEARD_SECONDS
            await self._news.reached(lambda: self.cut.is_set() or self._stirred != stirred, min(rest, due or rest))  # noqa: B023
        self._cut_at = loop_time()
        self.cut.set()

    async def watch(self) -> None:
        """Follow the live members, and send each new one this peer's announcement."""
        members = self._context.host.members
        while loop_time() < self.deadline:
            version = members.version
            self._look()
            self._say()
            self._stir()
            await members.changed(version, self.deadline)

    def _stir(self) -> None:
        self._stirred += 1
        self._news.notify()

    def found(self) -> None:
        """Called after each answer of the directory."""
        self._look()
        self._say()

    def close(self) -> None:
        self._late.cancel()
        self._end()

    def _end(self) -> None:
        self.cut.set()
        self._stir()

    def gone(self, peer: PeerId) -> None:
        """Called when a peer cannot be reached."""
        self._moshpit.lose(peer)
        self._look()

    # -- messages from other peers ------------------------------------------------------------------------------------

    def heard(self, here: PositionAnnouncement) -> None:
        """Take another peer's new announcement."""
        if self._matchmaker:
            self._matchmaker.heard(here)
        self._say()
        self._stir()

    def on_plan(self, peer: PeerId, plan: wire.Plan) -> None:
        """Take a call. It has no effect unless it is for the group that this peer waits for.

        Raises:
            BadPayload: the plan breaks a rule.
        """
        if self._matchmaker and plan.key == self._matchmaker.key:
            self._matchmaker.on_plan(peer, plan)

    def _look(self) -> None:
        """Update the peers in sight. A peer that is no longer in sight is lost for the current group."""
        self._moshpit.look()
        now = set(self._tracker.sight)
        for peer in sorted(self._members - now):
            if self._mixing:
                self._mixing.lose(peer)
        if self._members != now and self._matchmaker:
            self._matchmaker.stir()
        self._members = now

    # -- this peer's announcement -------------------------------------------------------------------------------------

    def _word(self) -> PositionAnnouncement:
        key, work, axes = self.head.key, self._work, len(self._grid.shape)
        return PositionAnnouncement(
            run=key.run,
            scope=key.scope,
            round=self.round,
            sender=self._context.me,
            number=self._moshpit.numbered,
            since=self._grid.since,
            shape=self._grid.shape,
            index=self._index,
            holds=axes if self._moshpit.sees_all else min(axes, self._axis + 1 + (self._stage == DONE)),
            axis=self._axis,
            stage=self._stage,
            complete=work.complete,
            leaving=work.leaving,
            step_seconds=min(work.step_seconds, wire.MAX_SECONDS),
            follows=self._follows,
            offer=self._offer,
        )

    def _say(self) -> None:
        """Send this peer's announcement to each peer in sight that does not have the latest one."""
        if self._word() != self._mine:
            self._moshpit.numbered += 1
            self._mine = self._word()
            self._moshpit.set_next_group(self._mine.coming.lineage)
        for peer in self._moshpit.in_sight():
            member = self._tracker.sight.get(peer)
            if member and self._told.get(member) != self._mine.number:
                self._told[member] = self._mine.number
                self._context.post.send(peer, self._mine)
