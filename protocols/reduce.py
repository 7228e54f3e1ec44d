"""The data phase inside one group: scatter, reduce, gather (butterfly all-reduce, reduce-scatter plus all-gather).

Each member reduces one part of the vector. A member opens one stream to each reducer: its chunks of that part go out,
the reduced chunks come back, the same bytes to everyone. A reducer closes a chunk when every contribution that it can
still hope for is in, averages in the order of the plan and encodes once, so that all members hold the same bits and
the mean depends only on who is in it. Encoding, sending, receiving and reducing overlap chunk by chunk; a reducer
buffers `WINDOW_CHUNKS` per contributor, whatever the length of the vector.

All or nothing holds for each chunk: a contribution that breaks off counts up to its last whole chunk.
"""

from __future__ import annotations

import asyncio
from functools import partial

import torch

from protocols import wire
from protocols.base import BadPayload, Deadline, PeerError, PeerId, PeerSilent, Stream
from protocols.parts import Task, chunk_digest, part_message, seal
from protocols.plan import SCATTER_SHARE
from protocols.tasks import Bell, alongside
from protocols.vectors import norm, weighted_mean

WINDOW_CHUNKS = 2
_CHUNK_LIMIT = 64
_DONE_LIMIT = wire.MAX_HEADER_BYTES


class Reducer:
    """Averages one part. `run` closes its chunks; `serve` answers one member's stream.

    Attributes:
        lost: members whose contribution is not complete, and why; the reason names what they did.
    """

    def __init__(self, task: Task, part: int) -> None:
        self.task, self.part = task, part
        self.lost: dict[PeerId, str] = {}
        self.done: wire.PartDone | None = None
        terms = task.terms
        self._order = {peer: index for index, peer in enumerate(terms.peers)}
        self._chunks = task.held.chunks(part)
        self._expected = [peer for peer in terms.peers if peer != task.me and terms.weights[self._order[peer]] > 0]
        self._served: set[PeerId] = set()
        self._inbox: dict[int, dict[PeerId, memoryview]] = {index: {} for index in range(self._chunks)}
        self._free: list[memoryview] = []
        self._squares = dict.fromkeys(terms.peers, 0.0)
        self._masks: list[int] = []
        self._digests: list[bytes] = []
        self._bell = Bell()
        # one row for each contributor and one for the mean
        rows = sum(weight > 0 for weight in terms.weights) + 1
        self._scratch = torch.empty(rows, task.chunk_elements(part))

    async def run(self) -> wire.PartDone:
        """Close every chunk, without those that are late, and sign the part."""
        late = self._late()
        for index in range(self._chunks):
            if not await self._gather_in(index, late):
                # The window held the others up behind those that were late: they have a share of what is left.
                late = self._late()
            cost_bytes = 4 * self._scratch.numel()
            mask, refused = await self.task.compute.run(partial(self._close, index), cost_bytes)
            for peer, why in refused.items():
                self.lose(peer, why)  # before the chunk is closed: after the last one there is nothing more to lose
            self._masks.append(mask)
            self._free.extend(self._inbox.pop(index).values())
            self._bell.ring()
        task, result = self.task, seal(self._masks, self._digests)
        index = task.terms.plan.reducers[self.part]
        message = part_message(task.key, task.terms.digest, self.part, index, result)
        self.done = wire.PartDone(self.part, index, result, task.signer.sign(message))
        self._bell.ring()
        return self.done

    def lose(self, peer: PeerId, why: str) -> None:
        """Expect nothing more of a member; what it delivered in whole chunks stays."""
        if peer in self._expected and peer not in self.lost and len(self._masks) < self._chunks:
            self.lost[peer] = why
            self._bell.ring()

    async def serve(self, peer: PeerId, stream: Stream) -> None:
        """Take a member's contribution and give it the reduced part.

        Raises:
            BadPayload: it broke a rule; it is out, and named.
            PeerSilent: its stream broke off.
        """
        if peer not in self._order or peer in self._served:
            raise BadPayload("a second contribution to a part" if peer in self._served else "not in the plan")
        self._served.add(peer)
        try:
            await alongside(self._give(stream), self._take(peer, stream))
        except TimeoutError:
            raise PeerSilent(peer, "the data phase ended first") from None

    async def _take(self, peer: PeerId, stream: Stream) -> None:
        if peer not in self._expected:
            return
        try:
            for index in range(self._chunks):
                await self._bell.until(
                    lambda index=index: index < len(self._masks) + WINDOW_CHUNKS,  # type: ignore[misc]
                    self.task.deadline,
                )
                await self._take_chunk(peer, stream, index)
                if peer in self.lost:
                    return
        except BadPayload as error:
            self.lose(peer, f"refused: {error}")
            raise
        except (PeerError, TimeoutError) as error:
            self.lose(peer, f"its contribution broke off ({error})")
            raise

    async def _take_chunk(self, peer: PeerId, stream: Stream, index: int) -> None:
        header = wire.expect(await stream.receive(_CHUNK_LIMIT), wire.Chunk)
        size = self.task.size(self.part, index)
        if (header.index, header.size) != (index, size):
            raise BadPayload(f"chunk {header.index} of {header.size} bytes where {index} of {size} is due")
        whole = self._free.pop() if self._free else memoryview(bytearray(self.task.size(self.part, 0)))
        await stream.receive_into(whole[:size])
        if peer in self.lost:
            self._free.append(whole)
            return
        self._inbox[index][peer] = whole
        self._bell.ring()

    def _late(self) -> Deadline:
        now = asyncio.get_running_loop().time()
        return now + SCATTER_SHARE * (self.task.deadline - now)

    async def _gather_in(self, index: int, late: Deadline) -> bool:
        """Wait for a chunk of everyone; False if somebody was late, and is out."""
        inbox = self._inbox[index]

        def missing() -> list[PeerId]:
            return [peer for peer in self._expected if peer not in inbox and peer not in self.lost]

        try:
            await self._bell.until(lambda: not missing(), late)
        except TimeoutError:
            for peer in missing():
                self.lose(peer, f"late: chunk {index} of {self._chunks} was not in")
            return False
        return True

    def _close(self, index: int) -> tuple[int, dict[PeerId, str]]:
        """Decode, check, average and encode one chunk; off the loop. Returns the mask and who was refused."""
        task, terms = self.task, self.task.terms
        low, high = task.held.elements(self.part, index)
        inbox = self._inbox[index]
        taken: list[torch.Tensor] = []
        weights: list[float] = []
        mask, refused = 0, dict[PeerId, str]()
        for order, peer in enumerate(terms.peers):
            if terms.weights[order] == 0 or (peer != task.me and (peer not in inbox or peer in self.lost)):
                continue
            row = self._scratch[len(taken), : high - low]
            try:
                self._decode(peer, index, row)
            except BadPayload as error:
                refused[peer] = f"refused: {error}"
                continue
            if terms.factors[order] != 1.0:
                row.mul_(terms.factors[order])
            taken.append(row)
            weights.append(terms.weights[order])
            mask |= 1 << order
        mean = self._scratch[-1, : high - low]
        if taken:
            weighted_mean(taken, weights, mean)
        else:
            mean.zero_()
        data = task.held.chunk(self.part, index)
        task.held.codec.encode(mean, data)
        self._digests.append(chunk_digest(mask, data))
        return mask, refused

    def _decode(self, peer: PeerId, index: int, row: torch.Tensor) -> None:
        task = self.task
        if peer == task.me:
            low, high = task.held.elements(self.part, index)
            row.copy_(task.mine.read(low, high, row))
            return
        task.held.codec.decode(self._inbox[index][peer][: task.size(self.part, index)], row)
        self._squares[peer] += norm([row]) ** 2
        limit = task.terms.norm_limit(self._order[peer])
        if not self._squares[peer] <= limit * limit:
            raise BadPayload(f"norm above {limit:.3g}, the most that its offer allows")

    async def _give(self, stream: Stream) -> None:
        for index in range(self._chunks):
            await self._bell.until(lambda index=index: index < len(self._masks), self.task.deadline)  # type: ignore[misc]
            data = self.task.held.chunk(self.part, index)
            await stream.send(wire.Reduced(index, self._masks[index], len(data)), data)
        await self._bell.until(lambda: self.done is not None, self.task.deadline)
        assert self.done is not None
        await stream.send(self.done)


async def contribute(task: Task, part: int, stream: Stream) -> wire.PartDone:
    """Hand in one part to its reducer and take the reduced part into `task.held`.

    Raises:
        BadPayload: the reducer broke a rule.
        PeerSilent: the stream broke off.
    """
    await stream.send(wire.Contribute(task.key, task.terms.digest, part, task.held.codec.name))
    return await alongside(_receive_part(task, part, stream), _send_part(task, part, stream))


async def _send_part(task: Task, part: int, stream: Stream) -> None:
    weight = task.terms.weights[task.terms.peers.index(task.me)]
    if weight == 0:
        return
    scratch = torch.empty(task.chunk_elements(part))
    encoded = memoryview(bytearray(task.size(part, 0)))

    def encode(index: int) -> memoryview:
        low, high = task.held.elements(part, index)
        data = encoded[: task.size(part, index)]
        task.held.codec.encode(task.mine.read(low, high, scratch), data)
        return data

    for index in range(task.held.chunks(part)):
        data = await task.compute.run(partial(encode, index), len(encoded))
        try:
            await stream.send(wire.Chunk(index, len(data)), data)
        except PeerSilent:
            return  # a reducer that gave us up as late closes when it has sent its part: receiving tells which it was


async def _receive_part(task: Task, part: int, stream: Stream) -> wire.PartDone:
    masks: list[int] = []
    digests: list[bytes] = []
    for index in range(task.held.chunks(part)):
        header = wire.expect(await stream.receive(_CHUNK_LIMIT), wire.Reduced)
        data = task.held.chunk(part, index)
        if (header.index, header.size) != (index, len(data)) or header.mask >> len(task.terms.peers):
            raise BadPayload(f"reduced chunk {header.index} of {header.size} bytes where {index} is due")
        await stream.receive_into(data)
        masks.append(header.mask)
        digests.append(await task.compute.run(partial(chunk_digest, header.mask, data), len(data)))
    done = wire.expect(await stream.receive(_DONE_LIMIT), wire.PartDone)
    if (done.part, done.result) != (part, seal(masks, digests)):
        raise BadPayload("a part whose digest is not that of its chunks")
    index = task.terms.plan.reducers[part]
    message = part_message(task.key, task.terms.digest, part, index, done.result)
    if done.reducer != index or not task.signer.verify(task.terms.peers[index], message, done.signature):
        raise BadPayload("a part with a forged signature")
    return done
