"""A peer that lies: what its honest code sends is altered on its way out, as in the simulator, while a file says how.

    STARLING_TEST_LIE=FILE python -m tests.faults.liar join …      # else as `python -m node join …`

    nan             each of its chunks begins with a number that is none
    wrong-mean      the part that it reduces is another for one of the others, sealed and signed as it should be
    forged-record   with each vote it tells of a record that nobody decided, with a vote that nobody cast

While there is no file it is honest.
"""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Container
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, cast

from protocols import wire
from protocols.base import Deadline, Handler, PeerId, Signer, Stream
from protocols.framing import FramedStream
from tests.sim.byzantine.contributors import ByzantineContributorStream
from tests.sim.byzantine.voters import ByzantineVoterStream

VARIABLE = "STARLING_TEST_LIE"
PERJURIES = {"wrong-mean": "two-parts", "forged-record": "forged-certificate"}


class FirstAsked(Container[PeerId]):
    """Holds whoever was asked for first."""

    def __init__(self) -> None:
        self._first: object = None

    def __contains__(self, peer: object) -> bool:
        self._first = self._first or peer
        return peer == self._first


class LyingTransport:
    """A transport whose streams tell the lie of the moment at which they were opened; else the same."""

    def __init__(self, inner: Any, signer: Signer, told: Path) -> None:
        self._inner, self._signer, self._told = inner, signer, told
        self._dupes = FirstAsked()
        self._plans: dict[bytes, wire.Plan] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def serve(self, method: str, handler: Handler) -> None:
        self._inner.serve(method, lambda peer, stream: handler(peer, self._disguised(stream)))

    @asynccontextmanager
    async def open(self, peer: PeerId, method: str, deadline: Deadline) -> AsyncIterator[Stream]:
        async with self._inner.open(peer, method, deadline) as stream:
            yield self._disguised(stream)

    def _disguised(self, honest: FramedStream | Stream) -> Stream:
        lie, stream = self._lie(), cast(FramedStream, honest)
        # Every stream: a perjury needs the plan that came on another one.
        dupes = cast(Any, self._dupes)
        perjured = ByzantineVoterStream(stream, PERJURIES.get(lie, ""), self._signer, dupes, self._plans)
        if lie in PERJURIES:
            return cast(Stream, perjured)
        return cast(
            Stream, ByzantineContributorStream(cast(FramedStream, perjured), cast(Any, None), lie, self._signer)
        )

    def _lie(self) -> str:
        with suppress(OSError):
            return self._told.read_text().strip()
        return ""


def main() -> int:
    """Run the command line of a peer whose transport lies."""
    from node.cli import app as cli
    from node.session import peer

    honest = peer.with_failpoints

    def lying(transport: Any, trainer: Any, rounds: Path) -> Any:
        frames, *others = honest(transport, trainer, rounds)
        signer = transport._config.identity
        return LyingTransport(frames, signer, Path(os.environ[VARIABLE])), *others

    peer.with_failpoints = lying
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
