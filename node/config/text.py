"""Text as a person's tools hand it over: files with byte-order marks, and variables in quotes."""

from __future__ import annotations

import codecs

_MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),  # begins like UTF-16's
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
BYTE_ORDER_MARKS = ("\ufeff", "\udcef\udcbb\udcbf")
"""As text, and as Python reads it where variables are ASCII."""


def decoded(data: bytes, errors: str = "strict") -> str:
    """The text of a file: in UTF-8, or as its byte-order mark says (PowerShell's > writes UTF-16).

    `errors` is as in `bytes.decode`. Raises ValueError if it is not text; its message does not name the file.
    """
    mark, encoding = next((each for each in _MARKS if data.startswith(each[0])), (b"", "utf-8"))
    try:
        text = data[len(mark) :].decode(encoding, errors)
    except UnicodeDecodeError:
        raise ValueError(f"not text in {encoding.upper().removesuffix('-LE').removesuffix('-BE')}") from None
    if "\0" in text and errors == "strict":
        raise ValueError("has zero bytes, as UTF-16 without a byte-order mark has: save it as UTF-8")
    return text


def in_quotes(value: str) -> str:
    """What is wrong with a variable's value in quotes; empty if it has none.

    A shell takes quotes away, but `docker --env-file` passes them on. The value may be meant with them or without.
    """
    if len(value) > 1 and value[0] == value[-1] and value[0] in "\"'":
        return (
            f"its value is in quotes, and they are part of it, as with docker's --env-file: write {value[1:-1][:200]}"
        )
    return ""
