"""What stays of Moshpit from round to round: where this peer stands, whom it knows, the parts of its last groups."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence

import torch

from protocols.base import PeerId, RoundKey, Vector
from protocols.census import Here
from protocols.gathering import Desk
from protocols.grid import Grid, Index, home, seat, settle
from protocols.mixing import Mixing

MAX_FOUND = 256
KEEP_GROUPS = 2
"""The parts of so many groups stay at hand for members that lack one."""
MAX_CLOSED = 64


class Pit:
    """Attributes:
    sees_all: whether all who are live are told of everything, in this round.
    grid, index: where this peer stood last; None before its first round.
    found: peers that the directory told of, where not all are in sight.
    mixings: plan -> the data phases of the last groups.
    closed: lineages of groups that this peer is in, or will not be in any more.
    bandwidth: what this peer claims of its upload, bytes/s.
    """

    def __init__(self, desk: Desk, most: int, told: int) -> None:
        self.desk, self.most, self.told = desk, most, told
        self.sees_all = True
        self.grid: Grid | None = None
        self.index: Index | None = None
        self.found: dict[PeerId, None] = {}
        self.mixings: dict[bytes, Mixing] = {}
        self.closed: dict[bytes, None] = {}
        self.bandwidth = desk.settings.bandwidth
        self.numbered = 0
        self.spare: list[Vector] = []

    def begin(self, round: int) -> None:
        """A round begins. Who was found and has not been heard of for a while is gone, or in other groups."""
        self.sees_all = len(self.desk.host.members.live()) <= self.told
        words = {peer: self.desk.census.here(peer) for peer in self.found}
        self.found = {peer: None for peer, word in words.items() if word and word.round + 2 >= round}
        self.look()

    def look(self) -> None:
        """Take note of who is in sight."""
        live = self.desk.host.members.live()
        self.desk.census.look(live, self.found, asyncio.get_running_loop().time())

    def in_sight(self) -> list[PeerId]:
        """Whom this peer talks to."""
        live = [member.peer for member in self.desk.host.members.live()] if self.sees_all else []
        return sorted({*live, *self.found} - {self.desk.me.peer})

    def hear(self, here: Here) -> bool:
        """A peer's word; False if it is old."""
        self.look()
        return self.desk.census.take(here, asyncio.get_running_loop().time())

    def sit(self, key: RoundKey, round: int) -> tuple[Grid, Index]:
        """The grid that all stand on, and this peer's cell in that round."""
        census, me = self.desk.census, self.desk.me.peer
        present = census.present(round, asyncio.get_running_loop().time())
        # Who sees its own line only knows by the live members alone how many there are.
        count = len(present) if self.sees_all else len(self.desk.host.members.live())
        told = [word.grid for word in census.words()]
        since = round if self.grid else 0
        before = self.grid
        self.grid = settle(count, since, [*told, *([before] if before else [])], self.most)
        seed = hashlib.sha256(key.run + f"{key.scope}\n{round}".encode()).digest()
        if self.sees_all:
            self.index = seat(me, present, self.grid.shape, seed)
        elif self.index is None or before is None or before.shape != self.grid.shape:
            self.index = home(me, self.grid.shape, seed)
        return self.grid, self.index

    def close(self, lineage: bytes) -> None:
        """This peer is in that group, or goes without it."""
        self.closed[lineage] = None
        while len(self.closed) > MAX_CLOSED:
            del self.closed[next(iter(self.closed))]
        self.desk.entered.ring()

    def keep(self, mixing: Mixing) -> None:
        """A data phase begins."""
        self.mixings[mixing.terms.digest] = mixing
        while len(self.mixings) > KEEP_GROUPS:
            del self.mixings[next(iter(self.mixings))]
        self.desk.entered.ring()

    def spares(self, like: Sequence[Vector]) -> list[Vector]:
        """Room for one more state."""
        if [len(vector) for vector in self.spare] != [len(vector) for vector in like]:
            self.spare = [torch.empty_like(vector) for vector in like]
        return self.spare
