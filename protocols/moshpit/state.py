"""What stays of Moshpit from round to round: where this peer stands, whom it knows, the parts of its last groups."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch

from protocols.aio import Notifier
from protocols.base import Deadline, Member, PeerId, RoundKey, Vector
from protocols.endpoint import SessionTable
from protocols.moshpit.grid import Cell, Grid, assign_cell, choose_grid, default_cell
from protocols.moshpit.group_allreduce import GroupAllReduce
from protocols.moshpit.matchmaker import MoshpitContext
from protocols.moshpit.peer_tracker import PositionAnnouncement

MAX_FOUND = 256
ACQUAINTANCES = 2
"""So many of all who are live are told, too, where not all are, others in each round: peers whose rounds or grids have
come apart meet in no line, and would never hear of it."""
KEEP_GROUPS = 2
"""The parts of so many groups stay at hand for members that lack one."""
MAX_CLOSED = 64
SEARCH_SECONDS = 1.0
FIND_LIMIT = 64
LISTED_SECONDS = 600.0
"""What this peer says in the directory is good for so long, and said again before."""


class MoshpitState:
    """Attributes:
    sees_all: whether all who are live are told of everything, in this round.
    grid, index: where this peer stood last; None before its first round.
    found: where not all are told, who is, and to which group both come; none: an acquaintance.
    coming: lineage of the group that this peer is in, or comes to next.
    mixings: plan -> the data phases of the last groups.
    closed: lineages of groups that this peer is in, or will not be in any more.
    bandwidth: what this peer claims of its upload, bytes/s.
    """

    def __init__(self, context: MoshpitContext, most: int, told: int) -> None:
        self.context, self.most, self.told = context, most, told
        self.sees_all = True
        self.grid: Grid | None = None
        self.index: Cell | None = None
        self.found: dict[PeerId, bytes] = {}
        self.coming = b""
        self.mixings = SessionTable[bytes, GroupAllReduce]()
        self.closed: dict[bytes, None] = {}
        self.bandwidth = context.settings.bandwidth
        self.numbered = 0
        self.spare: list[Vector] = []
        self._live: dict[PeerId, Member] = {}
        self._version = -1
        self._turned = Notifier()
        self._lost: set[PeerId] = set()
        self._rng = context.host.rng("moshpit")

    def begin(self, round: int) -> None:
        """A round begins. Of those who were found, this peer goes on speaking with its last group, and with
        acquaintances that were there before it, as long as they keep up."""
        self._lost.clear()
        self._read()
        self.sees_all = len(self._live) <= self.told
        words = {peer: word for peer in self.found if (word := self.context.tracker.here(peer))}
        fellows = [peer for peer, word in words.items() if self.found[peer] and word.round + 2 >= round]
        first = [peer for peer, word in words.items() if not self.found[peer] and word.round >= round]
        self.found = {peer: self.found[peer] for peer in (*fellows, *first[-ACQUAINTANCES:])}
        if not self.sees_all:
            others = [peer for peer in self._live if peer != self.context.me.peer]
            for peer in self._rng.sample(others, min(ACQUAINTANCES, len(others))):
                self.meet(peer)
        self._show()

    def look(self) -> None:
        """Take note of who is in sight."""
        if self._read() or self.found or not self.sees_all:
            self._show()

    def _read(self) -> bool:
        """Who is live; whether that is news."""
        members = self.context.host.members
        if members.version == self._version:
            return False
        before, self._version = self._live, members.version
        self._live = {member.peer: member for member in members.live()}
        for peer in [peer for peer in before if peer not in self._live]:
            self.lose(peer)
        return True

    def _show(self) -> None:
        peers = self._live if self.sees_all else self.found
        live = [self._live[peer] for peer in peers if peer in self._live]
        self.context.tracker.look(live, self.found, asyncio.get_running_loop().time())

    def in_sight(self) -> list[PeerId]:
        """Whom this peer talks to."""
        live = self._live if self.sees_all else {}
        return sorted({*live, *self.found} - {self.context.me.peer})

    def meet(self, peer: PeerId, lineage: bytes = b"") -> None:
        """Where not all are told: speak with that one, who comes to the same group, or is an acquaintance."""
        if self.sees_all or peer == self.context.me.peer:
            return
        self._read()
        known = peer in self.found
        if (peer in self._lost and peer not in self._live) or (not known and len(self.found) >= MAX_FOUND):
            return
        if lineage or not known:
            self.found[peer] = lineage

    def lose(self, peer: PeerId) -> None:
        """Nothing is to be had of a peer, whatever the directory says, while it is not known to live again."""
        self.found.pop(peer, None)
        self._lost.add(peer)

    def set_next_group(self, lineage: bytes) -> None:
        """This peer is in that group, or comes to it next."""
        if lineage != self.coming:
            self.coming = lineage
            self._turned.notify()

    async def search(self, deadline: Deadline, found: Callable[[], None]) -> None:
        """Where not all are told: say in the directory which group this peer comes to, and ask who else does; `found`
        is called after each answer."""
        directory, loop = self.context.host.directory, asyncio.get_running_loop()
        said, again = b"", 0.0
        while not self.sees_all and loop.time() < deadline:
            lineage = self.coming
            scope, until = f"moshpit/{lineage.hex()}", min(deadline, loop.time() + 10 * SEARCH_SECONDS)
            if lineage != said or loop.time() >= again:
                said, again = lineage, loop.time() + LISTED_SECONDS / 2
                await directory.announce(scope, b"", min(LISTED_SECONDS, max(1.0, deadline - loop.time())), until)
            for peer, _ in await directory.find(scope, FIND_LIMIT, until):
                if lineage == self.coming:  # an answer about a group that is over would bring back whom it had
                    self.meet(peer, lineage)
            found()
            with suppress(TimeoutError):
                await self._turned.until(
                    lambda lineage=lineage: self.coming != lineage,  # type: ignore[misc]
                    min(deadline, loop.time() + SEARCH_SECONDS),
                )

    def narrow(self, lineage: bytes) -> None:
        """This peer comes to that group: those of earlier ones need not hear of it any more."""
        if not self.sees_all:
            self.found = {peer: of for peer, of in self.found.items() if of in (b"", lineage)}

    def hear(self, here: PositionAnnouncement) -> bool:
        """A peer's word; False if it is old."""
        lineage = here.coming.lineage
        self.meet(here.sender.peer, lineage if lineage == self.coming else b"")
        self.look()
        return self.context.tracker.take(here, asyncio.get_running_loop().time())

    def assign_cell(self, key: RoundKey, round: int) -> tuple[Grid, Cell]:
        """The grid that all stand on, and this peer's cell in that round."""
        tracker, me = self.context.tracker, self.context.me.peer
        present = tracker.present(round, asyncio.get_running_loop().time())
        # Who sees its own line only knows by the live members alone how many there are.
        count = len(present) if self.sees_all else len(self._live)
        told = [word.grid for word in tracker.words()]
        since = round if self.grid else 0
        before = self.grid
        self.grid = choose_grid(count, since, [*told, *([before] if before else [])], self.most)
        seed = hashlib.sha256(key.run + f"{key.scope}\n{round}".encode()).digest()
        if self.sees_all:
            self.index = assign_cell(me, present, self.grid.shape, seed)
        elif self.index is None or before is None or before.shape != self.grid.shape:
            self.index = default_cell(me, self.grid.shape, seed)
        return self.grid, self.index

    def close(self, lineage: bytes) -> None:
        """This peer is in that group, or goes without it."""
        self.closed[lineage] = None
        while len(self.closed) > MAX_CLOSED:
            del self.closed[next(iter(self.closed))]
        self.mixings.wake()

    def keep(self, mixing: GroupAllReduce) -> None:
        """A data phase begins."""
        self.mixings.open(mixing.resolved.digest, mixing)
        self.mixings.close(self.mixings.keys()[:-KEEP_GROUPS])

    def spare_buffers(self, like: Sequence[Vector]) -> list[Vector]:
        """Room for one more state."""
        if [len(vector) for vector in self.spare] != [len(vector) for vector in like]:
            self.spare = [torch.empty_like(vector) for vector in like]
        return self.spare
