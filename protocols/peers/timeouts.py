"""How long an exchange with a peer may take, which peers to avoid for a while, and which requests are new. No I/O."""

from __future__ import annotations

from dataclasses import dataclass, field

from protocols.base import DISTRUST_SECONDS, BadPayload, Member, PeerId
from protocols.peers.estimates import RecentDict, ewma

ANSWER_FLOOR_SECONDS = 2.0
ROUND_TRIPS = 8.0  # A peer answers at once. Its answer is late after the floor plus this many round trips.
MAX_ROUND_TRIP_SECONDS = 5.0
"""Upper limit of the estimated round trip. Without it, a peer that always answers late would get more and more time."""
TIMEOUT_MULTIPLE = 4.0  # an exchange may take this many times its expected time
REST_MULTIPLE = 4.0
"""A peer that cost us time for nothing, or more than expected, is avoided for this many times as long."""
CHEAP_SECONDS = 1.0
"""An exchange that fails sooner than this costs nothing: the partner may have gone on to another round."""
LEAST_RATE = 1e3
MAX_RATE_GAIN = 1.5
MAX_PEERS = 256  # at most this many peers are remembered; the one that has been silent longest is dropped first
REQUEST_WINDOW = 64  # requests of one incarnation that may overtake each other; an older request is stale


@dataclass(slots=True)
class _Seen:
    rate: float | None = None  # bytes/s of the exchanges with this peer; None: there was none
    round_trip_seconds: float = 0.0
    rest_until: float = 0.0  # when the peer may be contacted again, in the loop's time
    distrust_until: float = 0.0  # the same, and not shortened by later good exchanges


class PeerTimeouts:
    """How long exchanges took, by peer, and the limits that follow for the next one. Times are the loop's.

    Each timeout of an exchange in progress halves the peer's rate, so that the time limit doubles until it suffices. A
    new peer's rate starts as that of all others together, and theirs as our own bandwidth.
    """

    def __init__(self, bandwidth: float) -> None:
        self._usual = bandwidth
        self._peers: RecentDict[PeerId, _Seen] = RecentDict(MAX_PEERS)

    def _of(self, peer: PeerId) -> _Seen:
        return self._peers.put_newest(peer, _Seen)

    def answer_seconds(self, peer: PeerId) -> float:
        """How long a peer may take to accept or decline, opening a stream included."""
        return ANSWER_FLOOR_SECONDS + ROUND_TRIPS * self._of(peer).round_trip_seconds

    def expected_seconds(self, peer: PeerId, size_bytes: int) -> float:
        seen = self._of(peer)
        return 4 * seen.round_trip_seconds + size_bytes / (seen.rate or self._usual)

    def timeout_seconds(self, peer: PeerId, size_bytes: int) -> float:
        return self.answer_seconds(peer) + TIMEOUT_MULTIPLE * self.expected_seconds(peer, size_bytes)

    def answered(self, peer: PeerId, seconds: float) -> None:
        """Record the time in which a stream was opened and answered: two round trips."""
        seen = self._of(peer)
        observed = min(seconds / 2, MAX_ROUND_TRIP_SECONDS)
        seen.round_trip_seconds = max(observed, ewma(seen.round_trip_seconds, observed, 1 / 2))

    def took(self, peer: PeerId, size_bytes: int, now: float, seconds: float) -> None:
        """Record a completed exchange. A deliberately slow peer gets at most a fifth of our time."""
        seen = self._of(peer)
        slow = seconds > ANSWER_FLOOR_SECONDS + 2 * self.expected_seconds(peer, size_bytes)
        observed = size_bytes / max(seconds, 1e-6)
        seen.rate, self._usual = _towards(seen.rate or self._usual, observed), _towards(self._usual, observed)
        seen.rest_until = now + REST_MULTIPLE * seconds if slow else 0.0

    def failed(self, peer: PeerId, began: float, now: float, until: float, slow: bool) -> None:
        """Record a failed exchange that could have lasted until `until`; `slow`: it was in progress."""
        if now >= until or now - began >= CHEAP_SECONDS:
            self.late(peer, now, now - began, slow and now >= until)

    def late(self, peer: PeerId, now: float, cost_seconds: float, slow: bool = True) -> None:
        """Record that a failed exchange cost us this many seconds; `slow`: it was in progress, not unanswered."""
        seen = self._of(peer)
        if slow:
            seen.rate = max(LEAST_RATE, (seen.rate or self._usual) / 2)
            self._usual = max(LEAST_RATE, 0.8 * self._usual)
        seen.rest_until = now + REST_MULTIPLE * cost_seconds

    def distrust(self, peer: PeerId, now: float) -> None:
        self._of(peer).distrust_until = now + DISTRUST_SECONDS

    def resting(self, peer: PeerId, now: float) -> bool:
        seen = self._peers.get(peer)
        return seen is not None and now < max(seen.rest_until, seen.distrust_until)


def _towards(rate: float, observed: float) -> float:
    return max(LEAST_RATE, min(ewma(rate, observed, 1 / 2), MAX_RATE_GAIN * rate))


@dataclass(slots=True)
class _Asked:
    highest: int = -1
    round: int = 0
    seen: set[int] = field(default_factory=set)


class RequestDeduplicator:
    """Remembers the requests of each peer's incarnation. Each counts once, in whatever order they arrive."""

    def __init__(self) -> None:
        self._by_member: RecentDict[Member, _Asked] = RecentDict(MAX_PEERS)

    def hear(self, sender: Member, sequence: int, round_number: int) -> None:
        """Record a request. `BadPayload` if it was received before, is too old, or its round goes back."""
        asked = self._by_member.put_newest(sender, _Asked)
        if sequence in asked.seen:
            raise BadPayload(f"question {sequence} is asked again")
        if sequence <= asked.highest - REQUEST_WINDOW:
            raise BadPayload(f"question {sequence} is stale: {asked.highest} was heard")
        if sequence > asked.highest:
            if round_number < asked.round:
                raise BadPayload(f"question {sequence} of round {round_number}, after one of round {asked.round}")
            asked.highest, asked.round = sequence, round_number
        asked.seen = {each for each in asked.seen if each > asked.highest - REQUEST_WINDOW} | {sequence}
