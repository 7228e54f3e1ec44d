"""What a peer of a private run keeps: its passes, its account of tickets, and the revocations that it knows.

    pass.bin        the passes to the last 16 runs: they outlive the run's other files, for no peer issues another one
    invites.json    what a crash must not lose: a ticket would work once more
    revoked.bin     the set of revocations, which only grows

All are written durably, for this user only. Raises `StateError`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from node.membership.admission import Pass, Revocation, Revocations
from node.membership.invitations import Invitations
from node.runtime.json_file import read_json
from node.storage.statedir import StateError, write_atomically
from protocols.base import BadPayload
from protocols.wire import canonical_bytes, from_canonical_bytes, list_of, one

MAX_PASSES = 16
MAX_INVITES_BYTES = 1 << 24

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Passes:
    passes: tuple[Pass, ...] = list_of(one(Pass), MAX_PASSES)


class PassFiles:
    def __init__(self, directory: Path) -> None:
        self._pass, self._invites = directory / "pass.bin", directory / "invites.json"
        self.revoked = directory / "revoked.bin"

    def shown(self, run: bytes) -> Pass | None:
        """This peer's pass to a run; None if there is none."""
        return next((each for each in self._passes() if each.links[0].run == run), None)

    def keep_pass(self, new: Pass) -> None:
        others = [each for each in self._passes() if each.links[0].run != new.links[0].run]
        self._write(self._pass, canonical_bytes(_Passes((new, *others)[:MAX_PASSES])))

    def _passes(self) -> tuple[Pass, ...]:
        return _read(self._pass, lambda: from_canonical_bytes(_Passes, self._pass.read_bytes()).passes, ())

    def invitations(self, run: bytes) -> Invitations:
        """The account of this peer's tickets to a run; it is empty if the file is of another run."""

        def read() -> Invitations:
            found = read_json(self._invites, MAX_INVITES_BYTES)
            return Invitations(run) if found is None else Invitations.of_json(found)

        found = _read(self._invites, read, Invitations(run))
        return found if found.run == run else Invitations(run)

    def keep_invitations(self, invitations: Invitations) -> None:
        self._write(self._invites, json.dumps(invitations.as_json()).encode())

    def revocations(self, run: bytes) -> tuple[Revocation, ...]:
        none: tuple[Revocation, ...] = ()
        found = _read(self.revoked, lambda: Revocations.decode(self.revoked.read_bytes()), none)
        return tuple(each for each in found if each.run == run)

    def keep_revocations(self, encoded: bytes) -> None:
        self._write(self.revoked, encoded)

    def _write(self, path: Path, data: bytes) -> None:
        try:
            write_atomically(path, data, private=True)
        except OSError as error:
            raise StateError(f"cannot write {path} ({error.strerror}): free space there") from None


def _read(path: Path, read: Callable[[], T], otherwise: T) -> T:
    try:
        return read()
    except FileNotFoundError:
        return otherwise
    except OSError as error:
        raise StateError(f"{path} cannot be read ({error.strerror}): repair it") from None
    except (BadPayload, ValueError, KeyError, TypeError, IndexError):
        raise StateError(f"{path} is damaged: restore it, or leave the run, and ask for another ticket") from None
