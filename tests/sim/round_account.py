"""Accounts of a run's rounds: which could commit, which did, and whether the swarm is whole again."""

from __future__ import annotations

from collections import Counter
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
    roster: tuple[Member, ...]
    began: float
    ended: float | None = None
    decided: bool = False
    committed: bool = False
    committed_by: dict[PeerId, float] = field(default_factory=dict)
    entered: dict[PeerId, float] = field(default_factory=dict)
    missed: Counter[PeerId] = field(default_factory=Counter)


class Account:
    """The attempts of a run, by the lineage that they extend."""

    def __init__(self, outages: Outages) -> None:
        self.attempts: dict[str, Attempt] = {}
        self._outages = outages

    def entered(self, peer: PeerId, head: Head, now: float) -> None:
        attempt = self.attempts.setdefault(head.key.lineage.hex(), Attempt(head.roster, now))
        attempt.entered[peer] = now

    def reported(self, report: dict[str, Any], now: float) -> None:
        attempt, peer = self.attempts.get(report["parent"]), report["peer"]
        if attempt is None:  # no peer entered this round: the reporter has caught up
            return
        if not attempt.decided:
            attempt.ended = now
        attempt.decided |= report["outcome"] in DECIDED
        if report["outcome"] in ("committed", "alone"):
            attempt.committed = True
            attempt.committed_by.setdefault(peer, now)
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
        """The number of rounds with all peers in the roster that all of them have committed since then."""
        return sum(
            {member.peer for member in attempt.roster} == set(peers)
            and all(attempt.committed_by.get(peer, -1.0) >= since for peer in peers)
            for attempt in self.attempts.values()
        )
