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
        is_foreign: whether other people wrote it. If its warm-up is wrong, a line says so, and the run does not fail.
        base_megabytes, vectors: memory that a peer takes, as measured, to plan with: for itself, and in vectors.
    """

    name: str
    label: str
    module: str
    codec: str = "fp32"
    path: str = ""
    same_bits: bool = False
    is_foreign: bool = False
    base_megabytes: float = 0.0
    vectors: float = 0.0

    def memory_bytes(self, peers: int, megabytes: float) -> float:
        """What all its peers take, roughly."""
        return MEGABYTE * peers * (self.base_megabytes + self.vectors * megabytes)


def _floor(name: str, label: str, module: str, path: str, memory: tuple[float, float]) -> System:
    base, vectors = memory
    return System(name, label, f"benchmarks.peers.{module}", "fp32", path, base_megabytes=base, vectors=vectors)


def _foreign(name: str, label: str, memory: tuple[float, float]) -> System:
    base, vectors = memory
    module = f"benchmarks.peers.{name}_peer"
    return System(name, label, module, is_foreign=True, base_megabytes=base, vectors=vectors)


def _ours(codec: str, path: str) -> System:
    vectors = {"fp32": 6.0, "bf16": 4.5, "int8": 4.0, "int4": 3.5}[codec]
    label, module = f"ours, {codec}, {path}", "benchmarks.peers.ours_peer"
    return System(f"ours-{codec}-{path}", label, module, codec, path, True, base_megabytes=240, vectors=vectors)


SYSTEMS: tuple[System, ...] = (
    _floor("tcp-floor", "floor: plain TCP", "floor_peer", "tcp", memory=(25, 1)),
    _floor("encrypted-floor", "floor: AES-128-GCM", "floor_peer", "aead", memory=(25, 1)),
    _floor("p2pd-floor", "floor: p2pd", "p2pd_floor_peer", "libp2p", memory=(240, 0)),
    _foreign("gloo", "torch.distributed, gloo", memory=(160, 2.3)),
    _foreign("torchft", "torchft, gloo", memory=(160, 2.3)),
    _foreign("hivemind", "hivemind, no compression", memory=(400, 5.3)),
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
