"""Ring all-reduce: each member sends to the next one and receives from the previous one, in 2 (N − 1) steps.

Each step moves one part, 1/N of the vector. In the first half, a part collects the members' vectors on its way: it
carries their mean so far and its weight. In the second half, the finished parts go round. This needs the least
bandwidth, but its latency grows with N (Patarasu and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters
of workstations", section 3). Unfinished means are sent as float32, whatever the codec, because a lossy codec would be
applied again at each hop. Finished parts are encoded once.
"""

from __future__ import annotations

from functools import partial

from protocols import wire
from protocols.aio import run_with_helper, task_group
from protocols.allreduce.parts import ReducedPart, send_encoded
from protocols.base import BadPayload, PeerId, PeerSilent, Stream
from protocols.baselines.synchronous_round import REFUSED_LIMIT, Hop, JoinRound, SynchronousRound
from protocols.streams.chunks import receive_chunk, send_vector
from protocols.vectors.codec import CODECS
from protocols.vectors.layout import PartLayout

_HOP_LIMIT = 64


class Ring:
    """`AllReduceAlgorithm` in a ring of the members, in the order of their ids."""

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
        current_round = self._current_round
        if peer != self._before or self._incoming:
            raise BadPayload("not the previous member of the ring, or its second stream")
        self._incoming = stream
        current_round.wake()
        await current_round.until(lambda: current_round.over)

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
        self._current_round.hear(stream.peer, header)
        raise BadPayload(f"{type(header).__name__} against the direction of the ring")

    async def _round(self, out: Stream) -> None:
        current_round, half = self._current_round, self._count - 1
        await current_round.host.compute.run(
            partial(current_round.start_mean, current_round.layout(0, 1)), 4 * current_round.mine.size
        )
        await current_round.until(lambda: self._incoming is not None)
        assert self._incoming is not None
        for step in range(2 * half):
            if step == half:  # the part that came in last is complete
                index = (current_round.place - step) % self._count
                self._finished[index] = await current_round.encode_mean(index, self._count)
            async with task_group() as group:
                group.create_task(self._send(out, step))
                group.create_task(self._receive(self._incoming, step))

    def _raw(self, index: int) -> PartLayout:
        """The layout of an unfinished part."""
        layout = self._current_round.layout(index, self._count)
        return PartLayout(CODECS["fp32"], layout.low, layout.high, layout.chunk_elements)

    async def _send(self, out: Stream, step: int) -> None:
        """Send the part that was received in the previous step."""
        index, compute = (self._current_round.place - step) % self._count, self._current_round.host.compute
        self._sends_last = step == 2 * self._count - 3
        await out.send(Hop(step, index, self._weights[index]))
        if finished := self._finished.pop(index, None):
            await send_encoded(out, finished)
        else:
            await send_vector(out, self._raw(index), self._current_round.into, compute)

    async def _receive(self, stream: Stream, step: int) -> None:
        """Receive a part. In the first half, average it with this member's elements; in the second, decode it."""
        current_round, index = self._current_round, (self._current_round.place - step - 1) % self._count
        hop = wire.expect(await stream.receive(_HOP_LIMIT), Hop)
        if (hop.step, hop.part) != (step, index):
            raise BadPayload(f"part {hop.part} in step {hop.step}, where part {index} in step {step} is due")
        if step < self._count - 1:
            layout = self._raw(index)
            await current_round.receive(stream, layout, [self._weights[index]] * layout.chunks, hop.weight)
            self._weights[index] += hop.weight
            return
        self._finished[index] = part = current_round.part(index, self._count)
        scratch = part.scratch_vector()
        for number in range(part.chunks):
            data = part.chunk(number)
            await receive_chunk(stream, number, data)
            await current_round.host.compute.run(
                partial(part.decode_chunk, number, current_round.into, scratch), len(data)
            )
