"""A fault at one message of a round: the list of messages, the fault, and what must hold afterwards."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from protocols.base import PeerId
from protocols.consensus.vote_tally import majority
from tests.sim import loop as simloop
from tests.sim.account import Head
from tests.sim.faults import Faults, Message
from tests.sim.scenario import Scenario
from tests.sim.world import World
from tests.support import checkers
from tests.support.checkers import Violation

ROUND = 1
"""The round whose messages are enumerated: the second of three."""
LIMIT_SECONDS = 300.0
STALL_SECONDS = 3.0
"""Shorter than the failure detector takes."""
PAIRS = 2000
"""Default number of pairs of points that are drawn, as there are too many to simulate all."""
KINDS = ("crash", "silence", "one-way", "stall")


@dataclass(frozen=True, slots=True)
class Point:
    peer: PeerId
    number: int
    way: str
    other: PeerId

    def __str__(self) -> str:
        return f"{self.peer}:{self.number}"

    def fault(self, kind: str, peers: Sequence[PeerId]) -> Faults:
        at = Message(self.peer, self.number)
        source, target = (self.peer, self.other) if self.way == "sent" else (self.other, self.peer)
        match kind:
            case "crash":
                return Faults().crash(self.peer, at_message=self.number)
            case "silence":
                return Faults().silence({self.peer}, set(peers) - {self.peer}, at)
            case "one-way":
                return Faults().silence_one_way(source, target, at)
            case "stall":
                return Faults().stall(source, target, at, STALL_SECONDS)
        raise ValueError(f"unknown kind {kind!r}; known: {', '.join(KINDS)}")


def small(peers: int, protocol: str = "butterfly", seed: int = 0, stages: int = 1) -> Scenario:
    """Rounds that are as short as possible: two chunks in each part, two inner steps (of two microbatches each)."""
    return Scenario(
        protocol=protocol,
        peers=peers,
        rounds=ROUND + 2,
        seed=seed,
        codec="int8",
        elements=16 * peers,
        chunk_elements=8,
        inner_steps=2,
        uplinks=(1.25e6,) * peers,
        step_seconds=tuple(1.0 + 0.1 * index for index in range(peers)),
        jitter=True,
        stages=stages,
        batches=2,
    )


class Recording(World):
    """Records the messages of each peer from the start of its second round to the start of its third."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        self.points: list[Point] = []
        self._rounds: dict[PeerId, int] = {}
        self.network.watch = self._watch

    def entering(self, peer: PeerId, head: Head) -> None:
        super().entering(peer, head)
        self._rounds[peer] = head.key.round

    def _watch(self, peer: PeerId, number: int, way: str, other: PeerId) -> None:
        if self._rounds.get(peer) == ROUND:
            self.record(peer, number, way, other)

    def record(self, peer: PeerId, number: int, way: str, other: PeerId) -> None:
        self.points.append(Point(peer, number, way, other))


class MessageFault(World):
    """A run with faults, until all peers that should continue have done so."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        self.at: dict[PeerId, Head] = {}
        self.due = ROUND + 2
        """The round that all able peers must reach: two after the round in which the last fault happened."""

    async def _break_and_heal(self) -> None:
        await self._wait(LIMIT_SECONDS)

    def entering(self, peer: PeerId, head: Head) -> None:
        super().entering(peer, head)
        self.at[peer] = head
        if not self.all_struck():
            self.due = max(self.due, head.key.round + 2)
        if self.satisfied():
            self._done.set()

    def satisfied(self) -> bool:
        """Whether all able peers have continued without the others. Without a majority nothing is expected."""
        able = self.able()
        return bool(able) and self.all_struck() and all(self.went_on(peer) and not self.absent(peer) for peer in able)

    def all_struck(self) -> bool:
        return len(self.injector.struck) == len(self.injector.faults.events)

    def able(self) -> list[PeerId]:
        """The live peers that are in touch with a majority of the roster that they know, and that can train."""
        contacts, able = self.network.contacts, []
        for peer in self.peers:
            founders = self.founders_of(self.peers.index(peer))
            roster = [member.peer for member in (self.at[peer].roster if peer in self.at else founders)]
            near = [other for other in roster if other == peer or contacts.open(peer, other)]
            alive = self.network.nodes[peer].process.alive
            if alive and len(near) >= majority(len(roster)) and self.can_train(peer):
                able.append(peer)
        return able

    def could(self) -> bool:
        """Whether a majority of each scope is alive and mutually connected, whatever their rosters are."""

        def near(some: Sequence[PeerId]) -> bool:
            return all(self.network.contacts.open(*pair) for pair in itertools.combinations(some, 2))

        def could(group: Sequence[PeerId]) -> bool:
            alive = [peer for peer in group if self.network.nodes[peer].process.alive]
            return any(near(some) for some in itertools.combinations(alive, majority(len(group))))

        return all(could(group) for group in self.groups())

    def went_on(self, peer: PeerId) -> bool:
        return peer in self.at and self.at[peer].key.round >= self.due and self.met_since(peer, self.due - 1)

    def absent(self, peer: PeerId) -> list[PeerId]:
        able = self.able()
        return [member.peer for member in self.at[peer].roster if member.peer not in able]

    def judge(self) -> Iterator[Violation]:
        if not self.injector.struck:
            yield Violation("missed", "", ROUND, "the fault never happened: the run differs from the one without it")
        if self.FORKS and not self.able() and self.could():
            yield Violation(
                "goes-on", "", ROUND, "no peer is in touch with a majority of its roster, though most are there"
            )
        for peer in self.able():
            where = self.at[peer].key.round if peer in self.at else 0
            if not self.went_on(peer):
                what = f"at round {where}, not {self.due}, or with no other peer, {LIMIT_SECONDS:g} s after all began"
                yield Violation("goes-on", peer, where, f"in touch with a majority, and {what}")
            elif absent := self.absent(peer):
                yield Violation("left-out", peer, where, f"{', '.join(absent)} still in the roster")


@dataclass(slots=True)
class Verdict:
    points: tuple[Point, ...]
    outcome: str
    violations: list[Violation]
    trace: list[str]


def enumerate_points(
    scenario: Scenario, world_type: type[World] = World, recording_type: type[Recording] = Recording
) -> list[Point]:
    recording = type("Recorded", (recording_type, world_type), {})(scenario)
    simloop.run(recording.run())
    if recording.network.bugs or any(len(history) < scenario.rounds for history in recording.histories.values()):
        raise RuntimeError(f"the run without faults fails: {recording.network.bugs}")
    points: list[Point] = recording.points
    return points


def strike(
    scenario: Scenario,
    kind: str,
    points: tuple[Point, ...],
    world_type: type[World] = World,
    struck_type: type[MessageFault] = MessageFault,
) -> Verdict:
    faults = sum((point.fault(kind, scenario.names()) for point in points), start=Faults())
    world = type("Played", (struck_type, world_type), {})(replace(scenario, faults=faults))
    found: list[Violation] = []

    async def end() -> None:
        found.extend(world.judge())
        await World._end(world)

    world._end = end
    try:
        simloop.run(world.run())
        bugs = world.network.bugs
    except Exception as error:  # noqa: BLE001 - any error must be reported with its point
        bugs = [error]
    found += [Violation("crash", "", ROUND, f"{type(error).__name__}: {error}") for error in bugs]
    found += world.check(world.histories) + world.leaks()
    return Verdict(points, _outcome(world), found, list(world.trace.lines))


def _outcome(world: World) -> str:
    reports = [report for history in world.histories.values() for report in history if report["round"] == ROUND]
    return next((r["outcome"] for r in reports if r["outcome"] in checkers.DECIDED), "undecided")


def combinations(points: Sequence[Point], pairs: bool, sample: int | None, seed: int) -> list[tuple[Point, ...]]:
    """The points to simulate, or pairs of points of different peers: all, or a sample drawn by the seed."""
    if not pairs:
        chosen: list[tuple[Point, ...]] = [(point,) for point in points]
    else:
        chosen = [pair for pair in itertools.combinations(points, 2) if pair[0].peer != pair[1].peer]
        sample = sample or PAIRS
    if sample is None or sample >= len(chosen):
        return chosen
    return random.Random(f"sample/{seed}").sample(chosen, sample)


def named(points: Sequence[Point], names: str) -> list[tuple[Point, ...]]:
    """The points of `p1:17` or `p1:17,p2:30`."""
    known = {str(point): point for point in points}
    missing = [name for name in names.split(",") if name not in known]
    if missing:
        raise ValueError(f"no message {missing[0]!r} in this round; messages are {points[0]} … {points[-1]}")
    return [tuple(known[name] for name in names.split(","))]
