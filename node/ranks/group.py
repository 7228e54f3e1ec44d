"""The processes of a group: rank 0, which is the worker, forks the others, and they die with it.

A command goes down each rank's socket as a line of JSON, and all ranks carry it out: {"do": METHOD, …}. Numbers come
back through collectives of torch.distributed. A rank that fails writes one line of its own, and ends; rank 0 then ends
too, and the peer starts another worker. Between commands a rank waits for its socket and not in a collective, which
would time out.

gloo and NCCL authenticate nobody: the ranks meet in a file that only they can open, and both listen on the loopback
interface only. That of a peer on several machines is in `cluster.py`: the first rank of each of the others passes on
the commands that come from rank 0, and the words of its machine's ranks.

An error that all ranks know of (`RankGroup.together`) leaves them in step: they reject the command. Another ends them.
"""

from __future__ import annotations

import errno
import json
import os
import select
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import torch
import torch.distributed as dist

from node.ranks.cluster import Machines
from node.ranks.exchange import Exchange
from node.runtime import reaper
from node.runtime.cgroup import stand_back
from node.runtime.fork_server import reseed_numpy, set_command_line
from node.runtime.notes import be_quiet
from node.tasks.name import TaskError
from node.training.failure import first_line, report, write_where_it_stands
from node.training.shared import Shared
from node.training.worker import MAX_LINE_BYTES, CommandRejected, WorkerBroken
from protocols.base import Vector

_LAUNCHER = (
    *("MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK"),
    "TORCHELASTIC_USE_AGENT_STORE",
)
"""Variables of a launcher such as torchrun, under which the user may have started the peer."""
COLLECTIVE_SECONDS = 24 * 3600.0
"""A collective has no timeout of its own: the peer's watchdog ends a worker without progress."""
AGREE_SECONDS = 10.0
"""Within this time the other ranks fail in a computation, too, if the error is one of all."""
LAST_WORDS_SECONDS = 1.0
"""Time for the line of a rank that fails to reach rank 0, whose collective fails at the same moment."""
_SETTLE_SECONDS, _SETTLE_FAR_SECONDS = 0.1, 0.6
"""When a rank is killed, the collectives of the others fail: their lines may come first, and are not the cause."""
_DEATH_SECONDS = 0.2
"""After rank 0's death the kernel kills a rank within this time, which then reports no failure of its own."""
_CONSEQUENCES = ("gloo/transport", "Connection closed by peer", "Connection reset by peer", "NCCL")
"""Of errors of a collective, which fails because another rank has."""


class RankGroup:
    """One rank's view of its group. Rank 0 has `links` to the others; so has the first rank of another machine."""

    def __init__(self, rank: int, machines: Machines, memory: int, meeting: Path) -> None:
        self.rank, self.size, self.machines = rank, machines.size, machines
        self._memory, self._meeting = memory, meeting
        self._shared: Shared | None = None
        self.founds = rank == 0 and not os.fstat(memory).st_size  # writes the first values of the vectors
        self.has_begun = False  # to train: until then, what a user gave may be refused
        self._links: list[socket.socket] = []
        self._pids: list[int] = []
        self._reported = set[str]()  # as for `report`

    @classmethod
    def fork(cls, machines: Machines, memory: int, run: Callable[[RankGroup, BinaryIO], None]) -> RankGroup:
        """Fork the other ranks of this machine, each of which calls `run` and ends; return the first one's view.

        The process has one thread only.
        """
        for name in _LAUNCHER:
            os.environ.pop(name, None)
        loopback = "lo" if os.path.isdir("/sys/class/net/lo") else "lo0"
        os.environ["GLOO_SOCKET_IFNAME"] = interface = machines.interface or loopback
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")
        meeting, parent = _meeting_place(), os.getpid()
        group = cls(machines.first, machines, memory, meeting)
        for rank in range(machines.first + 1, machines.first + machines.here):
            ours, theirs = socket.socketpair()
            if not (pid := os.fork()):
                _run_rank(cls(rank, machines, memory, meeting), theirs, parent, run)
            theirs.close()
            group._links.append(ours)
            group._pids.append(pid)
        group._links += machines.links
        return group

    def meet(self, device: str) -> None:
        """Create the process group: all ranks call it, after their devices are known."""
        self.device = torch.device("cuda:0" if device == "cuda" else device)
        is_gpu = self.device.type == "cuda"
        if is_gpu:
            torch.cuda.set_device(self.device)
        self._has_nccl = is_gpu and dist.is_nccl_available() and not self.machines.shares  # it refuses two on one GPU
        self._backend = "cpu:gloo,cuda:nccl" if self._has_nccl else "gloo"
        far = len(self.machines.firsts) > 1
        dist.init_process_group(
            self._backend,
            init_method=None if far else f"file://{self._meeting}",
            store=self.machines.open_store(self.rank) if far else None,
            rank=self.rank,
            world_size=self.size,
            timeout=timedelta(seconds=COLLECTIVE_SECONDS),
        )
        dist.barrier()
        self.far = Exchange(self.rank, self.machines, self.new_group) if far else None

    def new_group(self, ranks: Sequence[int] | None = None, backend: str = "") -> Any:
        """A process group of these ranks, or of all. All ranks call it together, for the same groups in one order."""
        timeout = timedelta(seconds=COLLECTIVE_SECONDS)  # torch's own is 10 or 30 minutes
        return dist.new_group(ranks, timeout, backend or self._backend)

    def shared(self, elements: int) -> Shared:
        """The vectors that all ranks share with the peer."""
        if self._shared is None:
            self._shared = Shared(self._memory, elements)
        return self._shared

    @contextmanager
    def publishing(self, elements: int) -> Iterator[Vector]:
        """The vector into which each rank writes its own part; afterwards all are written. All ranks call it."""
        local = self.shared(elements).local
        if self.far:
            self.far.clear(local)
        yield local
        if self.far:
            self.far.collect(local)
        else:
            self.total(0.0)

    @property
    def name(self) -> str:
        return _name(self.rank, self.size)

    def begin(self, nice: int) -> None:
        """Training begins. Rank 0's niceness is set as any worker's."""
        self.has_begun = True
        if self.rank:
            stand_back(nice, time.sleep)

    def allocate(self, elements: int) -> Vector:
        return self.shared(elements).local

    # -- commands ----------------------------------------------------------------------------------------------------

    def tell_all(self, do: str, **fields: Any) -> None:
        """Have the other ranks begin a command. Rank 0 calls it, and then does the same itself."""
        self.pass_on(json.dumps({"do": do, **fields}).encode() + b"\n")

    def pass_on(self, line: bytes) -> None:
        for link in self._links:
            link.sendall(line)

    def everywhere(self, command: Callable[..., Any], do: str, **fields: Any) -> Any:
        """Have all ranks do this. Rank 0 calls it, does the same by `command`, and returns its result."""
        try:
            self.tell_all(do, **fields)
            return command(**fields)
        except Exception as error:
            if isinstance(error, CommandRejected):  # by all ranks
                raise
            self.hear_last_words()
            raise WorkerBroken from error

    @contextmanager
    def together(self, what: str = "", computes: bool = False) -> Iterator[None]:
        """If a rank cannot read, write or use what it was given, all reject the command. All ranks call it together.

        `computes`: together with the others, which wait for a rank that fails alone. So that ends them all.
        """
        error: OSError | ValueError | None = None
        try:
            yield
        except (OSError, ValueError) as found:
            error = found
        code = 0 if error is None else getattr(error, "errno", None) or errno.EINVAL
        codes = torch.tensor([code if rank == self.rank else 0 for rank in range(self.size)])
        agreed = dist.all_reduce(codes, async_op=True)
        try:
            agreed.wait(timedelta(seconds=AGREE_SECONDS if error and computes else COLLECTIVE_SECONDS))
        except RuntimeError:
            if error is None:
                raise
            raise RuntimeError(f"on this rank alone: {first_line(error)}") from error
        for rank, code in enumerate(codes.tolist()):
            if code:
                why = self._told(error) if error else f"{_name(rank, self.size)}: {os.strerror(code)}"
                raise CommandRejected(f"{what}{why}") from error

    def _told(self, error: OSError | ValueError) -> str:
        """In one line; rank 0 writes the traceback of a user's code."""
        if isinstance(error, TaskError) and not self.rank:
            return report(error, self._reported)
        return getattr(error, "strerror", None) or first_line(error)

    def watch(self, fail: Callable[[str, str], None]) -> None:
        """From now on, tell it by `fail` if a rank ends, and end this process with it.

        `fail` gets `refused` or `failed` and one line, as the peer does.
        """
        threading.Thread(target=self._watch, args=(fail,), name="ranks", daemon=True).start()

    @property
    def has_links(self) -> bool:
        return bool(self._links)

    def hear_last_words(self) -> None:
        """After a failure in rank 0: if another rank's is the cause, that rank says so, and this process ends."""
        time.sleep(2 * LAST_WORDS_SECONDS if self.machines.links else LAST_WORDS_SECONDS)

    def _watch(self, fail: Callable[[str, str], None]) -> None:
        poll = select.poll()
        for link in self._links:
            poll.register(link, select.POLLIN)
        ready = [descriptor for descriptor, _ in poll.poll()]
        time.sleep(_SETTLE_FAR_SECONDS if self.machines.links else _SETTLE_SECONDS)
        ready += [descriptor for descriptor, _ in poll.poll(0) if descriptor not in ready]
        rank_of = {link.fileno(): at for at, link in enumerate(self._links)}
        words = {rank_of[each]: self._last_words(rank_of[each]) for each in ready}
        at = min(words, key=lambda each: _is_consequence(words[each]))
        word, why = words[at] or ("failed", self._end_of(at))
        if at >= len(self._pids):
            why = f"{self.machines.name(at - len(self._pids) + 1)}: {why}"
        elif word != "refused":
            why = f"{_name(self.rank + at + 1, self.size)}: {why}"
        fail(word, why)
        os._exit(1)

    def _last_words(self, at: int) -> tuple[str, str] | None:
        """None: its process was killed."""
        link = self._links[at]
        link.settimeout(LAST_WORDS_SECONDS)
        try:
            ((word, why),) = json.loads(link.makefile("rb").readline(MAX_LINE_BYTES)).items()
            return word, why
        except (OSError, ValueError):
            return None

    def _end_of(self, at: int) -> str:
        if at >= len(self._pids):
            return "the connection to it ended"
        for _ in range(100):
            pid, status = os.waitpid(self._pids[at], os.WNOHANG)
            if pid:
                code = os.waitstatus_to_exitcode(status)
                how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
                return f"its process {how}"
            time.sleep(LAST_WORDS_SECONDS / 100)
        return "its process closed its socket"

    # -- collectives -------------------------------------------------------------------------------------------------

    def total(self, *numbers: float) -> list[float]:
        """The sums of these numbers over all ranks, in float64."""
        held = torch.tensor(numbers, dtype=torch.float64)
        dist.all_reduce(held)
        return [float(each) for each in held.tolist()]

    def least(self, number: int) -> int:
        held = torch.tensor(number)
        dist.all_reduce(held, dist.ReduceOp.MIN)
        return int(held)

    def backends(self) -> dict[str, Any]:
        """Process groups by their backend's name; all ranks call it together."""
        if not self._has_nccl:
            return {"gloo": None}
        return {"NCCL": None, "gloo": self.new_group(backend="gloo")}

    def now(self) -> float:
        """Seconds, once what was asked of the device is done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def _name(rank: int, size: int) -> str:
    return f"rank {rank} of {size}"


def _is_consequence(words: tuple[str, str] | None) -> int:
    """Of the ends of several ranks, the one with the least number is the cause: one that was killed, else an error."""
    return 0 if words is None else 1 + any(each in words[1] for each in _CONSEQUENCES)


def _meeting_place() -> Path:
    """A file through which the ranks find each other: on Linux in memory, where nothing is left of it afterwards."""
    if sys.platform == "linux":
        return Path(f"/proc/self/fd/{os.memfd_create('starling-ranks')}")
    return Path(tempfile.mkdtemp(prefix="starling-ranks-"), "store")


def _run_rank(
    group: RankGroup, link: socket.socket, parent: int, run: Callable[[RankGroup, BinaryIO], None]
) -> NoReturn:
    """In the forked process. It keeps nothing of its parent's but the shared memory, its socket and its output."""
    code = 1
    try:
        reaper.die_with_parent()
        if os.getppid() == parent:
            meeting = {int(group._meeting.name)} if group._meeting.name.isdigit() else set()
            _close_others({0, 1, 2, group._memory, link.fileno()} | meeting)
            set_command_line("python", "-P", "-m", "node.ranks.worker", group.name)
            reseed_numpy()
            write_where_it_stands()
            be_quiet()
            code = run_to_end(group, link, run)
    finally:
        os._exit(code)


def run_to_end(group: RankGroup, link: socket.socket, run: Callable[[RankGroup, BinaryIO], None]) -> int:
    """Be a rank until its commands end, or until it fails, and tell that by its socket; returns an exit code."""
    try:
        run(group, link.makefile("rb"))
    except BaseException as error:  # noqa: BLE001 - a rank's boundary: whatever it is, rank 0 has to know
        # a first rank of a machine waits longer: one of its own may be the cause, which its `watch` tells
        time.sleep(LAST_WORDS_SECONDS / 2 if group.has_links else _DEATH_SECONDS)
        refused = isinstance(error, ValueError) and not group.has_begun
        name = f"{group.name}: " if group.machines.number and group.rank == group.machines.first else ""
        word, why = ("refused", first_line(error)) if refused else ("failed", name + report(error, set()))
        link.sendall(json.dumps({word: why}).encode() + b"\n")
        return 1
    return 0


def _close_others(kept: set[int]) -> None:
    for name in os.listdir("/dev/fd"):
        if int(name) not in kept:
            try:
                os.close(int(name))
            except OSError:  # the descriptor of the listing itself
                continue


def carry_out(group: RankGroup, lines: BinaryIO, command: Callable[[str], Callable[..., Any]]) -> None:
    """A rank's loop, until rank 0 closes its socket. Rank 0 tells why a command is rejected."""
    while line := lines.readline(MAX_LINE_BYTES):
        group.pass_on(line)
        fields = json.loads(line)
        do = fields.pop("do")
        with suppress(CommandRejected):
            command(do)(**fields)
