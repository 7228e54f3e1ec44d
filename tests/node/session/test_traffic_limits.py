"""Limits of a running peer, changed by its user."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from node.config.peer_sources import load_peer, read_settings
from node.session.traffic_limits import TrafficLimits


class SlowFiles:
    """Does the work, and lets others run before each answer."""

    async def run(self, work: Callable[[], Any], cost_bytes: int) -> Any:
        done = work()
        await asyncio.sleep(0.01)
        return done


async def test_two_changes_at_once_both_hold(tmp_path: Path) -> None:
    limits = TrafficLimits(load_peer({}, {}, None), lambda: 1e9, tmp_path, SlowFiles())
    await asyncio.gather(
        limits.change("upload-limit", "1MB"),
        limits.change("download-limit", "2MB"),
    )
    assert (limits.traffic.upload.rate, limits.traffic.download.rate) == (1e6, 2e6)
    assert read_settings(tmp_path) == {"upload-limit": "1MB", "download-limit": "2MB"}


async def test_upload_is_measured_or_declared_and_within_its_cap(tmp_path: Path) -> None:
    limits = TrafficLimits(load_peer({}, {}, None), lambda: 1e9, tmp_path, SlowFiles())
    assert limits.upload() == 0.0, "neither is known"
    await limits.change("upload-limit", "1MB")
    assert limits.upload() == 1e6
    limits.traffic.upload_speed._windows.extend((4e5, 5e5, 4.5e5))
    assert limits.upload() == 5e5
