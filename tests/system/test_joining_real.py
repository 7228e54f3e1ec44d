"""Joining a run as a user sees it: dead addresses, impossible commands, and the words of both."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from node.cli.app import main
from tests.support.real_swarm import RealPeer, RealSwarm, paced, wait

pytestmark = pytest.mark.real

ABSENT = "12D3KooWKnoGEMBCiBGaNvV8BQhyjmHd53ZkcnhUH5gS7yFAVByZ"
SILENT = "12D3KooWFLiJtueEuqCeVk1oDT28ke1wpoa6A9AG4wcs6utF7rp4"
REPORTED_SECONDS = 10.0
JOINED_SECONDS = 5.0
REFUSED_SECONDS = 30.0
"""The process imports everything before it refuses, on a machine with other work."""
LEFT_SECONDS = 2.0


@pytest.fixture(scope="module")
def founder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealPeer]:
    """A peer that any joiner may use."""
    with RealSwarm(tmp_path_factory.mktemp("run"), paced(elements=10_000)) as swarm:
        yield swarm.found("founder")


@pytest.fixture
def joiner(tmp_path: Path) -> Iterator[RealPeer]:
    """A peer that has not been started."""
    peer = RealPeer("joiner", tmp_path)
    yield peer
    peer.clear()
    peer.leaves_nothing()
    assert "Traceback" not in peer.said()


@pytest.fixture
def black_hole() -> Iterator[int]:
    """A port that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def dead_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


def local(port: int, peer: str = ABSENT) -> str:
    return f"/ip4/127.0.0.1/tcp/{port}/p2p/{peer}"


def bootstrap(*addresses: str) -> list[str]:
    return [word for address in addresses for word in ("--bootstrap", address)]


def began(peer: RealPeer) -> float:
    """The time at which the peer had read its arguments and begun: imports are over."""
    return (peer.directory / "incarnation").stat().st_mtime


def lines_about(peer: RealPeer, address: str) -> list[str]:
    """The lines about an address."""
    return [line for line in peer.said().splitlines() if line.startswith(f"{address}: ")]


def reported_in_time(peer: RealPeer, addresses: list[str]) -> None:
    wait("imports", (peer.directory / "incarnation").exists, REFUSED_SECONDS)
    wait("a line about each", lambda: all(lines_about(peer, each) for each in addresses), REPORTED_SECONDS)


def test_one_live_address_of_many_suffices(
    founder: RealPeer, joiner: RealPeer, black_hole: int, dead_port: int
) -> None:
    where = founder.address.rpartition("/p2p/")[0]
    causes = {
        local(dead_port): "nothing listens there",
        f"{where}/p2p/{ABSENT}": f"another peer answers, {founder.id}",
        local(black_hole, SILENT): "no answer",
    }
    joiner.start(*bootstrap(*causes, founder.address))
    reported_in_time(joiner, list(causes))
    wait("it has joined", lambda: (joiner.directory / "manifest.bin").exists(), 1)
    joined_seconds = (joiner.directory / "manifest.bin").stat().st_mtime - began(joiner)
    print(f"joined after {joined_seconds:.1f} s\n{joiner.said()}")
    assert joined_seconds < JOINED_SECONDS
    for address, cause in causes.items():
        (line,) = lines_about(joiner, address)
        assert cause in line and ("?" in line or "ask" in line or "try" in line)
    assert not lines_about(joiner, founder.address)


def test_dead_addresses_are_reported_in_time(joiner: RealPeer, black_hole: int, dead_port: int) -> None:
    addresses = [local(dead_port), local(black_hole, SILENT)]
    joiner.start(*bootstrap(*addresses))
    reported_in_time(joiner, addresses)
    time.sleep(max(0.0, began(joiner) + 12 - time.time()))  # by then the joiner has tried both again
    assert joiner.running and joiner.status()["state"] == "joining"
    assert [len(lines_about(joiner, each)) for each in addresses] == [1, 1], joiner.said()
    interrupted = time.time()
    joiner.strike(number=signal.SIGINT)
    assert joiner.ends(LEFT_SECONDS) == 0
    print(f"left {time.time() - interrupted:.1f} s after Ctrl-C\n{joiner.said()}")


def test_address_file_joins_and_finished_run_exits_zero(joiner: RealPeer, tmp_path: Path) -> None:
    founder, file, run = RealPeer("first", tmp_path), tmp_path / "addresses", tmp_path / "run.toml"
    run.write_text(paced(elements=10_000, rounds=2, inner_steps=5))
    joiner.start("--bootstrap", f"@{file}")
    try:
        for _ in range(2):
            founder.start("--run", str(run), "--wait-for", "2", "--addresses-file", str(file))
            assert founder.ends(REFUSED_SECONDS) == 0, founder.said()
        assert joiner.ends(JOINED_SECONDS) == 0 and joiner.last()["params_hash"] == founder.last()["params_hash"]
        assert founder.said().count("others join by") == 1 and " is over: --new starts another" in founder.said()
    finally:
        founder.clear()
    founder.leaves_nothing()


def refused(joiner: RealPeer, *arguments: str, code: int = 2) -> str:
    """Start the peer; returns the one line with which it ends."""
    joiner.start(*arguments)
    assert joiner.ends(REFUSED_SECONDS) == code
    (line,) = joiner.said().splitlines()
    print(line)
    return line


def test_wrong_run_id_is_refused(founder: RealPeer, joiner: RealPeer) -> None:
    line = refused(joiner, *bootstrap(founder.address), "--run-id", "0123456789ab")
    assert founder.address in line and "not 0123456789ab: take the join line from" in line


def test_port_in_use_is_refused(joiner: RealPeer, black_hole: int) -> None:
    joiner.listen = f"/ip4/127.0.0.1/tcp/{black_hole}"
    line = refused(joiner, "--task", "paced", code=1)  # a service tries again
    assert f"127.0.0.1:{black_hole}" in line and "in use" in line and "listen on another" in line


def test_unreadable_data_is_refused(joiner: RealPeer, tmp_path: Path) -> None:
    line = refused(joiner, "--data", str(tmp_path / "nothing.txt"))
    assert "nothing.txt" in line and "--data" in line


def test_running_peers_model_is_exported_by_its_address(
    founder: RealPeer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wait("a checkpoint", lambda: any(founder.directory.glob("checkpoints/0*")), 30)
    before = founder.status()
    out = str(tmp_path / "out")
    assert main(["export", "--bootstrap", founder.address, "--out", out, "--no-check"]) == 0, capsys.readouterr()
    said = capsys.readouterr().err
    assert said.startswith(f"wrote {tmp_path / 'out'}: run {before['run_id'][:12]} after "), said
    (tensor,) = load_file(tmp_path / "out" / "model.safetensors").values()
    assert tensor.shape == (10_000,)
    after = founder.status()
    assert after["peers"] == before["peers"], "it takes no part in the run"
    assert main(["export", "--bootstrap", local(1), "--out", str(tmp_path / "other")]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"starling: {local(1)}: ") and not (tmp_path / "other").exists()
