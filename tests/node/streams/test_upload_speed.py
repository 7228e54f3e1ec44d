"""What counts as this peer's upload: what it sends while data for two peers waits."""

from __future__ import annotations

import math

import pytest

from node.streams.byte_meter import SLOT_SECONDS, UploadSpeed

LINE = 1e6
LOOKS = 2  # at each connection in a slot


def sent(peers: str, seconds: float, share: float = 1.0) -> float:
    """Each letter is a connection to that peer, a capital if its data waits; all have the same part of `share`."""
    speed, count = UploadSpeed(), round(seconds / SLOT_SECONDS * LOOKS)
    for look in range(count + 1):
        for connection, peer in enumerate(peers):
            rate = share * LINE / len(peers)
            speed.note(peer.lower(), look * SLOT_SECONDS / LOOKS, connection, rate, peer.isupper())
    return speed.bytes_per_second


def test_upload_is_what_all_connections_send_while_two_peers_wait() -> None:
    for peers in ("AB", "ABc", "AaBb", "AB" * 20):
        assert sent(peers, 3.5) == pytest.approx(LINE)
    for unknown in (sent("AB", 2.5), sent("AA", 60), sent("Abc", 60), sent("ab", 60)):
        assert math.isnan(unknown)


def test_fastest_second_of_late_counts() -> None:
    speed = UploadSpeed()
    for slot in range(400):
        rate = LINE * (3 if slot < 200 else 1 if slot % 50 == 49 else 0.5)
        for peer in "ab":
            speed.note(peer, (slot + 0.5) * SLOT_SECONDS, ord(peer), rate / 2, True)
        if slot == 250:
            assert speed.bytes_per_second == pytest.approx(3 * LINE)
    assert speed.bytes_per_second == pytest.approx(0.6 * LINE)
