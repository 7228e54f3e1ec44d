"""What is true of the libp2p transport alone: its daemon, its limits, its connections."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import psutil
import pytest

from node.network.daemon import DaemonError, arguments
from node.network.daemon_connection import LINK_ERRORS
from node.network.libp2p import LibP2PTransport
from node.runtime import identity
from node.runtime.identity import IdentityError
from protocols import wire
from protocols.base import PeerGone, PeerId, PeerSilent, Stream, Transport
from tests.conformance.other_process import echo
from tests.conformance.worlds import freeze
from tests.support.real_transports import TransportMaker, on_uvloop, soon
from tests.support.transport_pool import Pool
from tests.support.waiting import until

pytestmark = pytest.mark.real

MIB = 1 << 20
LIMIT = 64


def pid_of(transport: LibP2PTransport) -> int:
    assert transport.daemon_pid is not None
    return transport.daemon_pid


async def ping(transport: Transport, peer: PeerId, method: str = "echo") -> None:
    async with transport.open(peer, method, soon()) as stream:
        await stream.send(wire.Chunk(1, 4), b"ping")
        assert await stream.receive(LIMIT) == wire.Chunk(1, 4)


def steal(thief: socket.socket, port: int) -> None:
    """Take the port of a daemon that dies just now. Blocks the loop on purpose: the supervisor must come second."""
    for _ in range(500):
        with suppress(OSError):
            thief.bind(("127.0.0.1", port))
            return thief.listen()
        time.sleep(0.01)
    raise AssertionError("the daemon does not die")


class Mirror(asyncio.Protocol):
    """Echoes: to a dialler this looks like another peer that dials it at the same instant."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._transport.write(data)


def is_running(pid: int) -> bool:
    """Whether the process exists, and not only as a zombie."""
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


class TestLife:
    @on_uvloop
    async def test_sockets_are_private_and_daemon_has_own_session(self, make: TransportMaker) -> None:
        transport = await make()
        pid = pid_of(transport)
        assert os.getsid(pid) == pid
        with os.scandir(make.directory) as entries:
            (sockets,) = [path for path in entries if path.is_dir()]
        assert sockets.stat().st_mode & 0o777 == 0o700
        with os.scandir(sockets) as entries:
            assert [path.name for path in entries if not stat.S_ISSOCK(path.stat().st_mode)] == ["lock"]
        assert re.fullmatch(rf"/ip4/127\.0\.0\.1/tcp/[1-9]\d*/p2p/{transport.me}", transport.addresses[0])

    @pytest.mark.parametrize("wanted", [None, "70"])
    @on_uvloop
    async def test_daemon_gc_setting_defaults_unless_user_sets_it(
        self, make: TransportMaker, monkeypatch: pytest.MonkeyPatch, wanted: str | None
    ) -> None:
        monkeypatch.delenv("GOGC", raising=False)
        if wanted:
            monkeypatch.setenv("GOGC", wanted)
        assert psutil.Process(pid_of(await make())).environ()["GOGC"] == (wanted or "50")

    @on_uvloop
    async def test_wrong_identity_is_rejected(self, make: TransportMaker) -> None:
        first = await make()
        with pytest.raises(IdentityError, match="in use by another running peer"):
            await make(identity=first._identity)
        mine, other = identity.create(make.directory / "mine"), identity.create(make.directory / "other")
        with pytest.raises(DaemonError, match=f"runs as {mine.peer_id}, not as {other.peer_id}"):
            await make(identity=dataclasses.replace(mine, peer_id=other.peer_id))

    @on_uvloop
    async def test_failed_daemon_start_reports_the_reason(self, make: TransportMaker) -> None:
        with pytest.raises(DaemonError, match="cannot assign requested address"):
            await make(listen=("/ip4/203.0.113.1/tcp/0",))
        deep = make.directory / ("d" * 80)
        deep.mkdir()
        with pytest.raises(DaemonError, match="too long a path for sockets"):
            await make(runtime_directory=deep)

    @on_uvloop
    async def test_close_aborts_open_streams(self, make: TransportMaker) -> None:
        a, b = await make.pair()
        streams = [a.open(b.me, "echo", soon()) for _ in range(5)]
        opened = [await stream.__aenter__() for stream in streams]
        await a.__aexit__()
        await b.__aexit__()
        for stream in opened:
            with pytest.raises(PeerSilent):
                await stream.receive(LIMIT)
        for context in streams:
            await context.__aexit__(None, None, None)
        with pytest.raises(PeerGone, match="closed"):
            await ping(a, b.me)
        await asyncio.sleep(0.1)


class TestSupervision:
    @on_uvloop
    async def test_killed_daemon_is_restarted_with_same_addresses(self, make: TransportMaker) -> None:
        a, b = await make.pair()
        addresses = b.addresses
        await ping(a, b.me)

        async def kill(count: int) -> None:
            killed = pid_of(b)
            os.kill(killed, signal.SIGKILL)
            await until(lambda: b.daemon_pid != killed, 2)
            await until(lambda: b.restarts == count, 10)
            assert b.addresses == addresses
            await ping(a, b.me)

        await kill(1)
        await kill(2)
        os.kill(pid_of(a), signal.SIGKILL)  # the next ping waits for the restart
        await ping(a, b.me)
        assert a.restarts == 1

    @pytest.mark.long
    @on_uvloop
    async def test_port_taken_during_restart_is_replaced(self, make: TransportMaker) -> None:
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

    @on_uvloop
    async def test_close_while_daemon_is_down_succeeds(self, make: TransportMaker) -> None:
        a, b = await make.pair()
        os.kill(pid_of(a), signal.SIGKILL)
        opening = asyncio.create_task(ping(a, b.me))
        await until(lambda: a.daemon_pid is None, 5)
        await a.__aexit__()
        with pytest.raises(PeerGone, match="closed"):
            await opening

    @on_uvloop
    async def test_hung_daemon_is_detected_and_replaced(self, make: TransportMaker) -> None:
        a, b = await make.pair()
        await ping(a, b.me)
        await freeze(b.daemon_pid)
        await until(lambda: b.restarts == 1, 15)
        await ping(a, b.me)


class TestLimits:
    @pytest.mark.long
    @on_uvloop
    async def test_streams_are_limited_per_peer_and_in_total(self, make: TransportMaker) -> None:
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


class TestAddresses:
    @on_uvloop
    async def test_crossed_and_automatic_dials_are_retried(self, make: TransportMaker) -> None:
        a, key = await make(), identity.create(make.directory / "b")
        stranger, nowhere = identity.create(make.directory / "stranger").peer_id, "/ip4/127.0.0.1/tcp/1"
        with contextlib.closing(await asyncio.get_running_loop().create_server(Mirror, "127.0.0.1", 0)) as mirror:
            where = f"/ip4/127.0.0.1/tcp/{mirror.sockets[0].getsockname()[1]}"
            with pytest.raises(PeerGone, match="both sides dialled at the same instant"):
                await a.connect(f"{where}/p2p/{key.peer_id}", soon(1.5))
            with pytest.raises(LINK_ERRORS, match="connection refused"):
                await (await a.link()).connect(stranger, nowhere, 5)
        b = await make(identity=key, listen=(where,))
        b.serve("echo", echo)
        dials = (f"{where}/p2p/{b.me}", f"{nowhere}/p2p/{stranger}")
        met, refused = await asyncio.gather(*(a.connect(each, soon()) for each in dials), return_exceptions=True)
        assert met == b.me
        assert isinstance(refused, PeerGone) and "nothing listens there" in refused.why
        await ping(a, b.me)

    @on_uvloop
    async def test_port_in_use_is_named_in_error(self, make: TransportMaker, caplog: pytest.LogCaptureFixture) -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            with pytest.raises(DaemonError, match=rf"^tcp 127.0.0.1:{port} is in use by another program: stop that"):
                await make(listen=(f"/ip4/127.0.0.1/tcp/{port}",))
            both = await make(listen=(f"/ip4/127.0.0.1/tcp/{port}", "/ip4/127.0.0.1/tcp/0"))
            assert len(both.addresses) == 1
            assert f"not listening on /ip4/127.0.0.1/tcp/{port}" in caplog.text
        with pytest.raises(DaemonError, match="is in use by another program"):  # p2pd itself would share it
            await make(listen=both.listening[1:])

    @on_uvloop
    async def test_listens_on_all_interfaces_in_both_families(
        self, make: TransportMaker, caplog: pytest.LogCaptureFixture
    ) -> None:
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

    @on_uvloop
    async def test_peers_find_each_other_through_a_third(self, make: TransportMaker) -> None:
        a, b, c = await make(), await make(), await make()
        c.serve("echo", echo)
        for transport in (a, c):
            assert await transport.connect(b.addresses[0], soon()) == b.me
        async with asyncio.timeout(10):
            while True:  # libp2p fills its table of peers in the background
                with suppress(PeerGone):
                    return await ping(a, c.me)
                await asyncio.sleep(0.1)


@on_uvloop
async def test_previous_port_is_reused_if_free(make: TransportMaker) -> None:
    last = await make()
    kept, port = last.listening, int(last.listening[0].rpartition("/")[2])
    await last.__aexit__(None, None, None)
    again = await make(kept=kept)
    assert again.listening == kept != again._wanted_listen
    await again.__aexit__(None, None, None)
    with socket.socket() as thief:
        steal(thief, port)
        third = await make(kept=kept)
        assert third.listening[0].rpartition("/")[0] == kept[0].rpartition("/")[0]
        assert third.listening != kept and third.addresses


class TestNat:
    @on_uvloop
    async def test_peer_without_listen_address_is_reached_through_relay(
        self, make: TransportMaker, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        extra: list[str] = []

        def with_extra(*given: Any) -> list[str]:
            return [each for each in arguments(*given) if not each.startswith("-hostAddrs") or not extra] + extra

        monkeypatch.setattr("node.network.libp2p.arguments", with_extra)
        extra[:] = ["-hostAddrs=/ip4/127.0.0.1/tcp/0", "-forceReachabilityPublic=1"]
        relay = await make(nat=True)
        # Neither of the two can be dialled by the other. The relay is named to them, because p2pd's own search
        # for one takes from seconds to minutes.
        extra[:] = ["-noListenAddrs=1", "-forceReachabilityPrivate=1"]
        a, b = [await make(nat=True, relays=relay.addresses[:1], direct_methods={"bulk"}) for _ in "ab"]
        for method in ("echo", "bulk"):
            b.serve(method, echo)
        for peer in (a, b):
            await peer.connect(relay.addresses[0], soon())
        async with asyncio.timeout(30):
            while not await self.reached(a, b.me, relay):  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        await ping(a, b.me)
        assert "/p2p-circuit" in b._seen[a.me]
        with pytest.raises(PeerGone, match="through a relay only, which carries no bulk data"):
            await ping(a, b.me, "bulk")

    async def reached(self, transport: LibP2PTransport, peer: PeerId, relay: LibP2PTransport) -> bool:
        with suppress(PeerGone):
            await transport.connect(f"{relay.addresses[0]}/p2p-circuit/p2p/{peer}", soon())
            return True
        return False


ORPHAN = """
import asyncio, os, signal, sys
from pathlib import Path
from node.network.daemon import arguments, start_daemon

async def main(directory: Path) -> None:
    daemon = await start_daemon(arguments(directory / "control", directory / "peer", ["/ip4/127.0.0.1/tcp/0"]))
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


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with contextlib.closing(Pool()) as opened:
        yield opened


class TestUndisturbed:
    """Nothing happens to the peers themselves: all tests have the same two."""

    @pytest.fixture
    def make(self, directory: Path, pool: Pool) -> TransportMaker:
        return TransportMaker(directory, pool)

    @on_uvloop
    async def test_peers_breaking_rules_are_named(self, make: TransportMaker) -> None:
        a, b = await make.pair()

        async def strict(peer: PeerId, stream: Stream) -> None:
            wire.expect(await stream.receive(LIMIT), wire.PartDone)

        b.serve("strict", strict)
        async with a.open(b.me, "strict", soon()) as stream:
            await stream.send(wire.Chunk(1, 0))
            with pytest.raises(PeerSilent):
                await stream.receive(LIMIT)
        with pytest.raises(PeerGone):
            async with a.open(b.me, "nothing", soon()):
                pass
        assert a._link is not None
        pipe, _ = await a._link.stream(b.me, 5)
        await a._serving.ask(b.me, pipe, "strict")
        await pipe.write(b"\xff\xff\xff\xff")
        with pytest.raises((EOFError, OSError)):
            await pipe.read_into(memoryview(bytearray(1)))
        pipe.abort()
        assert b.refused == {(a.me, "bad payload"): 2, (a.me, "method not served"): 1}

    @on_uvloop
    async def test_failed_connection_reports_the_reason(self, make: TransportMaker) -> None:
        a, b = await make(), await make()
        silent = socket.create_server(("127.0.0.1", 0))  # takes connections, and says nothing
        stranger = identity.create(make.directory / "stranger").peer_id
        where = b.addresses[0].rpartition("/p2p/")[0]
        cases = [
            ("/ip4/127.0.0.1/tcp/1", PeerGone, "nothing listens there"),
            (where, PeerGone, f"another peer answers, {b.me}"),
            (where, PeerGone, f"another peer answers, {b.me}"),  # not dialled again so soon, and the error is the same
            ("/dns4/no-peer.invalid/tcp/1", PeerGone, "name has no address"),
            ("/ip4/127.0.0.1/udp/1", PeerGone, "is not supported"),
            ("/ip4/127.0.0.1/tcp/1/p2p-circuit", PeerGone, "relay is not named"),
            (f"{b.addresses[0]}/p2p-circuit", PeerGone, "relay"),
            (f"/ip4/127.0.0.1/tcp/{silent.getsockname()[1]}", PeerSilent, "no answer"),
        ]
        for address, kind, why in cases:
            with pytest.raises(kind, match=why):
                await a.connect(f"{address}/p2p/{stranger}", soon(1.5))
        for own in (a.connect(a.addresses[0], soon()), ping(a, a.me)):
            with pytest.raises(PeerGone):
                await own
        for malformed, why in {
            "hello": "not a multiaddr like", "127.0.0.1:4001": "not a multiaddr like",
            "/ip4/127.0.0.1/tcp/99999/p2p/x": "not a multiaddr like", "": "must end in /p2p/",
            "/ip4/1.2.3.4/tcp/1": "must end in /p2p/", f"{b.addresses[0]}/p2p-circuit": "must end in /p2p/",
            f"/p2p/{b.me}": "/p2p/", "/ip4/1.2.3.4/tcp/1/p2p/me": "/p2p/",
        }.items():  # fmt: skip
            with pytest.raises(ValueError, match=why):
                await a.connect(malformed, soon())
        silent.close()

    @on_uvloop
    async def test_forgetting_a_peer_disconnects_it(self, make: TransportMaker) -> None:
        a, b = await make.pair()
        async with a.open(b.me, "echo", soon()) as stream:
            await a.forget(b.me, soon())
            with pytest.raises(PeerSilent):
                await stream.receive(LIMIT)
        assert b.me not in a._known
        await a.forget(b.me, soon())

    @pytest.mark.long
    @on_uvloop
    async def test_aborted_openers_leave_no_streams_in_daemons(
        self, make: TransportMaker, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.DEBUG, "node.network.daemon")
        a, b = await make.pair()

        async def pour(peer: PeerId, stream: Stream) -> None:
            while True:
                await stream.send(wire.Chunk(1, MIB), bytes(MIB))

        b.serve("pour", pour)
        for _ in range(10):
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
