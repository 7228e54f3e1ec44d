"""Injects faults into a simulated network when they are due, and heals all of them at once."""

from __future__ import annotations

import asyncio
import contextvars
from collections import Counter
from collections.abc import Callable

from node.outer.activity import Activity
from protocols.base import PeerId
from tests.sim.faults import Apart, Crash, Cut, Fault, Faults, Message, Mislead, Pause, Reset, Restart, Slow
from tests.sim.host import DirectoryFaults
from tests.sim.network import SimNetwork


class Injector:
    def __init__(
        self,
        faults: Faults,
        network: SimNetwork,
        directory_faults: DirectoryFaults,
        revive: Callable[[PeerId], None],
        pause: Callable[[PeerId, Activity], None] = lambda peer, activity: None,
    ) -> None:
        self.faults = faults
        self.struck: list[tuple[float, Fault]] = []
        self._network, self._directory_faults, self._revive = network, directory_faults, revive
        self._pause = pause
        self._at_messages: dict[tuple[PeerId, int], list[Fault]] = {}
        self._timers: list[asyncio.TimerHandle] = []
        self._cuts: Counter[tuple[PeerId, PeerId]] = Counter()

    def start(self) -> None:
        self._context = contextvars.copy_context()  # of no process, so that no kill cancels what a fault starts
        for fault in self.faults.dated():
            assert isinstance(fault, Crash | Restart | Cut | Reset | Slow | Mislead | Pause | Apart)
            if isinstance(fault.at, Message):
                self._at_messages.setdefault((fault.at.peer, fault.at.number), []).append(fault)
            else:
                self._at(fault.at, self._strike, fault)
        if self._at_messages:
            self._network.watch = self._watch

    def heal(self) -> None:
        network = self._network
        network.watch = None
        for timer in self._timers:
            timer.cancel()
        self._cuts.clear()
        network.apart.clear()
        for source, target in list(network.links):
            network.heal(source, target)
        for node in network.nodes.values():
            node.slowness = 1.0
        self._mislead(Mislead(0.0, 0.0, 0.0, 0.0))
        for peer in list(network.nodes):
            self._pause(peer, Activity.WORK)
            self._restart(peer)

    def _at(self, time: float, what: Callable[..., None], *arguments: object) -> None:
        loop = asyncio.get_running_loop()
        self._timers.append(loop.call_at(max(time, loop.time()), what, *arguments, context=self._context))

    def _watch(self, peer: PeerId, number: int, way: str, other: PeerId) -> None:
        for fault in self._at_messages.pop((peer, number), ()):
            self._strike(fault)

    def _strike(self, fault: Fault) -> None:
        network, now = self._network, asyncio.get_running_loop().time()
        self.struck.append((now, fault))
        network.trace(now, str(fault))
        match fault:
            case Crash(peer):
                if network.nodes[peer].process.alive:
                    network.kill(peer)
                    self._later(fault.lasts, self._restart, peer)
            case Restart(peer):
                self._restart(peer)
            case Cut():
                self._cut(fault)
                self._later(fault.lasts, self._mend, fault)
            case Reset(peer):
                network.reset_streams(peer)
            case Slow(peer, factor):
                network.nodes[peer].slowness *= factor
                self._later(fault.lasts, self._hurry, fault)
            case Pause(peer):
                self._pause(peer, Activity.AWAY if fault.away else Activity.REST)
                self._later(fault.lasts, self._pause, peer, Activity.WORK)
            case Apart(peer, other):
                network.apart |= {(peer, other), (other, peer)}
                self._later(fault.lasts, network.apart.difference_update, {(peer, other), (other, peer)})
            case Mislead():
                self._mislead(fault)
                self._later(fault.lasts, self._mislead, Mislead(0.0, 0.0, 0.0, 0.0))

    def _later(self, seconds: float | None, what: Callable[..., None], *arguments: object) -> None:
        if seconds is not None:
            self._at(asyncio.get_running_loop().time() + seconds, what, *arguments)

    def _restart(self, peer: PeerId) -> None:
        if not self._network.nodes[peer].process.alive:
            self._context.copy().run(self._revive, peer)

    def _cut(self, cut: Cut) -> None:
        for link in cut.links():
            self._cuts[link] += 1
            self._network.block(*link)

    def _mend(self, cut: Cut) -> None:
        """Open each link of a cut, unless another cut still blocks it."""
        for link in cut.links():
            self._cuts[link] -= 1
            if not self._cuts[link]:
                self._network.heal(*link)

    def _hurry(self, slow: Slow) -> None:
        node = self._network.nodes[slow.peer]
        node.slowness = max(1.0, node.slowness / slow.factor)

    def _mislead(self, how: Mislead) -> None:
        directory_faults = self._directory_faults
        directory_faults.forget_share, directory_faults.lag_seconds = how.forget_share, how.lag_seconds
        directory_faults.lie_share = how.lie_share
