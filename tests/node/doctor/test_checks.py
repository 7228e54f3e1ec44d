"""Each line of the doctor comes from its own fault only: facts of a peer with which all is well, with one change."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from datetime import datetime
from operator import contains
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from node.doctor.findings import CheckStep, Finding, Level, conclusion, examine, exit_code, parse_finding
from node.doctor.machine import (
    AtBoot,
    Hardware,
    Holder,
    PauseFacts,
    Programs,
    Storage,
    SystemClock,
    check_at_boot,
    check_clock,
    check_hardware,
    check_identity,
    check_pauses,
    check_programs,
    check_storage,
)
from node.doctor.network import (
    DialBackReport,
    Helper,
    Listening,
    Outside,
    Reached,
    check_listening,
    check_others_clocks,
    check_outside,
    check_reach,
    check_upload,
    check_versions,
    choose_helpers,
    ports_to_forward,
    ports_to_probe,
)
from node.doctor.run import SavedRun, check_run
from node.machine.rules import MachineReadings, MachineRules
from node.membership.hello import MAX_PROBED_PORTS, PortResult, ProbedPort
from tests.support.simulated import on_virtual_time
from tests.support.waiting import now

PORTS = ProbedPort(4001, PortResult.LIBP2P, 0.03), ProbedPort(4002, PortResult.OPEN, 0.03)
CLOSED = ProbedPort(4001, PortResult.SILENT, 5.0), ProbedPort(4002, PortResult.SILENT, 5.0)
CALM = MachineReadings(datetime(2026, 11, 23, 12), False, 8e9, 16e9, 0.0, 50.0, 90.0, 900.0, 0.0, False)
REPORT = DialBackReport("anna", "84.23.1.9", ports=PORTS)
ANNA = Helper("anna", 0.031, host="203.0.114.7", version="0.2.0")
BERT = Helper("bert", 0.052, host="198.51.101.7", version="0.2.0")
GPU = ("H100", 80e9)
WELL: dict[str, Any] = {
    "programs": Programs("0.2.0", "3.11.7", "2.13.0", "1.1.12", 0.4),
    "storage": Storage("/state", True, "", 41e9, 20e9, 1.2e9, 0.4e9, 3.1e9, 0.004),
    "identity": Holder("12D3KooWkq3Zxy", is_running=True),
    "hardware": Hardware("auto", "2.13.0", (GPU,), has_nvidia_driver=True, cores=8, page_port=7717),
    "clock": SystemClock(True, True),
    "pauses": PauseFacts(CALM),
    "reboot": AtBoot(True, True),
    "listen": Listening((4001,), 4002),
    "reach": Reached((("lo", "127.0.0.1"), ("eth0", "192.168.1.5")), "84.23.1.9", (ANNA, BERT)),
    "outside": Outside((REPORT,), (4001,), 4002, own_hosts=("127.0.0.1", "192.168.1.5")),
    "upload": (12.5e6, 11.2e6),
    "others' clocks": (0.2, 0.2),
    "versions": ("0.2.0", ("0.2.0+gabc", "0.2.0", "")),
    "run": SavedRun("attic", "7cac02" * 10, decided=61, checkpoint=60),
}
CHECKS: dict[str, Any] = {
    "programs": check_programs,
    "storage": check_storage,
    "identity": check_identity,
    "hardware": check_hardware,
    "clock": check_clock,
    "pauses": check_pauses,
    "reboot": check_at_boot,
    "listen": check_listening,
    "reach": check_reach,
    "outside": check_outside,
    "upload": lambda facts: check_upload(*facts),
    "others' clocks": check_others_clocks,
    "versions": lambda facts: check_versions(*facts),
    "run": check_run,
}


def examined(**changed: Any) -> list[Finding]:
    return [line for name, check in CHECKS.items() for line in check(changed.get(name, WELL[name]))]


def _with(name: str, **changes: Any) -> dict[str, Any]:
    return {name: replace(WELL[name], **changes)}


def reports(*ports: ProbedPort, host: str = "84.23.1.9", **changes: Any) -> dict[str, Any]:
    return _with("outside", reports=(DialBackReport("anna", host, ports=ports),), **changes)


def readings(**changes: Any) -> dict[str, Any]:
    return _with("pauses", readings=replace(CALM, **changes))


NOWHERE = Helper("anna", why="no answer: a firewall?")
ODD = Helper("carl", why="it is another: ask for the present one")
FAR, SILENT = Helper("anna", why="connection refused"), Helper("anna", why="no answer")
WARN, FAIL, UNKNOWN = Level.WARN, Level.FAIL, Level.UNKNOWN
FAULTS: dict[str, tuple[dict[str, Any], Level, str, str]] = {
    "no torch": (_with("programs", torch=""), FAIL, "torch is not installed", "install"),
    "no hivemind": (_with("programs", hivemind=""), FAIL, "hivemind is not installed", "install"),
    "another hivemind": (_with("programs", hivemind="1.2.0"), WARN, "hivemind 1.2.0 is", "hivemind==1.1.12"),
    "no p2pd": (_with("programs", p2pd_problem="it was killed"), FAIL, "p2pd does not start", "it was killed"),
    "read-only": (_with("storage", problem="nothing can be written in /state"), FAIL, "nothing can be", "--state-dir"),
    "full disk": (_with("storage", free_bytes=3e8), WARN, "is nearly full: 300 MB", "clean removes past runs (3.1 GB)"),
    "slow disk": (_with("storage", fsync_seconds=1.2), WARN, "fsync takes 1.2 s", "on a local disk"),
    "open key": (_with("identity", problem="is open to others: chmod"), FAIL, "identity cannot be used", "chmod"),
    "held": (_with("identity", is_running=False, is_held=True), FAIL, "another process uses", "end that process"),
    "driver": (_with("hardware", problem="driver too old"), FAIL, "cannot be used: driver too old", "--device cpu"),
    "no GPU": (_with("hardware", wanted="cuda", gpus=()), FAIL, "cuda is wanted, and", "--device cpu"),
    "too few GPUs": (_with("hardware", wanted="cuda:0,cuda:1"), FAIL, "cuda:0,cuda:1 is wanted", "--device cpu"),
    "no mps": (_with("hardware", wanted="mps"), FAIL, "mps is wanted", "--device cpu"),
    "CPU in use": (_with("hardware", in_use="cpu"), WARN, "an NVIDIA driver is installed", "for CUDA"),
    "few files": (_with("hardware", open_files=256), WARN, "only 256 files", "ulimit -n"),
    "page port": (_with("hardware", is_page_port_taken=True), WARN, "port 7717 is taken", "--page-port"),
    "clock": (_with("clock", is_set_by_network=False), WARN, "not set by the network", "timedatectl set-ntp true"),
    "battery": (readings(on_battery=True), WARN, "pause now: on battery", "--on-battery ignore"),
    "memory": (readings(memory_available_bytes=1e8), WARN, "pause now: this machine is short of memory", "end other"),
    "heat": (readings(temperature_celsius=95.0), WARN, "pause now: this machine is hot", "--on-heat ignore"),
    "metered": (readings(is_metered=True), WARN, "pause now: the network is metered", "--on-metered ignore"),
    "blind": (
        _with("pauses", readings=replace(CALM, input_idle_seconds=math.nan), rules=MachineRules(in_use=True)),
        WARN,
        "mouse and keyboard cannot be seen",
        "--when-busy pause",
    ),
    "reboot": (_with("reboot", is_installed=False), WARN, "does not start after a reboot", "service install"),
    "not started": (_with("reboot", to_start="systemctl --user enable"), WARN, "was never started", "systemctl --user"),
    "port in use": (
        _with("listen", problem="tcp 0.0.0.0:4001 is in use by another program: stop that"),
        FAIL,
        "in use by another program",
        "stop that",
    ),
    "no data port": (_with("listen", data=0), WARN, "there is no data port", "--direct-port"),
    "loopback only": (_with("listen", only_here=True), WARN, "this machine's own loopback", "--listen /ip4/0.0.0.0"),
    "offline": (
        _with("reach", hosts=(("lo", "127.0.0.1"),), helpers=()),
        FAIL,
        "no address in any network",
        "connect it",
    ),
    "given is down": (
        _with("reach", helpers=(FAR,), given=FAR),
        FAIL,
        "anna cannot be reached: connection refused",
        "its present address?",
    ),
    "given to a running peer is down": (
        _with("reach", helpers=(NOWHERE,), given=NOWHERE, proxies=("HTTP_PROXY",), is_well=True),
        WARN,
        "anna cannot be reached: no answer",
        "a firewall?",
    ),
    "only given is down": (
        _with("reach", helpers=(ODD, BERT), given=ODD),
        WARN,
        "carl cannot be reached: it is another",
        "ask for the present one",
    ),
    "met is down": (_with("reach", helpers=(FAR,)), WARN, "the only known peer cannot", "doctor ADDRESS"),
    "all are down": (_with("reach", helpers=(FAR, FAR)), WARN, "none of 2 known peers can be", "doctor ADDRESS"),
    "proxy": (
        _with("reach", helpers=(SILENT,), proxies=("HTTP_PROXY",)),
        FAIL,
        "HTTP_PROXY is set, and no outbound TCP works",
        "HTTP proxies are not used",
    ),
    "closed": (
        reports(*CLOSED, forward=(4001, 4003)),
        WARN,
        "closed from outside: anna could not dial 84.23.1.9:4001 (no answer in 5 s)",
        "forward tcp 4001 and 4003 to 192.168.1.5 at the router, then: --listen /ip4/0.0.0.0/tcp/4001 "
        "--announce /ip4/84.23.1.9/tcp/4001 --direct-port 4003",
    ),
    "closed and alone": (reports(*CLOSED, is_alone=True), FAIL, "closed from outside: anna", "forward tcp 4001"),
    "closed by the provider": (
        reports(*CLOSED, own_hosts=("100.64.3.1",)),
        WARN,
        "closed from outside: anna",
        "your provider shares that address",
    ),
    "refused": (
        reports(ProbedPort(4001, PortResult.REFUSED, 0.1), host="192.168.1.5"),
        WARN,
        "closed in this network: anna could not dial 192.168.1.5:4001 (connection refused)",
        "firewall",
    ),
    "another program": (
        reports(ProbedPort(4001, PortResult.OPEN, 0.1)),
        WARN,
        "another program answers at 84.23.1.9:4001",
        "forward tcp 4001",
    ),
    "data closed": (
        reports(PORTS[0], CLOSED[1]),
        WARN,
        "the data port is closed: anna could not dial 84.23.1.9:4002",
        "forward tcp 4002 to 192.168.1.5 at the router, then: --direct-port 4002",
    ),
    "no helper": (_with("outside", reports=()), UNKNOWN, "no other peer can be asked", "doctor ADDRESS"),
    "no dial-back": (
        _with("outside", reports=(DialBackReport("anna", why="it was asked less than a minute ago"),)),
        UNKNOWN,
        "(anna: it was asked less than a minute ago)",
        "ask again in a minute",
    ),
    "slow line": ({"upload": (12.5e6, 3.91e6)}, WARN, "sends 3.91 MB/s while data waits, 12.5 MB/s", "--bandwidth 3.9"),
    "wrong clock": ({"others' clocks": (60.0, 61.0)}, WARN, "clock is 60 s behind", "timedatectl set-ntp true"),
    "old version": (
        {"versions": ("0.2.0", ("0.3.0", "0.10.0", "0.2.0"))},
        WARN,
        "2 of 3 peers run 0.3.0 or later",
        "git pull",
    ),
    "bad manifest": (
        _with("run", problem="the manifest is not signed: ask another"),
        FAIL,
        "not signed",
        "ask another",
    ),
    "bad checkpoint": (
        _with("run", damaged=("the checkpoint x is damaged",)),
        WARN,
        "the one before round 61",
        "check the disk",
    ),
    "no checkpoint": (
        _with("run", damaged=("the checkpoint x is damaged",), checkpoint=None),
        FAIL,
        "damaged, and there is no other",
        "join --bootstrap ADDRESS",
    ),
    "cut certificates": (_with("run", certificates_are_cut=True), WARN, "damaged after round 61", "check the disk"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_has_its_own_line_and_no_other(fault: str) -> None:
    changed, level, text, cure = FAULTS[fault]
    well, lines = examined(), examined(**changed)
    assert {each.level for each in well} == {Level.OK}
    line, *more = [each for each in lines if each.level is not Level.OK]
    assert not more and line.level is level and text in line.text and cure in line.cure
    assert bool(line.cure) == bool(cure)
    others = [each for each in lines if each.check not in changed and each is not line]
    assert others == [each for each in well if each.check not in changed]
    assert exit_code(lines) == {WARN: 1, FAIL: 2, UNKNOWN: 0}[level]
    said = (line.level, line.text, line.cure)
    assert [name for name, (_, *words) in FAULTS.items() if all(map(contains, said, words))] == [fault]
    assert parse_finding({name: str(getattr(line, name)) for name in Finding.__slots__}) == line


def test_lines_of_a_peer_that_is_well() -> None:
    said = "\n".join(map(str, examined()))
    for words in (
        "Starling 0.2.0, Python 3.11.7, torch 2.13.0, hivemind 1.1.12; p2pd starts in 0.4 s",
        "41.0 GB free, checkpoints 1.2 GB of 20.0 GB, past runs 3.1 GB; fsync 4 ms",
        "identity …kq3Zxy, held by the running peer",
        "trains on cuda (H100, 80.0 GB), 8 cores; open files 1,048,576; page on port 7717",
        "listens on tcp 4001 (libp2p) and 4002 (data)",
        "IPv4 192.168.1.5 behind a router, seen as 84.23.1.9, no IPv6, no VPN; reaches anna in 31 ms, bert in 52 ms",
        "open from outside: anna dialled 84.23.1.9:4001",
        "sends 11.2 MB/s while data waits, 12.5 MB/s declared",
        "clock 0.2 s from the others'",
        "versions agree (0.2.0)",
        "run attic (7cac027cac02), certificates lead to round 61, checkpoint 60 is whole",
    ):
        assert f"{words}\n" in f"{said}\n"
    assert conclusion(examined()) == "You can train."
    clock, key = WELL["clock"], replace(WELL["identity"], problem="is open")
    warned = examined(clock=replace(clock, is_set_by_network=False))
    assert conclusion(warned) == "You can train. warn: clock."
    assert conclusion([*warned, *check_identity(key)]) == "This peer would not work. FAIL: identity."


def test_hardware_of_a_running_peer_is_what_it_trains_on() -> None:
    """A GPU that it uses is not opened to ask."""
    for wanted in ("auto", "cuda", "cuda:0,cuda:1", "mps"):
        (line,) = check_hardware(replace(WELL["hardware"], wanted=wanted, gpus=(), in_use="2 × NVIDIA H100"))
        assert line.level is Level.OK and line.text.startswith("trains on 2 × NVIDIA H100, 8 cores")
    (line,) = check_hardware(replace(WELL["hardware"], gpus=()))
    assert line.level is Level.WARN and "it trains on the CPU" in line.text
    assert check_hardware(replace(WELL["hardware"], gpus=(), own_loop=True))[0].level is Level.OK


def test_refused_dial_shows_that_tcp_works_beside_a_proxy() -> None:
    refused = replace(WELL["reach"], helpers=(FAR,), given=FAR)
    assert check_reach(replace(refused, proxies=("HTTP_PROXY",))) == check_reach(refused)


def test_what_is_open_nearby_only_is_said_so() -> None:
    for host, where in (("192.168.1.5", "in this network only"), ("127.0.0.1", "on this machine only")):
        outside = replace(WELL["outside"], reports=(replace(REPORT, host=host),), relays=("anna",))
        assert [each.text for each in check_outside(outside)] == [
            f"open {where}: anna dialled {host}:4001",
            "others meet this peer through anna",
        ]
    both = (replace(REPORT, helper="bert", host="192.168.1.5"), REPORT)
    (line,) = check_outside(replace(WELL["outside"], reports=both))
    assert line.text == "open from outside: bert, anna dialled 84.23.1.9:4001"


def test_helpers_are_public_and_of_different_networks() -> None:
    peers = [("near", "192.168.1.7"), ("a", "84.23.1.1"), ("b", "84.23.200.1"), ("c", "84.24.1.1"), ("relayed", "")]
    assert choose_helpers(peers) == ["a", "c"]
    assert choose_helpers(peers[:3]) == ["a", "near"] and choose_helpers(peers[1:3]) == ["a", "b"]
    assert choose_helpers([("x", "2a01:4f8::1"), ("y", "2a01:4f8:9::1"), ("z", "2a02::1")]) == ["x", "z"]
    assert choose_helpers([("relayed", "")]) == []


def test_ports_to_forward_are_the_users_or_usual_ones() -> None:
    assert ports_to_forward(["/ip4/0.0.0.0/tcp/0", "/ip6/::/tcp/5000"], 0) == (4001, 4002)
    assert ports_to_forward(["/ip4/0.0.0.0/tcp/31337"], "off") == (31337, 0)
    assert ports_to_forward(["/ip4/0.0.0.0/tcp/4002"], 0) == (4002, 4003)
    assert ports_to_forward(["/ip4/0.0.0.0/udp/1/quic-v1"], 4444) == (4001, 4444)


def test_ports_of_public_addresses_are_probed_first() -> None:
    mapped = [f"/ip4/84.23.1.9/tcp/{port}/p2p/x" for port in (23456, 80, 23457, 23458, 23459)]
    near = ["/ip4/192.168.1.5/tcp/4001/p2p/x", "/ip4/84.1.1.1/tcp/4009/p2p/r/p2p-circuit/p2p/x"]
    assert ports_to_probe([*near, *mapped[:2]], [4001, 4001], 4002) == ((23456, 4001), 4002)
    assert ports_to_probe(mapped, [4001], 4002) == ((23456, 23457, 23458), 4002)
    assert ports_to_probe(mapped, [4001], 0) == ((23456, 23457, 23458, 23459), 0)
    assert ports_to_probe([], [80], 80) == ((), 0)


@settings(max_examples=20)
@given(st.lists(st.text(max_size=80), max_size=4), st.lists(st.integers(0, 65_535), max_size=3), st.integers(0, 65_535))
def test_few_ports_are_probed_whatever_addresses_say(addresses: list[str], listening: list[int], data: int) -> None:
    libp2p, own = ports_to_probe(addresses, listening, data)
    assert len(libp2p) + bool(own) <= MAX_PROBED_PORTS and all(
        port >= 1024 for port in (*libp2p, *([own] if own else []))
    )


@settings(max_examples=20)
@given(st.lists(st.text(max_size=12), max_size=4), st.sampled_from(["0.2.0", "0.2.0+checkout", "1.0"]))
def test_any_versions_give_at_most_one_line(others: list[str], mine: str) -> None:
    assert len(check_versions(mine, others)) <= 1


@pytest.mark.parametrize("data", [None, [], {}, {"check": 1}, {"check": "a", "level": "no", "text": "", "cure": ""}])
def test_malformed_finding_is_rejected(data: object) -> None:
    with pytest.raises(ValueError):
        parse_finding(data)


def test_finding_of_another_process_cannot_steer_the_terminal() -> None:
    odd = "\x1b]0;owned\x07\r\n"
    finding = parse_finding({"check": odd, "level": "FAIL", "text": odd, "cure": odd})
    assert not {*"\x1b\x07\r\n"} & {*f"{finding.check}{finding.text}{finding.cure}{conclusion([finding])}"}


# -- one step after another --------------------------------------------------------------------------------------------


def step(name: str, needs_seconds: float, may_take: float = 3.0) -> CheckStep:
    async def find() -> list[Finding]:
        await asyncio.sleep(needs_seconds)
        return [Finding(name, Level.OK, name)]

    return CheckStep(name, may_take, find)


@on_virtual_time
async def test_slow_checks_are_left_and_all_end_in_time() -> None:
    told: list[tuple[float, Finding]] = []
    began = now()

    def tell(finding: Finding) -> None:
        told.append((now() - began, finding))

    assert await examine([step("a", 1.0), step("b", 0.5)], tell, began + 30)
    assert [(at, each.text) for at, each in told] == [(1.0, "a"), (1.5, "b")]
    told, began = [], now()
    assert not await examine([step("dead", 1e6), step("c", 1.0), *(step("x", 1e6, 9.0),) * 9], tell, began + 30)
    assert [(at, each.level, each.text) for at, each in told[:2]] == [
        (3.0, Level.UNKNOWN, "dead: not found out in time"),
        (4.0, Level.OK, "c"),
    ]
    assert len(told) == 11 and told[-1][0] == now() - began == 30.0
