"""The plain values of the contract: what a round is bound to, who is in it, what was brought and what came of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias

import torch

PeerId: TypeAlias = str
"""A libp2p peer id in its text form (base58btc)."""

Vector: TypeAlias = torch.Tensor
"""1-D, float32, CPU, contiguous."""

Deadline: TypeAlias = float
"""An instant of the running loop's `time()`. Never sent to a peer: peers exchange remaining seconds."""

Buffer: TypeAlias = bytes | bytearray | memoryview

CHUNK_BYTES = 1 << 20
"""Bulk data is encoded, sent, received and reduced in pieces of at most this many bytes of float32."""


@dataclass(frozen=True, slots=True)
class RoundKey:
    """What every frame of a round is bound to.

    Attributes:
        run: hash of the manifest, 32 bytes.
        scope: which replicas average; equal scope means replicas of the same parameters.
        lineage: hash of the record that this round extends, 32 bytes.
        round: the number of the round, from 0.
        fragment: which fragment of the model this round commits.
    """

    run: bytes
    scope: str
    lineage: bytes
    round: int
    fragment: int = 0


@dataclass(frozen=True, slots=True, order=True)
class Member:
    """A peer in one of its lives: a restart is a new incarnation."""

    peer: PeerId
    incarnation: int = 0


@dataclass(frozen=True, slots=True, order=True)
class LinkFault:
    """Between these two no contribution travelled, though both took part: neither reduces until that round."""

    first: PeerId
    second: PeerId
    until: int


@dataclass(frozen=True, slots=True)
class Head:
    """Where a peer stands on the chain of records: what the next round extends.

    Attributes:
        key: of the next round.
        roster: the members whose votes count in it.
        state_root: root of the outer state after the last decided round, 32 bytes.
        anchor: lineage of the last record that changed the outer state: what pseudo-gradients are measured from.
        complaints: links that are known not to carry contributions.
        former: rosters that the present one has shrunk from, the latest first, each larger than the one before it. It
            follows from the chain, so two heads of one lineage never differ in it.
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
        seconds: time spent training.
        step_seconds: what one inner step takes: how long a cut may have to wait.
        norm: L2 norm of the pseudo-gradient, anchor - local.
        complete: the inner steps of the round are done; more may follow until the round is cut.
        state_root: root of the outer state after the last committed round, 32 bytes.
        leaving: the last that it brings: it will be gone when the round is over, which is called at once.
        carried: of the tokens, those that the parameters held when they were written: `seconds` and `loss` are not of
            them.
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


class Outcome(StrEnum):
    COMMITTED = "committed"
    SKIPPED = "skipped"
    UNDECIDED = "undecided"
    SUPERSEDED = "superseded"


@dataclass(frozen=True, slots=True)
class PeerFault:
    """A peer that was left out or clamped, and why, in one line."""

    peer: PeerId
    why: str


@dataclass(frozen=True, slots=True)
class Contribution:
    """How much the mean holds of what a peer brought, its pseudo-gradient or its state.

    Attributes:
        messages: where states travel, the names of those that were counted, of at most 128 characters: never given
            twice, so that whoever counts one twice can be told.
    """

    chunks_counted: int
    chunks: int
    messages: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class AveragingResult:
    """What became of a round's averaging.

    Attributes:
        outcome: `into` holds the mean only if committed.
        record: encoded record of the round (`protocols.consensus.record`), empty unless decided.
        certificate: the record with the votes that decided it, as a frame's header; empty unless decided.
        contributions: peer -> chunks of it that the mean holds, in the order of the plan.
        weights: peer -> its weight in the mean, after clamping; empty where this peer does not know the plan.
        blamed: who was refused, lost or clamped, and why.
        bytes_sent, bytes_received: of this round, headers and control messages included.
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
        """Peers of which the mean holds at least one chunk."""
        return tuple(peer for peer, part in self.contributions.items() if part.chunks_counted)


@dataclass(frozen=True, slots=True)
class Settings:
    """What an averager is built with, next to its host.

    Attributes:
        codec: name of the codec in which vectors travel; the same for all peers of a run, as are the next two.
        elements: length of each fragment's flat vector.
        chunk_elements: vectors travel and are reduced in chunks of so many.
        bandwidth: this peer's upload, bytes/s; decides how much it reduces.
        incarnation: this life of the peer.
        keep_rounds: decided bytes are kept for so many rounds, for members that missed one.
        quorum: votes that decide, by the size of the roster; None: a majority.
        fork_peers: members that may go on alone, at least, where the majority is gone; 0: none may.
        robust: name of the rule by which reducers average (`protocols.robust`); the same for all peers of a run.
        schedule: whom a peer asks in gossip, or gives to (`protocols.pairwise.matching`); the same for all peers of a
        run.
    """

    codec: str
    elements: tuple[int, ...]
    chunk_elements: int = CHUNK_BYTES // 4
    bandwidth: float = 12.5e6
    incarnation: int = 0
    keep_rounds: int = 8
    quorum: Callable[[int], int] | None = None
    fork_peers: int = 1
    robust: str = "mean"
    schedule: str = "random"


@dataclass(frozen=True, slots=True)
class Layout:
    """The parameters as flat vectors: tensor names and shapes, in order, for each fragment."""

    fragments: tuple[tuple[tuple[str, tuple[int, ...]], ...], ...]

    def sizes(self) -> tuple[int, ...]:
        """Elements of each fragment's flat vector."""
        return tuple(sum(torch.Size(shape).numel() for _, shape in fragment) for fragment in self.fragments)
