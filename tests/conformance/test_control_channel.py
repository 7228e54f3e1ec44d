"""The control channel in each world: one lasting stream per pair of peers, which loses nothing when it breaks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

import pytest

from protocols import wire
from protocols.base import PeerId, PeerSilent, Settings, Stream
from protocols.streams.endpoint import ControlChannel, ProtocolEndpoint
from tests.conformance.hosts import host
from tests.conformance.worlds import GENEROUS_SECONDS, Peers, World, soon
from tests.support.waiting import until

NOTICED_SECONDS = 3.0
METHOD = "post"


class Listener:
    """The other end of control streams. A `deaf` listener accepts streams and reads nothing.

    Attributes:
        heard: of each stream, the numbers of its messages in order of arrival.
        ended: how many streams have ended.
    """

    def __init__(self, deaf: bool = False) -> None:
        self.heard: list[list[int]] = []
        self.ended = 0
        self.deaf = deaf

    def has_heard(self, count: int) -> Callable[[], bool]:
        return lambda: self.heard == [list(range(count))]

    async def __call__(self, peer: PeerId, stream: Stream) -> None:
        mine: list[int] = []
        self.heard.append(mine)
        while self.deaf:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        try:
            while True:
                mine.append(wire.expect(await stream.receive(wire.MAX_HEADER_BYTES), wire.Chunk).index)
        except PeerSilent:
            self.ended += 1


def send(channel: ControlChannel, peer: PeerId, numbers: Sequence[int]) -> None:
    for number in numbers:
        channel.send(peer, wire.Chunk(number, 0))


@asynccontextmanager
async def running(channel: ControlChannel, peers: Peers) -> AsyncIterator[None]:
    """Inside, messages are carried; at the end all tasks must end at once."""
    others = [transport.me for transport in peers.transports[1:]]
    async with asyncio.timeout(3 * GENEROUS_SECONDS), asyncio.TaskGroup() as group:
        async with channel.run(group, soon(3 * GENEROUS_SECONDS), others):
            yield
        left = asyncio.get_running_loop().time()
    assert asyncio.get_running_loop().time() - left < NOTICED_SECONDS


def play(
    world: World, listener: Callable[[], Listener], body: Callable[[Peers, ControlChannel, Listener], Awaitable[None]]
) -> None:
    """Run `body` with a control channel at the first of two peers and a listener at the second."""

    async def whole(peers: Peers) -> None:
        hears = listener()
        peers.transports[1].serve(METHOD, hears)
        await body(peers, ControlChannel(ProtocolEndpoint(host(peers, 0), Settings("fp32", (8,))), METHOD), hears)

    world.run(whole)


def test_messages_arrive_in_order_on_one_stream(world: World) -> None:
    async def body(peers: Peers, channel: ControlChannel, listener: Listener) -> None:
        b = peers.transports[1].me
        async with running(channel, peers):
            for first in range(0, 200, 50):
                send(channel, b, range(first, first + 50))
                await until(listener.has_heard(first + 50))
        assert listener.heard == [list(range(200))]
        assert channel.round_trip_seconds.keys() == {b}

    play(world, Listener, body)


def test_idle_stream_stays_open(world: World) -> None:
    async def body(peers: Peers, channel: ControlChannel, listener: Listener) -> None:
        gone: list[PeerId] = []
        channel.on_gone = gone.append
        async with running(channel, peers):
            for number in range(3):
                send(channel, peers.transports[1].me, [number])
                await until(listener.has_heard(number + 1))
                await asyncio.sleep(2)
        assert (listener.heard, gone) == ([[0, 1, 2]], [])

    play(world, Listener, body)


def test_sent_messages_arrive_before_close(world: World) -> None:
    async def body(peers: Peers, channel: ControlChannel, listener: Listener) -> None:
        async with running(channel, peers):
            send(channel, peers.transports[1].me, range(60))
            await until(lambda: bool(listener.heard))
            await asyncio.sleep(0.5)
        await until(lambda: listener.ended == 1)
        assert listener.heard == [list(range(60))]

    play(world, Listener, body)


def test_messages_queued_at_shutdown_are_sent_after_restart(world: World) -> None:
    async def body(peers: Peers, channel: ControlChannel, listener: Listener) -> None:
        b = peers.transports[1].me
        async with running(channel, peers):
            send(channel, b, [0])
            await until(lambda: listener.heard == [[0]])
        send(channel, b, [1, 2])
        await until(lambda: listener.ended == 1)
        assert listener.heard == [[0]]
        async with running(channel, peers):
            await until(lambda: listener.heard[1:] == [[1, 2]])

    play(world, Listener, body)


def test_killed_peer_is_noticed_without_traffic(world: World) -> None:
    async def body(peers: Peers, channel: ControlChannel, listener: Listener) -> None:
        gone: list[PeerId] = []
        channel.on_gone = gone.append
        b = peers.transports[1].me
        async with running(channel, peers):
            send(channel, b, [0])
            await until(lambda: listener.heard == [[0]])
            await peers.kill_peer(1)
            assert await until(lambda: bool(gone)) < NOTICED_SECONDS
        assert set(gone) == {b}

    play(world, Listener, body)


@pytest.mark.parametrize("whose", [0, 1], ids=["senders", "receivers"])
def test_messages_on_broken_stream_are_resent(world: World, whose: int) -> None:
    async def body(peers: Peers, channel: ControlChannel, listener: Listener) -> None:
        b = peers.transports[1].me
        async with running(channel, peers):
            send(channel, b, range(5))
            await until(lambda: bool(listener.heard))
            await asyncio.sleep(0.5)  # all five have been sent
            listener.deaf = False
            deafened, listener.heard = listener.heard, []
            await peers.break_streams(whose)
            send(channel, b, [5])
            await until(lambda: bool(listener.heard) and 5 in listener.heard[-1])
        assert listener.heard[-1] == [0, 1, 2, 3, 4, 5], deafened

    play(world, lambda: Listener(deaf=True), body)
