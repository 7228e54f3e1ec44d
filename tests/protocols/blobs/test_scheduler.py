"""Which holder is asked for which chunk."""

from __future__ import annotations

from protocols.blobs.scheduler import MAX_REQUESTED_CHUNKS, ChunkScheduler, HolderRate


def test_request_window_follows_the_holder_rate() -> None:
    fast, slow, crawling = HolderRate(), HolderRate(), HolderRate()
    assert fast.window == 2
    for rate, seconds in ((fast, 0.01), (slow, 0.28), (crawling, 8.0)):
        rate.record_time(seconds)
    assert (fast.window, slow.window, crawling.window) == (MAX_REQUESTED_CHUNKS, 4, 1)
    assert (fast.patience_seconds, crawling.patience_seconds) == (1.0, 24.0)


def test_released_chunks_are_reclaimed_and_shared_at_end() -> None:
    time, one, other, third = [0.0], HolderRate(), HolderRate(), HolderRate()
    scheduler = ChunkScheduler([3, 1, 2, 0], lambda: time[0])
    assert [scheduler.share(holders) for holders in (0, 1, 2, 9)] == [4, 4, 2, 2]
    assert [scheduler.claim(one) for _ in range(5)] == [0, 1, 2, 3, None]
    scheduler.release(2, one)
    assert scheduler.claim(one) == 2, "it was not brought"
    scheduler.missing.discard(0)
    scheduler.release(0, one)
    assert scheduler.next(other) is None and scheduler.next_at(other) == 5.0, "it was"
    time[0] = 4.9
    assert scheduler.next(other) is None
    time[0] = 5.0
    scheduler.arrived(2)
    assert [scheduler.claim(other) for _ in range(3)] == [1, 3, None], "2 is being verified"
    assert scheduler.next(third) is None, "two are asked, never three"
    scheduler.release(2, one)
    assert scheduler.claim(third) == 2, "it was refused"
    scheduler.arrived(1)
    scheduler.release(1, other)
    assert scheduler.next(third) == 1, "refused, and the first holder still owes it"


def test_idle_holder_takes_over_what_a_slow_one_would_send_late() -> None:
    slow, fast = HolderRate(), HolderRate()
    slow.record_time(1.0)
    fast.record_time(0.3)
    scheduler = ChunkScheduler(range(3), lambda: 0.0)
    assert [scheduler.claim(slow, ahead) for ahead in range(4)] == [0, 1, 2, None]
    assert scheduler.claim(fast) == 2, "it is due last"
    assert scheduler.claim(fast, 1) == 1, "2 s there, more than three times .6 s here"
    assert scheduler.claim(fast, 2) is None, "1 s there, .9 s here: not worth a second request"
