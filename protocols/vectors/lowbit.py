"""Codecs of eight and four bits: a scale for each block of 128 elements, and a code for each element. Pure.

Blockwise absmax quantisation (Dettmers et al. 2021, arXiv 2110.02861, section 2.1) with these codes:

    int8   a byte: -127..127 times absmax / 127
    int4   half a byte: -7..7 times absmax / 7
    e3m0   half a byte: 0 or ±absmax / 2**k with k in 0..6 (Streaming DiLoCo, Douillard et al. 2025, arXiv 2501.18512)

Layout: all scales as float32, then all codes. Of two half bytes in a byte, the low one is the even element. A block is
encoded as zeros with scale 0 if a decoded number would be denormal: too coarse for the error bound, and treated
differently by processors. Scales are limited so that every product is finite.
"""

from __future__ import annotations

import torch

from protocols.base import BadPayload, Buffer, Vector
from protocols.vectors.coding import PIECE, Codec, finite_range, received, require_finite, target, typed
from protocols.vectors.views import LARGEST_FLOAT32, SMALLEST_NORMAL_FLOAT32

BLOCK = 128
_ENCODED = 1 << 17  # elements encoded at a time: with their scratch vector they stay in the second-level cache
_UNUSED = 8  # the code that no encoder writes: minus eight (int4) or minus zero (e3m0)


class _Blockwise(Codec):
    """Scales each block by absmax / `_TOP`. A subclass encodes the quotients, which are in [-_TOP, _TOP]."""

    _TOP: float
    _LEAST: float  # smaller scales become zero
    _MOST: float  # larger scales are clamped

    def encode(self, source: Vector, into: memoryview) -> None:
        scales, codes = self._split(target(self, source, into), len(source))
        scratch = torch.empty(min(_ENCODED, len(source)))
        for low in range(0, len(source), _ENCODED):
            high = min(low + _ENCODED, len(source))
            for start, stop, width in _spans(low, high):
                block = source[start:stop].view(-1, width)
                work = scratch[start - low : stop - low].view(-1, width)
                divisors = self._scales(block, work, scales[start // BLOCK : -(-stop // BLOCK)])
                torch.div(block, divisors[:, None], out=work)
            self._put(scratch[: high - low], codes, low)

    def decode(self, data: Buffer, into: Vector) -> None:
        scales, codes = self._split(received(self, data, into), len(into))
        if not len(into):
            return
        low, high = (float(end) for end in torch.aminmax(scales))
        if not (low >= self._LEAST and high <= self._MOST):  # also true if one is NaN
            unused = (scales > 0) & (scales < self._LEAST)  # these would decode to denormal numbers
            if not (low >= 0 and high <= self._MOST) or bool(unused.any()):
                raise BadPayload(f"{self.name} scales from {low:g} to {high:g}")
        self._get(codes, into)
        for start, stop, width in _spans(0, len(into)):
            scale = scales[start // BLOCK : -(-stop // BLOCK)]
            into[start:stop].view(-1, width).mul_(scale[:, None])

    def _put(self, quotients: Vector, codes: torch.Tensor, low: int) -> None:
        """Write the codes of these quotients, which are the elements from `low` on. Overwrites the quotients."""
        raise NotImplementedError

    def _get(self, codes: torch.Tensor, into: Vector) -> None:
        """Write the quotients into `into`. `BadPayload` for a code that no encoder writes."""
        raise NotImplementedError

    def _split(self, data: torch.Tensor, elements: int) -> tuple[torch.Tensor, torch.Tensor]:
        scales = _scale_bytes(elements)
        return typed(data[:scales], torch.float32), data[scales:]

    def _scales(self, block: torch.Tensor, scratch: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
        """Write the scale of each row of `block` to `into`, and return what to divide the rows by (1 for 0)."""
        torch.amax(torch.abs(block, out=scratch), dim=1, out=into)
        low, high = finite_range(into)
        into.div_(self._TOP)
        if low >= self._LEAST * self._TOP and high <= self._MOST * self._TOP:  # rounding keeps their order
            return into
        into.clamp_(max=self._MOST).masked_fill_(into < self._LEAST, 0.0)
        return into.masked_fill(into == 0, 1.0)


class Int8(_Blockwise):
    """Eight bits. The error is at most half a step, which is absmax / 254 of the block, and a little for rounding."""

    name = "int8"
    _TOP, _LEAST = 127.0, SMALLEST_NORMAL_FLOAT32
    _MOST = float.fromhex("0x1.020406p+121")  # the largest float32 whose product with 127, rounded, is finite

    def encoded_bytes(self, elements: int) -> int:
        return _scale_bytes(elements) + elements

    def _put(self, quotients: Vector, codes: torch.Tensor, low: int) -> None:
        typed(codes, torch.int8)[low : low + len(quotients)].copy_(quotients.round_())

    def _get(self, codes: torch.Tensor, into: Vector) -> None:
        signed = typed(codes, torch.int8)
        if int(signed.amin()) < -127:
            raise BadPayload("int8 code -128")
        into.copy_(signed)


class _FourBit(_Blockwise):
    """Two codes a byte. If the number of elements is odd, the last half byte is zero."""

    def encoded_bytes(self, elements: int) -> int:
        return _scale_bytes(elements) + -(-elements // 2)

    def _codes(self, quotients: Vector) -> torch.Tensor:
        raise NotImplementedError

    def _put(self, quotients: Vector, codes: torch.Tensor, low: int) -> None:
        halves = torch.empty(len(quotients) + len(quotients) % 2, dtype=torch.uint8)
        halves[len(quotients) :].zero_()
        halves[: len(quotients)].copy_(self._codes(quotients))
        pairs = typed(halves, torch.int16)  # the even element is the low byte
        codes[low // 2 : low // 2 + len(pairs)].copy_((pairs >> 4).bitwise_or_(pairs))  # keeps the low byte


class Int4(_FourBit):
    """Four bits. The error is at most half a step, which is absmax / 14 of the block, and a little for rounding."""

    name = "int4"
    _TOP, _LEAST = 7.0, SMALLEST_NORMAL_FLOAT32
    _MOST = float.fromhex("0x1.249248p+125")  # the largest float32 whose product with 7, rounded, is finite

    def _codes(self, quotients: Vector) -> torch.Tensor:
        return quotients.round_().to(torch.int8).bitwise_and_(15)

    def _get(self, codes: torch.Tensor, into: Vector) -> None:
        for low in range(0, len(into), PIECE):
            piece = into[low : low + PIECE]
            pairs = codes[low // 2 : (low + len(piece) + 1) // 2].to(torch.int16)
            halves = typed((pairs << 4).bitwise_or_(pairs).bitwise_and_(0x0F0F), torch.int8)
            if halves[len(piece) :].any():
                raise BadPayload("int4 code beyond the last element")
            signed = halves[: len(piece)].bitwise_xor_(8).sub_(8)  # extends the sign, which is bit 3
            if int(signed.amin()) < -7:
                raise BadPayload(f"int4 code {_UNUSED}")
            piece.copy_(signed)


class E3M0(_FourBit):
    """Four bits: the nearest power of two, with a sign, or zero. The largest element of a block is exact."""

    name = "e3m0"
    _TOP, _LEAST, _MOST = 1.0, 64 * SMALLEST_NORMAL_FLOAT32, LARGEST_FLOAT32

    def __init__(self) -> None:
        positive = [2.0**k for k in range(-6, 1)]
        levels = torch.tensor([0.0, *positive, torch.nan, *(-level for level in positive)])  # NaN for `_UNUSED`
        byte = torch.arange(256)
        self._pairs = torch.stack((levels[byte & 15], levels[byte >> 4]), dim=1)

    def _codes(self, quotients: Vector) -> torch.Tensor:
        bits = typed(quotients, torch.int32)
        signs = (bits >> 28).bitwise_and_(_UNUSED)
        bits.bitwise_and_(0x7FFF_FFFF)
        least = (bits >= 120 << 23).to(torch.int32)  # from half of 2**-6 on it is nearer than zero
        levels = bits.add_(1 << 22).bitwise_right_shift_(23).sub_(120)  # to the nearest exponent; 2**-6 has level 1
        codes = torch.maximum(levels, least, out=levels).bitwise_or_(signs)
        return codes.masked_fill_(codes == _UNUSED, 0)

    def _get(self, codes: torch.Tensor, into: Vector) -> None:
        whole = len(into) // 2
        for low in range(0, whole, PIECE):
            piece = codes[low : min(low + PIECE, whole)]
            pairs = into[2 * low : 2 * (low + len(piece))].view(-1, 2)
            torch.index_select(self._pairs, 0, piece.to(torch.int32), out=pairs)
        if len(into) % 2:
            last, beyond = self._pairs[int(codes[-1])].tolist()
            if beyond != 0:
                raise BadPayload("e3m0 code beyond the last element")
            into[-1] = last
        try:
            require_finite(into)
        except ValueError:
            raise BadPayload(f"e3m0 code {_UNUSED}") from None


def _scale_bytes(elements: int) -> int:
    return 4 * -(-elements // BLOCK)


def _spans(low: int, high: int) -> list[tuple[int, int, int]]:
    """(start, stop, width) of the whole blocks, and of the shorter last one. A block begins at `low`."""
    whole = high - (high - low) % BLOCK
    spans = ((low, whole, BLOCK), (whole, high, high - whole))
    return [span for span in spans if span[0] < span[1]]
