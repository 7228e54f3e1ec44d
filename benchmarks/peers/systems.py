"""The rows of the table: what is compared, the module that each peer's process runs, and roughly how much it holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

OURS = ("fp32", "int8", "bf16", "int4")
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
        base_megabytes, vectors: memory that a peer takes, as measured, to plan with: for itself, and in vectors.
    """

    name: str
    label: str
    module: str
    codec: str = "fp32"
    path: str = ""
    same_bits: bool = False
    base_megabytes: float = 0.0
    vectors: float = 0.0

    def memory_bytes(self, peers: int, megabytes: float) -> float:
        """What all its peers take, roughly."""
        return MEGABYTE * peers * (self.base_megabytes + self.vectors * megabytes)


def _ours(codec: str, path: str) -> System:
    vectors = {"fp32": 9.0, "bf16": 6.0, "int8": 4.5, "int4": 3.5}[codec]
    label, module = f"ours, {codec}, {path}", "benchmarks.peers.ours_peer"
    return System(f"ours-{codec}-{path}", label, module, codec, path, True, base_megabytes=240, vectors=vectors)


_FLOOR = "benchmarks.peers.floor_peer"
SYSTEMS: tuple[System, ...] = (
    System("tcp-floor", "floor: plain TCP", _FLOOR, path="tcp", base_megabytes=25, vectors=1),
    System("encrypted-floor", "floor: AES-128-GCM", _FLOOR, path="aead", base_megabytes=25, vectors=1),
    System("p2pd-floor", "floor: p2pd", "benchmarks.peers.p2pd_floor_peer", path="libp2p", base_megabytes=240),
    System("gloo", "torch.distributed, gloo", "benchmarks.peers.gloo_peer", base_megabytes=160, vectors=2.3),
    System("torchft", "torchft, gloo", "benchmarks.peers.torchft_peer", base_megabytes=160, vectors=2.3),
    System("hivemind", "hivemind, no compression", "benchmarks.peers.hivemind_peer", base_megabytes=400, vectors=5.3),
    *(_ours(codec, path) for path in PATHS for codec in OURS),
)
"""In the order of the table. Those that are compared most come first, so that they are alive together."""


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
