"""What a simulated peer knows of others: deaths spread, long silence is noticed, and incarnations are distinguished."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest

from node.membership.watching import MAX_WATCHED
from protocols.base import Host, Member, PeerId
from tests.sim import loop as simloop
from tests.sim.contact import HEARTBEAT_SECONDS, LIVENESS_SECONDS
from tests.sim.host import EPOCH, DirectoryFaults, Entries, sim_host
from tests.sim.neighbours import Neighbours
from tests.sim.network import SimNetwork
from tests.sim.trace import Trace

LATENCY = 0.1
ROUND_TRIP = 2 * LATENCY
Event = Callable[["Swarm"], object]
Change = tuple[float, str]
"""From when on a peer sees which others, `*`: the next incarnation. Negative: what it loses by a silence since then."""


class Swarm:
    """Three hosts, and what each of them sees from when on."""

    def __init__(self) -> None:
        self.network = SimNetwork(Trace(), LATENCY)
        self.seen: dict[str, list[Change]] = {}
        for peer in ("p0", "p1", "p2"):
            self.network.join(peer)

    async def observe(self, peer: str) -> None:
        network, loop = self.network, asyncio.get_running_loop()
        members = sim_host(network, network.transports[peer], 1, {}).members
        seen = self.seen[peer] = []
        version = members.version
        while True:
            seen.append((round(loop.time(), 3), " ".join(map(named, members.live()))))
            version = await members.changed(version, loop.time() + 1e5)

    def start(self, peer: str) -> None:
        token = simloop.PROCESS.set(self.network.nodes[peer].process)
        self.network.nodes[peer].process.tasks[-1] = asyncio.get_running_loop().create_task(self.observe(peer))
        simloop.PROCESS.reset(token)

    def run(self, *events: tuple[float, Event]) -> None:
        async def main() -> None:
            for peer in self.network.nodes:
                self.start(peer)
            for at, event in events:
                asyncio.get_running_loop().call_at(at, event, self)
            await asyncio.sleep(100.0)

        simloop.run(main())


def named(member: Member) -> str:
    return f"{member.peer}{'*' * member.incarnation}"


def on_each(change: Callable[[PeerId, PeerId], None], pairs: tuple[str, ...]) -> None:
    for source, target in (pair.split(">") for pair in pairs):
        change(source, target)


def silence(*pairs: str) -> Event:
    return lambda swarm: on_each(swarm.network.block, pairs)


def heal(*pairs: str) -> Event:
    return lambda swarm: on_each(swarm.network.heal, pairs)


def kill(swarm: Swarm) -> None:
    swarm.network.kill("p2")


def restart(swarm: Swarm) -> None:
    swarm.network.restart("p2")
    swarm.start("p2")


CASES: dict[str, tuple[list[tuple[float, Event]], dict[str, list[Change]]]] = {
    "nothing happens": ([], {"p0": [], "p1": [], "p2": []}),
    "death": ([(10, kill)], {"p0": [(10 + LATENCY, "p0 p1")], "p1": [(10 + LATENCY, "p0 p1")]}),
    "silence of one direction": (
        [(20, silence("p0>p1")), (60, heal("p0>p1"))],
        {"p0": [(-20, "p0 p2"), (60 + ROUND_TRIP, "p0 p1 p2")], "p1": [(-20, "p1 p2"), (60 + ROUND_TRIP, "p0 p1 p2")],
         "p2": []},
    ),
    "silences without a handshake between": (
        [each for n in range(5) for each in ((20 + 2 * n, silence("p0>p1")), (21.9 + 2 * n, heal("p0>p1")))],
        {"p0": [(-20, "p0 p2"), (29.9 + ROUND_TRIP, "p0 p1 p2")]},
    ),
    "restart": (
        [(10, kill), (30, restart)],
        {"p0": [(10 + LATENCY, "p0 p1"), (30 + ROUND_TRIP, "p0 p1 p2*")], "p2": [(30 + ROUND_TRIP, "p0 p1 p2*")]},
    ),
    "restart behind a silence": (
        [(10, silence("p0>p2", "p2>p0")), (11, kill), (12, restart), (13, heal("p0>p2", "p2>p0"))],
        {"p0": [(13 + LATENCY, "p0 p1"), (13 + ROUND_TRIP, "p0 p1 p2*")]},
    ),
}  # fmt: skip


@pytest.mark.parametrize("events, changes", CASES.values(), ids=CASES)
def test_peers_see_deaths_silences_and_restarts(
    events: list[tuple[float, Event]], changes: dict[str, list[Change]]
) -> None:
    swarm = Swarm()
    swarm.run(*events)
    for peer, expected in changes.items():
        seen = swarm.seen[peer][1:]
        assert [names for _, names in seen] == [names for _, names in expected]
        for (time, _), (due, _) in zip(seen, expected, strict=True):
            timeout = -due + LIVENESS_SECONDS
            assert time == pytest.approx(due) or (due < 0 and timeout - HEARTBEAT_SECONDS <= time <= timeout)


# -- the directory ----------------------------------------------------------------------------------------------------


def found(
    faults: DirectoryFaults | None = None, skews: tuple[float, ...] = (0.0, 0.0, 0.0), at: float = 20.0
) -> list[tuple[str, bytes]]:
    """What p2 finds of what p0 and p1 announced at 0 s and at 10 s, for 60 s each."""
    network = SimNetwork(Trace())
    entries: Entries = {}
    faults = faults or DirectoryFaults()
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


def test_directory_lags_and_entries_expire_by_skewed_clocks() -> None:
    assert found() == [("p0", b"newp0"), ("p1", b"newp1")]
    assert found(DirectoryFaults(lag_seconds=15.0)) == [("p0", b"oldp0"), ("p1", b"oldp1")]
    assert found(at=71.0) == found(skews=(0.0, 0.0, 120.0)) == []
    assert found(skews=(-120.0, 120.0, 0.0), at=75.0) == [("p1", b"newp1")]


def test_directory_forgets_and_lies_by_its_seed() -> None:
    forgetful = [found(DirectoryFaults(random.Random(seed), forget_share=0.5)) for seed in range(40)]
    assert {len(each) for each in forgetful} == {0, 1, 2}
    assert forgetful == [found(DirectoryFaults(random.Random(seed), forget_share=0.5)) for seed in range(40)]
    lying = [found(DirectoryFaults(random.Random(seed), lie_share=1.0)) for seed in range(40)]
    invented = {peer.rstrip("0123456789") for each in lying for peer, value in each if (peer, value) not in found()}
    assert invented == {"ghost", "p"} and all(len(each) == 3 for each in lying)


def test_ties_make_neighbours_of_both_peers() -> None:
    peers = [f"p{number:03}" for number in range(MAX_WATCHED + 24)]
    large, small = Neighbours(peers, peers[:32]), Neighbours(peers[:5], peers[:3])
    far = next(peer for peer in peers if peer not in large.of(peers[-1]))
    assert far != peers[-1] and large.tie(peers[-1], [far, peers[0]])[:1] == [far]
    assert far in large.of(peers[-1]) and peers[-1] in large.of(far) and not large.tie(far, [peers[-1]])
    assert not small.tie(peers[0], peers[1:3]), "all see each other"
