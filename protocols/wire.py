"""Headers: small, versioned msgpack messages, bounded and checked field by field. Pure.

A header is the msgpack array `[VERSION, kind, field, …]` of a frozen dataclass. The decoder refuses, with `BadPayload`,
values that are out of bounds, of another type, not finite, or left over. No input can exhaust the interpreter's stack:
msgpack limits how deep arrays nest, and the decoder neither walks nor prints deeper ones than the dataclasses have.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgpack

from protocols.base import BadPayload, Header, LinkFault, Member, RoundKey

VERSION = 1
MAX_HEADER_BYTES = 1 << 16
MAX_ROSTER = 32
MAX_ITEMS = 2048  # limit of the items of any array: a decoder allocates them before it has read them
MAX_TOKENS = 1 << 53
MAX_NORM = 1e30
MAX_SECONDS = 86_400.0 * 7

HeaderType = TypeVar("HeaderType", bound=Header)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Spec:
    """How one field is encoded, and how it is checked and decoded. `what` describes the valid values."""

    pack: Callable[[Any], Any]
    unpack: Callable[[Any], Any]
    what: str
    is_last: bool = False  # the field is left out if empty: see `last`


def _refuse(what: str, value: object) -> BadPayload:
    return BadPayload(f"expected {what}, got {_shown(value)}")


def _shown(value: object) -> str:
    """A received value in a few characters. Of a container only the type: it may be nested too deep to print."""
    if isinstance(value, str | bytes):
        return repr(value[:40])
    return f"{value!r}" if isinstance(value, int | float | None) else f"a {type(value).__name__}"


def _same(value: Any) -> Any:
    return value


def _field(spec: Spec, **options: Any) -> Any:
    return dataclasses.field(metadata={"spec": spec}, **options)


def _within(what: str, kind: Any, low: float, high: float, pack: Callable[[Any], Any] = _same) -> Any:
    def unpack(value: Any) -> Any:
        if type(value) is not kind or not low <= value <= high:  # NaN is not, either
            raise _refuse(what, value)
        return value

    return _field(Spec(pack, unpack, what))


def _sized(what: str, kind: Any, minimum: int, maximum: int, pack: Callable[[Any], Any] = _same) -> Any:
    def unpack(value: Any) -> Any:
        if type(value) is not kind or not minimum <= len(value) <= maximum:
            raise _refuse(what, value)
        return value

    return _field(Spec(pack, unpack, what))


def uint(maximum: int) -> Any:
    return _within(f"an integer in 0..{maximum}", int, 0, maximum)


def real(low: float, high: float) -> Any:
    return _within(f"a number in {low:g}..{high:g}", float, low, high, pack=float)


def flag() -> Any:
    return _within("true or false", bool, False, True)


def text(maximum: int) -> Any:
    return _sized(f"a text of at most {maximum} characters", str, 0, maximum)


def blob(maximum: int, minimum: int = 0) -> Any:
    return _sized(f"{minimum}..{maximum} bytes", bytes, minimum, maximum, pack=bytes)


def digest() -> Any:
    return blob(32, 32)


def one(kind: type) -> Any:
    return _field(Spec(_pack_fields, lambda value: _unpack_fields(kind, value), kind.__name__))


def list_of(of: Any, maximum: int) -> Any:
    spec: Spec = of.metadata["spec"]

    def unpack(value: Any) -> tuple[Any, ...]:
        if type(value) is not list or len(value) > maximum:
            raise _refuse(f"at most {maximum} items", value)
        return tuple(spec.unpack(item) for item in value)

    return _field(Spec(lambda items: [spec.pack(item) for item in items], unpack, f"at most {maximum} of: {spec.what}"))


def short_uints(maximum: int) -> Any:
    """At most this many integers of 16 bits, two bytes each."""
    what = f"at most {maximum} integers of 16 bits, little-endian"

    def unpack(value: Any) -> tuple[int, ...]:
        if type(value) is not bytes or len(value) > 2 * maximum or len(value) % 2:
            raise _refuse(what, value)
        return struct.unpack(f"<{len(value) // 2}H", value)

    return _field(Spec(lambda items: struct.pack(f"<{len(items)}H", *items), unpack, what))


def optional(of: Any, maximum: int) -> Any:
    """As `list_of`, empty by default."""
    return _field(list_of(of, maximum).metadata["spec"], default=())


def last(of: Any, empty: Any) -> Any:
    """The last field of a dataclass, bytes or a list. While it is empty, as it is by default, it is not encoded.

    So a dataclass that is stored or signed may gain it: values without it keep their bytes. An empty one that is
    encoded is refused, since no value may have two encodings.
    """
    spec: Spec = of.metadata["spec"]

    def unpack(value: Any) -> Any:
        if not (unpacked := spec.unpack(value)):
            raise BadPayload("it is empty, and then it is left out")
        return unpacked

    return _field(Spec(spec.pack, unpack, f"{spec.what}; left out if empty", is_last=True), default=empty)


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
"""Specs of dataclasses of the contract, which do not depend on this module."""

_SPECS: dict[type, tuple[tuple[str, Spec], ...]] = {}


def _specs(kind: type) -> tuple[tuple[str, Spec], ...]:
    if kind not in _SPECS:
        fields = _FOREIGN.get(kind) or {f.name: f for f in dataclasses.fields(kind)}
        if unbounded := [name for name, f in fields.items() if "spec" not in f.metadata]:
            raise ValueError(f"{kind.__name__}.{unbounded[0]} has no bounds: use the field types of protocols.wire")
        specs = tuple((name, f.metadata["spec"]) for name, f in fields.items())
        if early := [name for name, spec in specs[:-1] if spec.is_last]:
            raise ValueError(f"{kind.__name__}.{early[0]} may be left out, so it must be the last field")
        _SPECS[kind] = specs
    return _SPECS[kind]


def described(kind: type) -> dict[str, str]:
    return {name: spec.what for name, spec in _specs(kind)}


def _pack_fields(value: Any) -> list[Any]:
    specs = _specs(type(value))
    if specs and specs[-1][1].is_last and not getattr(value, specs[-1][0]):
        specs = specs[:-1]
    return [spec.pack(getattr(value, name)) for name, spec in specs]


def _unpack_fields(kind: type, values: Any) -> Any:
    specs = _specs(kind)
    if type(values) is list and len(values) == len(specs) - 1 and specs[-1][1].is_last:
        specs = specs[:-1]
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
    """The first message of every stream: how long its opener will wait."""

    seconds: float = real(0, MAX_SECONDS)


@dataclass(frozen=True, slots=True)
class Offer:
    """What one member contributes to a round. The signature covers the key, too, so that no plan can alter an offer."""

    member: Member = one(Member)
    tokens: int = uint(MAX_TOKENS)
    norm: float = real(0, MAX_NORM)
    step_seconds: float = real(0, MAX_SECONDS)
    complete: bool = flag()
    leaving: bool = flag()  # after this round: the next roster does not contain it
    bandwidth: float = real(1, 1e13)
    state_root: bytes = digest()
    signature: bytes = blob(128)


@dataclass(frozen=True, slots=True)
class Ready(Header):
    """A member's offer for the round, sent again as its work grows. `protocols.butterfly.call` says to whom."""

    key: RoundKey = one(RoundKey)
    offer: Offer = one(Offer)


@dataclass(frozen=True, slots=True)
class Plan(Header):
    """The coordinator's plan of a round. Receivers compute weights and clip factors themselves
    (`protocols.allreduce.plan`).
    """

    key: RoundKey = one(RoundKey)
    ballot: int = uint(1 << 20)
    version: int = uint(1 << 20)
    # of the members that take part, in the order that bit masks and sums use
    offers: tuple[Offer, ...] = list_of(one(Offer), MAX_ROSTER)
    # len(offers) + 1 ascending element offsets; part i is [bounds[i], bounds[i+1])
    bounds: tuple[int, ...] = list_of(uint(1 << 48), MAX_ROSTER + 1)
    reducers: tuple[int, ...] = list_of(uint(MAX_ROSTER), MAX_ROSTER)  # part -> index of the member that reduces it
    # training may continue so long after the plan has arrived: the slowest member's step
    cut_seconds: float = real(0, MAX_SECONDS)
    budget_seconds: float = real(0, MAX_SECONDS)  # for the data phase and the decision, from the cut


@dataclass(frozen=True, slots=True)
class Contribute(Header):
    """Opens a data stream to the reducer of `part`. The chunks follow, and the reducer sends back reduced chunks."""

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
class Partial(Header):
    """A cluster's mean of one chunk; `size` payload bytes follow (`protocols.allreduce.clustered_plan`)."""

    index: int = uint(1 << 32)
    mask: int = uint((1 << MAX_ROSTER) - 1)  # a bit for each of the cluster's offers whose contribution it holds
    size: int = uint(1 << 32)


@dataclass(frozen=True, slots=True)
class Reduced(Header):
    """One reduced chunk; `size` payload bytes follow, the same for every member."""

    index: int = uint(1 << 32)
    mask: int = uint((1 << MAX_ROSTER) - 1)  # a bit for each offer whose contribution the chunk holds
    size: int = uint(1 << 32)
    # of a clustered round, in which bit i of `mask` stands for cluster i: for each cluster, 4 bytes little-endian, the
    # mask of those of its members whose contributions the chunk holds
    members: bytes = last(blob(4 * MAX_ROSTER), b"")


@dataclass(frozen=True, slots=True)
class ChunkSpan:
    """`count` consecutive chunks that hold the same contributors."""

    count: int = uint(1 << 32)
    mask: int = uint((1 << MAX_ROSTER) - 1)


@dataclass(frozen=True, slots=True)
class PartDigest:
    """A reduced part: a digest over the digests and masks of its chunks, and the contributors of each chunk."""

    digest: bytes = digest()
    runs: tuple[ChunkSpan, ...] = list_of(one(ChunkSpan), MAX_ITEMS)


@dataclass(frozen=True, slots=True)
class PartDone(Header):
    """Ends a data stream: the reducer's signed statement of its part. Two different statements prove that it lied."""

    part: int = uint(MAX_ROSTER)
    reducer: int = uint(MAX_ROSTER)  # that reduced the part and signed; another member may be serving it
    result: PartDigest = one(PartDigest)
    signature: bytes = blob(128)


@dataclass(frozen=True, slots=True)
class Availability(Header):
    """Answers whether the sender has what was asked for; if so, it follows."""

    here: bool = flag()


@dataclass(frozen=True, slots=True)
class AdmissionRequest(Header):
    """A peer outside the roster asks to be admitted: it has the state from which the round begins."""

    key: RoundKey = one(RoundKey)
    member: Member = one(Member)
    state_root: bytes = digest()


_KINDS: dict[int, type[Header]] = {
    **dict(enumerate((Opening, Ready, Plan, Contribute, Chunk, Reduced, PartDone))),
    8: Availability,
    9: AdmissionRequest,
}
_NUMBER = {kind: number for number, kind in _KINDS.items()}


def register(first: int, kinds: Sequence[type[Header]]) -> None:
    """Give the headers of another module consecutive numbers from `first`. Numbers never change."""
    for number, kind in enumerate(kinds, first):
        if number in _KINDS:
            free = f"numbers from {max(_KINDS) + 1} on are free"
            raise ValueError(f"number {number} of {kind.__name__} belongs to {_KINDS[number].__name__}; {free}")
        if kind in _NUMBER:
            raise ValueError(f"{kind.__name__} is registered already, as number {_NUMBER[kind]}")
        _specs(kind)
        _KINDS[number], _NUMBER[kind] = kind, number


def canonical_bytes(value: object) -> bytes:
    """The bytes of a dataclass of specs that are hashed and signed."""
    return bytes(msgpack.packb(_pack_fields(value)))


def from_canonical_bytes(kind: type[T], data: bytes) -> T:
    value: T = _unpack_fields(kind, _unpack(data))
    return value


def encode(header: Header) -> bytes:
    """Encode a header. Raises `ValueError` if it takes more than `MAX_HEADER_BYTES`, or its kind is not registered."""
    if type(header) not in _NUMBER:
        raise ValueError(f"{type(header).__name__} has no number: pass it to protocols.wire.register")
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
    """Decode a header. `BadPayload` if it is too long, not msgpack, of another version or kind, or out of bounds."""
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
    """Return a header if it is of this kind; raises `BadPayload` otherwise."""
    if not isinstance(header, kind):
        raise BadPayload(f"expected {kind.__name__}, got {type(header).__name__}")
    return header
