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
    Status,
    join_command,
    narrow,
    parse,
    printable,
    public,
    to_json,
    who_joins,
)
from node.ui.terminal import render
from tests.support.status_examples import PEER, STATUS


def data() -> dict[str, Any]:
    return json.loads(to_json(STATUS), parse_constant=pytest.fail)


def test_json_is_strict_and_round_trips() -> None:
    assert data()["loss"] is None and list(data()) == [each.name for each in dataclasses.fields(Status)]
    back = parse(data())
    assert math.isnan(back.loss) and back.eta_seconds is None
    assert replace(back, loss=0.0) == replace(STATUS, loss=0.0)
    assert parse(data() | {"tokens_per_second": 3, "later": [1]}).tokens_per_second == 3, "integers, unknown fields"


@pytest.mark.parametrize(
    "field, values",
    [
        ("round", ["5", True, None]),
        ("state", [3]),
        ("waiting_for", ["bob", [1]]),
        ("peers", [[{}], ["bob"]]),
        ("addresses", [["x"] * (MAX_LISTED + 1)]),
        ("tokens_per_second", ["fast", math.inf]),
        ("eta_seconds", [{}, 10**400]),
        ("tokens", [10**400]),
        ("rss_bytes", [-(10**400)]),
        ("loss", [1e300]),
    ],
)
def test_invalid_status_field_is_rejected_by_name(field: str, values: list[object]) -> None:
    for value in values:
        with pytest.raises(ValueError, match=rf"status\.{field}"):
            parse(data() | {field: value})


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
    whole = ("round", "tokens", "bytes_sent", "rss_bytes", "stage", "stages")
    fraction = ("loss", "loop_lag_p99_seconds", "eta_seconds")
    for each in (MAX_NUMBER, -MAX_NUMBER):
        most = parse(data() | dict.fromkeys((*whole, *fraction), each) | {"rounds": abs(each)})
        Console(file=io.StringIO(), width=80).print(render(most, (), 80))


def test_foreign_text_is_sanitised_and_truncated() -> None:
    assert printable("Zoë 春 мир") == "Zoë 春 мир"
    evil = parse(data() | {"reason": "\x1b[2J\x9b1m\r\n\u202ehello\u200b" + "x" * 10**5})
    assert evil.reason.isprintable() and "hello" in evil.reason and len(evil.reason) <= MAX_WORD


@given(st.text())
def test_printable_returns_one_printable_line(text: str) -> None:
    assert not set(printable(text)) & {"\n", "\r", "\x1b", "\x9b", "\x00", "\u2028", "\u202e"}
    assert printable(printable(text)) == printable(text)


@pytest.mark.parametrize(
    "where, hosts",
    [
        (Scope.ANYWHERE, ["/ip4/8.8.8.8", "/ip6/2a00:1450::1", "/dns/example.org", "/ip4/172.32.0.2"]),
        (Scope.NETWORK, ["/ip4/172.17.0.2", "/ip4/192.168.1.7", "/ip4/100.64.0.1", "/ip6/fd00::2", "/dns4/founder"]),
        (Scope.NETWORK, ["/ip4/10.0.0.1/tcp/1/p2p/Q/p2p-circuit"]),
        (Scope.MACHINE, ["/ip6/::1", "/ip4/127.0.0.1", "/ip4/127.8.8.8", "/dns4/localhost"]),
        (Scope.NOWHERE, ["/ip6/fe80::1%eth0", "/ip4/0.0.0.0", "/ip4/x", "/unix/x", "", "/dns4/"]),
    ],
)
def test_scope_of_an_address_is_classified(where: Scope, hosts: list[str]) -> None:
    assert {host: scope(f"{host}/tcp/1" if host else "") for host in hosts} == dict.fromkeys(hosts, where)


def test_limited_reachability_gives_a_hint() -> None:
    assert "--announce" in narrow(Scope.NETWORK, announced=False) and not narrow(Scope.NETWORK, announced=True)
    assert "--listen" in narrow(Scope.MACHINE, announced=True) and not narrow(Scope.ANYWHERE, announced=False)


@pytest.mark.parametrize(
    "hosts, widest, words",
    [
        (("127.0.0.1", "203.0.113.7"), "203.0.113.7", "Others join with:"),
        (("172.17.0.2", "8.8.8.8"), "8.8.8.8", "Others join with:"),
        (("172.17.0.2",), "172.17.0.2", "Others join, from the same network only, with:"),
        (("127.0.0.1",), "127.0.0.1", "this machine only"),
    ],
)
def test_join_command_uses_widest_address_and_states_reach(hosts: tuple[str, ...], widest: str, words: str) -> None:
    addresses = {host: f"/ip4/{host}/tcp/1/p2p/{PEER}" for host in hosts}
    command = join_command(replace(STATUS, addresses=tuple(addresses.values())))
    assert command and command[0] == f"python -m node join --bootstrap {addresses[widest]} --run-id {'cd' * 32}"
    assert words in who_joins(command[1])
    assert join_command(replace(STATUS, addresses=())) is None


def test_strangers_do_not_learn_of_a_pause() -> None:
    """Its cause and its end say when nobody is home."""
    shown = public(replace(STATUS, state="paused", reason="on battery since 14:02 until 18:00"))
    assert (shown.state, shown.reason) == ("waiting", "")


def test_join_command_names_own_task_and_own_loop() -> None:
    for task, end in (("mine.tasks:make", " --task mine.tasks:make"), ("loop", " --own-loop")):
        command = join_command(replace(STATUS, task=task))
        assert command and command[0].endswith(end)
    for hostile in ("gpt", "a:b; rm -rf ~", "a:b\n", "$(a):b"):
        command = join_command(replace(STATUS, task=hostile))
        assert command and "--task" not in command[0]
