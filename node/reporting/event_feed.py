"""A peer's rounds, messages and texts, for several readers at once: the terminal, the page, sums for the metrics."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from node.reporting.report import RoundEvaluation, RoundReport
from node.reporting.status import EventSink, printable
from protocols.aio import Notifier

MAX_EVENTS = 700  # Events kept for a reader that comes back after a pause
MAX_LINES = 200
MAX_POINTS = 2000  # Rounds kept for a plot; older ones are thinned out
TEXT_SECONDS = 600.0  # Least time between two texts, and the time for which a reader's interest in one lasts
MAX_TEXT_CHARACTERS = 4000


@dataclass(frozen=True, slots=True)
class FeedEvent:
    """A `round`, `evaluated`, `line` or `text`, with values that are ready for JSON and safe to print."""

    number: int  # in this incarnation of the peer, from 1
    kind: str
    data: Mapping[str, Any]


class EventFeed:
    """Passes everything on to a sink, keeps the latest events for readers, and counts (`counters`)."""

    def __init__(self, sink: EventSink, wall: Callable[[], float]) -> None:
        self._sink, self._wall = sink, wall
        self.counters = RunCounters()
        self._events: deque[FeedEvent] = deque(maxlen=MAX_EVENTS)
        self._lines: deque[Mapping[str, Any]] = deque(maxlen=MAX_LINES)
        self._points: list[Mapping[str, Any]] = []
        self._text: Mapping[str, Any] = {}
        self._changed = Notifier()
        self._number = 0
        self._wanted_until = self._next_text = 0.0

    # -- what the peer tells ------------------------------------------------------------------------------------------

    def say(self, line: str) -> None:
        self._sink.say(line)
        data = {"time": self._wall(), "text": printable(line, 4096)}
        self._lines.append(data)
        self._publish("line", data)

    def report(self, report: RoundReport) -> None:
        self._sink.report(report)
        self.counters.add(report)
        self._points.append(point := round_point(report))
        self._thin()
        self._publish("round", point)

    def evaluated(self, evaluation: RoundEvaluation) -> None:
        self._sink.evaluated(evaluation)
        data = {"round": evaluation.evaluated + 1, "held_out_loss": evaluation.held_out_loss}
        for place in range(len(self._points) - 1, -1, -1):
            if self._points[place]["round"] == data["round"]:
                self._points[place] = {**self._points[place], **data}
                break
        self._publish("evaluated", data)

    def show_text(self, text: bytes) -> None:
        kept = text.decode(errors="replace")[:MAX_TEXT_CHARACTERS]
        clean = "".join(each if each.isprintable() or each == "\n" else "·" for each in kept)
        self._text = {"time": self._wall(), "text": clean}
        self._publish("text", self._text)

    def recall(self, reports: Iterable[RoundReport]) -> None:
        """Put the rounds of earlier incarnations before those of this one."""
        self._points = [round_point(each) for each in reports] + self._points
        self._thin()

    # -- what readers get ---------------------------------------------------------------------------------------------

    def since(self, after: int | None) -> list[FeedEvent] | None:
        """The events after this one; None for a reader that has to start from `history`, as one without an event."""
        first = self._events[0].number if self._events else self._number + 1
        if after is None or not first - 1 <= after <= self._number:
            return None
        return [each for each in self._events if each.number > after]

    async def changed(self, after: int, deadline: float) -> bool:
        """Wait until there is an event after this one; False if there is none until the deadline."""
        return await self._changed.reached(lambda: self._number > after, deadline)

    def history(self) -> tuple[int, Mapping[str, Any]]:
        """Number of the latest event, and everything that a new reader shows: rounds, lines and the latest text."""
        return self._number, {"rounds": list(self._points), "lines": list(self._lines), "text": dict(self._text)}

    def want_text(self) -> None:
        """Note that a reader looks at the texts now."""
        self._wanted_until = self._wall() + TEXT_SECONDS

    def text_is_due(self) -> bool:
        """Whether a reader wants a text, and the latest is old. A true answer counts as if the text was generated."""
        now = self._wall()
        if now > self._wanted_until or now < self._next_text:
            return False
        self._next_text = now + TEXT_SECONDS
        return True

    def _publish(self, kind: str, data: Mapping[str, Any]) -> None:
        self._number += 1
        self._events.append(FeedEvent(self._number, kind, data))
        self._changed.notify()

    def _thin(self) -> None:
        """Keep the latest half of the rounds, and every second one before, until there are few enough."""
        while len(self._points) > MAX_POINTS:
            half = len(self._points) - MAX_POINTS // 2
            self._points = self._points[:half:2] + self._points[half:]


def round_point(report: RoundReport) -> Mapping[str, Any]:
    """What a plot and a table of rounds need of a report."""
    return {
        "round": report.round + 1,  # people count from one
        "time": report.time,
        "loss": report.loss,
        "held_out_loss": report.held_out_loss,
        "outcome": printable(report.outcome, 32),
        "peers": report.in_mean,
        "tokens": report.tokens,
        "seconds": report.seconds_train + report.seconds_wait + report.seconds_average,
        "seconds_average": report.seconds_average,
        "bytes_sent": report.bytes_sent,
        "bytes_received": report.bytes_received,
        "blamed": [printable(f"{peer[-6:]}: {why}", 200) for peer, why in list(report.blamed.items())[:8]],
    }


# -- counting ----------------------------------------------------------------------------------------------------------


BUCKETS_SECONDS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 3600.0)


class Histogram:
    """A histogram of durations: how many are in each bucket of `BUCKETS_SECONDS`, and above the last."""

    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKETS_SECONDS) + 1)
        self.sum_seconds = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(BUCKETS_SECONDS, seconds)] += 1
        self.sum_seconds += seconds


SUMS: Mapping[str, tuple[str, Callable[[RoundReport], float]]] = {
    "tokens": ("Tokens trained.", lambda each: each.tokens),
    "train_seconds": ("Time spent in training.", lambda each: each.seconds_train),
    "wait_seconds": ("Time in rounds spent neither in training nor in averaging.", lambda each: each.seconds_wait),
    "average_seconds": ("Time spent in averaging.", lambda each: each.seconds_average),
    "downloaded_bytes": ("Bytes of model state downloaded to catch up.", lambda each: each.bytes_downloaded),
    "lost_rounds": ("Rounds given up with a branch of the chain.", lambda each: each.lost_rounds),
    "lost_tokens": ("Tokens of this peer that had counted in lost rounds.", lambda each: each.lost_tokens),
    "replayed_rounds": ("Outer steps taken again from stored means.", lambda each: each.replayed_rounds),
    "half_exchanges": ("Gossip exchanges of which only one side succeeded.", lambda each: each.half_exchanges),
    "blamed": ("Peers named as the cause of a fault in a round.", lambda each: len(each.blamed)),
}
"""Name, which ends in its unit -> what it counts, and how much of that a round adds."""


class RunCounters:
    """Counts over the rounds of this incarnation, for the metrics."""

    def __init__(self) -> None:
        self.sums: dict[str, float] = defaultdict(float)  # by the names of `SUMS`
        self.rounds: Counter[str] = Counter()  # by outcome
        self.round_seconds, self.average_seconds = Histogram(), Histogram()
        self.last: RoundReport | None = None

    def add(self, report: RoundReport) -> None:
        self.last = report
        self.rounds[report.outcome] += 1
        for name, (_, value) in SUMS.items():
            self.sums[name] += value(report)
        self.round_seconds.add(report.seconds_train + report.seconds_wait + report.seconds_average)
        self.average_seconds.add(report.seconds_average)
