"""How a peer's process ends other than well: the error that ends it, and its exit codes."""

from __future__ import annotations

NO_WORKER = 3  # Exit code of a peer that left in good order because its worker could not be kept running
NO_RESULT = 4  # Exit code of a peer that left in good order, but whose rounds or evaluations all came to nothing
AGAIN = -1  # Not an exit code: the peer has ended to ask for a stage again, and is to be started anew
REPLACED = "the worker was replaced"  # How the line begins that a peer prints at its end if a worker died or hung


class FatalPeerError(Exception):
    """The peer cannot continue because of its configuration or its machine. The message is one user-facing line."""

    def __init__(self, why: str, code: int = 2) -> None:
        super().__init__(why)
        self.code = code


class NotInvited(FatalPeerError):
    """A private run admits this peer with nothing that its user has given."""
