"""What a simulated peer knows of others: deaths spread, long silence is noticed, and incarnations are distinguished."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest

from protocols.base import Host, Member
from tests.sim import loop as simloop
from tests.sim.contact import HEARTBEAT_SECONDS, LIVENESS_SECONDS, Outages
from tests.sim.host import EPOCH, DirectoryFaults, Entries, sim_host
from tests.sim.network import SimNetwork
from tests.sim.trace import Trace

LATENCY = 0.1
Live = list[tuple[float, tuple[Member, ...]]]


class Swarm:
    """Hosts, and what each of them sees from when on."""

    def __init__(self, count: int = 3) -> None:
        self.network = SimNetwork(Trace(), LATENCY)
        self.peers = tuple(f"p{index}" for index in range(count))
        for peer in self.peers:
            self.network.join(peer)
        self.seen: dict[tuple[str, int], Live] = {}

    async def observe(self, peer: str) -> None:
        network, loop = self.network, asyncio.get_running_loop()
        members = sim_host(network, network.transports[peer], 1, {}).members
        seen = self.seen.setdefault((peer, network.nodes[peer].incarnation), [])
        version = members.version
        while True:
            seen.append((round(loop.time(), 3), members.live()))
            version = await members.changed(version, loop.time() + 1e5)

    def start(self, peer: str) -> None:
        token = simloop.PROCESS.set(self.network.nodes[peer].process)
        self.network.nodes[peer].process.tasks[-1] = asyncio.get_running_loop().create_task(self.observe(peer))
        simloop.PROCESS.reset(token)

    def run(self, *events: tuple[float, Callable[[], object]], seconds: float = 100.0) -> None:
        async def main() -> None:
            for peer in self.peers:
                self.start(peer)
            for at, event in events:
                asyncio.get_running_loop().call_at(at, event)
            await asyncio.sleep(seconds)

        simloop.run(main())

    def silence(self, *pairs: tuple[str, str]) -> None:
        for pair in pairs:
            self.network.block(*pair)

    def heal(self, *pairs: tuple[str, str]) -> None:
        for pair in pairs:
            self.network.heal(*pair)

    def restart(self, peer: str) -> None:
        self.network.restart(peer)
        self.start(peer)

    def names(self, peer: str, incarnation: int = 0) -> list[tuple[float, str]]:
        return [(time, " ".join(each.peer for each in live)) for time, live in self.seen[peer, incarnation]]


def test_stable_swarm_sees_all_members_without_timers() -> None:
    swarm = Swarm()
    swarm.run()
    assert all(swarm.names(peer) == [(0.0, "p0 p1 p2")] for peer in swarm.peers)


def test_death_is_seen_after_link_latency() -> None:
    swarm = Swarm()
    swarm.network.link("p2", "p1").latency_seconds = 0.4
    swarm.run((10.0, lambda: swarm.network.kill("p2")))
    assert swarm.names("p0") == [(0.0, "p0 p1 p2"), (10.1, "p0 p1")]
    assert swarm.names("p1") == [(0.0, "p0 p1 p2"), (10.4, "p0 p1")]
    assert len(swarm.names("p2")) == 1


def test_death_behind_silent_link_is_seen_by_timeout() -> None:
    """p1 loses p2 by timeout, hears of the death when the link has healed, and does not meet it again."""
    swarm = Swarm()
    swarm.run(
        (9.0, lambda: swarm.silence(("p2", "p1"))),
        (10.0, lambda: swarm.network.kill("p2")),
        (40.0, lambda: swarm.heal(("p2", "p1"))),
    )
    assert swarm.names("p0")[1:] == [(10.1, "p0 p1")]
    ((time, names),) = swarm.names("p1")[1:]
    assert names == "p0 p1" and 9.0 + LIVENESS_SECONDS - HEARTBEAT_SECONDS <= time <= 9.0 + LIVENESS_SECONDS


@pytest.mark.parametrize("both", [True, False])
def test_silence_separates_until_timeout_and_handshake_rejoins(both: bool) -> None:
    swarm = Swarm()
    pairs = (("p0", "p1"), ("p1", "p0")) if both else (("p0", "p1"),)
    swarm.run((20.0, lambda: swarm.silence(*pairs)), (60.0, lambda: swarm.heal(*pairs)))
    for peer, other in (("p0", "p1"), ("p1", "p0")):
        _, (gone, without), (back, again) = swarm.names(peer)
        assert 20.0 + LIVENESS_SECONDS - HEARTBEAT_SECONDS <= gone <= 20.0 + LIVENESS_SECONDS
        assert other not in without and back == pytest.approx(60.0 + 2 * LATENCY) and other in again
    assert len(swarm.names("p2")) == 1


def test_shorter_silence_goes_unnoticed() -> None:
    swarm = Swarm()
    swarm.run((20.0, lambda: swarm.silence(("p0", "p1"))), (23.7, lambda: swarm.heal(("p0", "p1"))))
    assert all(len(swarm.names(peer)) == 1 for peer in swarm.peers)


def test_silences_without_handshake_between_count_as_one() -> None:
    swarm = Swarm()
    pair = ("p0", "p1")
    events: list[tuple[float, Callable[[], object]]] = []
    for number in range(5):
        events.append((20.0 + 2 * number, lambda: swarm.silence(pair)))
        events.append((20.0 + 2 * number + 1.9, lambda: swarm.heal(pair)))
    swarm.run(*events)
    _, (gone, _), (back, _) = swarm.names("p0")
    assert 24.0 <= gone <= 25.0 and back == pytest.approx(29.9 + 2 * LATENCY)


def test_both_directions_must_heal() -> None:
    swarm = Swarm()
    swarm.run(
        (20.0, lambda: swarm.silence(("p0", "p1"), ("p1", "p0"))),
        (40.0, lambda: swarm.heal(("p0", "p1"))),
        (50.0, lambda: swarm.heal(("p1", "p0"))),
    )
    assert swarm.names("p0")[-1] == (50.2, "p0 p1 p2") and len(swarm.names("p0")) == 3


def test_restarted_peer_is_new_member_after_handshake() -> None:
    swarm = Swarm()
    swarm.run((10.0, lambda: swarm.network.kill("p2")), (30.0, lambda: swarm.restart("p2")))
    assert swarm.seen["p0", 0][-1] == (30.2, (Member("p0"), Member("p1"), Member("p2", 1)))
    assert swarm.names("p2", 1) == [(30.0, "p2"), (30.2, "p0 p1 p2")]
    assert swarm.seen["p2", 1][-1][1][-1] == Member("p2", 1)


def test_restart_behind_silence_replaces_former_incarnation() -> None:
    """Neither the death nor the timeout of the old incarnation removes the new one."""
    swarm = Swarm()
    pairs = (("p0", "p2"), ("p2", "p0"))
    swarm.run(
        (10.0, lambda: swarm.silence(*pairs)),
        (11.0, lambda: swarm.network.kill("p2")),
        (12.0, lambda: swarm.restart("p2")),
        (13.0, lambda: swarm.heal(*pairs)),
    )
    seen = [(time, [member for member in live if member.peer == "p2"]) for time, live in swarm.seen["p0", 0]]
    assert seen[-1] == (13.2, [Member("p2", 1)]) and swarm.names("p2", 1)[-1][1] == "p0 p1 p2"


def test_restart_during_silence_is_not_seen() -> None:
    swarm = Swarm()
    swarm.run(
        (10.0, lambda: swarm.silence(("p0", "p2"))),
        (11.0, lambda: swarm.network.kill("p2")),
        (30.0, lambda: swarm.restart("p2")),
    )
    assert swarm.names("p0")[-1] == (11.1, "p0 p1")
    assert swarm.names("p2", 1)[-1][1] == "p1 p2"


def test_wait_for_change_ends_at_deadline() -> None:
    swarm = Swarm()

    async def main() -> tuple[int, float]:
        members = sim_host(swarm.network, swarm.network.transports["p0"], 1, {}).members
        return await members.changed(members.version, 7.0), asyncio.get_running_loop().time()

    version, time = simloop.run(main())
    assert time == 7.0 and version == sim_host(swarm.network, swarm.network.transports["p0"], 1, {}).members.version


def test_mutually_connected_majority_is_counted() -> None:
    outages = Outages({Member("c"): 15.0}, {("a", "b"): [[10.0, 20.0]]})
    members = [Member(peer) for peer in "abcd"]

    def most(since: float, until: float) -> int:
        return max(count for count in range(5) if outages.connected(members, count, since, until))

    assert [most(*span) for span in ((0.0, 9.0), (5.0, 12.0), (12.0, 16.0), (20.0, 99.0))] == [4, 3, 2, 3]
    members[2] = Member("c", 1)
    assert most(20.0, 99.0) == 4


# -- the directory ----------------------------------------------------------------------------------------------------


def found(
    faults: DirectoryFaults, skews: tuple[float, ...] = (0.0, 0.0, 0.0), at: float = 20.0
) -> list[tuple[str, bytes]]:
    """What p2 finds of what p0 and p1 announced at 0 s and at 10 s, for 60 s each."""
    network = SimNetwork(Trace())
    entries: Entries = {}
    hosts: list[Host] = [
        sim_host(network, network.join(f"p{index}"), 1, entries, skew, faults) for index, skew in enumerate(skews)
    ]

    async def main() -> list[tuple[str, bytes]]:
        for value in (b"old", b"new"):
            for host in hosts[:2]:
                await host.directory.announce("scope", value + host.me.encode(), 60.0, 1e3)
            await asyncio.sleep(10.0)
        await asyncio.sleep(at - 20.0)
        assert hosts[1].clock.wall() == pytest.approx(EPOCH + at + skews[1])
        return list(await hosts[2].directory.find("scope", 10, 1e3))

    return simloop.run(main())


def test_directory_returns_last_value_until_expiry() -> None:
    assert found(DirectoryFaults()) == [("p0", b"newp0"), ("p1", b"newp1")]
    assert found(DirectoryFaults(), at=71.0) == []


def test_skewed_clock_shifts_entry_expiry() -> None:
    assert found(DirectoryFaults(), skews=(-120.0, 120.0, 0.0), at=75.0) == [("p1", b"newp1")]
    assert found(DirectoryFaults(), skews=(0.0, 0.0, 120.0)) == []


def test_lagging_directory_returns_only_old_values() -> None:
    assert found(DirectoryFaults(lag_seconds=15.0)) == [("p0", b"oldp0"), ("p1", b"oldp1")]
    assert found(DirectoryFaults(lag_seconds=25.0)) == []


def test_forgetful_directory_omits_entries() -> None:
    results = [found(DirectoryFaults(random.Random(seed), forget_share=0.5)) for seed in range(40)]
    assert {len(each) for each in results} == {0, 1, 2}
    assert results == [found(DirectoryFaults(random.Random(seed), forget_share=0.5)) for seed in range(40)]


def test_lying_directory_invents_peers_and_swaps_values() -> None:
    results = [found(DirectoryFaults(random.Random(seed), lie_share=1.0)) for seed in range(40)]
    extra = [entry for each in results for entry in each if entry not in found(DirectoryFaults())]
    assert any(peer.startswith("ghost") for peer, _ in extra)
    assert any(peer in ("p0", "p1") for peer, _ in extra) and all(len(each) == 3 for each in results)
