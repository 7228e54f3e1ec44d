"""Peers that ask voters for places over a simulated network, and deaths at each message of that."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest

from protocols.base import Member, PeerId, PeerSilent, Settings
from protocols.butterfly import clusters
from protocols.butterfly.attaching import ATTACH, Attachment
from protocols.butterfly.attachment import IDLE_ROUNDS, Attach, AttachReply
from protocols.history.chain import genesis
from protocols.streams.endpoint import ProtocolEndpoint
from tests.sim.averaging import RUN
from tests.sim.host import sim_host
from tests.sim.swarm import SimSwarm
from tests.support.simulated import simulated

VOTERS = tuple(Member(f"v{index}") for index in range(4))
ASSOCIATES = tuple(Member(f"a{index}") for index in range(3))
ROUND_SECONDS = 2.0
FIRST = 1
"""The round from which the orders of the voters are drawn."""
LAST = FIRST + 2 * IDLE_ROUNDS
MESSAGES, LEAST_MESSAGES = 24, 5
"""At most so many messages of a peer are struck; the search of an associate has at least so many."""
SETTINGS = Settings("fp32", (64,), 16)


class Places(SimSwarm):
    """Voters and associates in rounds of two seconds, without averaging: associates offer something in each."""

    def __init__(self) -> None:
        super().__init__(latency_seconds=0.02)
        self.round, self.roster = 0, VOTERS
        self.peers = dict[PeerId, Attachment]()

    async def set_up(self) -> None:
        for member in (*self.roster, *ASSOCIATES):
            self.start(member.peer)

    def start(self, peer: PeerId) -> None:
        """Start a peer, or start it again after its death."""
        again = peer in self.network.nodes
        transport = self.network.restart(peer) if again else self.network.join(peer)
        settings = replace(SETTINGS, incarnation=self.network.nodes[peer].incarnation)
        endpoint = ProtocolEndpoint(sim_host(self.network, transport, self.seed, self.entries), settings)
        with self.network.nodes[peer].process.entered():
            self.peers[peer] = attachment = Attachment(endpoint, len(VOTERS), self._lineage_of)
            self.spawn(peer, self._rounds(attachment))

    def _lineage_of(self, round: int) -> bytes | None:
        return round.to_bytes(32, "big") if round <= self.round else None

    async def _rounds(self, attachment: Attachment) -> None:
        start = genesis(RUN, "run", self.roster)
        while True:
            key = replace(start.key, round=self.round, lineage=self.round.to_bytes(32, "big"))
            attachment.begin(replace(start, key=key, roster=self.roster))
            ends = ROUND_SECONDS * (self.round + 1)
            offers = asyncio.get_running_loop().call_at(ends - ROUND_SECONDS / 2, self._offer, attachment)
            await attachment.run(ends)
            offers.cancel()
            await asyncio.sleep(0.001)  # the round is over

    def _offer(self, attachment: Attachment) -> None:
        """What a round does with the work of associates."""
        me = attachment.search.me
        lead = attachment.search.lead
        if lead and self.alive(lead.peer) and not self.peers[lead.peer].book.offered(me):
            head = attachment._head
            assert head
            attachment.take_refusal(lead.peer, AttachReply(head.key, False, 0, 0))

    def alive(self, peer: PeerId) -> bool:
        return self.network.nodes[peer].process.alive

    async def until(self, round: int) -> None:
        while self.round < round:
            await asyncio.sleep(ROUND_SECONDS * (self.round + 1) - self.now)
            self.round += 1
        await asyncio.sleep(ROUND_SECONDS * 0.9)

    def check(self) -> None:
        """Each associate has places with a lead and a standby that know of it, and nowhere else."""
        books = {peer: each.book for peer, each in self.peers.items() if self.alive(peer)}
        for member in ASSOCIATES:
            peer, each = member.peer, self.peers[member.peer]
            if not self.alive(peer) or each.search.me in self.roster:
                continue
            lead, standby = each.search.lead, each.search.standby
            assert lead and standby and lead != standby, f"{peer}: {lead}, {standby}"
            leads = [voter for voter, book in books.items() if each.search.me in book.associates()]
            standbys = [voter for voter, book in books.items() if book.stands_by().get(each.search.me)]
            assert leads == [lead.peer], f"{peer} has places with {leads}, and thinks {lead}"
            assert standby.peer in standbys, f"{peer} thinks that {standby} stands by: {standbys}"


Fault = Callable[[Places, PeerId], None]


def die(places: Places, victim: PeerId) -> None:
    places.network.kill(victim)


def die_and_restart(places: Places, victim: PeerId) -> None:
    places.network.kill(victim)
    asyncio.get_running_loop().call_later(0.5, places.start, victim)


def fall_silent(places: Places, victim: PeerId) -> None:
    """For longer than a voter has to answer, and for less than the failure detector takes."""
    others = [peer for peer in places.network.nodes if peer != victim]
    places.cut([victim], others)
    asyncio.get_running_loop().call_later(4.5, places.heal, [victim], others)


def play(victim: PeerId, number: int, fault: Fault) -> bool:
    """Let a fault strike a peer at its message with this number. Returns whether it came to so many."""
    struck = False

    def watch(peer: PeerId, count: int, way: str, other: PeerId) -> None:
        nonlocal struck
        if peer == victim and count == number and not struck:
            struck = True
            fault(places, victim)

    async def main() -> None:
        places.network.watch = watch
        await places.until(LAST)
        places.check()

    places = Places()
    places.play(main)
    return struck


def roles() -> dict[str, PeerId]:
    """The first associate, its lead and its standby, in a calm play."""

    async def main() -> None:
        await places.until(FIRST)

    places = Places()
    places.play(main)
    search = places.peers["a0"].search
    assert search.lead and search.standby
    return {"associate": "a0", "lead": search.lead.peer, "standby": search.standby.peer}


@pytest.mark.parametrize("role", ["associate", "lead", "standby"])
@pytest.mark.parametrize("fault", [die, die_and_restart, fall_silent])
def test_fault_at_each_message_leaves_all_with_places(role: str, fault: Fault) -> None:
    victim, number = roles()[role], 1
    while number <= MESSAGES and play(victim, number, fault):
        number += 1
    assert number > LEAST_MESSAGES


@simulated(Places)
async def test_all_get_lead_and_standby_within_a_round(places: Places) -> None:
    await places.until(FIRST)
    places.check()
    assert {place for each in places.peers.values() for place in each.book.stands_by()} == set(ASSOCIATES)


@simulated(Places)
async def test_new_epoch_moves_and_gives_old_places_up(places: Places) -> None:
    await places.until(70)
    places.check()


class LargePlaces(Places):
    """Associates see the voters of their ties and no others, as in a run too large for each to watch all."""

    def __init__(self) -> None:
        super().__init__()
        self.roster = tuple(Member(f"v{index}") for index in range(10, 30))
        voters = [member.peer for member in self.roster]
        self.near = {**{peer: dict.fromkeys(voters) for peer in voters}, **{member.peer: {} for member in ASSOCIATES}}
        self.network.contacts.near, self.network.contacts.greets_others = self.near.__getitem__, True

    async def set_up(self) -> None:
        await super().set_up()
        asyncio.get_running_loop().create_task(self._meet())

    async def _meet(self) -> None:
        while True:
            for peer, attachment in self.peers.items():
                for other in attachment.ties():
                    self.near[peer][other] = self.near[other][peer] = None
                self.network.contacts.acquaint(peer, attachment.ties())
            await asyncio.sleep(0.25)


@simulated(LargePlaces)
async def test_voters_that_did_not_watch_a_peer_before_its_epoch_give_it_a_place(places: LargePlaces) -> None:
    """They have met it: it greeted them. Else only those that it asked before would take it."""
    await places.until(70)
    places.check()
    voters = [member.peer for member in places.roster]
    for member in ASSOCIATES:
        begins = clusters.epoch_start(member.peer, 70)
        first = clusters.lead_order(begins.to_bytes(32, "big"), member.peer, voters)[:2]
        assert {*places.peers[member.peer].leads()} == {*first}


@simulated(Places)
async def test_lead_that_leaves_the_roster_is_left(places: Places) -> None:
    await places.until(FIRST)
    lead = places.peers["a0"].search.lead
    assert lead
    places.roster = tuple(member for member in VOTERS if member != lead)
    await places.until(FIRST + 2)
    places.check()
    assert places.peers[lead.peer].book.associates() == ()


@simulated(Places)
async def test_admitted_associate_has_no_places_left(places: Places) -> None:
    await places.until(FIRST)
    places.roster = (ASSOCIATES[0], *VOTERS)
    await places.until(FIRST + 2)
    places.check()
    assert not any(ASSOCIATES[0] in each.book.associates() for each in places.peers.values())
    assert not any(ASSOCIATES[0] in each.book.stands_by() for each in places.peers.values())


@pytest.mark.parametrize("sender", [VOTERS[1], Member("a0", 3)], ids=["name", "incarnation"])
@simulated(Places)
async def test_request_in_another_name_is_refused(places: Places, sender: Member) -> None:
    await places.until(FIRST)
    voter, asker = places.peers["v0"], places.peers["a0"]
    assert asker._head
    before = voter.book.associates()
    attach = Attach(asker._head.key, sender, "v0", 0, False)
    with pytest.raises(PeerSilent):
        async with asker._endpoint.open("v0", ATTACH, places.now + 1.0) as stream:
            await stream.send(attach)
            await stream.receive(512)
    assert voter.book.associates() == before
    named = [fault.peer for fault in voter._endpoint.accounting.take()[0]]
    assert named == (["a0"] if sender == VOTERS[1] else []), "another incarnation may only be late"
