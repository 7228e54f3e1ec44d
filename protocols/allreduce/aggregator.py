"""The two levels of a clustered round's data phase, for one part: a cluster's aggregator, and the part's reducer.

A chunk goes from a member to its cluster's aggregator, which averages those of the cluster; from there, as a partial,
to the reducer, which averages the clusters; and back the same way. The reducer's bytes are passed on as they are. So a
lost aggregator costs its cluster's work in the chunks that it has not delivered, and the others nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from protocols import wire
from protocols.aio import Notifier, run_with_helper
from protocols.allreduce.all_reduce import WINDOW_CHUNKS, Reducer, receive_part, send_part
from protocols.allreduce.clustered_messages import (
    MASK_BYTES,
    ContributePartial,
)
from protocols.allreduce.clustered_plan import CLUSTER_PACE, MEMBER_PACE, ResolvedClusters
from protocols.allreduce.parts import DataPhase, ReducedPart
from protocols.allreduce.plan import ResolvedPlan
from protocols.base import BadPayload, PeerId, PeerSilent, Stream, Vector
from protocols.streams.chunks import HEADER_LIMIT, PartLayout, due
from protocols.vectors.robust import RobustAggregator
from protocols.vectors.views import estimated_norm, norm


class Relay:
    """Fetches the mean of a part from its reducer, and passes it on to members of the cluster, chunk by chunk."""

    def __init__(self, task: DataPhase, index: int, held: ReducedPart | None = None) -> None:
        """A part that is complete is only passed on."""
        self.task, self.index = task, index
        self.mean = held or task.part(index)
        self.notifier = Notifier()

    def follow(self, mean: ReducedPart, notifier: Notifier) -> None:
        """Pass on another result from now on: that of a new reducer. Streams that send the last one end."""
        before, self.mean, self.notifier = self.notifier, mean, notifier
        before.notify()

    async def fetch(self, stream: Stream, opening: ContributePartial, partials: Reducer | None) -> ReducedPart:
        """Fetch the mean on a stream to the reducer, and send it the cluster's `partials` meanwhile, if there are.

        It is received into a part of its own: while the stream opened, another may have been passed on, and is whole.
        """
        mean, notifier = self.task.part(self.index), self.notifier
        if not self.mean.done:
            self.follow(mean, notifier)

        def progress() -> None:
            self.task.progress()
            notifier.notify()

        await stream.send(opening)
        receiving = receive_part(replace(self.task, progress=progress), mean, stream)
        done = await (run_with_helper(receiving, _send_partials(partials, stream)) if partials else receiving)
        self.task.check_part(self.index, mean, done)
        mean.done = done
        notifier.notify()
        return mean

    async def give(self, stream: Stream) -> None:
        """Send a member the mean. Raises PeerSilent if it is reduced again meanwhile, and at the deadline."""
        try:
            mean, notifier = await self._begun()
            sending = send_part(stream, mean, notifier, self.task.deadline)
            await run_with_helper(sending, self._until_replaced(mean, notifier, stream.peer))
        except TimeoutError:
            raise PeerSilent(stream.peer, "the data phase ended first") from None

    async def _begun(self) -> tuple[ReducedPart, Notifier]:
        """Wait for the first chunk of the mean, from whichever reducer it comes."""
        while True:
            mean, notifier = self.mean, self.notifier
            await notifier.until(lambda: bool(mean.masks) or self.mean is not mean, self.task.deadline)  # noqa: B023
            if self.mean is mean:
                return mean, notifier

    async def _until_replaced(self, mean: ReducedPart, notifier: Notifier, peer: PeerId) -> None:
        await notifier.until(lambda: self.mean is not mean, self.task.deadline)
        raise PeerSilent(peer, f"part {self.index} is reduced again")


async def _send_partials(partials: Reducer, stream: Stream) -> None:
    """Send the chunks of a cluster as they are closed, unless the reducer has given it up and closes the stream."""
    part = partials.part
    with suppress(PeerSilent):
        for index in range(part.chunks):
            if not await partials.closed(index):
                return
            data = part.chunk(index)
            await stream.send(wire.Partial(index, part.masks[index], len(data)), data)


def norm_limit(members: ResolvedPlan) -> float:
    """The largest norm that the mean of a cluster may have: that of its largest contribution, clipped as declared. A
    coordinate-wise median may be √2 times as long, since half of the values are at least as large.
    """
    pairs = enumerate(zip(members.factors, members.weights, strict=True))
    largest = max((members.norm_limit(index) * factor for index, (factor, weight) in pairs if weight), default=0.0)
    return largest if members.robust == "mean" else math.sqrt(2) * largest


class Aggregator(Reducer):
    """Averages the contributions of a cluster to one part, whose `relay` passes the mean of all clusters on.

    The partials stay in `part` until the round ends: if the part gets another reducer, members send nothing again.
    """

    pace = MEMBER_PACE

    def __init__(self, task: DataPhase, index: int) -> None:
        low, high = task.resolved.part(index)
        super().__init__(task, index, task.format.part(low, high, len(task.resolved.peers)))
        resolved, own = task.resolved, self._order[task.host.me]
        self._judge = RobustAggregator(resolved.robust, resolved.allowances, resolved.expected_norms, own)
        self.relay = Relay(task, index)

    async def aggregate(self) -> None:
        """Close every chunk, without members that are too slow."""
        await self._close_chunks()

    def _on_encoded(self, index: int, mask: int, scratch: Vector) -> None:
        """A partial is not the mean: it is not decoded here, and has no digest."""

    async def _give(self, stream: Stream) -> None:
        try:
            await self.relay.give(stream)
        except PeerSilent:  # reduced again: the member asks for that on a new stream, once it has sent its whole work
            await self.closed(self._chunks - 1)
            raise


class PartialReducer(Reducer):
    """Averages the means of the clusters, which their aggregators send. A cluster goes by the name of its lead."""

    pace = CLUSTER_PACE

    def __init__(self, task: DataPhase, index: int, part: ReducedPart | None = None) -> None:
        assert task.clusters
        self._clusters: ResolvedClusters = task.clusters
        super().__init__(task, index, part)
        low, high = self._clusters.part(index)
        sizes = [cluster.size for cluster in self._clusters.clusters]
        codecs = [task.format.codec.reduced(size) for size in sizes]
        self._layouts = {
            lead: PartLayout(codec, low, high, task.format.chunk_elements)
            for lead, codec in zip(self._order, codecs, strict=True)
        }
        self._members: dict[PeerId, ResolvedPlan] = {}  # of the clusters whose offers are known
        self._limits: dict[PeerId, float] = {}  # of the norms of their partials
        self._held: dict[int, dict[PeerId, int]] = {}  # chunk -> masks of the members that its partials hold
        self._last: dict[PeerId, int] = {}  # the mask of a cluster's latest partial

    def _contributors(self) -> tuple[ResolvedClusters, None]:
        return self._clusters, None

    def know(self, cluster: int, members: ResolvedPlan) -> None:
        """Take the checked offers of a cluster. Its partials count only from then on."""
        lead = self._plan.peers[cluster]
        self._members[lead], self._limits[lead] = members, norm_limit(members)

    def sender(self, lead: PeerId) -> PeerId | None:
        """The peer that sends the partials of a cluster; None if the cluster's offers are not known."""
        return self._members[lead].reducer(self.index) if lead in self._members else None

    def lose_aggregator(self, peer: PeerId, why: str) -> None:
        """Wait for nothing more from the clusters of which a peer aggregates this part."""
        for lead in self._members:
            if self.sender(lead) == peer:
                self.lose(lead, why)

    async def serve_cluster(self, cluster: int, stream: Stream, relays: bool) -> None:
        """Exchange the part with a cluster's aggregator or, if it `relays` only, send it to a member."""
        lead = self._plan.peers[cluster]
        if relays:
            return await self._relayed(stream)
        if self.sender(lead) != stream.peer:
            raise BadPayload(f"not the aggregator of part {self.index} in the cluster of {lead}")
        await self.serve(lead, stream)

    async def _relayed(self, stream: Stream) -> None:
        try:
            await self._give(stream)
        except TimeoutError:
            raise PeerSilent(stream.peer, "the data phase ended first") from None

    async def take_from(self, cluster: int, aggregator: Aggregator) -> None:
        """Take the partials of this peer itself, which aggregates the part for its cluster."""
        lead = self._plan.peers[cluster]
        self._served.add(lead)
        self.notifier.notify()
        for index in range(self._chunks):
            if not await aggregator.closed(index) or not await self._has_room(index):
                return
            if lead in self.dropped or self.part.done:
                return
            data = aggregator.part.chunk(index)
            whole = self._free.pop() if self._free else self.part.pool.take(self._largest_bytes())
            whole[: len(data)] = data  # it is decoded in place, and the aggregator keeps its own
            self._note(lead, index, aggregator.part.masks[index])
            self._inbox[index][lead] = whole
            self.notifier.notify()

    async def _has_room(self, index: int) -> bool:
        return await self.notifier.reached(lambda: index < len(self._masks) + WINDOW_CHUNKS, self.task.deadline)

    # -- partials -----------------------------------------------------------------------------------------------------

    async def _receive_header(self, peer: PeerId, stream: Stream, index: int) -> int:
        size = self._layouts[peer].size(index)
        header = due(await stream.receive(HEADER_LIMIT), wire.Partial, index, size)
        self._note(peer, index, header.mask)
        return size

    def _note(self, lead: PeerId, index: int, mask: int) -> None:
        weights = self._members[lead].weights
        allowed = sum(1 << bit for bit, weight in enumerate(weights) if weight > 0)
        if mask & ~self._last.get(lead, allowed):
            raise BadPayload(f"partial {index} holds a member that is excluded or unknown")
        self._last[lead] = self._held.setdefault(index, {})[lead] = mask

    def _largest_bytes(self) -> int:
        return max(layout.size(0) for layout in self._layouts.values())

    def _decoded(self, index: int) -> tuple[list[tuple[int, Vector, float]], dict[PeerId, str]]:
        taken, refused = super()._decoded(index)
        masks = self._held.get(index, {})
        return [each for each in taken if masks[self._plan.peers[each[0]]]], refused

    def _decode(self, peer: PeerId, index: int, scratch: Vector) -> tuple[Vector, float]:
        """A cluster's mean of a chunk, as `Reducer._decode`. Raises BadPayload if its norm exceeds `norm_limit`."""
        layout = self._layouts[peer]
        data = self._inbox[index][peer][: layout.size(index)]
        row = layout.vector_for(data, scratch)
        layout.codec.decode(data, row)
        size = estimated_norm(row)
        self._squares[peer] += size**2
        limit = self._limits[peer]
        if not self._squares[peer] <= limit * limit:
            raise BadPayload(f"norm above {limit:.3g}, the most that its members' offers allow")
        return row, size

    def _average(self, index: int, taken: Sequence[tuple[int, Vector, float]], into: Vector) -> None:
        clusters, rows, norms = [each[0] for each in taken], [each[1] for each in taken], [each[2] for each in taken]
        masks = [self._held[index][self._plan.peers[cluster]] for cluster in clusters]
        counts = [mask.bit_count() for mask in masks]
        if not self._judge.is_clear(clusters, norms, counts):
            norms = [norm([row]) for row in rows]
        weights = list(map(self._clusters.weight, clusters, masks))
        self._judge.average(clusters, norms, rows, weights, into, counts)

    def _on_encoded(self, index: int, mask: int, scratch: Vector) -> None:
        held = self._held.pop(index, {})
        each = (held.get(peer, 0) if mask >> bit & 1 else 0 for bit, peer in enumerate(self._plan.peers))
        members = b"".join(one.to_bytes(MASK_BYTES, "little") for one in each)
        self.part.members.append(members)
        self.part.decode_chunk(index, self.task.into, scratch)
        self._digests.append(self.part.digest_of(index, mask, members))
