"""The namespaces on which real peers meet real faults: sockets in them notice what was asked for, and nothing else."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import pytest

from tests.faults import network as module
from tests.faults.network import (
    CommandFailed,
    Cut,
    Fault,
    Firewall,
    Loss,
    Namespaces,
    Place,
    Slowness,
    framing,
    rates,
    shaping,
    table,
    why_not,
)

T = TypeVar("T")
Ends = tuple[socket.socket, socket.socket]

real = pytest.mark.real
ADDRESSES = {"a": "10.77.0.2", "b": "10.77.0.3", "c": "10.77.0.4"}
SILENCE_SECONDS = 0.3
PATIENCE_SECONDS = 5.0
"""More than TCP waits before it sends again what was lost a second ago."""


# -- what is to be done, without doing it -----------------------------------------------------------------------------


def rules(*faults: Fault) -> list[str]:
    head, policy, *lines, commit, end = table(faults, ADDRESSES).split("\n")
    assert (head, policy, commit, end) == ("*filter", ":FORWARD ACCEPT", "COMMIT", "")
    return lines


def test_no_faults_give_no_rules() -> None:
    assert rules() == []


def test_partition_drops_both_ways_and_deafness_one_way() -> None:
    there, back = "-s 10.77.0.2 -d 10.77.0.3,10.77.0.4", "-s 10.77.0.3,10.77.0.4 -d 10.77.0.2"
    assert rules(Cut(("a",), ("b", "c"), both=True)) == [f"-A FORWARD {there} -j DROP", f"-A FORWARD {back} -j DROP"]
    assert rules(Cut(("a",), ("b", "c"), both=False)) == [f"-A FORWARD {there} -j DROP"]


def test_loss_applies_once_in_each_direction() -> None:
    share = "-m statistic --mode random --probability 0.200000000 -j DROP"
    assert rules(Loss("b", 0.2)) == [f"-A FORWARD -s 10.77.0.3 {share}", f"-A FORWARD -d 10.77.0.3 {share}"]
    assert rules(Loss(None, 0.2)) == [f"-A FORWARD {share}"]


def test_firewall_stops_one_port_of_one_peer_in_both_directions() -> None:
    port = "-p tcp -m multiport --ports 7077"
    for refuse, verdict in ((False, "DROP"), (True, "REJECT --reject-with tcp-reset")):
        assert rules(Firewall("b", 7077, refuse)) == [
            f"-A FORWARD {end} 10.77.0.3 {port} -j {verdict}" for end in ("-s", "-d")
        ]


def test_slowest_of_two_slow_faults_counts() -> None:
    faults = (Slowness("a", 2_000), Slowness("a", 1_000), Slowness("b", 3_000), Loss("c", 0.5))
    assert rates(faults) == {"a": 1_000, "b": 3_000}
    assert rules(*faults[:3]) == []


def test_burst_is_twenty_milliseconds_or_one_frame() -> None:
    assert "rate 8000000bit burst 20000 " in shaping("line", 8_000_000)
    assert "rate 64000bit burst 3200 " in shaping("line", 64_000)
    assert shaping("line", None) == "qdisc delete dev line root\n"


def test_frames_are_split_only_under_loss() -> None:
    assert framing([Slowness("a", 1_000)]) == "gso_max_segs 65535"
    assert framing([Loss("a", 0.1)]) == "gso_max_segs 1"


@pytest.mark.parametrize(
    "fault",
    [
        lambda network: network.part(["stranger"], ["stranger"]),
        lambda network: network.deafen([], []),
        lambda network: network.part("stranger", "stranger"),
        lambda network: network.slow("stranger", 1_000),
        lambda network: network.lose("stranger", 0.1),
        lambda network: network.lose(None, 0.0),
        lambda network: network.lose(None, 1.1),
    ],
)
def test_impossible_faults_are_rejected(fault: Callable[[Namespaces], object]) -> None:
    with pytest.raises(ValueError):
        fault(Namespaces())


def test_why_not_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*command: str, given: str | None = None) -> str:
        raise CommandFailed(f"{' '.join(command)}:\nnot permitted")

    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(shutil, "which", lambda tool: "/sbin/" + tool)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(module, "_run", refuses)
    assert "netns add" in why_not() and "not permitted; in a container" in why_not() and "\n" not in why_not()
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert why_not() == "network namespaces need root: run this as root"
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool == "tc" else tool)
    assert why_not() == "tc not found: install iproute2, iptables and util-linux"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert why_not() == "network namespaces need Linux; this is darwin"


# -- sockets ----------------------------------------------------------------------------------------------------------


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


@pytest.fixture
def connected(network: Namespaces) -> Iterator[Ends]:
    """Both ends of a TCP connection from a to b."""
    a, b = network.places["a"], network.places["b"]
    with within(b, lambda: socket.create_server((b.address, 0))) as server:
        mine = within(a, lambda: socket.create_connection(server.getsockname(), PATIENCE_SECONDS))
        theirs, _ = server.accept()
    with mine, theirs:
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


def seconds_to_carry(source: socket.socket, target: socket.socket, size: int) -> float:
    def take() -> None:
        left = size
        while left:
            left -= len(target.recv(left))

    with ThreadPoolExecutor(1) as thread:
        began = time.monotonic()
        taking = thread.submit(take)
        source.sendall(bytes(size))
        taking.result()
    return time.monotonic() - began


@real
def test_moved_peer_is_reachable_only_at_new_address(network: Namespaces, connected: Ends) -> None:
    mine, theirs = connected
    old, a = network.places["b"].address, network.places["a"]
    new = network.move("b")
    assert network.places["b"] == new and new.address != old and new.device == f"line{new.line}"
    mine.sendall(b"unheard")
    assert hears_nothing(theirs)
    assert arrived(a, new, 20) == 20 == arrived(new, a, 20)
    again = network.move("b")
    assert again.address not in (old, new.address) and arrived(a, again, 20) == 20
    network.part(["a"], ["b"])
    assert arrived(a, again, 20) == 0, "faults know where it is now"
    with pytest.raises(ValueError, match="cannot move"):
        network.move("b")


@real
def test_link_is_up_at_once(network: Namespaces) -> None:
    a, b = network.places["a"], network.places["b"]
    assert arrived(a, b, 1) == 1
    assert arrived(b, a, 1) == 1


@real
def test_partition_stalls_open_connections_until_healed(network: Namespaces, connected: Ends) -> None:
    mine, theirs = connected
    network.part(["a"], ["b"])
    mine.sendall(b"there")
    theirs.sendall(b"back")
    assert hears_nothing(mine) and hears_nothing(theirs)
    network.heal()
    assert (theirs.recv(100), mine.recv(100)) == (b"there", b"back")


@real
def test_deaf_peer_can_still_send(network: Namespaces) -> None:
    a, b = network.places["a"], network.places["b"]
    fault = network.deafen(["b"], ["a"])
    assert (arrived(a, b, 5), arrived(b, a, 5)) == (0, 5)
    network.heal(fault)
    assert (arrived(a, b, 5), arrived(b, a, 5)) == (5, 5)


@real
def test_one_way_partition_hits_open_connections(network: Namespaces, connected: Ends) -> None:
    mine, theirs = connected
    network.deafen(["b"], ["a"])
    theirs.sendall(b"back")
    assert mine.recv(100) == b"back"
    mine.sendall(b"there")
    assert hears_nothing(theirs)


@real
def test_faults_heal_separately_and_spare_other_peers(network: Namespaces) -> None:
    a, b, c = network.places["a"], network.places["b"], network.add("c")
    first, second = network.part(["a"], ["b"]), network.part(["a"], ["b", "c"])
    assert (arrived(a, b, 5), arrived(c, a, 5), arrived(b, c, 5)) == (0, 0, 5)
    network.heal(second)
    assert (arrived(a, b, 5), arrived(c, a, 5)) == (0, 5)
    network.heal(first)
    network.heal(first)
    assert arrived(a, b, 5) == 5


@real
def test_slow_link_limits_both_directions(network: Namespaces, connected: Ends) -> None:
    mine, theirs = connected
    network.slow("a", 8_000_000)
    for source, target in ((mine, theirs), (theirs, mine)):
        assert 0.8 < seconds_to_carry(source, target, 1_000_000) < 1.3
    network.heal()
    assert seconds_to_carry(mine, theirs, 1_000_000) < 0.5


@real
def test_lossy_peer_loses_its_share_each_way(network: Namespaces) -> None:
    a, b, c = network.places["a"], network.places["b"], network.add("c")
    network.lose("a", 0.2)
    for source, target in ((a, b), (b, a)):
        assert 0.74 < arrived(source, target, 2_000) / 2_000 < 0.86  # within 6.7 standard deviations
    assert arrived(b, c, 500) == 500


@real
def test_tcp_losses_are_single_frames(network: Namespaces, connected: Ends) -> None:
    """A stream's segment of 64 KB would otherwise be one packet, and lost or not as a whole; as when it was opened."""

    def sent() -> int:
        command = ["ip", "-json", "-s", "-n", network.places["a"].namespace, "link", "show", "dev", "line"]
        packets: int = json.loads(subprocess.check_output(command))[0]["stats64"]["tx"]["packets"]
        return packets

    seconds_to_carry(*connected, 1_000_000)
    assert sent() < 500
    network.lose(None, 0.001)
    before = sent()
    seconds_to_carry(*connected, 1_000_000)
    assert sent() - before > 650


# -- processes, and what is left --------------------------------------------------------------------------------------


def names() -> set[str]:
    return {line.split()[0] for line in subprocess.check_output(["ip", "netns", "list"], text=True).splitlines()}


def outside() -> list[str]:
    """What the network must leave alone on this machine."""
    shown = [subprocess.check_output(["ip", "-o", kind, "show"], text=True) for kind in ("link", "route", "rule")]
    return [*shown, Path("/proc/sys/net/ipv4/ip_forward").read_text()]


@real
def test_process_in_namespace_keeps_pid_and_signals(network: Namespaces) -> None:
    code = (
        "import os, socket; s = socket.create_server(('127.0.0.1', 0)); socket.create_connection(s.getsockname());"
        "print(os.getpid(), flush=True); s.accept(); s.accept()"
    )
    command = [*network.places["a"].inside, sys.executable, "-S", "-E", "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert int(process.stdout.readline()) == process.pid
        os.kill(process.pid, signal.SIGKILL)
        assert process.wait(PATIENCE_SECONDS) == -signal.SIGKILL


@real
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


@real
def test_failed_start_leaves_nothing(allowed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    run = module._run

    def fails(*command: str, given: str | None = None) -> str:
        if "sh" in command:
            made.append(command[3])
            assert made[0] in names()
            raise CommandFailed("read-only file system")
        return run(*command, given=given)

    monkeypatch.setattr(module, "_run", fails)
    with pytest.raises(CommandFailed, match="read-only"), Namespaces():
        pass
    assert made and made[0] not in names()


@real
def test_failed_command_error_quotes_its_output(allowed: None) -> None:
    with pytest.raises(CommandFailed, match=r"ip netns delete starling-none: .*No such file"):
        module._run("ip", "netns", "delete", "starling-none")
