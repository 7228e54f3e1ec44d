"""Which peers a Moshpit peer knows: its group, a few contacts, and those that it finds in the directory."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from protocols.base import Deadline, Host, Member, PeerId, Settings, StaticMembers
from protocols.moshpit.averager import Moshpit
from protocols.moshpit.state import ACQUAINTANCES, MoshpitState
from tests.sim.host import SimDirectory
from tests.sim.network import SimNetwork
from tests.sim.swarm import SimSwarm
from tests.support.moshpit import assert_groups_hold_same_bits, moshpit_swarm, outcomes, spread


def without_contacts(host: Host) -> Host:
    """Each sees nobody else."""
    return replace(host, members=StaticMembers([Member(host.me)]))


def test_unconnected_peers_find_groups_through_the_directory() -> None:
    """Each keeps coordinates of its own, which its positions in groups become. Some rounds bring the peers close."""
    swarm = moshpit_swarm(4, most=4, announce_limit=0, dress=without_contacts, train_seconds=(4.0,) * 4)
    before = spread(swarm)
    histories = swarm.average(rounds=4)
    assert all("committed" in outcomes(history) for history in histories.values())
    assert spread(swarm) < 0.5 * before
    assert_groups_hold_same_bits(histories)


def test_directory_entry_is_renewed_during_long_training() -> None:
    """The directory forgets an entry after ten minutes, and later peers have to find it all the same."""
    swarm = moshpit_swarm(
        2, most=2, announce_limit=0, dress=without_contacts, train_seconds=(1500.0,) * 2, round_seconds=3000.0
    )
    listed: list[Sequence[tuple[PeerId, bytes]]] = []
    tasks: list[asyncio.Task[None]] = []

    async def ask() -> None:
        moshpit = swarm.averagers["p00"]._moshpit
        now = asyncio.get_running_loop().time()
        listed.append(await moshpit.host.directory.find(f"moshpit/{moshpit.next_group.hex()}", 2, now + 1.0))

    def begin(network: SimNetwork) -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(1400.0, lambda: tasks.append(loop.create_task(ask())))

    swarm.before = begin
    histories = swarm.average()
    assert [peer for peer, _ in listed[0]] == ["p00", "p01"]
    assert outcomes(histories["p00"]) == ["committed"]


def test_peers_in_diverged_rounds_meet_again() -> None:
    """The directory lists groups by round, so only contacts can show a peer that the others are in another round."""
    swarm = moshpit_swarm(4, most=2, announce_limit=0, train_seconds=(4.0,) * 4, starts=(0, 0, 3, 3))
    before = spread(swarm)
    histories = swarm.average(rounds=7)
    assert [result.round for result in histories["p00"]][:2] == [3, 4], "at once"
    assert spread(swarm) < 0.2 * before
    assert_groups_hold_same_bits(histories)


def test_announcements_go_to_group_and_few_contacts() -> None:
    """Sixteen peers in groups of four, which the directory lists. Each knows few of the others, and they mix."""
    swarm = moshpit_swarm(16, most=4, announce_limit=8, elements=16, train_seconds=(4.0,) * 16)
    before, most = spread(swarm), 0

    def watch(peer: PeerId, number: int, way: str, other: PeerId) -> None:
        nonlocal most
        if way == "sent":
            most = max(most, len(swarm.averagers[peer]._moshpit.in_sight()))

    def begin(network: SimNetwork) -> None:
        network.watch = watch

    swarm.before = begin
    histories = swarm.average(rounds=3)
    assert most < 15
    assert all("committed" in outcomes(history) for history in histories.values())
    assert spread(swarm) < 0.3 * before
    assert_groups_hold_same_bits(histories)


@pytest.fixture
def moshpit() -> MoshpitState:
    """The state of p00 before its first round; it announces itself to at most one other peer."""
    swarm = SimSwarm()
    hosts = [swarm.join(f"p{index:02}") for index in range(6)]
    return Moshpit(hosts[0], Settings("fp32", (8,), 8), most=2, announce_limit=1)._moshpit


async def test_contacts_change_each_round(moshpit: MoshpitState) -> None:
    met = []
    for number in range(4):
        moshpit.begin(number)
        met.append(tuple(moshpit.in_sight()))
    assert all(len(each) == ACQUAINTANCES for each in met) and len(set(met)) > 1


async def test_dead_peer_is_not_sought_until_it_returns(moshpit: MoshpitState) -> None:
    """The directory goes on listing it until its entry expires."""
    moshpit.begin(0)
    network = moshpit.host.transport.network  # type: ignore[attr-defined]
    moshpit.meet("p03", b"group")
    network.contacts.views["p00"].lose("p03")
    moshpit.update_sight()
    moshpit.meet("p03", b"group")
    assert "p03" not in moshpit.in_sight() and "p03" not in moshpit.tracker.sight
    network.contacts.views["p00"].meet(Member("p03", 1))
    moshpit.meet("p03", b"group")
    moshpit.update_sight()
    assert moshpit.tracker.sight["p03"] == Member("p03", 1)


async def test_late_directory_answer_for_old_group_is_ignored(
    moshpit: MoshpitState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory is slow. The peer is in its next group by then, and may have met one of those peers there."""
    moshpit.begin(0)
    others = sorted({f"p{index:02}" for index in range(1, 6)} - set(moshpit.in_sight()))
    moshpit.set_next_group(b"first")

    async def find(directory: SimDirectory, scope: str, limit: int, deadline: Deadline) -> list[tuple[PeerId, bytes]]:
        moshpit.set_next_group(b"second")
        moshpit.meet(others[0], b"second")
        return [(others[0], b""), (others[1], b"")] if scope.endswith(b"first".hex()) else []

    monkeypatch.setattr(SimDirectory, "find", find)
    await moshpit.search(asyncio.get_running_loop().time() + 0.01, lambda: None)
    assert moshpit.found[others[0]] == b"second" and others[1] not in moshpit.found


async def test_members_of_finished_groups_are_dropped(moshpit: MoshpitState) -> None:
    moshpit.begin(0)
    contacts = set(moshpit.in_sight())
    others = sorted({f"p{index:02}" for index in range(1, 6)} - contacts)
    moshpit.meet(others[0], b"first")
    moshpit.meet(others[1], b"second")
    moshpit.keep_group(b"second")
    assert set(moshpit.in_sight()) == {*contacts, others[1]}
    moshpit.meet(others[1])
    assert moshpit.found[others[1]] == b"second", "it stays a member of the group"
