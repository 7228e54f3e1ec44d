"""Reduce-scatter and all-gather: each member sends every part of its vectors to the part's reducer, and gets the mean.

If each member reduces one part, this is the all-reduce of data-parallel training, one hop for each half (Thakur et al.
2005, section 4.4). If one member reduces the whole vector, it is a parameter server with a barrier. The mean is encoded
once, so that all members hold the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from protocols.aio import run_with_helper, task_group
from protocols.allreduce.parts import ReducedPart, send_encoded
from protocols.base import BadPayload, PeerId, PeerSilent, Stream
from protocols.baselines.synchronous_round import JoinRound, SynchronousRound
from protocols.streams.chunks import receive_vector, send_vector
from protocols.vectors.layout import PartLayout


class ScatterReduce:
    """`AllReduceAlgorithm` in which the member with index `reducers[i]` reduces part i of `len(reducers)`.

    Without `reducers`, each member reduces one part.
    """

    def __init__(self, current_round: SynchronousRound, reducers: Sequence[int] | None = None) -> None:
        reducers = range(len(current_round.peers)) if reducers is None else reducers
        self._current_round, self._reducers = current_round, tuple(reducers)
        self._weights: dict[int, list[float]] = {}  # of each chunk of the parts that this peer reduces
        self._means: dict[int, ReducedPart] = {}  # the encoded means of complete parts
        self._begun: set[tuple[int, PeerId]] = set()
        self._brought: set[tuple[int, PeerId]] = set()
        for part, at in enumerate(reducers):
            layout = current_round.layout(part, len(reducers))
            if at == current_round.place and layout.chunks:
                current_round.start_mean(layout)
                self._weights[part] = [current_round.weight] * layout.chunks
                current_round.sources = frozenset(current_round.peers) - {current_round.host.me}

    async def run(self) -> None:
        async with task_group() as group:
            for part, at in enumerate(self._reducers):
                if at == self._current_round.place:
                    group.create_task(self._reduce(part))
                else:
                    group.create_task(self._hand_in(part, self._current_round.peers[at]))

    # -- the reducer's side -------------------------------------------------------------------------------------------

    async def _reduce(self, part: int) -> None:
        current_round = self._current_round
        others = [(part, peer) for peer in current_round.peers if peer != current_round.host.me]
        if part in self._weights:
            await current_round.until(lambda: self._brought.issuperset(others))
            self._means[part] = await current_round.encode_mean(part, len(self._reducers))
            current_round.wake()

    async def serve(self, peer: PeerId, stream: Stream, hello: JoinRound) -> None:
        current_round, part = self._current_round, hello.part
        if part not in self._weights or (part, peer) in self._begun:
            raise BadPayload(f"part {part} is not for this peer to reduce, or was sent before")
        self._begun.add((part, peer))
        await current_round.receive(
            stream, current_round.layout(part, len(self._reducers)), self._weights[part], hello.weight
        )
        self._brought.add((part, peer))
        current_round.wake()
        await current_round.until(lambda: part in self._means)
        await send_encoded(stream, self._means[part])

    # -- the contributor's side ---------------------------------------------------------------------------------------

    async def _hand_in(self, part: int, peer: PeerId) -> None:
        current_round = self._current_round
        held = current_round.layout(part, len(self._reducers))
        if not held.chunks:
            return
        async with current_round.open(peer, part) as stream:
            hear = partial(current_round.hear, peer)
            await run_with_helper(
                receive_vector(stream, held, current_round.into, current_round.host.compute, hear),
                self._send(stream, held),
            )

    async def _send(self, stream: Stream, part: PartLayout) -> None:
        with suppress(PeerSilent):  # the receiving side raises the same error, and knows the reason
            await send_vector(stream, part, self._current_round.mine, self._current_round.host.compute)
