"""The compose swarm as seen from its machine: containers, their runs and the reports of their peers.

A container is not a peer: the state directory that a container takes in the common volume may change with every start.
Peers are therefore named by their directories: `founder`, `peer-1`, `peer-2` … A replica of the profile `stages` has a
volume of its own, and the name of its service.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from node.runtime.identity import peer_id_of
from tests.docker.engine import Engine
from tests.faults.recording import Incarnation
from tests.support.checkers import Report
from tests.support.history import History
from tests.support.paths import REPOSITORY
from tests.support.real_swarm import wait

FOUNDER, PEER = "founder", "peer"
POLL_SECONDS = 0.25
UP_SECONDS, STOP_SECONDS, IDENTITY_SECONDS = 120.0, 60.0, 60.0
GRACE_SECONDS = 20
_KEY_BYTES = 32
_HELD = re.compile(r"/state/starling/(peer-\d+)(/|$)")


@dataclass(frozen=True, slots=True)
class Peer:
    """A state directory in a volume, whichever container holds it."""

    name: str
    id: str
    directory: Path
    history: History

    def reports(self) -> list[Report]:
        return self.history.reports()

    @property
    def incarnation(self) -> int:
        return int((self.directory / "incarnation").read_text())


@dataclass(slots=True)
class Spell:
    """One run of a container. `name`: its peer; empty while unknown. `code`: an exit code, or minus a signal."""

    container: str
    began: float
    name: str = ""
    expected: int = 0
    ended: float | None = None
    code: int = 0


@dataclass(slots=True)
class Swarm:
    """One compose project, gone after `remove`. `health`: (container, start of a check) -> exit code."""

    engine: Engine
    project: str
    variables: Mapping[str, str]
    home: Path
    profile: str = ""
    spells: list[Spell] = field(default_factory=list)
    logs: dict[str, str] = field(default_factory=dict)
    health: dict[tuple[str, str], int] = field(default_factory=dict)
    _peers: dict[str, Peer] = field(default_factory=dict)
    _volumes: dict[str, Path] = field(default_factory=dict)
    _watch: subprocess.Popen[bytes] | None = None
    _read_bytes: int = 0

    # -- compose ------------------------------------------------------------------------------------------------------

    def compose(self, *arguments: str, seconds: float = UP_SECONDS) -> str:
        file = str(REPOSITORY / "docker/compose.yaml")
        profile = ("--profile", self.profile) if self.profile else ()
        return self.engine.compose(
            "-p", self.project, "-f", file, *profile, *arguments, seconds=seconds, variables=self.variables
        )

    def up(self, peers: int) -> float:
        """Start the founder and `peers` others, as far as they do not run; returns the wall time before."""
        return self.launch("--scale", f"peer={peers}", count=1 + peers)

    def launch(self, *arguments: str, count: int) -> float:
        """`compose up` with these arguments, after which `count` containers run; returns the wall time before."""
        if not self._watch:
            filters = ("type=container", "event=start", "event=die", f"label=com.docker.compose.project={self.project}")
            self._watch = self.engine.events(self.home / "events.jsonl", *filters)
        began = time.time()
        self.compose("up", "--detach", "--no-build", "--no-recreate", *arguments)
        self.identify(count)
        return began

    def down(self) -> None:
        self.compose("down", "--timeout", str(GRACE_SECONDS), seconds=STOP_SECONDS)

    def remove(self) -> None:
        with suppress(OSError, subprocess.SubprocessError):
            self.keep_logs()
        try:
            self.compose("down", "--volumes", "--timeout", "5", seconds=STOP_SECONDS)
        finally:
            if self._watch:
                self._watch.kill()
                self._watch.wait()

    # -- containers ---------------------------------------------------------------------------------------------------

    def container(self, name: str) -> str:
        return next(spell.container for spell in reversed(self.spells) if spell.name == name)

    def inspect(self, container: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.engine.run("container", "inspect", container))[0]
        return found

    def pid(self, name: str) -> int:
        return int(self.inspect(self.container(name))["State"]["Pid"])

    def process(self, name: str, command: str) -> psutil.Process:
        for each in psutil.Process(self.pid(name)).children(recursive=True):
            with suppress(psutil.Error):
                if re.search(command, " ".join(each.cmdline())):
                    return each
        raise AssertionError(f"{name} has no process {command!r} now")

    def die(self, name: str, pid: int) -> float:
        """Kill a process whose death ends the peer's container; returns the wall time."""
        self.expect([name], -signal.SIGKILL)
        os.kill(pid, signal.SIGKILL)
        return time.time()

    def expect(self, names: Collection[str], code: int) -> None:
        for spell in self.running:
            if spell.name in names:
                spell.expected = code

    def stop(self, *names: str) -> float:
        began = time.monotonic()
        containers = [self.container(name) for name in names]
        self.engine.run("stop", "--time", str(GRACE_SECONDS), *containers, seconds=STOP_SECONDS)
        wait("all that were stopped have ended", lambda: not {*names} & {*self.names}, STOP_SECONDS, POLL_SECONDS)
        return time.monotonic() - began

    def start(self, *names: str) -> float:
        began, running = time.time(), len(self.running)
        self.engine.run("start", *(self.container(name) for name in names), seconds=UP_SECONDS)
        self.identify(running + len(names))
        return began

    def lose(self, name: str) -> None:
        """Remove a container and its volume. What the peer reported is kept, under another name."""
        kept, gone, container = self.home / f"{name} that was lost", self.peer(name), self.container(name)
        self.expect([name], -signal.SIGKILL)
        self.engine.run("kill", container)
        wait(f"{name} has ended", lambda: name not in self.names, 10.0, POLL_SECONDS)
        self.keep_logs(container)
        shutil.copytree(gone.directory, kept, ignore=lambda _, names: {*names} - {"rounds.jsonl", "incarnation"})
        self.engine.run("container", "rm", container)
        self.engine.run("volume", "rm", f"{self.project}_{name}")
        history = History(kept / "rounds.jsonl")
        self._peers[kept.name] = replace(self._peers.pop(name), name=kept.name, directory=kept, history=history)
        self.logs[kept.name] = self.logs.pop(name, "")
        for spell in self.spells:
            spell.name = kept.name if spell.name == name else spell.name

    def privileges(self) -> list[str]:
        found = []
        for spell in self.running:
            state = self.inspect(spell.container)
            status = Path(f"/proc/{state['State']['Pid']}/status").read_text()
            lines = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
            if not state["HostConfig"]["ReadonlyRootfs"]:
                found.append(f"{spell.name} may write to its image")
            if any(int(lines[kind], 16) for kind in ("CapEff", "CapPrm", "CapBnd")):
                found.append(f"{spell.name} has capabilities: {lines['CapBnd']}")
            if lines["NoNewPrivs"] != "1" or "0" in lines["Uid"].split():
                found.append(f"{spell.name} is root, or may become it")
        return found

    # -- runs of containers -------------------------------------------------------------------------------------------

    @property
    def running(self) -> list[Spell]:
        self._read_events()
        return [spell for spell in self.spells if spell.ended is None]

    @property
    def names(self) -> list[str]:
        return sorted(spell.name for spell in self.running if spell.name)

    @property
    def peers(self) -> list[Peer]:
        return [self.peer(name) for name in self.names]

    def identify(self, count: int) -> None:
        def known() -> bool:
            running = self.running
            for spell in running:
                spell.name = spell.name or self._held(spell)
            return len(running) == count and all(spell.name for spell in running)

        wait(f"{count} peers hold their directories", known, IDENTITY_SECONDS, POLL_SECONDS)

    def peer(self, name: str) -> Peer:
        if name not in self._peers:
            path = self._directory(name)
            key = (path / "identity.key").read_bytes()[-_KEY_BYTES:]  # the public half
            self._peers[name] = Peer(name, peer_id_of(key), path, History(path / "rounds.jsonl"))
        return self._peers[name]

    def everybody(self) -> dict[str, Peer]:
        """All peers that were ever identified."""
        return {name: self.peer(name) for name in sorted({spell.name for spell in self.spells if spell.name})}

    def incarnations(self) -> dict[str, list[Incarnation]]:
        found: dict[str, list[Incarnation]] = {}
        for spell in self.spells:
            if spell.ended is not None and spell.name:
                found.setdefault(spell.name, []).append(
                    Incarnation(spell.began, spell.ended, spell.code, spell.expected)
                )
        return found

    def _read_events(self) -> None:
        try:
            data = (self.home / "events.jsonl").read_bytes()[self._read_bytes :]
        except OSError:
            return
        whole = data[: data.rfind(b"\n") + 1]
        self._read_bytes += len(whole)
        for event in map(json.loads, whole.splitlines()):
            container, moment = event["Actor"]["ID"], event["timeNano"] / 1e9
            if event["Action"] == "start":
                self.spells.append(Spell(container, moment))
                continue
            for spell in self.spells:
                if spell.container == container and spell.ended is None:
                    code = int(event["Actor"]["Attributes"]["exitCode"])
                    spell.ended, spell.code = moment, 128 - code if code > 128 else code

    def _held(self, spell: Spell) -> str:
        """The peer whose directory a container holds; empty if it holds none, or has ended."""
        with suppress(OSError, subprocess.SubprocessError, psutil.Error):
            state = self.inspect(spell.container)
            service = state["Config"]["Labels"]["com.docker.compose.service"]
            for directory in directories(int(state["State"]["Pid"])):
                name = directory if service == PEER else service
                if (self._directory(name) / "identity.key").exists():
                    return name
        return ""

    def _directory(self, name: str) -> Path:
        volume, directory = ("peers", name) if name.startswith(f"{PEER}-") else (name, "peer-1")
        return self._volume(volume) / "starling" / directory

    def _volume(self, name: str) -> Path:
        if name not in self._volumes:
            said = self.engine.run("volume", "inspect", "--format", "{{.Mountpoint}}", f"{self.project}_{name}")
            self._volumes[name] = Path(said.strip())
        return self._volumes[name]

    # -- logs, health, memory -----------------------------------------------------------------------------------------

    def keep_logs(self, *containers: str) -> None:
        """Read the logs of these containers, or of all."""
        latest = {spell.container: spell.name for spell in self.spells}
        listed = self.engine.run("ps", "--all", "--quiet", "--no-trunc", f"--filter=label={self._label}").split()
        for container in containers or listed:
            name = latest.get(container) or container[:12]
            said = self.engine.run("logs", container, stderr=subprocess.STDOUT)
            self.logs[name] = self.logs.get(name, "") + said
            with (self.home / f"{name}.log").open("a") as file:
                file.write(said)

    @property
    def _label(self) -> str:
        return f"com.docker.compose.project={self.project}"

    def look_at_health(self) -> dict[str, str]:
        found = {}
        for spell in self.running:
            health = self.inspect(spell.container)["State"].get("Health") or {}
            found[spell.name] = health.get("Status", "none")
            self.health |= {(spell.container, each["Start"]): each["ExitCode"] for each in health.get("Log") or ()}
        return found

    def memory_bytes(self) -> dict[str, float]:
        names = {spell.container: spell.name for spell in self.running}
        command = ("stats", "--no-stream", "--no-trunc", "--format", "{{.ID}} {{.MemUsage}}", *names)
        lines = [line.split() for line in self.engine.run(*command, seconds=UP_SECONDS).splitlines()]
        return {names[each[0]]: bytes_of(each[1]) for each in lines}

    def left(self) -> dict[str, list[str]]:
        """Command lines of processes in the control groups of containers that have ended."""
        found: dict[str, list[str]] = {}
        ended = {spell.container: spell.name for spell in self.spells}
        for container in {spell.container for spell in self.running}:
            ended.pop(container, None)
        for process in psutil.process_iter():
            with suppress(OSError, psutil.Error):
                groups = Path(f"/proc/{process.pid}/cgroup").read_text()
                for container in (each for each in ended if each in groups):
                    found.setdefault(ended[container], []).append(" ".join(process.cmdline()))
        return found


def bytes_of(text: str) -> float:
    number, unit = re.fullmatch(r"([\d.]+)\s*([kKMGT]?i?B)", text).groups()  # type: ignore[union-attr]
    power = "BkMGT".index(unit[0].replace("K", "k"))
    return float(number) * (1024 if "i" in unit else 1000) ** power


def directories(pid: int) -> Iterator[str]:
    for process in psutil.Process(pid).children(recursive=True):
        for descriptor in Path(f"/proc/{process.pid}/fd").iterdir():
            with suppress(OSError):
                if found := _HELD.match(os.readlink(descriptor)):
                    yield found[1]
