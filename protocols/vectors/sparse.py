"""Sparse pseudo-gradients with error feedback (SparseLoCo, Sarfi et al. 2025, arXiv 2508.15706, algorithm 1). Pure.

Of each group of 4096 elements, the 64 largest are sent with two bits each. The rest goes into the error feedback, which
is added to the next round's pseudo-gradient. A group takes 84 bytes: .0205 an element, 1/195 of float32.

    positions  48 bytes  the low 6 bits of each, in ascending order
               16 bytes  the high bits in unary: for each, bit (position >> 6) + index is set (Elias 1974, Fano 1971)
    values      4 bytes  two magnitudes, bfloat16
               16 bytes  for each element a sign, and which of the two magnitudes

A mean of N contributions has at most 64 N non-zero elements in each group. All are sent, in int8: what a mean left out
would be in no peer's error feedback. A group then takes 130 bytes for N = 1, 456 for 4, 848 for 8, 1568 for 16. If the
last group of a vector has only n elements, ceil(n / 64) of them are sent.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from protocols.base import BadPayload, Buffer, Vector
from protocols.registry import TOPK_GRAIN
from protocols.vectors.coding import PIECE, Codec, carry, received, require_finite, target, typed
from protocols.vectors.lowbit import Int8
from protocols.vectors.views import SMALLEST_NORMAL_FLOAT32

GROUP = TOPK_GRAIN
KEEP = 64
DECAY = 0.95
_LARGEST_LEVEL = torch.finfo(torch.bfloat16).max


class TwoBits(Codec):
    """A sign and one of two magnitudes for each element, in blocks of 64: the mean magnitudes of the elements below
    and above the block's mean. If a block holds zeros, they are the lower class, and exact. So is the code of a
    decoded vector.
    """

    name = "two bits"

    def encoded_bytes(self, elements: int) -> int:
        return 4 * -(-elements // KEEP) + -(-elements // 4)

    def encode(self, source: Vector, into: memoryview) -> None:
        data = target(self, source, into)
        require_finite(source)
        start = 4 * -(-len(source) // KEEP)
        values = _padded(source, KEEP)
        there = torch.arange(values.numel()).view_as(values) < len(source)
        levels, upper = _levels(values, there)
        typed(data[:start], torch.bfloat16).view(-1, 2).copy_(levels)
        negative = (values < 0) & (levels.gather(1, upper.long()) > 0)
        codes = (2 * upper + negative.long()).view(-1)[: len(source)]
        data[start:].copy_((_padded(codes, 4) << torch.arange(0, 8, 2)).sum(1))

    def decode(self, data: Buffer, into: Vector) -> None:
        held = received(self, data, into)
        start = 4 * -(-len(into) // KEEP)
        levels = typed(held[:start], torch.bfloat16).view(-1, 2).to(torch.float32)
        sound = (levels == 0) | ((levels >= SMALLEST_NORMAL_FLOAT32) & (levels <= _LARGEST_LEVEL))
        if not bool((sound & ~levels.signbit()).all()) or bool((levels[:, 0] > levels[:, 1]).any()):
            raise BadPayload("levels of two bits that no encoder writes")
        codes = (held[start:].long()[:, None] >> torch.arange(0, 8, 2) & 3).view(-1)
        if bool(codes[len(into) :].any()):
            raise BadPayload("codes of two bits beyond the last element")
        codes = _padded(codes[: len(into)], KEEP)
        sizes = levels.gather(1, codes >> 1)
        if bool(((sizes == 0) & (codes & 1 > 0)).view(-1)[: len(into)].any()):
            raise BadPayload("minus zero")
        into.copy_(torch.where(codes & 1 > 0, -sizes, sizes).view(-1)[: len(into)])


class TopK(Codec):
    grain, decay = GROUP, DECAY

    def __init__(self, members: int = 0) -> None:
        """For contributions; or for means of this many contributions."""
        self.name = f"topk of {members}" if members else "topk"
        self._members = members
        self._values: Codec = Int8() if members else TwoBits()

    def reduced(self, members: int) -> Codec:
        """Beyond 64 contributions all elements may be there, and their positions would cost more than the zeros."""
        if self._members:
            return self
        return TopK(members) if members <= GROUP // KEEP else Int8()

    def encoded_bytes(self, elements: int) -> int:
        groups = self._groups(elements)
        values = sum(group.count * group.keep for group in groups)
        return sum(group.count * group.bytes for group in groups) + self._values.encoded_bytes(values)

    def encode(self, source: Vector, into: memoryview) -> None:
        data = target(self, source, into)
        require_finite(source)
        at, values = 0, []
        for group, block in self._blocks(source):
            positions = group.largest(block)
            values.append(block.gather(1, positions).view(-1))
            packed = group.pack(positions).view(-1)
            data[at : at + len(packed)].copy_(packed)
            at += len(packed)
        self._values.encode(torch.cat(values) if values else source, into[at:])

    def decode(self, data: Buffer, into: Vector) -> None:
        held = received(self, data, into)
        blocks = self._blocks(into)
        start = sum(group.count * group.bytes for group, _ in blocks)
        values = torch.empty(sum(group.count * group.keep for group, _ in blocks))
        self._values.decode(memoryview(data)[start:], values)
        into.zero_()
        at = used = 0
        for group, block in blocks:
            size, kept = group.count * group.bytes, group.count * group.keep
            positions = group.unpack(held[at : at + size].view(-1, group.bytes))
            block.scatter_(1, positions, values[used : used + kept].view(-1, group.keep))
            at, used = at + size, used + kept

    def _groups(self, elements: int) -> tuple[_Groups, ...]:
        whole, rest = divmod(elements, GROUP)
        made = ((whole, GROUP), (1 if rest else 0, rest))
        return tuple(_Groups(count, width, self._kept(width)) for count, width in made if count)

    def _kept(self, width: int) -> int:
        return min(width, max(1, self._members) * -(-width // (GROUP // KEEP)))

    def _blocks(self, vector: Vector) -> list[tuple[_Groups, torch.Tensor]]:
        """Views of a vector: runs of groups of one width, with a row for each group. No run is longer than a piece."""
        found = []
        for low in range(0, len(vector), PIECE):
            for group in self._groups(min(PIECE, len(vector) - low)):
                block = vector[low : low + group.count * group.width].view(-1, group.width)
                found.append((group, block))
                low += len(block) * group.width
        return found


@dataclass(frozen=True, slots=True)
class _Groups:
    """`count` consecutive groups of `width` elements, of which `keep` are sent, and how their positions are packed."""

    count: int
    width: int
    keep: int

    @property
    def _low_bits(self) -> int:
        return (self.width // self.keep).bit_length() - 1

    @property
    def _low_bytes(self) -> int:
        return -(-self.keep * self._low_bits // 8)

    @property
    def _slots(self) -> int:
        return self.keep + ((self.width - 1) >> self._low_bits)

    @property
    def bytes(self) -> int:
        """Size of the positions of one group."""
        return self._low_bytes + -(-self._slots // 8)

    def largest(self, block: torch.Tensor) -> torch.Tensor:
        """Ascending positions of the largest magnitudes of each row. Of equal magnitudes the first ones are taken."""
        sizes = block.abs()
        least = sizes.topk(self.keep, dim=1).values[:, -1:]  # topk may take any of several equal ones
        above, equal = sizes > least, sizes == least
        spare = self.keep - above.sum(1, keepdim=True)
        taken = above | (equal & (equal.cumsum(1) <= spare))
        return taken.nonzero()[:, 1].view(-1, self.keep)

    def pack(self, positions: torch.Tensor) -> torch.Tensor:
        low = (positions[:, :, None] >> torch.arange(self._low_bits) & 1).flatten(1)
        high = torch.zeros(len(positions), self._slots, dtype=torch.int64)
        high.scatter_(1, (positions >> self._low_bits) + torch.arange(self.keep), 1)
        return torch.cat((_bytes_of(low), _bytes_of(high)), dim=1)

    def unpack(self, data: torch.Tensor) -> torch.Tensor:
        bits = (data[:, :, None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten(1)
        low, high = bits[:, : 8 * self._low_bytes], bits[:, 8 * self._low_bytes :]
        used = self.keep * self._low_bits
        if bool((high[:, : self._slots].sum(1) != self.keep).any()):
            raise BadPayload(f"not {self.keep} positions in a group of {self.width}")
        if bool(low[:, used:].any()) or bool(high[:, self._slots :].any()):
            raise BadPayload("positions with bits beyond the last")
        rest = high.nonzero()[:, 1].view(-1, self.keep) - torch.arange(self.keep)
        shifts = torch.arange(self._low_bits)
        lows = (low[:, :used].long().view(len(data), self.keep, self._low_bits) << shifts).sum(2)
        positions = rest << self._low_bits | lows
        if bool((positions.diff(dim=1) <= 0).any()) or bool((positions >= self.width).any()):
            raise BadPayload("positions out of order, or beyond the group")
        return positions


def _levels(values: torch.Tensor, there: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The two magnitudes of each row, float32 (rows, 2), exact in bfloat16; and which elements have the upper."""
    sizes = values.abs().double()
    zeros = ((sizes == 0) & there).any(1, keepdim=True)
    middle = _sum(sizes) / there.sum(1, keepdim=True)
    upper = (sizes >= middle.masked_fill(zeros, 0.0)) & (sizes > 0)
    lower = there & ~upper
    high = _sum(sizes * upper) / upper.sum(1, keepdim=True).clamp_(min=1)
    low = _sum(sizes * lower) / lower.sum(1, keepdim=True).clamp_(min=1)
    both = torch.cat((torch.where(lower.any(1, keepdim=True), low, high), high), dim=1)
    both = both.to(torch.float32).clamp_(max=_LARGEST_LEVEL)
    return both.to(torch.bfloat16).to(torch.float32).masked_fill_(both < SMALLEST_NORMAL_FLOAT32, 0.0), upper


def _sum(rows: torch.Tensor) -> torch.Tensor:
    """The sum of each row of 64, float64, added by halves: the order in which `sum` adds depends on the machine."""
    while rows.shape[1] > 1:
        half = rows.shape[1] // 2
        rows = rows[:, :half] + rows[:, half:]
    return rows


def _padded(values: torch.Tensor, width: int) -> torch.Tensor:
    rows = torch.zeros(-(-len(values) // width), width, dtype=values.dtype)
    rows.view(-1)[: len(values)].copy_(values)
    return rows


def _bytes_of(bits: torch.Tensor) -> torch.Tensor:
    """Pack rows of bits into rows of bytes, the lowest bit first."""
    rows = torch.zeros(len(bits), -(-bits.shape[1] // 8), 8, dtype=torch.int64)
    rows.flatten(1)[:, : bits.shape[1]].copy_(bits)
    return (rows << torch.arange(8)).sum(2).to(torch.uint8)


# -- error feedback ---------------------------------------------------------------------------------------------------


def sent(codec: Codec, residual: Vector, delta: Vector, into: Vector) -> None:
    """Write what a receiver gets, codec(decay · residual + delta), to `into`, which must not overlap the others."""
    for low in range(0, len(into), PIECE):
        piece = into[low : low + PIECE]
        torch.mul(residual[low : low + PIECE], codec.decay, out=piece)
        piece.add_(delta[low : low + PIECE])
        carry(codec, piece)


def settle(codec: Codec, residual: Vector, delta: Vector, gone: Vector) -> None:
    """Update the error feedback after the contribution was counted: residual ← decay · residual + delta − gone."""
    residual.mul_(codec.decay).add_(delta).sub_(gone)
