"""A network of namespaces for real peers, and its faults: each peer has a namespace and one line to a router.

    first: 10.77.0.2 line ═════ line2 10.77.0.1 line3 ═════ line second: 10.77.0.3
                                      router

The router is a namespace, too: the machine's own addresses, routes, rules and settings are neither used nor changed.
Packets are dropped on the router, as on the internet; a rule in the sender's namespace would give the sender an error
(EPERM). The router is no bridge, so that all rules are in one table that is replaced in one step. A fault therefore
begins for all peers between two packets, and no packet avoids it by IPv6 or broadcast.

A harness that is killed by SIGKILL leaves namespaces named `starling-…`; `ip netns delete` removes them.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import uuid
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Self, TypeVar

COMMAND_SECONDS = 10.0
MOST_PLACES = 250
QUEUE_MILLISECONDS = 200
BURST_SECONDS = 0.02
LEAST_BURST_BYTES = 3_200
"""Two frames; a burst below one frame would block the line."""
_NET = "10.77.0"
_TOOLS = ("ip", "tc", "iptables", "iptables-restore", "nsenter")
_GSO_SEGMENTS = 65_535


class CommandFailed(RuntimeError):
    """A command for the network failed; the message holds the command and its output."""


@dataclass(frozen=True, eq=False)
class Cut:
    """Packets from `sources` to `targets` are dropped; with `both`, also those back."""

    sources: tuple[str, ...]
    targets: tuple[str, ...]
    both: bool


@dataclass(frozen=True, eq=False)
class Loss:
    """A share of a peer's packets is dropped in each direction; of all packets if `name` is None."""

    name: str | None
    share: float


@dataclass(frozen=True, eq=False)
class Slowness:
    """Packets that wait longer for the line than the queue's length are dropped, as by a router."""

    name: str
    bits_per_second: int
    queue_milliseconds: int


@dataclass(frozen=True, eq=False)
class Firewall:
    """Packets of a peer's TCP connections from or to `port` are dropped, or with `refuse` answered by a reset."""

    name: str
    port: int
    refuse: bool


Fault = Cut | Loss | Slowness | Firewall
F = TypeVar("F", Cut, Loss, Slowness, Firewall)


def table(faults: Iterable[Fault], addresses: Mapping[str, str]) -> str:
    """The router's rules under these faults, for `iptables-restore`; `addresses` are by peer."""
    rules: list[str] = []
    for fault in faults:
        if isinstance(fault, Cut):
            sources, targets = (",".join(addresses[name] for name in end) for end in (fault.sources, fault.targets))
            rules.append(f"-s {sources} -d {targets} -j DROP")
            rules += [f"-s {targets} -d {sources} -j DROP"] if fault.both else []
        elif isinstance(fault, Loss):
            ends = [""] if fault.name is None else [f"{option} {addresses[fault.name]} " for option in ("-s", "-d")]
            rules += [f"{end}-m statistic --mode random --probability {fault.share:.9f} -j DROP" for end in ends]
        elif isinstance(fault, Firewall):
            verdict = "REJECT --reject-with tcp-reset" if fault.refuse else "DROP"
            ends = [f"{option} {addresses[fault.name]}" for option in ("-s", "-d")]
            rules += [f"{end} -p tcp -m multiport --ports {fault.port} -j {verdict}" for end in ends]
    return "\n".join(["*filter", ":FORWARD ACCEPT", *(f"-A FORWARD {rule}" for rule in rules), "COMMIT", ""])


def slowed(faults: Iterable[Fault]) -> dict[str, Slowness]:
    """Peer -> what slows its line; the slowest of several faults counts."""
    found: dict[str, Slowness] = {}
    for fault in faults:
        if isinstance(fault, Slowness):
            found[fault.name] = min(fault, found.get(fault.name, fault), key=lambda each: each.bits_per_second)
    return found


def shaping(device: str, slowness: Slowness | None) -> str:
    """The `tc -batch` command that limits what one end of a line sends; None removes the limit."""
    if slowness is None:
        return f"qdisc delete dev {device} root\n"
    bits = slowness.bits_per_second
    burst = max(LEAST_BURST_BYTES, int(bits / 8 * BURST_SECONDS))
    limits = f"rate {bits}bit burst {burst} latency {slowness.queue_milliseconds}ms"
    return f"qdisc replace dev {device} root tbf {limits}\n"


def framing(faults: Iterable[Fault]) -> str:
    """The `ip link set` option for what a line takes at once: 64 KB, or one frame, so that losses are single frames."""
    return f"gso_max_segs {1 if any(isinstance(fault, Loss) for fault in faults) else _GSO_SEGMENTS}"


@dataclass(frozen=True)
class Place:
    name: str
    namespace: str
    line: int
    address: str

    @property
    def inside(self) -> tuple[str, ...]:
        """Prefix of a command that runs it in the namespace; the process keeps its id, so signals reach the command."""
        return ("nsenter", f"--net=/run/netns/{self.namespace}")  # `ip netns exec` hides the control groups

    @property
    def device(self) -> str:
        return f"line{self.line}"


class Namespaces:
    """Makes namespaces for peers, and faults between them; removes all of them at the end.

    Processes are not ended, but have no network afterwards. A fault lasts until it is healed, and affects open
    connections, too. Methods raise `CommandFailed`, and ValueError for unknown peers and impossible amounts.
    """

    def __init__(self, net: str = _NET) -> None:
        """`net`: the first three numbers of all addresses."""
        self.places: dict[str, Place] = {}
        self._faults: tuple[Fault, ...] = ()
        self._moved = 0
        self._net, self._gateway = net, f"{net}.1"
        self._router = f"starling-{uuid.uuid4().hex[:8]}"

    def __enter__(self) -> Self:
        try:
            run("ip", "netns", "add", self._router)
            forwards(self._router)
        except BaseException:
            with suppress(CommandFailed):  # the first failure is the one to tell
                self._clear()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._clear()

    @property
    def inside(self) -> tuple[str, ...]:
        """Put before a command, runs it on the router."""
        return ("ip", "netns", "exec", self._router)

    def redirect(self, port: int) -> None:
        """Every connection that a peer opens to another from now on goes to this port on the router."""
        rule = ("PREROUTING", "-p", "tcp", "-j", "REDIRECT", "--to-ports", str(port))
        run(*self.inside, "iptables", "-w", "5", "-t", "nat", "-A", *rule)

    def add(self, name: str) -> Place:
        """A place for one more peer; of the faults there are, it meets those that concern all."""
        if name in self.places or len(self.places) == MOST_PLACES:
            raise ValueError(f"there is no room for {name!r}: it is there already, or {MOST_PLACES} others are")
        number = len(self.places) + 2
        place = Place(name, f"{self._router}-{name}", number, f"{self._net}.{number}")
        run("ip", "netns", "add", place.namespace)
        router = (
            f"link add {place.device} type veth peer name line netns {place.namespace}\n"
            f"address add {self._gateway} peer {place.address} dev {place.device}\n"
            f"link set dev {place.device} addrgenmode none up\n"
        )
        peer = (
            "link set dev lo up\n"
            f"address add {place.address} peer {self._gateway} dev line\n"
            f"link set dev line addrgenmode none {framing(self._faults)} up\n"
            f"route add default via {self._gateway}\n"
        )
        run("ip", "-n", self._router, "-batch", "-", given=router)
        run("ip", "-n", place.namespace, "-batch", "-", given=peer)
        self.places[name] = place
        return place

    def move(self, name: str) -> Place:
        """Give a peer another address; what comes for the old one goes nowhere. Only while nothing is wrong."""
        self._known([name])
        if self._faults or len(self.places) + self._moved == MOST_PLACES:
            raise ValueError(f"{name!r} cannot move: there is a fault, or no address left")
        self._moved += 1
        old = self.places[name]
        address = f"{self._net}.{MOST_PLACES + 2 - self._moved}"
        place = self.places[name] = replace(old, address=address)
        router = (
            f"address delete {self._gateway} peer {old.address} dev {old.device}\n"
            f"address add {self._gateway} peer {place.address} dev {old.device}\n"
        )
        peer = (  # in this order: with the first of two addresses towards one peer the kernel removes the other
            f"address delete {old.address} peer {self._gateway} dev line\n"
            f"address add {place.address} peer {self._gateway} dev line\n"
            f"route replace default via {self._gateway}\n"
        )
        run("ip", "-n", self._router, "-batch", "-", given=router)
        run("ip", "-n", old.namespace, "-batch", "-", given=peer)
        return place

    def part(self, one: Collection[str], other: Collection[str]) -> Cut:
        return self._cut(one, other, both=True)

    def deafen(self, deaf: Collection[str], sources: Collection[str]) -> Cut:
        """Drop all packets from `sources` to `deaf`; those from `deaf` arrive."""
        return self._cut(sources, deaf, both=False)

    def lose(self, name: str | None, share: float) -> Loss:
        """At random in each direction; for None, of all packets once."""
        self._known([] if name is None else [name])
        if not 0 < share <= 1:
            raise ValueError(f"{share} is no share of packets to lose")
        return self._strike(Loss(name, share))

    def slow(self, name: str, bits_per_second: int, queue_milliseconds: int = QUEUE_MILLISECONDS) -> Slowness:
        self._known([name])
        if bits_per_second < 8:
            raise ValueError(f"{bits_per_second} bits per second is no line")
        return self._strike(Slowness(name, bits_per_second, queue_milliseconds))

    def block(self, name: str, port: int, *, refuse: bool) -> Firewall:
        """Let no TCP connection from or to this port pass a peer's line: drop its packets, or reset it."""
        self._known([name])
        return self._strike(Firewall(name, port, refuse))

    def heal(self, fault: Fault | None = None) -> None:
        """End this fault, or all faults. Healing a fault twice is not an error."""
        self._suffer(tuple(other for other in self._faults if fault not in (None, other)))

    def suffers(self) -> bool:
        return bool(self._faults)

    def felt(self) -> int:
        """The number of packets that a rule dropped or a slow line delayed since the faults last changed."""
        rules = run("ip", "netns", "exec", self._router, "iptables", "-w", "5", "-nvxL", "FORWARD")
        dropped = sum(int(line.split()[0]) for line in rules.splitlines() if " DROP " in line or " REJECT " in line)
        lines = run("tc", "-n", self._router, "-s", "qdisc")
        return dropped + sum(int(each) for each in re.findall(r"overlimits (\d+)", lines))

    def _cut(self, sources: Collection[str], targets: Collection[str], both: bool) -> Cut:
        self._known(sources)
        self._known(targets)
        if not (sources and targets):
            raise ValueError("no host to cut off")
        return self._strike(Cut(tuple(sources), tuple(targets), both))

    def _strike(self, fault: F) -> F:
        self._suffer((*self._faults, fault))
        return fault

    def _known(self, names: Collection[str]) -> None:
        if isinstance(names, str) or not set(names) <= set(self.places):
            raise ValueError(f"{names!r} are not peers of this network")

    def _suffer(self, faults: tuple[Fault, ...]) -> None:
        """Runs commands only for what differs."""
        addresses = {name: place.address for name, place in self.places.items()}
        if (rules := table(faults, addresses)) != table(self._faults, addresses):
            if (frames := framing(faults)) != framing(self._faults):
                for place in self.places.values():
                    run("ip", "-n", place.namespace, "link", "set", "dev", "line", *frames.split())
            run("ip", "netns", "exec", self._router, "iptables-restore", "-w", "5", given=rules)
        before, after = slowed(self._faults), slowed(faults)
        changed = [self.places[name] for name in before | after if before.get(name) != after.get(name)]
        for place in changed:
            run("tc", "-n", place.namespace, "-batch", "-", given=shaping("line", after.get(place.name)))
        if changed:
            lines = "".join(shaping(place.device, after.get(place.name)) for place in changed)
            run("tc", "-n", self._router, "-batch", "-", given=lines)
        self._faults = faults

    def _clear(self) -> None:
        self.places, self._faults = {}, ()
        names = [line.split()[0] for line in run("ip", "netns", "list").splitlines()]
        mine = [f"netns delete {name}\n" for name in names if name.startswith(self._router)]
        if mine:
            run("ip", "-force", "-batch", "-", given="".join(mine))


def why_not() -> str:
    """Why this machine cannot have such a network, and what to do, in one line; empty if it can."""
    if sys.platform != "linux":
        return f"network namespaces need Linux; this is {sys.platform}"
    if missing := [tool for tool in _TOOLS if not shutil.which(tool)]:
        return f"{', '.join(missing)} not found: install iproute2, iptables and util-linux"
    if os.geteuid():
        return "network namespaces need root: run this as root"
    try:
        with Namespaces() as network:
            network.add("trial")
            network.lose("trial", 0.5)
            network.slow("trial", 1_000_000)
    except CommandFailed as error:
        words = " ".join(str(error).split())
        return f"no network of namespaces here: {words}; in a container, start it with --privileged"
    return ""


def forwards(namespace: str) -> None:
    """Make a namespace a router."""
    run("ip", "netns", "exec", namespace, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")


def run(*command: str, given: str | None = None) -> str:
    """The output of a command; raises `CommandFailed`."""
    try:
        done = subprocess.run(command, input=given or "", capture_output=True, text=True, timeout=COMMAND_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CommandFailed(f"{' '.join(command)}: {error}") from error
    if done.returncode:
        raise CommandFailed(f"{' '.join(command)}: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return done.stdout
