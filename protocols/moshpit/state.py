"""What a peer keeps from round to round in Moshpit: its cell, the peers that it knows, and its last groups' parts."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from protocols.aio import Notifier, loop_time
from protocols.allreduce.all_reduce import BandwidthClaim
from protocols.allreduce.parts import ChunkPool, PartFormat
from protocols.base import Deadline, Member, PeerId, RoundKey, Vector
from protocols.moshpit.grid import Cell, Grid, assign_cell, choose_grid, default_cell
from protocols.moshpit.peer_tracker import PeerTracker, PositionAnnouncement
from protocols.peers.estimates import RecentDict
from protocols.streams.endpoint import ControlChannel, ProtocolEndpoint, SessionTable
from protocols.vectors.codec import state_codec

FLOOR_SECONDS = 1.0  # the least time that a peer has to answer; round trips come on top
ROUND_TRIP_LIMIT_SECONDS = 2.0
MAX_FOUND = 256
ACQUAINTANCES = 2
"""In a large swarm, a peer also announces its position to this many random live members, to others in each round. Peers
whose rounds or grids have come apart are never in one group, and would not notice it otherwise.
"""
KEEP_GROUPS = 2  # the parts of this many groups are kept for members that lack one
MAX_CLOSED = 64
SEARCH_SECONDS = 1.0
FIND_LIMIT = 64
LISTED_SECONDS = 600.0  # How long a directory entry of this peer stays valid. It is renewed after half of this time.


class MoshpitState:
    """One peer's state in Moshpit, apart from its vectors, and what all its groups use."""

    def __init__(self, endpoint: ProtocolEndpoint, method: str, most: int, announce_limit: int) -> None:
        self.host, self.settings = endpoint.host, endpoint.settings
        self.me, self.accounting = endpoint.me, endpoint.accounting
        self.post, self.tracker = ControlChannel(endpoint, method), PeerTracker(self.me)
        self.format = PartFormat.of(self.settings, state_codec(self.settings.codec), ChunkPool())
        self.most, self.announce_limit = most, announce_limit
        self.sees_all = True  # whether it announces its position to all live members in this round
        self.grid: Grid | None = None
        self.index: Cell | None = None
        # if not `sees_all`: the peers that it talks to, and the lineage of the group that both come to, if any
        self.found: dict[PeerId, bytes] = {}
        self.next_group = b""
        self.data_phases = SessionTable[bytes, Any]()  # `GroupAllReduce` of the last groups, by their plan's digest
        # lineages of the groups that this peer is in, or will not join any more
        self.closed: RecentDict[bytes, None] = RecentDict(MAX_CLOSED)
        self.claim = BandwidthClaim(self.settings)
        self.last_number = 0
        self.spare: list[Vector] = []
        self._live: dict[PeerId, Member] = {}
        self._version = -1
        self._group_changed = Notifier()
        self._lost: set[PeerId] = set()
        self._rng = self.host.rng("moshpit")

    @property
    def answer_seconds(self) -> float:
        """How long a peer may take to answer: the floor plus twice the slowest round trip to a peer in sight."""
        trips = self.post.round_trip_seconds
        slowest = max((trips.get(peer, 0.0) for peer in self.tracker.sight), default=0.0)
        return FLOOR_SECONDS + 2 * min(slowest, ROUND_TRIP_LIMIT_SECONDS)

    def begin(self, round: int) -> None:
        """Begin a round. In `found` stay members of the last group and acquaintances that keep up with it."""
        self._lost.clear()
        self._read()
        self.sees_all = len(self._live) <= self.announce_limit
        announcements = {peer: latest for peer in self.found if (latest := self.tracker.announcement_of(peer))}
        fellows = [peer for peer, latest in announcements.items() if self.found[peer] and latest.round + 2 >= round]
        first = [peer for peer, latest in announcements.items() if not self.found[peer] and latest.round >= round]
        self.found = {peer: self.found[peer] for peer in (*fellows, *first[-ACQUAINTANCES:])}
        if not self.sees_all:
            others = [peer for peer in self._live if peer != self.me.peer]
            for peer in self._rng.sample(others, min(ACQUAINTANCES, len(others))):
                self.meet(peer)
        self._publish_sight()

    def update_sight(self) -> None:
        if self._read() or self.found or not self.sees_all:
            self._publish_sight()

    def _read(self) -> bool:
        """Read the live members. Returns whether they have changed."""
        members = self.host.members
        if members.version == self._version:
            return False
        before, self._version = self._live, members.version
        self._live = {member.peer: member for member in members.live()}
        for peer in [peer for peer in before if peer not in self._live]:
            self.lose(peer)
        return True

    def _publish_sight(self) -> None:
        peers = self._live if self.sees_all else self.found
        live = [self._live[peer] for peer in peers if peer in self._live]
        self.tracker.set_sight(live, self.found, loop_time())

    def in_sight(self) -> list[PeerId]:
        """The peers that this one talks to, in the order of their ids."""
        live = self._live if self.sees_all else {}
        return sorted({*live, *self.found} - {self.me.peer})

    def meet(self, peer: PeerId, lineage: bytes = b"") -> None:
        """In a large swarm, talk to a peer from now on. `lineage` is that of a group that both come to, if any."""
        if self.sees_all or peer == self.me.peer:
            return
        self._read()
        known = peer in self.found
        if (peer in self._lost and peer not in self._live) or (not known and len(self.found) >= MAX_FOUND):
            return
        if lineage or not known:
            self.found[peer] = lineage

    def lose(self, peer: PeerId) -> None:
        """Stop talking to a peer, whatever the directory says, until it is a live member again."""
        self.found.pop(peer, None)
        self._lost.add(peer)

    def set_next_group(self, lineage: bytes) -> None:
        if lineage != self.next_group:
            self.next_group = lineage
            self._group_changed.notify()

    async def search(self, deadline: Deadline, found: Callable[[], None]) -> None:
        """In a large swarm, announce this peer's next group in the directory, and look for its other members there."""
        directory, said, again = self.host.directory, b"", 0.0
        while not self.sees_all and loop_time() < deadline:
            lineage = self.next_group
            scope, until = f"moshpit/{lineage.hex()}", min(deadline, loop_time() + 10 * SEARCH_SECONDS)
            if lineage != said or loop_time() >= again:
                said, again = lineage, loop_time() + LISTED_SECONDS / 2
                await directory.announce(scope, b"", min(LISTED_SECONDS, max(1.0, deadline - loop_time())), until)
            for peer, _ in await directory.find(scope, FIND_LIMIT, until):
                if lineage == self.next_group:  # a late answer would bring back the members of a past group
                    self.meet(peer, lineage)
            found()
            until = min(deadline, loop_time() + SEARCH_SECONDS)
            await self._group_changed.reached(lambda lineage=lineage: self.next_group != lineage, until)  # type: ignore[misc]

    def keep_group(self, lineage: bytes) -> None:
        """Stop talking to members of groups other than this one. Acquaintances stay."""
        if not self.sees_all:
            self.found = {peer: of for peer, of in self.found.items() if of in (b"", lineage)}

    def hear(self, announcement: PositionAnnouncement) -> bool:
        lineage = announcement.next_group_key.lineage
        self.meet(announcement.sender.peer, lineage if lineage == self.next_group else b"")
        self.update_sight()
        return self.tracker.take(announcement, loop_time())

    def assign_cell(self, key: RoundKey, round: int) -> tuple[Grid, Cell]:
        """Choose this round's grid and this peer's cell in it."""
        tracker, me = self.tracker, self.me.peer
        present = tracker.present(round, loop_time())
        # A peer that sees only its own line learns the size of the swarm from the live members.
        count = len(present) if self.sees_all else len(self._live)
        grids = [latest.grid for latest in tracker.announcements()]
        since = round if self.grid else 0
        before = self.grid
        self.grid = choose_grid(count, since, [*grids, *([before] if before else [])], self.most)
        seed = hashlib.sha256(key.run + f"{key.scope}\n{round}".encode()).digest()
        if self.sees_all:
            self.index = assign_cell(me, present, self.grid.shape, seed)
        elif self.index is None or before is None or before.shape != self.grid.shape:
            self.index = default_cell(me, self.grid.shape, seed)
        return self.grid, self.index

    def close(self, lineage: bytes) -> None:
        """Record that this peer is in that group, or continues without it."""
        self.closed[lineage] = None
        self.data_phases.wake()

    def keep(self, data_phase: Any) -> None:
        """Keep the data phase of a group that begins, and drop the oldest."""
        self.data_phases.open(data_phase.resolved.digest, data_phase)
        for old in self.data_phases.close(self.data_phases.keys()[:-KEEP_GROUPS]):
            old.discard()

    def spare_buffers(self, like: Sequence[Vector]) -> list[Vector]:
        """Vectors of the same sizes as `like`, kept for the next round."""
        if [len(vector) for vector in self.spare] != [len(vector) for vector in like]:
            self.spare = [torch.empty_like(vector) for vector in like]
        return self.spare
