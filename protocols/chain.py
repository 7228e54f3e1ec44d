"""The chain of records as one peer sees it, and its head: what the next round extends. Pure."""

from __future__ import annotations

import hashlib
from collections import deque
from dataclasses import replace

from protocols import record as records
from protocols.base import Head, Member, RoundKey

KEEP_RECORDS = 64


def state_root(parameters_root: bytes, velocity_root: bytes, round_number: int) -> bytes:
    """One hash for the whole outer state: parameters, momentum and the round that comes next."""
    number = round_number.to_bytes(8, "big")
    return hashlib.sha256(b"starling state" + parameters_root + velocity_root + number).digest()


def genesis(run: bytes, scope: str, roster: tuple[Member, ...], root: bytes) -> Head:
    """The head of a chain without records.

    Args:
        run: hash of the manifest, 32 bytes.
        root: state root that the run starts from, 32 bytes.
    """
    lineage = records.genesis(run)
    return Head(RoundKey(run, scope, lineage, 0), roster, root, anchor=lineage)


class Chain:
    """The head, and the last records that led to it, oldest first."""

    def __init__(self, run: bytes, scope: str, roster: tuple[Member, ...], root: bytes) -> None:
        """A chain at its genesis; arguments as for `genesis`."""
        self.head = genesis(run, scope, roster, root)
        self.records: deque[bytes] = deque(maxlen=KEEP_RECORDS)

    def extend(self, encoded: bytes) -> records.Record:
        """Move the head to a decided record; its state root follows with `settle`.

        Raises:
            ValueError: the record does not extend the head: applying it would break the chain.
        """
        record = records.decode(encoded)
        head, key = self.head, self.head.key
        if (record.parent, record.round) != (key.lineage, key.round):
            raise ValueError(f"record of round {record.round} does not extend the head at round {key.round}")
        lineage = records.lineage(encoded)
        self.head = Head(
            key=replace(key, lineage=lineage, round=key.round + 1),
            roster=record.roster,
            state_root=head.state_root,
            anchor=lineage if record.averaged else head.anchor,
            complaints=record.complaints,
        )
        self.records.append(encoded)
        return record

    def settle(self, root: bytes) -> None:
        """The state that the head's record led to is computed."""
        self.head = replace(self.head, state_root=root)
