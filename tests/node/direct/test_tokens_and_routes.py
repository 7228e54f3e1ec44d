"""Tokens are good once and for a while; routes remember why a peer is not reached directly, and for how long."""

from __future__ import annotations

import pytest

from node.direct.handshake import MAX_HOSTS, MAX_TOKENS, MAX_TOKENS_PER_PEER, TOKEN_SECONDS, TokenIssuer
from node.direct.messages import ConnectionToken, TokenGrant
from node.direct.records import AES
from node.direct.routes import FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS, Attempts, NotDirect, Route, host_of, hosts_of


@pytest.fixture
def time() -> list[float]:
    return [0.0]


@pytest.fixture
def issuer(time: list[float]) -> TokenIssuer:
    return TokenIssuer(lambda: time[0])


def issued(issuer: TokenIssuer, peer: str, count: int) -> list[ConnectionToken]:
    return [issuer.issue(peer, "192.0.2.1", AES).token for _ in range(count)]


class TestTokens:
    def test_token_is_redeemed_once(self, issuer: TokenIssuer) -> None:
        first, second = issued(issuer, "peer", 2)
        assert first.secret != second.secret and first.id not in first.secret
        found = issuer.redeem(first.id)
        assert found is not None and (found.peer, found.token) == ("peer", first)
        assert issuer.redeem(first.id) is None and issuer.redeem(bytes(16)) is None
        assert issuer.redeem(second.id) is not None

    def test_token_and_its_host_expire(self, issuer: TokenIssuer, time: list[float]) -> None:
        early, late = issued(issuer, "peer", 2)
        time[0] = TOKEN_SECONDS - 1
        assert issuer.redeem(early.id) and issuer.expects("192.0.2.1") and not issuer.expects("192.0.2.2")
        time[0] = TOKEN_SECONDS
        assert issuer.redeem(late.id) is None and not issuer.expects("192.0.2.1")

    def test_greedy_or_forgotten_peer_loses_its_own_tokens(self, issuer: TokenIssuer) -> None:
        (modest,), (forgotten,) = (issued(issuer, peer, 1) for peer in ("modest", "forgotten"))
        issuer.void("forgotten")
        greedy = issued(issuer, "greedy", MAX_TOKENS_PER_PEER + 5)
        assert [bool(issuer.redeem(each.id)) for each in greedy] == [False] * 5 + [True] * MAX_TOKENS_PER_PEER
        assert issuer.redeem(modest.id) and not issuer.redeem(forgotten.id)

    def test_many_peers_void_the_oldest_tokens(self, issuer: TokenIssuer) -> None:
        first = issuer.issue("first", "first host", AES).token
        for index in range(MAX_TOKENS):
            issuer.issue(f"peer {index}", f"host {index % (MAX_HOSTS - 1)}", AES)
        assert len(issuer) == MAX_TOKENS and issuer.redeem(first.id) is None and issuer.expects("first host")
        issuer.issue("peer", "one more host", AES)
        assert not issuer.expects("first host") and len(issuer._hosts) == MAX_HOSTS


class TestAttempts:
    def test_pauses_double_up_to_an_hour(self) -> None:
        attempts, now, pauses = Attempts(), 5.0, []
        for _ in range(8):
            assert attempts.may_try(now)
            attempts.failed(now, "refused")
            pauses.append(attempts.not_before - now)
            now = attempts.not_before
        assert pauses == [min(FIRST_PAUSE_SECONDS * 2**n, LONGEST_PAUSE_SECONDS) for n in range(8)]
        attempts.succeeded()
        assert attempts.failed(now, "") and attempts.not_before == now + FIRST_PAUSE_SECONDS

    def test_failures_at_the_same_time_are_one(self) -> None:
        attempts = Attempts()
        for index in range(16):
            attempts.failed(index / 10, f"failure {index}")
        assert attempts.not_before == FIRST_PAUSE_SECONDS
        with pytest.raises(NotDirect, match="failure 15"):
            attempts.require(FIRST_PAUSE_SECONDS - 1)
        attempts.require(FIRST_PAUSE_SECONDS)


class TestRoutes:
    def grant(self, port: int = 4001, cipher: str = AES, seconds: float = 10.0) -> TokenGrant:
        return TokenGrant(port, cipher, seconds, tuple(ConnectionToken(bytes([n]) * 32) for n in range(2)))

    def test_tokens_are_used_once_each_until_they_expire(self) -> None:
        route = Route()
        with pytest.raises(NotDirect):
            route.take_token(0.0)
        route.granted(self.grant(), "192.0.2.1", 0.0)
        assert route.take_token(9.0) == (("192.0.2.1", 4001), ConnectionToken(bytes(32)))
        assert route.tokens_left(9.0) == 1 and route.tokens_left(10.0) == 0
        with pytest.raises(NotDirect):
            route.take_token(10.0)

    @pytest.mark.parametrize("port", [0, 22, 1023])
    def test_ports_of_system_services_are_never_dialled(self, port: int) -> None:
        route = Route()
        route.granted(self.grant(port), "192.0.2.1", 0.0)
        with pytest.raises(NotDirect):
            route.take_token(0.0)

    def test_unknown_cipher_is_refused_for_a_while(self) -> None:
        route = Route()
        with pytest.raises(NotDirect):
            route.granted(self.grant(cipher="rot13"), "192.0.2.1", 0.0)
        assert not route.cipher and not route.asking.may_try(1.0) and route.tokens_left(0.0) == 0

    def test_host_is_an_address_and_never_a_relays(self) -> None:
        assert host_of("/ip4/192.0.2.1/tcp/4001") == "192.0.2.1"
        assert host_of("/ip6/2001:db8::1/udp/4001/quic") == "2001:db8::1"
        relayed = ("/ip4/192.0.2.1/tcp/4001/p2p/12D3KooWRelay/p2p-circuit", "/p2p/12D3KooWRelay/p2p-circuit")
        for address in (*relayed, "/dns4/localhost/tcp/4001", "/unix/tmp/socket", "/ip4", ""):
            assert host_of(address) is None, address

    def test_hosts_to_listen_on_are_named_once(self) -> None:
        listen = ("/ip4/0.0.0.0/tcp/1", "/ip4/0.0.0.0/udp/1/quic", "/ip6/::/tcp/1", "/dns4/example.org/tcp/1")
        assert hosts_of(listen) == ("0.0.0.0", "::")
