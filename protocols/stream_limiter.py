"""Limits how many streams are served at a time, in total and for each peer. No I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from protocols.base import PeerId

MAX_STREAMS = 64
"""Streams served at a time. Further ones are closed."""
MAX_STREAMS_OF_ONE = 32
"""The same for one peer, so that no peer can keep out all others.

The limit leaves room for a peer that was cut off for a while, which opens many streams at once.
"""


class StreamLimiter:
    """Counts the streams that are being served."""

    def __init__(self) -> None:
        self._taken = Counter[PeerId]()

    @contextmanager
    def one_for(self, peer: PeerId) -> Iterator[bool]:
        """Yield whether another stream of this peer may be served. If so, it counts inside this context."""
        if self._taken.total() >= MAX_STREAMS or self._taken[peer] >= MAX_STREAMS_OF_ONE:
            yield False
            return
        self._taken[peer] += 1
        try:
            yield True
        finally:
            self._taken -= Counter((peer,))  # forgets the peer at zero
