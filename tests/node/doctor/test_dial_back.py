"""Dial-back: a helper dials the host of the peer that asks, and nobody else's; its bounds, and real ports."""

from __future__ import annotations

import asyncio
import errno
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from node.doctor.dial_back import (
    AT_ONCE,
    BANNER,
    DIAL_SECONDS,
    HOST_REQUESTS,
    PAUSE_SECONDS,
    PEER_REQUESTS,
    PortProber,
    ask_dial_back,
)
from node.joining.bootstrap import BootstrapServer, RunInfo
from node.membership.hello import PortResult, PortsProbed, ProbedPort, ProbePorts
from protocols.base import PeerId
from tests.sim.loop import run as run_on_virtual_time
from tests.support.real_transports import TransportMaker, on_uvloop, soon
from tests.support.simulated import on_virtual_time
from tests.support.waiting import now

HOSTS: dict[str, str | None] = {
    "asker": "84.23.1.9",
    "neighbour": "84.23.1.9",
    "six": "2a01:4f8::1",
    "near": "192.168.1.5",
    "relayed": None,
    "odd": "0.0.0.0",
    "all": "255.255.255.255",
    "mapped": "::ffff:84.23.1.9",
    "mapped loopback": "::ffff:127.0.0.1",
    "link": "fe80::1%eth0",
    "link of 4": "169.254.169.254",
}


class Network:
    """Where helpers dial: what each port answers. All dials are noted."""

    def __init__(self, **ports: Any) -> None:
        self.dialled: list[tuple[str, int]] = []
        self.open = self.most_open = 0
        self._answers = {int(port.removeprefix("p")): answer for port, answer in ports.items()}

    async def connect(self, host: str, port: int) -> tuple[asyncio.StreamReader, Any]:
        self.dialled.append((host, port))
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        answer = self._answers.get(port, errno.ECONNREFUSED)
        try:
            if answer is None:
                await asyncio.sleep(1e6)
            await asyncio.sleep(0.03)
            if isinstance(answer, int):
                raise OSError(answer, "no")
        except BaseException:
            self.open -= 1
            raise
        reader = asyncio.StreamReader()
        reader.feed_data(answer)

        def abort() -> None:
            self.open -= 1

        writer = SimpleNamespace(transport=SimpleNamespace(abort=abort), get_extra_info=lambda name: name)
        return reader, writer


def prober(network: Network) -> PortProber:
    return PortProber(HOSTS.get, network.connect)


@on_virtual_time
async def test_results_say_what_each_port_did() -> None:
    network = Network(p4001=BANNER, p4002=b"", p4003=None, p4004=errno.EHOSTUNREACH)
    began = now()
    answer = await prober(network).probe("asker", ProbePorts((4001, 4002, 4003, 4004)))
    assert (answer.host, answer.why) == ("84.23.1.9", "")
    assert [(each.port, each.result) for each in answer.ports] == [
        (4001, PortResult.LIBP2P),
        (4002, PortResult.OPEN),
        (4003, PortResult.SILENT),
        (4004, PortResult.UNREACHABLE),
    ]
    assert [each.seconds for each in answer.ports] == pytest.approx([0.03, 0.03, DIAL_SECONDS, 0.03])
    assert now() - began == pytest.approx(DIAL_SECONDS) and network.open == 0
    another = await prober(Network(p5001=b"HTTP/1.1 400 Bad Request\r\n")).probe("six", ProbePorts((5001, 5002)))
    assert [each.result for each in another.ports] == [PortResult.OPEN, PortResult.REFUSED]


REQUESTS = st.tuples(st.sampled_from(sorted(HOSTS)), st.lists(st.integers(0, 65_535), max_size=4), st.floats(0, 90))


@given(st.lists(REQUESTS, max_size=40))
@settings(max_examples=40)
def test_a_helper_never_dials_a_third_host_nor_much(requests: list[tuple[str, list[int], float]]) -> None:
    """Whatever peers ask, in whatever order: only hosts of their own, few ports, rarely."""
    network = Network(p4001=BANNER)

    async def play() -> None:
        helper, asked = prober(network), []
        for peer, ports, pause in requests:
            before = len(network.dialled)
            task = asyncio.ensure_future(helper.probe(peer, ProbePorts(tuple(ports))))
            asked.append(task)
            await asyncio.sleep(0.001)
            fresh = network.dialled[before:]
            assert all(
                host == (HOSTS[peer] or "").removeprefix("::ffff:") and port in ports and port >= 1024
                for host, port in fresh
            )
            assert len(fresh) <= 4
            await asyncio.sleep(pause)
        for each in asked:
            await each
        limit = 4 * HOST_REQUESTS * (1 + sum(pause for *_, pause in requests) / PAUSE_SECONDS)
        for host in set(HOSTS.values()):
            assert sum(each == host for each, _ in network.dialled) <= limit + 4 * HOST_REQUESTS

    run_on_virtual_time(play(), limit_seconds=1e6)
    assert network.most_open <= 4 * AT_ONCE and network.open == 0
    assert {host for host, _ in network.dialled} <= {"84.23.1.9", "2a01:4f8::1", "192.168.1.5"}


@on_virtual_time
async def test_few_requests_a_minute_for_a_peer_and_for_a_host() -> None:
    network = Network()
    helper = prober(network)

    async def asks(peer: PeerId, *ports: int) -> str:
        return (await helper.probe(peer, ProbePorts(ports))).why

    assert await asks("relayed", 4001) == await asks("unknown", 4001) == "it is connected through a relay"
    for odd in ("odd", "all", "mapped loopback", "link", "link of 4"):
        assert await asks(odd, 4001) == f"it is connected from {HOSTS[odd]}, which is not dialled"
    assert "from 1024" in await asks("asker") and "from 1024" in await asks("asker", 4001, 22)
    assert not network.dialled
    assert [await asks("asker", 4001) for _ in range(PEER_REQUESTS)] == [""] * PEER_REQUESTS
    assert "too often" in await asks("asker", 4001)
    assert not await asks("mapped", 4001) and "too often" in await asks("neighbour", 4001), "of the same host"
    await asyncio.sleep(PAUSE_SECONDS)
    assert not await asks("asker", 4001)
    assert network.dialled == [("84.23.1.9", 4001)] * 5


@on_virtual_time
async def test_addresses_of_one_network_of_ipv6_are_one_host() -> None:
    network = Network()
    helper = PortProber(lambda peer: f"2a01:4f8:0:{peer}", network.connect)
    answers = [(await helper.probe(f"1::{number}", ProbePorts((4001,)))).why for number in range(HOST_REQUESTS + 1)]
    assert answers[:-1] == [""] * HOST_REQUESTS and "too often" in answers[-1]
    assert not (await helper.probe("2::1", ProbePorts((4001,)))).why


@on_virtual_time
async def test_few_are_helped_at_once() -> None:
    network = Network(p4001=None)
    helper = PortProber(lambda peer: f"84.{peer}.1.1", network.connect)
    tasks = [asyncio.ensure_future(helper.probe(str(peer), ProbePorts((4001,)))) for peer in range(AT_ONCE + 2)]
    await asyncio.sleep(0.1)
    assert network.open == AT_ONCE
    answers = [await each for each in tasks]
    assert [each.why for each in answers] == [""] * AT_ONCE + ["it helps too many others now"] * 2
    assert not (await helper.probe("9", ProbePorts((4001,)))).why


# -- real ports --------------------------------------------------------------------------------------------------------


async def _helper(make: TransportMaker) -> tuple[Any, Any]:
    """A peer with a data port, and one that is connected to it and helps."""
    asker = await make(direct_methods={"echo"})
    helper = await make()
    BootstrapServer(helper, RunInfo(b"", b""), dict, probe=PortProber(helper.host_of).probe)
    await asker.connect(helper.addresses[0], soon())
    return asker, helper


@pytest.mark.real
@on_uvloop
async def test_real_ports_are_dialled_at_the_askers_host(make: TransportMaker) -> None:
    asker, helper = await _helper(make)
    libp2p = int(asker.listening[0].split("/")[4])
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    another = server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()
    report = await ask_dial_back(asker, helper.me, "helper", (libp2p, asker.direct_port, another))
    assert (report.helper, report.host, report.why) == ("helper", "127.0.0.1", "")
    assert {each.port: each.result for each in report.ports} == {
        libp2p: PortResult.LIBP2P,
        asker.direct_port: PortResult.OPEN,
        another: PortResult.REFUSED,
    }
    for _ in range(PEER_REQUESTS - 1):
        assert (await ask_dial_back(asker, helper.me, "helper", (libp2p,))).ports
    again = await ask_dial_back(asker, helper.me, "helper", (libp2p,))
    assert again.why == "it was asked too often in the last minute" and not again.ports


@pytest.mark.real
@on_uvloop
async def test_helper_of_an_older_version_or_that_lies_is_no_proof(make: TransportMaker) -> None:
    asker, helper = await make(), await make()
    answers = iter(
        (
            PortsProbed("84.1.1.1/x", "", (ProbedPort(4001, "libp2p", 0.1),)),
            PortsProbed("84.1.1.1", "", (ProbedPort(4002, "libp2p", 0.1),)),
            PortsProbed("84.1.1.1", "", (ProbedPort(4001, "splendid", 0.1),)),
            PortsProbed("84.1.1.1", "\x1b[31mno\n", ()),
        )
    )

    async def probe(peer: PeerId, request: ProbePorts) -> PortsProbed:
        return next(answers)

    assert not (await ask_dial_back(asker, helper.me, "h", (4001,))).ports  # not even connected
    await asker.connect(helper.addresses[0], soon())
    assert "older version" in (await ask_dial_back(asker, helper.me, "h", (4001,))).why
    BootstrapServer(helper, RunInfo(b"", b""), dict, probe=probe)
    for _ in range(3):
        report = await ask_dial_back(asker, helper.me, "h", (4001,))
        assert (report.ports, report.why) == ((), "its answer makes no sense")
    assert (await ask_dial_back(asker, helper.me, "h", (4001,))).why == "[31mno"
