"""Plain values of the contract: round keys, members, heads, local progress, results, settings."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:  # commands such as `status` read these values, and loading PyTorch takes seconds
    import torch

PeerId: TypeAlias = str
"""A libp2p peer id in its text form (base58btc)."""

Vector: TypeAlias = "torch.Tensor"
"""1-D, float32, CPU, contiguous."""

Deadline: TypeAlias = float
"""An instant of the running loop's `time()`. Never sent to a peer: peers exchange remaining seconds."""

Buffer: TypeAlias = bytes | bytearray | memoryview

CHUNK_BYTES = 1 << 20
"""Bulk data is encoded, sent, received and reduced in pieces of at most this many bytes of float32."""


@dataclass(frozen=True, slots=True)
class RoundKey:
    """Identifies a round. Every frame of the round is bound to it.

    Attributes:
        run: hash of the manifest, 32 bytes.
        scope: which parameters are averaged: peers of equal scope hold the same ones.
        lineage: hash of the record that this round extends, 32 bytes.
        round: number of the round, from 0.
        fragment: index of the model fragment that this round commits.
    """

    run: bytes
    scope: str
    lineage: bytes
    round: int
    fragment: int = 0


@dataclass(frozen=True, slots=True, order=True)
class Member:
    """One incarnation of a peer: each start of its process is a new one."""

    peer: PeerId
    incarnation: int = 0


@dataclass(frozen=True, slots=True, order=True)
class LinkFault:
    """A broken link: no contribution travelled between two members that both took part.

    Neither of them reduces a part before round `until`.
    """

    first: PeerId
    second: PeerId
    until: int


@dataclass(frozen=True, slots=True)
class Head:
    """The tip of a peer's chain of records, which the next round extends.

    Attributes:
        key: key of the next round.
        roster: members whose votes count in it.
        state_root: root of the outer state after the last decided round, 32 bytes.
        anchor: lineage of the last record that changed the outer state. Pseudo-gradients are measured from there.
        complaints: links that are known to be broken.
        former: larger rosters that the present one has shrunk from, the latest first. Derived from the chain, so two
            heads of one lineage never differ in it.
    """

    key: RoundKey
    roster: tuple[Member, ...]
    state_root: bytes
    anchor: bytes
    complaints: tuple[LinkFault, ...] = ()
    former: tuple[tuple[Member, ...], ...] = field(default=(), compare=False)


class Header:
    """The header of a message: one of the frozen dataclasses of `protocols.wire`."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class LocalProgress:
    """What a peer has trained since its anchor.

    Attributes:
        tokens: tokens (or samples) that the inner steps consumed.
        loss: mean training loss over them; nan before the first step.
        seconds: time spent on training.
        step_seconds: duration of one inner step, so how long the peer may need to notice the cut.
        norm: L2 norm of the pseudo-gradient, anchor - local.
        complete: the round's inner steps are done; more may follow until the round is cut.
        state_root: root of the outer state after the last committed round, 32 bytes.
        leaving: the peer leaves the roster after this round. If the work is complete, the round is called at once.
        carried: tokens of earlier work that the parameters already held when they were written. Included in `tokens`,
            not in `seconds` and `loss`.
        resting: the peer takes no steps for now, so the round is called without it, and not because it leaves.
    """

    tokens: int
    loss: float
    seconds: float
    norm: float
    step_seconds: float = 0.0
    complete: bool = False
    state_root: bytes = bytes(32)
    leaving: bool = False
    carried: int = 0
    resting: bool = False


class Outcome(StrEnum):
    """How a round ended: `SUPERSEDED` means that the peer switched to a better branch instead."""

    COMMITTED = "committed"
    SKIPPED = "skipped"
    UNDECIDED = "undecided"
    SUPERSEDED = "superseded"


@dataclass(frozen=True, slots=True)
class PeerFault:
    """A peer that was excluded or clamped, and the reason in one line."""

    peer: PeerId
    why: str


@dataclass(frozen=True, slots=True)
class Contribution:
    """How much of one peer's pseudo-gradient or state the mean holds.

    Attributes:
        chunks_counted, chunks: chunks of this peer in the mean, and chunks of a whole vector; 1 and 1 for a protocol
            that counts whole vectors.
        messages: for protocols that send states: names of the messages that were counted, at most 128 characters
            each. A name is never used twice, which lets the checkers find a message that was counted twice.
    """

    chunks_counted: int
    chunks: int
    messages: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class AveragingResult:
    """Result of one round of averaging.

    Attributes:
        outcome: `into` holds the mean only if this is COMMITTED.
        record: encoded record of the round (`protocols.consensus.record`); empty if none was decided.
        certificate: the record with the votes that decided it, encoded as a header; empty if none was decided.
        contributions: peer -> chunks of its contribution in the mean, in the order of the plan. With independent state
            this peer itself may be named or not.
        weights: peer -> its weight in the mean, after clamping; empty if this peer does not know the plan.
        blamed: peers that were refused, lost or clamped, with reasons.
        bytes_sent, bytes_received: traffic of this round, headers and control messages included.
    """

    outcome: Outcome
    record: bytes = b""
    certificate: bytes = b""
    contributions: Mapping[PeerId, Contribution] = field(default_factory=dict)
    weights: Mapping[PeerId, float] = field(default_factory=dict)
    blamed: tuple[PeerFault, ...] = ()
    bytes_sent: int = 0
    bytes_received: int = 0

    @property
    def peers(self) -> tuple[PeerId, ...]:
        """Peers with at least one chunk in the mean."""
        return tuple(peer for peer, part in self.contributions.items() if part.chunks_counted)


@dataclass(frozen=True, slots=True)
class Settings:
    """Configuration of an averager.

    Attributes:
        codec: name of the codec of vectors on the wire. This and the next two are equal at all peers of a run.
        elements: length of each fragment's flat vector.
        chunk_elements: elements of a chunk, the unit in which vectors travel and are reduced.
        bandwidth: upload of this peer, bytes/s. Determines the size of the part that it reduces.
        bandwidth_limit: returns what this peer may send now, bytes/s, whatever its bandwidth; it may change.
        incarnation: incarnation of this peer.
        keep_rounds: number of rounds whose reduced parts are kept in memory for members that missed them.
        quorum: number of votes that decide, as a function of the roster's size; None means a majority.
        fork_peers: least number of members that may fork when the majority is gone; 0 forbids forks.
        robust: name of the rule by which reducers average (`protocols.robust`); equal at all peers of a run.
        schedule: name of the partner schedule of gossip and push-sum (`protocols.pairwise.matching`); equal at all
            peers of a run.
    """

    codec: str
    elements: tuple[int, ...]
    chunk_elements: int = CHUNK_BYTES // 4
    bandwidth: float = 12.5e6
    bandwidth_limit: Callable[[], float] = lambda: math.inf
    incarnation: int = 0
    keep_rounds: int = 8
    quorum: Callable[[int], int] | None = None
    fork_peers: int = 1
    robust: str = "mean"
    schedule: str = "random"

    def upload_bandwidth(self) -> float:
        """What this peer may declare as its upload now, bytes/s."""
        return min(self.bandwidth, self.bandwidth_limit())


@dataclass(frozen=True, slots=True)
class Layout:
    """The parameters as flat vectors: names and shapes of the tensors of each fragment, in order."""

    fragments: tuple[tuple[tuple[str, tuple[int, ...]], ...], ...]

    def sizes(self) -> tuple[int, ...]:
        """Elements of each fragment's flat vector."""
        return tuple(sum(math.prod(shape) for _, shape in fragment) for fragment in self.fragments)
