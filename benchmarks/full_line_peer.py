"""A real peer that writes down its heartbeats, whom it takes for lost, and the moments of its rounds.

    STARLING_MOMENTS=FILE python -m benchmarks.full_line_peer join …       as `python -m node join …`
    python -m benchmarks.full_line_peer ask PAUSE_SECONDS ADDRESS …        asks these peers for their status, in turn

Each line is a JSON object with the machine's monotonic time. It replaces methods by name: the product knows nothing of
it.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence
from itertools import cycle
from typing import Any, TextIO

MOMENTS = "STARLING_MOMENTS"


def write_down(file: TextIO) -> None:
    """Write down, from now on, what this process does."""
    from node.membership.handshake import HandshakeProtocol
    from node.membership.membership import Membership
    from protocols.allreduce.all_reduce import AllReduce
    from protocols.butterfly.missing_parts import MissingParts
    from protocols.butterfly.round import Round

    def note(what: str, **values: Any) -> None:
        file.write(json.dumps({"at": time.monotonic(), "what": what, **values}) + "\n")

    hear, set_live, take, begin, collect = (
        HandshakeProtocol._hear,
        Membership._set_live,
        AllReduce.take,
        Round._run_data_phase,
        MissingParts.collect,
    )

    def heard(self: Any, contact: Any, echo: Any, began: float) -> None:
        silent = asyncio.get_running_loop().time() - contact.detector._heard
        hear(self, contact, echo, began)
        note("heartbeat", peer=contact.peer, seconds=contact.round_trip_seconds, silent=silent)

    def lives(self: Any, contact: Any, live: bool, why: str = "") -> None:
        if contact.live and not live:
            note("lost", peer=contact.peer, why=why, left=contact.left)
        set_live(self, contact, live, why)

    def taken(self: Any, part: int, held: Any) -> None:
        take(self, part, held)
        if self.complete:
            note("parts", round=self.task.key.round)

    def begun(self: Any, *arguments: Any) -> None:
        note("data", round=self.head.key.round)
        begin(self, *arguments)

    async def collected(self: Any, *arguments: Any) -> Any:
        note("decided", round=self._head.key.round, certificate=self._vote.certificate is not None)
        return await collect(self, *arguments)

    for owner, name, new in (
        (HandshakeProtocol, "_hear", heard),
        (Membership, "_set_live", lives),
        (AllReduce, "take", taken),
        (Round, "_run_data_phase", begun),
        (MissingParts, "collect", collected),
    ):
        setattr(owner, name, new)


async def ask(pause_seconds: float, addresses: Sequence[str]) -> None:
    """Ask peers for their status, as `node status --bootstrap`, until this process is ended."""
    from node.session.fatal import FatalPeerError
    from node.session.remote_queries import remote_status

    for address in cycle(addresses):
        began, why = time.monotonic(), ""
        try:
            await remote_status(address)
        except FatalPeerError as error:
            why = str(error)
        print(json.dumps({"at": began, "seconds": time.monotonic() - began, "why": why}), flush=True)
        await asyncio.sleep(pause_seconds)


if __name__ == "__main__":
    if sys.argv[1:2] == ["ask"]:
        asyncio.run(ask(float(sys.argv[2]), sys.argv[3:]))
    else:
        from node.__main__ import main

        write_down(open(os.environ[MOMENTS], "a", buffering=1))  # noqa: SIM115 - as long as the process
        main()
