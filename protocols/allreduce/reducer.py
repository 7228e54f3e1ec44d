"""The two sides of the data phase for one part: reducer and contributor (reduce-scatter plus all-gather).

A member opens one stream to each reducer. Its chunks of that part go out, and the reduced chunks come back, the same
bytes for every member. A reducer closes a chunk when all contributions that it still expects are in, averages in the
order of the plan and encodes once. It buffers `WINDOW_CHUNKS` per contributor, whatever the length of the vector.

A contribution counts in a chunk wholly or not at all. One that breaks off counts up to its last whole chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

import torch

from protocols import wire
from protocols.aio import Notifier, loop_time, run_with_helper
from protocols.allreduce.parts import DataPhase, ReducedPart, receive_reduced
from protocols.allreduce.plan import SCATTER_SHARE
from protocols.base import BadPayload, Deadline, PeerError, PeerId, PeerSilent, Stream, Vector
from protocols.streams.chunks import HEADER_LIMIT, due, send_vector
from protocols.vectors.coding import carry
from protocols.vectors.robust import RobustAggregator
from protocols.vectors.views import estimated_norm, norm

WINDOW_CHUNKS = 2


class Reducer:
    """Averages one part. `run` closes its chunks; `serve` answers one member's stream."""

    def __init__(self, task: DataPhase, index: int, part: ReducedPart | None = None) -> None:
        """A part that is complete is only served."""
        self.task, self.index = task, index
        self.part = part or task.part(index)
        self._contribution = task.contribution(index)
        self.dropped: dict[PeerId, str] = {}  # members whose contribution is not complete, and why
        self.outliers: dict[PeerId, str] = {}  # members whose contribution was unlike the others', and how
        resolved = task.resolved
        self._judge = RobustAggregator(resolved.robust, resolved.allowances)
        self._order = {peer: index for index, peer in enumerate(resolved.peers)}
        self._chunks = self.part.chunks
        self._expected = [
            peer for peer in resolved.peers if peer != task.me and resolved.weights[self._order[peer]] > 0
        ]
        self._served: set[PeerId] = set()
        self._inbox: dict[int, dict[PeerId, memoryview]] = {index: {} for index in range(self._chunks)}
        self._free: list[memoryview] = []
        self._squares = dict.fromkeys(resolved.peers, 0.0)
        self._masks = self.part.masks
        self._digests: list[bytes] = []
        self._notifier = Notifier()
        self._scratch = torch.empty(0)

    async def run(self) -> ReducedPart:
        """Close every chunk, without members that are silent or late, and sign the part."""
        if self.part.done:
            return self.part
        # one row for each contributor and one for the mean
        rows = sum(weight > 0 for weight in self.task.resolved.weights) + 1
        self._scratch = torch.empty(rows, min(self.part.chunk_elements, self.part.high - self.part.low))
        late = self._late()
        for index in range(self._chunks):
            if not await self._gather_in(index, late):
                # The window held up the other members behind the late ones, so they get a share of the time left.
                late = self._late()
            cost_bytes = 4 * self._scratch.numel()
            mask, refused = await self.task.compute.run(partial(self._close, index), cost_bytes)
            for peer, why in refused.items():
                self.lose(peer, why)  # before the chunk is closed, since `lose` ignores peers once all chunks are
            self._masks.append(mask)
            self._free.extend(self._inbox.pop(index).values())
            self.task.progress()
            self._notifier.notify()
        task, result = self.task, self.part.seal(self._digests)
        done = wire.PartDone(self.index, task.resolved.plan.reducers[self.index], result, b"")
        self.part.done = replace(done, signature=task.signer.sign(task.message(done)))
        self._scratch, self._free = torch.empty(0), []
        self.outliers = {task.resolved.peers[member]: why for member, why in self._judge.named().items()}
        self._notifier.notify()
        return self.part

    def lose(self, peer: PeerId, why: str) -> None:
        """Wait for nothing more from a member. The whole chunks that it sent still count."""
        if peer in self._expected and peer not in self.dropped and len(self._masks) < self._chunks:
            self.dropped[peer] = why
            self._notifier.notify()

    async def serve(self, peer: PeerId, stream: Stream) -> None:
        """Receive a member's contribution and send it the reduced part; on a second stream, only send the part."""
        if peer not in self._order:
            raise BadPayload("not in the plan")
        first = peer not in self._served
        self._served.add(peer)
        self._notifier.notify()
        try:
            if first and peer in self._expected and not self.part.done:
                await run_with_helper(self._give(stream), self._take(peer, stream))
            else:
                await self._give(stream)
        except TimeoutError:
            raise PeerSilent(peer, "the data phase ended first") from None

    async def _take(self, peer: PeerId, stream: Stream) -> None:
        try:
            for index in range(self._chunks):
                await self._notifier.until(lambda: index < len(self._masks) + WINDOW_CHUNKS, self.task.deadline)  # noqa: B023
                await self._take_chunk(peer, stream, index)
                if peer in self.dropped:
                    return
        except BadPayload as error:
            self.lose(peer, f"refused: {error}")
            raise
        except (PeerError, TimeoutError) as error:
            self.lose(peer, f"its contribution broke off ({error})")
            raise

    async def _take_chunk(self, peer: PeerId, stream: Stream, index: int) -> None:
        # Not `receive_chunk`: here only a chunk on its way has a buffer, and all members share the free buffers.
        size = self._contribution.size(index)
        due(await stream.receive(HEADER_LIMIT), wire.Chunk, index, size)
        whole = self._free.pop() if self._free else self.part.pool.take(self._contribution.size(0))
        await stream.receive_into(whole[:size])
        if peer in self.dropped:
            self._free.append(whole)
            return
        self._inbox[index][peer] = whole
        self._notifier.notify()

    def _late(self) -> Deadline:
        now = loop_time()
        return now + SCATTER_SHARE * (self.task.deadline - now)

    async def _gather_in(self, index: int, late: Deadline) -> bool:
        """Wait for a chunk of every member; False if a member was silent or late, and is left out."""
        inbox = self._inbox[index]

        def missing() -> list[PeerId]:
            return [peer for peer in self._expected if peer not in inbox and peer not in self.dropped]

        def silent() -> list[PeerId]:
            return [peer for peer in missing() if peer not in self._served]

        in_time = True
        for absent, until, why in ((silent, self.task.silent, "silent"), (missing, late, "late")):
            try:
                await self._notifier.until(lambda absent=absent: not absent(), until)  # type: ignore[misc]
            except TimeoutError:
                in_time = False
                for peer in absent():
                    self.lose(peer, f"{why}: chunk {index} of {self._chunks} was not in")
        return in_time

    def _close(self, index: int) -> tuple[int, dict[PeerId, str]]:
        """Decode, check, average and encode one chunk, outside the event loop. Returns its mask, and the refused
        members.
        """
        low, high = self.part.elements(index)
        data, scratch = self.part.chunk(index), self._scratch[-1, : high - low]
        mean = self.part.vector_for(data, scratch)
        taken, refused = self._decoded(index)
        if taken:
            self._average(taken, mean)
        else:
            mean.zero_()
        self.part.codec.encode(mean, data)
        self.part.decode_chunk(index, self.task.into, scratch)  # so this member has the same bits as the others
        mask = sum(1 << order for order, _, _ in taken)
        self._digests.append(self.part.digest_of(index, mask))
        return mask, refused

    def _decoded(self, index: int) -> tuple[list[tuple[int, Vector, float]], dict[PeerId, str]]:
        """Decode the contributions to a chunk. Returns those that count, and the refused members with reasons.

        A contribution is its member's index in the plan, its elements, and an estimate of their norm.
        """
        task, resolved, inbox = self.task, self.task.resolved, self._inbox[index]
        low, high = self.part.elements(index)
        taken, refused = list[tuple[int, Vector, float]](), dict[PeerId, str]()
        for order, peer in enumerate(resolved.peers):
            if resolved.weights[order] == 0 or (peer != task.me and (peer not in inbox or peer in self.dropped)):
                continue
            try:
                taken.append((order, *self._decode(peer, index, self._scratch[len(taken), : high - low])))
            except BadPayload as error:
                refused[peer] = f"refused: {error}"
        return taken, refused

    def _average(self, taken: Sequence[tuple[int, Vector, float]], into: Vector) -> None:
        resolved, members, rows = self.task.resolved, [order for order, _, _ in taken], [row for _, row, _ in taken]
        factors = [resolved.factors[order] for order in members]
        norms = [size * factor for (_, _, size), factor in zip(taken, factors, strict=True)]
        if not self._judge.is_clear(members, norms):
            norms = [norm([row]) * factor for row, factor in zip(rows, factors, strict=True)]
        for row, factor in zip(rows, factors, strict=True):
            if factor != 1.0:
                row.mul_(factor)
        self._judge.average(members, norms, rows, [resolved.weights[order] for order in members], into)

    def _decode(self, peer: PeerId, index: int, scratch: Vector) -> tuple[Vector, float]:
        """One member's elements of a chunk, in `scratch` or where the chunk came in, and an estimate of their norm.
        Raises BadPayload if they are not finite, or the contribution's norm exceeds its limit.
        """
        task = self.task
        if peer == task.me:
            low, high = self.part.elements(index)
            scratch.copy_(task.mine.read(low, high, scratch))
            if self.part.codec is not task.format.codec:  # the mean has room only for encoded contributions
                carry(task.format.codec, scratch)
            return scratch, estimated_norm(scratch)
        data = self._inbox[index][peer][: self._contribution.size(index)]
        row = self._contribution.vector_for(data, scratch)
        task.format.codec.decode(data, row)
        size = estimated_norm(row)
        self._squares[peer] += size**2
        limit = task.resolved.norm_limit(self._order[peer])
        if not self._squares[peer] <= limit * limit:
            raise BadPayload(f"norm above {limit:.3g}, the most that its offer allows")
        return row, size

    async def _give(self, stream: Stream) -> None:
        for index in range(self._chunks):
            await self._notifier.until(lambda: index < len(self._masks), self.task.deadline)  # noqa: B023 - awaited here
            data = self.part.chunk(index)
            await stream.send(wire.Reduced(index, self._masks[index], len(data)), data)
        await self._notifier.until(lambda: self.part.done is not None, self.task.deadline)
        assert self.part.done is not None
        await stream.send(self.part.done)


async def contribute(task: DataPhase, part: int, stream: Stream, again: bool = False) -> ReducedPart:
    """Send this member's contribution to one part to its reducer, and receive the reduced part; only receive if
    `again`.
    """
    await stream.send(wire.Contribute(task.key, task.resolved.digest, part, task.format.codec.name))
    receiving = _receive_part(task, part, stream)
    return await receiving if again else await run_with_helper(receiving, _send_part(task, part, stream))


async def _send_part(task: DataPhase, part: int, stream: Stream) -> None:
    if task.resolved.weights[task.resolved.peers.index(task.me)] == 0:
        return
    # A reducer that gave this peer up as late closes the stream once it has sent its part. If it is lost instead,
    # the receiving side raises.
    with suppress(PeerSilent):
        await send_vector(stream, task.contribution(part), task.mine, task.compute)


async def _receive_part(task: DataPhase, part: int, stream: Stream) -> ReducedPart:
    held, peers = task.part(part), task.resolved.peers
    done = await receive_reduced(stream, held, task.compute, task.into, (1 << len(peers)) - 1, task.progress)
    if (done.part, done.result) != (part, held.result) or done.reducer >= len(peers):
        raise BadPayload("a part whose digest is not that of its chunks")
    if not task.signer.verify(peers[done.reducer], task.message(done), done.signature):
        raise BadPayload("a part with a forged signature")
    held.done = done
    return held
