"""Selects the addresses to share with other peers, and translates p2pd's dial errors for the user. No I/O."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from node.membership.hello import MAX_ADDRESS_CHARACTERS, MAX_ADDRESSES
from node.network.address_scope import Scope, scope

SILENT = ("context deadline exceeded", "i/o timeout", "connection timed out")
"""p2pd's error texts for a missing answer. The other peer may still have received the message."""

BACKOFF = "it failed a moment ago and is not tried again so soon: wait ten seconds"

NAMELESS = "its name has no address (DNS): is it spelt right, is its machine or container up, is this machine online?"

_WAITING, _OPENING = "dial backoff", "noise: message is too short"

CROSSED = "both sides dialled at the same instant: wait ten seconds; if it stays so, no libp2p peer answers there"

_CLOSED = "what is there takes connections and closes them: a peer that starts, a proxy, or no peer? is it its address?"

# Text in p2pd's error -> cause and remedy. The first text that occurs in the error counts.
_MEANINGS = (
    ("connection refused", "nothing listens there (connection refused): is the peer running, is the port right?"),
    ("no route to host", "no way leads there (no route to host): is it an address of another local network?"),
    ("network is unreachable", "no way leads there (network is unreachable): is this machine online, has it IPv6?"),
    ("dial to self", "that is this peer itself: give the address of another one"),
    ("NO_RESERVATION", "the relay does not carry for this peer (any more): ask the peer for its present address"),
    ("invalid p2p multiaddr", "the relay is not named: it must read …/p2p/<the relay's id>/p2p-circuit/p2p/<peer id>"),
    ("no transport for protocol", "this kind of address is not spoken here: give one with /tcp/"),
    (_WAITING, BACKOFF),
    ("no addresses", "no connected peer knows its address: connect to its address first"),
    ("failed to find any peer", "no connected peer knows its address: connect to its address first"),
    ("not found", "no connected peer knows its address: connect to its address first"),
    ("no good addresses", "none of its addresses can be dialled from here"),
    *((words, "no answer: a firewall, or the peer is down or hangs; try another address of it") for words in SILENT),
    (_OPENING, CROSSED),  # instead of an answer, the other side's opening message arrived
    *((words, _CLOSED) for words in ("security protocol: EOF", "connection reset by peer", "broken pipe")),
    (
        "failed to negotiate",
        "what answers there is no libp2p peer: another program, a proxy or a gateway; is that address still right?",
    ),
)
_MISMATCH = re.compile(r"remote key matches (\w+)")
_DIALLED = re.compile(r"^ *\* \[(?P<address>\S+)\] (?P<words>.*)$", re.MULTILINE)
_TAKEN = re.compile(r"listen (?P<kind>tcp|udp)[46]? (?P<address>\S+): bind: address already in use")


def sound(said: Iterable[object]) -> tuple[str, ...]:
    """Filter a list from another peer: at most `MAX_ADDRESSES` short, printable ASCII addresses.

    Peers reject a greeting that contains anything else, and with it the sender that only passed an address on.
    """
    texts = (each for each in said if isinstance(each, str) and len(each) <= MAX_ADDRESS_CHARACTERS)
    return tuple(dict.fromkeys(each for each in texts if each.isascii() and each.isprintable()))[:MAX_ADDRESSES]


def shareable(addresses: Sequence[str]) -> tuple[str, ...]:
    """The addresses that may work from another machine, the most widely valid first: public, relayed, private.

    Loopback, unspecified, link-local and multicast addresses are left out.
    """
    ranked = [(scope(address), "/p2p-circuit" in address, address) for address in addresses]
    useful = sorted((each for each in ranked if each[0] <= Scope.NETWORK), key=lambda each: each[:2])
    return tuple(dict.fromkeys(address for *_, address in useful))


def meaning(words: str, where: str = "", stands_for: Sequence[str] | None = None) -> str:
    """User-facing message of one line: why dialling `where` failed, and what to do.

    p2pd's `words` cover all addresses of the peer. `stands_for`: the addresses that the DNS name in `where` resolves
    to; None if it has no name, or that is not known.
    """
    said = {found["address"]: found["words"] for found in _DIALLED.finditer(words)}
    if stands_for is not None:
        said = {address: why for address, why in said.items() if address in stands_for}
        words = "\n".join(said.values()) or words
        if not stands_for:
            return NAMELESS
    fresh = next((each for each in said.values() if _WAITING not in each), words)
    about = said.get(where, fresh)
    if other := _MISMATCH.search(about):
        return f"another peer is there, {other[1]}: the address is old or mistyped, ask for the present one"
    for sign, what in _MEANINGS:
        if sign in about:
            return what
    return about.splitlines()[0][:200] if about else "p2pd gave no reason"


def is_silent(words: str) -> bool:
    """Whether p2pd's error reports a missing answer rather than a refusal."""
    return any(sign in words for sign in SILENT)


def has_crossed(words: str, before: str | None) -> bool:
    """Whether a dial to a peer crossed the peer's own dial, or is held back because an earlier one did.

    p2pd's `words` cover all addresses of the peer; `before` is the `meaning` of the dial before.
    """
    return _OPENING in words or (_WAITING in words and before == CROSSED)


def not_listening(words: str) -> str | None:
    """User-facing message of one line if p2pd did not start because a port is taken; else None."""
    taken = [f"{found['kind']} {found['address']}" for found in _TAKEN.finditer(words)]
    if not taken:
        return None
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
