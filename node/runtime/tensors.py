"""Files of tensors in the safetensors format, read and written in pieces, so that no second copy of them is needed.

    8 bytes         length of the header, little-endian
    the header      JSON: name -> dtype, shape, [first, last) byte of the payload; padded by spaces to 8 bytes
    the payload     the tensors' bytes, little-endian, one after the other

Files are read and written, not mapped. While one thread faults in pages of a mapping, all other threads, the event
loop's among them, wait for the lock of the process's memory (measured: 100 ms and more, at 200 MB).

Source: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, TypeAlias

import torch

from protocols.base import Buffer

PIECE_BYTES = 1 << 20
MAX_HEADER_BYTES = 1 << 22
_DTYPES = {"F32": torch.float32, "I64": torch.int64}
_SIZES = {"F32": 4, "I64": 8}
_METADATA = "__metadata__"


class Unreadable(ValueError):
    """Not a valid file of tensors, or not with the expected ones. The message is one line."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    dtype: str
    shape: tuple[int, ...]
    first: int
    last: int


def entry_of(tensor: torch.Tensor) -> tuple[str, tuple[int, ...]]:
    """(dtype, shape) in the spelling of a header. `KeyError` if the dtype is not supported."""
    dtype = {each: name for name, each in _DTYPES.items()}[tensor.dtype]
    return dtype, tuple(tensor.shape)


def header(tensors: Mapping[str, tuple[str, tuple[int, ...]]], about: Mapping[str, str]) -> bytes:
    """The header of a file, with its length. Deterministic. `about` is metadata for human readers of the file."""
    fields: dict[str, object] = {_METADATA: dict(about)} if about else {}
    at = 0
    for name, (dtype, shape) in tensors.items():
        end = at + _SIZES[dtype] * prod(shape)
        fields[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def read_header(file: int) -> tuple[dict[str, TensorEntry], int]:
    """The tensors of an open file, and the offset of its payload. `Unreadable` if sizes do not match."""
    size = os.fstat(file).st_size
    length = int.from_bytes(os.pread(file, 8, 0), "little")
    if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
        raise Unreadable("it has no header")
    try:
        fields = json.loads(os.pread(file, length, 8))
        fields.pop(_METADATA, None)
        found = {name: _entry(each) for name, each in fields.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise Unreadable("its header is damaged") from None
    end = 0
    for entry in found.values():
        if entry.first != end or entry.last - entry.first != _SIZES[entry.dtype] * prod(entry.shape):
            raise Unreadable("its header is damaged")
        end = entry.last
    if size != 8 + length + end:
        raise Unreadable(f"it has {size} bytes, not {8 + length + end}")
    return found, 8 + length


def _entry(fields: dict[str, Any]) -> TensorEntry:
    first, last = fields["data_offsets"]
    entry = TensorEntry(fields["dtype"], tuple(fields["shape"]), first, last)
    if entry.dtype not in _DTYPES or not all(type(each) is int and each >= 0 for each in (*entry.shape, first, last)):
        raise ValueError
    return entry


def write(path: Path, tensors: Mapping[str, torch.Tensor], about: Mapping[str, str]) -> int:
    """Write a file of these tensors, over an existing one, and return its size. The file is not flushed to disk."""
    size = create(path, {name: entry_of(tensor) for name, tensor in tensors.items()}, about)
    write_parts(path, [(name, tuple(tensor.shape), 0, tensor) for name, tensor in tensors.items()])
    return size


def create(path: Path, entries: Mapping[str, tuple[str, tuple[int, ...]]], about: Mapping[str, str]) -> int:
    """Write a file whose values `write_part` fills in later, over an existing one, and return its size."""
    start = header(entries, about)
    size = len(start) + sum(_SIZES[dtype] * prod(shape) for dtype, shape in entries.values())
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(file, 0)
        put(file, start, 0)
        os.ftruncate(file, size)
    finally:
        os.close(file)
    return size


Part: TypeAlias = tuple[str, tuple[int, ...], int, torch.Tensor]
"""Name and shape of a tensor in a file, the offset in elements of a part of it, and the part."""


def write_parts(path: Path, parts: Iterable[Part]) -> None:
    """Write parts of the tensors of a file, which all have to be in it. Raises `Unreadable`, OSError."""
    with path.open("r+b", buffering=0) as file:
        for tensor, at in _placed(file.fileno(), parts):
            for piece in _pieces(tensor):
                data, held = scratch(len(piece), tensor.dtype)
                held.copy_(piece)
                put(file.fileno(), data, at)
                at += len(data)


def read_parts(path: Path, parts: Iterable[Part]) -> None:
    """Copy parts of the tensors of a file into these. Raises `Unreadable`, OSError; some may have been copied then."""
    with path.open("rb", buffering=0) as file:
        for tensor, at in _placed(file.fileno(), parts):
            for piece in _pieces(tensor):
                data, values = scratch(len(piece), tensor.dtype)
                get(file.fileno(), data, at)
                piece.copy_(values)
                at += len(data)


def _placed(file: int, parts: Iterable[Part]) -> Iterator[tuple[torch.Tensor, int]]:
    """Each part with its offset in bytes in the file."""
    found, start = read_header(file)
    for name, shape, offset, tensor in parts:
        entry = found.get(name)
        if entry is None or entry.shape != shape or _DTYPES[entry.dtype] != tensor.dtype:
            raise Unreadable("its tensors are not those of this model and its optimiser")
        yield tensor, start + entry.first + offset * _SIZES[entry.dtype]


def names(path: Path) -> tuple[str, ...]:
    """Raises `Unreadable`, OSError."""
    with path.open("rb", buffering=0) as file:
        return tuple(read_header(file.fileno())[0])


def read(path: Path, into: Mapping[str, torch.Tensor]) -> None:
    """Copy all tensors of a file into these tensors, which must have the same names, dtypes and shapes.

    Raises `Unreadable` if the file is damaged or holds others, OSError; some tensors may have been copied then.
    """
    with path.open("rb", buffering=0) as file:
        found = read_header(file.fileno())[0]
    if {name: (each.dtype, each.shape) for name, each in found.items()} != {n: entry_of(t) for n, t in into.items()}:
        raise Unreadable("its tensors are not those of this model and its optimiser")
    read_parts(path, [(name, tuple(tensor.shape), 0, tensor) for name, tensor in into.items()])


def scratch(elements: int, dtype: torch.dtype = torch.float32) -> tuple[memoryview, torch.Tensor]:
    """Allocate memory, and return it both as bytes and as a vector."""
    data = bytearray(elements * dtype.itemsize)
    return memoryview(data), torch.frombuffer(data, dtype=dtype) if elements else torch.empty(0, dtype=dtype)


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Consecutive flat views of at most 1 MiB each."""
    flat = tensor.detach().view(-1)
    step = PIECE_BYTES // flat.dtype.itemsize
    for low in range(0, len(flat), step):
        yield flat[low : low + step]


def put(file: int, data: Buffer, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(file, view, offset)
        offset, view = offset + written, view[written:]


def get(file: int, into: memoryview, offset: int) -> None:
    """Fill `into` from an offset of a file. `OSError` if that is too short."""
    if os.preadv(file, [into], offset) != len(into):
        raise OSError("the file has become shorter")


def fragments(names: Sequence[str], sizes: Sequence[int]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Header entries of flat float32 vectors: `name`, or with several fragments `name.0`, `name.1` and so on."""
    if len(sizes) == 1:
        return {name: ("F32", (sizes[0],)) for name in names}
    return {f"{name}.{number}": ("F32", (size,)) for name in names for number, size in enumerate(sizes)}
