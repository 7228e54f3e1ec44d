"""Who is in one Moshpit group. Those who wait at one key name the first of them, in an order that the key draws, as the
one to call them. It does so with a plan, signed offers and all, as soon as everybody is there who may come, or has been
waited for. Who has accepted a plan is in no other group; two plans for one key make two smaller groups.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from statistics import median_low

from protocols import wire
from protocols.aio import Notifier
from protocols.allreduce import plan as planning
from protocols.base import BadPayload, Deadline, Host, Member, PeerId, Settings
from protocols.codec import Codec
from protocols.control_channel import ControlChannel, RoundAccounting
from protocols.moshpit.grid import seeded_order
from protocols.moshpit.peer_tracker import WAITING, PeerTracker, PositionAnnouncement

FLOOR_SECONDS = 1.0
"""What anybody is given to answer, beside round trips and what was observed."""
ROUND_TRIP_LIMIT_SECONDS = 2.0
CALLERS = 3
"""If so many fail to call, those who wait go without a group."""
GROUP_NORM_SPREAD = 4.0
"""States that have drifted apart are still about as long: what is longer than so many median ones is no state of this
run, and would drown the others."""
WEIGHT_SCALE = 1 << 20
"""Weights travel as whole numbers, and along the second axis they are means."""
UNCLIPPED = math.inf
"""A state that is scaled is another state: it counts whole or not at all."""


@dataclass(frozen=True, slots=True)
class MoshpitContext:
    """What all groups of one averager work with."""

    host: Host
    settings: Settings
    codec: Codec
    me: Member
    accounting: RoundAccounting
    post: ControlChannel
    tracker: PeerTracker

    @property
    def answer_seconds(self) -> float:
        """What anybody is given to answer: a floor and the slowest round trip, there and back."""
        trips = self.post.round_trip_seconds
        slowest = max((trips.get(peer, 0.0) for peer in self.tracker.sight), default=0.0)
        return FLOOR_SECONDS + 2 * min(slowest, ROUND_TRIP_LIMIT_SECONDS)


@dataclass(frozen=True, slots=True)
class GroupContribution:
    """What a peer brings to a group.

    Attributes:
        elements: of its state.
        weight: what that counts for: tokens, or the mean of those that it speaks for.
        norm: of the state.
        bandwidth: this peer's upload, bytes/s.
    """

    elements: int
    weight: float
    norm: float
    bandwidth: float


@dataclass(frozen=True, slots=True)
class MatchmakingLimits:
    """Attributes:
    spent_seconds: what lay before the group took this peer.
    most_seconds: no single peer is waited for much longer, whatever it says.
    expected: wait for so many, besides those who are known to come; 0: these are all.
    """

    spent_seconds: float
    most_seconds: float
    expected: int = 0


class GroupMatchmaker:
    """One peer's way into one group.

    Attributes:
        key: what its frames are bound to.
        resolved: what was called; None before.
        began: when this peer came.
    """

    def __init__(
        self,
        context: MoshpitContext,
        mine: PositionAnnouncement,
        axis: int,
        contribution: GroupContribution,
        tell: Callable[[PeerId, wire.Offer], None],
        deadline: Deadline,
    ) -> None:
        """
        Args:
            mine: where this peer stands; the group is that of its line along `axis`.
            tell: says to everybody by whom this peer lets itself be called, and what it brings.
        """
        self.key = mine.key(axis)
        self.resolved: planning.ResolvedPlan | None = None
        self.began = asyncio.get_running_loop().time()
        self._context, self._mine, self._axis, self._contribution = context, mine, axis, contribution
        self._tell, self._deadline = tell, deadline
        self._followed: list[PeerId] = []
        self._given_up: list[PeerId] = []
        self._came: set[PeerId] = set()
        self._was_late = False
        self._stirred, self._notifier = 0, Notifier()
        self._offer = self._signed()

    def stir(self) -> None:
        """Something has changed: somebody came, was called, left or died."""
        self._stirred += 1
        self._notifier.notify()

    def heard(self, here: PositionAnnouncement) -> None:
        """A peer says where it stands: here, perhaps, when this peer has been in its group for long."""
        if here.stage == WAITING and here.key(here.axis) == self.key:
            self._note(here.sender.peer)
        self.stir()

    def _note(self, peer: PeerId) -> None:
        """It has come: how long after this peer is known now."""
        if peer not in self._came:
            self._came.add(peer)
            self._context.tracker.came(peer, asyncio.get_running_loop().time() - self.began)

    def missing(self) -> list[PositionAnnouncement]:
        """Who may still come."""
        line = self._context.tracker.line(self._mine, self._axis)
        return [word for word in line.values() if word.progress < (self._axis, WAITING)]

    async def terms_of(self, patience: MatchmakingLimits) -> planning.ResolvedPlan | None:
        """Wait until this peer is called, or calls; None if it goes without a group."""
        context, loop, callable_at = self._context, asyncio.get_running_loop(), math.inf
        while self.resolved is None and loop.time() < self._deadline:
            line, missing, now = context.tracker.line(self._mine, self._axis), self.missing(), loop.time()
            here = {peer: word for peer, word in line.items() if word not in missing}
            for peer in here:
                self._note(peer)
            waits = context.tracker.patience_seconds(missing, patience.spent_seconds, patience.most_seconds)
            late = self.began + context.answer_seconds + waits
            whole = not missing and len(here) + 1 >= patience.expected
            callable_at = min(callable_at, now) if whole or now >= late else math.inf
            if callable_at <= now and not here:
                break
            if now >= late and not self._was_late:
                self._was_late = True
                context.tracker.missed(word.sender.peer for word in missing)
            called_by = self._caller([*here] if callable_at <= now else [*line])
            if called_by is None:
                await self._called_after_all()
                break
            until = late
            if callable_at <= now:
                until = callable_at + (len(self._given_up) + 1) * context.answer_seconds
                follow = [word.offer[0] for word in here.values() if word.follows == context.me.peer]
                if called_by == context.me.peer and (len(follow) == len(here) or now >= until):
                    return self._call(follow)
                if now >= until:
                    self._given_up.append(called_by)
                    continue
            await self._news(until)
        return self.resolved

    def _caller(self, others: Sequence[PeerId]) -> PeerId | None:
        """Whom to follow now, which all are told; None if enough have failed."""
        order = [
            peer
            for peer in seeded_order(self.key.lineage, [*others, self._context.me.peer])
            if peer not in self._given_up
        ]
        if not order or len(self._given_up) >= CALLERS:
            return None
        if self._followed[-1:] != order[:1]:
            self._followed.append(order[0])
            self._tell(order[0], self._offer)
        return order[0]

    async def _called_after_all(self) -> None:
        """Who is given up last calls at the moment at which it is, if not all follow it: its call is on its way."""
        with suppress(TimeoutError):
            until = min(self._deadline, asyncio.get_running_loop().time() + self._context.answer_seconds)
            await self._notifier.until(lambda: self.resolved is not None, until)

    async def _news(self, until: Deadline) -> None:
        stirred = self._stirred
        with suppress(TimeoutError):
            await self._notifier.until(lambda: self._stirred != stirred, min(until, self._deadline))

    def _signed(self) -> wire.Offer:
        context, contribution = self._context, self._contribution
        offer = wire.Offer(
            member=context.me,
            tokens=min(round(contribution.weight * WEIGHT_SCALE), wire.MAX_TOKENS),
            norm=contribution.norm,
            step_seconds=0.0,
            complete=True,
            leaving=self._mine.leaving,
            bandwidth=contribution.bandwidth,
            state_root=self._kind(),
            signature=b"",
        )
        return replace(offer, signature=context.host.signer.sign(planning.offer_message(self.key, offer)))

    def _kind(self) -> bytes:
        """Stands for what is averaged: of another kind is what has another size, or travels in another codec."""
        return self._contribution.elements.to_bytes(8, "little") + self._context.codec.name.encode().ljust(24, b"\0")

    @property
    def _inputs(self) -> planning.PlanInputs:
        per_element = self._context.codec.encoded_bytes(1 << 20) / (1 << 20)
        return planning.PlanInputs(self.key, self._contribution.elements, per_element)

    # -- calling ------------------------------------------------------------------------------------------------------

    def _call(self, others: Sequence[wire.Offer]) -> planning.ResolvedPlan | None:
        """Call those who let themselves be called by this peer; None if that would be no group."""
        me, post = self._context.me.peer, self._context.post
        offers = self._alike([self._offer, *others[: wire.MAX_ROSTER - 1]])
        if self._offer not in offers or len(offers) < 2 or not any(offer.tokens for offer in offers):
            return None
        plan = planning.make_plan(self._inputs, offers, 0.0)
        for offer in plan.offers:
            if offer.member.peer != me:
                post.send(offer.member.peer, plan)
        self._accept(plan)
        return self.resolved

    def _alike(self, offers: Sequence[wire.Offer]) -> list[wire.Offer]:
        """Those that can be averaged; whose cannot is named."""
        norms = [offer.norm for offer in offers if offer.norm > 0]
        most = GROUP_NORM_SPREAD * median_low(norms) if norms else 0.0
        found = []
        for offer in offers:
            if offer.state_root != self._kind():
                self._context.accounting.name(
                    offer.member.peer, "its state is of another size, or travels in another codec"
                )
            elif offer.norm > most:
                why = f"its state's norm is {offer.norm:.3g}, where that of the others allows {most:.3g}"
                self._context.accounting.name(offer.member.peer, why)
            else:
                found.append(offer)
        return found

    def on_plan(self, peer: PeerId, plan: wire.Plan) -> None:
        """A call for this group; one of whom this peer has not named as its caller is none.

        Raises:
            BadPayload: it breaks a rule.
        """
        if self.resolved is not None or peer not in self._followed:
            return
        members = [offer.member for offer in plan.offers]
        if self._offer not in plan.offers or peer not in [member.peer for member in members]:
            raise BadPayload("a group without its caller, or without whom it calls")
        if plan.ballot or plan.version:
            raise BadPayload("a second call, which could have one part reduced by several")
        planning.check(plan, self._inputs, members, self._context.host.signer.verify)
        if len(self._alike(plan.offers)) < len(plan.offers) or not any(offer.tokens for offer in plan.offers):
            raise BadPayload("a group of states that are not alike, or count for nothing")
        self._accept(plan)

    def _accept(self, plan: wire.Plan) -> None:
        resolved = planning.resolve_plan(plan, self._context.settings.robust)
        count = len(resolved.peers)
        # A state does not grow after its offer, as a pseudo-gradient does: its own norm is its limit, not the others'.
        self.resolved = replace(resolved, factors=(1.0,) * count, allowances=(UNCLIPPED,) * count, median_norm=0.0)
        for offer, weight in zip(plan.offers, resolved.weights, strict=True):
            if weight < offer.tokens and self._context.settings.robust == "mean":
                self._context.accounting.name(
                    offer.member.peer, "its weight was clamped: it is far above that of the others"
                )
        self.stir()
