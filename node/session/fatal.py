"""How a peer's process ends other than well: the error that ends it, and a session that came to nothing."""

from __future__ import annotations

NO_WORKER = 3
"""Exit code of a peer that left in good order because its worker could not be kept running."""
NO_RESULT = 4
"""Exit code of a peer that left in good order, but whose rounds or evaluations all came to nothing."""
REPLACED = "the worker was replaced"
"""How the line begins that a peer prints at its end if a worker died or hung."""
MIN_ROUNDS, MIN_ROUNDS_OUTSIDE = 2, 10
"""A peer may join or leave in the middle of a single round, which then need not count. One that has just joined trains
without being counted until it is admitted to the roster, which may take several short rounds."""


class FatalPeerError(Exception):
    """The peer cannot go on because of its configuration or its machine. The message is one user-facing line.

    Attributes:
        code: the process's exit code.
    """

    def __init__(self, why: str, code: int = 2) -> None:
        super().__init__(why)
        self.code = code


class SessionOutcome:
    """Whether a session's rounds and evaluations came to anything."""

    def __init__(self) -> None:
        self._rounds = self._as_member = self._counted = self._tokens = self._evaluations = self._evaluated = 0
        self._error = ""

    def round(self, tokens: int, counted: bool, is_member: bool) -> None:
        """Take in a round in which this peer was to train.

        Args:
            tokens: that it trained on.
            counted: whether they counted.
            is_member: whether it was in the roster, so that they could.
        """
        self._rounds += 1
        self._as_member += is_member
        self._tokens += tokens
        self._counted += counted

    def evaluation(self, error: str = "") -> None:
        """Take in an evaluation.

        Args:
            error: why it failed; empty if it worked.
        """
        self._evaluations += 1
        self._evaluated += not error
        self._error = error

    def failure(self, worker_failure: str) -> str:
        """What came to nothing, in one user-facing line; empty if all is well.

        Args:
            worker_failure: why the last worker failed; empty if none did.
        """
        found = []
        enough = self._as_member >= MIN_ROUNDS or self._rounds >= MIN_ROUNDS_OUTSIDE
        if enough and not self._counted:
            why = "see the outcomes in rounds.jsonl" if self._tokens else "no inner step had a finite loss and gradient"
            why = worker_failure or why
            found.append(f"none of {self._rounds} rounds counted what this peer trained ({why})")
        if self._evaluations and not self._evaluated:
            found.append(f"none of {self._evaluations} evaluations worked ({self._error})")
        return "; ".join(found)
