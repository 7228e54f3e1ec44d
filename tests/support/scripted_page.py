"""A page whose peer is scripted: the real server and files, a status that a test sets, and no peer behind it."""

from __future__ import annotations

import asyncio
import hmac
import json
import math
import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from node.page.keys import page_link
from node.page.prometheus import metrics_text
from node.page.server import PageServer
from node.reporting.event_feed import EventFeed
from node.reporting.report import RoundEvaluation, RoundReport
from node.reporting.status import Status
from node.reporting.swarm import CountedRounds, swarm_status
from node.session.processes import CONTROLS, of_status
from node.ui.control import Command
from tests.support.status_examples import STATUS


class Sink:
    """A terminal that shows nothing."""

    def say(self, line: str) -> None: ...

    def report(self, report: RoundReport) -> None: ...

    def evaluated(self, evaluation: RoundEvaluation) -> None: ...


@dataclass
class ScriptedPage:
    """A page and what it shows."""

    directory: Path
    incarnation: int = 1
    status: Status = STATUS
    said: list[str] = field(default_factory=list)
    asked: list[Mapping[str, Any]] = field(default_factory=list)
    answers: dict[str, tuple[Status, float]] = field(default_factory=dict)  # of other peers, and their age in seconds
    counted: CountedRounds = field(default_factory=CountedRounds)
    extras: dict[str, Any] = field(
        default_factory=lambda: {
            "time": 1_700_000_000.0,
            "bytes_per_second": {"upload": 5e5, "download": 2.5e5},
            "network_bytes": {},
            "peer_bytes": {},
            "cpu_cores": math.nan,
            "temperature_celsius": math.nan,
            "controls": CONTROLS,
        }
    )
    time: float = 1_700_000_000.0

    def __post_init__(self) -> None:
        self.feed = EventFeed(Sink(), lambda: self.time)
        self.command: Command = self._command

    def show(self, **changes: Any) -> None:
        """Change fields of the status."""
        self.status = replace(self.status, **changes)

    @property
    def link(self) -> str:
        return next(line for line in self.said if line.startswith("page: ")).removeprefix("page: ")

    @property
    def port(self) -> int:
        return int(self.link.split(":")[2].split("/")[0])

    @property
    def token(self) -> str:
        return self.link.partition("#")[2]

    def link_at(self, host: str) -> str:
        return page_link(self.port, self.token).replace("127.0.0.1", host)

    async def _command(self, request: Mapping[str, Any]) -> Mapping[str, object]:
        self.asked.append(request)
        if request.get("do") == "invite":
            return {"ok": True, "line": "For one person, until 4 December.", "command": "starling join starling1abc"}
        return {"ok": True} if request.get("do") in ("finish", "pause", "resume", "revoke") else {"error": "what?"}

    def values(self) -> Mapping[str, Any]:
        swarm = swarm_status(self.status, self.answers, self.counted, unreadable={}, update="update this one, too")
        return {**self.extras, **of_status(self.status), "swarm": asdict(swarm)}

    def metrics(self) -> bytes:
        return metrics_text(
            self.status,
            self.feed.counters,
            info={"version": "1.0"},
            network_bytes={("upload", "round"): 7},
            refused={"streams": 3},
            restarts={"p2pd": 1},
        )

    @asynccontextmanager
    async def serving(self, port: int = 7717, **more: Any) -> AsyncIterator[ScriptedPage]:
        """Serve the page until the context ends."""
        async with PageServer(self, self.said.append, state_dir=self.directory, port=port, **more):
            yield self

    async def ask(self, path: str, *headers: str, method: str = "GET", body: bytes = b"") -> tuple[int, bytes]:
        """Send one request, with the page's own Host unless another is given; returns the status and the body."""
        given = list(headers)
        if not any(each.lower().startswith("host:") for each in given):
            given.append(f"Host: 127.0.0.1:{self.port}")
        if body:
            given.append(f"Content-Length: {len(body)}")
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(
                "\r\n".join([f"{method} {path} HTTP/1.1", *given, "Connection: close", "", ""]).encode() + body
            )
            answer = await asyncio.wait_for(reader.read(1 << 22), 5)
        finally:
            writer.transport.abort()
        head, _, rest = answer.partition(b"\r\n\r\n")
        return int(head.split()[1]) if head else 0, rest

    async def authorization(self) -> str:
        """Open a session as the page's script does, and return the header for further requests."""
        nonce = secrets.token_hex(16)
        _, answer = await self.ask("/session", f"X-Nonce: {nonce}")
        salt, proof = (json.loads(answer)[name] for name in ("salt", "proof"))
        assert proof == self._code("proof", nonce, salt)
        return f"Authorization: Bearer {self._code('session', nonce, salt)}"

    def _code(self, purpose: str, nonce: str, salt: str) -> str:
        text = "|".join(("starling page 1", purpose, f"127.0.0.1:{self.port}", nonce, salt))
        return hmac.new(self.token.encode(), text.encode(), "sha256").hexdigest()
