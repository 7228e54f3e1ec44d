"""The namespaces on which real peers meet real faults: sockets in them notice what was asked for, and nothing else."""

from __future__ import annotations

import ctypes
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import TypeVar

import pytest

from tests.faults.network import Namespaces, Place, why_not

T = TypeVar("T")
Ends = tuple[socket.socket, socket.socket]

pytestmark = pytest.mark.real
SILENCE_SECONDS = 0.3
PATIENCE_SECONDS = 5.0
"""More than TCP waits before it sends again what was lost a second ago."""


@pytest.fixture(scope="module")
def allowed() -> None:
    """That this machine lets these tests run; they say so where it does not."""
    if reason := why_not():
        pytest.skip(reason)


@pytest.fixture
def network(allowed: None) -> Iterator[Namespaces]:
    """With two peers, a and b."""
    with Namespaces() as namespaces:
        namespaces.add("a")
        namespaces.add("b")
        yield namespaces


def within(place: Place, make: Callable[[], T]) -> T:
    """What is made by a thread in this place; a socket stays where it was made."""

    def enter() -> None:
        with Path("/run/netns", place.namespace).open() as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0):
                raise OSError(ctypes.get_errno(), "setns")

    with ThreadPoolExecutor(1, initializer=enter) as thread:
        return thread.submit(make).result()


def listening(place: Place, port: int = 0) -> socket.socket:
    return within(place, lambda: socket.create_server((place.address, port)))


def connecting(place: Place, server: socket.socket, seconds: float = PATIENCE_SECONDS) -> socket.socket:
    return within(place, lambda: socket.create_connection(server.getsockname(), seconds))


@pytest.fixture
def connected(network: Namespaces) -> Iterator[Ends]:
    """Both ends of a TCP connection from a to b."""
    with listening(network.places["b"]) as server, connecting(network.places["a"], server) as mine:
        theirs, _ = server.accept()
        with theirs:
            theirs.settimeout(PATIENCE_SECONDS)
            yield mine, theirs


def datagrams(place: Place) -> socket.socket:
    def make() -> socket.socket:
        made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        made.bind((place.address, 0))
        made.setblocking(False)
        return made

    return within(place, make)


def hears_nothing(end: socket.socket) -> bool:
    end.settimeout(SILENCE_SECONDS)
    try:
        return not end.recv(1000)
    except TimeoutError:
        return True
    finally:
        end.settimeout(PATIENCE_SECONDS)


def arrived(source: Place, target: Place, count: int) -> int:
    """How many of `count` datagrams arrive; few are sent at a time, so that no buffer is ever full."""

    def take(seconds: float) -> int:
        time.sleep(seconds)
        taken = 0
        with suppress(BlockingIOError):
            while there.recv(100):
                taken += 1
        return taken

    taken = 0
    with datagrams(source) as here, datagrams(target) as there:
        for number in range(count):
            here.sendto(b"datagram", there.getsockname())
            taken += take(0.002) if number % 50 == 49 else 0
        return taken + take(0.2)


def test_moved_peer_is_reachable_only_at_new_address(network: Namespaces) -> None:
    old, a, new = network.places["b"], network.places["a"], network.move("b")
    assert network.places["b"] == new and new.address != old.address and new.line == old.line
    assert arrived(a, new, 20) == 20 == arrived(new, a, 20)
    network.part(["a"], ["b"])
    assert arrived(a, new, 20) == 0, "faults know where it is now"


def test_partition_stalls_open_connections_until_healed(network: Namespaces, connected: Ends) -> None:
    mine, theirs = connected
    network.part(["a"], ["b"])
    assert network.suffers() and not network.felt()
    mine.sendall(b"there")
    theirs.sendall(b"back")
    assert hears_nothing(mine) and hears_nothing(theirs) and network.felt() > 1
    network.heal()
    assert (theirs.recv(100), mine.recv(100)) == (b"there", b"back")


def test_faults_heal_separately_and_spare_other_peers(network: Namespaces) -> None:
    a, b, c = network.places["a"], network.places["b"], network.add("c")
    first, second = network.deafen(["b"], ["a"]), network.part(["a"], ["c"])
    pairs = ((a, b), (b, a), (a, c), (c, a), (b, c), (c, b))
    assert [arrived(*pair, 5) for pair in pairs] == [0, 5, 0, 0, 5, 5]
    network.heal(second)
    assert [arrived(*pair, 5) for pair in pairs] == [0, 5, 5, 5, 5, 5]
    network.heal(first)
    assert arrived(a, b, 5) == 5


@pytest.mark.parametrize("refuse", [True, False])
def test_firewall_stops_one_port_of_one_peer(refuse: bool, network: Namespaces) -> None:
    a, b = network.places["a"], network.places["b"]
    network.block("b", 7077, refuse=refuse)
    error = ConnectionRefusedError if refuse else TimeoutError
    for server, client in ((a, b), (b, a)):
        with listening(server, 7077) as closed, pytest.raises(error):
            connecting(client, closed, SILENCE_SECONDS)
    with listening(b, 7078) as free, connecting(a, free):
        pass


def test_lossy_peer_loses_its_share_each_way_over_a_slow_line(network: Namespaces, connected: Ends) -> None:
    a, b, c = network.places["a"], network.places["b"], network.add("c")
    network.lose("a", 0.2)
    for source, target in ((a, b), (b, a)):
        assert 0.74 < arrived(source, target, 2_000) / 2_000 < 0.86  # within 6.7 standard deviations
    assert arrived(b, c, 500) == 500
    network.heal()
    network.slow("a", 16_000_000)
    network.slow("a", 8_000_000)
    for sender, receiver in (connected, connected[::-1]):
        began, left = time.monotonic(), 500_000
        Thread(target=sender.sendall, args=(bytes(left),)).start()
        while left:
            left -= len(receiver.recv(left))
        assert 0.4 < time.monotonic() - began < 0.8


def names() -> set[str]:
    return {line.split()[0] for line in subprocess.check_output(["ip", "netns", "list"], text=True).splitlines()}


def outside() -> list[str]:
    """What the network must leave alone on this machine."""
    shown = [subprocess.check_output(["ip", "-o", kind, "show"], text=True) for kind in ("link", "route", "rule")]
    return [*shown, Path("/proc/sys/net/ipv4/ip_forward").read_text()]


def test_namespaces_leave_the_host_unchanged(allowed: None) -> None:
    before = outside()
    with pytest.raises(ZeroDivisionError), Namespaces() as network:
        a, b = network.add("a"), network.add("b")
        network.lose("a", 0.1)
        network.slow("b", 1_000_000)
        with Namespaces() as other:
            assert other.add("a").namespace in names()
        assert {a.namespace, b.namespace} < names()
        assert arrived(b, b, 5) == 5
        assert outside() == before
        raise ZeroDivisionError
    mine = a.namespace.removesuffix("-a")
    assert not [name for name in names() if name.startswith(mine)]
    assert outside() == before
