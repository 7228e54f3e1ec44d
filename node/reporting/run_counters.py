"""Sums over the rounds of this incarnation, for metrics. (`node.storage.journal` also counts earlier incarnations.)"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict

from node.reporting.report import RoundReport

BUCKETS_SECONDS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 3600.0)


class Histogram:
    """A histogram of durations: how many are in each bucket of `BUCKETS_SECONDS`, and above the last."""

    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKETS_SECONDS) + 1)
        self.sum_seconds = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(BUCKETS_SECONDS, seconds)] += 1
        self.sum_seconds += seconds


class RunCounters:
    """An `EventSink` that counts."""

    def __init__(self) -> None:
        self.sums: dict[str, float] = defaultdict(float)  # the names end in their units
        self.rounds: Counter[str] = Counter()  # by outcome
        self.round_seconds, self.average_seconds = Histogram(), Histogram()
        self.last: RoundReport | None = None

    def say(self, line: str) -> None:
        """Lines are not counted."""

    def report(self, report: RoundReport) -> None:
        self.last = report
        self.rounds[report.outcome] += 1
        values = {
            "tokens": report.tokens,
            "train_seconds": report.seconds_train,
            "wait_seconds": report.seconds_wait,
            "average_seconds": report.seconds_average,
            "downloaded_bytes": report.bytes_downloaded,
            "lost_rounds": report.lost_rounds,
            "lost_tokens": report.lost_tokens,
            "replayed_rounds": report.replayed_rounds,
            "half_exchanges": report.half_exchanges,
            "blamed": len(report.blamed),
        }
        for name, value in values.items():
            self.sums[name] += value
        self.round_seconds.add(report.seconds_train + report.seconds_wait + report.seconds_average)
        self.average_seconds.add(report.seconds_average)
