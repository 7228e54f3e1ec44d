"""The rest of a simulated peer's `Host`: compute, clock, signer, directory, members."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Callable, Sequence
from typing import TypeVar

from protocols.base import Deadline, Host, Member, PeerId
from tests.sim.network import SimNetwork, SimTransport

T = TypeVar("T")

COMPUTE_BYTES_PER_SECOND = 2e9
EPOCH = 1_800_000_000.0


class SimCompute:
    """One thread's worth of work: done at once, paid for in virtual seconds, one piece after the other."""

    def __init__(self) -> None:
        self._free_at = 0.0

    async def run(self, work: Callable[[], T], cost_bytes: int) -> T:
        result = work()
        now = asyncio.get_running_loop().time()
        self._free_at = max(now, self._free_at) + cost_bytes / COMPUTE_BYTES_PER_SECOND
        await asyncio.sleep(self._free_at - now)
        return result


class SimClock:
    """Wall time: virtual time after an epoch, off by this peer's skew."""

    def __init__(self, skew_seconds: float = 0.0) -> None:
        self.skew_seconds = skew_seconds

    def wall(self) -> float:
        return EPOCH + asyncio.get_running_loop().time() + self.skew_seconds


class SimSigner:
    """A stand-in for signatures: a hash with a secret of the world, which only this class knows."""

    def __init__(self, me: PeerId, seed: int) -> None:
        self._me, self._seed = me, seed

    def sign(self, message: bytes) -> bytes:
        return self._mac(self._me, message)

    def verify(self, peer: PeerId, message: bytes, signature: bytes) -> bool:
        return signature == self._mac(peer, message)

    def _mac(self, peer: PeerId, message: bytes) -> bytes:
        return hashlib.sha256(f"{self._seed}/{peer}/".encode() + message).digest()


class SimDirectory:
    """A directory that all peers of the world share; entries expire by virtual time."""

    def __init__(self, entries: dict[str, dict[PeerId, tuple[bytes, float]]], me: PeerId) -> None:
        self._entries, self._me = entries, me

    async def announce(self, scope: str, value: bytes, ttl_seconds: float, deadline: Deadline) -> None:
        now = asyncio.get_running_loop().time()
        self._entries.setdefault(scope, {})[self._me] = (value, now + ttl_seconds)

    async def find(self, scope: str, limit: int, deadline: Deadline) -> Sequence[tuple[PeerId, bytes]]:
        now = asyncio.get_running_loop().time()
        living = [(peer, value) for peer, (value, until) in self._entries.get(scope, {}).items() if until > now]
        return living[:limit]


class SimMembers:
    """The live peers, as the network knows them."""

    def __init__(self, network: SimNetwork) -> None:
        self._network = network

    @property
    def version(self) -> int:
        return self._network.deaths

    def live(self) -> tuple[Member, ...]:
        nodes = self._network.nodes
        return tuple(Member(peer) for peer in sorted(nodes) if nodes[peer].process.alive)

    async def changed(self, since: int, deadline: Deadline) -> int:
        with contextlib.suppress(TimeoutError):
            await self._network.died.until(lambda: self.version > since, deadline)
        return self.version


def sim_host(network: SimNetwork, transport: SimTransport, seed: int, entries: dict) -> Host:  # type: ignore[type-arg]
    """A host in the simulated world."""
    return Host(
        transport=transport,
        directory=SimDirectory(entries, transport.me),
        members=SimMembers(network),
        compute=SimCompute(),
        clock=SimClock(),
        signer=SimSigner(transport.me, seed),
        seed=seed,
    )
