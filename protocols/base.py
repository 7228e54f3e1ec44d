"""The contract between protocols and the node: what a protocol may use, and what it must provide.

A protocol reaches the outside world only through the `Host` that it is built with. So the same protocol code runs over
libp2p and in the simulator. The event loop is the clock: a `Deadline` is a value of the running loop's `time()`, for
`asyncio.timeout_at`.

The names are defined in four modules of `protocols.contract`. Import them from here:

    values      plain values: keys, members, heads, progress, results, settings
    errors      the errors below
    host        transport, directory, members, compute, clock, signer
    averager    averagers, their sessions, and trainers

Errors:

    ProtocolError
      PeerError            something about one peer; carries `peer`
        PeerGone           definite: no byte reached the peer, or it refused; it has not counted our data
        PeerSilent         indefinite: the stream was reset, ended or timed out; the peer may have counted our data
          StoppedHere      the same, by a limit of our own: the peer is not to blame
      BadPayload           received data breaks the rules; the code that read it knows the sender, and reports it
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
from protocols.contract.errors import BadPayload, PeerError, PeerGone, PeerSilent, ProtocolError, StoppedHere
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
    "StoppedHere",
    "Stream",
    "Trainer",
    "Transport",
    "Vector",
]
