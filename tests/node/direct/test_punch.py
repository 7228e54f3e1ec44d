"""Connections through routers that keep ports: made in a network of namespaces, from one process."""

from __future__ import annotations

import asyncio
import socket
import time
from collections import Counter
from collections.abc import Iterator
from statistics import median
from typing import Any

import pytest

from node.direct.connection import DirectConnection
from node.direct.messages import ConnectionToken, Punch, Punched, SeenAt, WantSeen
from node.direct.punch import PortObservation, Puncher, bound, is_public, own_host
from node.direct.records import AES
from node.direct.routes import NotDirect
from protocols.base import Deadline, Header, PeerId
from tests.faults.homes import Homes, Router
from tests.faults.network import Place, why_not
from tests.tools.faults.test_namespaces import within

pytestmark = pytest.mark.real
KEEPS = PortObservation("8.8.8.8", True)


def test_own_host_is_known_only_where_ports_are_kept() -> None:
    assert own_host([KEEPS, KEEPS]) == "8.8.8.8"
    for views, why in (([], "no reachable"), ([KEEPS, PortObservation("8.8.8.8", False)], "changes ports")):
        with pytest.raises(NotDirect, match=why):
            own_host(views)
    with pytest.raises(NotDirect, match="different hosts"):
        own_host([KEEPS, PortObservation("8.8.4.4", True)])
    private = ("192.168.1.5", "100.64.0.2", "127.0.0.1", "::1", "fe80::1", "0.0.0.0", "", "example.org")
    assert not any(map(is_public, private)) and is_public("192.52.193.4") and is_public("2001:4860::1")


class Fabric:
    """Two peers and a reachable member, whose messages need no network."""

    def __init__(self, homes: Homes, routers: tuple[Router, Router]) -> None:
        self.hosts: dict[PeerId, str | None] = {}
        self.pairs: list[tuple[PeerId, DirectConnection]] = []
        self.peers: dict[PeerId, Puncher] = {}
        self.dials: list[tuple[PeerId, str]] = []
        self.asked: Counter[PeerId] = Counter()  # how often each asked the member
        for name, router in zip("ab", routers, strict=True):
            place = homes.home(name, router)
            self.hosts[name] = homes.places[name].address
            self.peers[name] = self._puncher(name, place)
            self.peers[name]._views["member"] = PortObservation(
                homes.places[name].address, router is not Router.SYMMETRIC
            )

    def _puncher(self, name: PeerId, place: Place) -> Puncher:
        async def request(to: PeerId, message: Header, deadline: Deadline) -> Header:
            if isinstance(message, WantSeen):
                self.asked[name] += 1
                return SeenAt(self.hosts.get(message.peer) or "", 0)
            answer: asyncio.Future[Header] = asyncio.get_running_loop().create_future()
            assert isinstance(message, Punch)
            stream: Any = Answer(answer, deadline)
            self.tasks.append(asyncio.create_task(self.peers[to].answer(name, message, stream)))
            return await answer

        def bind(host: str, port: int) -> socket.socket:
            if port:
                self.dials.append((name, host))
            return within(place, lambda: bound(host, port))

        self.tasks: list[asyncio.Task[None]] = []
        return Puncher(name, request, self.hosts.get, lambda *served: self.pairs.append(served), bind)

    async def punch(self) -> DirectConnection:
        return await self.peers["a"].dial("b", AES, asyncio.get_running_loop().time() + 2.0)


class Answer:
    def __init__(self, sent: asyncio.Future[Header], deadline: Deadline) -> None:
        self._sent, self.deadline = sent, deadline

    async def send(self, message: Header) -> None:
        self._sent.set_result(message)


@pytest.fixture
def homes() -> Iterator[Homes]:
    if reason := why_not():
        pytest.skip(reason)
    with Homes() as network:
        yield network


@pytest.mark.parametrize(
    "routers",
    [  # two full cones refuse each other's dials until they cross; data to them are dialled plainly
        (Router.PORT_KEEPING, Router.CGNAT),
        *(
            pytest.param(each, marks=pytest.mark.long)
            for each in (
                (Router.PORT_KEEPING, Router.PORT_KEEPING),
                (Router.PORT_KEEPING, Router.FULL_CONE),
                (Router.FULL_CONE, Router.CGNAT),
                (Router.CGNAT, Router.CGNAT),
            )
        ),
    ],
    ids=" and ".join,
)
async def test_twenty_of_twenty_connections_open(homes: Homes, routers: tuple[Router, Router]) -> None:
    fabric, seconds = Fabric(homes, routers), []
    for _ in range(20):
        began = time.monotonic()
        mine = await fabric.punch()
        seconds.append(time.monotonic() - began)
        await asyncio.gather(*fabric.tasks)
        (peer, theirs) = fabric.pairs.pop()
        assert peer == "a"
        await mine.write(b"through both")
        buffer = bytearray(12)
        await theirs.read_into(memoryview(buffer))
        assert buffer == b"through both"
        mine.abort()
        theirs.abort()
    assert median(seconds) < 1.0


@pytest.mark.parametrize("symmetric", "ab")
async def test_router_that_changes_ports_is_not_tried(homes: Homes, symmetric: str) -> None:
    kinds = tuple(Router.SYMMETRIC if name == symmetric else Router.PORT_KEEPING for name in "ab")
    fabric = Fabric(homes, (kinds[0], kinds[1]))
    side = "this" if symmetric == "a" else "the other"
    with pytest.raises(NotDirect, match=f"on {side} side the router changes ports"):
        await fabric.punch()
    assert not fabric.dials


@pytest.mark.parametrize("liar", "ab")
async def test_host_that_no_member_confirms_is_never_dialled(homes: Homes, liar: str) -> None:
    fabric = Fabric(homes, (Router.PORT_KEEPING, Router.PORT_KEEPING))
    fabric.peers[liar]._views["member"] = PortObservation("192.52.193.99", True)  # names a third host for its own
    with pytest.raises(NotDirect, match="no reachable member sees it"):
        await fabric.punch()
    assert not [host for _, host in fabric.dials if host == "192.52.193.99"]
    fabric.hosts[liar] = None  # reached through a relay by the member, too
    with pytest.raises(NotDirect):
        await fabric.punch()


async def test_refusals_name_their_reason_and_are_bounded(homes: Homes) -> None:
    fabric = Fabric(homes, (Router.PORT_KEEPING, Router.PORT_KEEPING))
    token, b = ConnectionToken(bytes(32)), fabric.peers["b"]
    host = fabric.hosts["a"] or ""

    async def asked(**changes: Any) -> str:
        b._failed.clear()
        given: dict[str, Any] = {"host": host, "ports": (2000,), "cipher": AES, "token": token} | changes
        answer: asyncio.Future[Header] = asyncio.get_running_loop().create_future()
        stream: Any = Answer(answer, asyncio.get_running_loop().time() + 9)
        task = asyncio.create_task(b.answer("a", Punch(**given), stream))
        both: list[asyncio.Future[Any]] = [task, answer]
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        punched = answer.result()
        assert isinstance(punched, Punched)
        return punched.why

    assert "no address" in await asked(ports=(80,)) and "no address" in await asked(ports=())
    assert "no address" in await asked(host="192.168.1.1") and "cipher" in await asked(cipher="rot13")
    assert not fabric.dials
    assert [await asked() for _ in range(3)] == ["", "", "too many peers are being dialled"]


async def test_refused_peer_has_to_wait_before_members_are_asked_again(homes: Homes) -> None:
    fabric = Fabric(homes, (Router.PORT_KEEPING, Router.PORT_KEEPING))
    fabric.hosts["a"] = None
    for _ in range(3):
        with pytest.raises(NotDirect, match="no reachable member sees it"):
            await fabric.punch()
    assert fabric.asked["b"] == 1
