"""Which replicas of a stage a driver uses: of many a few, so that its streams do not grow with the run. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

from protocols.base import PeerId

FAN_OUT = 8
"""Replicas of each stage that a driver uses. 32 drivers can use .999 of the capacity of 32 replicas so, of equal and of
unequal ones; with 4 they could use .96 to .99."""


def ranked(driver: PeerId, replicas: Sequence[PeerId]) -> list[PeerId]:
    """In the order in which a driver takes them, by rendezvous hashing (Thaler and Ravishankar 1998).

    Each driver has another order, and a replica that comes or goes changes the choice of few.
    """
    return sorted(replicas, key=lambda peer: hashlib.sha256(f"starling fan-out {driver} {peer}".encode()).digest())


class FanOut:
    """The replicas of one stage that a driver uses."""

    def __init__(self, driver: PeerId) -> None:
        self._driver = driver
        self._replicas: tuple[PeerId, ...] = ()
        self._ranked: list[PeerId] = []

    def of(self, live: Sequence[PeerId], fails: Callable[[PeerId], bool]) -> tuple[PeerId, ...]:
        """Of the live replicas, `FAN_OUT` or fewer. Others take the place of those that fail, if there are any."""
        if len(live) <= FAN_OUT:
            return tuple(live)
        if self._replicas != (replicas := tuple(live)):
            self._replicas, self._ranked = replicas, ranked(self._driver, replicas)
        return tuple(sorted(self._ranked, key=fails)[:FAN_OUT])
