"""What a peer shows of itself: strict JSON both ways, bounded, and safe to print."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from node.network.address_scope import Scope, scope
from node.reporting.status import (
    MAX_LISTED,
    MAX_NUMBER,
    MAX_WORD,
    PeerStatus,
    Status,
    join_command,
    narrow,
    parse,
    printable,
    short,
    to_json,
    who_joins,
)
from node.ui.terminal import render

PEER = "12D3KooWGRUfuFwTaVcXCnUbTbVLYYEkYgjDM3Bd7q4RuRyTQhaP"
STATUS = Status(
    state="waiting",
    reason="for the others",
    waiting_for=("bob",),
    round=5,
    rounds=16,
    lineage="ab",
    run="default",
    run_id="cd" * 32,
    peer=PEER,
    nickname="ada",
    peers=(PeerStatus("12D3KooWx", "bob", True, False, 4, "/ip4/192.0.2.1/tcp/1"),),
    addresses=("/ip4/127.0.0.1/tcp/4000/p2p/" + PEER, "/ip4/203.0.113.7/tcp/4000/p2p/" + PEER),
    tokens=10,
    tokens_per_second=3.5,
    loss=math.nan,
    held_out_loss=2.0,
    bytes_sent=1,
    bytes_received=2,
    rss_bytes=3,
    loop_lag_p99_seconds=0.004,
    eta_seconds=None,
    pid=7,
    incarnation=2,
)


def data() -> dict[str, Any]:
    return json.loads(to_json(STATUS), parse_constant=pytest.fail)  # type: ignore[no-any-return]


def test_json_is_strict_and_round_trips() -> None:
    assert data()["loss"] is None and list(data()) == [each.name for each in dataclasses.fields(Status)]
    back = parse(data())
    assert math.isnan(back.loss) and back.eta_seconds is None
    assert replace(back, loss=0.0) == replace(STATUS, loss=0.0)


def test_integers_pass_as_floats_and_unknown_fields_ignored() -> None:
    assert parse(data() | {"tokens_per_second": 3, "later": [1]}).tokens_per_second == 3


@pytest.mark.parametrize(
    "change",
    [
        {"round": "5"},
        {"round": True},
        {"round": None},
        {"state": 3},
        {"waiting_for": "bob"},
        {"waiting_for": [1]},
        {"peers": [{}]},
        {"peers": ["bob"]},
        {"addresses": ["x"] * (MAX_LISTED + 1)},
        {"tokens_per_second": "fast"},
        {"eta_seconds": {}},
        {"tokens": 10**400},
        {"rss_bytes": -(10**400)},
        {"eta_seconds": 10**400},
        {"loss": 1e300},
        {"tokens_per_second": math.inf},
    ],
)
def test_invalid_status_field_is_rejected_by_name(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=rf"status\.{next(iter(change))}"):
        parse(data() | change)


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)
    )
)
def test_parse_raises_only_value_error(junk: object) -> None:
    for each in (junk, data() | {"peers": junk}, data() | {"loss": junk}):
        with contextlib.suppress(ValueError):
            parse(each)


def test_largest_numbers_can_be_displayed() -> None:
    whole, fraction = ("round", "tokens", "bytes_sent", "rss_bytes"), ("loss", "loop_lag_p99_seconds", "eta_seconds")
    for each in (MAX_NUMBER, -MAX_NUMBER):
        most = parse(data() | dict.fromkeys((*whole, *fraction), each) | {"rounds": abs(each)})
        Console(file=io.StringIO(), width=80).print(render(most, (), 80))


def test_foreign_text_is_sanitised_and_truncated() -> None:
    evil = parse(data() | {"reason": "\x1b[2J\x9b1m\r\n\u202ehello\u200b" + "x" * 10**5})
    assert evil.reason.isprintable() and "hello" in evil.reason and len(evil.reason) <= MAX_WORD


@given(st.text())
def test_printable_returns_one_printable_line(text: str) -> None:
    assert not set(printable(text)) & {"\n", "\r", "\x1b", "\x9b", "\x00", "\u2028", "\u202e"}
    assert printable(printable(text)) == printable(text)


def test_non_latin_alphabets_are_kept() -> None:
    assert printable("Zoë 春 мир") == "Zoë 春 мир"


def test_short_peer_ids_keep_distinct_ends() -> None:
    assert short(PEER) == "…RyTQhaP"[0] + PEER[-6:]
    assert short("ada") == "ada"


def test_join_command_has_a_reachable_address() -> None:
    command = join_command(STATUS)
    assert command == (f"python -m node join --bootstrap {STATUS.addresses[1]} --run-id {'cd' * 32}", Scope.ANYWHERE)


@pytest.mark.parametrize("host", ["/ip4/127.0.0.1", "/ip4/127.8.8.8", "/ip6/::1", "/dns4/localhost"])
def test_loopback_address_is_limited_to_this_machine(host: str) -> None:
    command = join_command(replace(STATUS, addresses=(f"{host}/tcp/1/p2p/{PEER}",)))
    assert command and command[1] is Scope.MACHINE and "this machine only" in who_joins(command[1])


@pytest.mark.parametrize(
    "host, where",
    [
        ("/ip4/8.8.8.8", Scope.ANYWHERE),
        ("/ip6/2a00:1450::1", Scope.ANYWHERE),
        ("/dns/example.org", Scope.ANYWHERE),
        ("/ip4/172.17.0.2", Scope.NETWORK),
        ("/ip4/172.32.0.2", Scope.ANYWHERE),
        ("/ip4/192.168.1.7", Scope.NETWORK),
        ("/ip4/100.64.0.1", Scope.NETWORK),
        ("/ip6/fd00::2", Scope.NETWORK),
        ("/dns4/founder", Scope.NETWORK),
        ("/ip4/10.0.0.1/tcp/1/p2p/Q/p2p-circuit", Scope.NETWORK),
        ("/ip6/::1", Scope.MACHINE),
        ("/ip6/fe80::1%eth0", Scope.NOWHERE),
        ("/ip4/0.0.0.0", Scope.NOWHERE),
        ("/ip4/x", Scope.NOWHERE),
        ("/unix/x", Scope.NOWHERE),
        ("", Scope.NOWHERE),
        ("/dns4/", Scope.NOWHERE),
    ],
)
def test_scope_of_an_address_is_classified(host: str, where: Scope) -> None:
    assert scope(f"{host}/tcp/1" if host else "") == where


def test_limited_reachability_gives_a_hint() -> None:
    assert "--announce" in narrow(Scope.NETWORK, announced=False) and not narrow(Scope.NETWORK, announced=True)
    assert "--listen" in narrow(Scope.MACHINE, announced=True) and not narrow(Scope.ANYWHERE, announced=False)


def test_join_command_uses_widest_address_and_states_reach() -> None:
    private, public = f"/ip4/172.17.0.2/tcp/1/p2p/{PEER}", f"/ip4/8.8.8.8/tcp/1/p2p/{PEER}"
    command = join_command(replace(STATUS, addresses=(private, public)))
    assert command and public in command[0] and who_joins(command[1]) == "Others join with:"
    command = join_command(replace(STATUS, addresses=(private,)))
    assert command and who_joins(command[1]) == "Others join, from the same network only, with:"


def test_join_command_names_own_task() -> None:
    command = join_command(replace(STATUS, task="mine.tasks:make"))
    assert command and command[0].endswith(" --task mine.tasks:make")
    for hostile in ("gpt", "a:b; rm -rf ~", "a:b\n", "$(a):b"):
        command = join_command(replace(STATUS, task=hostile))
        assert command and "--task" not in command[0]


def test_missing_address_gives_no_join_command() -> None:
    assert join_command(replace(STATUS, addresses=())) is None
