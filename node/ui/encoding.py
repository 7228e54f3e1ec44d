"""Output in an encoding that lacks some characters, such as ASCII: what is written instead. Never an error."""

from __future__ import annotations

import codecs
import os
import sys

ERRORS = "starling"  # Name of the error handler, for `str.encode` and for streams
_ASCII = str.maketrans(
    {
        "…": "...", "–": "-", "—": "-", "−": "-", "‘": "'", "’": "'", "“": '"', "”": '"', "→": "->", "←": "<-",
        "×": "x", "·": ".", "•": "*", "±": "+-", "≠": "!=", "≤": "<=", "≥": ">=", "°": " deg", "μ": "u", "µ": "u",
        "²": "^2", "½": "1/2", "\xa0": " ", "─": "-", "━": "-", "│": "|", "●": "*", "○": "o", "▲": "^",
        **dict(zip("▁▂▃▄▅▆▇█", "_.:-=+*#", strict=True)),
    }
)  # fmt: skip
"""Characters of our own messages. All others are written as escapes: a name must stay recognisable."""


def _instead(error: UnicodeError) -> tuple[str, int]:
    """Text for the characters that cannot be encoded. A byte of a path that is not text becomes \\xNN."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end].translate(_ASCII)
    return "".join(each if each.isascii() else _escaped(ord(each)) for each in text), error.end


def _escaped(code: int) -> str:
    if 0xDC80 <= code <= 0xDCFF:  # Python's stand-in for a byte, in paths and arguments
        code -= 0xDC00
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


codecs.register_error(ERRORS, _instead)


def prepare_streams() -> None:
    """Let stdout and stderr take any text, and exist.

    A process that was started without one of the descriptors 0 to 2 would open its next socket or file under that
    number, and messages would be written into it.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
            os.set_inheritable(descriptor, True)
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if reconfigure := getattr(stream, "reconfigure", None):
            reconfigure(errors=ERRORS)


def encoding_of(descriptor: int) -> str:
    """The encoding of the text that is written to a descriptor: as Python has it for stdout and stderr."""
    stream = {1: sys.stdout, 2: sys.stderr}.get(descriptor)
    return getattr(stream, "encoding", None) or "utf-8"
