"""An example of what a peer reports about itself."""

from __future__ import annotations

import math

from node.reporting.report import RoundReport
from node.reporting.status import PeerStatus, Status

PEER = "12D3KooWGRUfuFwTaVcXCnUbTbVLYYEkYgjDM3Bd7q4RuRyTQhaP"
STATUS = Status(
    state="waiting",
    reason="for the others",
    waiting_for=("bob",),
    round=5,
    rounds=16,
    lineage="ab",
    run="default",
    run_id="cd" * 32,
    peer=PEER,
    nickname="ada",
    peers=(PeerStatus("12D3KooWx", "bob", True, False, 4, "/ip4/192.0.2.1/tcp/1"),),
    addresses=("/ip4/127.0.0.1/tcp/4000/p2p/" + PEER, "/ip4/203.0.113.7/tcp/4000/p2p/" + PEER),
    tokens=10,
    tokens_per_second=3.5,
    loss=math.nan,
    held_out_loss=2.0,
    bytes_sent=1,
    bytes_received=2,
    rss_bytes=3,
    loop_lag_p99_seconds=0.004,
    eta_seconds=None,
    pid=7,
    incarnation=2,
)


REPORT = RoundReport(
    "r", "p", 1, 0, "a", "b", "anchor0", "committed", ("p", "q"), {"q": ("a", 1, 2)}, {"q": "late"}, True, 0.5, 100,
    math.nan, "h", 2.0, 0.1, 0.2, 5, 6, 0.0,
)  # fmt: skip
