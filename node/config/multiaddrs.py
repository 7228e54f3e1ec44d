"""Checks of addresses that a user gives: one line says what is wrong, and what to write instead."""

from __future__ import annotations

import os
import re
from pathlib import Path

from multiaddr import Multiaddr
from multiaddr.exceptions import StringParseError

from node.membership.hello import MAX_ADDRESS_CHARACTERS

_PLACE = "/ip4/192.0.2.7/tcp/31337"
_EXAMPLE = f"{_PLACE}/p2p/12D3Koo…"
_CODEPOINT = re.compile(r"Codepoint U\+([0-9A-F]{4,6})")
_NUMBER_AS_NAME = re.compile(r"/dns[46]?/(\d+\.\d+\.\d+\.\d+)/")
ANY_PORT = re.compile("/(tcp|udp)/0(/|$)")  # In a multiaddr that leaves the choice of the port to the system
_ANYWHERE = re.compile(r"/ip4/0\.0\.0\.0/|/ip6/::/")
FILE_SIGN = "@"  # Prefix in `bootstrap` of the path of a file that holds addresses


def _multiaddr(address: str, example: str) -> str:
    if not address.startswith("/"):
        raise ValueError(f"{address!r} is not a multiaddr{_rewritten(address, example)}")
    try:
        parsed = str(Multiaddr(address))
    except StringParseError as error:
        why = _CODEPOINT.sub(lambda found: ascii(chr(int(found[1], 16))), " ".join(error.message.split()))
        raise ValueError(f"{address!r}: {why}; give one like {example}") from None
    if not parsed:
        raise ValueError(f"{address!r} is empty: give one like {example}")
    if number := _NUMBER_AS_NAME.match(parsed):
        raise ValueError(f"{parsed}: {number[1]} is an IP address; use /ip4/ instead of /dns/")
    return parsed


def _rewritten(address: str, example: str) -> str:
    """A hint for an address in another form: the multiaddr of a host:port, else an example."""
    found = re.fullmatch(r"(?:\w+://)?([\w.-]+|\[[\da-fA-F:]+\]):(\d{1,5})(/p2p/\w+)?/?", address)
    if not found:
        return f": give one like {example}"
    host, port, peer = found.groups()
    kind = "ip6" if host[0] == "[" else "ip4" if re.fullmatch(r"[\d.]+", host) else "dns"
    suffix = "" if example is _PLACE else peer or "/p2p/<its peer id>"
    return f": write /{kind}/{host.strip('[]')}/tcp/{port}{suffix}"


def bootstrap_source(source: str) -> str:
    """Check a source of addresses: the multiaddr of a peer, or `FILE_SIGN` and the path of a file."""
    if source.startswith(FILE_SIGN):
        return _file(source)
    try:
        return peer_address(source)
    except ValueError as error:
        if os.path.isfile(source):
            raise ValueError(
                f"{source!r} is a file: to have addresses read from it, write {FILE_SIGN}{source}"
            ) from None
        raise error


def _file(source: str) -> str:
    path = home_path(Path(source.removeprefix(FILE_SIGN)))
    if os.path.isdir(path):  # so is an empty name
        raise ValueError(f"{source!r} names no file: write {FILE_SIGN} and the path of a file that holds addresses")
    return f"{FILE_SIGN}{path}"


def peer_address(address: str) -> str:
    """Check the multiaddr of a peer, and return it in normal form. Raises ValueError with one line for the user."""
    address = _multiaddr(address, _EXAMPLE)
    if not re.search("/p2p/[^/]+$", address):
        why = "does not say which peer it is: it must end in /p2p/<its peer id>"
        raise ValueError(f"{address} {why}; copy the whole address from the peer's join line")
    if address.startswith("/p2p/"):
        raise ValueError(f"{address} does not say where the peer is: give its whole address, like {_EXAMPLE}")
    if _ANYWHERE.match(address) or "/tcp/0/" in address:
        raise ValueError(f"no peer can be reached at {address}: give the peer's own address and port")
    return address


def listen_address(address: str) -> str:
    address = _multiaddr(address, _PLACE)
    if "/p2p/" in address:
        raise ValueError(f"{address} names a peer: listen on the part before /p2p/")
    return address


def announced_address(address: str) -> str:
    address = _multiaddr(address, _PLACE)
    if "/p2p/" in address:
        raise ValueError(f"{address} names a peer: announce the part before /p2p/")
    if _ANYWHERE.match(address) or ANY_PORT.search(address):
        raise ValueError(f"others cannot reach {address}: announce a public address and a fixed port")
    if not re.search("/(tcp|udp)/", address):
        raise ValueError(f"{address} has no port: write {address.rstrip('/')}/tcp/<the port that others dial>")
    if not address.isascii():
        raise ValueError(f"{address}: other peers accept names in ASCII only: write the one that begins with xn--")
    if len(address) > MAX_ADDRESS_CHARACTERS:
        raise ValueError(f"{address[:60]}… is longer than {MAX_ADDRESS_CHARACTERS} characters: other peers refuse it")
    return address


def home_path(path: Path) -> Path:
    """The path, in which ~ is replaced by the home directory."""
    if "\0" in str(path):
        raise ValueError(f"{str(path)!r} is not a path")
    try:
        return path.expanduser()
    except RuntimeError:
        raise ValueError(f"{str(path)!r}: there is no such home directory: give the whole path") from None
