"""The rows of the table: what is compared, the module that each peer's process runs, and roughly how much it holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

OURS = ("fp32", "bf16", "int8", "int4")
PATHS = ("direct", "libp2p")
MEGABYTE = 1_000_000


@dataclass(frozen=True, slots=True)
class System:
    """One row.

    Attributes:
        label: what the table calls it.
        module: what each peer's process runs.
        path: how bulk data goes from peer to peer; see `Setup.path`.
        same_bits: whether all peers must hold the same bits.
        base_megabytes, vectors: rough memory of a peer: without vectors, and in vectors.
    """

    name: str
    label: str
    module: str
    codec: str = "fp32"
    path: str = ""
    same_bits: bool = False
    base_megabytes: float = 200.0
    vectors: float = 2.0

    def memory_bytes(self, peers: int, megabytes: float) -> float:
        """Roughly what all its peers hold, to plan with."""
        return MEGABYTE * peers * (self.base_megabytes + self.vectors * megabytes)


def _ours(codec: str, path: str) -> System:
    name, label = f"ours-{codec}-{path}", f"ours, {codec}, {path}"
    vectors = {"fp32": 8.0, "bf16": 6.0, "int8": 4.0, "int4": 3.5}[codec]
    return System(name, label, "benchmarks.peers.ours_peer", codec, path, same_bits=True, vectors=vectors)


SYSTEMS: tuple[System, ...] = (
    System("tcp-floor", "floor: plain TCP", "benchmarks.peers.floor_peer", path="tcp", base_megabytes=50),
    System("encrypted-floor", "floor: AES-128-GCM", "benchmarks.peers.floor_peer", path="aead", base_megabytes=50),
    System("p2pd-floor", "floor: p2pd", "benchmarks.peers.p2pd_floor_peer", path="libp2p", vectors=0.5),
    System("gloo", "torch.distributed, gloo", "benchmarks.peers.gloo_peer"),
    System("torchft", "torchft, gloo", "benchmarks.peers.torchft_peer"),
    System("hivemind", "hivemind, no compression", "benchmarks.peers.hivemind_peer", base_megabytes=400, vectors=5),
    *(_ours(codec, path) for path in PATHS for codec in OURS),
)
"""In the order of the table. Those that are compared most come close together, so that they are alive together."""


def chosen(patterns: Sequence[str]) -> list[System]:
    """The systems whose names match one of the patterns ("ours-*-direct"), in the order of the table.

    Raises:
        ValueError: a pattern matches none.
    """
    for pattern in patterns:
        if not any(fnmatchcase(system.name, pattern) for system in SYSTEMS):
            raise ValueError(f"{pattern!r} names none of {', '.join(system.name for system in SYSTEMS)}")
    return [system for system in SYSTEMS if any(fnmatchcase(system.name, pattern) for pattern in patterns)]


def blocks(systems: Sequence[System], peers: int, megabytes: float, budget_bytes: float) -> list[list[System]]:
    """Divide the systems into those that are alive together: as many, in order, as the memory allows, at least one."""
    found: list[list[System]] = []
    left = 0.0
    for system in systems:
        need = system.memory_bytes(peers, megabytes)
        if not found or need > left:
            found.append([])
            left = budget_bytes
        found[-1].append(system)
        left -= need
    return found
