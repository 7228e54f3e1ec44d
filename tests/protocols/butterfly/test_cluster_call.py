"""Rounds of clusters from the search for a lead to the decision, and the same with faults and liars."""

from __future__ import annotations

import asyncio
import functools
import random
from dataclasses import replace

import pytest

from protocols import wire
from protocols.allreduce.all_reduce import AllReduce
from protocols.allreduce.clustered_all_reduce import UNTOLD_SECONDS
from protocols.allreduce.clustered_plan import ClusterOffer, ClusterReady, OfferToLead
from protocols.base import BadPayload, Buffer, Header, Host, Member, PeerId, Vector
from protocols.butterfly.attachment import UNCOUNTED_ROUNDS, Attach, AttachReply
from protocols.butterfly.call import RestingMembers
from protocols.butterfly.cluster_call import ClusteredStart
from protocols.butterfly.round import Round
from protocols.streams.framing import FramedStream
from protocols.wire import Chunk, Offer, Partial
from tests.sim.host import SimSigner
from tests.sim.transport import SimTransport
from tests.support.calling_clusters import ROOT, CallingClusters
from tests.support.disguises import sending
from tests.support.long import diagonal
from tests.support.simulated import simulated
from tests.support.waiting import until

ROLES, FAULTS = ("lead", "standby", "associate"), ("death", "restart", "stall", "silence")
PLACES = (0.2, 0.7)  # of the round's messages of a peer
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
    ask = Round._ask_admission

    def asks(attempt: Round) -> None:
        asked.append(peers.now)
        ask(attempt)

    async def main() -> None:
        await peers.until(2)
        assert asked, "before they have leads they do"
        began = peers.now
        await peers.until(5)
        assert not [at for at in asked if at > began]

    monkeypatch.setattr(Round, "_ask_admission", asks)
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


def exchange(peers: CallingClusters, name: PeerId, round: int) -> AllReduce | None:
    session = peers.rounds[name]
    return session.exchange if session.head.key.round == round else None


class Long(CallingClusters):
    """The data phase takes a quarter of a second."""

    def __init__(self) -> None:
        super().__init__(4, 8, elements=60_000, chunk=5_000)

    def declared_norm(self, vector: Vector) -> float:
        return 2.0 * float(vector.norm())


@simulated(Long)
async def test_repair_gets_to_associates_that_have_a_new_lead(peers: Long) -> None:
    """They leave the voter that stood by at once. Their work counts in the part that the lost coordinator reduced."""
    await peers.until(2)
    await until(lambda: all(exchange(peers, name, 3) for name in peers.names), 10.0)
    lost = peers.rounds["v0"].vote.tally.coordinator(0)
    vote = next(peers.rounds[name].vote for name in peers.voters if name != lost)
    moved = {name for name in peers.associates if peers.lead(name) == lost}
    peers.network.kill(lost)
    killed = peers.now
    await peers.until(3)
    assert vote.paxos.ballot > 0 and moved and {peers.lead(name) for name in moved} <= {*peers.voters} - {lost}
    assert peers.now - killed < CALM_SECONDS
    parts = [peers.results[name][3].contributions[name] for name in sorted(moved)]
    assert all(each.chunks_counted == each.chunks for each in parts)


@pytest.mark.parametrize(("alone", "seconds"), [(True, 0.5), (False, 0.5 + UNTOLD_SECONDS)])
@simulated(CallingClusters, 4, 8)
async def test_cluster_whose_lead_died_with_the_plan_is_not_waited_for(
    peers: CallingClusters, alone: bool, seconds: float
) -> None:
    """Nobody else can tell it the plan. The others hear nothing of it, and see that its lead is gone."""
    await peers.until(2)
    await until(lambda: all(peers.rounds[name].head.key.round == 3 for name in peers.names), 10.0)
    leads, first = {peers.lead(name) for name in peers.associates}, peers.rounds["v0"].vote.tally.coordinator(0)
    lost = next(name for name in peers.voters if name != first and (name in leads) != alone)
    for name in peers.associates:
        peers.network.block(lost, name)
    await until(lambda: all(exchange(peers, name, 3) for name in peers.voters), 10.0)
    peers.network.kill(lost)
    killed = peers.now
    await until(lambda: all(len(peers.chains[name]) > 3 for name in peers.voters if name != lost), 10.0)
    assert peers.now - killed < seconds


@simulated(CallingClusters, 4, 8)
async def test_standby_tells_the_decision_before_a_stopped_lead_is_lost(peers: CallingClusters) -> None:
    await peers.until(2)
    lead = peers.lead("a0")
    assert lead
    await until(lambda: (held := exchange(peers, "a0", 3)) is not None and held.complete, 10.0)
    peers.network.block(lead, "a0")
    began = peers.now
    await until(lambda: len(peers.chains["a0"]) > 3, 10.0)
    assert peers.now - began < 2.0 and peers.lead("a0") == lead, "its failure detector takes longer"


@simulated(CallingClusters, 4, 8)
async def test_lead_behind_which_no_work_counts_is_left(peers: CallingClusters) -> None:
    """It is alive, and takes the work, but tells this associate nothing."""
    await peers.until(2)
    lead = peers.lead("a0")
    assert lead and "a0" in peers.counted(2)
    post = peers.averagers[lead]._post
    send = post.send
    vars(post).update(send=lambda peer, message: None if peer == "a0" else send(peer, message))
    await until(lambda: peers.lead("a0") not in (lead, None), 30.0)  # before its epoch ends
    last = len(peers.chains["a0"])
    await peers.until(last + 2)
    assert "a0" in peers.counted(last + 2)


class Pair(CallingClusters):
    """The only associate aggregates its cluster's work, and sends none of it that can be used."""

    def __init__(self) -> None:
        super().__init__(2, 1)

    def host_on(self, transport: SimTransport) -> Host:
        async def send(stream: FramedStream, header: Header, payload: Buffer) -> None:
            not_a_number = b"\xff" * len(payload)
            await stream.send(header, not_a_number if isinstance(header, Partial) else payload)

        if transport.me == "a0":
            transport.disguise = sending(send)
        return super().host_on(transport)


@simulated(Pair)
async def test_lead_parts_from_an_associate_that_wastes_its_work(peers: Pair) -> None:
    """The others hear how it lies; the lead sees that nothing of its own counts."""
    await until(lambda: peers.lead("a0") is not None, 10.0)
    first = len(peers.chains["v0"]) + 1
    last = first + 2 * UNCOUNTED_ROUNDS + 2  # both voters may lead it once
    await peers.until(last)
    assert peers.counted(first) != {"v0", "v1"} == peers.counted(last)


class LateLead(CallingClusters):
    """All are honest. The data of v1 comes too late for its cluster's aggregators."""

    def host_on(self, transport: SimTransport) -> Host:
        async def send(stream: FramedStream, header: Header, payload: Buffer) -> None:
            await asyncio.sleep(0.7 if isinstance(header, Chunk) else 0.0)
            await stream.send(header, payload)

        if transport.me == "v1":
            transport.disguise = sending(send)
        return super().host_on(transport)


@simulated(LateLead, 4, 12)
async def test_late_lead_keeps_associates_whose_work_counts(peers: LateLead) -> None:
    await peers.until(2)
    mine = {name for name in peers.associates if peers.lead(name) == "v1"}
    last = 3 + UNCOUNTED_ROUNDS
    await peers.until(last)
    assert mine and all("v1" not in peers.counted(round) >= mine for round in range(3, last + 1))
    assert {name for name in peers.associates if peers.lead(name) == "v1"} == mine


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


@simulated(CallingClusters, 3, 2)
async def test_lead_is_found_although_a_voter_never_answers(peers: CallingClusters) -> None:
    """Rounds end before it counts as silent."""
    await peers.until(2)
    lead = peers.lead("a0")
    assert lead
    peers.network.block(lead, "a0")
    await peers.until(8)
    last = len(peers.chains["a0"])
    await peers.until(last + 2)
    assert "a0" in peers.counted(last + 2)


# -- faults -----------------------------------------------------------------------------------------------------------

ROUND, LAST = 3, 11
"""The messages of the one are struck; in the other all is well again."""
SECONDS = {"restart": 1.0, "stall": 4.0, "silence": 7.0}
"""How long a fault lasts: a stall is shorter than the failure detector takes."""


class Struck(CallingClusters):
    """A fault strikes a peer at its message with this number."""

    def __init__(self, victim: PeerId = "", number: int = 0, fault: str = "") -> None:
        super().__init__(3, 6)
        self._victim, self._number, self._fault = victim, number, fault
        self.network.watch = self._watch

    def _watch(self, peer: PeerId, number: int, way: str, other: PeerId) -> None:
        if (peer, number) == (self._victim, self._number):
            self.network.watch = None
            self._strike(asyncio.get_running_loop())

    def _strike(self, loop: asyncio.AbstractEventLoop) -> None:
        others = [name for name in self.names if name != self._victim]
        if self._fault in ("death", "restart"):
            self.network.kill(self._victim)
        else:
            self.cut([self._victim], others)
            loop.call_later(SECONDS[self._fault], self.heal, [self._victim], others)
        if self._fault == "restart":
            loop.call_later(SECONDS["restart"], self.start, self._victim)


@functools.cache
def calm() -> tuple[dict[str, PeerId], dict[PeerId, range]]:
    """The peers of each role in the round, and the numbers of its messages."""
    peers, roles, starts, ends = Struck(), dict[str, PeerId](), dict[PeerId, int](), dict[PeerId, int]()

    async def main() -> None:
        await peers.until(ROUND - 1)
        starts.update({name: peers.network.nodes[name].messages for name in peers.names})
        search = peers.averagers["a0"]._attachment
        assert search and search.search.lead and search.search.standby
        roles.update(associate="a0", lead=search.search.lead.peer, standby=search.search.standby.peer)
        await peers.until(ROUND)
        ends.update({name: peers.network.nodes[name].messages for name in peers.names})

    peers.play(main)
    return roles, {name: range(starts[name] + 1, ends[name] + 1) for name in peers.names}


@diagonal("role, fault, place", ROLES, FAULTS, PLACES)
def test_fault_in_a_round_is_over_some_rounds_later(role: str, fault: str, place: float) -> None:
    """All follow one branch, and the work of all that are alive counts again."""
    roles, messages = calm()
    victim = roles[role]
    peers = Struck(victim, messages[victim][int(place * len(messages[victim]))], fault)

    async def main() -> None:
        await peers.until(LAST)
        assert peers.network.watch is None, "not struck"
        alive = {name for name in peers.names if peers.alive(name)}
        assert peers.counted(LAST) == alive, [sorted(peers.counted(round)) for round in range(ROUND, LAST + 1)]

    peers.play(main)
