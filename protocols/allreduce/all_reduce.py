"""The data phase of one plan at one member (reduce-scatter plus all-gather): it reduces its own parts, and exchanges
the others with their reducers.

A member opens one stream to each reducer. Its chunks of that part go out, and the reduced chunks come back, the same
bytes for every member. A reducer closes a chunk when all contributions that it still expects are in, averages in the
order of the plan and encodes once. It buffers `WINDOW_CHUNKS` per contributor, whatever the length of the vector. A
contribution counts in a chunk wholly or not at all. One that breaks off counts up to its last whole chunk.

A part whose reducer is lost may be given to another member. Then the contributors send it again, to that member.
"""

from __future__ import annotations

import asyncio
import functools
import operator
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from functools import partial

import torch

from protocols import wire
from protocols.aio import Notifier, loop_time, run_with_helper, task_group
from protocols.allreduce.clustered_messages import ContributePartial
from protocols.allreduce.clustered_plan import Pace, RoundPlan
from protocols.allreduce.parts import DataPhase, ReducedPart
from protocols.allreduce.plan import SCATTER_SHARE, ResolvedPlan
from protocols.base import BadPayload, Deadline, PeerError, PeerGone, PeerId, PeerSilent, Settings, Stream, Vector
from protocols.streams.chunks import HEADER_LIMIT, due, send_vector
from protocols.streams.endpoint import RoundAccounting
from protocols.vectors.coding import carry
from protocols.vectors.robust import RobustAggregator
from protocols.vectors.views import estimated_norm, norm

DATA = "starling/butterfly/data/1"
WINDOW_CHUNKS = 2
MIN_BANDWIDTH = 1e3
CLAIM_GROWTH, CLAIM_CUT = 1.05, 0.5
"""Factors of a bandwidth claim after a data phase in time, and after a late one.

On a link that is slower than configured, a data phase fails each time that the claim has grown from half of the real
bandwidth to all of it: one in fifteen. With a growth of 1.25 it was one in four."""


def next_claim(claim: float, bandwidth: float, in_time: bool) -> float:
    """The upload bandwidth to claim in the next round, bytes/s: less after a late data phase, then slowly more."""
    return max(MIN_BANDWIDTH, min(bandwidth, (CLAIM_GROWTH if in_time else CLAIM_CUT) * claim))


class BandwidthClaim:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._ceiling = self._claim = settings.upload_bandwidth()

    def renewed(self) -> float:
        """The claim of a round that begins, bytes/s: a limit that has changed since the last one counts at once."""
        before, self._ceiling = self._ceiling, self._settings.upload_bandwidth()
        self._claim = self._ceiling if self._claim >= before else min(self._claim, self._ceiling)
        return self._claim

    def observe(self, in_time: bool) -> None:
        self._claim = next_claim(self._claim, self._ceiling, in_time)


class AllReduce:
    """One member's data phase: a task for each part, which reduces it or exchanges it with its reducer."""

    def __init__(
        self,
        task: DataPhase,
        accounting: RoundAccounting,
        on_change: Callable[[ReducedPart | None], None],
        method: str = DATA,
    ) -> None:
        self.task = replace(task, progress=self._on_chunk)
        self.parts: dict[int, ReducedPart] = {}  # decoded, unless `restarted`
        self.failed: dict[int, PeerId] = {}  # part -> the reducer from which this member could not get it
        self.unreachable: set[PeerId] = set()  # reducers to which no stream could be opened
        self.restarted: set[int] = set()  # parts begun twice: chunks of both results may have been decoded
        self.finished = 0.0  # when the latest part came in that is not empty; 0: none has
        self.moved = loop_time()  # when the latest chunk came in
        self._progress = task.progress
        self._accounting, self._on_change, self._method = accounting, on_change, method
        self._reducers: dict[int, Reducer] = {}
        self._lost: dict[PeerId, str] = {}  # peers that no reducer here waits for, also not for parts given to it later
        self._silent: list[PeerId] = []
        self._jobs: dict[int, tuple[PeerId, asyncio.Task[None]]] = {}
        self._notifier = Notifier()

    @property
    def complete(self) -> bool:
        return len(self.parts) == len(self.task.resolved.plan.reducers)

    @property
    def in_time(self) -> bool | None:
        """Whether all parts came in within the budget; None if it failed for another reason than time."""
        if self.complete:
            return True
        return None if loop_time() < self.task.deadline else False

    @property
    def withheld(self) -> set[PeerId]:
        """Peers that contributed nothing in time to the parts reduced here, or gave no answer as reducers."""
        return {peer for peer, why in self._lost.items() if why.startswith(("silent", "late"))}

    def _on_chunk(self) -> None:
        self.moved = loop_time()
        self._progress()

    def assign(self, resolved: RoundPlan) -> None:
        """Take a later version of the plan, in which parts have other reducers."""
        assert isinstance(resolved, ResolvedPlan)
        if resolved is not self.task.resolved:
            answer_by = loop_time() + self.task.patience_seconds
            self.task = replace(self.task, resolved=resolved, silent=max(self.task.silent, answer_by))
            self._notifier.notify()

    def lose(self, peer: PeerId, why: str) -> None:
        self._lost.setdefault(peer, why)
        for reducer in self._reducers.values():
            reducer.lose(peer, why)

    def take_silent(self) -> list[PeerId]:
        silent, self._silent = self._silent, []
        return silent

    async def run(self) -> None:
        """Reduce and contribute until the deadline, including parts that get another reducer meanwhile."""
        async with task_group() as group:
            while loop_time() < self.task.deadline:
                resolved = self.task.resolved
                for part in range(len(resolved.plan.reducers)):
                    self._begin(group, part, resolved.reducer(part))
                self._notifier.notify()
                await self._notifier.reached(lambda: resolved is not self.task.resolved, self.task.deadline)  # noqa: B023

    def _begin(self, group: asyncio.TaskGroup, part: int, reducer: PeerId) -> None:
        """Start on a part, unless its reducer is still the same.

        A part that is already here is sent again, too: other members wait for this contribution to the new reducer.
        """
        by, job = self._jobs.get(part, (None, None))
        if by == reducer:
            return
        if job:
            job.cancel()
            self.restarted.add(part)
        self.failed.pop(part, None)
        self._reducers.pop(part, None)
        low, high = self.task.resolved.part(part)
        if low == high:
            self.take(part, _empty(self.task, part))
        elif reducer == self.task.host.me:
            self._reducers[part] = Reducer(self.task, part, self.parts.get(part))
            for peer, why in self._lost.items():
                self._reducers[part].lose(peer, why)
            self._jobs[part] = (reducer, group.create_task(self._reduce(self._reducers[part])))
        else:
            self._jobs[part] = (reducer, group.create_task(self._contribute(part, reducer)))

    async def _reduce(self, reducer: Reducer) -> None:
        held = await reducer.run()
        for peer, why in reducer.dropped.items():
            self._accounting.name(peer, why)
            if why.startswith("silent"):
                self._silent.append(peer)
            if why.startswith(("silent", "late")):
                self._lost.setdefault(peer, why)
        for peer, why in reducer.outliers.items():
            self._accounting.name(peer, why)
        self.take(reducer.index, held)

    async def _contribute(self, part: int, reducer: PeerId) -> None:
        """Exchange a part with its reducer. If the stream breaks off, ask once more for the reduced part."""
        task = self.task
        for again in (False, True):
            try:
                async with self._opened(reducer, task) as stream, self._accounting.counting(stream):
                    return self.take(part, await contribute(task, part, stream, again))
            except BadPayload:
                break
            except PeerError as error:
                if self._lost_reducer(reducer, error) or reducer in self._silent:
                    break
                self.restarted.add(part)
        self.failed[part] = reducer
        self._on_change(None)

    def _lost_reducer(self, reducer: PeerId, error: PeerError) -> bool:
        """Name a reducer whose stream broke off. Returns whether it cannot be reached: it is not asked again."""
        self._accounting.name(reducer, f"lost as a reducer: {error.why}")
        if isinstance(error, PeerGone):
            self.unreachable.add(reducer)
        return isinstance(error, PeerGone)

    @asynccontextmanager
    async def _opened(self, peer: PeerId, task: DataPhase) -> AsyncIterator[Stream]:
        """Open a stream to a reducer. One that does not answer in time counts as silent."""
        answer_by = max(task.silent, loop_time() + task.patience_seconds)
        async with AsyncExitStack() as opened:
            try:
                async with asyncio.timeout_at(answer_by):
                    opening = task.host.transport.open(peer, self._method, task.deadline)
                    stream = await opened.enter_async_context(opening)
            except TimeoutError:
                self._silent.append(peer)
                self._lost.setdefault(peer, "silent: it did not answer in time")
                raise PeerSilent(peer, "did not answer in time") from None
            yield stream

    def holds_all(self) -> bool:
        """Whether each part has something of each member that contributes."""
        weights = self.task.whole.weights
        wanted = sum(1 << index for index, weight in enumerate(weights) if weight > 0)
        masks = (functools.reduce(operator.or_, held.masks, 0) for held in self.parts.values() if held.chunks)
        return all(mask & wanted == wanted for mask in masks)

    def adopt(self, part: int, held: ReducedPart) -> None:
        self.restarted.add(part)
        self.take(part, held)

    def pass_on(self, part: int, held: ReducedPart) -> None:
        """Take note of a part that was fetched by its digest. Others wait for it here only in a clustered round."""

    def take(self, part: int, held: ReducedPart) -> None:
        self.parts[part] = held
        self.failed.pop(part, None)
        if held.chunks:
            self.finished = loop_time()
        self._on_change(held)

    def discard(self) -> None:
        """Forget all parts: nothing will ask for them any more. Streams that still send one keep it until they end."""
        self.parts.clear()
        self._reducers.clear()

    async def serve(self, peer: PeerId, stream: Stream, opening: wire.Contribute | ContributePartial) -> None:
        """Serve a member's data stream. Raises PeerSilent if this member does not reduce the part."""
        if isinstance(opening, ContributePartial):
            raise BadPayload("the work of a cluster, in a round without clusters")
        self._check_codec(opening.codec)
        deadline = min(stream.deadline, self.task.deadline)
        if not await self._notifier.reached(lambda: opening.part in self._reducers, deadline):
            raise PeerSilent(peer, f"part {opening.part} is not reduced here")
        await self._reducers[opening.part].serve(peer, stream)

    def _check_codec(self, name: str) -> None:
        codec = self.task.format.codec
        if name != codec.name:
            raise BadPayload(f"codec {name!r} where the run uses {codec.name}")


def _empty(task: DataPhase, part: int) -> ReducedPart:
    held = task.part(part)
    held.done = wire.PartDone(part, task.whole.plan.reducers[part], held.seal([]), b"")
    return held


class Reducer:
    """Averages one part. `run` closes its chunks; `serve` answers one member's stream.

    Contributions are those of the peers of a plan, in its order. This peer's own one is taken from `DataPhase.mine`.
    """

    pace: Pace | None = None  # when a chunk is closed without the slowest; None: only when they are late

    def __init__(self, task: DataPhase, index: int, part: ReducedPart | None = None) -> None:
        """A part that is complete is only served."""
        self.task, self.index = task, index
        self.part = part or task.part(index)
        self._contribution = task.contribution(index)
        self.dropped: dict[PeerId, str] = {}  # members whose contribution is not complete, and why
        self.outliers: dict[PeerId, str] = {}  # members whose contribution was unlike the others', and how
        self._plan, self._own = self._contributors()
        self._judge = RobustAggregator(self._plan.robust, self._plan.allowances)
        self._order = {peer: index for index, peer in enumerate(self._plan.peers)}
        self._chunks = self.part.chunks
        self._contributing = [peer for peer, weight in zip(self._order, self._plan.weights, strict=True) if weight > 0]
        self._expected = [peer for peer in self._contributing if peer != self._own]
        self._served: set[PeerId] = set()
        self._inbox: dict[int, dict[PeerId, memoryview]] = {index: {} for index in range(self._chunks)}
        self._free: list[memoryview] = []
        self._squares = dict.fromkeys(self._order, 0.0)
        self._masks = self.part.masks
        self._digests: list[bytes] = []
        self.notifier = Notifier()  # of each chunk that comes in or is closed
        self._scratch = torch.empty(0)
        self._began = loop_time()
        self._enough_seconds: dict[int, float] = {}  # chunk -> when enough members had sent it, for `pace`

    def _contributors(self) -> tuple[RoundPlan, PeerId | None]:
        """The plan of those that contribute, and which of them is this peer."""
        return self.task.resolved, self.task.host.me

    async def run(self) -> ReducedPart:
        """Close every chunk, without members that are silent or late, and sign the part."""
        if self.part.done:
            return self.part
        await self._close_chunks()
        task, result = self.task, self.part.seal(self._digests)
        done = wire.PartDone(self.index, task.whole.plan.reducers[self.index], result, b"")
        self.part.done = replace(done, signature=task.host.signer.sign(task.message(done)))
        self.notifier.notify()
        return self.part

    async def _close_chunks(self) -> None:
        rows = len(self._contributing) + 1  # one for the mean
        self._scratch = torch.empty(rows, min(self.part.chunk_elements, self.part.high - self.part.low))
        late = self._late()
        for index in range(self._chunks):
            if not await self._gather_in(index, late):
                # The window held up the other members behind the late ones, so they get a share of the time left.
                late = self._late()
            cost_bytes = 4 * self._scratch.numel()
            mask, refused = await self.task.host.compute.run(partial(self._close, index), cost_bytes)
            for peer, why in refused.items():
                self.lose(peer, why)  # before the chunk is closed, since `lose` ignores peers once all chunks are
            self._masks.append(mask)
            self._free.extend(self._inbox.pop(index).values())
            self.task.progress()
            self.notifier.notify()
        self._scratch, self._free = torch.empty(0), []
        self.outliers = {self._plan.peers[member]: why for member, why in self._judge.named().items()}

    def lose(self, peer: PeerId, why: str) -> None:
        """Wait for nothing more from a member. The whole chunks that it sent still count."""
        if peer in self._expected and peer not in self.dropped and len(self._masks) < self._chunks:
            self.dropped[peer] = why
            self.notifier.notify()

    async def closed(self, index: int) -> bool:
        """Wait until a chunk is averaged; False at the deadline."""
        return await self.notifier.reached(lambda: index < len(self._masks), self.task.deadline)

    async def serve(self, peer: PeerId, stream: Stream) -> None:
        """Receive the contribution of `peer`, on a stream of its or, in a clustered round, of its aggregator, and send
        back the reduced part; on a second stream, only send the part.
        """
        if peer not in self._order:
            raise BadPayload("not in the plan")
        first = peer not in self._served
        self._served.add(peer)
        self.notifier.notify()
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
                await self.notifier.until(lambda: index < len(self._masks) + WINDOW_CHUNKS, self.task.deadline)  # noqa: B023
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
        size = await self._receive_header(peer, stream, index)
        whole = self._free.pop() if self._free else self.part.pool.take(self._largest_bytes())
        await stream.receive_into(whole[:size])
        if peer in self.dropped:
            self._free.append(whole)
            return
        self._inbox[index][peer] = whole
        self.notifier.notify()

    async def _receive_header(self, peer: PeerId, stream: Stream, index: int) -> int:
        """Receive the header of the chunk that is due from a member. Returns the size of its payload."""
        size = self._contribution.size(index)
        return due(await stream.receive(HEADER_LIMIT), wire.Chunk, index, size).size

    def _largest_bytes(self) -> int:
        """The size of the largest chunk that any member sends."""
        return self._contribution.size(0)

    def _late(self) -> Deadline:
        now = loop_time()
        return now + SCATTER_SHARE * (self.task.deadline - now)

    async def _gather_in(self, index: int, late: Deadline) -> bool:
        """Wait for a chunk of every member; False if a member was silent or late, and is left out."""
        in_time = True
        while self._missing(index):
            limit = until, why = self._limit(index, late)

            def has_changed() -> bool:
                return not self._missing(index) or self._limit(index, late) != limit  # noqa: B023 - awaited here

            if not await self.notifier.reached(has_changed, until):
                in_time = False
                for peer in self._missing(index):
                    if why == "late" or peer not in self._served:
                        self.lose(peer, f"{why}: chunk {index} of {self._chunks} was not in")
        return in_time

    def _missing(self, index: int) -> list[PeerId]:
        inbox = self._inbox[index]
        return [peer for peer in self._expected if peer not in inbox and peer not in self.dropped]

    def _limit(self, index: int, late: Deadline) -> tuple[Deadline, str]:
        """Until when to wait for what is missing of a chunk, and what those are that are left out then."""
        missing = self._missing(index)
        silent = any(peer not in self._served for peer in missing)
        until, why = (self.task.silent, "silent") if silent else (late, "late")
        if self.pace:
            expected = sum(peer not in self.dropped for peer in self._expected)
            if expected - len(missing) >= self.pace.enough(expected):
                took = self._enough_seconds.setdefault(index, loop_time() - self._began)
                return min((until, why), (self._began + self.pace.until(took), "late"))
        return until, why

    def _close(self, index: int) -> tuple[int, dict[PeerId, str]]:
        """Decode, check, average and encode one chunk, outside the event loop. Returns its mask, and the refused
        members.
        """
        low, high = self.part.elements(index)
        data, scratch = self.part.chunk(index), self._scratch[-1, : high - low]
        mean = self.part.vector_for(data, scratch)
        taken, refused = self._decoded(index)
        if taken:
            self._average(index, taken, mean)
        else:
            mean.zero_()
        self.part.codec.encode(mean, data)
        mask = sum(1 << order for order, _, _ in taken)
        self._on_encoded(index, mask, scratch)
        return mask, refused

    def _on_encoded(self, index: int, mask: int, scratch: Vector) -> None:
        self.part.decode_chunk(index, self.task.into, scratch)  # so this member has the same bits as the others
        self._digests.append(self.part.digest_of(index, mask))

    def _decoded(self, index: int) -> tuple[list[tuple[int, Vector, float]], dict[PeerId, str]]:
        """Decode the contributions to a chunk. Returns those that count, and the refused members with reasons.

        A contribution is its member's index in the plan, its elements, and an estimate of their norm.
        """
        inbox, (low, high) = self._inbox[index], self.part.elements(index)
        taken, refused = list[tuple[int, Vector, float]](), dict[PeerId, str]()
        for peer in self._contributing:
            if peer != self._own and (peer not in inbox or peer in self.dropped):
                continue
            try:
                taken.append((self._order[peer], *self._decode(peer, index, self._scratch[len(taken), : high - low])))
            except BadPayload as error:
                refused[peer] = f"refused: {error}"
        return taken, refused

    def _average(self, index: int, taken: Sequence[tuple[int, Vector, float]], into: Vector) -> None:
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
        if peer == self._own:
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
        await send_part(stream, self.part, self.notifier, self.task.deadline)


async def send_part(stream: Stream, part: ReducedPart, notifier: Notifier, deadline: Deadline) -> None:
    """Send a part chunk by chunk as it is filled, and the reducer's statement. `TimeoutError` at the deadline."""
    for index in range(part.chunks):
        await notifier.until(lambda: index < len(part.masks), deadline)  # noqa: B023 - awaited here
        data, members = part.chunk(index), part.members[index] if part.clusters else b""
        await stream.send(wire.Reduced(index, part.masks[index], len(data), members), data)
    await notifier.until(lambda: part.done is not None, deadline)
    assert part.done is not None
    await stream.send(part.done)


async def contribute(task: DataPhase, part: int, stream: Stream, again: bool = False) -> ReducedPart:
    """Send this member's contribution to one part to its reducer, and receive the reduced part; only receive if
    `again`.
    """
    held = task.part(part)
    await stream.send(wire.Contribute(task.key, task.resolved.digest, part, task.format.codec.name))
    receiving = receive_part(task, held, stream)
    done = await (receiving if again else run_with_helper(receiving, _send_part(task, part, stream)))
    task.check_part(part, held, done)
    held.done = done
    return held


async def _send_part(task: DataPhase, part: int, stream: Stream) -> None:
    if task.resolved.weights[task.resolved.peers.index(task.host.me)] == 0:
        return
    # A reducer that gave this peer up as late closes the stream once it has sent its part. If it is lost instead,
    # the receiving side raises.
    with suppress(PeerSilent):
        await send_vector(stream, task.contribution(part), task.mine, task.host.compute)


async def receive_part(task: DataPhase, held: ReducedPart, stream: Stream) -> wire.PartDone:
    """Receive the reduced chunks into `held`, decode them into the mean, and seal the part. Returns the reducer's
    statement, which is neither verified nor compared with the part.
    """
    digests: list[bytes] = []
    scratch = held.scratch_vector()

    def accept(reduced: wire.Reduced) -> bytes:
        held.decode_chunk(reduced.index, task.into, scratch)
        return held.digest_of(reduced.index, reduced.mask, reduced.members)

    for index in range(held.chunks):
        data = held.chunk(index)
        reduced = due(await stream.receive(HEADER_LIMIT), wire.Reduced, index, len(data))
        task.check_chunk(reduced, held)
        await stream.receive_into(data)
        held.append(reduced.mask, reduced.members)
        digests.append(await task.host.compute.run(partial(accept, reduced), 2 * len(data)))
        task.progress()
    done = wire.expect(await stream.receive(wire.MAX_HEADER_BYTES), wire.PartDone)
    held.seal(digests)
    return done
