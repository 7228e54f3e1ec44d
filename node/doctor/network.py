"""Checks of this peer's network, by what it sees itself and by what its helpers tell: facts in, lines out. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from ipaddress import ip_address, ip_network
from statistics import median

from node.config.sizes import megabytes
from node.direct.messages import MIN_PORT
from node.doctor.findings import Finding, Level, found
from node.doctor.machine import Fault
from node.membership.hello import MAX_PROBED_PORTS, PortResult, ProbedPort
from node.membership.host_monitor import MAX_OFFSET_SECONDS, skew
from node.network.address_scope import Scope, scope
from node.reporting.swarm import newer_line, release
from node.runtime.program import typed, upgrade

USUAL_PORTS = (4001, 4002)
REFUSED = "connection refused"  # in a reason: TCP works, if only to a machine whose peer is down
_SHARED = ip_network("100.64.0.0/10")  # RFC 6598: what a provider's router has inside
_VPN = ("tun", "wg", "tailscale", "zt", "ppp")


# -- where this peer listens -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Listening:
    libp2p: tuple[int, ...] = ()  # TCP ports
    data: int = 0  # TCP port for data; 0: none
    wants_data: bool = True
    only_here: bool = False  # only at addresses of the loopback
    problem: str = ""  # why it does not listen, and what to do after the first colon


def check_listening(facts: Listening) -> list[Finding]:
    def faults() -> Iterator[Fault]:
        if facts.problem:
            what, _, cure = facts.problem.partition(": ")
            yield Level.FAIL, what, cure or "listen on another port by --listen"
            return
        if facts.wants_data and not facts.data:
            what = "there is no data port: it is taken, so others send their data over libp2p, which is slower"
            yield Level.WARN, what, "give a free one by --direct-port"
        if facts.only_here:
            what = "listens at this machine's own loopback: no other machine can reach it"
            yield Level.WARN, what, "--listen /ip4/0.0.0.0/tcp/0"

    ports = " and ".join(map(str, facts.libp2p))
    data = f" (libp2p) and {facts.data} (data)" if facts.data else " (libp2p), with no data port, as you asked"
    return found("listen", f"listens on tcp {ports}{data}", faults())


# -- whom it reaches ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Helper:
    """Another peer that was asked for help."""

    name: str
    seconds: float = math.nan  # until it answered
    why: str = ""  # why it could not be reached
    host: str = ""  # the IP address at which it was reached; empty through a relay
    version: str = ""


@dataclass(frozen=True, slots=True)
class Reached:
    hosts: tuple[tuple[str, str], ...] = ()  # (network interface, IP address) of this machine
    seen_as: str = ""  # this peer's IP address as a helper sees it
    helpers: tuple[Helper, ...] = ()
    given: Helper | None = None  # the one among them whose address the user gave
    proxies: tuple[str, ...] = ()  # variables that name a proxy
    is_well: bool = False  # if the given one cannot be reached, that is no fault of this peer

    @property
    def reached(self) -> tuple[Helper, ...]:
        return tuple(each for each in self.helpers if not each.why)


def check_reach(facts: Reached) -> list[Finding]:
    def faults() -> Iterator[Fault]:
        given = facts.given if facts.given and facts.given.why else None
        if given and (facts.is_well or facts.reached):
            yield _unreached(Level.WARN, given)
        elif facts.reached or not facts.helpers:
            if not (facts.reached or any(scope_of(host) <= Scope.NETWORK for _, host in facts.hosts)):
                yield Level.FAIL, "this machine has no address in any network", "connect it to one"
        elif facts.proxies and not any(REFUSED in each.why for each in facts.helpers):
            what = f"{facts.proxies[0]} is set, and no outbound TCP works"
            yield Level.FAIL, what, "libp2p needs TCP to the peers' ports; HTTP proxies are not used"
        elif given:
            yield _unreached(Level.FAIL, given)
        else:
            first = facts.helpers[0]
            count = f"none of {len(facts.helpers)} known peers" if len(facts.helpers) > 1 else "the only known peer"
            what = f"{count} can{'not' * (len(facts.helpers) == 1)} be reached ({first.name}: {first.why})"
            yield Level.WARN, what, _help()

    text = _own_addresses(facts)
    if facts.reached:
        nearest = sorted(facts.reached, key=lambda each: each.seconds)[:3]
        text += "; reaches " + ", ".join(f"{each.name} in {1000 * each.seconds:.0f} ms" for each in nearest)
    return found("reach", text, faults())


def _unreached(level: Level, helper: Helper) -> Fault:
    why, _, cure = helper.why.partition(": ")
    return level, f"{helper.name} cannot be reached: {why}", cure or "is it up, and is that its present address?"


def _help() -> str:
    return f"give the address of a peer that is up: {typed('doctor ADDRESS')}"


def _own_addresses(facts: Reached) -> str:
    """What addresses this machine has, in words."""
    own = [host for _, host in facts.hosts if scope_of(host) <= Scope.NETWORK]
    fours = sorted((each for each in own if ":" not in each), key=scope_of)
    sixes = [each for each in own if ":" in each and scope_of(each) is Scope.ANYWHERE]
    vpn = next((name for name, _ in facts.hosts if name.startswith(_VPN)), "")
    words = [f"IPv4 {fours[0]}{_behind(fours[0], facts.seen_as)}" if fours else "no IPv4"]
    words += ["IPv6" if sixes else "no IPv6", f"a VPN ({vpn})" if vpn else "no VPN"]
    return ", ".join(words)


def _behind(host: str, seen_as: str) -> str:
    if ip_address(host) in _SHARED:
        return " behind the provider's router"
    if scope_of(host) is not Scope.NETWORK:
        return ""
    if seen_as and scope_of(seen_as) is Scope.ANYWHERE and ":" not in seen_as:
        return f" behind a router, seen as {seen_as}"
    return " (private)"


def scope_of(host: str) -> Scope:
    return scope(f"/{'ip6' if ':' in host else 'ip4'}/{host}")


# -- who reaches it ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DialBackReport:
    """What one helper found when it dialled this peer's ports."""

    helper: str
    host: str = ""  # the IP address that it dialled
    why: str = ""  # why it dialled nothing
    ports: tuple[ProbedPort, ...] = ()


@dataclass(frozen=True, slots=True)
class Outside:
    reports: tuple[DialBackReport, ...] = ()
    libp2p: tuple[int, ...] = ()  # ports among those asked for
    data: int = 0
    forward: tuple[int, int] = USUAL_PORTS  # ports to forward at a router: for libp2p, and for data (0: none)
    own_hosts: tuple[str, ...] = ()
    relays: tuple[str, ...] = ()  # names of peers through which others meet this one
    is_alone: bool = False  # it runs, and no other peer is in its run


def check_outside(facts: Outside) -> list[Finding]:
    answered = [each for each in facts.reports if each.ports]
    if not answered:
        why = (
            f" ({facts.reports[0].helper}: {facts.reports[0].why})" if facts.reports else ": no other peer can be asked"
        )
        is_early = any("minute" in each.why for each in facts.reports)
        cure = "ask again in a minute" if is_early else "" if facts.reports else _help()
        return [Finding("outside", Level.UNKNOWN, f"not known whether others can dial this peer{why}", cure)]
    dialled = [(each, port) for each in answered for port in each.ports if port.port in facts.libp2p]
    is_open = [(each, port) for each, port in dialled if port.result == PortResult.LIBP2P]
    if not is_open:
        lines = [_closed(facts, *next(iter(dialled), (answered[0], answered[0].ports[0])))]
    else:
        lines = [*_open(facts, is_open), *_closed_data(facts, answered)]
    if facts.relays:
        text = f"others meet this peer through {', '.join(facts.relays[:3])}"
        lines.append(Finding("relay", Level.OK, text))
    return lines


def _open(facts: Outside, is_open: Sequence[tuple[DialBackReport, ProbedPort]]) -> Iterator[Finding]:
    report, port = min(is_open, key=lambda each: scope_of(each[0].host))
    where = {Scope.NETWORK: "in this network only", Scope.MACHINE: "on this machine only"}
    names = ", ".join(dict.fromkeys(each.helper for each, _ in is_open))
    how = f"{names} dialled {_place(report.host, port.port)}"
    yield Finding("outside", Level.OK, f"open {where.get(scope_of(report.host), 'from outside')}: {how}")


def _closed_data(facts: Outside, answered: Iterable[DialBackReport]) -> Iterator[Finding]:
    results = [(each, port) for each in answered for port in each.ports if port.port == facts.data != 0]
    if results and not any(port.result in _ACCEPTS for _, port in results):
        report, port = results[0]
        dial = f"{report.helper} could not dial {_place(report.host, port.port)} ({_why(port)})"
        text = f"the data port is closed: {dial}; others' data takes slower ways"
        yield Finding("data port", Level.WARN, text, _cure(facts, report, only_data=True))


def _closed(facts: Outside, report: DialBackReport, port: ProbedPort) -> Finding:
    place = _place(report.host, port.port)
    if port.result == PortResult.OPEN:
        text = f"another program answers at {place}, to which {report.helper} was led"
    else:
        where = "from outside" if scope_of(report.host) is Scope.ANYWHERE else "in this network"
        text = f"closed {where}: {report.helper} could not dial {place} ({_why(port)})"
    works = facts.relays or not facts.is_alone
    return Finding("outside", Level.WARN if works else Level.FAIL, text, _cure(facts, report))


_ACCEPTS = (PortResult.OPEN, PortResult.LIBP2P)


def _why(port: ProbedPort) -> str:
    if port.result == PortResult.SILENT:
        return f"no answer in {port.seconds:.0f} s"
    words = {PortResult.REFUSED: REFUSED, PortResult.UNREACHABLE: "no route leads there"}
    return {str(result): why for result, why in words.items()}.get(port.result, port.result)


def _cure(facts: Outside, report: DialBackReport, only_data: bool = False) -> str:
    """What opens the ports at which a helper's dials failed."""
    if report.host in facts.own_hosts or scope_of(report.host) is not Scope.ANYWHERE:
        closed = [str(each.port) for each in report.ports if each.result not in _ACCEPTS]
        return f"let tcp {' and '.join(closed)} in at this machine's firewall" if closed else "see what listens there"
    own = next((host for host in facts.own_hosts if scope_of(host) is Scope.NETWORK and ":" not in host), "")
    if own and ip_address(own) in _SHARED:
        return "your provider shares that address: use IPv6, a VPN between you, or one rented server"
    libp2p, data = facts.forward
    announced = f"--announce /ip{6 if ':' in report.host else 4}/{report.host}/tcp/{libp2p}"
    options = {libp2p: f"--listen /ip4/0.0.0.0/tcp/{libp2p} {announced}", data: f"--direct-port {data}"}
    ports = [port for port in ((data,) if only_data else (libp2p, data)) if port]
    to = f" to {own}" if own else ""
    how = " ".join(options[port] for port in ports)
    return f"forward tcp {' and '.join(map(str, ports))}{to} at the router, then: {how}"


def _place(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def ports_to_probe(addresses: Iterable[str], listening: Sequence[int], data: int) -> tuple[tuple[int, ...], int]:
    """(ports for libp2p, the data port or 0) to have dialled, `MAX_PROBED_PORTS` at most; public ones first.

    `addresses` are those that this peer tells others; a router that maps ports gives them others than it listens on.
    """
    public = (each for each in addresses if "/p2p-circuit" not in each and scope(each) is Scope.ANYWHERE)
    mapped = [port for each in public if (port := tcp_port(each))]
    data = data if data >= MIN_PORT else 0
    wanted = [port for port in dict.fromkeys((*mapped, *listening)) if port >= MIN_PORT and port != data]
    return tuple(wanted[: MAX_PROBED_PORTS - bool(data)]), data


def ports_to_forward(listen: Iterable[str], direct_port: int | str) -> tuple[int, int]:
    """(port for libp2p, port for data or 0): those that the user fixed, else usual ones."""
    fixed = next((port for each in listen if "/ip4/" in each and (port := tcp_port(each))), USUAL_PORTS[0])
    data = 0 if direct_port == "off" else int(direct_port) or USUAL_PORTS[1]
    return fixed, data if data != fixed else data + 1


def tcp_port(address: str) -> int:
    """The TCP port of a multiaddr with an IP address; 0 if it has none."""
    parts = address.split("/")
    return int(parts[4]) if len(parts) > 4 and parts[3] == "tcp" and parts[4].isdigit() else 0


def choose_helpers(hosts: Sequence[tuple[str, str]], count: int = 2) -> list[str]:
    """Names of the peers to ask for a dial-back, of (name, host): none behind a relay, public ones first, and of
    different networks (/16, or /32 of IPv6) if there are.
    """
    usable = sorted(((name, host) for name, host in hosts if host), key=lambda each: scope_of(each[1]))
    chosen: dict[str, str] = {}
    for name, host in usable:
        chosen.setdefault(_network(host), name)
    spread = list(chosen.values())
    return [*spread, *(name for name, _ in usable if name not in spread)][:count]


def _network(host: str) -> str:
    return str(ip_network(f"{host}/{32 if ':' in host else 16}", strict=False))


# -- how fast it sends -------------------------------------------------------------------------------------------------

TOO_FAST = 2.0
"""A peer that declares more than this multiple of what it sends makes rounds late: it is given too large parts."""


def check_upload(declared: float, measured: float) -> list[Finding]:
    """In bytes/s, `measured` while data waited for its line; nan: its line was not full for long enough."""
    if math.isnan(measured):
        return []
    text = f"sends {megabytes(measured)}/s while data waits, {megabytes(declared)}/s declared"
    is_over = declared > TOO_FAST * measured
    cure = f"--bandwidth {measured / 1e6:.2g}; the others give it smaller parts then, and rounds are not late"
    return found("upload", text, [(Level.WARN, text, cure)] if is_over else ())


# -- what the others say -----------------------------------------------------------------------------------------------


def check_others_clocks(offsets: Sequence[float]) -> list[Finding]:
    """`offsets`: the others' wall clocks minus this machine's, in seconds."""
    if not offsets:
        return []
    if line := skew(sorted(offsets), MAX_OFFSET_SECONDS):
        what, _, cure = line.rpartition("; ")
        return [Finding("others' clocks", Level.WARN, what, cure)]
    return [Finding("others' clocks", Level.OK, f"clock {abs(median(offsets)):.1f} s from the others'")]


def check_versions(mine: str, others: Sequence[str]) -> list[Finding]:
    """`others`: versions of other peers; empty if a peer does not say it."""
    if line := newer_line(mine, others, upgrade()):
        what, _, cure = line.partition(": ")
        return [Finding("versions", Level.WARN, what, cure)]
    known = {release(each) for each in others} - {()}
    if not known:
        return []
    own, theirs = mine.partition("+")[0], ", ".join(".".join(map(str, each)) for each in sorted(known)[:3])
    agree = known == {release(mine)}
    text = f"versions agree ({own})" if agree else f"this peer runs {own}, others run {theirs}"
    return [Finding("versions", Level.OK, text)]
