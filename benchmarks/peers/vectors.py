"""The vectors of a round in files, beside their exact mean: drawn once, and the same for all systems."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch

from benchmarks.averaging_setup import PIECE_ELEMENTS, Setup


def path(setup: Setup, rank: int) -> Path:
    """A rank's vector: raw float32."""
    return Path(setup.vectors) / f"vector{rank}"


def _mean_path(setup: Setup) -> Path:
    """The weighted mean: raw float64."""
    return Path(setup.vectors) / "mean"


def write(setup: Setup, number: int) -> None:
    """Draw the vectors of a round, and write them and their mean."""
    mean = torch.zeros(setup.elements, dtype=torch.float64)
    for rank in range(setup.peers):
        with path(setup, rank).open("wb") as file:
            for low, piece in setup.pieces(rank, number):
                file.write(piece.numpy().data.cast("B"))
                mean[low : low + len(piece)].add_(piece.double(), alpha=setup.share(rank))
    _mean_path(setup).write_bytes(mean.numpy().data.cast("B"))


def load(setup: Setup, into: torch.Tensor) -> None:
    """Read this rank's vector.

    Raises:
        EOFError: the file is too short.
    """
    content = into.numpy().data.cast("B")
    with path(setup, setup.rank).open("rb", buffering=0) as file:
        done = 0
        while done < len(content):
            count = file.readinto(content[done:])
            if not count:
                raise EOFError(f"{file.name} ends after {done} of {len(content)} bytes")
            done += count


def checked(setup: Setup, result: torch.Tensor) -> dict[str, object]:
    """Compare a result with the mean: the relative L2 error, and the SHA-256 of the result."""
    mean = torch.from_file(str(_mean_path(setup)), shared=True, size=setup.elements, dtype=torch.float64)
    off = whole = 0.0
    for low in range(0, setup.elements, PIECE_ELEMENTS):
        expected = mean[low : low + PIECE_ELEMENTS]
        off += float(result[low : low + PIECE_ELEMENTS].double().sub_(expected).square_().sum())
        whole += float(expected.dot(expected))
    digest = hashlib.sha256(result.numpy().data.cast("B")).hexdigest()
    return {"relative_error": (off / whole) ** 0.5, "digest": digest}
