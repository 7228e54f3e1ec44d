"""Looks at the drivers of a run in stages once a second: how many tokens each has trained on so far."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Self

from tests.support.real_swarm import RealPeer

EVERY_SECONDS = 1.0
ASK_SECONDS = 0.8
END_SECONDS = 10.0

Samples = dict[str, list[tuple[float, int]]]
"""Peer -> (wall time, tokens of all its incarnations), oldest first."""


class Sampler:
    """A thread that asks peers for their status. A context manager.

    Attributes:
        samples: what it saw. A peer that does not answer is left out.
    """

    def __init__(self, peers: Callable[[], Sequence[RealPeer]]) -> None:
        """
        Args:
            peers: returns the peers to ask.
        """
        self.samples: Samples = {}
        self._peers = peers
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(END_SECONDS)

    def _run(self) -> None:
        while not self._over.wait(EVERY_SECONDS):
            for peer in self._peers():
                if peer.running and (status := peer.ask("status", ASK_SECONDS)):
                    samples = self.samples.setdefault(peer.name, [])
                    # a peer that has just started again does not know yet what it has trained on
                    if not samples or status["tokens"] >= samples[-1][1]:
                        samples.append((time.time(), status["tokens"]))
