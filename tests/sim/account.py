"""What became of a run's rounds: which could commit, which did, and whether the swarm is whole again."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from protocols.base import Head, Member, PeerId
from protocols.poll import majority
from tests.sim.contact import Outages


@dataclass
class Attempt:
    """All that was done to decide the child of one lineage."""

    roster: tuple[Member, ...]
    began: float
    ended: float | None = None
    committed: bool = False
    committed_by: dict[PeerId, float] = field(default_factory=dict)


class Account:
    """Attempts by the lineage that they extend, as the peers enter rounds and report them."""

    def __init__(self, outages: Outages) -> None:
        self.attempts: dict[str, Attempt] = {}
        self._outages = outages

    def entered(self, head: Head, now: float) -> None:
        self.attempts.setdefault(head.key.lineage.hex(), Attempt(head.roster, now))

    def reported(self, report: dict[str, Any], now: float) -> None:
        attempt = self.attempts[report["parent"]]
        if not attempt.committed:
            attempt.ended = now
        if report["outcome"] in ("committed", "alone"):
            attempt.committed = True
            attempt.committed_by.setdefault(report["peer"], now)

    def shares(self) -> tuple[int, int]:
        """Rounds that could commit, and how many of them did.

        A round can if a majority of its roster is up, each in touch with each, from its beginning to its end.
        """
        could = [
            attempt
            for attempt in self.attempts.values()
            if attempt.ended is not None
            and self._outages.connected(attempt.roster, majority(len(attempt.roster)), attempt.began, attempt.ended)
        ]
        return len(could), sum(attempt.committed for attempt in could)

    def whole(self, peers: tuple[PeerId, ...], since: float) -> int:
        """Rounds with all peers in their roster that all of them have committed since then."""
        return sum(
            {member.peer for member in attempt.roster} == set(peers)
            and all(attempt.committed_by.get(peer, -1.0) >= since for peer in peers)
            for attempt in self.attempts.values()
        )
