"""Places for those who are served: so many at a time, and of these so many for one peer. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from protocols.base import PeerId

MAX_STREAMS = 64
"""Served at a time; whoever comes then finds the stream closed."""
MAX_STREAMS_OF_ONE = 32
"""Of these, for one peer: nobody keeps all others out by itself. Who was cut off for a while comes on many at once."""


class StreamLimiter:
    """Who is being served."""

    def __init__(self) -> None:
        self._taken = Counter[PeerId]()

    @contextmanager
    def one_for(self, peer: PeerId) -> Iterator[bool]:
        """Whether there is a place for another stream of this peer; if so, it is taken inside this context."""
        if self._taken.total() >= MAX_STREAMS or self._taken[peer] >= MAX_STREAMS_OF_ONE:
            yield False
            return
        self._taken[peer] += 1
        try:
            yield True
        finally:
            self._taken -= Counter((peer,))  # forgets the peer at zero
