"""Matchmaking: how the peers of one Moshpit group find each other and agree on the members.

All peers that wait under one group key sort themselves in an order that the key gives, and name the first one as their
caller. It sends a plan with the members' signed offers as soon as all peers that may still come have come, or it has
waited long enough. A peer that has accepted a plan joins no other group. Two plans for one key make two groups.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median_low

from protocols import wire
from protocols.aio import Notifier, loop_time
from protocols.allreduce import plan as planning
from protocols.base import BadPayload, Deadline, PeerId
from protocols.moshpit.grid import seeded_order
from protocols.moshpit.peer_tracker import WAITING, PositionAnnouncement
from protocols.moshpit.state import MoshpitState

CALLERS = 3  # after this many callers that did not call, a peer continues without a group
GROUP_NORM_SPREAD = 4.0
"""A state is refused if its norm is more than this many times the median. Norms stay similar even where states drift
apart, so a larger one is not a state of this run, and would dominate the mean."""
WEIGHT_SCALE = 1 << 20
"""Weights are sent as integers in this unit, because weights that are means of others need not be whole numbers."""
UNCLIPPED = math.inf  # no clipping: a scaled state would be a different state, so a state counts whole or not at all


@dataclass(frozen=True, slots=True)
class GroupContribution:
    """This peer's contribution to a group: its state's size, L2 norm and weight in the mean, and its upload in bytes/s.

    The weight is this peer's tokens, or what its previous group gave it.
    """

    elements: int
    weight: float
    norm: float
    bandwidth: float


class GroupMatchmaker:
    """One peer's matchmaking for one group, whose plan is `resolved` once it is called."""

    def __init__(
        self,
        moshpit: MoshpitState,
        mine: PositionAnnouncement,
        axis: int,
        contribution: GroupContribution,
        announce: Callable[[PeerId, wire.Offer], None],
        deadline: Deadline,
    ) -> None:
        """The group is that of the line along `axis` of the cell in `mine`, this peer's announcement.

        `announce` announces the caller that this peer follows, and its offer.
        """
        self.key = mine.key(axis)
        self.resolved: planning.ResolvedPlan | None = None
        self.began = loop_time()
        self._moshpit, self._mine, self._axis, self._contribution = moshpit, mine, axis, contribution
        self._announce, self._deadline = announce, deadline
        self._followed: list[PeerId] = []
        self._given_up: list[PeerId] = []
        self._came: set[PeerId] = set()
        self._was_late = False
        self._changes, self._notifier = 0, Notifier()
        self._offer = self._signed()

    def wake(self) -> None:
        """Wake `wait_for_plan`: a peer has come, left, died or announced something, or the group was called."""
        self._changes += 1
        self._notifier.notify()

    def heard(self, announcement: PositionAnnouncement) -> None:
        """Take a peer's announcement. It may have come to this group although the group was called long ago."""
        if announcement.stage == WAITING and announcement.key(announcement.axis) == self.key:
            self._note_arrival(announcement.sender.peer)
        self.wake()

    def _note_arrival(self, peer: PeerId) -> None:
        if peer not in self._came:
            self._came.add(peer)
            self._moshpit.tracker.came(peer, loop_time() - self.began)

    def missing(self) -> list[PositionAnnouncement]:
        line = self._moshpit.tracker.line(self._mine, self._axis)
        return [latest for latest in line.values() if latest.progress < (self._axis, WAITING)]

    async def wait_for_plan(
        self, spent_seconds: float, most_seconds: float, expected: int
    ) -> planning.ResolvedPlan | None:
        """Wait until this peer is called or calls the group itself. Returns None if it continues without a group.

        It waits for `expected` peers, this one included; 0: only for those that are known to come. For the seconds, see
        `PeerTracker.patience_seconds`.
        """
        moshpit, callable_at = self._moshpit, math.inf
        while self.resolved is None and loop_time() < self._deadline:
            line, missing, now = moshpit.tracker.line(self._mine, self._axis), self.missing(), loop_time()
            waiting = {peer: latest for peer, latest in line.items() if latest not in missing}
            for peer in waiting:
                self._note_arrival(peer)
            waits = moshpit.tracker.patience_seconds(missing, spent_seconds, most_seconds)
            late = self.began + moshpit.answer_seconds + waits
            whole = not missing and len(waiting) + 1 >= expected
            callable_at = min(callable_at, now) if whole or now >= late else math.inf
            if callable_at <= now and not waiting:
                break
            if now >= late and not self._was_late:
                self._was_late = True
                moshpit.tracker.missed(latest.sender.peer for latest in missing)
            called_by = self._caller([*waiting] if callable_at <= now else [*line])
            if called_by is None:
                # the last caller may have called at the very moment when it was given up
                until = min(self._deadline, now + moshpit.answer_seconds)
                await self._notifier.reached(lambda: self.resolved is not None, until)
                break
            until = late
            if callable_at <= now:
                until = callable_at + (len(self._given_up) + 1) * moshpit.answer_seconds
                follow = [latest.offer[0] for latest in waiting.values() if latest.follows == moshpit.me.peer]
                if called_by == moshpit.me.peer and (len(follow) == len(waiting) or now >= until):
                    return self._call(follow)
                if now >= until:
                    self._given_up.append(called_by)
                    continue
            changes = self._changes
            await self._notifier.reached(lambda: self._changes != changes, min(until, self._deadline))  # noqa: B023
        return self.resolved

    def _caller(self, others: Sequence[PeerId]) -> PeerId | None:
        """The caller to follow now; None if too many have failed. A change of caller is announced."""
        order = [
            peer
            for peer in seeded_order(self.key.lineage, [*others, self._moshpit.me.peer])
            if peer not in self._given_up
        ]
        if not order or len(self._given_up) >= CALLERS:
            return None
        if self._followed[-1:] != order[:1]:
            self._followed.append(order[0])
            self._announce(order[0], self._offer)
        return order[0]

    def _signed(self) -> wire.Offer:
        moshpit, contribution = self._moshpit, self._contribution
        offer = wire.Offer(
            member=moshpit.me,
            tokens=min(round(contribution.weight * WEIGHT_SCALE), wire.MAX_TOKENS),
            norm=contribution.norm,
            step_seconds=0.0,
            complete=True,
            leaving=self._mine.leaving,
            bandwidth=contribution.bandwidth,
            state_root=self._kind(),
            signature=b"",
        )
        return replace(offer, signature=moshpit.host.signer.sign(planning.offer_message(self.key, offer)))

    def _kind(self) -> bytes:
        """32 bytes for the kind of state: its size and its codec. States of different kinds cannot be averaged."""
        codec = self._moshpit.format.codec.name.encode()
        return self._contribution.elements.to_bytes(8, "little") + codec.ljust(24, b"\0")

    @property
    def _inputs(self) -> planning.PlanInputs:
        per_element = self._moshpit.format.codec.encoded_bytes(1 << 20) / (1 << 20)
        return planning.PlanInputs(self.key, self._contribution.elements, per_element)

    # -- calling ------------------------------------------------------------------------------------------------------

    def _call(self, others: Sequence[wire.Offer]) -> planning.ResolvedPlan | None:
        """Call the peers that follow this one. Returns None if they make no group with it."""
        me, post = self._moshpit.me.peer, self._moshpit.post
        offers = self._compatible([self._offer, *others[: wire.MAX_ROSTER - 1]])
        if self._offer not in offers or len(offers) < 2 or not any(offer.tokens for offer in offers):
            return None
        plan = planning.make_plan(self._inputs, offers, 0.0)
        for offer in plan.offers:
            if offer.member.peer != me:
                post.send(offer.member.peer, plan)
        self._accept(plan)
        return self.resolved

    def _compatible(self, offers: Sequence[wire.Offer]) -> list[wire.Offer]:
        """The offers whose states can be averaged with this peer's. The senders of the others are named."""
        norms = [offer.norm for offer in offers if offer.norm > 0]
        most = GROUP_NORM_SPREAD * median_low(norms) if norms else 0.0
        found = []
        for offer in offers:
            if offer.state_root != self._kind():
                self._moshpit.accounting.name(offer.member.peer, "its state has another size or codec than ours")
            elif offer.norm > most:
                why = f"its state's norm is {offer.norm:.3g}, above the limit of {most:.3g} that the others' norms give"
                self._moshpit.accounting.name(offer.member.peer, why)
            else:
                found.append(offer)
        return found

    def on_plan(self, peer: PeerId, plan: wire.Plan) -> None:
        """Accept a call for this group, unless this peer has been called already or does not follow the sender."""
        if self.resolved is not None or peer not in self._followed:
            return
        members = [offer.member for offer in plan.offers]
        if self._offer not in plan.offers or peer not in [member.peer for member in members]:
            raise BadPayload("a plan without the offer of its sender, or without our own offer")
        if plan.ballot or plan.version:
            raise BadPayload("a second plan for one group, which could give one part two reducers")
        planning.check(plan, self._inputs, members, self._moshpit.host.signer.verify)
        if len(self._compatible(plan.offers)) < len(plan.offers) or not any(offer.tokens for offer in plan.offers):
            raise BadPayload("a plan for states of different kinds, or whose weights are all 0")
        self._accept(plan)

    def _accept(self, plan: wire.Plan) -> None:
        settings = self._moshpit.settings
        resolved = planning.resolve_plan(plan, settings.robust, settings.max_weight)
        count = len(resolved.peers)
        # Unlike a pseudo-gradient, a state does not grow after its offer: its limit is its own norm, not the others'.
        self.resolved = replace(resolved, factors=(1.0,) * count, allowances=(UNCLIPPED,) * count, median_norm=0.0)
        plausible = planning.weights([offer.tokens for offer in plan.offers])
        for offer, weight in zip(plan.offers, plausible, strict=True):
            if weight < offer.tokens:
                why = "its weight was clamped: far above the others' weights"
                self._moshpit.accounting.name(offer.member.peer, why)
        self.wake()
