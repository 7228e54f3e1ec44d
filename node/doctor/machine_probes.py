"""Gathers the facts that `machine` checks. What blocks runs in threads; what there is not is left unknown."""

from __future__ import annotations

import asyncio
import ctypes
import os
import platform
import resource
import shutil
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

from node._version import VERSION
from node.config.derived import machine_rules
from node.config.peer_config import PeerConfig
from node.doctor.machine import AtBoot, Hardware, Holder, PauseFacts, Programs, Storage, SystemClock
from node.machine.probes import Desktop, MachineProbes
from node.machine.service import service
from node.page.keys import last_port
from node.runtime.cgroup import usable_cores
from node.runtime.identity import IdentityError, load
from node.runtime.listening import listen
from node.runtime.locks import LocksUnsupported, hold
from node.storage.checkpoint import DIRECTORY, places
from node.storage.statedir import STAGES, holds_run
from protocols.aio import loop_time

MAX_FILES = 100_000
FSYNC_BYTES = 4096
_TIME_ERROR = 5
_NVIDIA = (Path("/proc/driver/nvidia/version"), Path("/dev/nvidia0"), Path("/dev/dxg"))
_SYSTEMD = Path("/run/systemd/system")


def programs(p2pd_seconds: float, p2pd_problem: str) -> Programs:
    return Programs(
        VERSION, platform.python_version(), _version("torch"), _version("hivemind"), p2pd_seconds, p2pd_problem
    )


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


# -- the state directory -----------------------------------------------------------------------------------------------


async def storage(config: PeerConfig, directory: Path) -> Storage:
    facts = await asyncio.to_thread(_storage, directory)
    facts = replace(facts, limit_bytes=config.disk_limit_bytes)
    if not facts.exists or facts.problem:
        return facts
    began = loop_time()
    try:
        await asyncio.to_thread(_fsync, directory)
    except OSError as error:
        return replace(facts, problem=f"nothing can be written in {directory} ({error.strerror})")
    return replace(facts, fsync_seconds=loop_time() - began)


def _storage(directory: Path) -> Storage:
    """Its sizes. If there is no directory yet, whether it can be created is a question about the nearest one above."""
    above = next(each for each in (directory, *directory.absolute().parents) if each.exists())
    exists = above == directory
    facts = Storage(str(directory), exists)
    try:
        facts = replace(facts, free_bytes=float(shutil.disk_usage(above).free))
        if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
            return replace(facts, problem=f"nothing can be written in {above}")
        if held := hold(above):
            os.close(held)
        homes = (directory, *(directory / STAGES).glob("*"))
        checkpoints = [_bytes(each) for home in homes for each in places(home / DIRECTORY)]
    except LocksUnsupported:
        return replace(facts, problem=f"the file system of {above} has no locks, which keep a second peer out")
    except OSError as error:
        return replace(facts, problem=f"{above} cannot be read ({error.strerror})")
    return replace(
        facts,
        checkpoint_bytes=sum(checkpoints),
        largest_bytes=max(checkpoints, default=0.0),
        past_bytes=_bytes(directory / "past"),
    )


def _bytes(directory: Path) -> float:
    total, files = 0.0, 0
    if directory.is_symlink():  # which `clean` does not follow
        return total
    for where, _, names in os.walk(directory):
        for name in names:
            with suppress(OSError):  # removed meanwhile
                total += os.lstat(os.path.join(where, name)).st_size
        files += len(names)
        if files > MAX_FILES:
            break
    return total


def _fsync(directory: Path) -> None:
    with tempfile.TemporaryFile(dir=directory) as file:
        file.write(bytes(FSYNC_BYTES))
        file.flush()
        os.fsync(file.fileno())


def holder(directory: Path, is_running: bool, is_held: bool) -> Holder:
    key = directory / "identity.key"
    if not os.path.lexists(key):
        return Holder("", "", is_running, is_held)
    try:
        return Holder(load(key).peer_id, "", is_running, is_held)
    except IdentityError as error:
        return Holder("", str(error), is_running, is_held)


# -- what trains -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TorchDevices:
    gpus: tuple[tuple[str, float], ...] = ()
    has_mps: bool = False
    problem: str = ""


def torch_devices() -> TorchDevices:
    """Opens the GPUs, which takes seconds, and memory of theirs for as long as this process lives."""
    import torch

    try:
        gpus = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    except (RuntimeError, AssertionError) as error:  # the driver is too old, or another one than that of the kernel
        return TorchDevices(problem=str(error).partition("\n")[0])
    return TorchDevices(
        tuple((each.name, float(each.total_memory)) for each in gpus), torch.backends.mps.is_available()
    )


def hardware(config: PeerConfig, directory: Path, devices: TorchDevices, in_use: str | None) -> Hardware:
    """`in_use` is what a running peer trains on; None: no peer runs."""
    is_running = in_use is not None
    port = (last_port(directory) if is_running else None) or config.page_port
    return Hardware(
        wanted=",".join(config.devices) or config.device,
        torch=_version("torch"),
        gpus=devices.gpus,
        has_mps=devices.has_mps,
        problem=devices.problem,
        has_nvidia_driver=any(each.exists() for each in _NVIDIA),
        cores=usable_cores(),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        page_port=port if config.page else None,
        is_page_port_taken=config.page and not is_running and _is_taken(port),
        own_loop=config.own_loop,
        in_use=in_use,
    )


def _is_taken(port: int) -> bool:
    try:
        for sock in listen(["127.0.0.1"], port, 1):
            sock.close()
    except OSError:
        return True
    return False


# -- the clock, pauses, reboots ----------------------------------------------------------------------------------------


def system_clock() -> SystemClock:
    """The kernel knows whether something sets its clock. Only Linux is asked."""
    state = -1
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(512))  # all zero: it only asks
    known = None if state < 0 else state != _TIME_ERROR
    return SystemClock(known, shutil.which("timedatectl") is not None and _SYSTEMD.is_dir())


async def pauses(config: PeerConfig) -> PauseFacts:
    desktop, rules = Desktop(), machine_rules(config)
    readings = await asyncio.to_thread(MachineProbes().read, load=False)
    idle, metered = await asyncio.gather(desktop.input_idle_seconds(), desktop.is_metered())
    return PauseFacts(replace(readings, input_idle_seconds=idle, is_metered=metered), rules)


def at_boot(directory: Path) -> AtBoot:
    try:
        found = service()
    except FileNotFoundError:  # no home directory
        found = None
    if found is None:
        return AtBoot()
    started = all(os.path.lexists(each) for each in found.links)
    return AtBoot(True, found.file.exists(), "" if started else found.start[0], holds_run(directory))
