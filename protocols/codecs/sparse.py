"""Sparse pseudo-gradients with error feedback (SparseLoCo, Sarfi et al. 2025, arXiv 2508.15706, algorithm 1). Pure.

Of each 4096 elements the 64 largest travel, two bits each; what does not travel is owed: it is added to what is sent a
round later. 84 bytes stand for 4096 elements, .0205 an element, 1/195 of float32:

    positions  48 bytes  the low 6 bits of each, in ascending order
               16 bytes  the rest in unary: bit (position >> 6) + index is set for each (Elias 1974, Fano 1971)
    values      4 bytes  two magnitudes, bfloat16
               16 bytes  for each a sign, and which of the two

A mean of N of these has at most 64 N elements that are not zero, and travels as such: none is left out, each has the
eight bits of int8. Nobody would be owed what a mean leaves out. With k = 64 N and l = floor(log2(4096 / k)) it takes
ceil(k l / 8) + ceil((k + (4095 >> l)) / 8) bytes for the positions, k for the values, and 4 for the scale of each 128
of these: 130 bytes for N = 1, 456 for 4, 848 for 8, 1568 for 16, 2880 for 32.

A vector that ends within a group of 4096 has of its last n elements ceil(n / 64) sent.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from protocols.base import BadPayload, Buffer, Vector
from protocols.codecs.coding import PIECE, Codec, carry, finite_range, received, target, typed
from protocols.codecs.lowbit import Int8
from protocols.limits import LARGEST_FLOAT32, SMALLEST_NORMAL_FLOAT32

GROUP = 4096
KEEP = 64
DECAY = 0.95
_LARGEST_LEVEL = torch.finfo(torch.bfloat16).max


class TwoBits(Codec):
    """A sign and one of two magnitudes: the means of those elements of a block of 64 that are below, and not below,
    their mean. Where there are zeros they are the lower ones, and exact.

    What was decoded is encoded without loss. An element is off by less than the largest of its block.
    """

    name = "two bits"

    def encoded_bytes(self, elements: int) -> int:
        return 4 * -(-elements // KEEP) + -(-elements // 4)

    def encode(self, source: Vector, into: memoryview) -> None:
        data = target(self, source, into)
        finite_range(source)
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

    def error_bound(self, source: Vector) -> Vector:
        sizes = _padded(source.abs(), KEEP)
        most = sizes.amax(1, keepdim=True) * (1 + 2**-8) if len(source) else sizes
        return torch.maximum(sizes, most.sub(sizes)).clamp_(max=LARGEST_FLOAT32).view(-1)[: len(source)]


class TopK(Codec):
    """The largest of each group; see above. What was decoded is encoded without loss, if it lies on the same groups.

    An element that is not sent is off by itself, one that is by what `TwoBits` or, of a mean, int8 is off by.
    """

    grain, decay = GROUP, DECAY

    def __init__(self, members: int = 0) -> None:
        """
        Args:
            members: of a mean of so many; 0: a contribution.
        """
        self.name = f"topk of {members}" if members else "topk"
        self._members = members
        self._values: Codec = Int8() if members else TwoBits()

    def reduced(self, members: int) -> Codec:
        return self if self._members else TopK(members)

    def encoded_bytes(self, elements: int) -> int:
        groups = self._groups(elements)
        values = sum(group.count * group.keep for group in groups)
        return sum(group.count * group.bytes for group in groups) + self._values.encoded_bytes(values)

    def encode(self, source: Vector, into: memoryview) -> None:
        data = target(self, source, into)
        finite_range(source)
        at, values = 0, []
        for start, group in self._placed(len(source)):
            block = source[start : start + group.count * group.width].view(-1, group.width)
            positions = group.largest(block)
            values.append(block.gather(1, positions).view(-1))
            size = group.count * group.bytes
            data[at : at + size].copy_(group.pack(positions).view(-1))
            at += size
        self._values.encode(torch.cat(values) if values else source, into[at:])

    def decode(self, data: Buffer, into: Vector) -> None:
        held = received(self, data, into)
        placed = list(self._placed(len(into)))
        start = sum(group.count * group.bytes for _, group in placed)
        values = torch.empty(sum(group.count * group.keep for _, group in placed))
        self._values.decode(memoryview(data)[start:], values)
        into.zero_()
        at = used = 0
        for low, group in placed:
            size, kept = group.count * group.bytes, group.count * group.keep
            positions = group.unpack(held[at : at + size].view(-1, group.bytes))
            block = into[low : low + group.count * group.width].view(-1, group.width)
            block.scatter_(1, positions, values[used : used + kept].view(-1, group.keep))
            at, used = at + size, used + kept

    def error_bound(self, source: Vector) -> Vector:
        bound = source.abs()
        placed = [
            (source[low : low + group.count * group.width].view(-1, group.width), low, group)
            for low, group in self._placed(len(source))
        ]
        positions = [group.largest(block) for block, _, group in placed]
        values = [block.gather(1, at).view(-1) for (block, _, _), at in zip(placed, positions, strict=True)]
        sent = self._values.error_bound(torch.cat(values) if values else source)
        for (block, low, _), at in zip(placed, positions, strict=True):
            here, sent = sent[: at.numel()], sent[at.numel() :]
            bound[low : low + block.numel()].view_as(block).scatter_(1, at, here.view_as(at))
        return bound

    def _groups(self, elements: int) -> tuple[_Groups, ...]:
        """The whole groups, then the one that is cut short."""
        whole, rest = divmod(elements, GROUP)
        made = ((whole, GROUP), (1 if rest else 0, rest))
        return tuple(_Groups(count, width, self._kept(width)) for count, width in made if count)

    def _kept(self, width: int) -> int:
        return min(width, max(1, self._members) * -(-width // (GROUP // KEEP)))

    def _placed(self, elements: int) -> Iterator[tuple[int, _Groups]]:
        """Where runs of groups begin, none longer than a piece."""
        for low in range(0, elements, PIECE):
            for group in self._groups(min(PIECE, elements - low)):
                yield low, group
                low += group.count * group.width


@dataclass(frozen=True, slots=True)
class _Groups:
    """Some groups of one width, of each of which so many elements are kept, and how their positions are packed."""

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
        """Bits of the unary part."""
        return self.keep + ((self.width - 1) >> self._low_bits)

    @property
    def bytes(self) -> int:
        """Of one group's positions."""
        return self._low_bytes + -(-self._slots // 8)

    def largest(self, block: torch.Tensor) -> torch.Tensor:
        """Ascending positions of the largest magnitudes of each row; of equal ones the first."""
        sizes = block.abs()
        least = sizes.topk(self.keep, dim=1).values[:, -1:]  # which of several equal ones it takes is nobody's promise
        above, equal = sizes > least, sizes == least
        spare = self.keep - above.sum(1, keepdim=True)
        taken = above | (equal & (equal.cumsum(1) <= spare))
        return taken.nonzero()[:, 1].view(-1, self.keep)

    def pack(self, positions: torch.Tensor) -> torch.Tensor:
        """Ascending positions as bytes, a row for each group."""
        low = (positions[:, :, None] >> torch.arange(self._low_bits) & 1).flatten(1)
        high = torch.zeros(len(positions), self._slots, dtype=torch.int64)
        high.scatter_(1, (positions >> self._low_bits) + torch.arange(self.keep), 1)
        return torch.cat((_bytes_of(low), _bytes_of(high)), dim=1)

    def unpack(self, data: torch.Tensor) -> torch.Tensor:
        """
        Raises:
            BadPayload: no positions that `pack` packs.
        """
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
    """Two magnitudes for each row, float32 that bfloat16 holds, and which elements have the upper one.

    Args:
        there: which elements count.
    """
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
    """Of each row of 64, float64, by halves: `sum` adds in an order that depends on the machine."""
    while rows.shape[1] > 1:
        half = rows.shape[1] // 2
        rows = rows[:, :half] + rows[:, half:]
    return rows


def _padded(values: torch.Tensor, width: int) -> torch.Tensor:
    """Rows of that width, the last filled up with zeros."""
    rows = torch.zeros(-(-len(values) // width), width, dtype=values.dtype)
    rows.view(-1)[: len(values)].copy_(values)
    return rows


def _bytes_of(bits: torch.Tensor) -> torch.Tensor:
    """Rows of bits as rows of bytes, the lowest first."""
    rows = torch.zeros(len(bits), -(-bits.shape[1] // 8), 8, dtype=torch.int64)
    rows.flatten(1)[:, : bits.shape[1]].copy_(bits)
    return (rows << torch.arange(8)).sum(2).to(torch.uint8)


# -- error feedback ---------------------------------------------------------------------------------------------------


def sent(codec: Codec, residual: Vector, delta: Vector, into: Vector) -> None:
    """What travels of a pseudo-gradient and of what is owed from before: codec(decay · owed + delta), into `into`.

    All are float32 (n) and do not overlap; the first two stay as they are.

    Raises:
        ValueError: the sum is not finite.
    """
    for low in range(0, len(into), PIECE):
        piece = into[low : low + PIECE]
        torch.mul(residual[low : low + PIECE], codec.decay, out=piece)
        piece.add_(delta[low : low + PIECE])
        carry(codec, piece)


def settle(codec: Codec, residual: Vector, delta: Vector, gone: Vector) -> None:
    """It was counted: owed ← decay · owed + delta − gone, with `gone` as `sent` made it."""
    residual.mul_(codec.decay).add_(delta).sub_(gone)
