"""A quota in any sequence of bytes, writes, kills and midnights: what is used is never more than what is stored."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from hypothesis import given
from hypothesis import strategies as st

from node.streams.byte_quota import RESERVE_BYTES, ByteQuota, period_end, period_name

DAY = 86_400.0
LIMIT = 4_000_000_000
steps = st.lists(st.tuples(st.sampled_from(["bytes", "kill", "end", "day"]), st.integers(1, 30 << 20)), max_size=60)


@given(steps)
def test_stored_bytes_cover_used_ones(what: Sequence[tuple[str, int]]) -> None:
    now = datetime(2026, 11, 20, 12).timestamp()
    heard: list[str] = []

    def life(stored: bytes) -> ByteQuota:
        quota = ByteQuota(LIMIT, "week", lambda: now)
        quota.listen(lambda: heard.append("warning"), lambda: heard.append("exhausted"))
        quota.load(stored)
        return quota

    quota, true, kills, disk = life(b""), 0, 0, b""
    disk = quota.store()
    for step, size in what:
        if step == "bytes":
            quota.count(size)
            true += size
            if quota.changed.is_set():
                disk = quota.store()
        elif step == "day":
            now += DAY
            if quota.turn():
                true, kills, disk = 0, 0, quota.store()
        else:
            kills += step == "kill"
            quota = life(quota.final() if step == "end" else disk)
            disk = quota.store()
        assert true <= quota.used_bytes <= true + kills * RESERVE_BYTES
    assert quota.exhausted == quota.spent == (quota.used_bytes >= LIMIT)
    assert not heard or heard[0] == "warning"


@given(st.datetimes(datetime(2024, 1, 1), datetime(2030, 1, 1)), st.sampled_from(["day", "week", "month"]))
def test_period_ends_where_the_next_one_begins(when: datetime, period: str) -> None:
    end = period_end(period, when.timestamp()).timestamp()
    name = period_name(period, when.timestamp())
    assert period_name(period, end - 1) == name < period_name(period, end)
    quota = ByteQuota(LIMIT, period, lambda: end)
    quota.load(b'{"period": "%s", "name": "%s", "used_bytes": 5}' % (period.encode(), name.encode()))
    assert quota.used_bytes == 0, "an older period's bytes do not count"
