"""Which replica of a stage gets the next microbatch: a share inversely proportional to its average call time. Pure.

As in SWARM (Ryabinin et al. 2023, section 3.2), by start-time fair queueing (Goyal et al. 1996): a newcomer starts at
the present virtual time, so it is not flooded to make up for the past.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from protocols.base import PeerId
from protocols.peers.estimates import ewma

GAIN = 0.2
FIRST_SECONDS = 1.0  # call time of a replica before any was observed
BAN_SECONDS, MAX_BAN_SECONDS = 0.5, 30.0
"""A replica is left alone after a failure for BAN_SECONDS, doubled with each further one in a row."""
MAX_BUSY_SECONDS = 2.0  # the same for a replica that has no place, from the time on that it names
GIVEN_UP_FAILURES = 3


@dataclass(slots=True)
class _Replica:
    seconds: float
    finish: float
    failures: int = 0
    refusals: int = 0
    banned_until: float = 0.0


class ReplicaRouter:
    """One driver's choice among the replicas of one stage. Jitter on bans keeps drivers from returning together."""

    def __init__(self, rng: random.Random, longest_seconds: float = MAX_BAN_SECONDS) -> None:
        self._rng, self._longest_seconds = rng, longest_seconds  # a replica is left alone, but for jitter
        self._replicas: dict[PeerId, _Replica] = {}
        self._virtual_time = 0.0

    def choose(self, live: Sequence[PeerId], now: float) -> PeerId | None:
        """The replica for the next call; None if there is none, or all are banned. After a ban it gets one call."""
        self._forget(live)
        usable = [peer for peer in sorted(live) if self._replica(peer).banned_until <= now]
        if not usable:
            return None
        chosen = min(usable, key=lambda peer: (self._start(peer), self._replicas[peer].seconds))
        replica, start = self._replicas[chosen], self._start(chosen)
        self._virtual_time, replica.finish = start, start + replica.seconds
        if replica.failures:
            replica.banned_until = now + self._ban_seconds(replica.failures)
        elif replica.refusals:
            replica.banned_until = now + min(MAX_BUSY_SECONDS, self._longest_seconds)
        return chosen

    def granted(self, peer: PeerId) -> None:
        replica = self._replica(peer)
        if replica.refusals and not replica.failures:
            replica.banned_until = 0.0
        replica.refusals = 0

    def usual_seconds(self, peer: PeerId) -> float:
        return self._replica(peer).seconds

    def succeeded(self, peer: PeerId, seconds: float) -> None:
        replica = self._replica(peer)
        replica.seconds = seconds if replica.failures else ewma(replica.seconds, seconds, GAIN)
        replica.failures, replica.banned_until = 0, 0.0

    def failed(self, peer: PeerId, now: float, seconds: float | None = None) -> None:
        replica = self._replica(peer)
        replica.failures += 1
        replica.banned_until = now + self._ban_seconds(replica.failures)
        if seconds is not None:
            replica.seconds = ewma(replica.seconds, seconds, GAIN)

    def busy(self, peer: PeerId, now: float, retry_seconds: float) -> None:
        """The replica has no place for so long, or longer if it says so again. That does not count as a failure."""
        replica = self._replica(peer)
        seconds = min(retry_seconds * 2.0**replica.refusals, MAX_BUSY_SECONDS, self._longest_seconds)
        replica.banned_until = now + seconds * self._rng.uniform(0.5, 1.5)
        replica.refusals = min(replica.refusals + 1, 10)

    def retry_at(self, live: Sequence[PeerId]) -> float | None:
        return min((self._replica(peer).banned_until for peer in live), default=None)

    def is_given_up(self, peer: PeerId, now: float) -> bool:
        """Whether a replica has failed several calls in a row, and is still left alone."""
        replica = self._replicas.get(peer)
        return replica is not None and replica.failures >= GIVEN_UP_FAILURES and replica.banned_until > now

    def _start(self, peer: PeerId) -> float:
        return max(self._virtual_time, self._replicas[peer].finish)

    def _ban_seconds(self, failures: int) -> float:
        seconds: float = min(BAN_SECONDS * 2.0 ** (failures - 1), self._longest_seconds)
        return seconds * self._rng.uniform(0.5, 1.5)

    def _replica(self, peer: PeerId) -> _Replica:
        if peer not in self._replicas:
            usual = median([each.seconds for each in self._replicas.values()] or [FIRST_SECONDS])
            self._replicas[peer] = _Replica(usual, self._virtual_time)
        return self._replicas[peer]

    def _forget(self, live: Sequence[PeerId]) -> None:
        """Drop replicas that are gone, but for their bans: one that fails its calls may come and go."""
        for peer in [peer for peer, each in self._replicas.items() if peer not in live and not each.failures]:
            del self._replicas[peer]
        if len(self._replicas) > 4 * max(8, len(live)):
            self._replicas = {peer: each for peer, each in self._replicas.items() if peer in live}
