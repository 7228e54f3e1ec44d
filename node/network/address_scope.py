"""From where a multiaddr can be dialled, as far as it shows by itself. Pure, and loads next to nothing."""

from __future__ import annotations

from enum import IntEnum
from ipaddress import ip_address, ip_network

_PRIVATE = tuple(map(ip_network, ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "fc00::/7")))
"""RFC 1918, 6598 and 4193: a home's or a company's, a provider's, a container engine's."""


class Scope(IntEnum):
    """The widest first."""

    ANYWHERE = 0
    NETWORK = 1
    MACHINE = 2
    NOWHERE = 3


def scope(address: str) -> Scope:
    """Of an address through a relay: from where the relay can be dialled. A name without a dot is its network's own."""
    kind, _, host = address.removeprefix("/").partition("/")
    host = host.partition("/")[0].partition("%")[0]
    if kind.startswith("dns") and host:
        return Scope.MACHINE if host == "localhost" else Scope.ANYWHERE if "." in host else Scope.NETWORK
    try:
        number = ip_address(host if kind in ("ip4", "ip6") else "")
    except ValueError:
        return Scope.NOWHERE
    if number.is_loopback:
        return Scope.MACHINE
    if number.is_unspecified or number.is_link_local or number.is_multicast:
        return Scope.NOWHERE
    return Scope.NETWORK if any(number in each for each in _PRIVATE) else Scope.ANYWHERE
