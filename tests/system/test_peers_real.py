"""A swarm of real processes, of which some are killed, stopped, paused, restarted, or leave.

All tests use one swarm, because its start takes longer than most tests: each test first restores the swarm to four
peers. The time bounds are several times the times on a calm machine.
"""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.checkers import Report
from tests.support.long import long
from tests.support.real_swarm import RealPeer, RealSwarm, deciding, deciding_one_round, paced, wait, whole_rounds

pytestmark = pytest.mark.real

ROUND_SECONDS = 20.0
"""A round ends within this time, with any loss, on a machine with other work."""
PASSING = ("checkpoints", "scratch", ".*", "*.new")
"""Files that come and go in the directory of a running peer, so that they cannot be copied."""
DECIDED_SECONDS = 6.0
"""The survivors of a death decide within this time; the aim is two seconds, on a calm machine."""
SUSPECTED_SECONDS = 6.0
LEFT_SECONDS = 10.0
FREE_SECONDS = 5.0


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealSwarm]:
    with RealSwarm(tmp_path_factory.mktemp("swarm"), paced(elements=250_000, inner_steps=8)) as swarm:
        yield swarm


def others(four: list[RealPeer], victim: RealPeer) -> list[RealPeer]:
    return [peer for peer in four if peer is not victim]


def back_in(swarm: RealSwarm, four: list[RealPeer], since: float) -> None:
    """All four are in one mean again."""
    wait("all four are in one mean again", lambda: swarm.all_in_one_mean(four, since), ROUND_SECONDS)
    swarm.check()


def all_see(peers: list[RealPeer], other: RealPeer, what: str, value: object) -> bool:
    return all(peer.sees(other).get(what) is value for peer in peers)


def others_decide(peers: list[RealPeer], since: float, seconds: float) -> list[Report]:
    """The first report of each peer after that wall time."""
    return wait("the others decide", lambda: deciding(peers, since), seconds)


@pytest.mark.long
def test_four_peers_agree_every_round(swarm: RealSwarm) -> None:
    four = swarm.four(ROUND_SECONDS)
    first = four[0].last()["round"]
    wait("three rounds more", lambda: all(peer.last()["round"] > first + 3 for peer in four), 2 * ROUND_SECONDS)
    for number in range(first + 1, first + 4):
        of_round = [each for peer in four for each in peer.reports() if each["round"] == number]
        assert [each["outcome"] for each in of_round] == ["committed"] * 4
        assert len({(each["lineage"], each["params_hash"], each["held_out_loss"]) for each in of_round}) == 1
        assert {len(each["peers"]) for each in of_round} == {4}
    swarm.check()


def test_killed_worker_costs_others_no_round(swarm: RealSwarm) -> None:
    four = swarm.four(ROUND_SECONDS)
    victim = four[1]
    worker = victim.child("worker")
    killed = victim.strike("worker")
    wait("another worker is up", lambda: victim.child("worker") not in (None, worker), 20)
    assert victim.running
    back_in(swarm, four, time.time())
    for peer in others(four, victim):
        assert {each["outcome"] for each in peer.reports() if each["time"] > killed} == {"committed"}


@pytest.mark.long
def test_killed_p2pd_is_restarted(swarm: RealSwarm) -> None:
    four = swarm.four(ROUND_SECONDS)
    victim = four[2]
    daemon = victim.child("p2pd")
    victim.strike("p2pd")
    wait("another p2pd is up", lambda: victim.child("p2pd") not in (None, daemon), 10)
    assert victim.running
    back_in(swarm, four, time.time())


def test_peer_killed_in_data_phase_delays_no_others(swarm: RealSwarm) -> None:
    four = swarm.four(ROUND_SECONDS)
    victim = four[3]
    before = victim.last()
    wait("the data phase", lambda: victim.status().get("state") == "averaging", ROUND_SECONDS, 0.02)
    killed = victim.strike()
    victim.leaves_nothing()
    survivors = others(four, victim)
    ends = wait("the others decide", lambda: deciding_one_round(survivors, killed), ROUND_SECONDS)
    last_seconds = max(end["time"] for end in ends) - killed
    print(f"the last of the survivors decided {last_seconds:.2f} s after the kill")
    assert len({(end["lineage"], end["params_hash"]) for end in ends}) == 1
    assert last_seconds < DECIDED_SECONDS
    (again,) = swarm.join(victim.name, via=survivors[0])
    back_in(swarm, four, time.time())
    assert again.last()["incarnation"] == before["incarnation"] + 1


def test_stopped_peer_is_excluded_and_resyncs_on_wake(swarm: RealSwarm) -> None:
    four = swarm.four(ROUND_SECONDS)
    victim = four[0]
    stopped = victim.strike(number=signal.SIGSTOP)
    try:
        wait("all suspect it", lambda: all_see(others(four, victim), victim, "live", False), SUSPECTED_SECONDS)
        print(f"suspected by all after {time.time() - stopped:.1f} s")
        wait("the roster is without it", lambda: all_see(others(four, victim), victim, "member", False), ROUND_SECONDS)
        print(f"excluded after {time.time() - stopped:.1f} s")
        time.sleep(max(0.0, stopped + 12 - time.time()))
    finally:
        woken = victim.strike(number=signal.SIGCONT)
    back_in(swarm, four, woken)
    print(f"in a mean again {time.time() - woken:.1f} s after waking")
    missed = {each["lineage"] for each in four[1].reports() if stopped < each["time"] < woken}
    since = [each for each in victim.reports() if each["time"] > stopped]
    went_over = any(each["outcome"] == "superseded" for each in since)
    decided = {each["lineage"] for each in since}  # the certificates of rounds may still reach it by themselves
    assert went_over or missed <= decided, [(each["round"], each["outcome"]) for each in since]


def test_newcomer_joins_after_the_founder_is_killed(swarm: RealSwarm) -> None:
    four = swarm.four(ROUND_SECONDS)
    founder = swarm["a"]
    killed = founder.strike()
    founder.leaves_nothing()
    survivors = others(four, founder)
    others_decide(survivors, killed, ROUND_SECONDS)
    (newcomer,) = swarm.join("newcomer", via=survivors[-1])
    caught_up = wait("the newcomer catches up", newcomer.reports, ROUND_SECONDS)[0]
    assert caught_up["outcome"] == "superseded"
    under_way = others_decide(survivors, caught_up["time"], ROUND_SECONDS)[0]["round"]
    full = wait("its work counts", lambda: swarm.all_in_one_mean(swarm.running), ROUND_SECONDS)
    print(f"it caught up in round {under_way} and is in the mean of round {full['round']}")
    assert 3 < under_way < full["round"] <= under_way + 2
    mine = next(each for each in newcomer.reports() if each["lineage"] == full["lineage"])
    assert (mine["round"], mine["held_out_loss"]) == (full["round"], full["held_out_loss"])
    swarm.check()


def finish(peer: RealPeer) -> None:
    assert peer.ask("finish") == {"ok": True}


def interrupt(peer: RealPeer) -> None:
    peer.strike(number=signal.SIGINT)


@pytest.mark.parametrize(("place", "leave"), ((1, interrupt), *long((0, finish))))
def test_leaver_hands_in_its_round_without_delay(
    swarm: RealSwarm, place: int, leave: Callable[[RealPeer], None]
) -> None:
    """Also the peer that founded the run."""
    leaver = swarm.four(ROUND_SECONDS)[place]
    others_decide([leaver], time.time(), ROUND_SECONDS)
    time.sleep(0.5)  # the next round is under way
    asked, before = time.time(), leaver.last()["round"]
    leave(leaver)
    assert leaver.ends(LEFT_SECONDS) == 0
    left = time.time()
    print(f"{leaver.name} left {left - asked:.1f} s after it was asked")
    leaver.leaves_nothing()
    last = leaver.last()
    assert last["round"] > before and last["weight"] > 0 and leaver.id in last["peers"]
    others_decide(swarm.running, left, 5)
    swarm.check()


def test_away_peer_frees_its_worker_and_returns(swarm: RealSwarm) -> None:
    """Also across a kill: it starts again paused."""
    four = swarm.four(ROUND_SECONDS)
    *others, one = four
    one.command("pause")
    wait("it has left the roster", lambda: others[0].sees(one).get("member") is False, 2 * ROUND_SECONDS)
    wait("its worker has ended", lambda: one.child("worker") is None, FREE_SECONDS)
    for reports in whole_rounds(others, 2, ROUND_SECONDS):
        assert {each["outcome"] for each in reports} == {"committed"} and len(reports[0]["peers"]) == 3
    one.strike()
    one.leaves_nothing()
    swarm.join(one.name, via=others[0])
    wait("it is paused still", lambda: one.status().get("state") == "paused", ROUND_SECONDS)
    wait("its worker has ended again", lambda: one.child("worker") is None, FREE_SECONDS)
    whole_rounds(others, 1, ROUND_SECONDS)
    assert others[0].sees(one).get("member") is False
    back = time.time()
    one.command("resume")
    wait("it counts again", lambda: swarm.all_in_one_mean(four, back), 4 * ROUND_SECONDS)
    swarm.check()


@pytest.mark.long
def test_paused_peer_finishes_at_once(swarm: RealSwarm) -> None:
    four = swarm.four(ROUND_SECONDS)
    *others, one = four
    one.command("pause")
    wait("its worker has ended", lambda: one.child("worker") is None, 2 * ROUND_SECONDS)
    one.command("finish")
    assert one.ends(5.0) == 0
    one.leaves_nothing()
    whole_rounds(others, 1, ROUND_SECONDS)
    swarm.check()


def test_duplicate_identity_makes_one_peer_exit(swarm: RealSwarm, tmp_path: Path) -> None:
    original = swarm.four(ROUND_SECONDS)[1]
    twin = RealPeer("twin", tmp_path)
    shutil.copytree(original.directory, twin.directory, ignore=shutil.ignore_patterns(*PASSING))
    twin.start("--bootstrap", swarm.running[0].address)
    try:
        wait("one of them goes", lambda: not (twin.running and original.running), 30)
        loser = original if twin.running else twin
        assert loser.code == 2
        assert loser.said().splitlines()[-1].startswith("starling: another process runs with this identity")
        assert "Traceback" not in loser.said()
        loser.leaves_nothing()
    finally:
        twin.clear()
