"""Addresses as text: which are shared, what p2pd's errors about them mean, what a name or an open port stands for."""

from __future__ import annotations

import asyncio
from pathlib import Path

from node.network.address_scope import in_network, shareable
from node.network.daemon import PlacesAtRelays, arguments, known_relays, with_ports
from node.network.dial_errors import NAMELESS, is_silent, meaning, missing, stands_for
from node.runtime.identity import peer_id_of


def test_shareable_addresses_exclude_local_and_sort_public_first() -> None:
    worthless = (
        "/dns4/localhost/tcp/1",
        "/ip4/127.0.0.1/tcp/1",
        "/ip6/::1/tcp/1",
        "/ip4/0.0.0.0/tcp/1",
        "/ip6/fe80::1/tcp/1",
        "/unix/x",
    )
    relayed = "/ip4/8.8.4.4/tcp/1/p2p/12D3KooWGcbDLU2ShHsJN7tGS1iA98ub6vsTY6kS5GNzs8UFaKTh/p2p-circuit"
    found = (
        *worthless,
        "/ip4/10.0.0.7/tcp/1",
        "/ip6/fd00::2/tcp/1",
        relayed,
        "/ip4/8.8.8.8/tcp/1",
        "junk",
        "/ip4/x/y",
    )
    expected = ("/ip4/8.8.8.8/tcp/1", relayed, "/ip4/10.0.0.7/tcp/1", "/ip6/fd00::2/tcp/1")
    assert shareable(found) == expected
    assert shareable(("/dns4/example.org/tcp/1", *found))[0] == "/dns4/example.org/tcp/1"
    assert shareable(worthless) == ()


def test_private_listen_addresses_stand_beside_announced_ones() -> None:
    listen = ("/ip4/0.0.0.0/tcp/4001", "/ip6/::/tcp/4001", "/ip4/10.0.0.7/tcp/1", "/ip4/192.168.1.5/tcp/0", "/unix/x")
    hosts = ("127.0.0.1", "192.168.1.5", "8.8.8.8", "fe80::1", "fd00::2", "::1")
    found = ("/ip4/192.168.1.5/tcp/4001", "/ip6/fd00::2/tcp/4001", "/ip4/10.0.0.7/tcp/1")
    assert in_network(listen, hosts) == found


def test_p2pd_errors_are_translated() -> None:
    words = "all dials failed\n  * [/ip4/1.1.1.1/tcp/1] dial backoff\n  * [/ip4/2.2.2.2/tcp/1] connection refused"
    assert "failed a moment ago" in meaning(words, "/ip4/1.1.1.1/tcp/1")
    assert "nothing listens there" in meaning(words, "/ip4/2.2.2.2/tcp/1")
    assert "nothing listens there" in meaning(words)
    mute = "failed to negotiate security protocol: context deadline exceeded"
    for silent in ("dial tcp4 1.2.3.4:1: i/o timeout", "failed to dial: context deadline exceeded", mute):
        assert is_silent(silent) and "no answer" in meaning(silent)
    assert not is_silent(words)
    assert "not a libp2p peer" in meaning("failed to negotiate security protocol: message has no trailing newline")
    itself = "all dials failed\n  * [{0}] dial to self attempted".format
    elsewhere = "/ip4/192.168.1.5/tcp/4001"  # another peer's, in a home that numbers its machines as this one does
    assert "it is in another home" in meaning(itself(elsewhere), elsewhere)
    assert "this peer itself listens" in meaning(itself("/ip4/8.8.8.8/tcp/1"), "/ip4/8.8.8.8/tcp/1")
    assert "that is this peer itself" in meaning("dial to self attempted", elsewhere)
    closed = "failed to negotiate security protocol: EOF"
    assert "accepts connections and closes them" in meaning(closed)
    assert meaning("something\nnew") == "something" and meaning("") == "p2pd gave no reason"


def test_dial_errors_of_name_come_from_its_addresses() -> None:
    old = "all dials failed\n  * [/ip4/3.3.3.3/tcp/1] no route to host"
    refused, waits = "\n  * [/ip4/2.2.2.2/tcp/1] connection refused", "\n  * [/ip6/::2/tcp/1] dial backoff"
    name, places = "/dns/x/tcp/1", ("/ip4/2.2.2.2/tcp/1", "/ip6/::2/tcp/1")
    assert meaning(old, name, ()) == meaning("failed to dial: no good addresses", name, ()) == NAMELESS
    assert "nothing listens there" in meaning(f"{old}{waits}{refused}", name, places)
    assert "failed a moment ago" in meaning(f"{old}{waits}", name, places)
    assert "none of its addresses" in meaning("failed to dial: no good addresses", name, places)


def test_dns_name_resolves_to_addresses_of_its_kind() -> None:
    async def found(where: str, seconds: float = 5.0) -> tuple[str, ...] | None:
        return await stands_for(where, asyncio.get_running_loop().time() + seconds)

    assert asyncio.run(found("/dns4/localhost/tcp/1")) == ("/ip4/127.0.0.1/tcp/1",)
    assert "/ip4/127.0.0.1/tcp/1/ws" in (asyncio.run(found("/dns/localhost/tcp/1/ws")) or ())
    assert asyncio.run(found("/dns4/no-peer.invalid/tcp/1")) == asyncio.run(found("/dns4/a..b/tcp/1")) == ()
    for unknown in ("/ip4/127.0.0.1/tcp/1", "/dnsaddr/x", "", "/"):
        assert asyncio.run(found(unknown)) is None
    assert asyncio.run(found("/dns4/localhost/tcp/1", -1.0)) is None


def test_missing_lists_listen_addresses_not_obtained() -> None:
    found = ("/ip4/127.0.0.1/tcp/4001", "/ip4/10.0.0.7/tcp/4001")
    assert missing(("/ip4/0.0.0.0/tcp/0", "/ip4/0.0.0.0/tcp/4001", "/dns4/x/tcp/1"), found) == ()
    absent = ("/ip6/::/tcp/0", "/ip4/0.0.0.0/tcp/4002", "/ip4/10.9.9.9/tcp/0", "/ip4/0.0.0.0/udp/0/quic-v1")
    assert missing(absent, found) == absent


def test_known_relays_are_public_and_readable_by_p2pd() -> None:
    peers = [peer_id_of(bytes([number]) * 32) for number in range(5)]
    me, a, b, c, behind = peers
    good = [f"/ip4/8.8.8.8/tcp/4001/p2p/{a}", f"/ip6/2001:db9::1/tcp/1/p2p/{a}", f"/dns4/example.org/tcp/1/p2p/{b}"]
    bad = [
        *(f"/ip4/8.8.8.8/tcp/1/p2p/{each}" for each in (me, a[:-1], f"{a}x", f"Qm{a[8:]}")),
        *(f"/ip4/{each}/p2p/{c}" for each in ("10.0.0.1/tcp/1", "8.8.8/tcp/1", "2001:db9::1/tcp/1", "8.8.8.8/tcp/0")),
        *(
            f"/{each}/tcp/1/p2p/{c}"
            for each in (
                *("dns4/127.0.0.1", "dns4/169.254.169.254", "dns/10.0.0.1", "dns6/::1", "dns6/::ffff:127.0.0.1"),
                *("dns/router.lan", "dns/Printer.LOCAL.", "dns4/metadata.google.internal", "dns/nas.home.arpa"),
                *("dns/x.localhost", "dns/127.1", "dns/0x7f000001", "dns/1.0x1", "dns/router", "ip6/::ffff:10.0.0.1"),
                *("ip4/255.255.255.255", "ip4/240.0.0.1", "ip4/0.0.0.0"),
            )
        ),
        *(f"/ip4/8.8.8.8/{each}/p2p/{c}" for each in ("tcp/65536", "udp/1/quic-v1", "tcp/1/ws", "tcp/٣", "tcp/1,x")),
        f"/ip4/8.8.8.8/tcp/2/p2p/{a}",  # a third one of this peer
        f"/ip4/8.8.4.4/tcp/1/p2p/{behind}",
        "",
        "junk",
    ]
    circuit = f"/ip4/1.1.1.1/tcp/1/p2p/{c}/p2p-circuit/p2p/{behind}"
    assert known_relays([*good, *bad, circuit], me) == (*good, circuit.partition("/p2p-circuit")[0])
    assert known_relays((f"/ip4/8.8.8.{n}/tcp/1/p2p/{peer_id_of(bytes([n]) * 32)}" for n in range(99)), me)[7:] == (
        f"/ip4/8.8.8.8/tcp/1/p2p/{peer_id_of(bytes([8]) * 32)}",
    )
    words = " ".join(arguments(Path("/c"), Path("/i"), [], nat=True, relays=good))
    assert f"-relayDiscovery=0 -trustedRelays={','.join(good)}" in words
    assert not any("trusted" in each for each in arguments(Path("/c"), Path("/i"), [], nat=True))


def test_places_at_relays_are_lost_only_by_a_peer_that_had_one() -> None:
    relay, circuit = peer_id_of(bytes(32)), f"/ip4/8.8.8.8/tcp/1/p2p/{peer_id_of(bytes(32))}/p2p-circuit"
    places = PlacesAtRelays([f"/ip4/8.8.8.8/tcp/1/p2p/{relay}"])
    found = []
    for addresses in ([], [circuit], ["/ip4/10.0.0.1/tcp/1"], [circuit]):
        places.look(addresses)
        found.append(places.are_lost)
    assert found == [False, False, True, False] and places.relays == {relay}


def test_open_ports_are_filled_in_from_found_addresses() -> None:
    found = ("/ip4/203.0.113.5/tcp/1", "/ip4/127.0.0.1/tcp/4001", "/ip4/10.0.0.7/tcp/4001", "/ip6/::1/tcp/4002")
    cases = {
        "/ip4/0.0.0.0/tcp/0": "/ip4/0.0.0.0/tcp/4001",
        "/ip4/10.0.0.7/tcp/0": "/ip4/10.0.0.7/tcp/4001",
        "/ip4/0.0.0.0/tcp/7": "/ip4/0.0.0.0/tcp/7",
        "/ip6/::/tcp/0": "/ip6/::/tcp/4002",
        "/ip4/10.9.9.9/tcp/0": "/ip4/10.9.9.9/tcp/0",
        "/ip4/0.0.0.0/udp/0/quic-v1": "/ip4/0.0.0.0/udp/0/quic-v1",
        "/dns4/example.org/tcp/0": "/dns4/example.org/tcp/0",
    }
    assert with_ports(tuple(cases), found) == tuple(cases.values())
