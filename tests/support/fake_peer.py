"""`python -m tests.support.fake_peer …`: the command line over a fake peer without PyTorch, p2pd and network.

The environment variable FAKE selects its behaviour. It writes what it does to stderr, so tests need no clock.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from node.cli import app as cli
from node.config.toml import ConfigError
from node.reporting.report import RoundReport
from node.reporting.status import EventSink, Status
from node.reporting.swarm import CountedRounds, swarm_status
from node.session.fatal import FatalPeerError
from node.storage.statedir import StateDir
from node.ui.control import ControlServer

HOW = os.environ.get("FAKE", "")
ADDRESS = "/ip4/203.0.113.7/tcp/4000/p2p/12D3KooWGRUfuFwTaVcXCnUbTbVLYYEkYgjDM3Bd7q4RuRyTQhaP"


def tell(*words: object) -> None:
    if HOW != "quiet":
        print(*words, file=sys.stderr, flush=True)


@dataclasses.dataclass(frozen=True)
class PeerConfig:
    bootstrap: tuple[str, ...] = ()
    run_id: str | None = None
    stage: int | None = None
    state_dir: Path | None = None
    rounds: int | None = None
    nickname: str = ""
    bandwidth_bytes_per_second: float = 1.0
    wait_for_peers: int = 1
    nodes: int = dataclasses.field(default=1, repr=False)
    node: int = dataclasses.field(default=0, repr=False)
    own_loop: bool = dataclasses.field(default=False, repr=False)
    rendezvous: str | None = dataclasses.field(default=None, repr=False)
    nat: bool = True
    new: bool = False
    consent: str | None = None
    log_level: str = "info"
    addresses_file: Path | None = None
    json: bool = False


def load_peer(flags: Mapping[str, Any], environment: Mapping[str, str], file: Path | None) -> PeerConfig:
    if flags.get("nickname") == "bad":
        raise ConfigError("flag --wait-for: too many", "wait_for_peers")
    return PeerConfig(**flags)


def load_run(path: Path | None, overrides: Mapping[str, object], protocols: Collection[str]) -> object:
    return {"path": path, **overrides}


class Peer:
    def __init__(
        self,
        config: PeerConfig,
        run: object,
        state: StateDir,
        view: EventSink,
        on_asked: Callable[[], None],
        ticket: object,
    ) -> None:
        self.config, self.view, self.on_asked = config, view, on_asked
        self.finished, self.asked = asyncio.Event(), 0
        tell("given", config, run)

    def finish(self) -> None:
        tell("asked to finish")
        self.finished.set()

    def status(self) -> Status:
        return Status(
            "training", "", (), 1, 3, "", "straw", "", "12D3KooWx", self.config.nickname, (), (ADDRESS,), 0,
            math.nan, math.nan, math.nan, 0, 0, 0, 0.0, None, os.getpid(), 1,
        )  # fmt: skip

    async def carry_out(self, request: Mapping[str, Any]) -> Mapping[str, object]:
        if request == {"do": "swarm"}:
            self.asked += 1
            return dataclasses.asdict(
                swarm_status(self.status(), {}, CountedRounds(), asked=self.asked > 2, unreadable={})
            )
        assert request == {"do": "finish"}
        self.on_asked()
        return {"ok": True}

    async def run(self) -> int:
        assert self.config.state_dir is not None
        if HOW == "refuse":
            raise FatalPeerError("the port is taken:\nfree it")
        try:
            async with ControlServer(self.config.state_dir, self.status, self.carry_out):
                for number in range(3):
                    self.view.report(report(number))
                tell("running")
                return await self.live()
        finally:
            tell("cleaned up")

    async def live(self) -> int:
        if HOW == "short":
            return 0
        if HOW == "stuck":
            block_event_loop()
        await self.finished.wait()
        if HOW == "hangs":
            hang()
        if HOW == "deaf":
            await asyncio.sleep(100)
        if HOW == "stubborn":
            while True:
                try:
                    await asyncio.sleep(100)
                except asyncio.CancelledError:
                    tell("cancelled, and goes on")
        return 0


def block_event_loop() -> None:
    """Says when the first signal was handled, which sets an alarm: a second one sent earlier might merge with it."""
    while not signal.getitimer(signal.ITIMER_REAL)[0]:
        time.sleep(0.01)
    tell("asked, but stuck")
    hang()


def hang() -> None:
    """Block for ever. In one long sleep, a signal that came just before it would be handled at its end only."""
    while True:
        time.sleep(0.02)


def report(number: int) -> RoundReport:
    return RoundReport(
        "r", "p", 1, number, "a", "b", "c", "committed", ("p", "q"), {}, {}, True, 0.5, 10, math.nan, "h",
        1.0, 0.1, 0.2, 5, 6, 0.0,
    )  # fmt: skip


def module(name: str, **content: object) -> None:
    made = sys.modules[name] = ModuleType(name)
    vars(made).update(content)


if __name__ == "__main__":
    module("node.session.peer", Peer=Peer)
    vars(cli).update(load_peer=load_peer, load_run=load_run)
    sys.exit(cli.main())
