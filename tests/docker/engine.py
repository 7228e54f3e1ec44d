"""The Docker engine of the test: the running one, or one that the test starts in a network namespace.

An engine changes the firewall of its network (the policy of FORWARD, chains, a bridge), and leaves these changes
behind. So an engine of the test gets a network namespace, which ends with it; `firewall` checks that.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

START_SECONDS, STOP_SECONDS = 60.0, 40.0
WEIGHT = 4
"""The processor share of all containers, counted in processes of the machine.

Without it, all containers together would count as one process. With eight they starve the commands that stop them.
"""
_GROUPS = Path("/sys/fs/cgroup")
_ASK_SECONDS = 20.0
_OWN_NETWORK = ("unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")
_SETTINGS = ("bridge/bridge-nf-call-iptables", "bridge/bridge-nf-call-ip6tables", "ipv4/ip_forward")


class NotHere(Exception):
    """The message says in one line what is missing."""


class Engine:
    """The commands `docker` and `docker compose`. `before`: `firewall` before the test started it; None: it ran
    already.
    """

    def __init__(self, environment: Mapping[str, str], before: list[str] | None = None) -> None:
        self.environment, self.before = dict(environment), before
        self._compose = ("docker", "compose") if self._runs("docker", "compose", "version") else ("docker-compose",)

    def run(self, *arguments: str, seconds: float = _ASK_SECONDS, **more: Any) -> str:
        return self._run(("docker", *arguments), seconds, self.environment, **more)

    def compose(self, *arguments: str, seconds: float, variables: Mapping[str, str]) -> str:
        return self._run((*self._compose, *arguments), seconds, self.environment | dict(variables))

    @property
    def own(self) -> bool:
        return self.before is not None

    @property
    def versions(self) -> str:
        compose = self._run((*self._compose, "version", "--short"), _ASK_SECONDS, self.environment).strip()
        engine = self.run("version", "--format", "{{.Server.Version}}").strip()
        return f"engine {engine}, {' '.join(self._compose)} {compose}"

    def events(self, file: Path, *filters: str) -> subprocess.Popen[bytes]:
        command = ["docker", "events", "--format", "{{json .}}", *(f"--filter={each}" for each in filters)]
        with file.open("ab") as out:
            return subprocess.Popen(command, env=self.environment, stdin=subprocess.DEVNULL, stdout=out)

    def _runs(self, *command: str) -> bool:
        try:
            self._run(command, _ASK_SECONDS, self.environment)
        except (OSError, subprocess.SubprocessError):
            return False
        return True

    def _run(self, command: tuple[str, ...], seconds: float, environment: Mapping[str, str], **more: Any) -> str:
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | more
        done = subprocess.run(
            command, env=environment, text=True, errors="replace", timeout=seconds, check=True, **streams
        )
        return done.stdout


@contextmanager
def engine(home: Path) -> Iterator[Engine]:
    """The running engine, or else a new one with its files in `home`; `NotHere` if none can be started."""
    if os.geteuid():
        raise NotHere("it needs root, to strike processes in containers: run it as root")
    if not shutil.which("docker"):
        raise NotHere("there is no docker: install it (Debian: docker.io)")
    running = Engine(os.environ)
    if not running._runs(*running._compose, "version"):
        raise NotHere("there is no compose: install it (Debian: docker-compose)")
    if running._runs("docker", "version", "--format", "{{.Server.Version}}"):
        if not os.environ.get("DOCKER_HOST", "unix://").startswith("unix://"):
            raise NotHere("the engine is another machine's: unset DOCKER_HOST")
        yield running
        return
    missing = [each for each in ("dockerd", "iptables", "ip", "unshare") if not shutil.which(each)]
    if missing:
        raise NotHere(f"no docker engine runs here, and none can be started: there is no {missing[0]}")
    with _own(home) as started:
        yield started


@contextmanager
def _own(home: Path) -> Iterator[Engine]:
    before, address = firewall(), f"unix://{home}/docker.sock"
    command = [*_OWN_NETWORK, "dockerd", "--host", address, "--pidfile", f"{home}/docker.pid"]
    command += ["--data-root", f"{home}/data", "--exec-root", f"{home}/exec", "--cgroup-parent", f"/{home.name}"]
    _weigh(home.name)
    environment = {name: value for name, value in os.environ.items() if name not in ("DOCKER_HOST", "DOCKER_CONTEXT")}
    with (home / "dockerd.log").open("wb") as log:
        process = subprocess.Popen(  # a session of its own, because Ctrl-C must not end it before the containers
            command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    try:
        started = Engine(environment | {"DOCKER_HOST": address}, before)
        until = time.monotonic() + START_SECONDS
        while not started._runs("docker", "version", "--format", "{{.Server.Version}}"):
            if process.poll() is not None or time.monotonic() > until:
                raise NotHere(f"no docker engine runs here, and none can be started: {_last_line(home)}")
            time.sleep(0.25)
        yield started
    finally:
        _end(process)
        _unmount(home)
        for place in (_GROUPS / home.name, *_GROUPS.glob(f"*/{home.name}")):
            with suppress(OSError):
                place.rmdir()


def _weigh(group: str) -> None:
    second = (_GROUPS / "cgroup.controllers").exists()  # version 2 of control groups
    file, usual = (_GROUPS / group / "cpu.weight", 100) if second else (_GROUPS / "cpu" / group / "cpu.shares", 1024)
    with suppress(OSError):
        file.parent.mkdir()
        file.write_text(f"{WEIGHT * usual}")


def _last_line(home: Path) -> str:
    lines = (home / "dockerd.log").read_text(errors="replace").strip().splitlines()
    return lines[-1][:200] if lines else "dockerd said nothing"


def _end(process: subprocess.Popen[bytes]) -> None:
    children: list[psutil.Process] = []
    with suppress(psutil.Error):
        children = psutil.Process(process.pid).children(recursive=True)
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(STOP_SECONDS)
    for child in psutil.wait_procs(children, timeout=5)[1]:
        with suppress(psutil.Error):
            child.kill()


def _unmount(home: Path) -> None:
    mounted = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
    for place in sorted((each for each in mounted if each.startswith(f"{home}/")), reverse=True):
        subprocess.run(["umount", "--lazy", place], check=False, timeout=10, capture_output=True)


def firewall() -> list[str]:
    """The firewall policies, Docker's rules and bridges, and the network settings, as sorted lines."""
    found = []
    for table in ("filter", "nat"):
        listed = subprocess.run(["iptables", "-t", table, "-S"], capture_output=True, text=True, timeout=10, check=True)
        found += [
            f"{table} {line}" for line in listed.stdout.splitlines() if line[:2] == "-P" or "docker" in line.lower()
        ]
    found += [
        f"link {path.name}" for path in Path("/sys/class/net").iterdir() if path.name.startswith(("docker", "br-"))
    ]
    for name in _SETTINGS:
        with suppress(OSError):  # the module is not loaded
            found.append(f"{name} {Path('/proc/sys/net', name).read_text().strip()}")
    return sorted(found)
