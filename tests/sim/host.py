"""The rest of a simulated peer's `Host`: compute, clock, signer, directory, members."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from protocols.base import Deadline, Host, Member, PeerId
from tests.sim.network import SimNetwork
from tests.sim.transport import SimTransport

T = TypeVar("T")

COMPUTE_BYTES_PER_SECOND = 2e9
EPOCH = 1_800_000_000.0


class SimCompute:
    """Runs work at once, and charges virtual seconds for it, as one thread would take."""

    def __init__(self) -> None:
        self._free_at = 0.0

    async def run(self, work: Callable[[], T], cost_bytes: int) -> T:
        result = work()
        now = asyncio.get_running_loop().time()
        self._free_at = max(now, self._free_at) + cost_bytes / COMPUTE_BYTES_PER_SECOND
        await asyncio.sleep(self._free_at - now)
        return result


class SimClock:
    def __init__(self, skew_seconds: float = 0.0) -> None:
        self.skew_seconds = skew_seconds

    def wall(self) -> float:
        return EPOCH + asyncio.get_running_loop().time() + self.skew_seconds


class SimSigner:
    """Signs by hashing with the seed, which only this class uses."""

    def __init__(self, me: PeerId, seed: int) -> None:
        self._me, self._seed = me, seed

    def sign(self, message: bytes) -> bytes:
        return self._mac(self._me, message)

    def verify(self, peer: PeerId, message: bytes, signature: bytes) -> bool:
        return signature == self._mac(peer, message)

    def _mac(self, peer: PeerId, message: bytes) -> bytes:
        return hashlib.sha256(f"{self._seed}/{peer}/".encode() + message).digest()


@dataclass
class DirectoryFaults:
    """The directory's faults: share of entries omitted, age of its values, share of searches with a false entry."""

    rng: random.Random = field(default_factory=lambda: random.Random("hearsay"))
    forget_share: float = 0.0
    lag_seconds: float = 0.0
    lie_share: float = 0.0


@dataclass(frozen=True, slots=True)
class Entry:
    """A value in the directory: when it was announced (virtual), and when it expires (announcer's wall clock)."""

    announced: float
    value: bytes
    expires: float


Entries = dict[str, dict[PeerId, list[Entry]]]
"""scope -> peer -> its values, oldest first."""


class SimDirectory:
    """A directory that all peers share; a reader decides by its own wall clock which values have expired."""

    def __init__(self, entries: Entries, me: PeerId, clock: SimClock, faults: DirectoryFaults) -> None:
        self._entries, self._me, self._clock, self._faults = entries, me, clock, faults

    async def announce(self, scope: str, value: bytes, ttl_seconds: float, deadline: Deadline) -> None:
        entry = Entry(asyncio.get_running_loop().time(), value, self._clock.wall() + ttl_seconds)
        self._entries.setdefault(scope, {}).setdefault(self._me, []).append(entry)

    async def find(self, scope: str, limit: int, deadline: Deadline) -> Sequence[tuple[PeerId, bytes]]:
        faults = self._faults
        found = self._known(scope)
        if faults.forget_share:
            found = [each for each in found if faults.rng.random() >= faults.forget_share]
        if faults.lie_share and faults.rng.random() < faults.lie_share:
            found.insert(faults.rng.randint(0, len(found)), self._invented())
        return found[:limit]

    def _known(self, scope: str) -> list[tuple[PeerId, bytes]]:
        until, wall = asyncio.get_running_loop().time() - self._faults.lag_seconds, self._clock.wall()
        known = []
        for peer, entries in self._entries.get(scope, {}).items():
            old = [entry for entry in entries if entry.announced <= until]
            if old and old[-1].expires > wall:
                known.append((peer, old[-1].value))
        return known

    def _invented(self) -> tuple[PeerId, bytes]:
        """A peer that does not exist, or a value that belongs to another peer or another scope."""
        rng = self._faults.rng
        scopes = self._entries.values()
        others = [(peer, entries[-1].value) for scope in scopes for peer, entries in scope.items()]
        if not others or rng.random() < 0.3:
            return f"ghost{rng.randrange(1000)}", rng.randbytes(rng.randrange(64))
        return rng.choice(others)[0], rng.choice(others)[1]


class SimMembers:
    def __init__(self, network: SimNetwork, me: PeerId) -> None:
        self._contacts, self._me, self._view = network.contacts, me, network.contacts.views[me]

    @property
    def version(self) -> int:
        return self._view.version

    def live(self) -> tuple[Member, ...]:
        return self._view.live()

    def met(self) -> Collection[PeerId]:
        return self._contacts.met(self._me)

    async def changed(self, since: int, deadline: Deadline) -> int:
        with contextlib.suppress(TimeoutError):
            await self._view.changed.until(lambda: self.version > since, deadline)
        return self.version

    async def answers(self, peer: PeerId, within_seconds: float) -> bool:
        return await self._contacts.answers(self._me, peer, within_seconds)


def sim_host(
    network: SimNetwork,
    transport: SimTransport,
    seed: int,
    entries: Entries,
    skew_seconds: float = 0.0,
    directory_faults: DirectoryFaults | None = None,
) -> Host:
    clock = SimClock(skew_seconds)
    return Host(
        transport=transport,
        directory=SimDirectory(entries, transport.me, clock, directory_faults or DirectoryFaults()),
        members=SimMembers(network, transport.me),
        compute=SimCompute(),
        clock=clock,
        signer=SimSigner(transport.me, seed),
        seed=seed,
    )
