"""The list of bulk methods names methods that exist."""

from __future__ import annotations

import re

from protocols.streams.framing import BULK_METHODS
from tests.test_architecture import SOURCES

_METHOD = re.compile(r'"(starling/[a-z0-9/-]+/\d+)"')
_SMALL = {
    "starling/butterfly/attach/1",
    "starling/butterfly/control/1",
    "starling/direct/1",
    "starling/entry/1",
    "starling/hello/7",
    "starling/moshpit/control/1",
    "starling/pairs/closing/1",
    "starling/pass/1",
    "starling/seat/1",
}
"""Votes, greetings and other small messages, which go over libp2p."""


def test_each_method_is_bulk_or_small() -> None:
    """A new method has to be put into one of the two lists, and a renamed one cannot stay behind in either."""
    others = [source for file, source in SOURCES.items() if file != "protocols/streams/framing.py"]
    used = {name for source in others for name in _METHOD.findall(source)}
    assert used - _SMALL == BULK_METHODS and used >= _SMALL
