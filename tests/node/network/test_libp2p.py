"""What is true of the libp2p transport alone: its daemon's life, its limits, its addresses."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from asyncio.subprocess import PIPE
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any, cast

import psutil  # type: ignore[import-untyped]
import pytest
import uvloop

from node.membership.addresses import NAMELESS, is_silent, meaning, missing, shareable
from node.network.daemon import DaemonError, arguments, with_ports
from node.network.daemon_connection import LINK_ERRORS
from node.network.dns import stands_for
from node.network.libp2p import LibP2PConfig, LibP2PTransport
from node.network.serving import ask
from node.runtime import identity
from node.runtime.identity import IdentityError
from protocols import wire
from protocols.base import PeerGone, PeerId, PeerSilent, Stream, Transport
from tests.conformance.other_process import echo
from tests.conformance.worlds import LibP2PPeers, LibP2PWorld, freeze, running_daemons

pytestmark = pytest.mark.real

MIB = 1 << 20
LIMIT = 64

Make = Callable[..., Awaitable[LibP2PTransport]]


def run(directory: Path, body: Callable[[Make], Awaitable[None]]) -> None:
    """Run `body` with a maker of transports, all of which are closed after it; nothing may be left then."""

    async def main() -> None:
        count = 0
        async with AsyncExitStack() as stack:

            async def make(**changes: object) -> LibP2PTransport:
                nonlocal count
                count += 1
                key = identity.create(directory / f"peer{count}")
                config = dataclasses.replace(LibP2PConfig(key, runtime_directory=directory), **changes)
                return await stack.enter_async_context(LibP2PTransport(config))

            await body(make)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
    assert running_daemons() == []
    assert list(directory.glob("starling-*")) == []


@pytest.fixture
def directory() -> Iterator[Path]:
    """A directory for identities, and for the transports' sockets too: pytest's own have too long a path."""
    with tempfile.TemporaryDirectory(prefix="st") as made:
        yield Path(made)


def soon(seconds: float = 20.0) -> float:
    return asyncio.get_running_loop().time() + seconds


def pid_of(transport: LibP2PTransport) -> int:
    assert transport.daemon_pid is not None
    return transport.daemon_pid


async def ping(transport: Transport, peer: PeerId) -> None:
    async with transport.open(peer, "echo", soon()) as stream:
        await stream.send(wire.Chunk(1, 4), b"ping")
        assert await stream.receive(LIMIT) == wire.Chunk(1, 4)


async def until(condition: Callable[[], bool], seconds: float) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


def steal(thief: socket.socket, port: int) -> None:
    """Take the port of a daemon that dies just now. Holds up the loop on purpose: the supervisor must come second."""
    for _ in range(500):
        with suppress(OSError):
            thief.bind(("127.0.0.1", port))
            return thief.listen()
        time.sleep(0.01)
    raise AssertionError("the daemon does not die")


class Mirror(asyncio.Protocol):
    """Says back what it hears: so it is for two that dial at the same instant, and talk to each other's opening."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._transport.write(data)


def is_running(pid: int) -> bool:
    """Whether the process exists, and not only as a zombie that nobody has buried."""
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


class TestLife:
    def test_constructor_has_no_side_effects(self, directory: Path) -> None:
        key = identity.create(directory / "key")
        transport = LibP2PTransport(LibP2PConfig(key))
        assert transport.me == key.peer_id and transport.addresses == () and transport.daemon_pid is None
        assert os.listdir(directory) == ["key"] and running_daemons() == []

    def test_sockets_are_private_and_daemon_has_own_session(self, directory: Path) -> None:
        async def body(make: Make) -> None:
            transport = await make()
            pid = pid_of(transport)
            assert os.getsid(pid) == pid
            with os.scandir(directory) as entries:
                (sockets,) = [path for path in entries if path.is_dir()]
            assert sockets.stat().st_mode & 0o777 == 0o700
            with os.scandir(sockets) as entries:
                assert [path.name for path in entries if not stat.S_ISSOCK(path.stat().st_mode)] == ["lock"]
            assert re.fullmatch(rf"/ip4/127\.0\.0\.1/tcp/[1-9]\d*/p2p/{transport.me}", transport.addresses[0])

        run(directory, body)

    @pytest.mark.parametrize("wanted", [None, "70"])
    def test_daemon_gc_setting_defaults_unless_user_sets_it(
        self, directory: Path, monkeypatch: pytest.MonkeyPatch, wanted: str | None
    ) -> None:
        monkeypatch.delenv("GOGC", raising=False)
        if wanted:
            monkeypatch.setenv("GOGC", wanted)

        async def body(make: Make) -> None:
            assert psutil.Process(pid_of(await make())).environ()["GOGC"] == (wanted or "50")

        run(directory, body)

    def test_identity_in_use_is_rejected(self, directory: Path) -> None:
        async def body(make: Make) -> None:
            first = await make()
            with pytest.raises(IdentityError, match="in use by another running peer"):
                await make(identity=first._config.identity)

        run(directory, body)

    def test_daemon_with_other_peer_id_is_rejected(self, directory: Path) -> None:
        async def body(make: Make) -> None:
            mine, other = identity.create(directory / "mine"), identity.create(directory / "other")
            with pytest.raises(DaemonError, match=f"runs as {mine.peer_id}, not as {other.peer_id}"):
                await make(identity=dataclasses.replace(mine, peer_id=other.peer_id))

        run(directory, body)

    def test_failed_daemon_start_reports_the_reason(self, directory: Path) -> None:
        async def body(make: Make) -> None:
            with pytest.raises(DaemonError, match="cannot assign requested address"):
                await make(listen=("/ip4/203.0.113.1/tcp/0",))

        run(directory, body)

    def test_too_long_socket_path_gives_clear_error(self, directory: Path) -> None:
        async def body(make: Make) -> None:
            deep = directory / ("d" * 80)
            deep.mkdir()
            with pytest.raises(DaemonError, match="too long a path for sockets"):
                await make(runtime_directory=deep)

        run(directory, body)

    def test_close_aborts_open_streams(self, directory: Path) -> None:
        async def body(make: Make) -> None:
            a, b = await make(), await make()
            await a.connect(b.addresses[0], soon())
            b.serve("echo", echo)
            streams = [a.open(b.me, "echo", soon()) for _ in range(5)]
            opened = [await stream.__aenter__() for stream in streams]
            await a.__aexit__()
            await b.__aexit__()
            for stream in opened:
                with pytest.raises(PeerSilent):
                    await stream.receive(LIMIT)
            for stream in streams:
                await stream.__aexit__(None, None, None)
            with pytest.raises(PeerGone, match="closed"):
                await ping(a, b.me)
            await asyncio.sleep(0.1)

        run(directory, body)


class TestSupervision:
    def test_killed_daemon_is_restarted_with_same_addresses(self, directory: Path) -> None:
        async def body(make: Make) -> None:
            a, b = await make(), await make()
            await a.connect(b.addresses[0], soon())
            b.serve("echo", echo)
            addresses = b.addresses
            await ping(a, b.me)
            for count in (1, 2, 3):
                killed = pid_of(b)
                os.kill(killed, signal.SIGKILL)
                await until(lambda killed=killed: b.daemon_pid != killed, 2)
                await until(lambda count=count: b.restarts == count, 10)
                assert b.addresses == addresses
                await ping(a, b.me)

        run(directory, body)

    def test_open_waits_for_daemon_restart(self, directory: Path) -> None:
        async def body(make: Make) -> None:
            a, b = await make(), await make()
            await a.connect(b.addresses[0], soon())
            b.serve("echo", echo)
            os.kill(pid_of(a), signal.SIGKILL)
            await ping(a, b.me)
            assert a.restarts == 1

        run(directory, body)

    def test_port_taken_during_restart_is_replaced(self, directory: Path) -> None:
        async def body(make: Make) -> None:
            a, b = await make(), await make()
            b.serve("echo", echo)
            port = int(b.addresses[0].split("/")[4])
            with socket.socket() as thief:
                os.kill(pid_of(b), signal.SIGKILL)
                thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                steal(thief, port)
                await until(lambda: b.restarts == 1, 20)
            assert f"/tcp/{port}/" not in b.addresses[0]
            await a.connect(b.addresses[0], soon())
            await ping(a, b.me)

        run(directory, body)

    def test_close_while_daemon_is_down_succeeds(self, directory: Path) -> None:
        async def body(make: Make) -> None:
            a, b = await make(), await make()
            await a.connect(b.addresses[0], soon())
            os.kill(pid_of(a), signal.SIGKILL)
            opening = asyncio.create_task(ping(a, b.me))
            await until(lambda: a.daemon_pid is None, 5)
            await a.__aexit__()
            with pytest.raises(PeerGone, match="closed"):
                await opening

        run(directory, body)

    def test_frozen_daemon_is_closed(self, directory: Path) -> None:
        async def body(make: Make) -> None:
            await freeze((await make()).daemon_pid)

        run(directory, body)

    def test_hung_daemon_is_detected_and_replaced(self, directory: Path) -> None:
        async def body(make: Make) -> None:
            a, b = await make(), await make()
            await a.connect(b.addresses[0], soon())
            b.serve("echo", echo)
            await ping(a, b.me)
            await freeze(b.daemon_pid)
            await until(lambda: b.restarts == 1, 15)
            await ping(a, b.me)

        run(directory, body)


class TestLimits:
    def test_streams_are_limited_per_peer_and_in_total(self, directory: Path) -> None:
        async def body(make: Make) -> None:
            a, b = await make(), await make()
            c = await make(max_streams=3, max_streams_per_peer=2)
            c.serve("echo", echo)
            for transport in (a, b):
                await transport.connect(c.addresses[0], soon())
            async with a.open(c.me, "echo", soon()), a.open(c.me, "echo", soon()):
                with pytest.raises(PeerGone):
                    await ping(a, c.me)
                async with b.open(c.me, "echo", soon()):
                    with pytest.raises(PeerGone):
                        await ping(b, c.me)
            assert c.refused == {(a.me, "too many streams"): 1, (b.me, "too many streams"): 1}
            await until(lambda: not c._serving._active, 5)
            await ping(a, c.me)

        run(directory, body)

    def test_peers_breaking_rules_are_named(self, directory: Path) -> None:
        async def body(make: Make) -> None:
            a, b = await make(), await make()
            await a.connect(b.addresses[0], soon())

            async def strict(peer: PeerId, stream: Stream) -> None:
                wire.expect(await stream.receive(LIMIT), wire.PartDone)

            b.serve("strict", strict)
            async with a.open(b.me, "strict", soon()) as stream:
                await stream.send(wire.Chunk(1, 0))
                with pytest.raises(PeerSilent):
                    await stream.receive(LIMIT)
            with pytest.raises(PeerGone):
                await ping(a, b.me)
            assert a._link is not None
            pipe = await a._link.stream(b.me, 5)
            await ask(pipe, "strict")
            await pipe.write(b"\xff\xff\xff\xff")
            with pytest.raises((EOFError, OSError)):
                await pipe.read_into(memoryview(bytearray(1)))
            pipe.abort()
            assert b.refused == {(a.me, "bad payload"): 2, (a.me, "method not served"): 1}

        run(directory, body)

    def test_serving_a_method_twice_is_an_error(self, directory: Path) -> None:
        transport = LibP2PTransport(LibP2PConfig(identity.create(directory / "key")))
        transport.serve("echo", echo)
        for method in ("echo", "", "m" * 65):
            with pytest.raises(ValueError, match="is served already, or is not a name"):
                transport.serve(method, echo)


class TestAddresses:
    def test_connect_rejects_invalid_addresses(self, directory: Path) -> None:
        async def body(make: Make) -> None:
            a, b, c = await make(), await make(), await make()
            where = b.addresses[0].rpartition("/p2p/")[0]
            for nonsense in ("", "hello", "/ip4/1.2.3.4/tcp/1", f"/p2p/{b.me}", "/ip4/1.2.3.4/tcp/1/p2p/me"):
                with pytest.raises(ValueError):
                    await a.connect(nonsense, soon())
            with pytest.raises(PeerGone):
                await a.connect(f"{where}/p2p/{c.me}", soon())
            await c.__aexit__()
            with pytest.raises(PeerGone):
                await a.connect(f"/ip4/127.0.0.1/tcp/1/p2p/{c.me}", soon())
            with pytest.raises(PeerGone):
                await ping(a, a.me)
            await freeze(b.daemon_pid)
            with pytest.raises(PeerSilent):
                await a.connect(b.addresses[0], soon(0.5))
            os.kill(pid_of(b), signal.SIGCONT)

        run(directory, body)

    def test_failed_connection_reports_the_reason(self, directory: Path) -> None:
        async def body(make: Make) -> None:
            a, b = await make(), await make()
            silent = socket.create_server(("127.0.0.1", 0))  # takes connections, and says nothing
            stranger = identity.create(directory / "stranger").peer_id
            where = b.addresses[0].rpartition("/p2p/")[0]
            cases = [
                ("/ip4/127.0.0.1/tcp/1", PeerGone, "nothing listens there"),
                (where, PeerGone, f"another peer is there, {b.me}"),
                (where, PeerGone, f"another peer is there, {b.me}"),  # not dialled again so soon, and still told
                ("/dns4/nobody.invalid/tcp/1", PeerGone, "name has no address"),
                ("/ip4/127.0.0.1/udp/1", PeerGone, "is not spoken here"),
                ("/ip4/127.0.0.1/tcp/1/p2p-circuit", PeerGone, "relay is not named"),
                (f"{b.addresses[0]}/p2p-circuit", PeerGone, "relay"),
                (f"/ip4/127.0.0.1/tcp/{silent.getsockname()[1]}", PeerSilent, "no answer"),
            ]
            for address, kind, why in cases:
                with pytest.raises(kind, match=why):
                    await a.connect(f"{address}/p2p/{stranger}", soon(1.5))
            with pytest.raises(PeerGone, match="this peer itself"):
                await a.connect(a.addresses[0], soon())
            for malformed in ("/ip4/127.0.0.1/tcp/99999/p2p/x", "127.0.0.1:4001"):
                with pytest.raises(ValueError, match="not a multiaddr like"):
                    await a.connect(malformed, soon())
            with pytest.raises(ValueError, match="must end in /p2p/"):
                await a.connect(f"{b.addresses[0]}/p2p-circuit", soon())
            silent.close()

        run(directory, body)

    def test_crossed_and_automatic_dials_are_retried(self, directory: Path) -> None:
        async def body(make: Make) -> None:
            a, key = await make(), identity.create(directory / "b")
            stranger, nowhere = identity.create(directory / "stranger").peer_id, "/ip4/127.0.0.1/tcp/1"
            mirror = await asyncio.get_running_loop().create_server(Mirror, "127.0.0.1", 0)
            where = f"/ip4/127.0.0.1/tcp/{mirror.sockets[0].getsockname()[1]}"
            with pytest.raises(PeerGone, match="both sides dialled at the same instant"):
                await a.connect(f"{where}/p2p/{key.peer_id}", soon(1.5))
            with pytest.raises(LINK_ERRORS, match="connection refused"):
                await (await a.link()).connect(stranger, nowhere, 5)
            mirror.close()
            b = await make(identity=key, listen=(where,))
            b.serve("echo", echo)
            dials = (f"{where}/p2p/{b.me}", f"{nowhere}/p2p/{stranger}")
            met, refused = await asyncio.gather(*(a.connect(each, soon()) for each in dials), return_exceptions=True)
            assert met == b.me
            assert isinstance(refused, PeerGone) and "nothing listens there" in refused.why
            await ping(a, b.me)

        run(directory, body)

    def test_forgetting_a_peer_disconnects_it(self, directory: Path) -> None:
        async def body(make: Make) -> None:
            a, b = await make(), await make()
            b.serve("echo", echo)
            await a.connect(b.addresses[0], soon())
            async with a.open(b.me, "echo", soon()) as stream:
                await a.forget(b.me, soon())
                with pytest.raises(PeerSilent):
                    await stream.receive(LIMIT)
            assert b.me not in a._known
            await a.forget(b.me, soon())

        run(directory, body)

    def test_port_in_use_is_named_in_error(self, directory: Path, caplog: pytest.LogCaptureFixture) -> None:
        async def body(make: Make) -> None:
            with socket.socket() as taken:
                taken.bind(("127.0.0.1", 0))
                taken.listen()
                port = taken.getsockname()[1]
                with pytest.raises(
                    DaemonError, match=rf"^tcp 127.0.0.1:{port} is in use by another program: stop that"
                ):
                    await make(listen=(f"/ip4/127.0.0.1/tcp/{port}",))
                both = await make(listen=(f"/ip4/127.0.0.1/tcp/{port}", "/ip4/127.0.0.1/tcp/0"))
                assert len(both.addresses) == 1
                assert f"not listening on /ip4/127.0.0.1/tcp/{port}" in caplog.text

        run(directory, body)

    def test_listens_on_all_interfaces_in_both_families(
        self, directory: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        async def body(make: Make) -> None:
            a, b = [await make(listen=("/ip4/0.0.0.0/tcp/0", "/ip6/::/tcp/0", "/ip6/2001:db8::1/tcp/0")) for _ in "ab"]
            b.serve("echo", echo)
            assert "not listening on /ip6/2001:db8::1/tcp/0" in caplog.text
            families = {address.split("/")[1] for address in b.addresses}
            assert "ip4" in families
            for family in families:
                await a.connect(next(each for each in b.addresses if each.split("/")[1] == family), soon())
            await ping(a, b.me)
            before = set(b.addresses)
            os.kill(pid_of(b), signal.SIGKILL)
            await until(lambda: b.restarts == 1, 10)
            assert set(b.addresses) == before

        run(directory, body)

    def test_peers_find_each_other_through_a_third(self, directory: Path) -> None:
        async def body(make: Make) -> None:
            a, b, c = await make(), await make(), await make()
            c.serve("echo", echo)
            for transport in (a, c):
                assert await transport.connect(b.addresses[0], soon()) == b.me
            async with asyncio.timeout(10):
                while True:  # libp2p fills its table of peers behind our back
                    with suppress(PeerGone):
                        return await ping(a, c.me)
                    await asyncio.sleep(0.1)

        run(directory, body)

    def test_shareable_addresses_exclude_local_and_sort_public_first(self) -> None:
        worthless = (
            "/dns4/localhost/tcp/1",
            "/ip4/127.0.0.1/tcp/1",
            "/ip6/::1/tcp/1",
            "/ip4/0.0.0.0/tcp/1",
            "/ip6/fe80::1/tcp/1",
            "/unix/x",
        )
        relayed = "/ip4/8.8.4.4/tcp/1/p2p/12D3KooWGcbDLU2ShHsJN7tGS1iA98ub6vsTY6kS5GNzs8UFaKTh/p2p-circuit"
        found = (
            *worthless,
            "/ip4/10.0.0.7/tcp/1",
            "/ip6/fd00::2/tcp/1",
            relayed,
            "/ip4/8.8.8.8/tcp/1",
            "junk",
            "/ip4/x/y",
        )
        expected = ("/ip4/8.8.8.8/tcp/1", relayed, "/ip4/10.0.0.7/tcp/1", "/ip6/fd00::2/tcp/1")
        assert shareable(found) == expected
        assert shareable(("/dns4/example.org/tcp/1", *found))[0] == "/dns4/example.org/tcp/1"
        assert shareable(worthless) == ()

    def test_p2pd_errors_are_translated(self) -> None:
        words = "all dials failed\n  * [/ip4/1.1.1.1/tcp/1] dial backoff\n  * [/ip4/2.2.2.2/tcp/1] connection refused"
        assert "failed a moment ago" in meaning(words, "/ip4/1.1.1.1/tcp/1")
        assert "nothing listens there" in meaning(words, "/ip4/2.2.2.2/tcp/1")
        assert "nothing listens there" in meaning(words)
        mute = "failed to negotiate security protocol: context deadline exceeded"
        for silent in ("dial tcp4 1.2.3.4:1: i/o timeout", "failed to dial: context deadline exceeded", mute):
            assert is_silent(silent) and "no answer" in meaning(silent)
        assert not is_silent(words)
        assert "no libp2p peer" in meaning(
            "failed to negotiate security protocol: message did not have trailing newline"
        )
        closed = "failed to negotiate security protocol: EOF"
        assert "takes connections and closes them" in meaning(closed)
        assert meaning("something\nnew") == "something" and meaning("") == "p2pd gave no reason"

    def test_dial_errors_of_name_come_from_its_addresses(self) -> None:
        old = "all dials failed\n  * [/ip4/3.3.3.3/tcp/1] no route to host"
        refused, waits = "\n  * [/ip4/2.2.2.2/tcp/1] connection refused", "\n  * [/ip6/::2/tcp/1] dial backoff"
        name, places = "/dns/x/tcp/1", ("/ip4/2.2.2.2/tcp/1", "/ip6/::2/tcp/1")
        assert meaning(old, name, ()) == meaning("failed to dial: no good addresses", name, ()) == NAMELESS
        assert "nothing listens there" in meaning(f"{old}{waits}{refused}", name, places)
        assert "failed a moment ago" in meaning(f"{old}{waits}", name, places)
        assert "none of its addresses" in meaning("failed to dial: no good addresses", name, places)

    def test_dns_name_resolves_to_addresses_of_its_kind(self) -> None:
        async def found(where: str, seconds: float = 5.0) -> tuple[str, ...] | None:
            return await stands_for(where, asyncio.get_running_loop().time() + seconds)

        assert asyncio.run(found("/dns4/localhost/tcp/1")) == ("/ip4/127.0.0.1/tcp/1",)
        assert "/ip4/127.0.0.1/tcp/1/ws" in (asyncio.run(found("/dns/localhost/tcp/1/ws")) or ())
        assert asyncio.run(found("/dns4/nobody.invalid/tcp/1")) == asyncio.run(found("/dns4/a..b/tcp/1")) == ()
        for unknown in ("/ip4/127.0.0.1/tcp/1", "/dnsaddr/x", "", "/"):
            assert asyncio.run(found(unknown)) is None
        assert asyncio.run(found("/dns4/localhost/tcp/1", -1.0)) is None

    def test_missing_lists_listen_addresses_not_obtained(self) -> None:
        found = ("/ip4/127.0.0.1/tcp/4001", "/ip4/10.0.0.7/tcp/4001")
        assert missing(("/ip4/0.0.0.0/tcp/0", "/ip4/0.0.0.0/tcp/4001", "/dns4/x/tcp/1"), found) == ()
        absent = ("/ip6/::/tcp/0", "/ip4/0.0.0.0/tcp/4002", "/ip4/10.9.9.9/tcp/0", "/ip4/0.0.0.0/udp/0/quic-v1")
        assert missing(absent, found) == absent

    def test_open_ports_are_filled_in_from_found_addresses(self) -> None:
        found = ("/ip4/203.0.113.5/tcp/1", "/ip4/127.0.0.1/tcp/4001", "/ip4/10.0.0.7/tcp/4001", "/ip6/::1/tcp/4002")
        cases = {
            "/ip4/0.0.0.0/tcp/0": "/ip4/0.0.0.0/tcp/4001",
            "/ip4/10.0.0.7/tcp/0": "/ip4/10.0.0.7/tcp/4001",
            "/ip4/0.0.0.0/tcp/7": "/ip4/0.0.0.0/tcp/7",
            "/ip6/::/tcp/0": "/ip6/::/tcp/4002",
            "/ip4/10.9.9.9/tcp/0": "/ip4/10.9.9.9/tcp/0",
            "/ip4/0.0.0.0/udp/0/quic-v1": "/ip4/0.0.0.0/udp/0/quic-v1",
            "/dns4/example.org/tcp/0": "/dns4/example.org/tcp/0",
        }
        assert with_ports(tuple(cases), found) == tuple(cases.values())


def test_previous_port_is_reused_if_free(directory: Path) -> None:
    async def body(make: Make) -> None:
        last = await make()
        kept, port = last.listening, int(last.listening[0].rpartition("/")[2])
        await last.__aexit__(None, None, None)
        again = await make(kept=kept)
        assert again.listening == kept != LibP2PConfig.listen
        await again.__aexit__(None, None, None)
        with socket.socket() as thief:
            steal(thief, port)
            third = await make(kept=kept)
            assert third.listening[0].rpartition("/")[0] == kept[0].rpartition("/")[0]
            assert third.listening != kept and third.addresses

    run(directory, body)


class TestNat:
    def test_peers_without_nat_connect_with_nat_enabled(self, directory: Path) -> None:
        async def body(make: Make) -> None:
            a, b = await make(nat=True), await make(nat=True)
            b.serve("echo", echo)
            await a.connect(b.addresses[0], soon())
            await ping(a, b.me)

        run(directory, body)

    def test_peer_without_listen_address_is_reached_through_relay(
        self, directory: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        extra: list[str] = []

        def told(*given: Any) -> list[str]:
            return [each for each in arguments(*given) if not each.startswith("-hostAddrs") or not extra] + extra

        async def body(make: Make) -> None:
            extra[:] = ["-hostAddrs=/ip4/127.0.0.1/tcp/0", "-forceReachabilityPublic=1"]
            relay = await make(nat=True)
            # Neither of the two can be dialled by the other. The relay is named to them, because p2pd's own search
            # for one takes from seconds to minutes.
            extra[:] = ["-noListenAddrs=1", "-forceReachabilityPrivate=1"]
            extra.extend(["-relayDiscovery=0", f"-trustedRelays={relay.addresses[0]}"])
            a, b = await make(nat=True), await make(nat=True)
            b.serve("echo", echo)
            for peer in (a, b):
                await peer.connect(relay.addresses[0], soon())
            async with asyncio.timeout(30):
                while not await self.reached(a, b.me, relay):  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
            await ping(a, b.me)
            assert "/p2p-circuit" in b._seen[a.me]

        monkeypatch.setattr("node.network.libp2p.arguments", told)
        run(directory, body)

    async def reached(self, transport: LibP2PTransport, peer: PeerId, relay: LibP2PTransport) -> bool:
        with suppress(PeerGone):
            await transport.connect(f"{relay.addresses[0]}/p2p-circuit/p2p/{peer}", soon())
            return True
        return False


ORPHAN = """
import asyncio, os, signal, sys
from pathlib import Path
from node.network.daemon import Daemon, arguments

async def main(directory: Path) -> None:
    daemon = await Daemon.start(arguments(directory / "control", directory / "peer", ["/ip4/127.0.0.1/tcp/0"]))
    assert "hivemind" not in sys.modules and "torch" not in sys.modules
    print(daemon.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main(Path(sys.argv[1])))
"""


class TestProcesses:
    def test_daemon_dies_with_its_unattached_parent(self, directory: Path) -> None:
        identity.create(directory / "peer")
        parent = subprocess.run((sys.executable, "-c", ORPHAN, str(directory)), capture_output=True, text=True)
        assert parent.returncode == -signal.SIGKILL, parent.stderr
        deadline = time.monotonic() + 5
        while is_running(int(parent.stdout)):
            assert time.monotonic() < deadline, "p2pd outlives its parent"
            time.sleep(0.01)

    def test_killed_process_takes_its_daemon_along(self, directory: Path) -> None:
        async def body(make: Make) -> None:
            a = await make()
            other = await asyncio.create_subprocess_exec(
                *(sys.executable, "-W", "ignore", "-m", "tests.conformance.other_process", str(directory / "other")),
                stdin=PIPE,
                stdout=PIPE,
                env=os.environ
                | {"TMPDIR": tempfile.mkdtemp(dir=directory)},  # where a killed process leaves its sockets
            )
            try:
                assert other.stdout is not None
                async with asyncio.timeout(30):
                    address = (await other.stdout.readline()).decode().strip()
                peer = await a.connect(address, soon())
                children = children_of(other.pid)
                async with a.open(peer, "echo", soon()) as stream:
                    await stream.send(wire.Chunk(1, 4), b"ping")
                    assert await stream.receive(LIMIT) == wire.Chunk(1, 4)
                    other.kill()
                    with pytest.raises(PeerSilent):
                        await stream.receive_into(memoryview(bytearray(5)))
                assert children
                await until(lambda: not any(is_running(pid) for pid in children), 5)
            finally:
                with suppress(ProcessLookupError):
                    other.kill()
                await other.wait()

        run(directory, body)

    def test_aborted_openers_leave_no_streams_in_daemons(self, caplog: pytest.LogCaptureFixture) -> None:
        async def body(peers: LibP2PPeers) -> None:
            a, b = peers.transports

            async def pour(peer: PeerId, stream: Stream) -> None:
                while True:
                    await stream.send(wire.Chunk(1, MIB), bytes(MIB))

            b.serve("pour", pour)
            for _ in range(20):
                async with a.open(b.me, "pour", soon()):
                    await asyncio.sleep(0.03)
            await until(lambda: not a._serving._lingering and not b._serving._active, 20)
            counts = []
            for transport in (a, b):
                caplog.clear()
                os.kill(pid_of(transport), signal.SIGUSR1)  # p2pd prints its connections
                await until(lambda: "streams (" in caplog.text, 5)
                counts += [int(count) for count in re.findall(r"\tstreams \((\d+)\)", caplog.text)]
            # Two belong to libp2p itself.
            assert max(counts) <= 4, counts

        caplog.set_level(logging.DEBUG, "node.network.daemon")
        LibP2PWorld().run(body)
