"""A simulated swarm whose members leave: the process of a peer ends with its last round, as a real one does."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from protocols.base import Member, PeerId
from protocols.history.chain import DecidedRound
from tests.sim.host import EPOCH
from tests.sim.scenario import Scenario
from tests.sim.scenario_runner import ScenarioRunner, ScenarioSetup

INNER_STEPS = 10


class LongRounds(ScenarioSetup):
    """Rounds of ten inner steps instead of two, so that a leave can fall into the middle of one."""

    __slots__ = ()

    def scenario(self) -> Scenario:
        return replace(super().scenario(), inner_steps=INNER_STEPS)


class LeavingPeers(ScenarioRunner):
    """Peers that can leave; the process of one that does ends with its last round."""

    def __init__(self, cast: ScenarioSetup) -> None:
        super().__init__(cast)
        self.ended: dict[Member, float] = {}

    def leave(self, *peers: PeerId) -> None:
        for peer in peers:
            with self.network.nodes[peer].process.entered():  # what it sends dies with it
                self.replicas[peer].leave()

    def goes_on(self, peer: PeerId) -> bool:
        return not self.replicas[peer].leaving

    def _start(self, peer: PeerId) -> asyncio.Task[None]:
        main, node = super()._start(peer), self.network.nodes[peer]
        main.add_done_callback(lambda _: self._end_of(peer, node.member))
        return main

    def _end_of(self, peer: PeerId, member: Member) -> None:
        node = self.network.nodes[peer]
        if node.process.alive and node.member == member:
            self.ended[member] = self.now
            self.kill(peer)

    async def gone(self, *peers: PeerId, seconds: float = 20.0) -> float:
        """Wait until these have left; returns how long it took."""
        return await self.until(lambda: not set(peers) & set(self.alive()), seconds, f"the end of {peers}")


class LeavingScenario(LeavingPeers):
    def __init__(self, cast: ScenarioSetup, slow: dict[PeerId, float] | None = None) -> None:
        super().__init__(cast)
        self.slow = slow or {}
        paces = tuple(self.slow.get(peer, cast.pace_seconds) for peer in self.peers)
        self.scenario = replace(self.scenario, step_seconds=paces)

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

    def seconds(self, peer: PeerId, round_number: int) -> float:
        """How long a round took, from the end of the one before."""
        ends = {each["round"]: each["time"] - EPOCH for each in self.histories[peer]}
        return float(ends[round_number] - ends[round_number - 1])
