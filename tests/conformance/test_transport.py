"""What every `Transport` must do: one suite, run over each world of `tests.conformance.worlds`.

Deadlines are generous, because a world may be slow. A deadline that must strike is short, and it may strike late.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from protocols import wire
from protocols.base import BadPayload, PeerError, PeerGone, PeerId, PeerSilent, Stream
from tests.conformance.streams import (
    LIMIT,
    MIB,
    SHORT_SECONDS,
    Broken,
    Probe,
    ask_echo,
    echo,
    noise,
    pipe_of,
    receive_bytes,
    send_bytes,
    strikes,
)
from tests.conformance.worlds import GENEROUS_SECONDS, Peers, in_each_world, soon


class TestDelivery:
    @in_each_world()
    async def test_order_is_kept_and_bytes_counted(self, peers: Peers) -> None:
        a, b = peers.transports
        probe = Probe.at(b)
        async with a.open(b.me, "probe", soon()) as stream:
            other = await probe.stream()
            assert (stream.peer, other.peer) == (b.me, a.me) and (await probe.opened)[0] == a.me
            received = other.bytes_received
            for index in range(1, 200):
                await send_bytes(stream, noise(index, index), index)
            for index in range(1, 200):
                assert await receive_bytes(other) == (index, noise(index, index))
            assert other.bytes_received == stream.bytes_sent > received
            await send_bytes(other, b"back")
            assert await receive_bytes(stream) == (0, b"back")
            assert stream.bytes_received == other.bytes_sent
            probe.may_end.set()

    @in_each_world()
    async def test_large_payload_arrives_unchanged(self, peers: Peers) -> None:
        a, b = peers.transports
        b.serve("echo", echo)
        data = noise(9 * MIB + 12_345)
        async with a.open(b.me, "echo", soon()) as stream, asyncio.TaskGroup() as tasks:
            tasks.create_task(send_bytes(stream, data))
            assert await receive_bytes(stream) == (0, data)

    @in_each_world()
    async def test_buffer_may_be_reused_after_send(self, peers: Peers) -> None:
        a, b = peers.transports
        probe = Probe.at(b)
        buffer = bytearray(MIB // 2)

        async def sends(stream: Stream) -> None:
            for index in range(20):
                buffer[:] = bytes([index]) * len(buffer)
                await stream.send(wire.Chunk(index, len(buffer)), memoryview(buffer))

        async with a.open(b.me, "probe", soon()) as stream, asyncio.TaskGroup() as tasks:
            other = await probe.stream()
            tasks.create_task(sends(stream))
            for index in range(20):
                assert await receive_bytes(other) == (index, bytes([index]) * len(buffer))
            probe.may_end.set()

    @in_each_world()
    async def test_unread_bytes_in_flight_are_bounded(self, peers: Peers) -> None:
        a, b = peers.transports
        probe = Probe.at(b)
        piece, sent = noise(MIB), 0
        async with strikes(2.0), a.open(b.me, "probe", soon(2.0)) as stream:
            while sent < 200 * MIB:
                await send_bytes(stream, piece)
                sent += len(piece)
        probe.may_end.set()
        assert sent <= 64 * MIB

    @in_each_world()
    async def test_opener_exit_delivers_sent_bytes(self, peers: Peers) -> None:
        a, b = peers.transports
        got: asyncio.Future[list[bytes]] = asyncio.get_running_loop().create_future()

        async def slow(peer: PeerId, stream: Stream) -> None:
            await send_bytes(stream, b"the opener never reads this")
            parts = []
            for _ in range(8):
                await asyncio.sleep(0.02)
                parts.append((await receive_bytes(stream))[1])
            got.set_result(parts)

        b.serve("slow", slow)
        parts = [noise(MIB // 4, seed) for seed in range(8)]
        async with a.open(b.me, "slow", soon()) as stream:
            for part in parts:
                await send_bytes(stream, part)
        async with asyncio.timeout(GENEROUS_SECONDS):
            assert await got == parts

    @in_each_world()
    async def test_early_handler_return_delivers_answer(self, peers: Peers) -> None:
        a, b = peers.transports

        async def busy(peer: PeerId, stream: Stream) -> None:
            await send_bytes(stream, b"busy")

        b.serve("busy", busy)
        for _ in range(20):
            async with a.open(b.me, "busy", soon()) as stream:
                await send_bytes(stream, noise(MIB // 8))
                await asyncio.sleep(0.01)
                assert await receive_bytes(stream) == (0, b"busy")
                with pytest.raises(PeerSilent):
                    await stream.receive(LIMIT)

    @in_each_world(count=3)
    async def test_many_concurrent_streams_both_ways(self, peers: Peers) -> None:
        a, b, c = peers.transports
        for transport in peers.transports:
            transport.serve("echo", echo)
        async with asyncio.TaskGroup() as tasks:
            for seed in range(15):
                for x, y in ((a, b), (b, a), (b, c), (c, a)):
                    tasks.create_task(ask_echo(x, y.me, noise(40_000, seed)))

    @in_each_world()
    async def test_methods_are_dispatched_separately(self, peers: Peers) -> None:
        a, b = peers.transports

        async def one(peer: PeerId, stream: Stream) -> None:
            await send_bytes(stream, b"one")

        async def two(peer: PeerId, stream: Stream) -> None:
            await send_bytes(stream, b"two")

        b.serve("one", one)
        b.serve("two", two)
        for method in ("two", "one"):
            async with a.open(b.me, method, soon()) as stream:
                assert await receive_bytes(stream) == (0, method.encode())


class TestBounds:
    @in_each_world()
    async def test_oversized_header_is_rejected_unread(self, peers: Peers) -> None:
        a, b = peers.transports
        for size in (LIMIT + 1, 1 << 31, (1 << 32) - 1):
            probe = Probe.at(b, f"probe {size}")
            async with a.open(b.me, f"probe {size}", soon()) as stream:
                await pipe_of(stream).write(size.to_bytes(4, "big"))
                with pytest.raises(BadPayload):
                    await (await probe.stream()).receive(LIMIT)
                probe.may_end.set()

    @in_each_world()
    async def test_unknown_message_is_rejected(self, peers: Peers) -> None:
        lies = {
            "unknown kind": b"\x93\x01\x7d\x00",
            "other version": b"\x93\x63\x00\x00",
            "not msgpack": b"\xc1",
            "empty": b"",
            "a map": b"\x81\x01\x02",
        }
        a, b = peers.transports
        for method, packed in lies.items():

            async def liar(peer: PeerId, stream: Stream, packed: bytes = packed) -> None:
                await pipe_of(stream).write(len(packed).to_bytes(4, "big") + packed)

            b.serve(method, liar)
            async with a.open(b.me, method, soon()) as stream:
                with pytest.raises(BadPayload):
                    await stream.receive(LIMIT)

    @in_each_world()
    async def test_unfinished_header_hits_the_deadline(self, peers: Peers) -> None:
        a, b = peers.transports

        async def slow_sender(peer: PeerId, stream: Stream) -> None:
            await pipe_of(stream).write((100).to_bytes(4, "big") + b"x")
            await asyncio.sleep(GENEROUS_SECONDS)

        b.serve("slow_sender", slow_sender)
        async with strikes(SHORT_SECONDS), a.open(b.me, "slow_sender", soon(SHORT_SECONDS)) as stream:
            await stream.receive(LIMIT)


class TestUnreachable:
    @in_each_world()
    async def test_open_to_unknown_peer_fails(self, peers: Peers) -> None:
        a, _ = peers.transports
        async with asyncio.timeout(GENEROUS_SECONDS - 1):
            with pytest.raises(PeerError) as caught:
                async with a.open(peers.stranger, "echo", soon()):
                    pass
        assert caught.value.peer == peers.stranger

    @in_each_world()
    async def test_open_to_dead_peer_fails(self, peers: Peers) -> None:
        a, b = peers.transports
        b.serve("echo", echo)
        await ask_echo(a, b.me)
        await peers.kill_peer(1)
        async with asyncio.timeout(GENEROUS_SECONDS - 1):
            with pytest.raises(PeerError):
                async with a.open(b.me, "echo", soon()):
                    pass

    @in_each_world()
    async def test_open_to_unserved_method_fails(self, peers: Peers) -> None:
        a, b = peers.transports
        b.serve("echo", echo)
        with pytest.raises(PeerGone):
            async with a.open(b.me, "other", soon()):
                pass
        await ask_echo(a, b.me)


class TestLife:
    @in_each_world()
    async def test_closed_streams_leave_no_resources_behind(self, peers: Peers) -> None:
        a, b = peers.transports
        b.serve("echo", echo)

        async def some(count: int) -> None:
            for _ in range(count):
                await ask_echo(a, b.me)
                with suppress(PeerGone):
                    async with a.open(b.me, "not served", soon()):
                        pass
                with suppress(Broken):
                    async with a.open(b.me, "echo", soon()) as stream:
                        await send_bytes(stream, b"half", 1)
                        raise Broken

        await some(5)
        await asyncio.sleep(1)
        before = peers.resources()
        await some(60)
        for _ in range(50):
            if peers.resources() <= before + 2:
                return
            await asyncio.sleep(0.2)
        assert peers.resources() <= before + 2

    @pytest.mark.parametrize("whose", [0, 1], ids=["openers", "servers"])
    @in_each_world()
    async def test_handlers_survive_a_daemon_restart(self, peers: Peers, whose: int) -> None:
        a, b = peers.transports
        probe = Probe()
        for transport in (a, b):
            transport.serve("echo", echo)
        b.serve("probe", probe)
        await ask_echo(a, b.me)
        async with a.open(b.me, "probe", soon(3 * GENEROUS_SECONDS)) as stream:
            other = await probe.stream()
            await peers.kill_daemon(whose)
            async with asyncio.timeout(GENEROUS_SECONDS):
                if peers.streams_survive_daemon:
                    await send_bytes(stream, b"still here")
                    assert await receive_bytes(other) == (0, b"still here")
                for side in () if peers.streams_survive_daemon else (stream, other):
                    with pytest.raises(PeerSilent):
                        await side.receive(LIMIT)
        probe.may_end.set()
        await ask_echo(a, b.me)
        await ask_echo(b, a.me)
