"""The proxy between peers: which bits it flips, and whose, and that it tells what it has done."""

from __future__ import annotations

import random

from tests.faults.proxy import Faults, Wire

ENDS = ("10.77.0.2", "10.77.0.3")
DATA = random.Random(1).randbytes(1_000_000)


def test_bits_flip_at_the_requested_rate() -> None:
    wire = Wire(random.Random(0), Faults(ENDS[:1], flip_every_bytes=10_000))
    changed = wire.corrupted(ENDS, DATA)
    flipped = [(one ^ other).bit_count() for one, other in zip(changed, DATA, strict=True) if one != other]
    assert 60 < len(flipped) < 150 and set(flipped) == {1}
    assert wire.corrupted(("10.77.0.4", "10.77.0.5"), DATA) == DATA
    assert wire.take_counts() == {"delayed_bytes": 0, "flipped_bits": len(flipped)}
    assert wire.take_counts()["flipped_bits"] == 0
