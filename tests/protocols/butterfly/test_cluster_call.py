"""Rounds of clusters from the search for a lead to the decision, and what calls refuse."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest

from protocols import wire
from protocols.allreduce.clustered_messages import (
    ClusterOffer,
    ClusterReady,
    ClusterVersion,
    OfferToLead,
)
from protocols.allreduce.clustered_plan import ResolvedClusters
from protocols.base import BadPayload, Header, Member, PeerId
from protocols.butterfly.associate import AssociateRound
from protocols.butterfly.attachment import Attach, AttachReply
from protocols.butterfly.cluster_call import ClusteredStart
from protocols.butterfly.resting import RestingMembers
from protocols.wire import Offer
from tests.sim.host import SimSigner
from tests.support.calling_clusters import ROOT, CallingClusters
from tests.support.simulated import simulated
from tests.support.waiting import until

CALM_SECONDS = 1.4
"""More than a round takes in which all peers train for a second."""


@simulated(CallingClusters, 3, 6)
async def test_all_work_counts_once_associates_have_leads(peers: CallingClusters) -> None:
    await peers.until(4)
    assert peers.counted(0) == set(peers.voters), "their orders are drawn in the next round"
    for round in (3, 4):
        assert peers.counted(round) == set(peers.names), round
    assert not any(peers.rounds[name].call.to_tell() for name in peers.associates), "the voters tell each of them"


@pytest.mark.parametrize("associates", [0, 2], ids=["nobody else", "followers without places"])
def test_rounds_without_associates_are_as_without_clusters(associates: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Followers that do not attach, since the roster has room, are told as in a run without clusters."""
    plays, encode, sent = [], wire.encode, set[type[Header]]()

    def encoded(header: Header) -> bytes:
        sent.add(type(header))
        return encode(header)

    monkeypatch.setattr(wire, "encode", encoded)
    for clusters in (False, True):
        peers = CallingClusters(3, associates, clusters)
        peers.settings = replace(peers.settings, voters=8)

        async def main(peers: CallingClusters = peers) -> None:
            await peers.until(1)

        peers.play(main)
        plays.append(peers.chains["v0"].records)
    assert plays[0] == plays[1]
    assert wire.Ready in sent and not sent & {OfferToLead, ClusterReady, Attach, AttachReply}


def test_associates_with_leads_ask_for_no_admission(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their leads tell them what is decided."""
    peers, asked = CallingClusters(3, 4), list[float]()
    ask = AssociateRound._ask_admission

    def asks(attempt: AssociateRound) -> None:
        asked.append(peers.now)
        ask(attempt)

    async def main() -> None:
        await peers.until(2)
        assert asked, "before they have leads they do"
        began = peers.now
        await peers.until(5)
        assert not [at for at in asked if at > began]

    monkeypatch.setattr(AssociateRound, "_ask_admission", asks)
    peers.play(main)


@simulated(CallingClusters, 3, 6)
async def test_slow_associate_delays_round_as_slow_member_does(peers: CallingClusters) -> None:
    """It counts with what it has when the others are done, and a little time, have passed."""
    await peers.until(2)
    peers.train_seconds["a0"] = 30.0
    began = peers.now
    await peers.until(4)
    assert peers.now - began < 2 * 1.5 * CALM_SECONDS
    assert {"a0", *peers.voters} <= peers.counted(4)


@simulated(CallingClusters, 3, 6)
async def test_lead_that_died_before_the_plan_delays_nobody(peers: CallingClusters) -> None:
    """Its cluster, which would be told no plan, is not in it."""
    await peers.until(2)
    peers.train_seconds = dict.fromkeys(("v0", "v2"), 3.0)
    await peers.until(3)
    began = peers.now
    await asyncio.sleep(2.0)
    peers.network.kill("v1")
    await peers.until(4)
    assert peers.now - began < 3.0 + CALM_SECONDS
    assert {"v0", "v2"} < peers.counted(4)


@simulated(CallingClusters, 3, 6)
async def test_resting_peers_delay_nothing(peers: CallingClusters) -> None:
    """A lead that rests calls for its working associates; associates that rest are not waited for."""
    await peers.until(2)
    peers.resting = ["v0", "a0"]
    began = peers.now
    await peers.until(5)
    assert peers.now - began < 3 * CALM_SECONDS
    assert peers.counted(5) == set(peers.names) - {"v0", "a0"}


@simulated(CallingClusters, 3, 6)
async def test_round_of_working_associates_only_is_called(peers: CallingClusters) -> None:
    await peers.until(2)
    peers.resting = peers.voters
    await peers.until(4)
    assert peers.counted(4) == set(peers.associates)


@simulated(CallingClusters, 3, 4)
async def test_associate_sent_away_moves_within_its_round(peers: CallingClusters) -> None:
    """Its new lead gets an offer of its own; the work counts once."""
    await peers.until(2)
    lead = peers.lead("a0")
    assert lead
    await asyncio.sleep(0.5)
    key = peers.chains["a0"].head.key
    search = peers.averagers["a0"]._attachment
    assert search
    del peers.averagers[lead]._attachment.book._places["a0"]  # type: ignore[union-attr]
    search.take_refusal("v0" if lead != "v0" else "v1", AttachReply(key, False, 0, 0))
    assert peers.lead("a0") == lead, "only its lead can send it away"
    await peers.until(4)
    assert peers.counted(4) == set(peers.names)
    for round in (3, 4):
        results = peers.results["v0"][round]
        clusters = sum(each.chunks for each in results.clusters.values()) + sum(
            each.chunks for each in results.contributions.values()
        )
        assert clusters <= len(peers.names) * 16, "nobody is in two clusters"


# -- liars ------------------------------------------------------------------------------------------------------------


class Hostile(CallingClusters):
    """In the middle of a round in which all have places; the voters' calls take messages that a test makes."""

    async def settled(self) -> PeerId:
        """Be in that round; returns the lead of the associate a0."""
        await self.until(2)
        await asyncio.sleep(0.3)
        lead = self.lead("a0")
        assert lead
        return lead

    def call(self, voter: PeerId) -> ClusteredStart:
        call = self.rounds[voter].call
        assert isinstance(call, ClusteredStart)
        return call

    def offer(self, peer: PeerId, lead: PeerId, signer: PeerId = "", **changes: object) -> OfferToLead:
        made = Offer(Member(peer), 100, 8.0, 0.1, True, False, 1e6, ROOT, b"")
        made = replace(made, **changes)  # type: ignore[arg-type]
        message = OfferToLead(self.chains["v0"].head.key, lead, made)
        signature = SimSigner(signer or peer, self.seed).sign(message.signed())
        return replace(message, offer=replace(made, signature=signature))


@simulated(Hostile, 3, 3)
async def test_offer_to_lead_holds_for_its_ends_only(peers: Hostile) -> None:
    lead = await peers.settled()
    call = peers.call(lead)
    other = next(voter for voter in peers.voters if voter != lead)
    for peer, message in [
        ("a1", peers.offer("a0", lead)),  # sent by another peer
        ("a0", peers.offer("a0", other)),  # made for another lead
        ("a0", peers.offer("a0", lead, signer="a1")),
        ("a0", replace(peers.offer("a0", other), lead=lead)),  # another lead's, passed off as one for this one
    ]:
        with pytest.raises(BadPayload):
            call.on_cluster_offer(peer, message)
    call.on_cluster_offer("a0", peers.offer("a0", lead, tokens=500, complete=False))
    call.on_cluster_offer("a0", peers.offer("a0", lead, tokens=400, complete=False))
    assert call._members["a0"].tokens == 500, "an older offer that came again"


@simulated(Hostile, 3, 3)
async def test_offer_without_a_place_is_answered_with_refusal(peers: Hostile) -> None:
    lead = await peers.settled()
    other = next(voter for voter in peers.voters if voter != lead)
    call, sent = peers.call(other), list[tuple[PeerId, Header]]()
    call._post.send = lambda peer, message: sent.append((peer, message))  # type: ignore[method-assign]
    call.on_cluster_offer("a0", peers.offer("a0", other))
    assert "a0" not in call._members
    assert [(peer, type(message)) for peer, message in sent] == [("a0", AttachReply)]


@simulated(Hostile, 3, 3)
async def test_offer_of_another_state_is_left_out(peers: Hostile) -> None:
    lead = await peers.settled()
    call = peers.call(lead)
    call.on_cluster_offer("a0", peers.offer("a0", lead, tokens=1000, state_root=b"?" * 32))
    assert call._made and "a0" not in [offer.member.peer for offer in call._made[1]]
    assert [fault.peer for fault in call._accounting.take()[0]] == ["a0"]
    await peers.until(3)
    assert peers.counted(3) == set(peers.names) - {"a0"}


def clamping() -> Hostile:
    peers = Hostile(3, 3)
    peers.settings = replace(peers.settings, max_weight=3.0)
    return peers


@simulated(clamping)
async def test_boast_does_not_keep_later_offers_of_its_cluster_back(peers: Hostile) -> None:
    """As the only claim so far it counts whole. Later it counts as a plausible one, which is news as well."""
    lead = await peers.settled()
    call = peers.call(lead)
    call.on_cluster_offer("a0", peers.offer("a0", lead, tokens=10**9, complete=False))
    assert call._clusters[lead].tokens == (10**9, 0)
    await asyncio.sleep(0.5)
    assert call._clusters[lead].tokens[0] == 10**9 and 0 < call._clusters[lead].tokens[1] < 1000
    coordinator = peers.call(next(voter for voter in call._order[:2] if voter != lead))
    assert coordinator._clusters[lead] == call._clusters[lead]


@simulated(clamping)
async def test_weights_go_by_the_median_member_of_all_clusters(peers: Hostile) -> None:
    """One slow associate does not clamp the work of a lead that is alone with it."""
    peers.tokens = dict.fromkeys(peers.names, 400) | {"a0": 30, "v0": 2000}
    await peers.until(3)
    results = [peers.results[name][3] for name in peers.names]
    for result in results:
        assert all(result.weights[peer] == min(peers.tokens[peer], 1200) for peer in result.contributions)
        assert result.capped == ({"v0": 2000} if "v0" in result.contributions else {}) and not result.blamed
    assert {peer for result in results for peer in result.weights} == set(peers.names)


@simulated(Hostile, 3, 3)
async def test_cluster_of_another_forged_or_malformed_is_refused(peers: Hostile) -> None:
    await peers.until(2)
    await asyncio.sleep(0.3)
    call, key = peers.call("v0"), peers.chains["v0"].head.key
    made = ClusterOffer(Member("v1"), (1, 0), (1, 0), 0.1, 1e6, 1e6, True, False, ROOT, bytes(32), b"")

    def ready(lead: Member, signer: PeerId, tokens: tuple[int, ...] = (1, 0)) -> ClusterReady:
        message = ClusterReady(key, replace(made, lead=lead, tokens=tokens))
        signature = SimSigner(signer, peers.seed).sign(message.signed())
        return replace(message, offer=replace(message.offer, signature=signature))

    before = dict(call._clusters)
    for peer, message in [
        ("v2", ready(Member("v1"), "v1")),
        ("a0", ready(Member("a0"), "a0")),
        ("v1", ready(Member("v1", 1), "v1")),
        ("v1", ready(Member("v1"), "v2")),
        ("v1", ready(Member("v1"), "v1", ())),
        ("v1", ready(Member("v1"), "v1", (1, 0, 0))),
    ]:
        with pytest.raises(BadPayload):
            call.on_cluster_offer(peer, message)
    assert call._clusters == before


@simulated(Hostile, 3, 3)
async def test_voter_that_heard_of_no_cluster_is_told(peers: Hostile) -> None:
    """It has offered its own work as in a flat round. What it offers then is its cluster."""
    await peers.until(2)
    await asyncio.sleep(0.3)
    call = next(peers.call(voter) for voter in peers.voters if peers.call(voter)._clusters)
    me, other = call._me.peer, next(voter for voter in peers.voters if voter != call._me.peer)
    del call._clusters[other]
    sent = list[tuple[PeerId, Header]]()
    call._post.send = lambda peer, message: sent.append((peer, message))  # type: ignore[method-assign]
    flat = Offer(Member(other), 100, 8.0, 0.1, True, False, 1e6, ROOT, b"")
    call.on_ready(other, flat)
    assert sent == [(other, ClusterReady(call._key, call._clusters[me]))] and other not in call._clusters
    with pytest.raises(BadPayload):
        call.on_ready("a0", replace(flat, member=Member("a0")))


@simulated(Hostile, 3, 3)
async def test_cluster_is_complete_exactly_when_due(peers: Hostile) -> None:
    """A difference of times is rounded: a timer that is set by it may come due a little too early, without end."""
    await peers.until(1)
    peers.train_seconds = dict.fromkeys(peers.names, 1e3)
    await peers.until(2)
    lead = peers.lead("a0")
    assert lead
    call, draw = peers.call(lead), random.Random(5)
    await asyncio.sleep(0.3)
    vars(call).update(_announce=lambda offer: None, _call_after=lambda: None)  # else the round would be called
    for _ in range(16):
        call._began, after = peers.now - draw.random(), draw.uniform(1, 2)
        vars(call).update(_complete_after=lambda after=after: after)
        call._consider()
        assert call._look and not call._offers[lead].complete
        await asyncio.sleep(4.0)
        assert call._look is None and call._offers[lead].complete


@simulated(Hostile, 3, 3)
async def test_associate_takes_no_offers(peers: Hostile) -> None:
    """What a voter sends it by mistake changes nothing of its own."""
    await peers.until(2)
    await asyncio.sleep(0.3)
    call, ready = peers.call("a0"), next(each for each in map(peers.call, peers.voters) if each._clusters)
    call.on_cluster_offer(ready._me.peer, ClusterReady(ready._key, ready._clusters[ready._me.peer]))
    await peers.until(3)
    assert peers.counted(3) == set(peers.names)


@simulated(Hostile, 3, 3)
async def test_statement_about_resting_is_of_members_alone(peers: Hostile) -> None:
    """One of a peer that has just lost its place is no fault of it."""
    lead = await peers.settled()
    call, strange = peers.call(lead), RestingMembers()
    statement = strange.state(call._key, Member("a0"), True, SimSigner("a0", peers.seed))
    with pytest.raises(BadPayload):
        call.on_resting("a1", statement)
    with pytest.raises(BadPayload):
        call.on_resting("a0", replace(statement, signature=b"?"))
    call.on_resting("a0", statement)
    assert "a0" not in call._working_associates() and "a0" in call._resting.peers()
    other = peers.call(next(voter for voter in peers.voters if voter != lead))
    other.on_resting("a0", statement)
    assert "a0" not in other._resting.peers()


@simulated(Hostile, 3, 3)
async def test_standby_tells_associates_of_lost_leads(peers: Hostile) -> None:
    await peers.until(2)
    search = peers.averagers["a0"]._attachment
    assert search and search.search.lead and search.search.standby
    lead, standby = search.search.lead.peer, search.search.standby.peer
    assert "a0" in peers.call(lead).to_tell() and "a0" not in peers.call(standby).to_tell()
    peers.network.contacts.views[standby].lose(lead)
    assert "a0" in peers.call(standby).to_tell()
    assert not set(peers.call(lead).to_tell()) & set(peers.voters)


@simulated(Hostile, 3, 3)
async def test_peer_that_calls_no_clusters_hears_of_leads_that_leave(peers: Hostile) -> None:
    """It judges the next roster: it would blame a coordinator for leaving them out."""
    lead = await peers.settled()
    offer = replace(peers.call(lead)._clusters[lead], leaving=True)
    ready = ClusterReady(peers.chains[lead].head.key, offer)
    signed = replace(ready, offer=replace(offer, signature=SimSigner(lead, peers.seed).sign(ready.signed())))
    assert lead not in peers.call("a0").leaving()
    peers.call("a0").on_cluster_offer(lead, signed)
    assert lead in peers.call("a0").leaving()


@simulated(Hostile, 3, 3)
async def test_associate_that_comes_after_a_repair_is_told_of_it_once(peers: Hostile) -> None:
    """It was in the cluster of a lead that it has lost, and waits for the reducer that was replaced."""
    lead = await peers.settled()
    voter = next(name for name in peers.voters if name != lead and "a0" not in peers.averagers[name].followers())
    await until(lambda: isinstance(peers.call(voter).resolved, ResolvedClusters), 10.0)
    call, sent = peers.call(voter), list[tuple[PeerId, Header]]()
    assert isinstance(call.resolved, ResolvedClusters)
    vars(call._post).update(send=lambda peer, message: sent.append((peer, message)))
    plan = call.resolved.plan
    call.cluster.pass_on(replace(call.resolved, plan=replace(plan, version=plan.version + 1)))
    sent.clear()
    attachment = peers.averagers[voter]._attachment
    assert attachment and "a0" not in call.cluster.peers
    search, key = peers.averagers["a0"]._attachment, peers.chains["a0"].head.key
    assert search
    attach = Attach(key, Member("a0"), voter, search.search.known_since, False)
    for _ in range(2):
        assert attachment.book.take(attach, peers.chains[voter].lineage_of).accepted
        attachment._notify()
    told = [message for peer, message in sent if peer == "a0" and isinstance(message, ClusterVersion)]
    assert [message.version for message in told] == [plan.version + 1]
