"""Headers: small, versioned msgpack messages, bounded and checked field by field. Pure.

A header is the msgpack array `[VERSION, kind, field, …]` of a frozen dataclass below. Every field names its own bound;
a decoder refuses what is out of bounds, of another type, not finite, or left over, with `BadPayload`. msgpack bounds
how deep arrays nest, and what nests deeper than the dataclasses do is refused without being walked or printed, so no
input can exhaust the interpreter's stack.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgpack

from protocols.base import BadPayload, Header, LinkFault, Member, RoundKey

VERSION = 1
MAX_HEADER_BYTES = 1 << 16
MAX_ROSTER = 32
MAX_ITEMS = 2048
"""Items of any array: a decoder sets their space aside before it has read them."""
MAX_TOKENS = 1 << 53
MAX_NORM = 1e30
MAX_SECONDS = 86_400.0 * 7

HeaderType = TypeVar("HeaderType", bound=Header)


@dataclass(frozen=True, slots=True)
class Spec:
    """How one field goes onto the wire and comes off it."""

    pack: Callable[[Any], Any]
    unpack: Callable[[Any], Any]


def _refuse(what: str, value: object) -> BadPayload:
    return BadPayload(f"expected {what}, got {_shown(value)}")


def _shown(value: object) -> str:
    """A foreign value in a few characters; never the text of a container, which may be nested too deep to print."""
    if isinstance(value, str | bytes):
        return repr(value[:40])
    return f"{value!r}" if isinstance(value, int | float | None) else f"a {type(value).__name__}"


def _same(value: Any) -> Any:
    return value


def _field(spec: Spec, **options: Any) -> Any:
    return dataclasses.field(metadata={"spec": spec}, **options)


def uint(maximum: int) -> Any:
    """An integer in 0..maximum; a bool is not one."""

    def unpack(value: Any) -> int:
        if type(value) is not int or not 0 <= value <= maximum:
            raise _refuse(f"an integer in 0..{maximum}", value)
        return value

    return _field(Spec(_same, unpack))


def real(low: float, high: float) -> Any:
    """A finite float in low..high."""

    def unpack(value: Any) -> float:
        if type(value) is not float or not math.isfinite(value) or not low <= value <= high:
            raise _refuse(f"a number in {low:g}..{high:g}", value)
        return value

    return _field(Spec(float, unpack))


def flag() -> Any:
    def unpack(value: Any) -> bool:
        if type(value) is not bool:
            raise _refuse("true or false", value)
        return value

    return _field(Spec(_same, unpack))


def _text(maximum: int) -> Spec:
    def unpack(value: Any) -> str:
        if type(value) is not str or len(value) > maximum:
            raise _refuse(f"a text of at most {maximum} characters", value)
        return value

    return Spec(_same, unpack)


def text(maximum: int) -> Any:
    return _field(_text(maximum))


def blob(maximum: int, minimum: int = 0) -> Any:
    """Bytes of a length in minimum..maximum."""

    def unpack(value: Any) -> bytes:
        if type(value) is not bytes or not minimum <= len(value) <= maximum:
            raise _refuse(f"{minimum}..{maximum} bytes", value)
        return value

    return _field(Spec(bytes, unpack))


def digest() -> Any:
    return blob(32, 32)


def one(kind: type) -> Any:
    """A dataclass of specs, nested."""
    return _field(Spec(_pack_fields, lambda value: _unpack_fields(kind, value)))


def many(of: Any, maximum: int) -> Any:
    """A tuple of at most `maximum` fields of one spec."""
    spec: Spec = of.metadata["spec"]

    def unpack(value: Any) -> tuple[Any, ...]:
        if type(value) is not list or len(value) > maximum:
            raise _refuse(f"at most {maximum} items", value)
        return tuple(spec.unpack(item) for item in value)

    return _field(Spec(lambda items: [spec.pack(item) for item in items], unpack))


def some(of: Any, maximum: int) -> Any:
    """As `many`; none by default."""
    return _field(many(of, maximum).metadata["spec"], default=())


def peer_id() -> Any:
    return text(64)


_FOREIGN: dict[type, dict[str, Any]] = {
    RoundKey: {
        "run": digest(),
        "scope": text(64),
        "lineage": digest(),
        "round": uint(1 << 40),
        "fragment": uint(1 << 16),
    },
    Member: {"peer": peer_id(), "incarnation": uint(1 << 40)},
    LinkFault: {"first": peer_id(), "second": peer_id(), "until": uint(1 << 40)},
}
"""Specs of the contract's own dataclasses, which know nothing of the wire."""

_SPECS: dict[type, tuple[tuple[str, Spec], ...]] = {}


def _specs(kind: type) -> tuple[tuple[str, Spec], ...]:
    if kind not in _SPECS:
        fields = _FOREIGN.get(kind) or {f.name: f for f in dataclasses.fields(kind)}
        _SPECS[kind] = tuple((name, f.metadata["spec"]) for name, f in fields.items())
    return _SPECS[kind]


def _pack_fields(value: Any) -> list[Any]:
    return [spec.pack(getattr(value, name)) for name, spec in _specs(type(value))]


def _unpack_fields(kind: type, values: Any) -> Any:
    specs = _specs(kind)
    if type(values) is not list or len(values) != len(specs):
        raise _refuse(f"{len(specs)} fields of {kind.__name__}", values)
    unpacked = {}
    for (name, spec), value in zip(specs, values, strict=True):
        try:
            unpacked[name] = spec.unpack(value)
        except BadPayload as error:
            raise BadPayload(f"{kind.__name__}.{name}: {error}") from None
    return kind(**unpacked)


@dataclass(frozen=True, slots=True)
class Opening(Header):
    """First on every stream: how long its opener will wait."""

    seconds: float = real(0, MAX_SECONDS)


@dataclass(frozen=True, slots=True)
class Offer:
    """What one member brings to a round, signed over (key, offer without signature) so that no plan can alter it.

    Attributes:
        leaving: the last that it brings: the next roster is without it.
    """

    member: Member = one(Member)
    tokens: int = uint(MAX_TOKENS)
    norm: float = real(0, MAX_NORM)
    step_seconds: float = real(0, MAX_SECONDS)
    complete: bool = flag()
    leaving: bool = flag()
    bandwidth: float = real(1, 1e13)
    state_root: bytes = digest()
    signature: bytes = blob(128)


@dataclass(frozen=True, slots=True)
class Ready(Header):
    """A member's offer for the round, sent to the whole roster and again as its work grows."""

    key: RoundKey = one(RoundKey)
    offer: Offer = one(Offer)


@dataclass(frozen=True, slots=True)
class Plan(Header):
    """The coordinator's call: whose offers count, who reduces which elements, how long it may take.

    Weights and clip factors are not here: every receiver computes them from the offers (`protocols.allreduce.plan`).

    Attributes:
        offers: the members that take part, in the order that bitmaps and sums use.
        bounds: len(offers) + 1 ascending element offsets; part i is [bounds[i], bounds[i+1]).
        reducers: part -> index of the member that reduces it.
        cut_seconds: training may go on for so long from the receipt of the plan: the slowest member's step.
        budget_seconds: time for the data phase and the decision, from the cut.
    """

    key: RoundKey = one(RoundKey)
    ballot: int = uint(1 << 20)
    version: int = uint(1 << 20)
    offers: tuple[Offer, ...] = many(one(Offer), MAX_ROSTER)
    bounds: tuple[int, ...] = many(uint(1 << 48), MAX_ROSTER + 1)
    reducers: tuple[int, ...] = many(uint(MAX_ROSTER), MAX_ROSTER)
    cut_seconds: float = real(0, MAX_SECONDS)
    budget_seconds: float = real(0, MAX_SECONDS)


@dataclass(frozen=True, slots=True)
class Contribute(Header):
    """Opens a data stream to the reducer of `part`; its chunks follow, and the reduced chunks come back."""

    key: RoundKey = one(RoundKey)
    plan: bytes = digest()
    part: int = uint(MAX_ROSTER)
    codec: str = text(16)


@dataclass(frozen=True, slots=True)
class Chunk(Header):
    """One chunk of a contribution; `size` payload bytes follow."""

    index: int = uint(1 << 32)
    size: int = uint(1 << 32)


@dataclass(frozen=True, slots=True)
class Reduced(Header):
    """One reduced chunk, the same bytes for every member; `mask` has a bit for each offer that it holds."""

    index: int = uint(1 << 32)
    mask: int = uint((1 << MAX_ROSTER) - 1)
    size: int = uint(1 << 32)


@dataclass(frozen=True, slots=True)
class ChunkSpan:
    """`count` chunks in a row that hold the same contributors."""

    count: int = uint(1 << 32)
    mask: int = uint((1 << MAX_ROSTER) - 1)


@dataclass(frozen=True, slots=True)
class PartDigest:
    """A reduced part: digest over its chunks' digests and masks, and who is in each chunk."""

    digest: bytes = digest()
    runs: tuple[ChunkSpan, ...] = many(one(ChunkSpan), MAX_ITEMS)


@dataclass(frozen=True, slots=True)
class PartDone(Header):
    """Ends a data stream: the reducer's signed word on its part. Two different ones convict it.

    Attributes:
        reducer: index of the member that made and signed it; another may be serving it.
    """

    part: int = uint(MAX_ROSTER)
    reducer: int = uint(MAX_ROSTER)
    result: PartDigest = one(PartDigest)
    signature: bytes = blob(128)


@dataclass(frozen=True, slots=True)
class WantPart(Header):
    """Asks for the reduced part with this digest."""

    digest: bytes = digest()


@dataclass(frozen=True, slots=True)
class Availability(Header):
    """Answers whether what was asked for is here; if so, it follows."""

    here: bool = flag()


@dataclass(frozen=True, slots=True)
class AdmissionRequest(Header):
    """Who is not in the roster asks to be admitted: it stands where the round begins, and holds that state."""

    key: RoundKey = one(RoundKey)
    member: Member = one(Member)
    state_root: bytes = digest()


_KINDS: dict[int, type[Header]] = dict(
    enumerate((Opening, Ready, Plan, Contribute, Chunk, Reduced, PartDone, WantPart, Availability, AdmissionRequest))
)
_NUMBER = {kind: number for number, kind in _KINDS.items()}


def register(first: int, kinds: Sequence[type[Header]]) -> None:
    """Give the headers of another module numbers of their own, from `first`; numbers never change.

    Raises:
        ValueError: a number or a header is taken.
    """
    for number, kind in enumerate(kinds, first):
        if number in _KINDS or kind in _NUMBER:
            raise ValueError(f"{kind.__name__} or its number {number} is registered already")
        _KINDS[number], _NUMBER[kind] = kind, number


def body(value: object) -> bytes:
    """The canonical bytes of a dataclass of specs: what is hashed and signed."""
    return bytes(msgpack.packb(_pack_fields(value)))


def unpack_body(kind: type[HeaderType], data: bytes) -> HeaderType:
    """The dataclass whose `body` these bytes are.

    Raises:
        BadPayload: they are not.
    """
    value: HeaderType = _unpack_fields(kind, _unpack(data))
    return value


def encode(header: Header) -> bytes:
    """The header's bytes, at most `MAX_HEADER_BYTES`."""
    packed = bytes(msgpack.packb([VERSION, _NUMBER[type(header)], *_pack_fields(header)]))
    if len(packed) > MAX_HEADER_BYTES:
        raise ValueError(f"{type(header).__name__} takes {len(packed)} bytes, more than {MAX_HEADER_BYTES}")
    return packed


def _unpack(data: bytes) -> Any:
    try:
        return msgpack.unpackb(data, max_ext_len=0, max_map_len=0, max_array_len=MAX_ITEMS)
    except (ValueError, msgpack.UnpackException) as error:
        raise BadPayload(f"not msgpack: {str(error) or type(error).__name__}") from None


def decode(data: bytes) -> Header:
    """The header that `data` holds.

    Raises:
        BadPayload: not msgpack, another version, an unknown kind, or a field out of bounds.
    """
    if len(data) > MAX_HEADER_BYTES:
        raise BadPayload(f"a header of {len(data)} bytes, more than {MAX_HEADER_BYTES}")
    unpacked = _unpack(data)
    if type(unpacked) is not list or len(unpacked) < 2:
        raise BadPayload("not a header: no version and kind")
    version, number, *values = unpacked
    if type(version) is not int or version != VERSION:
        raise BadPayload(f"speaks version {_shown(version)}, this peer speaks {VERSION}")
    if type(number) is not int or number not in _KINDS:
        raise BadPayload(f"unknown kind of header {_shown(number)}")
    header: Header = _unpack_fields(_KINDS[number], values)
    return header


def expect(header: Header, kind: type[HeaderType]) -> HeaderType:
    """The header, if it is of that kind.

    Raises:
        BadPayload: it is another.
    """
    if not isinstance(header, kind):
        raise BadPayload(f"expected {kind.__name__}, got {type(header).__name__}")
    return header
