"""Cut a text into blocks whose ends depend on the text around them alone, as rsync and restic do.

So a text that has grown, or has a line more in its middle, has nearly the same blocks as before, and what a hash of a
block's content decides stays decided. Blocks end where lines do, unless a line is longer than a block may be.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from zlib import crc32

LEAST, USUAL, MOST = 512, 1024, 8 << 10
"""Bytes of a block: at least, about how many more until it ends, and at most."""


def blocks(data: Iterable[bytes]) -> Iterator[bytes]:
    """The blocks of a text in UTF-8. No character is divided."""
    held = b""
    for piece in data:
        held, low = held + piece, 0
        while len(held) - low > 2 * MOST:
            high = _end(held, low)
            yield held[low:high]
            low = high
        held = held[low:]
    low = 0
    while low < len(held):
        high = _end(held, low)
        high = len(held) if len(held) - high < LEAST else high  # a short rest is not a block of its own
        yield held[low:high]
        low = high


def _end(text: bytes, low: int) -> int:
    before, last = low + LEAST - 1, low
    while (line := text.find(b"\n", before, low + MOST)) >= 0:
        begins = text.rfind(b"\n", low, line) + 1 or low
        if crc32(text[begins:line]) * USUAL < (line + 1 - begins) << 32:
            return line + 1
        before = last = line + 1
    if len(text) <= low + MOST:
        return len(text)
    if last > low:
        return last
    end = low + MOST
    while text[end] & 0xC0 == 0x80 and end > low + MOST - 4:
        end -= 1
    return end
