"""One microbatch in a chain: replicas pass its activations and gradients on, and the driver keeps choice and leases.

The driver sends the first input and the targets. It asks for the place of the next stage while a stage computes, and
tells the stage where its output goes. Whatever fails before the last stage may have its input is repeated at another
replica: the stage before still has its output. After that the microbatch is abandoned, as in a star.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from protocols.aio import loop_time, peer_timeout, raise_when_gone, run_with_helper
from protocols.base import BadPayload, Buffer, Deadline, Header, Member, PeerError, PeerSilent
from protocols.pipeline.calls import ANSWER_SECONDS, Abandoned, Call, CallStreams
from protocols.pipeline.job import JobKind, Payload
from protocols.pipeline.messages import (
    HEADER_LIMIT,
    HopFailed,
    JobDone,
    JobInput,
    JobOutput,
    LeaseVoid,
    NextHop,
)
from protocols.pipeline.routing import ReplicaRouter
from protocols.pipeline.settings import (
    CALL_FLOOR_SECONDS,
    CALL_LIMIT_SECONDS,
    CALL_MULTIPLE,
    MAX_FAILURES,
    PipelineSettings,
)
from protocols.pipeline.ways import BrokenPairs
from protocols.streams.endpoint import ProtocolEndpoint

MAX_FRAMES = 4 + 2 * MAX_FAILURES
"""That a replica sends about one microbatch: it may tell of a failed hop to each replica of the next stage."""


class ChainDriver(Protocol):
    """What a chain uses of the driver."""

    endpoint: ProtocolEndpoint
    settings: PipelineSettings
    check: Callable[[Buffer, Payload], None]
    routers: dict[int, ReplicaRouter]
    pairs: BrokenPairs


_Event: TypeAlias = "tuple[_Link, Header | PeerError | BadPayload, Buffer]"


@dataclass(slots=True, eq=False)
class _Link:
    """A replica of the chain."""

    call: Call
    asked_at: float
    granted_at: float
    input_at: float | None = None  # since when its input is on its way
    is_driven: bool = False  # its input comes from the driver, so its gradient goes there
    next: bytes | None = None  # the ticket of the replica that it sends its output to; b"": the driver
    output: Buffer | None = None  # that came to the driver
    has_forwarded: bool = False
    is_over: bool = False  # nothing more comes, and its stream may be used for another microbatch
    listener: asyncio.Task[None] = field(init=False)

    @property
    def seconds(self) -> float:
        """Its own time so far: for a place, and from its input on. It may have had its place long before that."""
        return self.granted_at - self.asked_at + loop_time() - max(self.granted_at, self.input_at or 0.0)


class ChainedMicrobatch:
    """A context: when it is left, all that is not over is reset, and so the leases end.

    `granted` asks for a place in a stage; `while_live` runs something no longer than a replica is live.
    """

    def __init__(
        self,
        driver: ChainDriver,
        streams: CallStreams,
        *,
        granted: Callable[[int], Awaitable[tuple[Call, float]]],
        while_live: Callable[[int, Member, Coroutine[Any, Any, None]], Coroutine[Any, Any, None]],
        deadline: Deadline,
    ) -> None:
        self._driver, self._streams, self._settings = driver, streams, driver.settings
        self._granted, self._while_live, self._deadline = granted, while_live, deadline
        self._links: list[_Link] = []
        self._events: asyncio.Queue[_Event] = asyncio.Queue()
        self._failures: Counter[int] = Counter()
        self._x: Buffer = b""
        self._targets: Buffer = b""
        self._may_count = False  # whether the last stage may have its input
        self._gradient: Buffer | None = None
        self._loss: float | None = None

    async def __aenter__(self) -> ChainedMicrobatch:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._cut(0)

    async def through(self, x: Buffer, targets: Buffer) -> tuple[Buffer, float]:
        """The gradient of `x`, which stage 1 has counted by then, and the loss. Raises `Abandoned`."""
        self._x, self._targets = x, targets
        while self._gradient is None or self._loss is None:
            if self._is_next_due():
                await self._extend()
            else:
                await self._handle(*await self._event())
        return self._gradient, self._loss

    # -- forwards -----------------------------------------------------------------------------------------------------

    def _is_next_due(self) -> bool:
        """The place of a stage is asked for as soon as the input of the stage before is on its way."""
        links = self._links
        return not links or (len(links) < self._settings.last and links[-1].input_at is not None)

    async def _extend(self) -> None:
        stage = len(self._links) + 1
        call, asked_at = await self._granted(stage)
        link = _Link(call, asked_at, loop_time())
        link.listener = asyncio.get_running_loop().create_task(self._listen(link))
        self._links.append(link)
        if stage == self._settings.last:
            await self._send(link, JobInput(JobKind.LOSS.value, 0), self._targets)
        if stage == 1:
            await self._give(link, self._x)
        else:
            await self._join(self._links[-2], link)

    async def _join(self, before: _Link, link: _Link) -> None:
        """Let a replica send its output to the next one, if it can."""
        driver, now = self._driver, loop_time()
        if before.next != b"":
            if driver.pairs.has(before.call.member, link.call.member, now):
                await self._bring(before, link)
                return
            before.next = link.call.ticket
            self._may_count |= link.call.stage == self._settings.last
            link.input_at = now if before.has_forwarded else None
            await self._send(before, NextHop(link.call.member, link.call.ticket))
        elif before.output is not None:
            await self._give(link, before.output)
        else:
            link.is_driven = True

    async def _bring(self, before: _Link, link: _Link) -> None:
        """Carry an output to the next stage as in a star."""
        before.next, link.is_driven = b"", True
        await self._send(before, NextHop(self._driver.endpoint.me, b""))

    async def _give(self, link: _Link, x: Buffer) -> None:
        link.is_driven, link.input_at = True, loop_time()
        self._may_count |= link.call.stage == self._settings.last
        await self._send(link, JobInput(JobKind.FORWARD.value, 0), x)

    async def _send(self, link: _Link, header: Header, payload: Buffer = b"") -> None:
        """Send to a replica. That it failed is an event."""
        member = link.call.member
        watch = raise_when_gone(self._driver.endpoint.host.members, member, loop_time() + CALL_LIMIT_SECONDS)
        try:
            await run_with_helper(link.call.stream.send(header, payload), watch)
        except PeerError as error:
            self._events.put_nowait((link, error, b""))

    # -- what comes ---------------------------------------------------------------------------------------------------

    async def _listen(self, link: _Link) -> None:
        try:
            await self._while_live(link.call.stage, link.call.member, self._read(link))
        except (PeerError, BadPayload) as error:
            self._events.put_nowait((link, error, b""))

    async def _read(self, link: _Link) -> None:
        stream = link.call.stream
        for _ in range(MAX_FRAMES):
            header, payload = await stream.receive(HEADER_LIMIT), bytearray()
            if isinstance(header, JobOutput):
                is_output = link.next == b"" and link.output is None
                kind = Payload.ACTIVATION if is_output else Payload.GRADIENT
                if not is_output and not link.is_driven:
                    raise BadPayload("a gradient that the stage before should have got")
                payload = bytearray(self._settings.sizes.of(kind))
                await stream.receive_into(memoryview(payload))
                self._driver.check(payload, kind)
                link.is_over = not is_output
                if is_output:
                    link.output = payload
            elif isinstance(header, JobDone):
                link.is_over = header.kind != JobKind.FORWARD.value
            elif isinstance(header, LeaseVoid):
                link.is_over = True
            elif not isinstance(header, HopFailed):
                raise BadPayload(f"{type(header).__name__} from a replica of a chain")
            self._events.put_nowait((link, header, payload))
            if link.is_over:
                return
        raise BadPayload(f"more than {MAX_FRAMES} frames about one microbatch")

    async def _event(self) -> _Event:
        """The next event; if none comes for too long, that the replica is silent whose turn it is."""
        if loop_time() >= self._deadline:
            raise Abandoned("it took too long")
        due = self._due()
        usual = self._driver.routers[due.call.stage].usual_seconds(due.call.member.peer)
        seconds = min(max(CALL_FLOOR_SECONDS, CALL_MULTIPLE * usual), CALL_LIMIT_SECONDS)
        try:
            async with peer_timeout(min(seconds, self._deadline - loop_time()), due.call.member.peer, "computing"):
                return await self._events.get()
        except PeerSilent as error:
            return due, error, b""

    def _due(self) -> _Link:
        """The replica that is to speak next: the first without its forward, or the last without its backward."""
        waiting = [link for link in self._links if not link.has_forwarded]
        working = [link for link in reversed(self._links) if not link.is_over]
        return (waiting or working or self._links)[0]

    async def _handle(self, link: _Link, what: Header | PeerError | BadPayload, payload: Buffer) -> None:
        if link not in self._links:  # given up meanwhile
            return
        match what:
            case JobDone(kind, loss):
                if not self._job_done(link, kind, loss):
                    await self._lose(link, BadPayload(f"{kind!r} of a stage that has another job"))
            case JobOutput(loss):
                await self._take_output(link, loss, payload)
            case HopFailed():
                await self._hop_failed(link, what)
            case LeaseVoid(why):
                await self._void(link, why)
            case PeerError() | BadPayload():
                await self._lose(link, what)

    def _job_done(self, link: _Link, kind: str, loss: float) -> bool:
        """False if it cannot have done that, with its result given to another replica."""
        is_last = link.call.stage == self._settings.last
        if kind == JobKind.FORWARD.value and not is_last:
            self._has_forwarded(link)
            return True
        if is_last:
            self._has_loss(link, loss)
        return not link.is_driven and kind == (JobKind.LOSS if is_last else JobKind.BACKWARD).value

    async def _take_output(self, link: _Link, loss: float, payload: Buffer) -> None:
        """An output or a gradient that the driver carries on."""
        index = self._links.index(link)
        if payload is link.output:
            if index + 1 < len(self._links):
                await self._give(self._links[index + 1], payload)
            return
        if link.call.stage == self._settings.last:
            self._has_loss(link, loss)
        if index == 0:
            self._gradient = payload
        else:
            await self._send(self._links[index - 1], JobInput(JobKind.BACKWARD.value, 0), payload)

    def _has_forwarded(self, link: _Link) -> None:
        link.has_forwarded = True
        self._driver.routers[link.call.stage].succeeded(link.call.member.peer, link.seconds)
        index = self._links.index(link)
        if index + 1 < len(self._links) and self._links[index + 1].input_at is None:
            self._links[index + 1].input_at = loop_time()

    def _has_loss(self, link: _Link, loss: float) -> None:
        """The last stage has its loss."""
        self._loss = loss
        link.has_forwarded = True
        self._driver.routers[link.call.stage].succeeded(link.call.member.peer, link.seconds)

    # -- failures -----------------------------------------------------------------------------------------------------

    async def _hop_failed(self, link: _Link, what: HopFailed) -> None:
        index, now = self._links.index(link), loop_time()
        if what.ticket == link.call.ticket and index and not link.is_driven:
            # it has refused its input, which is the fault of the stage before
            self._may_count = False
            await self._lose(self._links[index - 1], PeerSilent(link.call.member.peer, f"its input: {what.why}"))
            return
        if what.ticket != link.next or index + 1 >= len(self._links):
            return  # of an earlier hop
        following = self._links[index + 1]
        if what.reached:
            await self._replace(following, f"a hop to stage {following.call.stage} broke: {what.why}")
            return
        self._driver.pairs.add(link.call.member, following.call.member, now)
        self._may_count &= following.call.stage != self._settings.last
        await self._bring(link, following)

    async def _void(self, link: _Link, why: str) -> None:
        """It has not counted the microbatch. Those after it may have, if it has forwarded it."""
        if link.has_forwarded:
            raise Abandoned(why)
        self._may_count = False
        await self._replace(link, why)

    async def _lose(self, link: _Link, error: PeerError | BadPayload) -> None:
        self._driver.routers[link.call.stage].failed(link.call.member.peer, loop_time(), link.seconds)
        await self._streams.reset(link.call, error)
        why = f"stage {link.call.stage} may have counted it: {error}"
        if self._may_count and link is self._links[-1]:
            raise Abandoned(why)
        await self._replace(link, why)

    async def _replace(self, link: _Link, why: str) -> None:
        """Look for another replica, unless the last stage may have counted the microbatch. Raises `Abandoned`."""
        if self._may_count and not await self._is_given_up():
            raise Abandoned(why)
        stage = link.call.stage
        self._failures[stage] += 1
        if self._failures[stage] >= MAX_FAILURES:
            raise Abandoned(f"{MAX_FAILURES} calls to stage {stage} failed")
        await self._cut(stage - 1)

    async def _is_given_up(self) -> bool:
        """Ask the last stage to give the microbatch up. Whether it has, and so has not counted it and will not."""
        last, others = self._links[-1], []
        if last.is_over:
            return False
        await self._send(last, LeaseVoid("another stage failed"))
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                while (event := await self._events.get())[0] is not last:
                    others.append(event)
        except TimeoutError:
            return False
        for each in others:
            self._events.put_nowait(each)
        self._may_count = not isinstance(event[1], LeaseVoid)
        return not self._may_count

    async def _cut(self, index: int) -> None:
        """Give up the replicas from this one on."""
        links, self._links = self._links[index:], self._links[:index]
        for link in links:
            link.listener.cancel()
        for ended in await asyncio.gather(*(link.listener for link in links), return_exceptions=True):
            if isinstance(ended, Exception):
                raise ended
        for link in links:
            if not link.is_over:
                await self._streams.reset(link.call)
        if self._links and self._links[-1].next:
            self._links[-1].next = None
