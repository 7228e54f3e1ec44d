"""The chain of records as one peer sees it, and its head: what the next round extends. Pure."""

from __future__ import annotations

import hashlib
from collections import deque
from dataclasses import dataclass, replace

from protocols import record as records
from protocols.base import Member, RoundKey

KEEP_RECORDS = 64


@dataclass(frozen=True, slots=True)
class Head:
    """Where a peer stands.

    Attributes:
        key: of the next round.
        roster: the members whose votes count in it.
        state_root: root of the outer state after the last decided round, 32 bytes.
    """

    key: RoundKey
    roster: tuple[Member, ...]
    state_root: bytes


def state_root(parameters_root: bytes, velocity_root: bytes, round_number: int) -> bytes:
    """One hash for the whole outer state: parameters, momentum and the round that comes next."""
    number = round_number.to_bytes(8, "big")
    return hashlib.sha256(b"starling state" + parameters_root + velocity_root + number).digest()


class Chain:
    """The head, and the last records that led to it, oldest first."""

    def __init__(self, run: bytes, scope: str, roster: tuple[Member, ...], root: bytes) -> None:
        """A chain at its genesis.

        Args:
            run: hash of the manifest, 32 bytes.
            root: state root that the run starts from, 32 bytes.
        """
        self.head = Head(RoundKey(run, scope, records.genesis(run), 0), roster, root)
        self.records: deque[bytes] = deque(maxlen=KEEP_RECORDS)

    def extend(self, encoded: bytes) -> records.Record:
        """Move the head to a decided record; its state root follows with `settle`.

        Raises:
            ValueError: the record does not extend the head: applying it would break the chain.
        """
        record = records.decode(encoded)
        key = self.head.key
        if (record.parent, record.round) != (key.lineage, key.round):
            raise ValueError(f"record of round {record.round} does not extend the head at round {key.round}")
        following = replace(key, lineage=records.lineage(encoded), round=key.round + 1)
        self.head = Head(following, record.roster, self.head.state_root)
        self.records.append(encoded)
        return record

    def settle(self, root: bytes) -> None:
        """The state that the head's record led to is computed."""
        self.head = replace(self.head, state_root=root)
