"""The named points of a round at which a peer may be killed, protocol by protocol."""

from __future__ import annotations

from collections.abc import Mapping

from tests.faults.failpoints import POINTS as VOTED

POINTS: Mapping[str, tuple[str, ...]] = {
    "butterfly": VOTED,
    "gossip": (
        "train", "receive ExchangeRequest", "send ExchangeReply", "trained", "send ExchangeRequest",
        "receive ExchangeReply", "send Chunk", "receive Chunk", "send StateReceived", "receive StateReceived",
        "read", "write", "evaluate", "report", "reported",
    ),
    "moshpit": (
        "train", "send PositionAnnouncement", "receive PositionAnnouncement", "trained", "read", "send Plan",
        "receive Plan", "send Contribute", "send Chunk", "receive Chunk", "send Reduced", "send PartDone",
        "receive Reduced",
        "write", "evaluate", "report", "reported",
    ),
}  # fmt: skip
"""Protocol -> the points that every peer passes in its rounds, roughly in their order."""

ONE_ROLE_ONLY = ("send Plan", "receive Plan", "send Propose", "receive Propose")
"""Points that only a caller or only the other members pass: the first peer that reaches one is killed."""
