"""A lying real peer: while a file names a lie, what its honest code sends is changed, as in the simulator.

    STARLING_TEST_LIE=FILE python -m tests.faults.peer join …      # else as `python -m node join …`

    nan             each chunk begins with NaN
    wrong-mean      one of the other members gets another reduced part, correctly sealed and signed
    forged-record   with each vote it sends a certificate for a record that was not decided, with an invalid vote

Without the file the peer is honest.
"""

from __future__ import annotations

from collections.abc import Container
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from protocols import wire
from protocols.base import PeerId, Signer, Stream, Transport
from protocols.streams.framing import FramedStream
from tests.faults.failpoints import WrappedTransport
from tests.sim.byzantine.contributors import ByzantineContributorStream
from tests.sim.byzantine.voters import ByzantineVoterStream

VOTERS_LIES = {"wrong-mean": "two-parts", "forged-record": "forged-certificate"}


class FirstAsked(Container[PeerId]):
    def __init__(self) -> None:
        self._first: object = None

    def __contains__(self, peer: object) -> bool:
        self._first = self._first or peer
        return peer == self._first


class LyingTransport(WrappedTransport):
    """Its streams tell the lie that the file named when they were opened."""

    def __init__(self, inner: Transport, signer: Signer, lie_file: Path) -> None:
        super().__init__(inner)
        self._signer, self._lie_file = signer, lie_file
        self._dupes = FirstAsked()
        self._plans: dict[bytes, wire.Plan] = {}

    def wrapped(self, method: str, stream: Stream) -> Stream:
        lie, honest = self._lie(), cast(FramedStream, stream)
        # Wrap every stream: some lies need the plan, which came on another stream.
        dupes = cast(Any, self._dupes)
        perjured = ByzantineVoterStream(honest, VOTERS_LIES.get(lie, ""), self._signer, dupes, self._plans)
        if lie in VOTERS_LIES:
            return cast(Stream, perjured)
        return cast(
            Stream, ByzantineContributorStream(cast(FramedStream, perjured), cast(Any, None), lie, self._signer)
        )

    def _lie(self) -> str:
        with suppress(OSError):
            return self._lie_file.read_text().strip()
        return ""
