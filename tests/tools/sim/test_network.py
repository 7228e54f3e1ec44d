"""What befalls the simulated network: silence loses nothing, streams keep their order, the dead hear nothing."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest

from protocols.base import PeerError, PeerGone, PeerSilent
from tests.sim import loop as simloop
from tests.sim.network import SimNetwork
from tests.sim.pipe import SimPipe
from tests.sim.trace import Trace

METHOD = "test/1"
LATENCY = 0.1


def now() -> float:
    return asyncio.get_running_loop().time()


class Scene:
    """Peers whose handlers note every byte: (time, receiver, first byte of the stream, byte)."""

    def __init__(self, *peers: str, jitter: random.Random | None = None) -> None:
        self.network = SimNetwork(Trace(), LATENCY, jitter=jitter)
        self.heard: list[tuple[float, str, int, int]] = []
        self.ends: list[str] = []
        for peer in peers:
            self.network.join(peer)
            self.serve(peer)

    def serve(self, peer: str) -> None:
        async def handler(source: str, stream: object) -> None:
            pipe: SimPipe = stream._pipe  # type: ignore[attr-defined]
            first = None
            byte = bytearray(1)
            try:
                while True:
                    await pipe.read_into(memoryview(byte))
                    first = byte[0] if first is None else first
                    self.heard.append((now(), peer, first, byte[0]))
            except EOFError:
                self.ends.append("end")
            except ConnectionResetError:
                self.ends.append("reset")

        self.network.transports[peer].serve(METHOD, handler)

    async def send(self, source: str, target: str, data: bytes, pause_seconds: float = 0.0) -> None:
        transport = self.network.transports[source]
        async with transport.open(target, METHOD, now() + 1000) as stream:
            for byte in data:
                try:
                    await stream._pipe.write(bytes([byte]))  # type: ignore[attr-defined]
                except OSError as error:
                    raise PeerSilent(target, str(error)) from None
                if pause_seconds:
                    await asyncio.sleep(pause_seconds)

    def start(self, peer: str, body: Awaitable[None]) -> asyncio.Task[None]:
        token = simloop.PROCESS.set(self.network.nodes[peer].process)
        task = asyncio.get_running_loop().create_task(body)  # type: ignore[arg-type]
        simloop.PROCESS.reset(token)
        return task

    def run(self, body: Callable[[], Awaitable[None]]) -> None:
        async def main() -> None:
            await body()
            await asyncio.sleep(1000)

        simloop.run(main())
        assert not self.network.bugs


# -- silence ----------------------------------------------------------------------------------------------------------


def test_blocked_messages_arrive_in_order_after_healing() -> None:
    """Whether it was on its way before, was sent during the silence, or right after its end."""
    scene = Scene("a", "b")

    async def body() -> None:
        task = asyncio.get_running_loop().create_task(scene.send("a", "b", bytes(range(100)), 0.1))
        asyncio.get_running_loop().call_at(3.05, scene.network.block, "a", "b")
        asyncio.get_running_loop().call_at(7.05, scene.network.heal, "a", "b")
        await task

    scene.run(body)
    assert [byte for _, _, _, byte in scene.heard] == list(range(100))
    times = [time for time, *_ in scene.heard]
    assert times == sorted(times)
    silent = [time for time in times if 3.05 <= time < 7.05 + LATENCY]
    assert silent == [] and sum(time < 3.05 for time in times) > 10 and scene.ends == ["end"]


@pytest.mark.parametrize("link, arrived", [(("a", "b"), False), (("b", "a"), True)])
def test_open_through_silence_is_not_refused(link: tuple[str, str], arrived: bool) -> None:
    """Nothing that is held up may look like an explicit refusal, and only the blocked direction is held up."""
    scene = Scene("a", "b")

    async def body() -> None:
        scene.network.block(*link)
        with pytest.raises(PeerSilent):
            async with scene.network.transports["a"].open("b", METHOD, now() + 50):
                pass

    scene.run(body)
    assert bool(scene.network.nodes["b"].messages) == arrived


# -- order ------------------------------------------------------------------------------------------------------------


def arrivals(seed: int) -> list[tuple[float, str, int, int]]:
    scene = Scene("a", "b", jitter=random.Random(seed))

    async def body() -> None:
        await asyncio.gather(*(scene.send("a", "b", bytes([number] * 5 + [99]), 0.01) for number in range(8)))

    scene.run(body)
    return scene.heard


def test_jitter_reorders_streams_but_not_their_bytes() -> None:
    orders = set()
    for seed in range(5):
        heard = arrivals(seed)
        orders.add(tuple(first for _, _, first, _ in heard))
        for number in range(8):
            assert [byte for _, _, first, byte in heard if first == number] == [number] * 5 + [99]
        assert heard == arrivals(seed)
    assert len(orders) == 5


# -- death and what comes after it ------------------------------------------------------------------------------------


@pytest.mark.parametrize("blocked", [False, True])
def test_next_incarnation_receives_nothing_from_the_last(blocked: bool) -> None:
    """Bytes that were under way to a peer, or held up, when it was killed reach no stream of its next incarnation."""
    scene = Scene("a", "b")

    async def body() -> None:
        task = scene.start("a", scene.send("a", "b", bytes(50), 0.1))
        await asyncio.sleep(2)
        if blocked:
            scene.network.block("a", "b")
        scene.network.kill("b")
        heard = len(scene.heard)
        scene.network.restart("b")
        scene.serve("b")
        await asyncio.sleep(1)
        scene.network.heal("a", "b")
        await asyncio.sleep(5)
        assert len(scene.heard) == heard
        with pytest.raises(PeerSilent):
            await task
        await scene.send("a", "b", b"\x07")
        assert not task.cancelled()

    scene.run(body)
    assert scene.heard[-1][-1] == 7 and scene.network.nodes["b"].incarnation == 1
    assert not scene.network.past[0].ends and not scene.network.past[0].process.tasks


def test_killed_peer_sends_nothing_and_streams_are_reset() -> None:
    scene = Scene("a", "b")

    async def body() -> None:
        task = scene.start("a", scene.send("a", "b", bytes(50), 0.1))
        await asyncio.sleep(2)
        scene.network.kill("a")
        sent = scene.network.nodes["a"].messages
        await asyncio.wait([task])
        assert task.cancelled() and scene.network.nodes["a"].messages == sent
        with pytest.raises(PeerGone):
            await scene.send("a", "b", b"\x01")
        with pytest.raises(PeerGone):
            await scene.send("b", "a", b"\x01")

    scene.run(body)
    assert scene.ends == ["reset"] and 10 < len(scene.heard) < 50


def test_daemon_reset_keeps_process_and_handlers() -> None:
    scene = Scene("a", "b")

    async def body() -> None:
        task = scene.start("a", scene.send("a", "b", bytes(50), 0.1))
        await asyncio.sleep(2)
        scene.network.reset_streams("b")
        with pytest.raises(PeerSilent):
            await task
        await scene.send("a", "b", b"\x05")

    scene.run(body)
    assert scene.ends == ["reset", "end"] and scene.heard[-1][-1] == 5


# -- messages ---------------------------------------------------------------------------------------------------------

Seen = list[tuple[str, int, str, str]]


def watched(strike: Callable[[SimNetwork, str, int], None] = lambda *_: None) -> tuple[Scene, Seen]:
    scene, seen = Scene("a", "b"), Seen()

    def watch(peer: str, number: int, way: str, other: str) -> None:
        seen.append((peer, number, way, other))
        strike(scene.network, peer, number)

    async def body() -> None:
        scene.network.watch = watch
        task = scene.start("a", scene.send("a", "b", b"\x01\x02"))
        await asyncio.wait([task])
        if not task.cancelled():
            with suppress(PeerError):
                task.result()

    scene.run(body)
    return scene, seen


def test_messages_are_counted_at_sender_and_receiver() -> None:
    """An opening, its answer, the stream's deadline, two bytes, an end; and the end of the other side."""
    _, seen = watched()
    assert [(number, way) for peer, number, way, _ in seen if peer == "a"] == [
        (1, "sent"),  # the opening
        (2, "received"),  # its answer
        *((number, "sent") for number in (3, 4, 5, 6)),
    ]
    mine = [(number, way) for peer, number, way, _ in seen if peer == "b"]
    assert mine == [*((number, "received") for number in (1, 2, 3, 4, 5)), (6, "sent")]


@pytest.mark.parametrize("peer, number", [(peer, number) for peer in "ab" for number in range(1, 7)])
def test_peer_dies_just_before_its_message_takes_effect(peer: str, number: int) -> None:
    scene, seen = watched(lambda network, who, count: network.kill(peer) if (who, count) == (peer, number) else None)
    assert max(count for who, count, _, _ in seen if who == peer) == number
    # a sends: 1 opening, 3 its deadline, 4 and 5 the bytes, 6 the end; b receives the bytes as 3 and 4.
    assert len(scene.heard) <= {"a": number - 4, "b": number - 3}[peer] if number > 3 else not scene.heard
    assert not scene.network.nodes[peer].ends and not scene.network.nodes[peer].process.tasks
    if (peer, number) != ("b", 6):
        assert "end" not in scene.ends


@pytest.mark.parametrize("number", range(1, 7))
def test_silence_at_a_message_delays_that_message(number: int) -> None:
    """At a message sent and at one received: it comes through only after the link has healed, in order."""
    struck: list[float] = []

    def strike(network: SimNetwork, who: str, count: int) -> None:
        if (who, count) == ("b", number) and not struck:
            struck.append(now())
            for pair in (("a", "b"), ("b", "a")):
                network.block(*pair)
                asyncio.get_running_loop().call_later(5.0, network.heal, *pair)

    scene, _ = watched(strike)
    late = [time for time, *_ in scene.heard if time > struck[0]]
    assert len(scene.heard) == 2 and all(time >= struck[0] + 5 for time in late)
    assert len(late) == max(0, min(2, 5 - number))
