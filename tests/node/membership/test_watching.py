"""Runs of more peers than each may watch: whom a peer watches, and what the others learn all the same."""

from __future__ import annotations

import asyncio
import hashlib

import pytest

from node.membership import watchers, watching
from node.membership.choice import WatchChoice
from node.membership.failure_detector import CEILING_SECONDS
from node.membership.peer_record import PeerTable
from node.membership.watchers import REOPEN_SECONDS, Watchers
from node.membership.watching import Group, Known, Lot, Role, choose, roster_role, stage_role
from tests.sim.watching import WatchingWorld
from tests.support.membership_swarm import greeting
from tests.support.simulated import on_virtual_time

PEERS = [f"p{number}" for number in range(watching.MAX_WATCHED + 104)]
ROSTER = PEERS[:32]


def known(names: list[str], doubtful: tuple[str, ...] = ()) -> list[Known]:
    return [Known(name, is_doubtful=name in doubtful) for name in names]


def test_few_peers_are_all_watched() -> None:
    few = PEERS[: watching.MAX_WATCHED]
    assert choose(roster_role("me", ROSTER), known(few), Lot(b"me")) is None
    assert choose(roster_role("me", ROSTER), known(PEERS, tuple(PEERS[len(few) :])), Lot(b"me")) is None
    assert choose(roster_role("me", ROSTER), known(few), Lot(b"me"), chose=True), "not at each change of one peer"
    assert choose(roster_role("me", ROSTER), known(PEERS[:72]), Lot(b"me"), chose=True) is None


@pytest.mark.parametrize(("me", "voters"), [("p0", 32), ("p100", watching.VOTERS_WATCHED)])
def test_voter_watches_its_roster_others_a_few_voters(me: str, voters: int) -> None:
    found = choose(roster_role(me, ROSTER), known(PEERS), Lot(me.encode()))
    assert found and len(found & {*ROSTER}) >= voters
    assert len(found) == voters + watching.OTHERS_WATCHED


@pytest.mark.parametrize("me", ["p0", "p100"])
def test_ties_of_clusters_are_all_watched(me: str) -> None:
    """Those of a voter with a full cluster, or of an associate: its lead, its standby, voters it asks, its cluster."""
    ties = PEERS[101:132] if me in ROSTER else [*ROSTER[3:7], *PEERS[101:131]]
    found = choose(roster_role(me, ROSTER, ties), known(PEERS, tuple(ties[:2])), Lot(me.encode()))
    assert found and {*ties} <= found and len(found) <= len(ties) + 32 + watching.OTHERS_WATCHED
    assert me not in ROSTER or {*ROSTER} <= found


def test_newcomer_changes_one_place_of_the_choice() -> None:
    role, lot = Role((Group(tuple(ROSTER), 4),), 16), Lot(b"secret")
    before = choose(role, known(PEERS), lot)
    for number in range(50):
        after = choose(role, known([*PEERS, f"new{number}"]), lot)
        assert before and after and len(after - before) <= 1


def test_voters_that_were_never_met_are_greeted_first() -> None:
    """A newcomer soon asks one of them for a place in its cluster. Those that cannot be reached wait their turn."""
    contacts, lost = PeerTable("me", lambda: ROSTER), ROSTER[:4]
    choice = WatchChoice(contacts, Lot(b"me"), lambda: ROSTER, lambda known: roster_role("me", ROSTER))
    for peer in PEERS:
        contact = contacts.add(peer)
        assert contact
        contact.hello = None if peer in PEERS[:80] else greeting(peer)
        contact.failures = int(peer in lost)
    choice.renew(0.0)
    unmet = {peer for peer in ROSTER if peer not in choice} - {*lost}
    assert len(unmet) > 20
    for number, _ in enumerate([*unmet]):
        contact = choice.next_to_greet()
        assert contact and contact.peer in unmet
        contact.hello, contact.tried_at = greeting(contact.peer), float(number)
    contact = choice.next_to_greet()
    assert contact and contact.peer not in unmet


def test_unreachable_voters_are_replaced() -> None:
    role, lot = roster_role("me", ROSTER), Lot(b"me")
    first = choose(role, known(PEERS), lot)
    assert first
    gone = tuple(first & {*ROSTER})
    second = choose(role, known(PEERS, gone), lot)
    assert second and len(second & {*ROSTER}) >= watching.VOTERS_WATCHED and not second & {*gone}


@pytest.mark.parametrize("stage", [0, 1, 5, 31])
def test_peer_of_a_stage_watches_all_stages_within_the_bound(stage: int) -> None:
    stages = 32
    peers = [Known(f"s{number % stages}/{number}", number % stages, number % 3 == 0) for number in range(16 * stages)]
    own = [each.peer for each in peers if each.stage == stage]
    role = stage_role(roster_role(own[0], own), stage, stages, (), peers)
    found = choose(role, peers, Lot(b"me"))
    assert found and len(found) <= watching.MAX_WATCHED and {*own} <= found
    assert {each.stage for each in peers if each.peer in found} == set(range(stages))


def test_too_many_watchers_are_answered_by_lot() -> None:
    order = [f"w{number}" for number in range(watchers.MAX_WATCHERS + 30)]
    chosen = Watchers(lambda peer: hashlib.sha256(peer.encode()).digest())
    for _ in range(2):  # those turned away send again
        answered = {peer for peer in order if chosen.hear(peer, 1.0, lambda: {"w7"})}
    lowest = sorted(order, key=lambda peer: hashlib.sha256(peer.encode()).digest())[: watchers.MAX_WATCHERS]
    assert len([*chosen]) == watchers.MAX_WATCHERS and "w7" in answered
    assert len(answered & {*lowest}) >= watchers.MAX_WATCHERS - 1


def test_watcher_is_gone_when_silent_or_closed() -> None:
    chosen = Watchers(str.encode)
    for peer in ("silent", "closed", "again"):
        chosen.hear(peer, 10.0, tuple)
    chosen.ended("closed", 10.5)
    chosen.ended("again", 10.5)
    chosen.hear("again", 11.0, tuple)
    chosen.tick(10.5 + REOPEN_SECONDS, slept=False)
    assert {*chosen} == {"silent", "again"}
    chosen.tick(100.0, slept=True)
    assert {*chosen} == {"silent", "again"}
    chosen.tick(100.0 + CEILING_SECONDS, slept=False)
    assert not [*chosen]


# -- many peers, with smaller bounds -----------------------------------------------------------------------------------


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> WatchingWorld:
    """28 peers of which six vote; each may watch 14."""
    monkeypatch.setattr(watching, "MAX_WATCHED", 14)
    monkeypatch.setattr(watching, "VOTERS_WATCHED", 2)
    monkeypatch.setattr(watching, "OTHERS_WATCHED", 4)
    return WatchingWorld(28, voters=6)


@on_virtual_time
async def test_large_run_stays_connected_through_death_and_partition(world: WatchingWorld) -> None:
    await world.start_all()
    everyone = list(world.names)
    await world.until(lambda: world.is_whole(everyone) and world.voters_meet(everyone), 30.0)
    await asyncio.sleep(10.0)
    assert all(len(world.sees(peer)) < 27 for peer in everyone[6:]), "still each watches each"

    dead, voter = everyone[-1], everyone[1]
    world.network.kill(dead)
    world.network.kill(voter)
    await world.until(lambda: not world.seen_by(dead) and not world.seen_by(voter), 20.0)
    world.start("newcomer", everyone[-2])
    await world.until(lambda: len([each for each in world.seen_by("newcomer") if each in world.roster]) >= 2, 20.0)

    some, others = world.alive()[::2], world.alive()[1::2]
    world.cut(some, others)
    await world.until(lambda: not any(world.sees(peer) & {*others} for peer in some), 30.0)
    await world.until(lambda: world.is_whole(some) and world.is_whole(others), 30.0)
    world.heal(some, others)
    await world.until(lambda: world.is_whole(world.alive()) and world.voters_meet(world.alive()), 30.0)
    await world.until(lambda: all(len(world.members[peer].contacts()) >= 26 for peer in some), 120.0)


@on_virtual_time
async def test_watched_by_too_many_still_introduces_newcomers(
    world: WatchingWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchers, "MAX_WATCHERS", 9)
    world.roster = world.names[:1]  # as in a run that has just begun
    for peer in world.names:
        world.start(peer, world.names[0] if peer != world.names[0] else None)
    await world.until(lambda: world.is_whole(world.names), 60.0)
    assert any("watch this one" in line for line in world.said)
    assert len(world.members[world.names[0]]._watchers._watchers) <= 9 + len(world.names[:1])
