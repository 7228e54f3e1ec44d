"""Reduce-scatter and all-gather: each member sends every part of its vectors to the part's reducer, and gets the mean.

If each member reduces one part, this is the all-reduce of data-parallel training, one hop for each half (Thakur et al.
2005, section 4.4). If one member reduces the whole vector, it is a parameter server with a barrier. The mean is encoded
once, so that all members hold the same bits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

import torch

from protocols.aio import run_with_helper, task_group
from protocols.allreduce.parts import PartLayout, ReducedPart
from protocols.base import BadPayload, PeerId, PeerSilent, Stream
from protocols.baselines.synchronous_round import JoinRound, SynchronousRound
from protocols.chunks import receive_chunk, receive_vector, send_encoded, send_vector
from protocols.limits import LARGEST_FLOAT32


class RunningMean:
    """One part of everybody's vectors as it comes in: the mean so far, a running one, so that one copy is all it takes.

    Attributes:
        held: the mean, encoded, once it is `sealed`.
    """

    def __init__(self, held: ReducedPart, mine: torch.Tensor, weight: float) -> None:
        """
        Args:
            mine: this member's part, float32; changed.
        """
        self.held, self.sealed = held, False
        self._mean = mine
        self._weights = [weight] * held.chunks
        self._scratch = held.room()
        self._turn = asyncio.Lock()

    async def add(self, meeting: SynchronousRound, index: int, data: memoryview, weight: float) -> None:
        """Add one chunk of a member's.

        Raises:
            BadPayload: it does not decode to finite numbers.
        """
        async with self._turn:  # members' chunks come in at the same time, and `compute` has threads
            await meeting.host.compute.run(partial(self._add, index, data, weight), len(data))

    def _add(self, index: int, data: memoryview, weight: float) -> None:
        low, high = (edge - self.held.low for edge in self.held.elements(index))
        theirs, mean = self._scratch[: high - low], self._mean[low:high]
        self.held.codec.decode(data, theirs)
        total = self._weights[index] + weight
        mean.mul_(self._weights[index] / total).add_(theirs.mul_(weight / total))
        self._weights[index] = total

    async def seal(self, meeting: SynchronousRound) -> None:
        """Everything is in: encode the mean, and decode it to where it belongs."""
        await meeting.host.compute.run(partial(self._seal, meeting), 2 * self.held.size_bytes)
        self.sealed = True

    def _seal(self, meeting: SynchronousRound) -> None:
        self._mean.clamp_(-LARGEST_FLOAT32, LARGEST_FLOAT32)  # rounding may have carried it beyond
        for index in range(self.held.chunks):
            low, high = (edge - self.held.low for edge in self.held.elements(index))
            self.held.codec.encode(self._mean[low:high], self.held.chunk(index))
            self.held.decode_chunk(index, meeting.into, self._scratch)
        self._mean = torch.empty(0)


class ScatterReduce:
    """`AllReduceAlgorithm` in which the member with index `reducers[i]` reduces part i of `len(reducers)`."""

    def __init__(self, meeting: SynchronousRound, reducers: Sequence[int]) -> None:
        self._meeting, self._reducers = meeting, tuple(reducers)
        self._mixtures = {part: self._mixture(part) for part, at in enumerate(reducers) if at == meeting.place}
        self._begun: set[tuple[int, PeerId]] = set()
        self._brought: set[tuple[int, PeerId]] = set()

    def _mixture(self, part: int) -> RunningMean:
        meeting = self._meeting
        held = meeting.part(part, len(self._reducers))
        mine = torch.empty(held.high - held.low)
        return RunningMean(held, mine.copy_(meeting.mine.read(held.low, held.high, mine)), meeting.weight)

    async def run(self) -> None:
        async with task_group() as group:
            for part, at in enumerate(self._reducers):
                if at == self._meeting.place:
                    group.create_task(self._reduce(part))
                else:
                    group.create_task(self._hand_in(part, self._meeting.peers[at]))

    # -- the reducer's side -------------------------------------------------------------------------------------------

    async def _reduce(self, part: int) -> None:
        meeting, mixture = self._meeting, self._mixtures[part]
        others = [(part, peer) for peer in meeting.peers if peer != meeting.host.me]
        if mixture.held.chunks:
            await meeting.until(lambda: self._brought.issuperset(others))
            await mixture.seal(meeting)
            meeting.ring()

    async def serve(self, peer: PeerId, stream: Stream, hello: JoinRound) -> None:
        meeting, mixture = self._meeting, self._mixtures.get(hello.part)
        if mixture is None or not mixture.held.chunks or (hello.part, peer) in self._begun:
            raise BadPayload(f"part {hello.part} is not for this peer to reduce, or was sent before")
        self._begun.add((hello.part, peer))
        held = mixture.held
        buffer = held.chunk_buffer()
        for index in range(held.chunks):
            data = buffer(index)
            await receive_chunk(stream, index, data)
            await mixture.add(meeting, index, data, hello.weight)
        self._brought.add((hello.part, peer))
        meeting.ring()
        await meeting.until(lambda: mixture.sealed)
        await send_encoded(stream, held)

    # -- the contributor's side ---------------------------------------------------------------------------------------

    async def _hand_in(self, part: int, peer: PeerId) -> None:
        meeting = self._meeting
        held = meeting.shape(part, len(self._reducers))
        if not held.chunks:
            return
        async with meeting.open(peer, part) as stream:
            hear = partial(meeting.hear, peer)
            await run_with_helper(
                receive_vector(stream, held, meeting.into, meeting.host.compute, hear), self._send(stream, held)
            )

    async def _send(self, stream: Stream, part: PartLayout) -> None:
        with suppress(PeerSilent):  # the receiving side raises the same error, and knows the reason
            await send_vector(stream, part, self._meeting.mine, self._meeting.host.compute)
