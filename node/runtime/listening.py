"""Sockets that listen on several addresses of this machine, at the same port, and what addresses it has."""

from __future__ import annotations

import errno
import socket
from collections.abc import Sequence

import psutil

_MISSING = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
_PORT_ATTEMPTS = 8


def interface_hosts() -> tuple[str, ...]:
    """IP addresses of this machine's network interfaces that are up; none if the system does not tell."""
    return tuple(host for _, host in interfaces())


def interfaces() -> tuple[tuple[str, str], ...]:
    """(name, IP address) of each network interface that is up, once for each address."""
    try:
        up = [name for name, each in psutil.net_if_stats().items() if each.isup]
        addresses = psutil.net_if_addrs()
    except (psutil.Error, OSError):
        return ()
    found = ((name, each) for name in up for each in addresses.get(name, ()))
    families = (socket.AF_INET, socket.AF_INET6)
    return tuple((name, each.address.partition("%")[0]) for name, each in found if each.family in families)


def listen(hosts: Sequence[str], port: int, backlog: int) -> list[socket.socket]:
    """Listen at these IP addresses, except those that this machine does not have. Port 0 takes a free one.

    OSError if the port is taken at one of them, or this machine has none of them.
    """
    for attempt in range(_PORT_ATTEMPTS):
        try:
            return _at(hosts, port, backlog)
        except OSError:  # a port that is free at the first address may be taken at the next
            if port or attempt == _PORT_ATTEMPTS - 1:
                raise
    raise AssertionError("unreachable")


def is_taken(address: str) -> bool:
    """Whether a socket listens at this multiaddress of an IP address and a fixed port of TCP."""
    parts = address.split("/")
    if len(parts) < 5 or parts[1] not in ("ip4", "ip6") or parts[3] != "tcp" or parts[4] == "0":
        return False
    try:
        _bound(parts[2], int(parts[4]), 1).close()
    except OSError as error:
        return error.errno == errno.EADDRINUSE
    return False


def _at(hosts: Sequence[str], port: int, backlog: int) -> list[socket.socket]:
    sockets: list[socket.socket] = []
    missing: OSError | None = None
    try:
        for host in hosts:
            try:
                sockets.append(_bound(host, port, backlog))
            except OSError as error:
                if error.errno not in _MISSING:
                    raise
                missing = error
            else:
                port = sockets[0].getsockname()[1]
        if not sockets:
            raise missing or OSError(errno.EADDRNOTAVAIL, "no address to listen on")
    except BaseException:
        for sock in sockets:
            sock.close()
        raise
    return sockets


def _bound(host: str, port: int, backlog: int) -> socket.socket:
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if sock.family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind((host, port))
        sock.listen(backlog)
    except BaseException:
        sock.close()
        raise
    return sock
