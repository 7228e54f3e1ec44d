"""How vectors travel in a synchronous round. The mean of a part is encoded once: all members hold the same bits."""

from __future__ import annotations

from contextlib import suppress
from functools import partial

from protocols import wire
from protocols.aio import run_with_helper, task_group
from protocols.allreduce.parts import ReducedPart, send_encoded
from protocols.base import BadPayload, Host, PeerId, PeerSilent, Settings, Stream
from protocols.baselines.synchronous import REFUSED_LIMIT, Hop, JoinRound, SynchronousAverager, SynchronousRound
from protocols.streams.chunks import receive_chunk, receive_vector, send_vector
from protocols.vectors.codec import CODECS

_HOP_LIMIT = 64


class ScatterReduce:
    """Each member sends every part of its vectors to the part's reducer, and gets the mean (Thakur et al. 2005,
    section 4.4).

    If the first member reduces the whole vector, it is a parameter server with a barrier.
    """

    def __init__(self, current_round: SynchronousRound, server: bool = False) -> None:
        self._current_round = current_round
        self._parts = 1 if server else len(current_round.peers)  # the member of this index reduces a part
        self._weights: dict[int, list[float]] = {}  # of each chunk of the part that this peer reduces
        self._means: dict[int, ReducedPart] = {}  # the encoded mean of the complete part
        self._begun: set[PeerId] = set()
        self._brought: set[PeerId] = set()
        self._others = frozenset(current_round.peers) - {current_round.host.me}
        if current_round.place < self._parts:
            part = self._part(current_round.place)
            if part.chunks:
                current_round.start_mean(part)
                self._weights[current_round.place] = [current_round.weight] * part.chunks
                current_round.sources = self._others

    def _part(self, index: int) -> ReducedPart:
        return self._current_round.part(index, self._parts)

    async def run(self) -> None:
        async with task_group() as group:
            for index in range(self._parts):
                if index == self._current_round.place:
                    group.create_task(self._reduce(index))
                else:
                    group.create_task(self._contribute(index, self._current_round.peers[index]))

    async def _reduce(self, index: int) -> None:
        current_round = self._current_round
        if index in self._weights:
            await current_round.until(lambda: self._brought >= self._others)
            self._means[index] = await current_round.encode_mean(self._part(index))
            current_round.wake()

    async def serve(self, peer: PeerId, stream: Stream, hello: JoinRound) -> None:
        current_round, index = self._current_round, hello.part
        if index not in self._weights or peer in self._begun:
            raise BadPayload(f"part {index} is not for this peer to reduce, or was sent before")
        self._begun.add(peer)
        await current_round.receive(stream, self._part(index), self._weights[index], hello.weight)
        self._brought.add(peer)
        current_round.wake()
        await current_round.until(lambda: index in self._means)
        await send_encoded(stream, self._means[index])

    async def _contribute(self, index: int, peer: PeerId) -> None:
        current_round, part = self._current_round, self._part(index)
        if not part.chunks:
            return
        compute, hear = current_round.host.compute, partial(current_round.check, peer)
        async with current_round.open(peer, index) as stream:

            async def send() -> None:
                with suppress(PeerSilent):  # the receiving side raises the same error, and knows the reason
                    await send_vector(stream, part, current_round.mine, compute)

            await run_with_helper(receive_vector(stream, part, current_round.into, compute, hear), send())


class Ring:
    """Each member sends to the next one, in the order of ids, and receives from the previous one, in 2 (N − 1) steps.

    In the first half, a part collects the members' vectors on its way: their mean so far, as float32, because a lossy
    codec would be applied again at each hop. In the second half, the finished parts go round (Patarasu and Yuan 2009,
    section 3).
    """

    def __init__(self, current_round: SynchronousRound) -> None:
        self._current_round, self._count = current_round, len(current_round.peers)
        self._next = current_round.peers[(current_round.place + 1) % self._count]
        self._before = current_round.peers[current_round.place - 1]
        current_round.sources = frozenset((self._before,))
        self._incoming: Stream | None = None
        self._weights = [current_round.weight] * self._count  # the weight of each part's mean in `into`
        self._finished: dict[int, ReducedPart] = {}
        self._sends_last = False

    async def serve(self, peer: PeerId, stream: Stream, hello: JoinRound) -> None:
        """Take the previous member's stream, which `run` reads, and keep it open until the round is over."""
        if peer != self._before or self._incoming:
            raise BadPayload("not the previous member of the ring, or its second stream")
        self._incoming = stream
        self._current_round.wake()
        await self._current_round.until(lambda: self._current_round.over)

    async def run(self) -> None:
        async with self._current_round.open(self._next, 0) as stream:
            await run_with_helper(self._round(stream), self._refusals(stream))

    async def _refusals(self, stream: Stream) -> None:
        """Read what the next member sends back: a refusal, or only the end of the stream."""
        try:
            header = await stream.receive(REFUSED_LIMIT)
        except PeerSilent:
            if self._sends_last:
                return  # it has all parts, or the sending side notices that it is lost
            raise  # it has left the round, while this member perhaps waits for the previous one
        self._current_round.check(stream.peer, header)
        raise BadPayload(f"{type(header).__name__} against the direction of the ring")

    async def _round(self, out: Stream) -> None:
        current_round, half = self._current_round, self._count - 1
        start = partial(current_round.start_mean, current_round.part(0, 1))
        await current_round.host.compute.run(start, 4 * current_round.mine.size)
        await current_round.until(lambda: self._incoming is not None)
        assert self._incoming is not None
        for step in range(2 * half):
            if step == half:  # the part that came in last is complete
                index = (current_round.place - step) % self._count
                self._finished[index] = await current_round.encode_mean(current_round.part(index, self._count))
            async with task_group() as group:
                group.create_task(self._send(out, step))
                group.create_task(self._receive(self._incoming, step))

    async def _send(self, out: Stream, step: int) -> None:
        current_round, index = self._current_round, (self._current_round.place - step) % self._count
        self._sends_last = step == 2 * self._count - 3
        await out.send(Hop(step, index, self._weights[index]))
        if finished := self._finished.pop(index, None):
            await send_encoded(out, finished)
        else:
            unfinished = current_round.part(index, self._count, CODECS["fp32"])
            await send_vector(out, unfinished, current_round.into, current_round.host.compute)

    async def _receive(self, stream: Stream, step: int) -> None:
        current_round, index = self._current_round, (self._current_round.place - step - 1) % self._count
        hop = wire.expect(await stream.receive(_HOP_LIMIT), Hop)
        if (hop.step, hop.part) != (step, index):
            raise BadPayload(f"part {hop.part} in step {hop.step}, where part {index} in step {step} is due")
        if step < self._count - 1:
            part = current_round.part(index, self._count, CODECS["fp32"])
            await current_round.receive(stream, part, [self._weights[index]] * part.chunks, hop.weight)
            self._weights[index] += hop.weight
            return
        self._finished[index] = part = current_round.part(index, self._count)
        scratch = part.scratch_vector()
        for number in range(part.chunks):
            data = part.chunk(number)
            await receive_chunk(stream, number, data)
            decode = partial(part.decode_chunk, number, current_round.into, scratch)
            await current_round.host.compute.run(decode, len(data))


# -- the protocols by name --------------------------------------------------------------------------------------------


def data_parallel(host: Host, settings: Settings) -> SynchronousAverager:
    return SynchronousAverager(host, settings, "starling/data-parallel/1", ScatterReduce)


def ring(host: Host, settings: Settings) -> SynchronousAverager:
    return SynchronousAverager(host, settings, "starling/ring/1", Ring)


def parameter_server(host: Host, settings: Settings) -> SynchronousAverager:
    """A parameter server with a barrier: one member averages for all (Li et al. 2014). Its link carries 2 (N − 1) S."""
    return SynchronousAverager(host, settings, "starling/parameter-server/1", partial(ScatterReduce, server=True))
