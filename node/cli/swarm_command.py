"""The command `swarm`: several `join` processes on this machine, each with its own directory, worker and p2pd."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType

from rich.console import RenderableType

from node.cli.remote import CommandError
from node.config.peer_sources import variables
from node.page.keys import read_link
from node.reporting.report import RoundEvaluation, RoundReport, parse_line
from node.reporting.status import Status, parse, printable, to_json
from node.runtime.cgroup import bounded_spin, usable_cores
from node.runtime.child_process import ChildProcess
from node.session.fatal import NO_RESULT, REPLACED
from node.session.shutdown import GracefulShutdown
from node.storage.journal import rotate, rotated_path
from node.training.liveness import BUSY_FACTOR, TIMEOUT_SECONDS
from node.ui import logs
from node.ui.control import ControlUnavailable, ask
from node.ui.screen import Screen
from node.ui.swarm_summary import SwarmSummary
from node.ui.swarm_view import evaluated_line, picture, plain_line, sample, summary

POLL_SECONDS = 0.25
LOOK_SECONDS = 1.0
START_SECONDS = BUSY_FACTOR * TIMEOUT_SECONDS + 150.0
"""Time for a founder to start its run. It gives up by itself if its worker hangs."""
LEAVE_SECONDS = 8.0
"""Time that peers have to leave after Ctrl-C. The rest is killed, so that the summary is out within ten seconds."""
LAST_SECONDS = TIMEOUT_SECONDS
"""Time that the other peers have to leave after the first has left a finished run: they may evaluate it for minutes."""
READ_BYTES = 1 << 20
_SAMPLE_BYTES = 4096
_LISTEN = "/ip4/127.0.0.1/tcp/0"
# Variables of the user that would lead a peer into another swarm. An empty one counts as not set.
_ENVIRONMENT = dict.fromkeys(
    (
        *("NODE_BOOTSTRAP", "NODE_RUN_ID", "NODE_STAGE", "NODE_ANNOUNCE", "NODE_ROUNDS", "NODE_ADDRESSES_FILE"),
        "STARLING_TICKET",
    ),
    "",
)


def swarm_directory(wanted: Path | None) -> Path:
    """A directory that holds no peers of another swarm."""
    try:
        if wanted is None:
            return Path(tempfile.mkdtemp(prefix="starling-swarm-"))
        wanted.mkdir(mode=0o700, parents=True, exist_ok=True)
        if any(wanted.glob("peer-*")):
            raise FileExistsError(0, "holds a swarm's peers already")
        return wanted.absolute()
    except OSError as error:
        raise CommandError(f"--dir {wanted}: {error.strerror}: give another directory") from None


class Participant:
    """One peer's process, its status and its reports."""

    def __init__(self, name: str, home: Path, environment: Mapping[str, str] = _ENVIRONMENT) -> None:
        self.name, self.directory, self._environment = name, home / name, environment
        self.status: Status | None = None
        self._log = home / f"{name}.log"
        self._last_line = ""
        self.replaced = ""  # the peer's line about workers that died or hung
        self._child: ChildProcess | None = None
        self._read_bytes = 0

    async def start(self, arguments: Sequence[str]) -> None:
        place = ("--state-dir", str(self.directory), "--listen", _LISTEN, "--no-nat", "--nickname", self.name)
        command = (sys.executable, "-P", "-m", "node", "join", *place, *arguments)
        self._child = await ChildProcess.start(self.name, command, self._take_line, self._environment)

    def _take_line(self, line: str | None) -> None:
        if line:
            self._last_line = line
            if line.startswith(REPLACED):
                self.replaced = printable(line, 500)
            with suppress(OSError):
                rotate(self._log)
                with self._log.open("a") as file:
                    file.write(f"{line}\n")

    @property
    def code(self) -> int | None:
        return self._child.code if self._child else None

    @property
    def running(self) -> bool:
        return self._child is not None and self._child.code is None

    @property
    def well(self) -> bool:
        return self.code in (0, NO_RESULT)

    @property
    def end(self) -> str:
        code = self.code
        if code is None:
            return "did not start" if self._child is None else "runs"
        return "left" if self.well else f"killed by signal {-code}" if code < 0 else f"exit code {code}"

    @property
    def output_tail(self) -> str:
        return printable(self._last_line.removeprefix("starling: "), 300) or "no output"

    def ask(self) -> None:
        if self._child:
            self._child.ask()

    async def kill(self) -> None:
        if self._child:
            await self._child.kill()

    async def look(self, seconds: float) -> None:
        with suppress(ControlUnavailable, ValueError):
            self.status = parse(await ask(self.directory, "status", asyncio.get_running_loop().time() + seconds))

    def reports(self) -> list[RoundReport | RoundEvaluation]:
        """New reports and evaluations, at most a megabyte of them."""
        path = self.directory / "rounds.jsonl"
        try:
            if path.stat().st_size < self._read_bytes:  # it was rotated: read the rest of the old file first
                if left := self._lines(rotated_path(path)):
                    return left
                self._read_bytes = 0
            return self._lines(path)
        except OSError:
            return []

    def _lines(self, path: Path) -> list[RoundReport | RoundEvaluation]:
        """Whole lines of a file after those already read."""
        with path.open("rb") as file:
            file.seek(self._read_bytes)
            data = file.read(READ_BYTES)
        whole = data[: data.rfind(b"\n") + 1]
        self._read_bytes += len(whole)
        return [parse_line(line) for line in whole.splitlines()]

    def text(self) -> str:
        try:
            with (self.directory / "sample.txt").open("rb") as file:
                return file.read(_SAMPLE_BYTES).decode(errors="replace")
        except OSError:
            return ""


class LocalSwarm:
    """All peers of a swarm, from the first start to the summary."""

    def __init__(
        self,
        directory: Path,
        *,
        peers: int,
        stages: int = 1,
        run: Path | None = None,
        device: str | None = None,
        founder_options: Mapping[str, object] = MappingProxyType({}),
        page: bool = True,
        as_json: bool = False,
    ) -> None:
        self._directory, self._screen, self._as_json = directory, Screen(as_json), as_json
        self._stages, self._run, self._page, self._founder_options = stages, run, page, founder_options
        names = [f"peer-{number}" for number in range(1, peers + 1)]
        given = variables(run, os.environ) if run else {}  # only the founder reads the file itself
        self._machine = ["--threads", str(max(1, usable_cores() // peers)), *(("--device", device) if device else ())]
        if not {"NODE_RANKS", "NODE_DEVICES"} & {*os.environ, *given}:  # else the first peer would take all GPUs
            self._machine += ["--ranks", "1"]
        self._peers = [Participant(name, directory, _ENVIRONMENT | given) for name in names]
        self._tally = SwarmSummary(names, stages)
        self._ended: set[str] = set()
        self._fruitless: list[str] = []  # lines of peers whose rounds or evaluations came to nothing
        self._leaving, self._until = False, float("inf")

    def run_to_end(self) -> int:
        """Run until all peers have left or a signal comes; returns the exit code.

        0: all peers agree, and the held-out loss fell if the task has one. 4: all peers agree, but at one of them
        nothing counted or no evaluation worked. 1: otherwise. 2: the swarm could not be started as asked.
        """
        screen = self._screen
        logs.set_up("warning", screen.log, screen.log_style)
        try:
            return asyncio.run(GracefulShutdown(self.leave, screen.say, screen.close).run(self.run()))
        finally:
            screen.close()

    def leave(self) -> None:
        self._leaving = True
        self._end_within(LEAVE_SECONDS)
        for each in self._peers:
            each.ask()

    def _end_within(self, seconds: float) -> None:
        self._until = min(self._until, asyncio.get_running_loop().time() + seconds)

    async def run(self) -> int:
        began = asyncio.get_running_loop().time()
        self._screen.say(f"starting {len(self._peers)} peers; their directories and logs are in {self._directory}")
        async with ChildProcess.fork_server(bounded_spin(os.environ)):
            try:
                async with self._screen.showing(self._picture):
                    founder = self._peers[0]
                    if not await self._found(founder):
                        self._screen.say(f"starling: {self._why_not(founder)}")
                        return founder.code or 1
                    await self._join(founder)
                    await self._watch()
            finally:
                await asyncio.gather(*(each.kill() for each in self._peers))
        return self._conclude(asyncio.get_running_loop().time() - began)

    def _picture(self, width: int) -> RenderableType:
        statuses = {each.name: each.status for each in self._peers if each.running and each.status}
        words = {each.name: each.end if each.code is not None else "starts" for each in self._peers}
        return picture(self._tally, words, statuses, width)

    # -- starting -----------------------------------------------------------------------------------------------------

    async def _found(self, founder: Participant) -> bool:
        """Start the founder, and wait until others can join its run. Returns whether they can."""
        given = {
            **self._founder_options,
            "--run": self._run and self._run.absolute(),
            "--stages": self._stages if self._run or self._stages > 1 else None,  # it may overrule the file
            "--wait-for": len(self._peers),
        }
        options = [str(each) for pair in given.items() if pair[1] is not None for each in pair]
        await founder.start((*self._machine, "--page" if self._page else "--no-page", *options))
        until = asyncio.get_running_loop().time() + START_SECONDS
        while founder.running and asyncio.get_running_loop().time() < min(until, self._until):
            await founder.look(LOOK_SECONDS)
            if founder.status and founder.status.addresses and founder.status.run_id:
                self._show_link(founder)
                return True
            await asyncio.sleep(POLL_SECONDS)
        return False

    def _show_link(self, founder: Participant) -> None:
        if self._page and (link := read_link(founder.directory)):
            self._screen.say(f"page of {founder.name}: {link}")

    def _why_not(self, founder: Participant) -> str:
        if self._leaving:
            return "stopped before the run had begun"
        if not founder.running:
            return founder.output_tail
        late = f"{founder.name} has not started the run within {START_SECONDS:g} s: is this machine too busy?"
        return f"{late} Its last output: {founder.output_tail}"

    async def _join(self, founder: Participant) -> None:
        assert founder.status is not None
        where = ["--bootstrap", founder.status.addresses[0], "--run-id", founder.status.run_id]
        if founder.status.task:
            where += ["--task", founder.status.task]
        for place, each in enumerate(self._peers[1:], 1):  # the founder is in stage 0
            stage = ("--stage", str(place % self._stages)) if self._stages > 1 else ()
            await each.start((*self._machine, "--no-page", *where, *stage))

    # -- watching -----------------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Follow the peers until the last has left; kill those that are late."""
        loop = asyncio.get_running_loop()
        looked = 0.0
        while any(each.running for each in self._peers) and loop.time() < self._until:
            self._read()
            if loop.time() >= looked + LOOK_SECONDS:
                looked = loop.time()
                # Lines show of a status only the number of rounds, which grows by those that train nothing.
                shown = self._peers if self._screen.is_live else self._peers[:1]
                await asyncio.gather(*(each.look(LOOK_SECONDS) for each in shown if each.running))
            await asyncio.sleep(POLL_SECONDS)
        for each in self._peers:
            if each.running:
                self._screen.say(
                    f"{each.name} did not leave in time and is killed; its last output: {each.output_tail}"
                )
                self._ended.add(each.name)
                await each.kill()
        self._read()

    def _read(self) -> None:
        running = {each.name for each in self._peers if each.running}
        for each in self._peers:
            for report in each.reports():
                if isinstance(report, RoundReport):
                    self._tally.add(each.name, report)
                elif (done := self._tally.evaluated(each.name, report)) and not self._screen.is_live:
                    self._screen.log(evaluated_line(done, self._rounds))
            if each.name not in running | self._ended:
                self._report_end(each)
        for done in self._tally.complete(running):
            if not self._screen.is_live:
                self._screen.log(plain_line(done, self._rounds))

    def _report_end(self, peer: Participant) -> None:
        self._ended.add(peer.name)
        self._tally.tracks[peer.name].well = peer.well
        if peer.well:
            self._end_within(LAST_SECONDS)
        elif not self._leaving:
            self._screen.say(f"{peer.name} {peer.end}, the others continue; its last output: {peer.output_tail}")
        if peer.replaced:
            self._screen.say(f"{peer.name}: {peer.replaced}")
        if peer.code == NO_RESULT:
            self._fruitless.append(f"{peer.name}: {peer.output_tail}")

    @property
    def _rounds(self) -> int:
        founder = self._peers[0].status
        return founder.rounds if founder else 0

    # -- the end ------------------------------------------------------------------------------------------------------

    def _conclude(self, seconds: float) -> int:
        tally, screen = self._tally, self._screen
        screen.print(summary(tally, {each.name: each.end for each in self._peers}, seconds))
        if text := next(filter(None, (each.text() for each in self._peers)), ""):
            screen.print(sample(text))
        if self._as_json:
            screen.data(to_json(tally.as_json()))
        for line in self._fruitless:
            screen.say(f"starling: {line}")
        if tally.agree and self._fruitless:
            return NO_RESULT
        return 0 if tally.agree and (tally.fell or not self._learns()) else 1

    def _learns(self) -> bool:
        """Whether the loss should fall, because the run has a sample of real data to measure it on."""
        return (self._peers[0].directory / "held-out.bin").exists()
