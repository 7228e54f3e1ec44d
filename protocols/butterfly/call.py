"""How a round is called: members send offers to the coordinators, and the plan of one of these cuts all trainers.

A member sends its first offer to the whole roster, which opens the streams on which the plan and the votes travel. As
its work grows, it sends later offers to the round's first coordinators. An offer of complete work goes to the others,
too, if the round is not called at once, because any member may have to coordinate.

A member that rests stays in the roster and votes, but trains nothing. It says so beside its offer: the digest of a plan
covers the offers. Its work so far counts, but the round is called as if it were not in the roster. While all rest,
there is nothing to call the round for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from protocols.aio import loop_time
from protocols.allreduce import clustered_plan
from protocols.allreduce import plan as planning
from protocols.allreduce.clustered_messages import (
    ClusteredPlan,
    ClusterPlan,
    ClusterReady,
    ClusterVersion,
    OfferToLead,
    PlanOutline,
)
from protocols.allreduce.clustered_plan import ResolvedClusters, RoundPlan
from protocols.allreduce.plan import ResolvedPlan
from protocols.base import (
    AveragingResult,
    BadPayload,
    Deadline,
    Header,
    LocalProgress,
    Member,
    PeerId,
)
from protocols.butterfly.attempt import Attempt
from protocols.butterfly.own_cluster import OwnCluster
from protocols.butterfly.resting import Resting
from protocols.consensus.record import coordinator, coordinators
from protocols.wire import Offer, Plan, Ready

GROWTH = 1.25  # an offer is sent again when its tokens have grown by this factor
LEAVER_SECONDS = 2.0
"""Wait before a coordinator without work calls a round for a leaving member. At once, the round would be skipped."""
INFORMED = 2
"""Number of coordinators that get every offer at once: the first, and the one that takes over from it. So does the
coordinator of the present ballot, if both have failed."""
LOOK_SECONDS = 0.5  # how often a call that waits for lagging peers looks whether they still fetch
CALL_SECONDS = 0.05
"""Time for the call after an offer of complete work, before the other members get that offer. Else all would verify
each other's last offers at just the moment at which they wait for the plan."""


class RoundStart:
    """One member's side of the call: the offers until then, and the latest plan.

    `cut` is set when the round is called and no further step of this member fits, or at the round's deadline.
    """

    def __init__(
        self,
        attempt: Attempt,
        inputs: planning.PlanInputs,
        *,
        bandwidth: float,
        since: float | None = None,
        present: Callable[[], Sequence[Member]],
        roster_changes: Callable[[], bool],
        lagging: Callable[[], Collection[PeerId]],
    ) -> None:
        """`bandwidth` is this member's upload, bytes/s. `since`: see `Averager.enter`. `present` returns the members
        that are not gone, and `roster_changes` whether a record would change the roster. `lagging`: see
        `protocols.butterfly.lagging`.
        """
        head, post, self._changed, self._deadline = attempt.head, attempt.post, attempt.changed, attempt.deadline
        self.cut = asyncio.Event()
        self.resolved: RoundPlan | None = None  # the latest plan; None before the call
        self.cut_at = attempt.deadline  # when the last member has to send its work
        self._present, self._roster_changes, self._lagging = present, roster_changes, lagging
        self._resting, self._stated = attempt.vote.resting, False
        self._me, self._bandwidth, self._post = attempt.me, bandwidth, post
        self._signer, self._accounting = attempt.host.signer, attempt.accounting
        self._key, self._roster, self._inputs = head.key, head.roster, inputs
        self._has_clusters = attempt.settings.clusters
        self.cluster = OwnCluster(self._me, inputs, head.roster, post, self._verify)
        self._order = coordinators(head.key.lineage, head.roster)
        self._began = loop_time() if since is None else since
        self._offers: dict[PeerId, Offer] = {}
        self._complete_seconds: dict[PeerId, float] = {}
        self._announced: Offer | None = None
        self._message: Header | None = None  # that announces it
        self._informed: set[PeerId] = set()  # members that were sent the offer announced last
        self._leader = self._order[0]  # coordinator of the present ballot
        self._verified: dict[PeerId, tuple[bytes, bytes]] = {}  # the last message and signature found genuine
        self._spread: asyncio.TimerHandle | None = None
        self._timer = asyncio.get_running_loop().call_at(attempt.deadline, self.cut.set)

    def close(self, result: AveragingResult | None) -> None:
        """End the attempt. `result` is its own; None if it was given up before."""
        self._timer.cancel()
        self._stop_spreading()

    def data_phase_until(self) -> Deadline:
        """End of this member's data phase. A member that is late has the whole budget to fetch the others' results."""
        budget_seconds = self.resolved.plan.budget_seconds if self.resolved else 0.0
        begins = max(self.cut_at, loop_time())
        return min(self._deadline, begins + budget_seconds)

    def _offer_of(self, work: LocalProgress) -> Offer:
        """This member's offer, not yet signed."""
        return Offer(
            member=self._me,
            tokens=work.tokens,
            norm=work.norm,
            step_seconds=work.step_seconds,
            complete=work.complete,
            leaving=work.leaving,
            bandwidth=self._bandwidth,
            state_root=work.state_root,
            signature=b"",
        )

    def ready(self, work: LocalProgress) -> None:
        offer = self._offer_of(work)
        message = planning.offer_message(self._key, offer)
        offer = replace(offer, signature=self._signer.sign(message))
        self._verified[self._me.peer] = message, offer.signature
        if self.resolved is None:
            self._state_rest(work.resting)  # before an offer that leaves, which would hurry the call
        self._take(offer)
        if self.resolved is None or offer.leaving:  # even after the call, the next roster can leave this member out
            self._announce(offer)
        if self.own:
            self._arm()

    def offer_to_lead(self, work: LocalProgress) -> None:
        """A peer outside the roster offers its work, if the run has clusters (`protocols.butterfly.cluster_call`)."""

    def on_cluster_offer(self, peer: PeerId, message: OfferToLead | ClusterReady) -> None:
        raise BadPayload("an offer of a cluster, which this run has not")

    def is_told(self) -> bool:
        """Whether a lead tells this peer, which is not in the roster, what is decided."""
        return False

    def to_tell(self) -> Collection[PeerId]:
        """The peers outside the roster that this voter tells what is decided, besides those that asked for it."""
        return ()

    def _state_rest(self, rests: bool) -> None:
        if rests == self._stated and rests == (self._me.peer in self._resting.peers()):
            return
        self._stated = rests
        statement = self._resting.state(self._key, self._me, rests, self._signer)
        for peer in self._order:
            if peer != self._me.peer:
                self._post.send(peer, statement)
        self._changed.notify()

    def _announce(self, offer: Offer) -> None:
        sent = self._announced
        completed = (offer.complete, offer.leaving) > ((sent.complete, sent.leaving) if sent else (False, False))
        completed |= bool(sent and self._stated and offer.tokens > sent.tokens)  # it grows no further
        # a cluster offers less when an associate leaves it, or when a boast is clamped
        near = sent and sent.tokens / GROWTH < max(1, offer.tokens) < GROWTH * max(1, sent.tokens)
        if near and not completed:
            return
        self._announced, self._message, self._informed = offer, self._announcement(offer), {self._me.peer}
        to_all = sent is None or (completed and offer.leaving)
        self._inform(self._order if to_all else (*self._order[:INFORMED], self._leader))
        if to_all:
            self._stop_spreading()
        elif completed:
            self._spread = asyncio.get_running_loop().call_later(CALL_SECONDS, self._inform, self._order)

    def _announcement(self, offer: Offer) -> Header:
        return Ready(self._key, offer)

    def led_by(self, coordinator: PeerId) -> None:
        """Give the coordinator of the present ballot this member's offers: those before it may have failed."""
        self._leader = coordinator
        self._inform([coordinator])

    def _inform(self, peers: Sequence[PeerId]) -> None:
        for peer in peers:
            if self._message and peer not in self._informed:
                self._informed.add(peer)
                self._post.send(peer, self._message)

    def _stop_spreading(self) -> None:
        if self._spread:
            self._spread.cancel()

    def on_ready(self, peer: PeerId, offer: Offer) -> None:
        """Take an offer from a peer. Raises BadPayload if it is forged, or not of that peer as a member."""
        if offer.member not in self._roster or offer.member.peer != peer:
            raise BadPayload(f"an offer of {offer.member.peer}, which is not the sender or not in the roster")
        if not self._verify(peer, planning.offer_message(self._key, offer), offer.signature):
            raise BadPayload("an offer with a forged signature")
        known = self._offers.get(peer)
        if known is None or recency(offer) >= recency(known):
            self._take(offer)

    def on_resting(self, peer: PeerId, statement: Resting) -> None:
        """Take a peer's statement that it rests or works again. Raises BadPayload as `on_ready`."""
        if statement.member not in self._roster or statement.member.peer != peer:
            raise BadPayload(f"says that {statement.member.peer} rests, which is not the sender or not in the roster")
        if self._resting.take(statement, self._signer.verify):
            self._changed.notify()

    def _verify(self, peer: PeerId, message: bytes, signature: bytes) -> bool:
        """Whether `peer` signed `message`. The same bytes with the same signature are verified once."""
        if self._verified.get(peer) == (message, signature):
            return True
        genuine = self._signer.verify(peer, message, signature)
        if genuine:
            self._verified[peer] = message, signature
        return genuine

    def _take(self, offer: Offer) -> None:
        peer = offer.member.peer
        self._offers[peer] = offer
        if offer.complete and peer not in self._complete_seconds:
            self._complete_seconds[peer] = self._elapsed()
        self._changed.notify()

    def _elapsed(self) -> float:
        return loop_time() - self._began

    def draw(self, ballot: int, without: Collection[PeerId]) -> Plan | ClusteredPlan:
        """Draw the plan that calls the round, as the coordinator of a ballot. Members in `without` are silent."""
        offers = [each for peer, each in self._offers.items() if peer not in without and self._agrees(each)]
        return planning.make_plan(self._inputs, offers, self._elapsed(), ballot)

    async def due(self) -> bool:
        while loop_time() < self._deadline:
            after = self._call_after()
            due = self._deadline if after is None else self._began + after
            is_due = after is not None and loop_time() >= due
            if self.resolved is not None or (is_due and not self._waits()):
                return True

            def has_changed() -> bool:
                changed = self.resolved is not None or self._call_after() != after  # noqa: B023 - awaited here
                return changed or (is_due and not self._waits())  # noqa: B023

            await self._changed.reached(has_changed, loop_time() + LOOK_SECONDS if is_due else due)
        return False

    def _waits(self) -> bool:
        """Whether the call waits for peers that lag behind. A member that leaves has no time."""
        return bool(self._lagging()) and bool(self._working()) and not self._ends_for_leaver()

    def incomplete(self) -> tuple[PeerId, ...]:
        return tuple(peer for peer in self._working() if peer not in self._complete_seconds)

    def all_rest(self) -> bool:
        """Whether all members rest, and do not all leave with work: only a change of the roster is called for then."""
        return not self._working() and not self._all_leave()

    def has_begun(self, peer: PeerId) -> bool:
        """Whether a member has announced work in this round."""
        offer = self._offers.get(peer)
        return bool(offer and offer.tokens)

    def has_work(self, peer: PeerId) -> bool:
        """Whether a member has announced that it leaves, with work that no round has counted."""
        offer = self._offers.get(peer)
        return bool(offer and offer.leaving and offer.tokens)

    def _call_after(self) -> float | None:
        """When to call the round, in seconds since the attempt began; None: not before something changes."""
        mine, working = self._offers.get(self._me.peer), self._working()
        if mine is None:
            return None
        if self._ends_for_leaver():
            return 0.0 if mine.tokens else LEAVER_SECONDS  # a moment only, if no work is done yet
        if not working:
            return 0.0 if self._all_leave() or self._roster_changes() else None
        done = [seconds for peer, seconds in self._complete_seconds.items() if peer in working]
        return planning.call_after(done, len(working))

    def _ends_for_leaver(self) -> bool:
        """Whether a member offers its last work. One that only leaves the roster continues with its steps."""
        working = self._working()
        return any(peer in working and peer in self._offers and self._offers[peer].complete for peer in self.leaving())

    def _working(self) -> tuple[PeerId, ...]:
        """The members that the call waits for. If those that are gone counted, too few might be left for a call."""
        resting = self._resting.peers()
        return tuple(member.peer for member in self._present() if member.peer not in resting)

    def _all_leave(self) -> bool:
        """Whether every member leaves, and there is work to count first. The only one of a roster cannot leave."""
        peers, leaving = [member.peer for member in self._roster], self.leaving()
        return len(peers) > 1 and leaving.issuperset(peers) and any(map(self.has_work, peers))

    def leaving(self) -> frozenset[PeerId]:
        resolved = self.resolved
        called: Sequence[Offer] = resolved.plan.offers if isinstance(resolved, ResolvedPlan) else ()
        leads = resolved.offered if isinstance(resolved, ResolvedClusters) else ()
        left = {offer.member.peer for offer in (*self._offers.values(), *called) if offer.leaving}
        return frozenset((*left, *(cluster.lead.peer for cluster in leads if cluster.leaving)))

    def _agrees(self, offer: Offer) -> bool:
        if offer.state_root == self._offers[self._me.peer].state_root:
            return True
        self._accounting.name(offer.member.peer, "its state root differs from the coordinator's")
        return False

    @property
    def own(self) -> ResolvedPlan | None:
        """The latest plan or, if that is of clusters, the plan inside this peer's own; None if it is in neither."""
        resolved = self.resolved
        if isinstance(resolved, ResolvedClusters):
            return self.cluster.members
        return resolved if resolved and self._me.peer in resolved.peers else None

    def on_lead(self, peer: PeerId, message: ClusterPlan | ClusterVersion) -> None:
        """Take a plan from the lead of this peer's cluster, or a version of it. Voters have it from the coordinator.

        If the lead is lost, the plan may come from another member of the cluster.
        """
        if self._me in self._roster:
            raise BadPayload("a lead's plan for its cluster, sent to a voter")
        if isinstance(message, ClusterPlan):
            if taken := self.cluster.take(peer, message):
                self.on_plan(taken)
        elif all(member.peer != peer for member in self._roster):
            raise BadPayload("a version of a plan, from a peer that is not a voter")
        else:
            self.cluster.hear(peer, message)
        for sender, plan in self.cluster.later():
            try:
                self.on_plan(plan)
            except BadPayload as error:
                if sender == peer:
                    raise
                self._accounting.name(sender, f"refused: {error}")

    def on_plan(self, plan: Plan | ClusteredPlan | PlanOutline) -> None:
        """Take a plan from the coordinator of the ballot that it names: a call, or a part given to another reducer."""
        known = self.resolved.plan if self.resolved else None
        if known and (plan.ballot, plan.version) <= (known.ballot, known.version):
            if (plan.ballot, plan.version) == (known.ballot, known.version) and not _are_one(plan, known):
                self._refuse_second(plan)
            return
        before, self.resolved = self.resolved, self._checked(plan)
        self._stop_spreading()
        self._changed.notify()
        if before is None or before.digest != self.resolved.digest:
            self.cut_at = min(self._deadline, loop_time() + plan.cut_seconds)
            if self.own:
                self._arm()

    def _refuse_second(self, plan: Plan | ClusteredPlan | PlanOutline) -> None:
        """Name the coordinator if it has signed two plans; else whoever sent this one, with BadPayload."""
        if not isinstance(plan, PlanOutline):
            raise BadPayload("a second plan for one round")
        clustered_plan.check_signature(plan, self._key, self._roster, self._verify)
        leader = coordinator(self._key.lineage, self._roster, plan.ballot)
        self._accounting.name(leader, "signed two plans of one version")

    def _checked(self, plan: Plan | ClusteredPlan | PlanOutline) -> RoundPlan:
        """What follows from a plan. Raises BadPayload if it breaks a rule."""
        inputs = self._inputs
        if isinstance(plan, Plan):
            planning.check(plan, inputs, self._roster, self._verify)
            return planning.resolve_plan(plan, inputs.robust, inputs.max_weight)
        if not self._has_clusters:
            raise BadPayload("a plan of clusters, which this run has not")
        if isinstance(plan, PlanOutline):
            whole = clustered_plan.resolve_outline(plan, inputs, self._roster)
        else:
            clustered_plan.check_clustered_plan(plan, inputs, self._roster, self._verify)
            whole = clustered_plan.resolve_clusters(plan, inputs, self._roster)
        clustered_plan.check_signature(whole.outline, self._key, self._roster, self._verify)
        self.cluster.enter(whole)
        if self._me in self._roster:
            self.cluster.pass_on(whole)
        return whole

    def _arm(self) -> None:
        """Cut when no further step of this member would end in time. A step's length may change even after the call."""
        mine = self._offers.get(self._me.peer)  # None if the call came before the trainer's first report
        cut_at = self.cut_at - (mine.step_seconds if mine else 0.0)
        self._timer.cancel()
        if cut_at <= loop_time():
            self.cut.set()
        else:
            self._timer = asyncio.get_running_loop().call_at(cut_at, self.cut.set)


def _are_one(plan: Plan | ClusteredPlan | PlanOutline, known: Plan | ClusteredPlan | PlanOutline) -> bool:
    """Whether two plans are the same. A coordinator can sign one twice in two ways."""
    if isinstance(plan, Plan) or isinstance(known, Plan):
        return plan == known
    return replace(plan, signature=b"") == replace(known, signature=b"")


def recency(offer: Offer) -> tuple[bool, int, bool]:
    """Grows from one offer of a member to its next."""
    return offer.leaving, offer.tokens, offer.complete
