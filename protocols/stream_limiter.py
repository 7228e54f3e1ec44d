"""Limits how many streams are served at a time, in total and for each peer. No I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from protocols.base import PeerId

MAX_STREAMS = 64
"""Streams served at a time. Further ones are closed."""
MAX_STREAMS_OF_ONE = 32
"""Streams of one peer, so that no peer can keep all others out. A peer that was cut off for a while opens many at
once."""


class StreamLimiter:
    """Counts the streams that are being served."""

    def __init__(self) -> None:
        self._taken = Counter[PeerId]()

    @contextmanager
    def one_for(self, peer: PeerId) -> Iterator[bool]:
        """Whether another stream of this peer may be served. If so, it counts inside this context."""
        if self._taken.total() >= MAX_STREAMS or self._taken[peer] >= MAX_STREAMS_OF_ONE:
            yield False
            return
        self._taken[peer] += 1
        try:
            yield True
        finally:
            self._taken -= Counter((peer,))  # forgets the peer at zero
