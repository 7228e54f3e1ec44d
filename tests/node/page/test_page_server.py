"""The page's server over real sockets: it resumes streams, bounds its clients, and never ends or delays the peer."""

from __future__ import annotations

import asyncio
import json
import socket
import stat
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from node.page import app
from node.page.keys import metrics_token
from node.reporting.report import RoundEvaluation
from tests.support.scripted_page import ScriptedPage
from tests.support.status_examples import REPORT

pytestmark = pytest.mark.real
LINES = 2000
"""With 4 kB each, more than the kernel keeps for a reader that takes nothing."""
HOSTILE = "<img src=x onerror=alert(1)>\x1b[31m\u202e"


class Reader:
    """A client of the stream."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self.writer = reader, writer

    async def next(self) -> tuple[str, str, object]:
        """Kind, id and data of the next event."""
        event: dict[str, str] = {}
        while True:
            line = (await asyncio.wait_for(self._reader.readline(), 5)).decode()
            assert line, "the stream has ended"
            name, _, value = line.rstrip("\r\n").partition(": ")
            if name in ("event", "id", "data"):
                event[name] = value
            elif not line.strip() and "event" in event:
                return event["event"], event.get("id", ""), json.loads(event["data"])

    async def kinds(self, number: int) -> list[str]:
        """Kinds of the next events but the status."""
        found: list[str] = []
        while len(found) < number:
            if (kind := (await self.next())[0]) != "status":
                found.append(kind)
        return found


async def opening(page: ScriptedPage, last_id: str = "") -> bytes:
    """The request for the stream."""
    again = f"Last-Event-ID: {last_id}\r\n" if last_id else ""
    headers = f"Host: 127.0.0.1:{page.port}\r\n{await page.authorization()}\r\n{again}\r\n"
    return f"GET /api/stream HTTP/1.1\r\n{headers}".encode()


@asynccontextmanager
async def stream(page: ScriptedPage, last_id: str = "") -> AsyncIterator[Reader]:
    request = await opening(page, last_id)
    reader, writer = await asyncio.open_connection("127.0.0.1", page.port, limit=1 << 24)
    writer.write(request)
    try:
        yield Reader(reader, writer)
    finally:
        writer.transport.abort()


async def test_reconnecting_reader_gets_what_it_missed(tmp_path: Path) -> None:
    page = ScriptedPage(tmp_path)
    page.feed.recall([replace(REPORT, round=7)])
    async with page.serving():
        page.feed.say(HOSTILE)
        async with stream(page) as first:
            kind, last_id, past = await first.next()
            assert kind == "reset" and isinstance(past, dict)
            assert [each["round"] for each in past["rounds"]] == [8]
            assert "\x1b" not in past["lines"][0]["text"] and "\u202e" not in past["lines"][0]["text"]
        page.feed.report(REPORT)
        page.feed.evaluated(RoundEvaluation(7, "", 1.5, 8, 0.0))
        page.feed.show_text(b"def f\n" + HOSTILE.encode())
        async with stream(page, last_id) as again:
            assert await again.kinds(3) == ["round", "evaluated", "text"]
        assert [each["held_out_loss"] for each in page.feed.history()[1]["rounds"]] == [1.5, REPORT.held_out_loss]
    restarted = ScriptedPage(tmp_path, incarnation=2)
    async with restarted.serving():
        assert restarted.link == page.link
        async with stream(restarted, last_id) as after:
            assert await after.kinds(1) == ["reset"]


async def test_unchanged_parts_of_the_status_are_sent_once_to_each_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "STATUS_SECONDS", 0.1)
    page = ScriptedPage(tmp_path)

    async def parts(reader: Reader) -> set[str]:
        while (event := await reader.next())[0] != "status":
            pass
        assert isinstance(event[2], dict)
        return set(event[2])

    async with page.serving(), stream(page) as first:
        whole = await parts(first)
        assert {"swarm", "status", "warnings"} <= whole and not await parts(first)
        page.show(round=9)
        while not (news := await parts(first)):
            pass
        assert news == {"status", "swarm"}, "the peer's own row is among the swarm's"
        async with stream(page) as second:
            assert await parts(second) == whole


async def _closed(writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        await writer.wait_closed()


async def test_stalled_reader_is_dropped_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "STALLED_SECONDS", 0.2)
    page, loop = ScriptedPage(tmp_path), asyncio.get_running_loop()
    async with page.serving():
        idle = [await asyncio.open_connection("127.0.0.1", page.port) for _ in range(10)]
        for _, writer in idle[:5]:
            writer.write(b"GET / HTTP/1.1\r\nHost: ")
        with socket.socket() as stalled:
            stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # before the window is announced
            stalled.setblocking(False)
            await loop.sock_connect(stalled, ("127.0.0.1", page.port))
            await loop.sock_sendall(stalled, await opening(page))
            async with stream(page) as good:
                assert await good.kinds(1) == ["reset"]
                reading = asyncio.create_task(good.kinds(LINES))
                for _ in range(LINES):
                    page.feed.say("x" * 4000)
                    await asyncio.sleep(0.001)
                assert await reading == LINES * ["line"]
                assert (await page.ask("/"))[0] == 200
            with suppress(ConnectionResetError):
                while await asyncio.wait_for(loop.sock_recv(stalled, 1 << 20), 5):
                    pass
        for _, writer in idle:
            writer.transport.abort()


async def test_idle_connections_are_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "IDLE_SECONDS", 0.2)
    page = ScriptedPage(tmp_path)
    async with page.serving():
        silent, half = [await asyncio.open_connection("127.0.0.1", page.port) for _ in range(2)]
        half[1].write(b"POST /api/do HTTP/1.1\r\nHost: ")
        for reader, writer in (silent, half):
            with suppress(ConnectionResetError):
                assert await asyncio.wait_for(reader.read(), 5) == b""
            writer.transport.abort()
            await asyncio.wait_for(_closed(writer), 5)


async def test_open_streams_do_not_delay_the_end(tmp_path: Path) -> None:
    page, loop = ScriptedPage(tmp_path), asyncio.get_running_loop()
    async with page.serving():
        context = stream(page)
        reader = await context.__aenter__()
        await reader.next()
        began = loop.time()
    assert loop.time() - began < 1.2
    assert (await reader.kinds(1)) == ["gone"]
    await context.__aexit__(None, None, None)


async def test_taken_port_gives_another(tmp_path: Path) -> None:
    first, second = ScriptedPage(tmp_path / "a"), ScriptedPage(tmp_path / "b")
    for each in (first, second):
        each.directory.mkdir()
    async with first.serving(), second.serving():
        assert first.port != second.port
        assert (await second.ask("/"))[0] == 200
    assert stat.S_IMODE((tmp_path / "a" / "page.token").stat().st_mode) == 0o600


async def test_page_that_cannot_start_ends_no_peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = ScriptedPage(tmp_path / "missing")
    async with page.serving():
        assert page.said == ["web page unavailable; training continues: No such file or directory"]
    monkeypatch.setitem(sys.modules, "node.page.app", None)  # as if a package that it imports was broken
    broken = ScriptedPage(tmp_path)
    async with broken.serving():
        assert broken.said[0].startswith("web page unavailable; training continues: import of node.page.app halted")


async def test_commands_and_metrics_need_the_token(tmp_path: Path) -> None:
    page = ScriptedPage(tmp_path)
    page.show(nickname=HOSTILE, run=HOSTILE)
    page.feed.counters.add(REPORT)
    async with page.serving():
        json_type, wish = "Content-Type: application/json", b'{"do": "finish"}'
        key = await page.authorization()
        assert (await page.ask("/api/do", json_type, method="POST", body=wish))[0] == 401
        assert (await page.ask("/api/do", key, method="POST", body=wish))[0] == 400
        assert (await page.ask("/api/do", key, json_type, method="POST", body=b"[" * 1000))[0] == 400
        assert (await page.ask("/api/do", key, json_type, method="POST", body=b" " * 2000))[0] == 400
        assert page.asked == []
        assert (await page.ask("/api/do", key, json_type, method="POST", body=wish))[0] == 200
        assert page.asked == [{"do": "finish"}]
        status, body = await page.ask("/metrics", f"Authorization: Bearer {metrics_token(page.token)}")
    families = {each.name: each for each in text_string_to_metric_families(body.decode())}
    assert status == 200 and families["starling_tokens"].samples[0].value == 100
    assert families["starling_loss_nats"].samples == []  # it is not known
    assert families["starling_network_bytes"].samples[0].labels["class"] == "round"
