"""A real `join` process for benchmarks: its reports, its status, its commands, its processor time and memory."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import psutil

from node.reporting.report import RoundReport
from node.reporting.status import Status, parse
from node.ui.control import ControlUnavailable, ask

START_SECONDS = 120.0
_LISTEN = ("--listen", "/ip4/127.0.0.1/tcp/0", "--no-nat")
_POLL_SECONDS = 0.05


class JoinedPeer:
    """One peer's process. `run` starts it, and ends it on exit.

    Attributes:
        directory: its state directory.
    """

    def __init__(self, directory: Path, process: asyncio.subprocess.Process) -> None:
        self.directory, self._process = directory, process

    @classmethod
    @asynccontextmanager
    async def run(
        cls,
        directory: Path,
        *flags: str,
        environment: Mapping[str, str] | None = None,
        wrapper: Sequence[str] = (),
    ) -> AsyncIterator[JoinedPeer]:
        """Start a peer.

        Args:
            flags: of `join`.
            wrapper: a command that runs the peer's command, such as `unshare`.
        """
        command = (*wrapper, sys.executable, "-m", "node", "join", "--state-dir", str(directory), *_LISTEN, *flags)
        log = directory.with_suffix(".log").open("w")
        variables = {**os.environ, **(environment or {})}
        process = await asyncio.create_subprocess_exec(*command, stdout=log, stderr=log, env=variables)
        try:
            yield cls(directory, process)
        finally:
            if process.returncode is None:
                process.terminate()
            await process.wait()
            log.close()

    @property
    def name(self) -> str:
        return self.directory.name

    @property
    def pid(self) -> int:
        return self._process.pid

    def reports(self) -> list[RoundReport]:
        """All reports so far."""
        try:
            lines = (self.directory / "rounds.jsonl").read_bytes().splitlines(keepends=True)
        except FileNotFoundError:
            return []
        return [RoundReport.from_json(line) for line in lines if line.endswith(b"\n")]

    async def rounds_done(self, number: int, seconds: float) -> list[RoundReport]:
        """Wait until it has done `number` rounds; returns all reports."""
        async with asyncio.timeout(seconds):
            while len(reports := self.reports()) < number:
                if self._process.returncode is not None:
                    raise SystemExit(f"the peer has ended: see {self.directory.with_suffix('.log')}")
                await asyncio.sleep(_POLL_SECONDS)
        return reports

    async def ask(self, what: str, **values: object) -> Mapping[str, object]:
        """Send a request to its control socket."""
        return await ask(self.directory, what, asyncio.get_running_loop().time() + 5, **values)

    async def status(self) -> Status | None:
        """Its status; None before it can be asked."""
        try:
            return parse(await self.ask("status"))
        except ControlUnavailable:
            return None

    async def address(self) -> Sequence[str]:
        """Flags with which others join its run."""
        async with asyncio.timeout(START_SECONDS):
            # Another process sets no event.
            while not (status := await self.status()) or not status.addresses or not status.run_id:  # noqa: ASYNC110
                await asyncio.sleep(_POLL_SECONDS)
        return "--bootstrap", status.addresses[0], "--run-id", status.run_id

    @property
    def cpu_seconds(self) -> float:
        """Processor time of its own process, without worker and p2pd."""
        times = psutil.Process(self.pid).cpu_times()
        return float(times.user + times.system)

    @property
    def memory_bytes(self) -> int:
        """Memory that its own process alone uses."""
        return int(psutil.Process(self.pid).memory_full_info().uss)

    def worker_pids(self) -> list[int]:
        """Its worker's process id; none while it has no worker."""
        children = psutil.Process(self.pid).children(recursive=True)
        return [each.pid for each in children if "node.training.worker" in _words(each)]


def _words(process: psutil.Process) -> Sequence[str]:
    try:
        words: Sequence[str] = process.cmdline()
    except psutil.Error:
        return ()
    return words
