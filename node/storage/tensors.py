"""Files of tensors in the safetensors format, written and read in pieces, so that no second copy of them is needed.

    8 bytes         length of the header, little-endian
    the header      JSON: name -> dtype, shape, [first, last) byte of the payload; padded by spaces to 8 bytes
    the payload     the tensors' bytes, little-endian, one after the other

Files are read and written, not mapped: while a thread faults pages of a mapping in, all others wait for the process's
memory to be theirs again, the event loop's among them (measured: for 100 ms and more, at 200 MB).

Source: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from protocols.base import Buffer

PIECE_BYTES = 1 << 20
MAX_HEADER_BYTES = 1 << 22
_DTYPES = {"F32": torch.float32, "I64": torch.int64}
_SIZES = {"F32": 4, "I64": 8}
_METADATA = "__metadata__"


class Unreadable(ValueError):
    """A file that is none of these; one line."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a file: where its bytes are, counted from the first of the payload."""

    dtype: str
    shape: tuple[int, ...]
    first: int
    last: int


def entry_of(tensor: torch.Tensor) -> tuple[str, tuple[int, ...]]:
    """(dtype, shape) as they stand in a header.

    Raises:
        KeyError: of a dtype that is not kept.
    """
    dtype = {each: name for name, each in _DTYPES.items()}[tensor.dtype]
    return dtype, tuple(tensor.shape)


def header(tensors: Mapping[str, tuple[str, tuple[int, ...]]], about: Mapping[str, str]) -> bytes:
    """What a file begins with: the same bytes for the same arguments.

    Args:
        tensors: name -> (dtype, shape), in the order of their bytes.
        about: words for whoever opens the file.
    """
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
    """The tensors of an open file, and where its payload begins.

    Raises:
        Unreadable: no such file, or a size that the header does not make.
        OSError: it cannot be read.
    """
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
    """Make a file of these tensors, in the place of one that is there; returns its size. It is not flushed.

    Raises:
        OSError: it cannot be written.
    """
    start = header({name: entry_of(tensor) for name, tensor in tensors.items()}, about)
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        put(file, start, 0)
        at = len(start)
        for tensor in tensors.values():
            for piece in _pieces(tensor):
                data, held = scratch(len(piece), tensor.dtype)
                held.copy_(piece)
                put(file, data, at)
                at += len(data)
        os.ftruncate(file, at)
    finally:
        os.close(file)
    return at


def names(path: Path) -> tuple[str, ...]:
    """Of a file's tensors.

    Raises:
        Unreadable: no such file.
        OSError: it cannot be read.
    """
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return tuple(read_header(file)[0])
    finally:
        os.close(file)


def read(path: Path, into: Mapping[str, torch.Tensor]) -> None:
    """Copy a file's tensors into these, which are all there are in it.

    Raises:
        Unreadable: it holds others; some may have been copied.
        OSError: it cannot be read.
    """
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        found, start = read_header(file)
        held = {name: (each.dtype, each.shape) for name, each in found.items()}
        if held != {name: entry_of(tensor) for name, tensor in into.items()}:
            raise Unreadable("it holds other tensors than this model and its optimiser have")
        for name, tensor in into.items():
            at = start + found[name].first
            for piece in _pieces(tensor):
                data, values = scratch(len(piece), tensor.dtype)
                get(file, data, at)
                piece.copy_(values)
                at += len(data)
    finally:
        os.close(file)


def scratch(elements: int, dtype: torch.dtype = torch.float32) -> tuple[memoryview, torch.Tensor]:
    """The same new memory as bytes and as a vector."""
    data = bytearray(elements * dtype.itemsize)
    return memoryview(data), torch.frombuffer(data, dtype=dtype) if elements else torch.empty(0, dtype=dtype)


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Views of at most 1 MiB, in order."""
    flat = tensor.detach().view(-1)
    step = PIECE_BYTES // flat.dtype.itemsize
    for low in range(0, len(flat), step):
        yield flat[low : low + step]


def put(file: int, data: Buffer, offset: int) -> None:
    """Put all of `data` at an offset of a file.

    Raises:
        OSError: it cannot be written.
    """
    view = memoryview(data)
    while view:
        written = os.pwrite(file, view, offset)
        offset, view = offset + written, view[written:]


def get(file: int, into: memoryview, offset: int) -> None:
    """Fill `into` from an offset of a file.

    Raises:
        OSError: it cannot be read, or is shorter.
    """
    if os.preadv(file, [into], offset) != len(into):
        raise OSError("the file has become shorter")


def fragments(names: Sequence[str], sizes: Sequence[int]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Flat float32 vectors for a header: each name once, or, of several fragments, `name.0`, `name.1` and so on."""
    if len(sizes) == 1:
        return {name: ("F32", (sizes[0],)) for name in names}
    return {f"{name}.{number}": ("F32", (size,)) for name in names for number, size in enumerate(sizes)}
