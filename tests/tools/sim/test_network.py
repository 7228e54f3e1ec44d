"""What befalls the simulated network: silence loses nothing, streams keep their order, the dead hear nothing."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest

from tests.sim import loop as simloop
from tests.sim.network import SimNetwork
from tests.sim.pipe import SimPipe
from tests.sim.trace import Trace

METHOD = "test/1"
LATENCY = 0.1
Event = Callable[["Scene"], object]


def now() -> float:
    return asyncio.get_running_loop().time()


class Scene:
    """Peer a sends bytes to peer b. `heard`: (time, first byte of the stream, byte) of each byte that b has read."""

    def __init__(self, jitter: random.Random | None = None) -> None:
        self.network = SimNetwork(Trace(), LATENCY, jitter=jitter)
        self.heard: list[tuple[float, int, int]] = []
        self.ends: list[str] = []
        self.sent: list[str] = []
        self.network.join("a")
        self.network.join("b")
        self.serve()

    def serve(self) -> None:
        async def handler(source: str, stream: object) -> None:
            pipe: SimPipe = stream._pipe  # type: ignore[attr-defined]
            read = bytearray()
            byte = bytearray(1)
            try:
                while True:
                    await pipe.read_into(memoryview(byte))
                    read += byte
                    self.heard.append((now(), read[0], byte[0]))
            except (EOFError, ConnectionResetError) as error:
                self.ends.append(type(error).__name__)

        self.network.transports["b"].serve(METHOD, handler)

    async def _send(self, data: bytes, pause_seconds: float) -> None:
        async with self.network.transports["a"].open("b", METHOD, now() + 50) as stream:
            for byte in data:
                await stream._pipe.write(bytes([byte]))  # type: ignore[attr-defined]
                await asyncio.sleep(pause_seconds)

    def _note(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        self.sent.append("cancelled" if task.cancelled() else type(error).__name__ if error else "no error")

    def send(self, data: bytes, pause_seconds: float = 0.0) -> None:
        token = simloop.PROCESS.set(self.network.nodes["a"].process)
        asyncio.get_running_loop().create_task(self._send(data, pause_seconds)).add_done_callback(self._note)
        simloop.PROCESS.reset(token)

    def run(self, *events: tuple[float, Event]) -> None:
        async def main() -> None:
            for at, event in events:
                asyncio.get_running_loop().call_at(at, event, self)
            await asyncio.sleep(1000)

        simloop.run(main())
        assert not self.network.bugs


def block(scene: Scene) -> None:
    scene.network.block("a", "b")


def heal(scene: Scene) -> None:
    scene.network.heal("a", "b")


def restart(scene: Scene) -> None:
    scene.network.restart("b")
    scene.serve()


def kill(peer: str) -> Event:
    return lambda scene: scene.network.kill(peer)


def reset(scene: Scene) -> None:
    scene.network.reset_streams("b")


CASES: dict[str, tuple[list[tuple[float, Event]], list[int], list[str], list[str]]] = {
    "silence": ([(2.05, block), (4.05, heal)], [*range(50), 99], ["EOFError"] * 2, ["no error"] * 2),
    "death of the sender": (
        [(2.05, kill("a"))], [*range(19)], ["ConnectionResetError"], ["cancelled"] * 2,
    ),
    "death of the receiver": ([(2.05, kill("b"))], [*range(18)], [], ["ConnectionResetError", "PeerGone"]),
    "restart of the receiver": (
        [(2.05, kill("b")), (2.06, restart)], [*range(18), 99], ["EOFError"], ["ConnectionResetError", "no error"],
    ),
    "restart behind a silence": (
        [(2.05, block), (2.06, kill("b")), (2.07, restart), (3.05, heal)],
        [*range(18), 99], ["EOFError"], ["ConnectionResetError", "no error"],
    ),
    "death of the receiver's daemon": (
        [(2.05, reset)], [*range(18), 99], ["ConnectionResetError", "EOFError"], ["ConnectionResetError", "no error"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("events, heard, ends, sent", CASES.values(), ids=CASES)
def test_only_death_and_reset_lose_what_was_sent(
    events: list[tuple[float, Event]], heard: list[int], ends: list[str], sent: list[str]
) -> None:
    """Of fifty bytes in five seconds, and of one byte long after. What was sent before a death still arrives."""
    scene = Scene()
    scene.run((0, lambda scene: scene.send(bytes(range(50)), 0.1)), *events, (20, lambda scene: scene.send(b"\x63")))
    assert ([byte for _, _, byte in scene.heard], scene.ends, scene.sent) == (heard, ends, sent)
    silent = [at for at, event in events if event in (block, heal)]
    assert not silent or not [time for time, *_ in scene.heard if silent[0] <= time < silent[1] + LATENCY]
    assert not any(node.process.tasks or node.ends for node in (*scene.network.past, *scene.network.nodes.values()))


def test_jitter_reorders_streams_but_not_their_bytes() -> None:
    def heard(seed: int) -> list[tuple[float, int, int]]:
        scene = Scene(random.Random(seed))
        scene.run(*((0, lambda scene, data=bytes([n] * (n + 5)): scene.send(data, 0.01)) for n in range(8)))
        return scene.heard

    orders = set()
    for seed in range(5):
        bytes_heard = heard(seed)
        orders.add(tuple(first for _, first, _ in bytes_heard))
        for number in range(8):
            assert [byte for _, first, byte in bytes_heard if first == number] == [number] * (number + 5)
        assert bytes_heard == heard(seed)
    assert len(orders) == 5
