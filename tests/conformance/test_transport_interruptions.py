"""Deadlines, resets and deaths of streams, for every `Transport` (`tests.conformance.worlds`).

A deadline that must strike is short, and it may strike late: a world may be slow.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from protocols import wire
from protocols.base import BadPayload, PeerId, PeerSilent, Stream
from tests.conformance.streams import (
    LIMIT,
    MIB,
    SHORT_SECONDS,
    Broken,
    Probe,
    ask_echo,
    echo,
    noise,
    receive_bytes,
    send_bytes,
    strikes,
)
from tests.conformance.worlds import GENEROUS_SECONDS, Peers, in_each_world, soon


class TestDeadlines:
    @in_each_world()
    async def test_receive_without_data_hits_the_deadline(self, peers: Peers) -> None:
        a, b = peers.transports
        probe = Probe.at(b)
        async with strikes(SHORT_SECONDS), a.open(b.me, "probe", soon(SHORT_SECONDS)) as stream:
            await stream.receive(LIMIT)
        # The handler's stream has the same deadline, or has been reset.
        with pytest.raises(PeerSilent):
            await (await probe.stream()).receive(LIMIT)
        probe.may_end.set()

    @in_each_world()
    async def test_handler_learns_openers_deadline(self, peers: Peers) -> None:
        a, b = peers.transports
        probe = Probe.at(b)
        async with a.open(b.me, "probe", soon(SHORT_SECONDS)):
            other = await probe.stream()
            async with strikes(0.1):
                await other.receive(LIMIT)
        probe.may_end.set()

    @in_each_world()
    async def test_calls_after_deadline_fail(self, peers: Peers) -> None:
        a, b = peers.transports
        probe = Probe.at(b)
        async with a.open(b.me, "probe", soon(SHORT_SECONDS)) as stream:
            await asyncio.sleep(SHORT_SECONDS + 0.1)
            for call in (stream.receive(LIMIT), stream.receive_into(memoryview(bytearray(5)))):
                with pytest.raises(PeerSilent):
                    await call
            with pytest.raises(PeerSilent):
                await send_bytes(stream, noise(64 * MIB))
        probe.may_end.set()

    @in_each_world()
    async def test_open_to_frozen_peer_hits_the_deadline(self, peers: Peers) -> None:
        a, b = peers.transports
        b.serve("echo", echo)
        await ask_echo(a, b.me)
        await peers.freeze_peer(1)
        async with strikes(SHORT_SECONDS), a.open(b.me, "echo", soon(SHORT_SECONDS)):
            pass

    @in_each_world()
    async def test_peer_freezing_mid_stream_hits_the_deadline(self, peers: Peers) -> None:
        a, b = peers.transports
        b.serve("echo", echo)
        async with strikes(SHORT_SECONDS), a.open(b.me, "echo", soon(SHORT_SECONDS)) as stream:
            await send_bytes(stream, b"alive", 1)
            assert await receive_bytes(stream) == (1, b"alive")
            await peers.freeze_peer(1)
            while True:
                await send_bytes(stream, noise(MIB), 1)


class TestResets:
    @pytest.mark.parametrize("waits_in", ["receive", "receive_into", "send"])
    @in_each_world()
    async def test_opener_exception_reaches_handler(self, peers: Peers, waits_in: str) -> None:
        a, b = peers.transports
        probe = Probe.at(b)

        async def handler_side() -> None:
            other = await probe.stream()
            with pytest.raises(PeerSilent):
                if waits_in == "receive":
                    await other.receive(LIMIT)
                elif waits_in == "receive_into":
                    await other.receive(LIMIT)
                    await other.receive_into(memoryview(bytearray(MIB)))
                else:
                    while True:
                        await send_bytes(other, noise(MIB))

        waiting = asyncio.create_task(handler_side())
        with pytest.raises(Broken):
            async with a.open(b.me, "probe", soon(3 * GENEROUS_SECONDS)) as stream:
                await probe.stream()
                if waits_in == "receive_into":
                    await stream.send(wire.Chunk(0, MIB), b"only a part of it")
                await asyncio.sleep(0.2)
                raise Broken
        async with asyncio.timeout(GENEROUS_SECONDS):
            await waiting
        probe.may_end.set()

    @in_each_world()
    async def test_handler_exception_reaches_opener(self, peers: Peers) -> None:
        a, b = peers.transports
        b.serve("echo", echo)
        for error in (Broken("a bug"), BadPayload("nonsense"), PeerSilent("another", "peer")):

            async def fails(peer: PeerId, stream: Stream, error: Exception = error) -> None:
                await stream.receive(LIMIT)
                raise error

            b.serve(type(error).__name__, fails)
            async with a.open(b.me, type(error).__name__, soon()) as stream:
                await send_bytes(stream, b"")
                async with strikes(0.0):
                    await stream.receive(LIMIT)
            await ask_echo(a, b.me)

    @in_each_world()
    async def test_cancelled_opener_resets_stream(self, peers: Peers) -> None:
        a, b = peers.transports
        probe = Probe.at(b)

        async def opens() -> None:
            async with a.open(b.me, "probe", soon()) as stream:
                await stream.receive(LIMIT)

        opener = asyncio.create_task(opens())
        other = await probe.stream()
        opener.cancel()
        with suppress(asyncio.CancelledError):
            await opener
        async with strikes(0.0):
            await other.receive(LIMIT)
        probe.may_end.set()

    @pytest.mark.parametrize("doing", ["receiving", "sending"])
    @in_each_world()
    async def test_peer_dying_mid_stream_raises_error(self, peers: Peers, doing: str) -> None:
        a, b = peers.transports
        probe = Probe.at(b)
        async with a.open(b.me, "probe", soon(3 * GENEROUS_SECONDS)) as stream:
            await probe.stream()
            await peers.kill_peer(1)
            async with asyncio.timeout(GENEROUS_SECONDS):
                with pytest.raises(PeerSilent):
                    while doing == "sending":
                        await send_bytes(stream, noise(MIB))
                    await stream.receive(LIMIT)
        probe.may_end.set()
