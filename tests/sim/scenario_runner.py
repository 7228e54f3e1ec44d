"""Scripted scenarios: a test's coroutine cuts off, kills, revives and observes simulated peers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from node.outer.replicated_loop import ReplicatedOuterLoop
from node.reporting.report import RoundReport, tokens_counted
from protocols.base import Head, Member, PeerId, Settings, Trainer, Vector
from protocols.butterfly.averager import Butterfly
from protocols.butterfly.round import Round
from protocols.butterfly.vote import RoundVote
from protocols.consensus.record import Kind, coordinators, genesis
from protocols.history.chain import Chain, DecidedRound
from tests.sim.account import Head as DecidedHead
from tests.sim.host import EPOCH
from tests.sim.scenario import Scenario
from tests.sim.swarm import T
from tests.sim.transport import SimTransport
from tests.sim.world import RUN, World
from tests.support import checkers

LATENCY_SECONDS = 0.02
LOOK_SECONDS = 0.1
INNER_STEPS, STEP_SECONDS = 10, 0.5
MIDDLE_SECONDS = 2.2
"""Into a round of `leaving_swarm`, which lasts five."""


@dataclass(frozen=True, slots=True)
class ScenarioSetup:
    """The peers of a scripted scenario, and their settings.

    Attributes:
        founders: number of peers in the first roster; None: all. The script starts the others by `begin`.
        voters: of these in a run with clusters; the others are associates. 0: a run without clusters.
        fork_peers, keep_rounds: as in `Settings`; None: its default.
        wait_for: the first member trains once the roster has so many.
        latency_seconds: of every link.
        pace_seconds: of an inner step; `slow` says it for single peers.
        every_rounds: peers restart from disks; before each round that it divides they write a checkpoint.
        uplinks: bytes/s of each peer; None: the same for all.
        stages, batches, lookahead, chains: of a pipeline, as in `Scenario`; fragments, too.
    """

    peers: int
    founders: int | None = None
    voters: int = 0
    fork_peers: int = 1
    keep_rounds: int | None = None
    wait_for: int = 1
    latency_seconds: float = LATENCY_SECONDS
    pace_seconds: float = STEP_SECONDS
    slow: dict[PeerId, float] = field(default_factory=dict)
    inner_steps: int = 2
    every_rounds: int | None = None
    codec: str = "int8"
    elements: int = 400
    chunk_elements: int = 50
    uplinks: tuple[float, ...] | None = None
    jitter: bool = False
    stages: int = 1
    batches: int = 4
    lookahead: int = 0
    fragments: int = 1
    chains: bool = False

    def scenario(self) -> Scenario:
        return Scenario(
            peers=self.peers,
            codec=self.codec,
            elements=self.elements,
            chunk_elements=self.chunk_elements,
            inner_steps=self.inner_steps,
            uplinks=self.uplinks or (1.25e7,) * self.peers,
            step_seconds=tuple(self.slow.get(f"p{index}", self.pace_seconds) for index in range(self.peers)),
            jitter=self.jitter,
            stages=self.stages,
            batches=self.batches,
            lookahead=self.lookahead,
            fragments=self.fragments,
            chains=self.chains,
            voters=self.voters,
            clusters=bool(self.voters),
        )


@dataclass(frozen=True, slots=True)
class Checkpoint:
    links: tuple[DecidedRound, ...]
    anchor: Vector
    velocity: Vector


class ScenarioRunner(World):
    """Peers p0, p1, …, which run until the script ends. The process of one that leaves ends with its last round."""

    def __init__(self, cast: ScenarioSetup) -> None:
        super().__init__(cast.scenario())
        self.cast = cast
        self.network.latency_seconds = cast.latency_seconds
        self.founders = self.peers[: cast.founders]
        self.roster = tuple(Member(peer) for peer in self.founders[: cast.voters or None])
        self.disks: dict[PeerId, Checkpoint] = {}  # a test may remove or replace one
        self.ended: dict[Member, float] = {}  # member that left -> when its process ended

    def play(self, story: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Start the founders, run the script, kill all peers, and check the invariants."""

        result = super().play(story)
        if self.network.bugs:
            raise self.network.bugs[0]
        found = [*checkers.check(self.histories), *self.unclean()]
        assert not found, "\n".join(str(each) for each in found[:10])
        return result

    async def set_up(self) -> None:
        for peer in self.founders:
            self.begin(peer)

    async def finish(self) -> None:
        for peer in self.alive():
            self.network.kill(peer)
        await asyncio.sleep(0.0)

    def unclean(self) -> list[checkers.Violation]:
        return [
            checkers.Violation("no-leak", node.peer, 0, f"{len(node.process.tasks)} tasks are left over")
            for node in (*self.network.past, *self.network.nodes.values())
            if node.process.tasks
        ]

    # -- starts and ends ----------------------------------------------------------------------------------------------

    def begin(self, peer: PeerId) -> None:
        rate = self.scenario.uplinks[self.peers.index(peer)] if self.scenario.uplinks else None
        self.network.join(peer, rate)
        self._start(peer)

    async def begun(self, *peers: PeerId) -> None:
        """Start these peers for the first time."""
        for peer in peers:
            self.begin(peer)
        await asyncio.sleep(0.0)

    def kill(self, peer: PeerId) -> None:
        """Kill a peer; nothing of its present incarnation is kept."""
        self.network.kill(peer)
        self.network.nodes[peer].handlers.clear()

    def revive(self, peer: PeerId) -> None:
        self._revive(peer)

    async def revived(self, *peers: PeerId) -> None:
        """Start the next incarnation of these killed peers."""
        for peer in peers:
            self.revive(peer)
        await asyncio.sleep(0.0)

    async def restarted(self, *peers: PeerId) -> None:
        """Kill these peers, and start their next incarnations."""
        for peer in peers:
            self.kill(peer)
        await self.revived(*peers)

    def leave(self, *peers: PeerId) -> None:
        for peer in peers:
            with self.network.nodes[peer].process.entered():  # what it sends dies with it
                self.replicas[peer].leave()

    async def gone(self, *peers: PeerId, seconds: float = 20.0) -> float:
        """Wait until these have left; returns how long it took."""
        return await self.until(lambda: not set(peers) & set(self.alive()), seconds, f"the end of {peers}")

    def goes_on(self, peer: PeerId) -> bool:
        return not self.replicas[peer].leaving

    def _start(self, peer: PeerId) -> asyncio.Task[None]:
        main, node = super()._start(peer), self.network.nodes[peer]
        main.add_done_callback(lambda _: self._end_of(peer, node.member))
        return main

    def _end_of(self, peer: PeerId, member: Member) -> None:
        """So that it sends nothing more."""
        node = self.network.nodes[peer]
        if node.process.alive and node.member == member:
            self.ended[member] = self.now
            self.kill(peer)

    # -- disks --------------------------------------------------------------------------------------------------------

    async def restored(self, outer_loop: ReplicatedOuterLoop) -> None:
        if kept := self.disks.get(outer_loop.me.peer):
            outer_loop.chain.switch(genesis(RUN, outer_loop.chain.head.key.scope), kept.links)
            outer_loop.anchor.copy_(kept.anchor)
            outer_loop.state.velocity.copy_(kept.velocity)
            await outer_loop.trainer.write(outer_loop.anchor)
            await outer_loop.state.hash()
            await outer_loop.state.keep(outer_loop._snapshots, outer_loop.chain.head.key)
            outer_loop.recall(tokens_counted(RoundReport(**each) for each in self.histories[outer_loop.me.peer]))

    def entering(self, peer: PeerId, head: DecidedHead) -> None:
        super().entering(peer, head)
        if self.cast.every_rounds and head.key.round % self.cast.every_rounds == 0:
            links = self.chain(peer).since(genesis(RUN, head.key.scope))
            outer_loop = self.replicas[peer]
            self.disks[peer] = Checkpoint(links, outer_loop.anchor.clone(), outer_loop.state.velocity.clone())

    def _settings(self, index: int, trainer: Trainer, transport: SimTransport) -> Settings:
        settings = super()._settings(index, trainer, transport)
        cast, me = self.cast, self.peers[index]

        def least_members() -> int:
            return 1 if self.chain(me).trained else cast.wait_for

        keep_rounds = cast.keep_rounds or settings.keep_rounds
        return replace(settings, fork_peers=cast.fork_peers, keep_rounds=keep_rounds, least_members=least_members)

    def silence(self, peer: PeerId) -> None:
        self.cut([peer], self.peers)

    # -- observing ----------------------------------------------------------------------------------------------------

    def alive(self) -> list[PeerId]:
        return [peer for peer, node in self.network.nodes.items() if node.process.alive]

    def chain(self, peer: PeerId) -> Chain:
        return self.replicas[peer].chain

    def head(self, peer: PeerId) -> Head:
        return self.chain(peer).head

    def since(self, peer: PeerId, round_number: int) -> tuple[DecidedRound, ...]:
        """The decided rounds that a peer knows, from a round on."""
        links = self.chain(peer).since(self.head_of(peer, round_number))
        assert links and links[0].record.round == round_number
        return links

    def head_of(self, peer: PeerId, round_number: int) -> bytes:
        """The lineage that a round of a peer's branch extends."""
        chain = self.chain(peer)
        lineages = (report["parent"] for report in self.histories[peer] if report["round"] == round_number)
        return next(bytes.fromhex(each) for each in lineages if bytes.fromhex(each) in chain)

    def forks(self, peer: PeerId) -> list[DecidedRound]:
        """The FORK records on a peer's branch."""
        chain = self.chain(peer)
        return [link for link in chain.since(chain.locator()[-1]) if link.record.kind == Kind.FORK]

    def round_seconds(self, peer: PeerId, round_number: int) -> float:
        """How long a round took, from the end of the one before."""
        ends = {each["round"]: each["time"] - EPOCH for each in self.histories[peer]}
        return float(ends[round_number] - ends[round_number - 1])

    def averager(self, peer: PeerId) -> Butterfly:
        averager = self.replicas[peer].averager
        assert isinstance(averager, Butterfly)
        return averager

    def session(self, peer: PeerId) -> Round | None:
        """The present or last session of a peer."""
        return self.averager(peer)._round

    def vote(self, peer: PeerId) -> RoundVote | None:
        session = self.session(peer)
        return session.vote if session else None

    def coordinator(self, peer: PeerId, ballot: int = 0) -> PeerId:
        """The member that owns a ballot of a peer's present round."""
        head = self.head(peer)
        order = coordinators(head.key.lineage, head.roster)
        return order[ballot % len(order)]

    def one_branch(self, peers: Sequence[PeerId] | None = None) -> bool:
        """Whether all peers are on one branch, at most one round apart."""
        heads = [self.head(peer) for peer in peers or self.alive()]
        last = max(heads, key=lambda head: head.key.round)
        ahead = next(peer for peer in peers or self.alive() if self.head(peer) is last)
        return all(head.key.lineage in self.chain(ahead) and head.key.round >= last.key.round - 1 for head in heads)

    def whole(self) -> bool:
        """Whether all live peers are on one branch, whose roster is exactly their present incarnations."""
        members = {self.network.nodes[peer].member for peer in self.alive()}
        return self.one_branch() and all(set(self.head(peer).roster) == members for peer in self.alive())

    def outcomes(self, peer: PeerId, since: float = 0.0) -> list[str]:
        return [str(each["outcome"]) for each in self.reports(peer, since)]

    def reports(self, peer: PeerId, since: float = 0.0) -> list[checkers.Report]:
        return [each for each in self.histories[peer] if each["time"] - EPOCH >= since]

    def caught_up(self, peer: PeerId, since: float = 0.0) -> list[checkers.Report]:
        return [each for each in self.reports(peer, since) if moved_over(each)]

    async def until(self, condition: Callable[[], bool], seconds: float, what: str = "") -> float:
        """Wait until a condition holds; returns how long it took."""
        began = self.now
        while not condition():
            assert self.now - began <= seconds, f"{what or 'it'} did not come about in {seconds:g} s: {self.scene()}"
            await asyncio.sleep(LOOK_SECONDS)
        return self.now - began

    async def rounds(self, count: int, peers: Sequence[PeerId] | None = None, seconds: float = 600.0) -> float:
        """Wait until each of these peers (default: all live ones) is `count` rounds further; returns the seconds."""
        peers = peers or self.alive()
        await asyncio.sleep(0.0)  # peers that were just started take part
        goal = count + max(self.head(peer).key.round for peer in peers)
        return await self.until(
            lambda: all(self.head(peer).key.round >= goal for peer in peers), seconds, f"round {goal}"
        )

    def scene(self) -> str:
        return "; ".join(
            f"{peer} at {self.head(peer).key.round} {self.head(peer).key.lineage.hex()[:6]}"
            f" of {'+'.join(f'{m.peer}.{m.incarnation}' for m in self.head(peer).roster)}"
            for peer in self.alive()
            if peer in self.replicas
        )


def leaving_swarm(peers: int, **changes: Any) -> ScenarioRunner:
    """Peers with long rounds, so that a leave can fall into the middle of one."""
    return ScenarioRunner(ScenarioSetup(peers, inner_steps=INNER_STEPS, **changes))


def moved_over(report: checkers.Report) -> bool:
    """Whether a report says that the peer went over to what others decided."""
    return report["outcome"] == "superseded" and report["lineage"] != report["parent"]
