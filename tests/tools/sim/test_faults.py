"""Faults are drawn from seeds, and happen: each when it is due, for as long as it lasts, and no more once healed."""

from __future__ import annotations

import asyncio
import random

import pytest

from node.outer.activity import Activity
from protocols.base import PeerId
from tests.sim import loop as simloop
from tests.sim.families import BREAKING, CALM, FAULTS
from tests.sim.faults import Crash, Cut, Faults, Mislead, Reset, Skew, Slow
from tests.sim.host import DirectoryFaults
from tests.sim.injection import Injector
from tests.sim.network import SimNetwork
from tests.sim.trace import Trace

PEERS = ("p0", "p1", "p2", "p3", "p4")

# -- families ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BREAKING)
@pytest.mark.parametrize("count", [1, 2, 5])
def test_fault_family_is_determined_by_its_seed(name: str, count: int) -> None:
    peers = PEERS[:count]
    one, other = ([BREAKING[name](random.Random(seed), peers, 60.0) for seed in range(50)] for _ in "12")
    assert one == other and set().union(*(faults.peers() for faults in one)) <= set(peers)
    assert len(set(one)) == 50 or count == 1


def drawn(family: str) -> list[Faults]:
    return [BREAKING[family](random.Random(seed), PEERS, 60.0) for seed in range(100)]


def test_families_strike_whom_they_promise() -> None:
    assert {len(faults.peers()) for faults in drawn("crash")} == {1, 2}, "a minority"
    for faults in drawn("silence"):
        assert all(isinstance(fault, Cut) and len(fault.sources) <= 2 for fault in faults.events)
    for faults in drawn("partition"):
        for fault in faults.events:
            assert isinstance(fault, Cut) and fault.lasts
            assert {*fault.sources, *fault.targets} == set(PEERS) and not {*fault.sources} & {*fault.targets}
    kinds = {type(fault) for faults in drawn("mixed") for fault in faults.events}
    assert kinds == {Crash, Cut, Reset, Slow, Mislead, Skew}
    assert {*CALM, *BREAKING} < {*FAULTS}


# -- as they happen ---------------------------------------------------------------------------------------------------


class Stage:
    """A network, and what a watcher sees of it each second."""

    def __init__(self, faults: Faults) -> None:
        self.network = SimNetwork(Trace(), 0.1)
        for peer in PEERS[:3]:
            self.network.join(peer)
        self.directory_faults = DirectoryFaults()
        self.paused = Activity.WORK
        self.injector = Injector(faults, self.network, self.directory_faults, self._restart, self._pause)

    def _restart(self, peer: PeerId) -> None:
        self.network.restart(peer)

    def _pause(self, peer: PeerId, wanted: Activity) -> None:
        if peer == "p0":
            self.paused = wanted

    def run(self, seconds: int = 10, heal_at: int | None = None) -> list[str]:
        """A word each second: the state of p0, of its links to and from p1, and of the directory."""
        seen = []

        async def main() -> None:
            self.injector.start()
            for second in range(seconds):
                if second == heal_at:
                    self.injector.heal()
                await asyncio.sleep(0.5)
                seen.append(self.state())
                await asyncio.sleep(0.5)

        simloop.run(main())
        return seen

    def state(self) -> str:
        node, links = self.network.nodes["p0"], self.network.link
        letters = {
            "x": not node.process.alive, ">": links("p0", "p1").blocked, "<": links("p1", "p0").blocked,
            "s": node.slowness > 1, "f": self.directory_faults.forget_share > 0,
            "r": self.paused is Activity.REST, "a": self.paused is Activity.AWAY,
        }  # fmt: skip
        return "".join(letter for letter, holds in letters.items() if holds) or "-"


@pytest.mark.parametrize(
    "faults, states",
    [
        (Faults().crash("p0", at=3), "- - - x x x x x x x"),
        (Faults().crash("p0", at=3, lasts=4), "- - - x x x x - - -"),
        (Faults().crash("p0", at=3).restart("p0", at=5), "- - - x x - - - - -"),
        (Faults().crash("p0", at=1, lasts=2).crash("p0", at=5, lasts=2), "- x x - - x x - - -"),
        (Faults().restart("p0", at=3), "- - - - - - - - - -"),
        (Faults().silence({"p0"}, {"p1"}, at=2, heal=4), "- - >< >< - - - - - -"),
        (Faults().stall("p0", "p1", at=2, lasts=3), "- - > > > - - - - -"),
        (Faults().silence_one_way("p1", "p0", at=2, heal=5), "- - < < < - - - - -"),
        (Faults().stall("p0", "p1", at=1, lasts=3).stall("p0", "p1", at=3, lasts=4), "- > > > > > > - - -"),
        (Faults().slow("p0", 10, at=2, heal=6), "- - s s s s - - - -"),
        (Faults().mislead(2, 6, forget_share=0.5), "- - f f f f - - - -"),
        (Faults().pause("p0", at=2, lasts=3), "- - r r r - - - - -"),
        (Faults().pause("p0", at=2, away=True), "- - a a a a a a a a"),
    ],
)
def test_fault_lasts_for_its_duration(faults: Faults, states: str) -> None:
    stage = Stage(faults)
    assert stage.run() == states.split()
    assert [fault for _, fault in stage.injector.struck] == list(faults.events)
    assert not any(link.blocked for link in stage.network.links.values())


def test_healing_ends_faults_and_prevents_new_ones() -> None:
    at_1 = Faults().crash("p0", at=1).silence({"p0"}, {"p1"}, at=1).slow("p2", 5, at=1).mislead(1, lie_share=1.0)
    at_8 = at_1.pause("p0", at=1, away=True).crash("p1", at=8).silence({"p1"}, {"p2"}, at=8)
    stage = Stage(at_8)
    states = stage.run(20, heal_at=5)
    assert states[1] == "x><a" and states[5:] == ["-"] * 15
    assert [node.incarnation for node in stage.network.nodes.values()] == [1, 0, 0]
    assert all(node.slowness == 1.0 for node in stage.network.nodes.values())
    assert stage.directory_faults.lie_share == 0.0 and len(stage.injector.struck) == 5
    assert {len(stage.network.contacts.views[peer].live()) for peer in PEERS[:3]} == {3}
