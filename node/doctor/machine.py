"""Checks of this machine: facts in, lines out. Pure. `machine_probes` gathers the facts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from node.doctor.findings import Finding, Level, found
from node.machine.rules import MachinePolicy, MachineReadings, MachineRules
from node.reporting.status import short
from node.runtime.program import typed

HIVEMIND = "1.1.12"  # the version whose p2pd this project knows
SLOW_FSYNC_SECONDS = 0.5
LEAST_FREE_BYTES = 500e6
LEAST_OPEN_FILES = 1024
SETTLED_SECONDS = 1000.0  # longer than any delay of the machine's rules

Fault = tuple[Level, str, str]


@dataclass(frozen=True, slots=True)
class Programs:
    """Versions of what this peer needs, empty if it is not installed; and how p2pd starts."""

    starling: str
    python: str
    torch: str
    hivemind: str
    p2pd_seconds: float = math.nan  # nan: it was not started, because the peer's own runs
    p2pd_problem: str = ""


def check_programs(facts: Programs) -> list[Finding]:
    def faults() -> Iterator[Fault]:
        for name, version in (("torch", facts.torch), ("hivemind", facts.hivemind)):
            if not version:
                yield Level.FAIL, f"{name} is not installed in the environment of this Python", "install Starling again"
        if facts.hivemind not in ("", HIVEMIND):
            what = f"hivemind {facts.hivemind} is installed, and this version knows the p2pd of {HIVEMIND}"
            yield Level.WARN, what, f"pip install hivemind=={HIVEMIND}"
        if facts.p2pd_problem and facts.hivemind:
            yield Level.FAIL, "p2pd does not start", facts.p2pd_problem

    starts = "p2pd runs" if math.isnan(facts.p2pd_seconds) else f"p2pd starts in {facts.p2pd_seconds:.1f} s"
    text = f"Starling {facts.starling}, Python {facts.python}, torch {facts.torch}, hivemind {facts.hivemind}; {starts}"
    return found("programs", text, faults())


# -- the state directory -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Storage:
    path: str
    exists: bool = True
    problem: str = ""  # why it cannot be used, with what to do after the last colon
    free_bytes: float = math.nan
    limit_bytes: float = math.nan  # --disk-limit
    checkpoint_bytes: float = 0.0
    largest_bytes: float = 0.0  # of one checkpoint
    past_bytes: float = 0.0
    fsync_seconds: float = math.nan


def check_storage(facts: Storage) -> list[Finding]:
    def faults() -> Iterator[Fault]:
        if facts.problem:
            yield Level.FAIL, facts.problem, "name a writable directory on a local disk by --state-dir"
            return
        if facts.free_bytes < max(LEAST_FREE_BYTES, 1.1 * facts.largest_bytes):
            left = f"the disk of {facts.path} is nearly full: {size(facts.free_bytes)} free"
            clean = facts.past_bytes >= LEAST_FREE_BYTES
            cure = f"{typed('clean')} removes past runs ({size(facts.past_bytes)})" if clean else "free space there"
            yield Level.WARN, left, f"{cure}, or name another directory by --state-dir"
        if facts.fsync_seconds > SLOW_FSYNC_SECONDS:
            slow = f"the disk of {facts.path} is slow: fsync takes {facts.fsync_seconds:.1f} s"
            yield Level.WARN, slow, "name a directory on a local disk by --state-dir: each checkpoint waits for it"

    text = f"state directory {facts.path}: {size(facts.free_bytes)} free"
    if facts.exists:
        text += f", checkpoints {size(facts.checkpoint_bytes)} of {size(facts.limit_bytes)}"
        text += f", past runs {size(facts.past_bytes)}" if facts.past_bytes else ""
    else:
        text += "; it does not exist yet"
    if facts.fsync_seconds == facts.fsync_seconds:
        text += f"; fsync {1000 * facts.fsync_seconds:.0f} ms"
    return found("storage", text, faults())


def size(count: float) -> str:
    if math.isnan(count):
        return "an unknown size"
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


@dataclass(frozen=True, slots=True)
class Holder:
    """The peer's identity, and which process uses the state directory."""

    peer: str = ""  # empty: none yet
    problem: str = ""  # why it cannot be read, and what to do
    is_running: bool = False  # a peer runs there, and answers
    is_held: bool = False  # another process holds the directory, and does not answer


def check_identity(facts: Holder) -> list[Finding]:
    def faults() -> Iterator[Fault]:
        if facts.problem:
            yield Level.FAIL, "the identity cannot be used", facts.problem
        if facts.is_held:
            what = (
                "another process uses this state directory and does not answer: a peer that was stopped, or that starts"
            )
            yield Level.FAIL, what, "wait a few seconds, end that process, or give another directory by --state-dir"

    held = ", held by the running peer" if facts.is_running else ""
    text = f"identity {short(facts.peer)}{held}" if facts.peer else "no identity yet: the first join makes one"
    return found("identity", text, faults())


# -- what trains -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hardware:
    wanted: str  # as the user named it: auto, cpu, cuda, mps, cuda:0,cuda:1 …
    torch: str
    gpus: tuple[tuple[str, float], ...] = ()  # name and bytes of memory of those that PyTorch can use
    has_mps: bool = False
    problem: str = ""  # why PyTorch cannot open the GPUs
    has_nvidia_driver: bool = False
    cores: int = 1
    open_files: int = 1 << 20
    page_port: int | None = None  # None: no page is wanted
    is_page_port_taken: bool = False
    own_loop: bool = False
    in_use: str | None = None  # on what a running peer trains, in words; empty: not known yet; None: no peer runs

    @property
    def device(self) -> str:
        if self.wanted != "auto":
            return self.wanted
        return "cuda" if self.gpus else "mps" if self.has_mps else "cpu"


def check_hardware(facts: Hardware) -> list[Finding]:
    text = f"trains on {_devices(facts)}, {facts.cores} core{'s' * (facts.cores > 1)}"
    text += f"; open files {facts.open_files:,}"
    text += f"; page on port {facts.page_port}" if facts.page_port else ""

    def faults() -> Iterator[Fault]:
        if not facts.own_loop:
            yield from _device_faults(facts)
        if facts.open_files < LEAST_OPEN_FILES:
            yield Level.WARN, f"a process may open only {facts.open_files} files", "ulimit -n 4096, before the start"
        if facts.is_page_port_taken:
            what = f"port {facts.page_port} is taken: the page would take the next free one"
            yield Level.WARN, what, "give a free one by --page-port"

    return found("hardware", text, faults())


def _device_faults(facts: Hardware) -> Iterator[Fault]:
    """At most one. What a running peer trains on works."""
    numbers, is_running = _gpu_numbers(facts), facts.in_use is not None
    trains_on = facts.in_use if is_running else facts.device
    if facts.problem and facts.wanted != "cpu":
        yield Level.FAIL, f"the GPUs cannot be used: {facts.problem}", "see docs/devices.md, or give --device cpu"
    elif numbers and max(numbers) >= len(facts.gpus) and not is_running:
        count = f"{len(facts.gpus)} GPUs" if facts.gpus else "no GPU"
        what = f"{facts.device} is wanted, and PyTorch {facts.torch} can use {count}"
        yield Level.FAIL, what, "see docs/devices.md for the driver and the build, or give --device cpu"
    elif facts.device == "mps" and not facts.has_mps and not is_running:
        yield Level.FAIL, f"mps is wanted, and PyTorch {facts.torch} cannot use it here", "give --device cpu"
    elif trains_on == "cpu" and facts.wanted == "auto" and facts.has_nvidia_driver:
        what = f"an NVIDIA driver is installed, and PyTorch {facts.torch} uses no GPU: it trains on the CPU"
        yield Level.WARN, what, "install a build of PyTorch for CUDA: docs/devices.md; or give --device cpu"


def _gpu_numbers(facts: Hardware) -> list[int]:
    return [int(name.partition(":")[2] or 0) for name in facts.device.split(",") if name.startswith("cuda")]


def _devices(facts: Hardware) -> str:
    if facts.own_loop:
        return "the device of your script"
    if facts.in_use is not None:
        return facts.in_use or "a device that is not known yet"
    names = [facts.gpus[number] for number in _gpu_numbers(facts) if number < len(facts.gpus)]
    about = ", ".join(f"{name}, {size(memory)}" for name, memory in names)
    return f"{facts.device} ({about})" if about else facts.device


# -- the clock, pauses, reboots ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SystemClock:
    is_set_by_network: bool | None = None  # None: the system does not tell
    has_timedatectl: bool = False


def check_clock(facts: SystemClock) -> list[Finding]:
    if facts.is_set_by_network is not False:
        return []
    cure = "timedatectl set-ntp true" if facts.has_timedatectl else "let chrony, or another NTP client, set it"
    return [Finding("clock", Level.WARN, "the clock is not set by the network", cure)]


_CURES = {
    "this machine is short of memory": "end other programs, or train a smaller model",
    "on battery": "plug it in, or give --on-battery ignore",
    "the network is metered": "use another network, or give --on-metered ignore",
    "outside the hours that you gave": "it trains in those hours: give other --hours, or none",
    "this machine is hot": "let it cool, or give --on-heat ignore",
}


@dataclass(frozen=True, slots=True)
class PauseFacts:
    readings: MachineReadings
    rules: MachineRules = field(default_factory=MachineRules)


def check_pauses(facts: PauseFacts) -> list[Finding]:
    readings, policy = facts.readings, MachinePolicy(facts.rules)
    policy.decide(readings, 0.0)
    cause = policy.decide(readings, SETTLED_SECONDS).cause
    seen = {
        "battery": readings.on_battery is not None,
        "memory": not math.isnan(readings.memory_available_bytes),
        "heat": not math.isnan(readings.temperature_celsius),
        "the network's price": readings.is_metered is not None,
        "mouse and keyboard": not math.isnan(readings.input_idle_seconds),
    }

    def faults() -> Iterator[Fault]:
        if cause:
            yield Level.WARN, f"the peer would pause now: {cause}", _CURES.get(cause, f"see {typed('join --help')}")
        if facts.rules.in_use and not seen["mouse and keyboard"]:
            yield Level.WARN, "pauses: mouse and keyboard cannot be seen here", "give --when-busy pause instead"

    names = [name for name, is_seen in seen.items() if is_seen]
    return found("pauses", f"pauses: {_listed(names)} can be seen", faults()) if names or cause else []


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1]))) if names else "nothing"


@dataclass(frozen=True, slots=True)
class AtBoot:
    """Whether something starts a peer when the machine boots."""

    has_services: bool = False  # systemd or launchd; not in a container
    is_installed: bool = False  # the file of the service is there
    to_start: str = ""  # the command that has it started at each boot; empty if that is so
    holds_run: bool = True  # whether the state directory holds a run, which a service resumes


def check_at_boot(facts: AtBoot) -> list[Finding]:
    if not facts.has_services or not facts.holds_run:
        return []
    if not facts.is_installed:
        return [Finding("reboot", Level.WARN, "does not start after a reboot", typed("service install"))]
    if facts.to_start:
        return [Finding("reboot", Level.WARN, "its service is installed, and was never started", facts.to_start)]
    return [Finding("reboot", Level.OK, "starts again after a reboot")]
