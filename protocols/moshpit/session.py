"""One round of Moshpit at one peer: take a cell, train until the round is called, then average along each axis."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from functools import partial

from protocols import wire
from protocols.aio import Notifier, loop_time
from protocols.base import AveragingResult, Deadline, Head, LocalProgress, Member, PeerId, Vector
from protocols.moshpit.grid import next_cell, seeded_order
from protocols.moshpit.group_allreduce import GroupAllReduce, GroupResult, counted
from protocols.moshpit.matchmaker import GroupContribution, GroupMatchmaker
from protocols.moshpit.peer_tracker import DONE, TRAINING, UNHEARD_SECONDS, WAITING, PositionAnnouncement
from protocols.moshpit.state import MoshpitState
from protocols.streams.endpoint import SessionBase
from protocols.vectors.views import VectorView, norm

SETTLE_SECONDS = 0.25
"""The pause between two announcements of a new cell, so that a hundred joiners do not cause a hundred of them."""
HASTE = 0.5  # the waiting time for one peer in a group is limited to about this share of this peer's training time


class MoshpitSession(SessionBase):
    def __init__(self, moshpit: MoshpitState, head: Head, deadline: Deadline) -> None:
        super().__init__(head, deadline, moshpit.accounting)
        self._moshpit, self._tracker = moshpit, moshpit.tracker
        self._began = loop_time()
        self._cut_at = self._complete_at = math.inf
        self._work = LocalProgress(0, math.nan, 0.0, 0.0)
        self._notifier = Notifier()
        self._sent_numbers: dict[Member, int] = {}
        self._matchmaker: GroupMatchmaker | None = None
        self._data_phase: GroupAllReduce | None = None
        self._axis, self._stage, self._follows = 0, TRAINING, ""
        self._offer: tuple[wire.Offer, ...] = ()
        self._members: set[PeerId] = set()
        self._changes, self._rests = 0, False
        moshpit.begin(self.round)
        self._grid, self._index = moshpit.assign_cell(head.key, self.round)
        moshpit.last_number += 1
        self._mine = self._announcement()
        moshpit.set_next_group(self._mine.next_group_key.lineage)
        self._late = asyncio.get_running_loop().call_at(deadline, self._end)

    # -- the contract -------------------------------------------------------------------------------------------------

    def offer(self, work: LocalProgress) -> None:
        if work.resting and not self.cut.is_set():
            self._rests = True  # no group waits for it, and its work completes none: the others count without it
            return self._end()
        self._work = work
        if work.complete and self._complete_at == math.inf:
            self._complete_at = loop_time()
        self._announce()
        self._wake()

    def waiting_for(self) -> tuple[PeerId, ...]:
        """First the peers that still train, then those that may still come to the group, then the missing reducers."""
        if self._data_phase:
            return self._data_phase.missing()
        if self._matchmaker:
            return tuple(latest.sender.peer for latest in self._matchmaker.missing())
        present = self._tracker.present(self.round, loop_time())
        ready = {
            each.sender.peer for each in self._tracker.announcements() if each.complete and each.round >= self.round
        }
        return tuple(peer for peer in present if peer not in ready and peer != self._moshpit.me.peer)

    async def average(self, mine: Sequence[Vector], work: LocalProgress, into: Sequence[Vector]) -> AveragingResult:
        if [len(vector) for vector in mine] != [len(vector) for vector in into]:
            raise ValueError(f"{[len(vector) for vector in mine]} elements into {[len(vector) for vector in into]}")
        await self.cut.wait()
        if self._rests:
            return self._result(False, {}, {})
        self._work = work
        results = await self._average_axes(mine, into)
        self.round = max(
            self.round, self._tracker.ahead(self.round) - 1
        )  # continue in the round that others have reached
        weights = {peer: weight for result in reversed(results) for peer, weight in result.weights.items()}
        return self._result(bool(results), counted(results), weights)

    # -- the groups ---------------------------------------------------------------------------------------------------

    async def _average_axes(self, mine: Sequence[Vector], into: Sequence[Vector]) -> list[GroupResult]:
        """Average with one group along each axis. The result is in `into`, unless all groups failed."""
        compute = self._moshpit.host.compute
        state, free, spare = mine, into, self._moshpit.spare_buffers(into)
        weight, began = float(self._work.tokens), min(self._cut_at, loop_time())
        results: list[GroupResult] = []
        cost_bytes = 4 * sum(len(vector) for vector in mine)
        for axis in range(len(self._mine.shape)):
            size = await compute.run(partial(norm, state), cost_bytes)
            if loop_time() >= self.deadline or not size < wire.MAX_NORM:
                break
            contribution = GroupContribution(cost_bytes // 4, weight, size, self._moshpit.claim.renewed())
            came = loop_time()
            result = await self._average_axis(axis, contribution, VectorView(state), VectorView(free), came - began)
            began = came
            if result:
                results.append(result)
                weight = result.weight
                state, free = free, spare if free is into else into
        self._axis, self._stage = len(self._mine.shape) - 1, DONE
        self._announce()  # even after an early end, so that no peer waits for us
        if results and state is not into:
            await compute.run(lambda: [a.copy_(b) for a, b in zip(into, state, strict=True)], 2 * cost_bytes)
        return results

    async def _average_axis(
        self, axis: int, contribution: GroupContribution, source: VectorView, target: VectorView, spent_seconds: float
    ) -> GroupResult | None:
        """Average with the group along one axis. Returns None if there is none, or it fails at this peer."""
        moshpit = self._moshpit
        self._axis = axis
        moshpit.keep_group(self._mine.key(axis).lineage)
        self._matchmaker = matchmaker = GroupMatchmaker(
            moshpit, self._mine, axis, contribution, self._wait, self.deadline
        )
        expected = 0 if moshpit.sees_all else self._mine.shape[axis]
        resolved = await matchmaker.wait_for_plan(spent_seconds, HASTE * (self._cut_at - self._began), expected)
        if resolved:
            for peer in resolved.peers:  # the caller may know members that this peer does not
                moshpit.meet(peer, matchmaker.key.lineage)
            self._update_sight()
            self._data_phase = GroupAllReduce(moshpit, matchmaker.key, resolved, source, target, self.deadline)
            moshpit.keep(self._data_phase)
        moshpit.close(matchmaker.key.lineage)
        self._leave_axis(seeded_order(matchmaker.key.lineage, resolved.peers) if resolved else [moshpit.me.peer])
        result = await self._data_phase.run() if self._data_phase else None
        if self._data_phase:
            await self._account(self._data_phase, result, source, target)
        self._data_phase = None
        return result

    async def _account(
        self, data_phase: GroupAllReduce, result: GroupResult | None, source: VectorView, target: VectorView
    ) -> None:
        """Record the outcome of a group: the next bandwidth claim, the group's name, or a half exchange."""
        if data_phase.in_time is not None:
            self._moshpit.claim.observe(data_phase.in_time)
        if result:
            self.group = data_phase.name
        if result is None or result.incomplete:  # other members may hold more of the mean than this peer, or less
            self.half_exchanges += 1
            moved_by = partial(data_phase.moved, source, target)
            self.mass_drift += await self._moshpit.host.compute.run(moved_by, 8 * source.size)

    def _wait(self, caller: PeerId, offer: wire.Offer) -> None:
        self._stage, self._follows, self._offer = WAITING, caller, (offer,)
        self._announce()

    def _leave_axis(self, members: Sequence[PeerId]) -> None:
        """Announce that this peer is in a group with these members, so no other group along this axis can have it."""
        moshpit, me = self._moshpit, self._moshpit.me.peer
        self._stage, self._follows, self._offer = DONE, "", ()
        if not moshpit.sees_all:
            self._index = moshpit.index = next_cell(self._index, self._axis, members.index(me), self._grid.shape)
        self._announce()

    # -- in the background --------------------------------------------------------------------------------------------

    async def live(self) -> None:
        """Take a cell, announce it, and set `cut` when the training should stop."""
        while not self.cut.is_set():
            self._update_sight()
            self.round = self._tracker.ahead(self.round)
            self._grid, self._index = self._moshpit.assign_cell(self.head.key, self.round)
            self._announce()
            changes = self._changes
            if await self._due_before(loop_time() + SETTLE_SECONDS):
                break
            if await self._due_before(loop_time() + UNHEARD_SECONDS, lambda: self._changes != changes):  # noqa: B023
                break
        self._cut_at = loop_time()
        self.cut.set()

    async def _due_before(self, until: Deadline, moved: Callable[[], bool] = lambda: False) -> bool:
        """Wait until the training should stop, which each announcement may change. False at `until`, or if `moved`."""
        while not self.cut.is_set():
            now, changes = loop_time(), self._changes
            due = self._tracker.due(self._mine, self._complete_at, self._began, self._work.tokens > 0, now)
            if due is not None and due <= now:
                return True
            if now >= until or moved():
                return False
            wake_at = until if due is None else min(until, due)
            await self._notifier.reached(lambda: self.cut.is_set() or self._changes != changes, wake_at)  # noqa: B023
        return True

    async def watch(self) -> None:
        """Follow the live members, and send each new one this peer's announcement."""
        members = self._moshpit.host.members
        while loop_time() < self.deadline:
            version = members.version
            self._update_sight()
            self._announce()
            self._wake()
            await members.changed(version, self.deadline)

    def _wake(self) -> None:
        self._changes += 1
        self._notifier.notify()

    def found(self) -> None:
        self._update_sight()
        self._announce()

    def close(self) -> None:
        self._late.cancel()
        self._end()

    def _end(self) -> None:
        self.cut.set()
        self._wake()

    def gone(self, peer: PeerId) -> None:
        self._moshpit.lose(peer)
        self._update_sight()

    # -- messages from other peers ------------------------------------------------------------------------------------

    def heard(self, announcement: PositionAnnouncement) -> None:
        if self._matchmaker:
            self._matchmaker.heard(announcement)
        self._announce()
        self._wake()

    def on_plan(self, peer: PeerId, plan: wire.Plan) -> None:
        """Take a call. It has no effect unless it is for the group that this peer waits for."""
        if self._matchmaker and plan.key == self._matchmaker.key:
            self._matchmaker.on_plan(peer, plan)

    def _update_sight(self) -> None:
        """Update the peers in sight. A peer that is no longer in sight is lost for the current group."""
        self._moshpit.update_sight()
        now = set(self._tracker.sight)
        for peer in sorted(self._members - now):
            if self._data_phase:
                self._data_phase.lose(peer)
        if self._members != now and self._matchmaker:
            self._matchmaker.wake()
        self._members = now

    # -- this peer's announcement -------------------------------------------------------------------------------------

    def _announcement(self) -> PositionAnnouncement:
        key, work, axes = self.head.key, self._work, len(self._grid.shape)
        return PositionAnnouncement(
            run=key.run,
            scope=key.scope,
            round=self.round,
            sender=self._moshpit.me,
            number=self._moshpit.last_number,
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

    def _announce(self) -> None:
        """Send this peer's announcement to each peer in sight that does not have the latest one."""
        if self._announcement() != self._mine:
            self._moshpit.last_number += 1
            self._mine = self._announcement()
            self._moshpit.set_next_group(self._mine.next_group_key.lineage)
        for peer in self._moshpit.in_sight():
            member = self._tracker.sight.get(peer)
            if member and self._sent_numbers.get(member) != self._mine.number:
                self._sent_numbers[member] = self._mine.number
                self._moshpit.post.send(peer, self._mine)
