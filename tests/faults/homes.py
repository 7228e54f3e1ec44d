"""Homes in a network of namespaces: a host behind a router that translates addresses, as most volunteers have.

    host 192.168.1.5 line ═════ lan 192.168.1.1 home 192.52.193.3 line ═════ line3 192.52.193.1
                                                                               outer router
    public peer                                      192.52.193.2 line ═════ line2

The router is the home's place in the network, so that faults, which are by place, meet it. All homes number their hosts
alike. libp2p takes the outer addresses for public, which it does not with those for documentation.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path

from tests.faults.network import Namespaces, Place, forwards, run

OUTER = "192.52.193"
_HOST = 5
_PORT_GIVER = """ext_ifname=line
listening_ip=lan
enable_natpmp=yes
enable_upnp=yes
port=0
"""
_PORT_CHAINS = """*nat
:MINIUPNPD - [0:0]
:MINIUPNPD-POSTROUTING - [0:0]
-A PREROUTING -i line -j MINIUPNPD
-A POSTROUTING -o line -j MINIUPNPD-POSTROUTING
COMMIT
*filter
:MINIUPNPD - [0:0]
-I FORWARD -i line -j MINIUPNPD
COMMIT
"""
_KNOWN = "-m conntrack ! --ctstate ESTABLISHED,RELATED,DNAT"


class Router(StrEnum):
    """What a router does with addresses and ports of connections. None lets a connection in, except the full cone."""

    PORT_KEEPING = "port-keeping"  # a connection keeps its port, if that is free
    SYMMETRIC = "symmetric"  # a random port for each connection
    REFUSING = "refusing"  # keeps ports; answers a connection from outside with a reset
    FULL_CONE = "full cone"  # keeps ports; forwards all connections from outside to the host
    CGNAT = "CGNAT"  # two that keep ports, one behind the other: the home's, and the provider's


def rules(router: Router, host: str) -> str:
    """For `iptables-restore` on the router, whose outer line is `line`."""
    random = " --random-fully" if router is Router.SYMMETRIC else ""
    nat = [f"-A POSTROUTING -o line -j MASQUERADE{random}"]
    if router is Router.FULL_CONE:
        nat.append(f"-A PREROUTING -i line -p tcp --dport 1024:65535 -j DNAT --to {host}")
    verdicts = ["-j DROP"]
    if router is Router.REFUSING:
        verdicts.insert(0, "-p tcp -j REJECT --reject-with tcp-reset")
    dropped = [f"-A {chain} -i line {_KNOWN} {verdict}" for chain in ("FORWARD", "INPUT") for verdict in verdicts]
    return "\n".join(["*nat", *nat, "COMMIT", "*filter", *dropped, "COMMIT", ""])


class Homes(Namespaces):
    """Public places (`add`) and homes (`home`)."""

    def __init__(self, net: str = OUTER) -> None:
        super().__init__(net)

    def home(self, name: str, router: Router) -> Place:
        """A host in a new home; its router has the public address."""
        box = self.add(name).namespace
        if router is Router.CGNAT:
            box = self._inside(box, f"{name}-box", "100.64.0", 2, Router.PORT_KEEPING).namespace
            router = Router.PORT_KEEPING
        return self._inside(box, f"{name}-host", "192.168.1", _HOST, router)

    def plain(self, name: str) -> Place:
        """A host behind a router that translates nothing. What it sends over a slow line waits in the router.

        In a place of `add` it waits in the host's own kernel, which then lets each connection queue little.
        """
        box, number = self.add(name), len(self.places)
        host = self._inside(box.namespace, f"{name}-host", f"192.52.{number}", _HOST, None)
        run("ip", "-n", self._router, "route", "add", f"192.52.{number}.0/24", "via", box.address)
        return host

    @contextmanager
    def gives_ports(self, name: str, directory: Path, grants: bool = True) -> Iterator[None]:
        """The router of this home listens to UPnP and NAT-PMP, inside the context; it may refuse what hosts ask for.

        miniupnpd gives nothing where the outer address is in `OUTER`, which it takes for reserved.
        """
        settings = directory / "miniupnpd.conf"
        settings.write_text(_PORT_GIVER + f"{'allow' if grants else 'deny'} 1024-65535 192.168.1.0/24 1024-65535\n")
        inside = self.places[name].inside
        run(*inside, "iptables-legacy-restore", "--noflush", given=_PORT_CHAINS)
        with (directory / "miniupnpd.log").open("wb") as log:
            process = subprocess.Popen(
                [*inside, "miniupnpd", "-d", "-f", str(settings), "-P", str(directory / "miniupnpd.pid")],
                stdout=log,
                stderr=log,
            )
        try:
            yield
        finally:
            process.terminate()
            process.wait(10)

    def _inside(self, gateway: str, name: str, net: str, number: int, router: Router | None) -> Place:
        """A new namespace behind this one, which becomes its router."""
        place = Place(name, f"{self._router}-{name}", 0, f"{net}.{number}")
        run("ip", "netns", "add", place.namespace)
        outside = (
            f"link add lan type veth peer name line netns {place.namespace}\n"
            f"address add {net}.1/24 dev lan\n"
            "link set dev lan addrgenmode none up\n"
        )
        within = (
            "link set dev lo up\n"
            f"address add {place.address}/24 dev line\n"
            "link set dev line addrgenmode none up\n"
            f"route add default via {net}.1\n"
        )
        run("ip", "-n", gateway, "-batch", "-", given=outside)
        run("ip", "-n", place.namespace, "-batch", "-", given=within)
        if router:
            run("ip", "netns", "exec", gateway, "iptables-restore", "-w", "5", given=rules(router, place.address))
        forwards(gateway)
        return place
