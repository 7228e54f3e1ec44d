"""A swarm with replicated state in the simulator: peers that train, vote and catch up until the test is over."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import asdict, replace
from typing import Any

import torch

from node.outer.outer_loop import OuterLoopDeps
from node.outer.replicated_loop import ReplicatedOuterLoop
from node.outer.sgd import OuterSGD
from node.reporting.report import RoundReport
from node.tasks.paced import Paced
from node.training.trainer import InlineTrainer
from protocols.aio import run_with_helper
from protocols.base import Member, PeerId, Settings
from protocols.butterfly.averager import Butterfly
from protocols.butterfly.part_cache import PartCache
from protocols.butterfly.part_store import PartStore
from protocols.gate import Gate
from protocols.history.chain import Chain
from protocols.sync.chain_sync import ChainSync, ChainSyncOptions
from protocols.sync.snapshot import SnapshotBuffer, Snapshots
from tests.sim import loop as simloop
from tests.sim.host import sim_host
from tests.sim.network import SimNetwork, Trace
from tests.support.checkers import check
from tests.support.fake_rounds import RUN

ELEMENTS = 3000
ROUND_SECONDS = 2.0
"""More than a round takes."""
OUTER = OuterSGD(0.7, 0.9, rounds=8, decay=1.0)
SETTINGS = Settings("int8", (ELEMENTS,), 256, keep_rounds=8)


class SwarmPeer:
    """A peer's main loop, as in a node."""

    def __init__(self, swarm: ReplicatedSwarm, name: PeerId) -> None:
        host = sim_host(swarm.network, swarm.network.join(name), 1, {})
        self.chain, snapshots = Chain(RUN, "run", swarm.founders), Snapshots()
        hints = [member.peer for member in swarm.founders]
        gate, store = Gate(), None
        if swarm.make_buffer is not None:
            store = PartStore(swarm.make_buffer, host.compute, gate, most_rounds=5, least_rounds=1)
        part_cache = PartCache(host, store, gate)
        options = ChainSyncOptions(part_cache, on_better=lambda branch: self.averager.supersede())
        self.sync = ChainSync(host, self.chain, swarm.settings, snapshots, lambda: hints, options)
        self.averager = Butterfly(host, swarm.settings, part_cache)
        self.me, self.history = self.averager.me, list[RoundReport]()
        self.newcomer = self.me not in swarm.founders
        trainer = InlineTrainer(Paced(ELEMENTS, ord(name[0])), 4, 0.25)
        anchor = torch.zeros(ELEMENTS) if self.newcomer else trainer.local_training.learner.vectors[0].clone()
        self.outer_loop = ReplicatedOuterLoop(
            self.chain, self.averager, OUTER, OuterLoopDeps(trainer, host.compute, anchor, snapshots)
        )
        self._wall = host.clock.wall

    async def run(self) -> None:
        await run_with_helper(self._train(), self.sync.run())

    async def _train(self) -> None:
        await self.outer_loop.settle()
        if self.newcomer:
            await self._catch_up()
        while True:
            self.history.append(await self.outer_loop.run_round(self._wall))
            if self.history[-1].outcome == "superseded":
                await self._catch_up()

    async def _catch_up(self) -> None:
        deadline = asyncio.get_running_loop().time() + 60.0
        self.history.append(await self.outer_loop.catch_up(self.sync, self._wall, deadline))

    def caught_up(self) -> list[RoundReport]:
        """The reports of successful attempts to catch up."""
        return [each for each in self.history if each.outcome == "superseded" and each.lineage != each.parent]


class ReplicatedSwarm:
    """Peers that run until the test is over.

    Args:
        names: of the founders, separated by spaces.
        make_buffer: makes the buffers in which peers store the parts of past rounds; None: they store none.
        settings: changes of `SETTINGS`.
    """

    def __init__(self, names: str, make_buffer: Callable[[int], SnapshotBuffer] | None = None, **settings: Any) -> None:
        self.make_buffer = make_buffer
        self.network, self.settings = SimNetwork(Trace()), replace(SETTINGS, **settings)
        self.founders = tuple(Member(name) for name in names.split())
        self.peers: dict[PeerId, SwarmPeer] = {}
        self._tasks: list[asyncio.Task[None]] = []

    def begin(self, name: PeerId) -> SwarmPeer:
        peer = self.peers[name] = SwarmPeer(self, name)
        token = simloop.PROCESS.set(self.network.nodes[name].process)
        self._tasks.append(asyncio.get_running_loop().create_task(peer.run()))
        simloop.PROCESS.reset(token)
        return peer

    def cut(self, ones: str, others: str, heal: bool = False) -> None:
        """Block all messages between `ones` and `others`, both ways; with `heal` end that."""
        change = self.network.heal if heal else self.network.block
        for one in ones.split():
            for other in others.split():
                change(one, other), change(other, one)

    def play(self, main: Callable[[], Coroutine[Any, Any, None]]) -> None:
        async def whole() -> None:
            for member in self.founders:
                self.begin(member.peer)
            await main()
            for task in self._tasks:
                assert not task.done() or task.result()
            if self.network.bugs:
                raise self.network.bugs[0]
            assert check({name: [asdict(each) for each in peer.history] for name, peer in self.peers.items()}) == []

        simloop.run(whole())

    def together(self) -> bool:
        """Whether all peers vote on one branch, at most a round apart."""
        chains = [peer.chain for peer in self.peers.values()]
        last = min(chains, key=lambda chain: chain.head.key.round).head
        return all(
            len(chain.head.roster) == len(chains)
            and last.key.lineage in chain
            and chain.head.key.round <= last.key.round + 1
            for chain in chains
        )
