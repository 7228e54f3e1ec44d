"""How a round of clusters is called: associates make offers to their leads, and leads offer their clusters.

A round is one of clusters if a voter has associates. Its lead offers the cluster instead of its own work, to the same
members and as often as a member does (`protocols.butterfly.call`), and voters that hear of it offer theirs, too. The
lead judges by the rule for rounds when its cluster is complete; the coordinator judges by it when the clusters are. In
other rounds nothing differs.

A lead makes the call wait for its associates that do not rest. What one offers that has another state, has no place, or
has lost it since is left out. An associate that has found another lead signs its offer anew, for that one.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from protocols.aio import loop_time
from protocols.allreduce import clustered_plan as clustered
from protocols.allreduce import plan as planning
from protocols.allreduce.clustered_messages import (
    ClusteredPlan,
    ClusterOffer,
    ClusterReady,
    OfferToLead,
    PlanOutline,
)
from protocols.allreduce.plan import PlanInputs
from protocols.base import AveragingResult, BadPayload, Header, LocalProgress, PeerId
from protocols.butterfly.attaching import Attachment
from protocols.butterfly.attempt import Attempt
from protocols.butterfly.call import GROWTH, RoundStart, recency
from protocols.butterfly.resting import Resting
from protocols.consensus.record import Record
from protocols.wire import Offer, Plan

WAITED_SECONDS = 5.0
"""An associate whose round ends undecided for it was kept waiting if its lead had all of its work for so long."""


class ClusteredStart(RoundStart):
    """As `RoundStart`, at a voter of a run with clusters and at an associate.

    What the call knows of a voter is its offer in a flat round. In a round of clusters it is that of its cluster, in
    the form of an offer: its tokens, and whether the cluster is complete.
    """

    def __init__(self, attempt: Attempt, inputs: PlanInputs, *, attachment: Attachment, **call: Any) -> None:
        """`attachment` has the places in this peer's cluster, or its own in another. `call`: as for `RoundStart`."""
        super().__init__(attempt, inputs, **call)
        self._attachment, self._votes = attachment, attempt.vote.votes
        self._rests = False
        self._statement: Resting | None = None  # an associate's latest about resting
        self._of_clusters = False
        self._clusters: dict[PeerId, ClusterOffer] = {}  # of each lead, the latest one
        self._mine: Offer | None = None  # this peer's own work, as it stands
        self._members: dict[PeerId, Offer] = {}  # of this voter's cluster, signed for it
        self._member_seconds: dict[PeerId, float] = {}  # when they were complete
        self._made: tuple[ClusterOffer, tuple[Offer, ...]] | None = None  # not yet signed
        self._told: tuple[PeerId, Offer] | None = None  # the lead that this associate told last, and what
        self._told_at = 0.0
        self._look: asyncio.TimerHandle | None = None
        attachment.on_change = self._places_changed
        self.cluster.standby = attachment.leads
        self.cluster.followers = self._followers

    def close(self, result: AveragingResult | None) -> None:
        super().close(result)
        self._attachment.on_change = lambda: None
        if self._told:
            self._judge_lead(self._told[1], result)
        elif self._votes and self._mine:
            self._judge_aggregators(self._mine, result)
        self._stop_looking()

    def is_told(self) -> bool:
        """While the roster has free places, an associate asks for one, and is told for that."""
        return self._attachment.search.lead is not None and self._attachment.is_full(self._roster)

    def to_tell(self) -> Collection[PeerId]:
        """A voter's associates, and of those that it stands by for those whose leads are lost."""
        if not self._votes:
            return ()
        attachment, roster = self._attachment, {member.peer for member in self._roster}
        mine = (member.peer for member in attachment.book.associates())
        return {*mine, *self.cluster.peers, *attachment.followers(of_lost_leads=True)} - roster

    def _followers(self) -> Collection[PeerId]:
        """Associates may be in another cluster of the plan, whose lead they have lost since."""
        return {*self._attachment.followers(), *(member.peer for member in self._attachment.book.associates())}

    def on_plan(self, plan: Plan | ClusteredPlan | PlanOutline) -> None:
        super().on_plan(plan)
        if len(self.cluster.peers) > 1:
            self._attachment.partners = self.cluster.peers

    def _places_changed(self) -> None:
        self.cluster.tell_followers()
        self._tell_lead()
        self._consider()

    # -- at an associate ----------------------------------------------------------------------------------------------

    def offer_to_lead(self, work: LocalProgress) -> None:
        self._mine = self._offers[self._me.peer] = self._offer_of(work)
        self._attachment.rests = work.resting
        if work.resting != (self._me.peer in self._resting.peers()):
            self._statement = self._resting.state(self._key, self._me, work.resting, self._signer)
            self._told = None
        self._tell_lead()
        if self.own:
            self._arm()

    def _tell_lead(self) -> None:
        """Send this associate's offer to its lead if that one has changed, or the work has grown by much. A lead that
        knows what was decided answers with that.
        """
        lead, mine = self._attachment.search.lead, self._mine
        if lead is None or mine is None:
            return
        told = self._told[1] if self._told and self._told[0] == lead.peer else None
        if told and not _is_news(told, mine):
            return
        self._told, self._told_at = (lead.peer, mine), loop_time()
        offer = OfferToLead(self._key, lead.peer, mine)
        signature = self._signer.sign(offer.signed())
        self._post.send(lead.peer, replace(offer, offer=replace(mine, signature=signature)))
        if self._statement:
            self._post.send(lead.peer, self._statement)

    def _judge_lead(self, offer: Offer, result: AveragingResult | None) -> None:
        """Note whether the work counted that this associate has offered to its lead."""
        if not (offer.complete and offer.tokens):
            return
        if result and isinstance(result.record, Record):
            if result.record.averaged:
                self._attachment.count(_counts(result, self._me.peer))
        elif loop_time() - self._told_at >= WAITED_SECONDS:
            self._attachment.count(False)

    # -- at a lead ----------------------------------------------------------------------------------------------------

    def ready(self, work: LocalProgress) -> None:
        self._mine, self._rests = self._offer_of(work), work.resting
        self._look_for_associates()
        if not self._of_clusters:
            return super().ready(work)
        self._hear_member(self._signed(self._mine))
        self._consider()
        if self.own:
            self._arm()

    def _signed(self, offer: Offer) -> Offer:
        """This voter's offer as a member of its own cluster."""
        message = OfferToLead(self._key, self._me.peer, offer).signed()
        return replace(offer, signature=self._signer.sign(message))

    def on_cluster_offer(self, peer: PeerId, message: OfferToLead | ClusterReady) -> None:
        if isinstance(message, OfferToLead):
            self._on_offer_to_lead(peer, message)
        else:
            self._on_cluster_ready(peer, message)

    def _on_offer_to_lead(self, peer: PeerId, message: OfferToLead) -> None:
        """Take the offer of an associate; tell a peer without a place that it has none. Raises BadPayload if forged."""
        offer = message.offer
        if offer.member.peer != peer or message.lead != self._me.peer:
            raise BadPayload(f"an offer of {offer.member.peer} to {message.lead}, which are not the ends of the stream")
        book = self._attachment.book
        if not self._votes or not book.offered(offer.member):
            return self._post.send(peer, book.reply(self._key, peer, False))
        if not self._verify(peer, message.signed(), offer.signature):
            raise BadPayload("an offer with a forged signature")
        known = self._members.get(peer)
        if known is None or known.member != offer.member or recency(offer) >= recency(known):
            self._hear_member(offer)
            if self._is_strange(offer):
                self._accounting.name(peer, "its state root differs from its lead's")
            self._consider()

    def on_resting(self, peer: PeerId, statement: Resting) -> None:
        if statement.member in self._roster or statement.member.peer != peer:
            return super().on_resting(peer, statement)
        here = statement.member in self._attachment.book.associates()  # if not, it is told so when it makes an offer
        if here and self._resting.take(statement, self._signer.verify):
            self._consider()

    def _judge_aggregators(self, offer: Offer, result: AveragingResult | None) -> None:
        """Note whether this lead's own work counted in a mean. If its aggregators let work of others count, this lead
        was late, or its own work was refused. With a single associate it cannot tell.
        """
        members = self.cluster.members
        if members is None or result is None or not (offer.complete and offer.tokens):
            return
        if not isinstance(result.record, Record) or not result.record.averaged:
            return
        aggregators = {members.reducer(part) for part in range(len(members.plan.reducers))} - {self._me.peer}
        others = {*result.peers} - {self._me.peer}
        excused = len(others) > 1 or not others <= aggregators
        if aggregators:
            self._attachment.count(excused or _counts(result, self._me.peer), aggregators)

    def _hear_member(self, offer: Offer) -> None:
        peer = offer.member.peer
        if (known := self._members.get(peer)) and known.member != offer.member:
            self._member_seconds.pop(peer, None)  # it has begun again
        self._members[peer] = offer
        if offer.complete:
            self._member_seconds.setdefault(peer, self._elapsed())

    def _look_for_associates(self) -> None:
        if not self._of_clusters and self.resolved is None and self._votes and self._attachment.book.associates():
            self._begin_clusters()

    def _begin_clusters(self) -> None:
        """From now on clusters are offered and judged; what single voters have offered does not count any more. Once a
        round is of clusters, it stays so.
        """
        self._of_clusters = True
        self._offers.clear()
        self._complete_seconds.clear()
        self._announced = self._message = None
        self._stop_spreading()
        if self._mine:
            self._hear_member(self._signed(self._mine))

    def _working_associates(self) -> list[PeerId]:
        """Those that the cluster's offer waits for."""
        resting = self._resting.peers()
        strange = {peer for peer, each in self._members.items() if self._is_strange(each)}
        here = (each.peer for each in self._attachment.book.associates())
        return [peer for peer in here if peer not in resting and peer not in strange]

    def _complete_after(self) -> float | None:
        """When the cluster is complete, in seconds since the attempt began; None: not before something changes. A lead
        that leaves does not wait; an associate that leaves hurries nothing.
        """
        if self._mine and self._mine.leaving and self._mine.complete:
            return 0.0
        expected = [*self._working_associates(), *(() if self._rests else (self._me.peer,))]
        done = [seconds for peer, seconds in self._member_seconds.items() if peer in expected]
        return planning.call_after(done, len(expected)) if expected else None

    def _consider(self) -> None:
        """Offer the cluster as it stands, if that is news, and look again when it may be complete."""
        self._stop_looking()
        self._look_for_associates()
        if self._mine is None or not self._of_clusters:
            return
        if self.resolved is None:
            self._state_rest(self._rests and not self._working_associates())
        elif not self._mine.leaving:  # even after the call, the next roster can leave this member out
            return
        after = self._complete_after()
        due = math.inf if after is None else self._began + after
        is_complete = loop_time() >= due
        if not is_complete and due < math.inf:
            self._look = asyncio.get_running_loop().call_at(due, self._consider)
        here = {self._me, *self._attachment.book.associates()}
        offers = [each for each in self._members.values() if each.member in here and not self._is_strange(each)]
        offers.sort(key=lambda offer: offer.member)
        cluster = clustered.make_cluster_offer(self._inputs, self._me, offers, is_complete)
        self._made = cluster, tuple(offers)
        stand_in = replace(self._mine, tokens=_tokens(cluster), complete=is_complete)
        self._take(stand_in)
        self._announce(stand_in)

    def _is_strange(self, offer: Offer) -> bool:
        """Whether a member's work starts from another state than this lead's."""
        return self._mine is not None and offer.state_root != self._mine.state_root

    def _announcement(self, offer: Offer) -> Header:
        if self._made is None or not self._of_clusters:
            return super()._announcement(offer)
        cluster, offers = self._made
        ready = ClusterReady(self._key, cluster)
        signed = replace(cluster, signature=self._signer.sign(ready.signed()))
        self._clusters[self._me.peer] = signed
        self.cluster.keep(signed, offers)
        return replace(ready, offer=signed)

    def _stop_looking(self) -> None:
        if self._look:
            self._look.cancel()
            self._look = None

    # -- at all voters, of which any may coordinate -------------------------------------------------------------------

    def on_ready(self, peer: PeerId, offer: Offer) -> None:
        if not self._of_clusters:
            return super().on_ready(peer, offer)
        if offer.member not in self._roster or offer.member.peer != peer:
            raise BadPayload(f"an offer of {offer.member.peer}, which is not the sender or not in the roster")
        mine = self._clusters.get(self._me.peer)
        if mine and peer not in self._clusters:  # it has not heard that there are clusters
            self._post.send(peer, ClusterReady(self._key, mine))

    def _on_cluster_ready(self, peer: PeerId, message: ClusterReady) -> None:
        """Take the offer of a voter's cluster instead of its last one, which may be larger: associates come and go.

        Raises BadPayload if it is forged, not led by the sender, or without members or their norms: all would refuse a
        plan with it.
        """
        cluster = message.offer
        if not cluster.well_formed:
            raise BadPayload("a cluster without members, or without their norms")
        if cluster.lead not in self._roster or cluster.lead.peer != peer:
            raise BadPayload(f"a cluster of {cluster.lead.peer}, which is not the sender or not in the roster")
        if not self._verify(peer, message.signed(), cluster.signature):
            raise BadPayload("a cluster's offer with a forged signature")
        if not self._votes or (self.resolved is not None and not self._of_clusters):  # it calls no round of clusters
            if cluster.leaving:  # but it judges the next roster
                self._take(_stand_in(cluster))
            return
        if not self._of_clusters:
            self._begin_clusters()
            self._consider()
        self._clusters[peer] = cluster
        self._take(_stand_in(cluster))

    def draw(self, ballot: int, without: Collection[PeerId]) -> Plan | ClusteredPlan:
        if not self._of_clusters:
            return super().draw(ballot, without)
        present = {member.peer for member in self._present()}  # a lead that is gone tells its cluster no plan
        here = [peer for peer in self._clusters if peer in present and peer not in without]
        here = [peer for peer in here if self._agrees(self._offers[peer])]
        offered = [self._clusters[peer] for peer in here]
        return clustered.make_clustered_plan(self._inputs, offered, self._elapsed(), ballot)


def _counts(result: AveragingResult, peer: PeerId) -> bool:
    """Whether at least half of a peer's work is in a mean."""
    brought = result.contributions.get(peer)
    return brought is not None and 2 * brought.chunks_counted >= brought.chunks


def _is_news(told: Offer, offer: Offer) -> bool:
    """Whether an offer is sent to a lead that was told this one."""
    if (offer.complete, offer.leaving) > (told.complete, told.leaving):
        return True
    return offer.tokens >= GROWTH * max(1, told.tokens)


def _tokens(cluster: ClusterOffer) -> int:
    """A cluster's tokens in the call: all of them, but for a boast, beside which the others' work would be no news."""
    return int(math.fsum(planning.weights(cluster.tokens)))


def _stand_in(cluster: ClusterOffer) -> Offer:
    """A cluster's offer as that of a member."""
    return Offer(
        member=cluster.lead,
        tokens=_tokens(cluster),
        norm=0.0,
        step_seconds=cluster.step_seconds,
        complete=cluster.complete,
        leaving=cluster.leaving,
        bandwidth=cluster.bandwidth,
        state_root=cluster.state_root,
        signature=b"",
    )
