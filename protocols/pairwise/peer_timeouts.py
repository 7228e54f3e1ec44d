"""How long an exchange with a peer may take, whom to leave alone for a while, and which questions are new. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from protocols.base import BadPayload, Member, PeerId
from protocols.estimates import RecentDict, ewma
from protocols.limits import DISTRUST_SECONDS

ANSWER_FLOOR_SECONDS = 2.0
ROUND_TRIPS = 8.0
"""An answer is given at once: it is late after the floor and so many round trips."""
MAX_ROUND_TRIP_SECONDS = 5.0
"""No line is thought to be longer: who answers late each time would be waited for longer and longer."""
TIMEOUT_MULTIPLE = 4.0
"""An exchange may take so many times as long as it should."""
REST_MULTIPLE = 4.0
"""Who cost us time for nothing, or more than was to be expected, is left alone for so many times as long."""
CHEAP_SECONDS = 1.0
"""What comes to nothing sooner has cost nothing: a partner may have gone on to another round."""
LEAST_RATE = 1e3
MAX_RATE_GAIN = 1.5
MAX_PEERS = 256
"""So many peers are remembered; the one that has been quiet longest is forgotten first."""
REQUEST_WINDOW = 64
"""Questions of one life that may overtake each other: an older one is stale."""


@dataclass(slots=True)
class _Seen:
    """Attributes:
    rate: bytes/s that exchanges with this peer came to; None: there was none.
    rest_until: when it may be spoken to again, in the loop's time.
    distrust_until: the same, whatever else it does well meanwhile.
    """

    rate: float | None = None
    round_trip_seconds: float = 0.0
    rest_until: float = 0.0
    distrust_until: float = 0.0


class PeerTimeouts:
    """What exchanges took, by peer, and what follows for the next one. Times are the loop's.

    A peer's rate follows what was observed, and is halved by every timeout of what was under way: over a line that is
    slower than anybody said, the time given doubles until it is enough. It starts as that of all others together, and
    theirs as our own bandwidth: if the line that is slow is ours, that is not learnt anew with everybody.
    """

    def __init__(self, bandwidth: float) -> None:
        self._usual = bandwidth
        self._peers: RecentDict[PeerId, _Seen] = RecentDict(MAX_PEERS)

    def _of(self, peer: PeerId) -> _Seen:
        return self._peers.renew(peer, _Seen)

    def answer_seconds(self, peer: PeerId) -> float:
        """How long a peer may take to say yes or no, opening a stream included."""
        return ANSWER_FLOOR_SECONDS + ROUND_TRIPS * self._of(peer).round_trip_seconds

    def expected_seconds(self, peer: PeerId, size_bytes: int) -> float:
        """What an exchange of so many bytes, in both directions at once, should take."""
        seen = self._of(peer)
        return 4 * seen.round_trip_seconds + size_bytes / (seen.rate or self._usual)

    def timeout_seconds(self, peer: PeerId, size_bytes: int) -> float:
        """What it may take, from the question to the last word."""
        return self.answer_seconds(peer) + TIMEOUT_MULTIPLE * self.expected_seconds(peer, size_bytes)

    def answered(self, peer: PeerId, seconds: float) -> None:
        """A stream was opened and answered in that time: two round trips."""
        seen = self._of(peer)
        observed = min(seconds / 2, MAX_ROUND_TRIP_SECONDS)
        seen.round_trip_seconds = max(observed, ewma(seen.round_trip_seconds, observed, 1 / 2))

    def took(self, peer: PeerId, size_bytes: int, now: float, seconds: float) -> None:
        """An exchange held. Who was slow is met seldom: one that does it on purpose has a fifth of our time at most."""
        seen = self._of(peer)
        slow = seconds > ANSWER_FLOOR_SECONDS + 2 * self.expected_seconds(peer, size_bytes)
        observed = size_bytes / max(seconds, 1e-6)
        seen.rate, self._usual = _towards(seen.rate or self._usual, observed), _towards(self._usual, observed)
        seen.rest_until = now + REST_MULTIPLE * seconds if slow else 0.0

    def failed(self, peer: PeerId, began: float, now: float, until: float, slow: bool) -> None:
        """What began then came to nothing, and had until then. Who breaks off just before costs as much as who is late.

        Args:
            slow: it was under way.
        """
        if now >= until or now - began >= CHEAP_SECONDS:
            self.late(peer, now, now - began, slow and now >= until)

    def late(self, peer: PeerId, now: float, cost_seconds: float, slow: bool = True) -> None:
        """An exchange cost us so many seconds and came to nothing.

        Args:
            slow: it was under way, so that it takes longer than was thought; else there was no answer.
        """
        seen = self._of(peer)
        if slow:
            seen.rate = max(LEAST_RATE, (seen.rate or self._usual) / 2)
            self._usual = max(LEAST_RATE, 0.8 * self._usual)
        seen.rest_until = now + REST_MULTIPLE * cost_seconds

    def distrust(self, peer: PeerId, now: float) -> None:
        """A peer broke a rule: it is to be left alone."""
        self._of(peer).distrust_until = now + DISTRUST_SECONDS

    def resting(self, peer: PeerId, now: float) -> bool:
        """Whether it is to be left alone."""
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
    """Which questions of which life of a peer have been heard: each counts once, in whatever order they come."""

    def __init__(self) -> None:
        self._lives: RecentDict[Member, _Asked] = RecentDict(MAX_PEERS)

    def hear(self, sender: Member, sequence: int, round_number: int) -> None:
        """
        Raises:
            BadPayload: heard before, older than any that may still be under way, or its round goes back.
        """
        asked = self._lives.renew(sender, _Asked)
        if sequence in asked.seen:
            raise BadPayload(f"question {sequence} is asked again")
        if sequence <= asked.highest - REQUEST_WINDOW:
            raise BadPayload(f"question {sequence} is stale: {asked.highest} was heard")
        if sequence > asked.highest:
            if round_number < asked.round:
                raise BadPayload(f"question {sequence} of round {round_number}, after one of round {asked.round}")
            asked.highest, asked.round = sequence, round_number
        asked.seen = {each for each in asked.seen if each > asked.highest - REQUEST_WINDOW} | {sequence}
