"""Flat float32 vectors: concatenated views, chunks, weighted means, norms and hashes. Pure.

`weighted_mean` and `root` give the same bits everywhere: separate multiplications and additions in a fixed order.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

import torch

from protocols.base import CHUNK_BYTES, Vector
from protocols.registry import CHUNK_ELEMENTS

LARGEST_FLOAT32 = torch.finfo(torch.float32).max
SMALLEST_NORMAL_FLOAT32 = torch.finfo(torch.float32).tiny

_ROOT_TAG = b"starling root 1\n"
_NORM_PIECE = 1 << 16  # elements; their float64 copies stay in the processor's second-level cache


def check_vector(vector: Vector) -> None:
    """Raise `ValueError` unless a tensor is a `Vector`, detached from autograd."""
    if vector.dim() != 1 or vector.dtype != torch.float32 or vector.device.type != "cpu":
        raise ValueError(
            f"a vector is 1-D float32 on the CPU, not {vector.dim()}-D {vector.dtype} on {vector.device.type}"
        )
    if not vector.is_contiguous():
        raise ValueError(f"a vector is contiguous, this one has stride {vector.stride(0)}")
    if vector.requires_grad:
        raise ValueError("a vector is detached from autograd, this one requires a gradient")


class VectorView:
    """Presents vectors as one vector of `size` elements, without copying. `ValueError` for ranges out of bounds."""

    def __init__(self, vectors: Sequence[Vector]) -> None:
        for vector in vectors:
            check_vector(vector)
        self._vectors = tuple(vectors)
        self._starts = tuple(accumulate((len(vector) for vector in vectors), initial=0))
        self.size = self._starts[-1]

    def read(self, low: int, high: int, scratch: Vector) -> Vector:
        """Return elements [low, high): a view if they lie in one vector, else a copy in `scratch[:high - low]`."""
        pieces = self._pieces(low, high)
        if len(pieces) == 1:
            return pieces[0]
        if len(scratch) < high - low:
            raise ValueError(f"scratch of {len(scratch)} elements for a range of {high - low}")
        at = 0
        for piece in pieces:
            scratch[at : at + len(piece)].copy_(piece)
            at += len(piece)
        return scratch[:at]

    def window(self, low: int, high: int) -> Vector | None:
        pieces = self._pieces(low, high)
        return pieces[0] if len(pieces) == 1 else None

    def write(self, low: int, source: Vector) -> None:
        at = 0
        for piece in self._pieces(low, low + len(source)):
            piece.copy_(source[at : at + len(piece)])
            at += len(piece)

    def _pieces(self, low: int, high: int) -> list[Vector]:
        if not 0 <= low <= high <= self.size:
            raise ValueError(f"elements [{low}, {high}) of a vector of {self.size}")
        pieces = []
        index = bisect_right(self._starts, low) - 1
        while low < high:
            start, end = self._starts[index], min(high, self._starts[index + 1])
            if low < end:
                pieces.append(self._vectors[index][low - start : end - start])
            low, index = end, index + 1
        return pieces


def chunk_count(elements: int, chunk: int = CHUNK_ELEMENTS) -> int:
    return -(-elements // chunk)


def chunk_range(low: int, high: int, index: int, chunk: int = CHUNK_ELEMENTS) -> tuple[int, int]:
    if not 0 <= index < chunk_count(high - low, chunk):
        raise ValueError(f"chunk {index} of a range of {chunk_count(high - low, chunk)} chunks")
    start = low + index * chunk
    return start, min(high, start + chunk)


def fragment(elements: int, fragments: int, index: int) -> slice:
    """The place of one of `fragments` equal parts of a vector."""
    return slice(elements * index // fragments, elements * (index + 1) // fragments)


def fragment_sizes(elements: int, fragments: int) -> tuple[int, ...]:
    parts = (fragment(elements, fragments, index) for index in range(fragments))
    return tuple(part.stop - part.start for part in parts)


def weighted_mean(contributions: Sequence[Vector], weights: Sequence[float], into: Vector) -> None:
    """Write sum_i w_i x_i / sum_i w_i, added in the given order, into `into`, which may be the first contribution.

    The contributions, finite and of one size, are overwritten. The weights are positive and finite, in any unit. Each
    contribution is scaled by w_i / sum w (computed in float64, rounded to float32) before it is added, so that large
    weights cannot overflow; the mean is clamped to the largest float32. A single contribution is returned unchanged.
    """
    if not contributions or len(contributions) != len(weights):
        raise ValueError(f"{len(contributions)} contributions with {len(weights)} weights")
    if not all(weight > 0 and math.isfinite(weight) for weight in weights):
        raise ValueError(f"weights must be positive and finite, not {list(weights)}")
    if any(len(contribution) != len(into) for contribution in contributions):
        raise ValueError(f"contributions of {[len(each) for each in contributions]} elements into {len(into)}")
    largest = max(weights)  # divided out first: the sum of finite weights need not be finite
    total = math.fsum(weight / largest for weight in weights)
    torch.mul(contributions[0], weights[0] / largest / total, out=into)
    for contribution, weight in zip(contributions[1:], weights[1:], strict=True):
        into.add_(contribution.mul_(weight / largest / total))
    into.clamp_(-LARGEST_FLOAT32, LARGEST_FLOAT32)


def norm(vectors: Sequence[Vector]) -> float:
    """L2 norm, accumulated in float64. Its last digits differ between machines: peers must not share them."""
    scratch = torch.empty(_NORM_PIECE, dtype=torch.float64)
    squares = []
    for vector in vectors:
        for low in range(0, len(vector), _NORM_PIECE):
            piece = vector[low : low + _NORM_PIECE]
            wide = scratch[: len(piece)].copy_(piece)
            squares.append(float(torch.dot(wide, wide)))
    return math.sqrt(math.fsum(squares))


def estimated_norm(vector: Vector) -> float:
    """L2 norm of at most a chunk's elements, off by less than one percent, in a tenth of the time of `norm`."""
    square = float(torch.dot(vector, vector))  # float32: very small or large squares would be lost
    return math.sqrt(square) if 1e-20 < square < 1e30 else norm([vector])


def chunk_digests(vector: Vector) -> tuple[bytes, ...]:
    """SHA-256 of each 1 MiB chunk of the vector as little-endian float32."""
    check_vector(vector)
    held = bytearray(CHUNK_BYTES)
    chunk, found = torch.frombuffer(held, dtype=torch.float32), []
    for index in range(chunk_count(len(vector))):
        low, high = chunk_range(0, len(vector), index)
        chunk[: high - low].copy_(vector[low:high])
        found.append(hashlib.sha256(memoryview(held)[: 4 * (high - low)]).digest())
    return tuple(found)


def root_of(vectors: Sequence[tuple[int, Sequence[bytes]]]) -> bytes:
    """`root`, from the number of elements and the chunk digests of each vector."""
    outer = hashlib.sha256(_ROOT_TAG + len(vectors).to_bytes(8, "little"))
    for elements, digests in vectors:
        outer.update(elements.to_bytes(8, "little") + b"".join(digests))
    return outer.digest()


def root(vectors: Sequence[Vector]) -> bytes:
    """SHA-256 over a tag, the number of vectors and, for each, its size followed by its `chunk_digests`."""
    return root_of([(len(vector), chunk_digests(vector)) for vector in vectors])
