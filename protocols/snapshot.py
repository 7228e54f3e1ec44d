"""Immutable copies of the outer state, cut into chunks that can be checked one by one.

The state root is a hash over hashes of 1 MiB chunks (`protocols.vectors.root`), so the list of those hashes, the index,
can be checked against the root that a certificate carries before anything else is fetched, and each chunk against the
index as it arrives.
"""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from protocols.base import CHUNK_BYTES, BadPayload, Vector
from protocols.chain import Chain, state_root
from protocols.requests import Kept
from protocols.vectors import CHUNK_ELEMENTS, check_vector, chunk_count, chunk_range

SNAPSHOT_ROUNDS = 4
"""A snapshot is kept at every so many rounds. It can be handed out once the next round is decided, and is of use for as
long as the deltas since then can be had: keep parts for at least twice as many rounds."""
KEEP_SNAPSHOTS = 2

_ROOT_TAG = b"starling root 1\n"


def chunk_digests(vector: Vector) -> tuple[bytes, ...]:
    """SHA-256 of each 1 MiB chunk of little-endian float32."""
    check_vector(vector)
    held = bytearray(CHUNK_BYTES)
    chunk, found = torch.frombuffer(held, dtype=torch.float32), []
    for index in range(chunk_count(len(vector))):
        low, high = chunk_range(0, len(vector), index)
        chunk[: high - low].copy_(vector[low:high])
        found.append(hashlib.sha256(memoryview(held)[: 4 * (high - low)]).digest())
    return tuple(found)


def root_of(elements: int, digests: Sequence[bytes]) -> bytes:
    """`vectors.root` of one vector of so many elements, from the digests of its chunks."""
    start = _ROOT_TAG + (1).to_bytes(8, "little") + elements.to_bytes(8, "little")
    return hashlib.sha256(start + b"".join(digests)).digest()


@dataclass(frozen=True, slots=True)
class Index:
    """The digests of all chunks of an outer state: of `elements` parameters, then of as much velocity."""

    elements: int
    digests: tuple[bytes, ...]

    @classmethod
    def of(cls, parameters: Vector, velocity: Vector) -> Index:
        """That of these two vectors, of one size."""
        return cls(len(parameters), chunk_digests(parameters) + chunk_digests(velocity))

    @classmethod
    def unpack(cls, elements: int, data: bytes) -> Index:
        """From `packed_bytes(elements)` bytes.

        Raises:
            BadPayload: another number of bytes.
        """
        if len(data) != cls.packed_bytes(elements):
            raise BadPayload(f"an index of {len(data)} bytes for {elements} elements")
        return cls(elements, tuple(data[at : at + 32] for at in range(0, len(data), 32)))

    @staticmethod
    def packed_bytes(elements: int) -> int:
        return 64 * chunk_count(elements)

    def pack(self) -> bytes:
        return b"".join(self.digests)

    @property
    def parameters_root(self) -> bytes:
        """`vectors.root` of the parameters."""
        return root_of(self.elements, self.digests[: len(self.digests) // 2])

    def state_root(self, round_number: int) -> bytes:
        """Root of the outer state before that round."""
        velocity = root_of(self.elements, self.digests[len(self.digests) // 2 :])
        return state_root(self.parameters_root, velocity, round_number)

    def size(self, chunk: int) -> int:
        """Bytes of a chunk."""
        low, high = self._place(chunk)
        return 4 * (high - low)

    def _place(self, chunk: int) -> tuple[int, int]:
        return chunk_range(0, self.elements, chunk % (len(self.digests) // 2))


class Room(Protocol):
    """Where a snapshot stands.

    Attributes:
        memory: writable; it goes back when nobody refers to it any more.
    """

    memory: mmap.mmap

    def rest(self) -> None:
        """Nobody reads or writes for a while: what can be had again need not stay in memory."""


class Anonymous:
    """Memory of the process: it costs nothing until it is written."""

    def __init__(self, size: int) -> None:
        self.memory = mmap.mmap(-1, size)

    def rest(self) -> None:
        """There is no other place for it."""


class Snapshot:
    """The outer state that a lineage names: filled once, then never changed.

    Attributes:
        parameters, velocity: float32 (n) each.
    """

    def __init__(
        self, lineage: bytes, round_number: int, index: Index, make_room: Callable[[int], Room] = Anonymous
    ) -> None:
        """Room for it."""
        self.lineage, self.round, self.index = lineage, round_number, index
        elements = index.elements
        self._room = make_room(max(1, 8 * elements))
        self.parameters = torch.frombuffer(self._room.memory, dtype=torch.float32, count=elements)
        self.velocity = torch.frombuffer(self._room.memory, dtype=torch.float32, count=elements, offset=4 * elements)
        self._memory = memoryview(self._room.memory)

    def fill(self, parameters: Vector, velocity: Vector) -> None:
        """Copy these vectors, which `index` is of."""
        self.parameters.copy_(parameters)
        self.velocity.copy_(velocity)

    def rest(self) -> None:
        """Nobody needs it in memory for a while."""
        self._room.rest()

    def chunk(self, index: int) -> memoryview:
        """The bytes of a chunk.

        Raises:
            BadPayload: there is none of that number.
        """
        half = len(self.index.digests) // 2
        if not 0 <= index < 2 * half:
            raise BadPayload(f"chunk {index} of a snapshot of {2 * half}")
        start = 4 * (index // half * self.index.elements + index % half * CHUNK_ELEMENTS)
        return self._memory[start : start + self.index.size(index)]


class Snapshots:
    """The snapshots that this peer keeps: the last ones of its chain.

    Attributes:
        every_rounds: a state is kept before every round whose number this divides.
    """

    def __init__(
        self,
        every_rounds: int = SNAPSHOT_ROUNDS,
        keep: int = KEEP_SNAPSHOTS,
        make_room: Callable[[int], Room] = Anonymous,
    ) -> None:
        """
        Args:
            make_room: for so many bytes.
        """
        self.every_rounds, self._keep, self._make_room = every_rounds, keep, make_room
        self._held: list[Snapshot] = []

    def new(self, lineage: bytes, round_number: int, index: Index) -> Snapshot:
        """An empty one, to be filled."""
        return Snapshot(lineage, round_number, index, self._make_room)

    def put(self, snapshot: Snapshot) -> None:
        """Take one that is filled; those of the lowest rounds beyond what is kept go."""
        held = [each for each in self._held if each.lineage != snapshot.lineage]
        self._held = sorted([*held, snapshot], key=lambda each: -each.round)[: self._keep]

    def get(self, lineage: bytes) -> Snapshot | None:
        return next((each for each in self._held if each.lineage == lineage), None)

    def prune(self, chain: Chain) -> None:
        """Drop what the chain, having switched to another branch, does not hold any more."""
        self._held = [each for each in self._held if each.lineage in chain]

    def held(self) -> tuple[Snapshot, ...]:
        """The newest first."""
        return tuple(self._held)

    def kept(self) -> tuple[Kept, ...]:
        """What to tell others."""
        return tuple(Kept(each.lineage, each.round) for each in self._held)
