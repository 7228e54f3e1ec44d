"""The attempts of a simulated run at its rounds: which could commit, which did, and whose work counts in them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, Protocol

from protocols.base import Member, PeerId, RoundKey
from protocols.consensus.vote_tally import majority
from tests.sim.contact import Outages
from tests.support.checkers import DECIDED


class Head(Protocol):
    @property
    def key(self) -> RoundKey: ...

    @property
    def roster(self) -> tuple[Member, ...]: ...


@dataclass
class Attempt:
    round: int
    roster: tuple[Member, ...]
    began: float
    ended: float | None = None
    decided: bool = False
    committed: bool = False
    committed_by: dict[PeerId, float] = field(default_factory=dict)
    entered: dict[PeerId, float] = field(default_factory=dict)
    missed: Counter[PeerId] = field(default_factory=Counter)
    contributors: set[PeerId] = field(default_factory=set)
    clusters: set[frozenset[PeerId]] = field(default_factory=set)  # in a round without clusters that of all


class Account:
    """The attempts of a run, by the lineage that they extend."""

    def __init__(self, outages: Outages, liars: tuple[PeerId, ...], clusters: bool = False) -> None:
        self.attempts: dict[str, Attempt] = {}
        self._outages, self._liars, self._clusters = outages, liars, clusters

    def entered(self, peer: PeerId, head: Head, now: float) -> None:
        attempt = self.attempts.setdefault(head.key.lineage.hex(), Attempt(head.key.round, head.roster, now))
        attempt.entered[peer] = now

    def reported(self, report: dict[str, Any], now: float) -> None:
        attempt, peer = self.attempts.get(report["parent"]), report["peer"]
        if attempt is None:  # no peer entered this round: the reporter has caught up
            return
        if peer in self._liars:  # of its report only its cluster counts: the others of it may all have caught up
            if report["outcome"] == "committed":
                attempt.clusters.add(frozenset(report["contributions"]))
            return
        if not attempt.decided:
            attempt.ended = now
        attempt.decided |= report["outcome"] in DECIDED
        if report["outcome"] in ("committed", "alone"):
            attempt.committed = True
            attempt.committed_by.setdefault(peer, now)
            attempt.clusters.add(frozenset(report["contributions"]))
            attempt.contributors |= {name for name, held in report["contributions"].items() if held[1]}
        elif report["outcome"] == "undecided" and self._could(attempt, attempt.entered.get(peer, now), now, peer):
            attempt.missed[peer] += 1

    def _could(self, attempt: Attempt, since: float, until: float, peer: PeerId | None = None) -> bool:
        """Whether a majority of the roster, including `peer`, was alive and mutually connected."""
        count = majority(len(attempt.roster))
        return self._outages.connected(attempt.roster, count, since, until, peer)

    def shares(self) -> tuple[int, int]:
        """(rounds that could commit, rounds of these that did); each repeated attempt counts as a round."""
        could = did = 0
        for attempt in self.attempts.values():
            missed = max(attempt.missed.values(), default=0)
            able = attempt.ended is not None and self._could(attempt, attempt.began, attempt.ended)
            did += able and attempt.committed
            could += missed + (able and (attempt.committed or not missed))
        return could, did

    def whole(self, peers: tuple[PeerId, ...], since: float) -> int:
        """The number of rounds of all peers that all of them have committed since then: with all in the roster or, with
        clusters, in the mean.
        """
        return sum(
            (attempt.contributors if self._clusters else {member.peer for member in attempt.roster}) >= set(peers)
            and all(attempt.committed_by.get(peer, -1.0) >= since for peer in peers)
            for attempt in self.attempts.values()
        )

    def rounds_until_all_count(self, peers: tuple[PeerId, ...], since: float) -> int | None:
        """Committed rounds that have begun since then, up to the first one whose mean holds work of all these peers."""
        later = sorted((each for each in self.attempts.values() if each.began >= since), key=lambda each: each.began)
        for count, attempt in enumerate((each for each in later if each.committed), start=1):
            if attempt.contributors >= set(peers):
                return count
        return None

    def absent(self, peers: Collection[PeerId]) -> dict[int, set[PeerId]]:
        """Committed round -> those of these peers without work in its mean, unless a liar is in their cluster."""
        found = {}
        for attempt in (each for each in self.attempts.values() if each.committed):
            spoilt = set().union(*(each for each in attempt.clusters if not each.isdisjoint(self._liars)))
            found[attempt.round] = set(peers) - attempt.contributors - spoilt
        return found
