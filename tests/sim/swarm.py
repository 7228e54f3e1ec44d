"""Peers on one simulated network, and a test's coroutine among them: what all simulated swarms have in common."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

from protocols.base import Host, PeerId
from tests.sim import loop as simloop
from tests.sim.host import Entries, sim_host
from tests.sim.network import SimNetwork
from tests.sim.trace import Trace
from tests.support.waiting import now

T = TypeVar("T")


class SimSwarm:
    """Peers on one network. A subclass says what a peer is, and starts its work by `spawn`."""

    seed = 1
    grace_seconds = 0.0

    def __init__(self, **network: Any) -> None:
        """Takes the options of `SimNetwork`."""
        self.network = SimNetwork(Trace(), **network)
        self.entries: Entries = {}
        self.running: list[asyncio.Task[Any]] = []
        self._errors: list[BaseException] = []

    @property
    def now(self) -> float:
        return now()

    # -- peers --------------------------------------------------------------------------------------------------------

    def join(self, peer: PeerId, bytes_per_second: float | None = None) -> Host:
        return sim_host(self.network, self.network.join(peer, bytes_per_second), self.seed, self.entries)

    def spawn(self, peer: PeerId, job: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run a job in a peer's process: it ends when the peer is killed."""
        with self.network.nodes[peer].process.entered():
            task = asyncio.get_running_loop().create_task(job)
        self.running.append(task)
        task.add_done_callback(self._over)
        return task

    def _over(self, task: asyncio.Task[Any]) -> None:
        self.running.remove(task)
        if not task.cancelled() and (error := task.exception()):
            self._errors.append(error)

    def cut(self, some: Iterable[PeerId], others: Iterable[PeerId]) -> None:
        """Block the links between two groups in both directions."""
        for one, other in _pairs(some, others):
            self.network.block(one, other)
            self.network.block(other, one)

    def heal(self, some: Iterable[PeerId], others: Iterable[PeerId]) -> None:
        for one, other in _pairs(some, others):
            self.network.heal(one, other)
            self.network.heal(other, one)

    # -- the play -----------------------------------------------------------------------------------------------------

    async def set_up(self) -> None:
        """Hook: start the peers that are there from the beginning."""

    async def finish(self) -> None:
        """Hook: what must hold after the play."""

    def play(self, main: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Set up, run `main`, wait `grace_seconds`, and finish. Tasks that still run are cancelled."""

        async def whole() -> T:
            await self.set_up()
            try:
                result = await main()
                await asyncio.sleep(self.grace_seconds)
            finally:  # such an error says why what `main` waits for does not come
                for error in (*self._errors, *self.network.bugs):
                    raise error
            await self.finish()
            return result

        return simloop.run(whole())

    def assert_nothing_left(self) -> None:
        """No process has tasks or streams."""
        for node in self.network.nodes.values():
            assert not node.process.tasks and not node.ends, f"{node.peer}: {node.process.tasks} {node.ends}"


def _pairs(some: Iterable[PeerId], others: Iterable[PeerId]) -> list[tuple[PeerId, PeerId]]:
    others = list(others)
    return [(one, other) for one in some for other in others if one != other]
