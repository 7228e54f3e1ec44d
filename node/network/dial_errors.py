"""Translates p2pd's errors for the user: why a peer cannot be dialled, and why p2pd does not listen."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence

from node.network.address_scope import Scope, scope
from protocols.base import Deadline

SILENT = ("context deadline exceeded", "i/o timeout", "connection timed out")
"""p2pd's error texts for a missing answer. The other peer may still have received the message."""

BACKOFF = "it failed a moment ago and is not tried again so soon: wait ten seconds"

NAMELESS = "its name has no address (DNS): is it spelt right, is its machine or container up, is this machine online?"

_WAITING, _OPENING, _SELF = "dial backoff", "noise: message is too short", "dial to self"

CROSSED = "both sides dialled at the same instant: wait ten seconds; if it stays so, what answers is not a libp2p peer"

_ELSEWHERE = "its private address is this peer's own, too: it is in another home"

_OWN = "this peer itself listens at that address: it is old or mistyped, ask for the present one"

_CLOSED = "it accepts connections and closes them: a starting peer, a proxy, or no peer? is the address right?"

# Text in p2pd's error -> cause and remedy. The first text that occurs in the error counts.
_MEANINGS = (
    ("connection refused", "nothing listens there (connection refused): is the peer running, is the port right?"),
    ("no route to host", "no route leads to it (no route to host): is it an address of another local network?"),
    ("network is unreachable", "no route leads to it (network is unreachable): is this machine online, has it IPv6?"),
    (_SELF, "that is this peer itself: give the address of another one"),
    ("NO_RESERVATION", "the relay no longer serves the peer: ask the peer for its present address"),
    ("invalid p2p multiaddr", "the relay is not named: it must read …/p2p/<the relay's id>/p2p-circuit/p2p/<peer id>"),
    ("no transport for protocol", "this kind of address is not supported: give one with /tcp/"),
    (_WAITING, BACKOFF),
    ("no addresses", "no connected peer knows its address: connect to its address first"),
    ("failed to find any peer", "no connected peer knows its address: connect to its address first"),
    ("not found", "no connected peer knows its address: connect to its address first"),
    ("no good addresses", "this machine can dial none of its addresses"),
    *((words, "no answer: a firewall, or the peer is down or hangs; try another address of it") for words in SILENT),
    (_OPENING, CROSSED),  # instead of an answer, the other side's opening message arrived
    *((words, _CLOSED) for words in ("security protocol: EOF", "connection reset by peer", "broken pipe")),
    (
        "failed to negotiate",
        "what answers is not a libp2p peer: another program, a proxy or a gateway; is that address still right?",
    ),
)
_MISMATCH = re.compile(r"remote key matches (\w+)")
_DIALLED = re.compile(r"^ *\* \[(?P<address>\S+)\] (?P<words>.*)$", re.MULTILINE)
_TAKEN = re.compile(r"listen (?P<kind>tcp|udp)[46]? (?P<address>\S+): bind: address already in use")


def meaning(words: str, where: str = "", stands_for: Sequence[str] | None = None) -> str:
    """User-facing line: why dialling `where` failed, by p2pd's `words` about all addresses of the peer, and what to do.

    `stands_for`: the addresses that the DNS name in `where` resolves to; None if it has no name, or is not resolved.
    """
    said = {found["address"]: found["words"] for found in _DIALLED.finditer(words)}
    if stands_for is not None:
        said = {address: why for address, why in said.items() if address in stands_for}
        words = "\n".join(said.values()) or words
        if not stands_for:
            return NAMELESS
    fresh = next((each for each in said.values() if _WAITING not in each), words)
    about = said.get(where, fresh)
    if where in said and _SELF in about:  # p2pd says so of the address, not of the peer
        return _ELSEWHERE if scope(where) == Scope.NETWORK else _OWN
    if other := _MISMATCH.search(about):
        return f"another peer answers, {other[1]}: the address is old or mistyped, ask for the present one"
    for sign, what in _MEANINGS:
        if sign in about:
            return what
    return about.splitlines()[0][:200] if about else "p2pd gave no reason"


def is_silent(words: str) -> bool:
    return any(sign in words for sign in SILENT)


def has_crossed(words: str, before: str | None) -> bool:
    """Whether a dial crossed the peer's own dial, or is held back because the last one (`before`, its meaning) did."""
    return _OPENING in words or (_WAITING in words and before == CROSSED)


def not_listening(words: str) -> str | None:
    taken = [f"{found['kind']} {found['address']}" for found in _TAKEN.finditer(words)]
    return in_use(taken) if taken else None


def in_use(taken: Sequence[str]) -> str:
    return f"{', '.join(taken)} is in use by another program: stop that, or listen on another port (0: a free one)"


def missing(listen: Sequence[str], found: Sequence[str]) -> tuple[str, ...]:
    """The requested listen addresses that p2pd does not serve."""

    def heads(addresses: Sequence[str]) -> list[list[str]]:
        return [address.split("/") for address in addresses]

    def serves(wanted: list[str], have: list[str]) -> bool:
        port_fits = wanted[4:5] in (["0"], have[4:5])
        host_fits = wanted[2] in {"0.0.0.0", "::", have[2]}
        return wanted[1] == have[1] and wanted[3] == have[3] and port_fits and host_fits

    seen = [have for have in heads(found) if len(have) > 4 and "p2p-circuit" not in have]
    return tuple(
        "/".join(wanted)
        for wanted in heads(listen)
        if len(wanted) > 4 and wanted[1] in {"ip4", "ip6"} and not any(serves(wanted, have) for have in seen)
    )


_KINDS = {"dns": ("ip4", "ip6"), "dns4": ("ip4",), "dns6": ("ip6",)}


async def stands_for(where: str, deadline: Deadline) -> tuple[str, ...] | None:
    """The name in a multiaddr resolved to multiaddrs with IP addresses; None if it has no name, or at the deadline."""
    _, kind, name, *rest = [*where.split("/", 3), "", ""]
    if kind not in _KINDS:
        return None
    try:
        async with asyncio.timeout_at(deadline):
            found = await asyncio.get_running_loop().getaddrinfo(name, None)
    except TimeoutError:
        return None
    except (OSError, UnicodeError):
        return ()
    numbers = dict.fromkeys(str(address[0]) for *_, address in found)
    made = ((("ip6" if ":" in number else "ip4"), number) for number in numbers)
    return tuple(f"/{each}/{number}/{rest[0]}" for each, number in made if each in _KINDS[kind])
