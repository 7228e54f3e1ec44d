"""The simulated network as a world of the conformance suite."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from protocols.base import PeerId
from tests.sim import loop as simloop
from tests.sim.network import SimNetwork
from tests.sim.trace import Trace
from tests.sim.transport import SimTransport


class SimPeers:
    """`tests.conformance.worlds.Peers` in virtual time."""

    stranger: PeerId = "stranger"
    streams_survive_daemon = False

    def __init__(self, network: SimNetwork, count: int) -> None:
        self._network = network
        self.transports: list[SimTransport] = [network.join(f"p{index}") for index in range(count)]

    async def kill_peer(self, index: int) -> None:
        self._network.kill(self.transports[index].me)

    async def kill_daemon(self, index: int) -> None:
        self._network.reset_streams(self.transports[index].me)

    async def break_streams(self, index: int) -> None:
        await self.kill_daemon(index)

    async def freeze_peer(self, index: int) -> None:
        me = self.transports[index].me
        for other in self.transports:
            self._network.block(me, other.me)
            self._network.block(other.me, me)

    def resources(self) -> int:
        return len(asyncio.all_tasks()) + sum(len(node.ends) for node in self._network.nodes.values())


class SimWorld:
    """`tests.conformance.worlds.World` on virtual time."""

    def run(self, body: Callable[[SimPeers], Awaitable[None]], count: int = 2) -> None:
        network = SimNetwork(Trace())

        async def main() -> None:
            await body(SimPeers(network, count))

        simloop.run(main())
