"""A peer in a process of its own whose libraries block: it carries out one command after the other.

It takes the JSON lines of `benchmarks.averaging.Swarm` as `benchmarks.averaging_peer` does:

    connect {peers}   (id, address) of all, by rank
    make {round}      reads this rank's vector of the round
    form {round}      forms a group; answers when it began and ended, or nothing where there is no group to form
    average {round}   from "vectors ready and group known" until this peer holds the mean
    check {}          compares what this peer holds with the mean, which `benchmarks.peers.vectors` wrote
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from typing import Any

from benchmarks.averaging_setup import Setup, say

Answer = dict[str, Any]


class BlockingPeer:
    """This process.

    Attributes:
        address: where the other peers find this one, if they need to.
    """

    def __init__(self, setup: Setup) -> None:
        self.setup, self.address = setup, ""

    def connect(self, peers: list[tuple[str, str]]) -> Answer:
        return {}

    def make(self, round: int) -> Answer:
        return {}

    def form(self, round: int) -> Answer:
        return {}

    def average(self, round: int) -> Answer:
        raise NotImplementedError

    def check(self) -> Answer:
        raise NotImplementedError

    def close(self) -> None: ...


def run(kind: type[BlockingPeer]) -> None:
    """Carry out commands until the parent process closes the input, or ends. What libraries print goes to the log."""
    sys.stdout = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    peer = kind(Setup(**json.loads(sys.argv[1])))
    try:
        with suppress(BrokenPipeError):  # the parent process is gone
            say(event="up", peer=str(peer.setup.rank), address=peer.address, pid=os.getpid())
            for line in sys.stdin.buffer:
                command = json.loads(line)
                name = command.pop("do")
                say(event=name, **getattr(peer, name)(**command))
    finally:
        peer.close()
