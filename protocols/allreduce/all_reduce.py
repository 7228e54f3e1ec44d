"""The data phase of one plan at one member: it reduces its own parts, and exchanges the others with their reducers.

A part whose reducer is lost may be given to another member. Then the contributors send it again, to that member.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

from protocols import wire
from protocols.aio import Notifier, loop_time, task_group
from protocols.allreduce.parts import DataPhase, ReducedPart
from protocols.allreduce.plan import ResolvedPlan
from protocols.allreduce.reducer import Reducer, contribute
from protocols.base import BadPayload, Host, PeerError, PeerGone, PeerId, PeerSilent, Settings, Stream
from protocols.streams.endpoint import RoundAccounting

DATA = "starling/butterfly/data/1"
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
        host: Host,
        accounting: RoundAccounting,
        task: DataPhase,
        on_change: Callable[[ReducedPart | None], None],
        method: str = DATA,
    ) -> None:
        self._method = method
        self.task = replace(task, progress=self._on_chunk)
        self.parts: dict[int, ReducedPart] = {}  # decoded, unless `restarted`
        self.failed: dict[int, PeerId] = {}  # part -> the reducer from which this member could not get it
        self.restarted: set[int] = set()  # parts begun twice: chunks of both results may have been decoded
        self.finished = 0.0  # when the latest part came in
        self.moved = loop_time()  # when the latest chunk came in
        self._progress = task.progress
        self._host, self._accounting, self._on_change = host, accounting, on_change
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

    def assign(self, resolved: ResolvedPlan) -> None:
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
        elif reducer == self.task.me:
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
                self._accounting.name(reducer, f"lost as a reducer: {error.why}")
                if isinstance(error, PeerGone) or reducer in self._silent:
                    break
                self.restarted.add(part)
        self.failed[part] = reducer
        self._on_change(None)

    @asynccontextmanager
    async def _opened(self, peer: PeerId, task: DataPhase) -> AsyncIterator[Stream]:
        """Open a stream to a reducer. One that does not answer in time counts as silent."""
        answer_by = max(task.silent, loop_time() + task.patience_seconds)
        async with AsyncExitStack() as opened:
            try:
                async with asyncio.timeout_at(answer_by):
                    opening = self._host.transport.open(peer, self._method, task.deadline)
                    stream = await opened.enter_async_context(opening)
            except TimeoutError:
                self._silent.append(peer)
                self._lost.setdefault(peer, "silent: it did not answer in time")
                raise PeerSilent(peer, "did not answer in time") from None
            yield stream

    def adopt(self, part: int, held: ReducedPart) -> None:
        self.restarted.add(part)
        self.take(part, held)

    def take(self, part: int, held: ReducedPart) -> None:
        self.parts[part] = held
        self.failed.pop(part, None)
        self.finished = loop_time()
        self._on_change(held)

    def discard(self) -> None:
        """Forget all parts: nothing will ask for them any more. Streams that still send one keep it until they end."""
        self.parts.clear()
        self._reducers.clear()

    async def serve(self, peer: PeerId, stream: Stream, opening: wire.Contribute) -> None:
        """Serve a member's data stream. Raises PeerSilent if this member does not reduce the part."""
        codec = self.task.format.codec
        if opening.codec != codec.name:
            raise BadPayload(f"codec {opening.codec!r} where the run uses {codec.name}")
        deadline = min(stream.deadline, self.task.deadline)
        if not await self._notifier.reached(lambda: opening.part in self._reducers, deadline):
            raise PeerSilent(peer, f"part {opening.part} is not reduced here")
        await self._reducers[opening.part].serve(peer, stream)


def _empty(task: DataPhase, part: int) -> ReducedPart:
    held = task.part(part)
    held.done = wire.PartDone(part, task.resolved.plan.reducers[part], held.seal([]), b"")
    return held
