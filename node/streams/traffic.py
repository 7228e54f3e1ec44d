"""The bytes of one peer's streams: they are counted, and kept within the peer's caps."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial

from node.membership.hello import BOOTSTRAP_METHOD, PASS_METHOD
from node.streams.byte_limiter import PIECE_BYTES, ByteLimiter
from node.streams.byte_meter import ByteMeter, CountBytes, NoteDelivery, TrafficClass, UploadSpeed, class_of
from node.streams.byte_quota import ByteQuota
from protocols.base import Buffer, PeerId
from protocols.streams.framing import LimitReached, joined

_WHOLE = 1 << 40
_LEAST_BYTES = 16 << 10
_OPENING_BYTES = 68
"""A stream's opening is control traffic: the quota stops only streams that are open, where accounting sees why."""


class StreamTraffic:
    """What a pipe tells of one stream's bytes, and what it waits for."""

    __slots__ = ("_by_stranger", "_class", "_count", "_download", "_quota", "_unpaid", "_upload", "delivered")

    def __init__(
        self,
        count: CountBytes,
        traffic: TrafficClass,
        upload: ByteLimiter,
        download: ByteLimiter,
        quota: ByteQuota | None = None,
        by_stranger: bool = False,
    ) -> None:
        self._by_stranger, self._quota = by_stranger, quota
        self._count, self._class, self._upload, self._download = count, traffic, upload, download
        self.delivered: NoteDelivery = lambda now, connection, rate, is_waiting: None
        self._unpaid = 0  # bytes that were read, and that the cap does not know of yet

    def outgoing(self, data: tuple[Buffer, ...], most_bytes: int) -> Iterator[memoryview]:
        """The pieces in which data are written: short ones while there is a cap, which may come and go meanwhile."""
        for each in joined(data):
            view, start = memoryview(each).cast("B"), 0
            while start < len(view):
                most = most_bytes if self._upload.rate is None else min(most_bytes, PIECE_BYTES)
                yield view[start : start + most]
                start += most

    @property
    def download_piece(self) -> int:
        return _WHOLE if self._download.rate is None else PIECE_BYTES

    def sent(self, count: int) -> None:
        self._count(count, 0)

    def received(self, count: int) -> None:
        self._count(0, count)

    async def may_send(self, count: int) -> None:
        """Wait until the cap lets `count` bytes be written. Raises `LimitReached` if the quota is used up."""
        if self._quota:
            self._require_quota(self._quota, count)
        if self._upload.rate is not None:
            await self._upload.take(self._class, count, self._by_stranger)

    async def may_receive(self, count: int, left: int) -> None:
        """Having read `count` bytes, wait until the cap lets more be read: the sender has to wait meanwhile.

        While some of the wanted bytes are `left`, a few bytes are not worth a wait. Raises `LimitReached`.
        """
        if self._quota:
            self._require_quota(self._quota, count)
        if self._download.rate is None:
            return
        self._unpaid += count
        if left and self._unpaid < _LEAST_BYTES:
            return
        count, self._unpaid = self._unpaid, 0
        try:
            await self._download.take(self._class, count, self._by_stranger)
        except asyncio.CancelledError:
            self._download.spend(count)
            raise

    def _require_quota(self, quota: ByteQuota, count: int) -> None:
        is_bulk = self._by_stranger or self._class is not TrafficClass.CONTROL
        if is_bulk and quota.spent and count > _OPENING_BYTES:
            raise LimitReached("this peer's quota is used up")


UNLIMITED = StreamTraffic(lambda sent, received: None, TrafficClass.CONTROL, ByteLimiter(), ByteLimiter())
"""For pipes that belong to no stream yet."""


class Traffic:
    def __init__(
        self,
        upload: ByteLimiter | None = None,
        download: ByteLimiter | None = None,
        quota: ByteQuota | None = None,
    ) -> None:
        self.meter, self.upload_speed = ByteMeter(quota=quota), UploadSpeed()
        self.upload, self.download = upload or ByteLimiter(), download or ByteLimiter()
        self._quota = quota

    def stream(self, peer: PeerId, method: str) -> StreamTraffic:
        """A stream without a method is control traffic."""
        count, by_stranger = self.meter.stream(peer, method), method in (BOOTSTRAP_METHOD, PASS_METHOD)
        traffic = StreamTraffic(count, class_of(method), self.upload, self.download, self._quota, by_stranger)
        traffic.delivered = partial(self.upload_speed.note, peer)
        return traffic
