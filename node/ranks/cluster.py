"""One peer on several machines: how they meet. Machine 0 runs the peer; the others lend it their devices.

Machine 0's worker listens at the rendezvous until the others have come. A message is one line of JSON:

    to machine 0      node, nodes, devices, torch
    from it           begin: machines, spec; or refused: why; or over: why

After `begin` the connection carries the group's commands (`node.ranks.group`). Its end is the failure detector, on both
sides. The ranks of all machines find each other in a TCP store of torch's c10d, on another port of the same address.

gloo, NCCL and the store authenticate nobody, and encrypt nothing. So this is for a network that all trust.
"""

from __future__ import annotations

import ipaddress
import json
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist

from node.runtime.metrics import interface_of
from node.runtime.notes import note
from node.tasks.spec import WorkerSpec

MAX_HELLO_BYTES = 1 << 16
HELLO_SECONDS = 5.0
STORE_SECONDS = 300.0
FAREWELL_SECONDS = 2.0
"""Time in which the other machines, which try to connect twice a second, learn that the peer has ended."""
_PATIENCE_SECONDS = 2.0
"""Until the user is told which machines are missing."""
_KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 12_000, "TCP_NODELAY": 1}
"""A machine that answers nothing is gone after about 14 s."""


class ClusterError(ValueError):
    """The machines cannot meet. The message is one line."""


@dataclass(slots=True, eq=False)
class Machines:
    """The machines of a group of ranks, as one of them sees them: one, or several."""

    size: int  # ranks of all
    firsts: tuple[int, ...] = (0,)  # of each machine, its first rank
    number: int = 0  # of this machine
    shares: bool = False  # two ranks of a machine have the same GPU
    store: tuple[str, int] = ("", 0)
    interface: str = ""
    names: tuple[str, ...] = ()  # of the machines, as machine 0 knows them
    links: Sequence[socket.socket] = ()  # of machine 0 to the others
    listener: socket.socket | None = None  # machine 0's, for the store

    @property
    def first(self) -> int:
        return self.firsts[self.number]

    @property
    def here(self) -> int:
        """Number of ranks on this machine."""
        return (*self.firsts, self.size)[self.number + 1] - self.first

    def is_here(self, rank: int) -> bool:
        return 0 <= rank - self.first < self.here

    def name(self, number: int) -> str:
        return f"machine {number} of {len(self.firsts)} ({self.names[number]})"

    def open_store(self, rank: int) -> Any:
        host, port = self.store
        server: dict[str, Any] = {}
        if rank == 0 and self.listener is not None:  # the store closes it
            server = {"is_master": True, "master_listen_fd": self.listener.detach()}
        return dist.TCPStore(  # type: ignore[attr-defined]
            host, port, wait_for_workers=False, timeout=timedelta(seconds=STORE_SECONDS), **server
        )

    def message(self, number: int) -> dict[str, Any]:
        return {
            "size": self.size,
            "firsts": self.firsts,
            "number": number,
            "shares": self.shares,
            "store": self.store,
            "names": self.names,
        }

    @classmethod
    def joined(cls, fields: Mapping[str, Any], link: socket.socket) -> Self:
        """Of a message, which came by this connection."""
        tuples = {name: tuple(fields[name]) for name in ("firsts", "store", "names")}
        return cls(**{**fields, **tuples}, interface=interface_of(link.getsockname()[0]))


# -- machine 0 --------------------------------------------------------------------------------------------------------


def gather(spec: WorkerSpec) -> Machines:
    """Wait until the other machines have come, and have them begin. Raises `ClusterError`."""
    came: dict[int, tuple[socket.socket, dict[str, Any]]] = {}
    began, told = time.monotonic(), False
    with listen(spec.rendezvous) as listener:
        while missing := _missing(spec, came):
            waited = time.monotonic() - began
            if waited >= spec.meeting_seconds:
                raise ClusterError(
                    f"{_listed(missing)} of {spec.nodes} did not come to {spec.rendezvous} within "
                    f"{spec.meeting_seconds:g} s: start it with --nodes {spec.nodes} --node {missing[0]} --rendezvous "
                    f"{spec.rendezvous}, and check that it reaches this address"
                )
            if waited >= _PATIENCE_SECONDS and not told:
                told = True
                note(f"{_listed(missing)} of {spec.nodes} has not come to {spec.rendezvous} yet: waiting for it")
            listener.settimeout(min(0.5, spec.meeting_seconds))
            with suppress(TimeoutError):
                link, address = listener.accept()
                seconds = min(HELLO_SECONDS, spec.meeting_seconds - waited)
                if hello := _greeted(link, address[0], spec, came, time.monotonic() + seconds):
                    came[hello["node"]] = link, hello | {"address": address[0]}
        address = listener.getsockname()[0]
    store = socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
    devices = [spec.devices, *(came[number][1]["devices"] for number in range(1, spec.nodes))]
    firsts = tuple(sum(map(len, devices[:number])) for number in range(spec.nodes))
    machines = Machines(
        sum(map(len, devices)),
        firsts,
        shares=any(len({*each}) < len(each) for each in devices),
        store=(split(spec.rendezvous)[0], store.getsockname()[1]),
        interface=interface_of(address),
        names=(spec.rendezvous, *(came[number][1]["address"] for number in range(1, spec.nodes))),
        links=[came[number][0] for number in range(1, spec.nodes)],
        listener=store,
    )
    for number, link in enumerate(machines.links, 1):
        with suppress(OSError):  # the group's failure detector says that the connection has ended
            send(link, {"begin": {"machines": machines.message(number), "spec": spec.to_json()}})
    return machines


def _missing(spec: WorkerSpec, came: dict[int, tuple[socket.socket, dict[str, Any]]]) -> list[int]:
    """The machines that have not come, and those that have gone again."""
    for number in [each for each, (link, _) in came.items() if _is_gone(link)]:
        came.pop(number)[0].close()
    return [number for number in range(1, spec.nodes) if number not in came]


def say_over(rendezvous: str) -> None:
    """The peer has ended: tell the machines that come for its next worker."""
    with suppress(ClusterError, OSError), listen(rendezvous) as listener:
        end = time.monotonic() + FAREWELL_SECONDS
        while (left := end - time.monotonic()) > 0:
            listener.settimeout(left)
            with listener.accept()[0] as link:
                send(link, {"over": "the peer on machine 0 has ended"})


def listen(rendezvous: str) -> socket.socket:
    """At this address only. Raises `ClusterError`."""
    host, port = split(rendezvous)
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        found = ipaddress.ip_address(str(address[0]).partition("%")[0])
        if found.is_unspecified:
            raise ClusterError(f"{rendezvous} means every network: name one address of this machine")
        if found.is_loopback and not _names_loopback(host):
            raise ClusterError(
                f"on this machine {host} is the loopback address {found}, which others do not reach: give its address "
                "in the network"
            )
        return socket.create_server(address[:2], family=family)
    except OSError as error:
        why = str(error.strerror or error).partition(" (while")[0]  # Python adds the address
        raise ClusterError(
            f"machine 0 cannot listen at {rendezvous} ({why}): give an address of this machine and a free port"
        ) from None


def _names_loopback(host: str) -> bool:
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def _greeted(
    link: socket.socket, address: str, spec: WorkerSpec, came: Mapping[int, tuple[socket.socket, Any]], end: float
) -> dict[str, Any] | None:
    """What a machine says of itself, until `end` of the monotonic clock; None if it is refused."""
    try:
        keep_alive(link)
        hello = json.loads(_line(link, end))
        if why := _refusal(hello, spec, came):
            note(f"machine {int(hello['node'])} ({address}) is refused: {why}")
            send(link, {"refused": why})
        else:
            link.settimeout(None)
            return dict(hello)
    except (OSError, ValueError, KeyError, TypeError):  # a stranger, or it is gone
        pass
    link.close()
    return None


def _line(link: socket.socket, end: float) -> bytes:
    line = bytearray()
    while not line.endswith(b"\n") and len(line) < MAX_HELLO_BYTES and (left := end - time.monotonic()) > 0:
        link.settimeout(left)
        if not (more := link.recv(MAX_HELLO_BYTES)):
            break
        line += more
    return bytes(line)


def _refusal(hello: dict[str, Any], spec: WorkerSpec, came: Mapping[int, tuple[socket.socket, Any]]) -> str:
    number, devices = int(hello["node"]), list(map(str, hello["devices"]))
    if hello["nodes"] != spec.nodes:
        return f"machine 0 has --nodes {spec.nodes}, and this one {hello['nodes']}"
    if not 0 < number < spec.nodes:
        return f"--node must be 1 to {spec.nodes - 1} here, not {number}"
    if number in came and not _is_gone(came[number][0]):
        return f"another machine has --node {number}, too"
    if hello["torch"] != torch.__version__:
        return f"machine 0 has torch {torch.__version__}, and this one {hello['torch']}: install the same"
    kinds = {each.partition(":")[0] for each in (*spec.devices, *devices)}
    if len(kinds) != 1:
        return f"devices of one peer are all of one kind, not {' and '.join(sorted(kinds))}: give --devices"
    if len(devices) % spec.tensor_parallel:
        return f"{len(devices)} devices do not make groups of {spec.tensor_parallel}, as --tensor-parallel says"
    return ""


def _is_gone(link: socket.socket) -> bool:
    try:
        return not link.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _listed(numbers: Sequence[int]) -> str:
    return f"machine{'s' * (len(numbers) > 1)} {' and '.join(map(str, numbers))}"


# -- both sides -------------------------------------------------------------------------------------------------------


def split(rendezvous: str) -> tuple[str, int]:
    host, _, port = rendezvous.rpartition(":")
    return host.strip("[]"), int(port)


def send(link: socket.socket, message: Mapping[str, Any]) -> None:
    link.sendall(json.dumps(message).encode() + b"\n")


def keep_alive(link: socket.socket) -> None:
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            link.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
