"""The error that ends a peer's process."""

from __future__ import annotations


class FatalPeerError(Exception):
    """The peer cannot go on because of its configuration or its machine. The message is one user-facing line.

    Attributes:
        code: the process's exit code.
    """

    def __init__(self, why: str, code: int = 2) -> None:
        super().__init__(why)
        self.code = code
