"""A share of a state that travels one way: its frames, and how giving and taking it changes a state."""

# ruff: noqa: RUF009 - a field's bound is its default

from __future__ import annotations

from dataclasses import dataclass

import torch

from protocols.allreduce.parts import ReducedPart
from protocols.base import Member
from protocols.pairwise.state_swap import ExchangeMessage
from protocols.vectors.views import VectorView
from protocols.wire import flag, one, real, register, text, uint

PUSH = "starling/push-sum/share/1"


@dataclass(frozen=True, slots=True)
class PushShare(ExchangeMessage):
    """A share for one incarnation of the receiver; its chunks follow. `sequence` counts the shares given to it."""

    to: Member = one(Member)
    weight: float = real(1e-280, 1e9)
    elements: int = uint(1 << 48)
    codec: str = text(16)

    @property
    def share_name(self) -> str:
        """The unique name of this share."""
        return f"{self.name} to {self.to.peer}.{self.to.incarnation}"


@dataclass(frozen=True, slots=True)
class RecallShare(ExchangeMessage):
    """Asks whether that share has been counted. If not, the receiver must not count it any more."""

    to: Member = one(Member)


@dataclass(frozen=True, slots=True)
class ShareStatus(ExchangeMessage):
    """Whether the share is counted; if not, it never will be."""

    counted: bool = flag()


register(72, (PushShare, RecallShare, ShareStatus))


def split_share(state: VectorView, part: ReducedPart) -> None:
    """Encode `state` into `part`, then correct `state` for the codec's error.

    The mean of what the receiver decodes and of what stays equals the state before.
    """
    for index, low, high, (scratch, sent) in part.pieces(2):
        mine = state.read(low, high, scratch)
        part.codec.encode(mine, part.chunk(index))
        part.codec.decode(part.chunk(index), sent)
        state.write(low, torch.sub(mine, sent, out=sent).add_(mine))


def merge_share(state: VectorView, part: ReducedPart, share: float) -> None:
    """Average an encoded state into `state`, in place. `share` is its weight, between 0 and 1."""
    for index, low, high, (scratch, theirs) in part.pieces(2):
        part.codec.decode(part.chunk(index), theirs)
        mine = state.read(low, high, scratch)
        state.write(low, theirs.mul_(share).add_(torch.mul(mine, 1 - share)))
