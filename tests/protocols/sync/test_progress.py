"""How far, how fast, and whether it comes any nearer."""

from __future__ import annotations

from types import SimpleNamespace

from protocols.base import SyncStatus
from protocols.sync.progress import (
    LEAST_SECONDS,
    METER_SECONDS,
    SAY_SECONDS,
    CatchUpTrend,
    SyncProgress,
)

MB = 1_000_000


def test_progress_covers_state_then_rounds_since() -> None:
    time = [100.0]
    sync_progress = SyncProgress(lambda: time[0])
    assert sync_progress.progress() is None
    sync_progress.begin(rounds=5, round_bytes=2 * MB)
    download = SimpleNamespace(size_bytes=100 * MB, missing_bytes=100 * MB, holders=3)
    sync_progress.download = download  # type: ignore[assignment]
    assert sync_progress.progress() == SyncStatus(0, 100 * MB, 3, 0.0, 0, 5, None), "nothing has moved yet"
    for _ in range(20):
        time[0] += 1.0
        sync_progress.record_arrival(2 * MB)
        download.missing_bytes -= 2 * MB
    progress = sync_progress.progress()
    assert progress and 2.0 * MB < progress.bytes_per_second < 2.2 * MB
    assert progress.eta_seconds == (60 * MB + 5 * 2 * MB) / progress.bytes_per_second
    time[0] += METER_SECONDS + 1.0
    assert sync_progress.progress() == SyncStatus(40 * MB, 100 * MB, 3, 0.0, 0, 5, None), "and nothing moves any more"
    sync_progress.end()
    assert sync_progress.progress() is None and sync_progress.fetched_bytes == 40 * MB


def test_link_slower_than_rounds_is_reported_occasionally() -> None:
    trend, now = CatchUpTrend(), 1000.0
    assert trend.begins(now, 100, 0, MB) == ""
    trend.ends(now + 100.0)
    line = trend.begins(now + 100.0, 120, 15 * MB, MB)
    assert line == (
        "your connection is too slow for this run: in 100 s the others decided 20 rounds of 1 MB each, and 15 MB came "
        "in; this peer keeps trying, but needs more than 1.6 Mbit/s to catch up, and has 1.2"
    )
    trend.ends(now + 200.0)
    assert trend.begins(now + 200.0, 140, 30 * MB, MB) == "", "once"
    trend.ends(now + 100.0 + SAY_SECONDS)
    assert trend.begins(now + 100.0 + SAY_SECONDS, 300, 31 * MB, MB) != "", "and again much later"


def test_peer_catching_up_or_interrupted_is_not_warned() -> None:
    nearer, later, quick = CatchUpTrend(), CatchUpTrend(), CatchUpTrend()
    for trend in (nearer, later, quick):
        assert trend.begins(0.0, 100, 0, MB) == ""
    nearer.ends(100.0)
    assert nearer.begins(100.0, 120, 25 * MB, MB) == ""
    later.ends(100.0)
    assert later.begins(100.0 + LEAST_SECONDS, 500, 15 * MB, MB) == "", "it took part in rounds meanwhile"
    quick.ends(LEAST_SECONDS / 2)
    assert quick.begins(LEAST_SECONDS / 2, 500, 15 * MB, MB) == "", "that says nothing of the line"
