"""What machines do to their peers: a disk fills up or forgets, a clock is wrong, an address changes."""

from __future__ import annotations

import errno
import os
import random
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from node.storage.statedir import home_of
from tests.faults.event_log import EventLog
from tests.faults.network import Namespaces
from tests.faults.steps import Step
from tests.support.checkers import Report, began
from tests.support.real_swarm import RealPeer, RealSwarm, wait

Act = Callable[[tuple[str, ...], Step], None]

SMALL_BYTES = 256 << 20
"""The size of a disk that fills up without harm to other programs."""
CHOKES = 5
CHECKPOINT_SECONDS, SAID_SECONDS = 30.0, 3.0
_GLANCE_SECONDS = 0.002
"""A checkpoint is written within some hundredths of a second."""
_BALLAST = "ballast"
_PIECE_BYTES = 1 << 20


def small_disk(directory: Path) -> Callable[[], None]:
    """Put a directory onto a small disk of its own, in memory; returns what takes it away again. Needs root."""
    directory.mkdir(parents=True)
    options = f"size={SMALL_BYTES},mode=0700"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "starling", str(directory)], check=True, timeout=10)
    return lambda: _to_disk(directory)


def _to_disk(directory: Path) -> None:
    """Take a small disk away; what was on it, but for the ballast, stays in the directory."""
    with TemporaryDirectory() as elsewhere:
        kept = Path(elsewhere, directory.name)
        with suppress(OSError):  # `shutil.Error` is one: what cannot be read is not kept
            shutil.copytree(directory, kept, ignore=shutil.ignore_patterns(_BALLAST))
        subprocess.run(["umount", "--lazy", str(directory)], check=False, timeout=10)
        with suppress(OSError):
            shutil.copytree(kept, directory, dirs_exist_ok=True)


class MachineFaults:
    def __init__(self, notes: EventLog, swarm: RealSwarm, network: Namespaces | None) -> None:
        self.began = time.monotonic()
        self._notes, self._swarm, self._network = notes, swarm, network
        self._full: list[RealPeer] = []
        self._wrong: list[tuple[RealPeer, float, int]] = []  # by how many seconds, since which report
        self._clocks: list[tuple[str, slice, float]] = []

    def heal(self) -> None:
        for peer in self._full:
            (peer.directory / _BALLAST).unlink(missing_ok=True)
        for peer, seconds, first in self._wrong:
            set_clock(peer, 0.0)
            if not _felt(peer.reports(), first, seconds):
                self._notes.stuck.append(f"the clock of {peer.name} was never {seconds:+g} s off")
            self._clocks.append((peer.name, slice(first, len(peer.reports())), seconds))
        self._full, self._wrong = [], []

    def until(self, targets: tuple[str, ...], step: Step) -> None:
        """Wait until `amount` seconds after the start of the schedule."""
        time.sleep(max(0.0, self.began + step.amount - time.monotonic()))

    # -- disks --------------------------------------------------------------------------------------------------------

    def fill(self, targets: tuple[str, ...], step: Step) -> None:
        for name in targets:
            peer = self._small(name)
            self._full.append(peer)
            _weigh_down(peer.directory)
        self._notes.tell("its disk is full", targets, "fault")

    def choke(self, targets: tuple[str, ...], step: Step) -> None:
        """Fill the disk while a checkpoint is written, so that the peer logs a failed checkpoint."""
        for name in targets:
            peer = self._small(name)
            self._full.append(peer)
            home = home_of(peer.directory) / "checkpoints"
            newest = max((each for each in home.glob("[0-9]*") if each.is_dir()), key=lambda each: each.name)
            room_bytes = 2 * sum(file.stat().st_size for file in newest.iterdir())
            assert any(self._choked(peer, home, room_bytes) for _ in range(CHOKES)), f"{name} was always faster"
        self._notes.tell("its disk is full in the middle of a checkpoint", targets, "fault")

    def _choked(self, peer: RealPeer, home: Path, room_bytes: int) -> bool:
        """Whether the next checkpoint failed; it may be complete before the disk is full."""
        _weigh_down(peer.directory, room_bytes)
        until = time.monotonic() + CHECKPOINT_SECONDS
        while not any(home.glob(".[0-9]*")):
            assert time.monotonic() < until, f"{peer.name} begins no checkpoint within {CHECKPOINT_SECONDS:g} s"
            time.sleep(_GLANCE_SECONDS)
        _weigh_down(peer.directory)
        with suppress(AssertionError):
            return wait("it is none", lambda: "no checkpoint before round" in peer.said(), SAID_SECONDS)
        return False

    def _small(self, name: str) -> RealPeer:
        disk = os.statvfs(self._swarm[name].directory)
        if disk.f_blocks * disk.f_frsize > 2 * SMALL_BYTES:
            raise OSError(errno.EPERM, f"{name} has no small disk of its own")
        return self._swarm[name]

    def flip(self, targets: tuple[str, ...], step: Step) -> None:
        self._damage(targets, step, _flip, "a bit of its newest checkpoint flips")

    def truncate(self, targets: tuple[str, ...], step: Step) -> None:
        self._damage(targets, step, _truncate, "its newest checkpoint is cut short")

    def _damage(
        self, targets: tuple[str, ...], step: Step, how: Callable[[Path, random.Random], None], what: str
    ) -> None:
        for name in targets:
            kept = [
                each for each in (home_of(self._swarm[name].directory) / "checkpoints").glob("[0-9]*") if each.is_dir()
            ]
            files = sorted(max(kept, key=lambda each: each.name).iterdir())
            rng = random.Random(f"{step.amount}")
            how(rng.choice(files), rng)
        self._notes.tell(what, targets, "fault")

    def named(self, targets: tuple[str, ...], step: Step) -> None:
        for name in targets:
            wait(f"{name} names what is damaged", lambda name=name: "is damaged" in self._swarm[name].said(), 20)  # type: ignore[misc]

    # -- clocks, addresses --------------------------------------------------------------------------------------------

    def skew(self, targets: tuple[str, ...], step: Step) -> None:
        for name in targets:
            set_clock(self._swarm[name], step.amount)
            self._wrong.append((self._swarm[name], step.amount, len(self._swarm[name].reports())))
        self._notes.tell(f"its clock is {step.amount:+g} s off", targets, "fault")

    def right(self, histories: Mapping[str, list[Report]]) -> dict[str, list[Report]]:
        """The histories with the skew removed from the times of reports."""
        found = {name: [dict(each) for each in reports] for name, reports in histories.items()}
        for name, reports, seconds in self._clocks:
            for each in found[name][reports]:
                each["time"] -= seconds
        return found

    def move(self, targets: tuple[str, ...], step: Step) -> None:
        assert self._network, "an address changes in a network of namespaces only"
        for name in targets:
            place = self._network.move(name)
            self._notes.tell(f"its address is {place.address} now", (name,), "fault")


def _weigh_down(disk: Path, but_bytes: int = 0) -> None:
    """Fill a disk until `but_bytes` are free, or shrink the ballast if less is free."""
    ballast = disk / _BALLAST
    with ballast.open("ab", buffering=0) as file:

        def free_bytes() -> int:
            found = os.statvfs(disk)
            return found.f_bavail * found.f_frsize

        if (more := but_bytes - free_bytes()) > 0:
            os.truncate(ballast, max(0, ballast.stat().st_size - more))
        with suppress(OSError):
            while free_bytes() > but_bytes:
                file.write(bytes(_PIECE_BYTES))


def _felt(reports: Sequence[Report], first: int, seconds: float) -> bool:
    if not 0 < first < len(reports):
        return False
    jump = began(reports[first]) - reports[first - 1]["time"]
    return abs(jump - seconds) < abs(seconds) / 2


def clock_file(peer: RealPeer) -> Path:
    return peer.directory.with_suffix(".clock")


def set_clock(peer: RealPeer, seconds: float) -> None:
    """It takes effect at once."""
    temporary = clock_file(peer).with_suffix(".new")
    temporary.write_text(f"{seconds}\n")
    temporary.replace(clock_file(peer))


def _flip(path: Path, rng: random.Random) -> None:
    with path.open("r+b") as file:
        at = rng.randrange(path.stat().st_size)
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1 << rng.randrange(8)]))


def _truncate(path: Path, rng: random.Random) -> None:
    os.truncate(path, rng.randrange(path.stat().st_size))
