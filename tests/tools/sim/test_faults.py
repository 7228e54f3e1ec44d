"""Faults as data, and that they happen: each kind when it is due, for as long as it lasts, and no more once healed."""

from __future__ import annotations

import asyncio
import random

import pytest

from node.outer.activity import Activity
from protocols.base import PeerId
from tests.sim import loop as simloop
from tests.sim.families import BREAKING, CALM, FAULTS, skew
from tests.sim.faults import Crash, Cut, Faults, Lie, Message, Mislead, Reset, Restart, Skew, Slow
from tests.sim.host import DirectoryFaults
from tests.sim.injection import Injector
from tests.sim.network import SimNetwork
from tests.sim.trace import Trace

PEERS = ("p0", "p1", "p2", "p3", "p4")

# -- as data ----------------------------------------------------------------------------------------------------------


def everything() -> Faults:
    return (
        Faults()
        .crash("p3", at_message=17, lasts=20)
        .crash("p1", at=40.0)
        .restart("p1", at=60)
        .silence({"p2", "p1"}, {"p3"}, at=40, heal=90)
        .silence_one_way("p1", "p2", at=Message("p1", 30))
        .stall("p1", "p2", at=3, lasts=0.5)
        .reset("p1", at_message=9)
        .slow("p2", 10, at=5, heal=6)
        .mislead(1, 2, forget_share=0.5)
        .skew("p1", -7)
        .lie("p0", "nan")
    )


def test_faults_repr_evaluates_to_equal_value() -> None:
    faults = everything()
    names = (Crash, Cut, Faults, Lie, Message, Mislead, Reset, Restart, Skew, Slow)
    assert eval(repr(faults), {each.__name__: each for each in names}) == faults == everything()
    assert hash(faults) == hash(everything()) and len(faults.events) == 11
    assert faults.events[3] == Cut(("p1", "p2"), ("p3",), True, 40, 50.0)
    assert faults.events[0] == Crash("p3", Message("p3", 17), 20)


def test_builder_does_not_change_the_original() -> None:
    few = Faults().crash("p0", at=1)
    more = few.reset("p1", at=2)
    assert len(few.events) == 1 and more.events[:1] == few.events and few + more.also() == few.also(*more.events)


def test_undated_faults_are_listed_separately() -> None:
    faults = everything().skew("p1", 2)
    assert faults.skew_seconds("p1") == -5 and faults.skew_seconds("p0") == 0 and faults.lies() == {"p0": "nan"}
    assert len(faults.dated()) == 9 and faults.peers() == {"p0", "p1", "p2", "p3"}


def test_cut_links_exclude_self_links() -> None:
    assert Cut(("a", "b"), ("b", "c"), False, 0.0).links() == [("a", "b"), ("a", "c"), ("b", "c")]
    assert len(Cut(("a", "b"), ("c",), True, 0.0).links()) == 4


@pytest.mark.parametrize(
    "build, words",
    [
        (lambda: Faults().crash("p0"), "either at a time or at a message"),
        (lambda: Faults().reset("p0", at=1, at_message=1), "either at a time or at a message"),
        (lambda: Faults().silence({"a"}, {"b"}, at=9, heal=3), "before it begins"),
        (lambda: Faults().silence({"a"}, {"b"}, at=Message("a", 1), heal=3), "lasts a number of seconds"),
    ],
)
def test_invalid_faults_are_rejected(build: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        build()  # type: ignore[operator]


# -- families ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BREAKING)
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_fault_family_is_determined_by_its_seed(name: str, count: int) -> None:
    peers, drawn = PEERS[:count], set()
    for seed in range(50):
        faults = BREAKING[name](random.Random(seed), peers, 60.0)
        assert faults == BREAKING[name](random.Random(seed), peers, 60.0)
        assert faults.peers() <= set(peers)
        drawn.add(faults)
    assert len(drawn) == 50 or count == 1


@pytest.mark.parametrize("name", ["crash", "silence"])
def test_crashes_and_silence_hit_only_a_minority(name: str) -> None:
    for seed in range(100):
        for fault in BREAKING[name](random.Random(seed), PEERS, 60.0).events:
            assert isinstance(fault, Crash | Cut)
            assert isinstance(fault, Crash) or len(fault.sources) <= 2
        crashed = BREAKING["crash"](random.Random(seed), PEERS, 60.0).peers()
        assert 1 <= len(crashed) <= 2


def test_partition_splits_all_peers_and_heals() -> None:
    for seed in range(100):
        for fault in BREAKING["partition"](random.Random(seed), PEERS, 60.0).events:
            assert isinstance(fault, Cut) and fault.lasts
            assert {*fault.sources, *fault.targets} == set(PEERS) and not {*fault.sources} & {*fault.targets}


def test_mixed_faults_include_several_families() -> None:
    kinds = {type(fault) for seed in range(40) for fault in BREAKING["mixed"](random.Random(seed), PEERS, 60.0).events}
    assert kinds == {Crash, Cut, Reset, Slow, Mislead, Skew}
    assert {type(fault) for fault in skew(random.Random(1), PEERS, 60.0).events} == {Skew}
    assert {*CALM, *BREAKING} < {*FAULTS} and len(set(FAULTS)) == len(FAULTS)


# -- as they happen ---------------------------------------------------------------------------------------------------


class Stage:
    """A network, and what a watcher sees of it each second."""

    def __init__(self, faults: Faults) -> None:
        self.network = SimNetwork(Trace(), 0.1)
        for peer in PEERS[:3]:
            self.network.join(peer)
        self.directory_faults = DirectoryFaults()
        self.paused = Activity.WORK
        restart, pause = self.network.restart, self._pause
        self.injector = Injector(faults, self.network, self.directory_faults, restart, pause)  # type: ignore[arg-type]

    def _pause(self, peer: PeerId, wanted: Activity) -> None:
        if peer == "p0":
            self.paused = wanted

    def run(self, seconds: int = 20, heal_at: int | None = None) -> list[str]:
        """One letter a second: the state of p0 and of its link to p1."""
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
        node, there, back = (
            self.network.nodes["p0"],
            *(self.network.link(*pair) for pair in (("p0", "p1"), ("p1", "p0"))),
        )
        letters = {
            "x": not node.process.alive,
            ">": there.blocked,
            "<": back.blocked,
            "s": node.slowness > 1,
            "f": self.directory_faults.forget_share > 0,
            "r": self.paused is Activity.REST,
            "a": self.paused is Activity.AWAY,
        }
        return "".join(letter for letter, holds in letters.items() if holds) or "-"


@pytest.mark.parametrize(
    "faults, states",
    [
        (Faults().crash("p0", at=3), "--- x x x x x x x"),
        (Faults().crash("p0", at=3, lasts=4), "---xxxx---"),
        (Faults().crash("p0", at=3).restart("p0", at=5), "---xx-----"),
        (Faults().restart("p0", at=3), "----------"),
        (Faults().stall("p0", "p1", at=2, lasts=3), "-->>>-----"),
        (Faults().silence_one_way("p1", "p0", at=2, heal=5), "--<<<-----"),
        (Faults().stall("p0", "p1", at=1, lasts=3).stall("p0", "p1", at=3, lasts=4), "->>>>>>---"),
        (Faults().slow("p0", 10, at=2, heal=6), "--ssss----"),
        (Faults().mislead(2, 6, forget_share=0.5), "--ffff----"),
        (Faults().pause("p0", at=2, lasts=3), "--rrr-----"),
        (Faults().pause("p0", at=2, away=True), "--aaaaaaaa"),
    ],
)
def test_fault_lasts_for_its_duration(faults: Faults, states: str) -> None:
    stage = Stage(faults)
    assert "".join(stage.run(10)) == states.replace(" ", "")
    assert [fault for _, fault in stage.injector.struck] == list(faults.events)


def test_silence_is_bidirectional_and_spares_other_links() -> None:
    stage = Stage(Faults().silence({"p0"}, {"p1"}, at=2, heal=4))
    assert stage.run(6) == ["-", "-", "><", "><", "-", "-"]
    assert not any(link.blocked for link in stage.network.links.values())
    assert ("p0", "p2") not in stage.network.links or stage.network.link("p0", "p2").parked == []


def test_healing_ends_faults_and_prevents_new_ones() -> None:
    faults = (
        Faults()
        .crash("p0", at=1)
        .silence({"p0"}, {"p1"}, at=1)
        .slow("p2", 5, at=1)
        .mislead(1, lie_share=1.0)
        .pause("p0", at=1, away=True)
        .crash("p1", at=8)
        .silence({"p1"}, {"p2"}, at=8)
    )
    stage = Stage(faults)
    states = stage.run(20, heal_at=5)
    assert states[1] == "x><a" and states[5:] == ["-"] * 15
    assert [node.incarnation for node in stage.network.nodes.values()] == [1, 0, 0]
    assert all(node.slowness == 1.0 for node in stage.network.nodes.values())
    assert stage.directory_faults.lie_share == 0.0 and len(stage.injector.struck) == 5
    live = {peer: stage.network.contacts.views[peer].live() for peer in PEERS[:3]}
    assert {len(members) for members in live.values()} == {3}


def test_peer_killed_twice_restarts_twice() -> None:
    stage = Stage(Faults().crash("p0", at=1, lasts=2).crash("p0", at=5, lasts=2).crash("p0", at=6, lasts=20))
    assert "".join(stage.run(10)) == "-xx--xx---"
    assert stage.network.nodes["p0"].incarnation == 2 and len(stage.network.past) == 2
