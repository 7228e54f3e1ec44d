"""What the peers of an averaging benchmark have in common, and their vectors.

Nothing heavy is imported before it is needed: the floors, which only move bytes, start without torch.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from protocols.base import Vector

PIECE_ELEMENTS = 1 << 20


@dataclass(frozen=True, slots=True)
class Setup:
    """What all peers of a run share, except `rank` and `directory`, which differ for each peer.

    Attributes:
        elements: length of the vectors.
        deadline_seconds: of each round.
        bandwidth: what every peer declares, bytes/s; the budget of the data phase follows from it.
        path: how bulk data goes from peer to peer: "libp2p" or "direct"; for the floors "tcp" or "aead".
        listen: multiaddr on which every peer listens.
        relays: multiaddrs of relays, for peers among routers; None if there are no routers.
        keep_rounds: number of rounds whose parts each peer keeps for those that missed them.
        vectors: the directory of `benchmarks.peers.vectors` with each round's vectors; empty if peers draw their own.
    """

    peers: int
    elements: int
    codec: str
    deadline_seconds: float = 120.0
    bandwidth: float = 100e6
    seed: int = 0
    rank: int = 0
    directory: str = ""
    path: str = "libp2p"
    listen: str = "/ip4/127.0.0.1/tcp/0"
    vectors: str = ""
    keep_rounds: int = 1
    relays: tuple[str, ...] | None = None

    def tokens(self, rank: int) -> int:
        """The weight of a rank's vector; all weights differ."""
        return 1000 + 100 * rank

    def share(self, rank: int) -> float:
        """The weight of a rank's vector in the mean; they sum to 1."""
        return self.tokens(rank) / sum(self.tokens(each) for each in range(self.peers))

    def pieces(self, rank: int, number: int) -> Iterator[tuple[int, Vector]]:
        """A rank's vector for a round, in pieces: (offset, elements). Normal numbers, the same in every process.

        Pieces of one size have equal norms. Otherwise clipping to the median norm would scale some vectors a little.
        """
        import torch

        from protocols.vectors.views import norm

        for index, low in enumerate(range(0, self.elements, PIECE_ELEMENTS)):
            name = hashlib.sha256(f"{self.seed}/{rank}/{number}/{index}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(name[:8], "big") >> 1)
            piece = torch.randn(min(PIECE_ELEMENTS, self.elements - low), generator=generator)
            yield low, piece.mul_(math.sqrt(len(piece)) / norm([piece]))

    @property
    def result(self) -> Path:
        """Where rank 0 writes the result: raw float32."""
        return Path(self.directory) / "result"

    @property
    def moved_bytes(self) -> int:
        """What each peer sends in one round, and receives: (N - 1) / N of an encoded vector and of an encoded mean."""
        from protocols.vectors.codec import codec

        used = codec(self.codec)
        both = used.encoded_bytes(self.elements) + used.reduced(self.peers).encoded_bytes(self.elements)
        return both * (self.peers - 1) // self.peers


def say(**fields: Any) -> None:
    """Print an answer for the parent process."""
    print(json.dumps(fields), flush=True)
