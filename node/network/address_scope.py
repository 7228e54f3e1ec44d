"""From where a multiaddr can be dialled, as far as its text shows. No I/O, and no heavy imports."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from enum import IntEnum
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

_PRIVATE = tuple(map(ip_network, ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "fc00::/7")))
"""RFC 1918, 6598 and 4193: networks of homes, companies, providers and container engines."""


_LOCAL_NAMES = {"lan", "local", "internal", "home", "localdomain"}
"""Names that routers, mDNS, clouds and container engines give (RFC 6762, 8375, ICANN's `internal`)."""

_NUMERIC = re.compile(r"\d+|0x[\da-f]*")

_AT_RELAY = re.compile(r"/p2p/(\w+)/p2p-circuit")


class Scope(IntEnum):
    ANYWHERE = 0
    NETWORK = 1
    MACHINE = 2
    NOWHERE = 3


def scope(address: str) -> Scope:
    """The scope of a multiaddr, or of the relay in it. A name that the world's DNS does not have is of the network."""
    kind, _, host = address.removeprefix("/").partition("/")
    host = host.partition("/")[0].partition("%")[0]
    if kind.startswith("dns") and host:
        return _scope_of_name(host.lower().rstrip("."))
    number = _number(host if kind in ("ip4", "ip6") else "")
    return _scope_of_number(number) if number else Scope.NOWHERE


def canonical(host: str) -> str:
    """An IP address as it is written usually: an IPv4 address that is mapped into IPv6 as itself. Else ""."""
    number = _number(host)
    return str(number) if number else ""


def _number(host: str) -> IPv4Address | IPv6Address | None:
    try:
        number = ip_address(host)
    except ValueError:
        return None
    return getattr(number, "ipv4_mapped", None) or number


def _scope_of_name(name: str) -> Scope:
    if number := _number(name):  # resolvers take a name that is an address as that address
        return _scope_of_number(number)
    labels = name.split(".")
    if labels[-1] == "localhost":
        return Scope.MACHINE
    if _NUMERIC.fullmatch(labels[-1]):  # some resolvers read 127.1 and 0x7f000001 as addresses
        return Scope.NOWHERE
    is_local = len(labels) == 1 or labels[-1] in _LOCAL_NAMES or labels[-2:] == ["home", "arpa"]
    return Scope.NETWORK if is_local else Scope.ANYWHERE


def _scope_of_number(number: IPv4Address | IPv6Address) -> Scope:
    if number.is_loopback:
        return Scope.MACHINE
    is_reserved = number.version == 4 and number.is_reserved  # with the broadcast address
    if number.is_unspecified or number.is_link_local or number.is_multicast or is_reserved:
        return Scope.NOWHERE
    return Scope.NETWORK if any(number in each for each in _PRIVATE) else Scope.ANYWHERE


def in_network(listen: Sequence[str], hosts: Sequence[str]) -> tuple[str, ...]:
    """The listen addresses of scope NETWORK with fixed ports; an unspecified one stands for each of this machine's IP
    addresses, `hosts`.
    """
    found: dict[str, None] = {}
    for _, kind, host, *rest in (address.split("/") for address in listen if address.count("/") > 3):
        at = [each for each in hosts if (":" in each) == (kind == "ip6")] if host in ("0.0.0.0", "::") else [host]
        found |= {"/".join(("", kind, each, *rest)): None for each in at if rest[1] != "0"}
    return tuple(each for each in found if scope(each) == Scope.NETWORK)


def undialled(addresses: Iterable[str]) -> str:
    """User-facing line if libp2p has found that others cannot dial the peer of these addresses, which then has some at
    relays; else empty.
    """
    through = dict.fromkeys(found[1] for each in addresses if (found := _AT_RELAY.search(each)))
    if not through:
        return ""
    names = ", ".join(f"…{peer[-6:]}" for peer in [*through][:2])
    return (
        f"no peer outside can dial this one, as libp2p has found: they meet it through {names}; to be dialled, forward "
        "a fixed port of the router to this machine (--listen /ip4/0.0.0.0/tcp/4001), and announce its public address "
        "(--announce)"
    )


def has_moved(before: Collection[str], now: Collection[str]) -> bool:
    """Whether a machine whose addresses differ may have moved, so that its connections are in doubt. It has not if
    only those at relays differ, or public ones that libp2p replaces by them. To close a connection to a relay costs the
    place there.
    """
    own = [{each for each in addresses if scope(each) == Scope.NETWORK} for addresses in (before, now)]
    same = own[0] == own[1] and (undialled(before) or undialled(now))
    return not same and set(before) != set(now)


def shareable(addresses: Sequence[str]) -> tuple[str, ...]:
    """The addresses that may work from another machine, the most widely valid first: public, relayed, private."""
    ranked = [(scope(address), "/p2p-circuit" in address, address) for address in addresses]
    useful = sorted((each for each in ranked if each[0] <= Scope.NETWORK), key=lambda each: each[:2])
    return tuple(dict.fromkeys(address for *_, address in useful))
