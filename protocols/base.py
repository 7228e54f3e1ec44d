"""The contract: what a protocol may touch, and what it must give back.

A protocol reaches the world only through the `Host` that it is built with: streams to peers, hints from a directory,
the list of live members, a place for heavy work, wall time, signatures, seeded randomness. The same protocol code runs
over libp2p and in the simulated world. There is no clock for deadlines: a `Deadline` is a value of the running
loop's `time()`, used through `asyncio.timeout_at`, so the loop is the clock.

It stands in four rooms, and everybody takes it from here:

    values      plain values: keys, members, heads, work, means, settings
    errors      as below
    host        the world as a protocol sees it
    strategy    averagers and trainers

Errors:

    ProtocolError
      PeerError            something about one peer; carries `peer`
        PeerGone           definite: not a byte reached it, or it refused; it has not counted us
        PeerSilent         indefinite: a reset, an end or a deadline in mid stream; it may have counted us
      BadPayload           what was received breaks the rules; whoever reads knows the sender and names it
"""

from __future__ import annotations

from protocols.contract.averager import (
    Averager,
    AveragingSession,
    ClosingAverager,
    ClosingSession,
    IndependentAverager,
    IndependentSession,
    Trainer,
)
from protocols.contract.errors import BadPayload, PeerError, PeerGone, PeerSilent, ProtocolError
from protocols.contract.host import Clock, Compute, Directory, Handler, Host, Members, Signer, Stream, Transport
from protocols.contract.values import (
    CHUNK_BYTES,
    AveragingResult,
    Buffer,
    Contribution,
    Deadline,
    Head,
    Header,
    Layout,
    LinkFault,
    LocalProgress,
    Member,
    Outcome,
    PeerFault,
    PeerId,
    RoundKey,
    Settings,
    Vector,
)

__all__ = [
    "CHUNK_BYTES",
    "Averager",
    "AveragingResult",
    "AveragingSession",
    "BadPayload",
    "Buffer",
    "Clock",
    "ClosingAverager",
    "ClosingSession",
    "Compute",
    "Contribution",
    "Deadline",
    "Directory",
    "Handler",
    "Head",
    "Header",
    "Host",
    "IndependentAverager",
    "IndependentSession",
    "Layout",
    "LinkFault",
    "LocalProgress",
    "Member",
    "Members",
    "Outcome",
    "PeerError",
    "PeerFault",
    "PeerGone",
    "PeerId",
    "PeerSilent",
    "ProtocolError",
    "RoundKey",
    "Settings",
    "Signer",
    "Stream",
    "Trainer",
    "Transport",
    "Vector",
]
