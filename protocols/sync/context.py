"""What the parts of one peer's sync service share: settings, counters, and streams to other peers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager

from protocols.aio import loop_time
from protocols.base import Deadline, Host, Member, PeerId, Settings, Stream
from protocols.history.chain import Chain
from protocols.streams.control_channel import RoundAccounting
from protocols.sync.progress import SyncProgress
from protocols.sync.requests import SYNC
from protocols.sync.snapshot import Snapshots
from protocols.sync.sync_peers import SyncPeers


class SyncContext:
    """Shared by a sync service and its parts.

    Attributes:
        me: this peer's current incarnation.
        elements: number of parameters, n.
        snapshots: those that this peer serves; it also allocates buffers for those that it fetches.
        peers: those that this peer may ask.
        accounting: faults of other peers, and bytes on streams, since the last report.
        sync_progress: how far this peer is with catching up.
        snapshot_bytes: bytes of snapshots fetched since `take_bytes`, including bad and duplicate chunks.
        part_bytes: encoded bytes of the parts of means fetched and used since `take_bytes`.
        say: shows a line to the operator.
    """

    def __init__(
        self,
        host: Host,
        settings: Settings,
        snapshots: Snapshots,
        hints: Callable[[], Iterable[PeerId]],
        chain: Chain | None = None,
    ) -> None:
        """Create the context.

        Args:
            hints: peers that may know more, from bootstrap addresses or a directory. Any of them may lie.
            chain: the former members of this chain are asked as well.
        """
        self.host, self.settings, self.snapshots = host, settings, snapshots
        self.me, self.elements = Member(host.me, settings.incarnation), sum(settings.elements)
        self.peers = SyncPeers(host.me, host.members, chain, hints, loop_time)
        self.accounting, self.sync_progress = RoundAccounting(), SyncProgress(loop_time)
        self.snapshot_bytes = self.part_bytes = 0
        self.say: Callable[[str], None] = lambda line: None

    @asynccontextmanager
    async def open(self, peer: PeerId, deadline: Deadline) -> AsyncIterator[Stream]:
        """Open a stream to a peer's sync service. Its bytes are counted, and a peer that breaks a rule is reported.

        Raises:
            PeerError: the peer cannot be reached in time.
        """
        async with self.host.transport.open(peer, SYNC, deadline) as stream, self.accounting.counting(stream):
            yield stream

    def take_bytes(self) -> tuple[int, int]:
        """Bytes of snapshots, and of parts, fetched since the last call."""
        taken = self.snapshot_bytes, self.part_bytes
        self.snapshot_bytes = self.part_bytes = 0
        return taken
