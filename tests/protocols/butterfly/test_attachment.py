"""Places in clusters: who gets one, when it ends, and how an associate finds another one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from protocols.base import Member, PeerId, RoundKey
from protocols.butterfly import attachment, clusters
from protocols.butterfly.attachment import Attach, AttachReply, ClusterBook, LeadSearch, PlaceRequest
from protocols.butterfly.clusters import CLUSTER_ROOM, LITTLE_ROOM

VOTERS = tuple(Member(f"v{index}") for index in range(5))
LEAD = VOTERS[0]
ME = Member("associate")
OTHERS = ("p", "s", *(f"p{index}" for index in range(100)))
"""Peers that were there before the voter was."""


def lineage(round: int) -> bytes:
    return round.to_bytes(32, "big")


def key(round: int) -> RoundKey:
    return RoundKey(bytes(32), "run", lineage(round), round)


def book(round: int = 5, met: Sequence[PeerId] = OTHERS) -> ClusterBook:
    made = ClusterBook(LEAD)
    made.begin(key(0), VOTERS, met)
    made.begin(key(round), VOTERS, ())
    return made


def ask(peer: str, round: int = 5, lead: Member = LEAD, since: int = 0, incarnation: int = 0) -> Attach:
    return Attach(key(round), Member(peer, incarnation), lead.peer, since, False)


def accepts(where: ClusterBook, attach: Attach) -> bool:
    return where.take(attach, lineage).accepted


def fill(where: ClusterBook, places: int) -> None:
    for peer in OTHERS[:places]:
        assert accepts(where, ask(peer))


# -- the book ---------------------------------------------------------------------------------------------------------


def test_last_places_are_for_those_that_rank_lead_first() -> None:
    full, peers = book(), [voter.peer for voter in VOTERS]
    fill(full, CLUSTER_ROOM - LITTLE_ROOM)
    for peer in OTHERS[CLUSTER_ROOM:]:
        if len(full.associates()) == CLUSTER_ROOM:
            break
        seed = clusters.seed_round(peer, 5, 0)
        assert seed is not None
        ranked = clusters.lead_order(lineage(seed), peer, peers)[: clusters.FIRST_CHOICES]
        assert accepts(full, ask(peer)) == (LEAD.peer in ranked)
    assert not accepts(full, ask(OTHERS[-1]))
    renewed = full.associates()[0].peer
    assert full.take(ask(renewed), lineage) == AttachReply(key(5), True, CLUSTER_ROOM, 0), "it has a place"


@pytest.mark.parametrize(
    "attach",
    [
        replace(ask("p"), key=replace(key(5), lineage=bytes(31) + b"?")),  # on another branch
        ask("p", round=7),  # further than this voter can judge
        ask("v3"),
        ask("v3", incarnation=1),  # a restarted voter, whose place in the roster is not free
        ask("p", lead=Member("nobody")),  # would stand by for one that does not vote
        ask("p", since=5),  # its order is not drawn yet
    ],
    ids=lambda attach: f"{attach.sender} at {attach.key.round} with {attach.lead}",
)
def test_unfounded_request_gets_no_place(attach: Attach) -> None:
    assert not accepts(book(), attach)


def test_id_made_to_fit_a_known_lineage_is_refused() -> None:
    """A voter that first met a peer in this round believes no earlier acquaintance."""
    here = book(round=70, met=())
    claim = ask("p", round=70, since=3)
    assert here.take(claim, lineage) == AttachReply(key(70), False, 0, 70)
    here.begin(key(71), VOTERS, ())
    assert not accepts(here, ask("p", round=71, since=3)) and accepts(here, ask("p", round=71, since=70))


def test_voter_believes_peers_that_were_there_before_it() -> None:
    here = ClusterBook(LEAD)
    here.begin(key(70), VOTERS, ["p"])
    assert accepts(here, ask("p", round=70, since=3))


def test_place_ends_with_life_epoch_and_sides() -> None:
    for change in ("death", "restart", "epoch", "admitted", "evicted", "left", "idle"):
        here = book()
        assert accepts(here, ask("p")) and accepts(here, replace(ask("s"), lead=VOTERS[1].peer))
        here.offered(Member("p"))
        begins = clusters.epoch_end("p", 5)
        match change:
            case "death":
                here.lose({*VOTERS, Member("s")})
            case "restart":
                here.lose({*VOTERS, Member("p", 1)})
            case "epoch":
                for round in range(6, begins + 3):
                    assert here.associates() == (Member("p"),), round
                    here.offered(Member("p"))
                    here.begin(key(round), VOTERS, ())
            case "admitted":
                here.begin(key(6), (*VOTERS, Member("p", 1)), ())
            case "evicted":
                here.begin(key(6), VOTERS[1:], ())
                assert not accepts(here, ask("p", round=6)), "it has no cluster any more"
            case "left":
                here.take(replace(ask("p"), lead=""), lineage)
            case "idle":
                here.begin(key(5 + attachment.IDLE_ROUNDS + 1), VOTERS, ())
        assert here.associates() == () and not here.offered(Member("p")), change


def test_refused_for_the_next_epoch_a_peer_keeps_its_place_until_the_last_one_ends() -> None:
    """Else its work is lost for as long as no other voter has room."""
    peers = [voter.peer for voter in VOTERS]

    def ranks_last(peer: PeerId) -> bool:
        return clusters.lead_order(lineage(clusters.epoch_end(peer, 5)), peer, peers)[-1] == LEAD.peer

    here, (mover, *_) = book(), filter(ranks_last, OTHERS)
    begins = clusters.epoch_end(mover, 5)
    assert accepts(here, ask(mover))
    for round in range(6, begins + attachment.GRACE_ROUNDS):
        assert all(map(here.offered, here.associates()))
        here.begin(key(round), VOTERS, ())
        for peer in OTHERS if round == begins else ():
            if peer != mover and len(here.associates()) < CLUSTER_ROOM:
                accepts(here, ask(peer, round))
        if round >= begins:
            assert not accepts(here, ask(mover, round)) and here.offered(Member(mover)), round
    here.begin(key(begins + attachment.GRACE_ROUNDS), VOTERS, ())
    assert not here.offered(Member(mover))


def test_standby_place_replaces_the_one_in_the_cluster() -> None:
    here = book()
    assert accepts(here, ask("p")) and accepts(here, ask("p", lead=VOTERS[1]))
    assert here.associates() == () and here.stands_by() == {Member("p"): VOTERS[1].peer}
    here.begin(key(6), (LEAD, *VOTERS[2:]), ())
    assert here.stands_by() == {}, "the lead left the roster"


def test_lead_bars_those_that_aggregated_in_each_round_in_which_it_did_not_count() -> None:
    """Also one that has given its place up meanwhile. Others keep theirs, and those barred may still name a standby."""
    here = book()
    fill(here, 3)  # "p", "s" and "p0"
    rounds = attachment.UNCOUNTED_ROUNDS
    for aggregators in ["p", "s", "p1"], ["p", "p1"], ["p", "s", "p1"]:
        assert accepts(here, ask("p")) and len(here.associates()) == 3
        here.count(False, aggregators)
    assert {member.peer for member in here.associates()} == {"s", "p0"}
    barred = {peer for peer in ("p", "p1", "s") if not accepts(here, ask(peer))}
    assert barred == {"p", "p1"} and accepts(here, replace(ask("p"), lead=VOTERS[1].peer))
    for counted in [False] * (rounds - 1) + [True] + [False] * (rounds - 1):
        here.count(counted, ["s"])
    assert accepts(here, ask("s")), "one round counted"


def test_rounds_of_a_former_lead_do_not_count_against_the_next() -> None:
    search = attached()
    for _ in range(attachment.UNCOUNTED_ROUNDS - 1):
        search.count(False)
    search.refused_by(search.lead.peer if search.lead else "")
    while not search.lead:
        for each in search.due(0.0):
            if each.lead:
                answer(search, each)
    search.count(False)
    assert search.lead


# -- the search -------------------------------------------------------------------------------------------------------


def begun(round: int = 0, roster: tuple[Member, ...] = VOTERS) -> LeadSearch:
    search = LeadSearch(ME)
    search.begin(key(0), roster, len(VOTERS), lineage)
    if round:
        search.begin(key(round), roster, len(VOTERS), lineage)
    return search


def order(round: int) -> tuple[PeerId, ...]:
    return clusters.lead_order(lineage(round), ME.peer, [voter.peer for voter in VOTERS])


def answer(search: LeadSearch, asked: PlaceRequest, accepted: bool = True, fill: int = 3, since: int = 0) -> None:
    search.answered(asked, Member(asked.voter), AttachReply(key(0), accepted, fill, since))


def attached(round: int = 1) -> LeadSearch:
    search = begun(round)
    for each in search.due(0.0):
        answer(search, each)
    (standby,) = search.due(0.0)
    answer(search, standby)
    assert search.lead and search.standby and search.due(0.0) == [] and search.wakes_at() == math.inf
    return search


def test_associate_joins_emptier_and_keeps_other_as_standby() -> None:
    search = begun(1)
    first, second = order(1)[:2]
    assert search.due(0.0) == [PlaceRequest(first, first), PlaceRequest(second, second)] and search.due(0.0) == []
    answer(search, PlaceRequest(first, first), fill=9)
    assert search.lead is None and search.wakes_at() == math.inf
    answer(search, PlaceRequest(second, second), fill=8)
    assert search.lead == Member(second)
    assert search.due(0.0) == [PlaceRequest(first, second)], "asked to stand by, which gives its place back"
    answer(search, PlaceRequest(first, second))
    assert search.standby == Member(first) and search.wanted() == (second, first)


def test_first_round_and_free_places_in_roster_ask_nobody() -> None:
    assert begun().due(0.0) == [], "the order is drawn from the next round on"
    small = VOTERS[:4]
    search = begun(1, small)
    assert search.due(0.0) == [] and search.wakes_at() == math.inf
    search.begin(key(1), small, len(VOTERS), lineage)
    assert search.due(0.0) == [], "another attempt at the same round"
    search.begin(key(2), small, len(VOTERS), lineage)
    assert len(search.due(0.0)) == 2, "two records have not admitted it"


def test_refused_by_all_asks_again_after_growing_pauses() -> None:
    search, now, asked, pauses = begun(1), 0.0, list[PeerId](), list[float]()
    while len(pauses) < 8:
        for each in search.due(now):
            if each.lead:
                asked.append(each.voter)
                answer(search, each, accepted=False) if len(asked) % 2 else search.failed(each)
        if not search._asked and search.wakes_at() > now:
            pauses.append(search.wakes_at() - now)
            now = search.wakes_at()
    assert asked[:10] == [*order(1), *order(1)][:10]
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]


def test_request_that_a_round_broke_off_is_made_again() -> None:
    """Nothing else would end it: the peer would have no lead until its next epoch. A voter that has not answered comes
    last, since it may be silent for longer than a round lasts.
    """
    search = begun(1)
    first, second = search.due(0.0)
    answer(search, first)
    search.begin(key(2), VOTERS, len(VOTERS), lineage)
    assert search.due(0.0) == [first, PlaceRequest(second.voter, "")]
    answer(search, first)
    assert search.lead == Member(first.voter)


def test_vain_search_for_a_standby_delays_none_for_a_lead() -> None:
    search, now = attached(), 0.0
    lead, standby = search.lead, search.standby
    assert lead and standby
    search.see({*VOTERS} - {standby})
    while (wakes_at := search.wakes_at()) - now < 8.0:
        now = max(now, wakes_at)
        for each in search.due(now):
            if each.lead:
                answer(search, each, accepted=False)
    search.refused_by(lead.peer)
    assert [each.voter == each.lead for each in search.due(now) if each.lead]


def test_voter_that_comes_ends_the_pause() -> None:
    """A peer that was cut off would else have no lead for half a minute more, which may be many rounds."""
    search, now = attached(), 0.0
    search.see(())
    while (wakes_at := search.wakes_at()) - now < 8.0:
        now = max(now, wakes_at)
        for each in search.due(now):
            if each.lead:
                search.failed(each)
    back = Member(order(1)[-1], 1)
    assert not search.see({Member("p")}) and search.wakes_at() > now
    assert search.see({back}) and search.wakes_at() <= now and search.due(now)
    assert not search.see({back})


@pytest.mark.parametrize("how", ["death", "restart", "evicted", "says so"])
def test_lost_lead_is_replaced_at_once(how: str) -> None:
    search = attached()
    lead, standby = search.lead, search.standby
    assert lead and standby
    others = {voter for voter in VOTERS if voter != lead}
    match how:
        case "death":
            search.see(others)
        case "restart":
            search.see({*others, replace(lead, incarnation=1)})
        case "evicted":
            search.begin(key(2), tuple(sorted(others)), 4, lineage)
        case "says so":
            search.refused_by(standby.peer)
            assert search.lead == lead, "only its lead can send it away"
            search.refused_by(lead.peer)
    assert search.lead is None and search.standby == standby
    asks = search.due(0.0)
    assert asks[0].voter == asks[0].lead != lead.peer, "another voter is asked to lead"
    assert PlaceRequest(lead.peer, "") in asks, "it may have the place still"


def test_next_epoch_keeps_lead_until_another_takes_it() -> None:
    search = attached()
    before = search.lead
    assert before
    begins = clusters.epoch_end(ME.peer, 1)
    search.begin(key(begins), VOTERS, len(VOTERS), lineage)
    asks = search.due(0.0)
    asks = [each for each in asks if each.lead]
    assert [each.voter for each in asks] == list(order(begins)[:2]) and search.lead == before
    for each in asks:
        answer(search, each)
    assert search.lead and search.lead.peer == order(begins)[0]


def test_lead_that_refuses_the_next_epoch_is_left_when_its_place_ends() -> None:
    search = attached()
    lead, begins = search.lead, clusters.epoch_end(ME.peer, 1)
    for round in range(begins, begins + attachment.GRACE_ROUNDS):
        search.begin(key(round), VOTERS, len(VOTERS), lineage)
        while asks := [each for each in search.due(60.0 * round) if each.lead]:
            for each in asks:
                answer(search, each, accepted=False)
        assert search.lead == lead
    search.begin(key(begins + attachment.GRACE_ROUNDS), VOTERS, len(VOTERS), lineage)
    assert search.lead is None, "its place has ended there"


def test_late_answer_gives_the_place_back() -> None:
    search = begun(1)
    first, second = search.due(0.0)
    search.failed(first)
    answer(search, second)
    search.due(0.0)
    answer(search, first)
    assert search.lead == Member(second.voter)
    answer(search, PlaceRequest(first.voter, second.voter), accepted=False)
    assert PlaceRequest(first.voter, "") in search.due(0.0)


def test_lying_voter_delays_a_newcomer_by_few_rounds() -> None:
    search = begun(1)
    for round in range(1, 12):
        search.begin(key(round), VOTERS, len(VOTERS), lineage)
        for each in search.due(100.0 * round):
            answer(search, each, accepted=False, since=round)
    assert search.known_since == attachment.MEETING_ROUNDS


def test_admitted_associate_gives_its_places_up() -> None:
    search = attached()
    lead, standby = search.lead, search.standby
    search.begin(key(2), (*VOTERS, ME), len(VOTERS), lineage)
    assert lead and standby
    assert search.due(0.0) == [PlaceRequest(lead.peer, ""), PlaceRequest(standby.peer, "")] and search.wanted() == ()
