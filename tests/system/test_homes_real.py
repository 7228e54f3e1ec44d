"""Peers behind routers that no one can dial: they meet through a public peer, and average with it."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest

from tests.faults.homes import Homes, Router
from tests.faults.network import why_not
from tests.faults.pairs import MEET_SECONDS, PORT, is_good, play
from tests.support.real_swarm import RealPeer, RealSwarm, paced, wait

SETTLE_SECONDS = 15.0
"""By then, go-libp2p announces a mapping, also one that was refused."""
SETTLING_ROUNDS = 3
"""After the restart: one under way admits the founder or drops it, others are called before it has caught up."""
pytestmark = [pytest.mark.real, pytest.mark.long, pytest.mark.timeout(300)]


def test_two_homes_meet_through_founder_also_after_its_restart(tmp_path: Path) -> None:
    if reason := why_not():
        pytest.skip(reason)
    result = play((Router.SYMMETRIC, Router.CGNAT), 10, tmp_path)
    again = result["restart"]
    assert is_good({**result, "restart": result["start"]}), result
    assert again["meet_seconds"] <= MEET_SECONDS and len(again["outcomes"]) == 10, result
    assert all(each.endswith(" 3") for each in again["outcomes"][SETTLING_ROUNDS:]), result


@pytest.mark.parametrize("grants", [True, False])
def test_router_is_asked_for_a_port_and_its_refusal_is_no_address(tmp_path: Path, grants: bool) -> None:
    """By UPnP; then a peer outside dials the founder at home within a minute."""
    tools = [each for each in ("miniupnpd", "iptables-legacy") if not shutil.which(each)]
    if reason := why_not() or (f"{tools[0]} not found: install miniupnpd-iptables" if tools else ""):
        pytest.skip(reason)
    with Homes("5.79.10") as network:
        home = network.home("a", Router.PORT_KEEPING).inside
        with network.gives_ports("a", tmp_path, grants):

            def prepare(peer: RealPeer) -> None:
                peer.nat, peer.listen = True, f"/ip4/0.0.0.0/tcp/{PORT}"
                peer.inside = home if peer.name == "a" else network.add(peer.name).inside

            with RealSwarm(tmp_path, paced(1000), prepare) as swarm:
                a = swarm.found("a")
                public = f"/ip4/{network.places['a'].address}/tcp/"
                if grants:
                    a.address = wait("a port", lambda: next((at for at in addresses(a) if public in at), ""), 60)
                    b = swarm.join("b", via=a, seconds=30)[0]
                    wait("both average", lambda: swarm.all_in_one_mean([a, b]), 60)
                else:
                    said = tmp_path / "miniupnpd.log"
                    wait("the router refuses", lambda: "rejected" in said.read_text(errors="replace"), 60)
                    until = time.monotonic() + SETTLE_SECONDS
                    while time.monotonic() < until:
                        assert not any(public in each for each in addresses(a))
                        time.sleep(0.5)


def addresses(peer: RealPeer) -> list[str]:
    return list(peer.status().get("addresses", ()))
