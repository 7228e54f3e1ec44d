"""`doctor` as a user runs it, while a peer runs in the directory and while none does."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.faults.homes import Homes, Router
from tests.faults.network import why_not
from tests.support import warm
from tests.support.paths import REPOSITORY
from tests.support.real_swarm import RealPeer, RealSwarm, paced, wait

pytestmark = [pytest.mark.real, pytest.mark.timeout(120)]

LIMIT_SECONDS = 30.0


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[RealPeer, RealPeer]]:
    with RealSwarm(tmp_path, paced(elements=10_000)) as swarm:
        anna = swarm.found("anna")
        (bert,) = swarm.join("bert", via=anna)
        wait("they have met", lambda: anna.sees(bert).get("live") and bert.reports(), 30)
        yield anna, bert


ROUTERS = {
    Router.PORT_KEEPING: ("warn", "closed from outside: ", "(no answer in 5 s)"),
    Router.REFUSING: ("warn", "closed from outside: ", "(connection refused)"),
    Router.CGNAT: ("warn", "closed from outside: ", "(no answer in 5 s)"),
    Router.FULL_CONE: ("ok", "open from outside: ", " dialled "),
}


def knows(peer: RealPeer, other: RealPeer) -> bool:
    return bool(peer.sees(other).get("live"))


@pytest.mark.long
def test_doctor_says_what_each_router_lets_in(tmp_path: Path) -> None:
    """Peers at home, helped by the only public peer, maybe another at home, too; and the founder, helped by those."""
    if reason := why_not():
        pytest.skip(reason)
    with Homes() as network:

        def prepare(peer: RealPeer) -> None:
            peer.nat = True
            place = network.add(peer.name) if peer.name == "founder" else network.home(*homes[peer.name])
            peer.inside, peer.listen = place.inside, "/ip4/0.0.0.0/tcp/4001"

        homes = {f"peer{number}": (f"home{number}", router) for number, router in enumerate(ROUTERS)}
        with RealSwarm(tmp_path, paced(elements=10_000), prepare) as swarm:
            founder = swarm.found("founder")
            swarm.join(*homes, via=founder)
            for name, (_, router) in homes.items():
                (level, begins, ends), peer = ROUTERS[router], swarm[name]
                wait("they have met", partial(knows, peer, founder), 30)
                code, found = examined(peer)
                said = found["outside"]
                assert code in (0, 1) and said["level"] == level, said
                assert said["text"].startswith(begins) and "founder" in said["text"] and ends in said["text"], said
                assert ("forward tcp 4001 and " in said["cure"]) == (level == "warn"), said
            _, found = examined(founder)
            assert found["outside"]["text"].startswith("open from outside: ")


def examined(peer: RealPeer) -> tuple[int, dict[str, dict[str, str]]]:
    """Exit code, and the findings by the names of their checks."""
    began = time.monotonic()
    words = ("doctor", "--state-dir", str(peer.directory), "--json")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("NODE_")}
    environment |= {"PYTHONPATH": str(REPOSITORY), "NODE_LISTEN": peer.listen, "NODE_NAT": "false"}
    done = warm.run("node", *words, environment=environment, seconds=LIMIT_SECONDS + 10)
    assert time.monotonic() - began < LIMIT_SECONDS
    answer: dict[str, Any] = json.loads(done.stdout)
    assert answer["code"] == done.returncode
    found = {each["check"]: each for each in answer["findings"]}
    assert len(found) == len(answer["findings"]), "each check of this machine has one line"
    return done.returncode, found


def test_doctor_examines_a_running_peer_and_a_stopped_one(pair: tuple[RealPeer, RealPeer], tmp_path: Path) -> None:
    anna, bert = pair
    code, found = examined(anna)
    assert code == 1 and "own loopback" in found["listen"]["text"]  # where the tests' peers listen
    assert found["identity"]["text"].endswith("held by the running peer") and "p2pd runs" in found["programs"]["text"]
    assert "reaches bert in " in found["reach"]["text"]
    port = anna.address.split("/")[4]
    assert found["outside"]["text"] == f"open on this machine only: bert dialled 127.0.0.1:{port}"
    assert "from the others'" in found["others' clocks"]["text"]
    assert "certificates lead to round" in found["run"]["text"]
    assert anna.running and anna.status()["state"] != "leaving"

    bert.strike(number=2)
    bert.ends(20)
    before = {path: path.stat().st_mtime_ns for path in bert.directory.rglob("*") if path.is_file()}
    code, found = examined(bert)
    assert code in (0, 1) and "p2pd starts in" in found["programs"]["text"]
    assert bert.id[-6:] in found["identity"]["text"] and "held by" not in found["identity"]["text"]
    port = bert.address.split("/")[4]
    assert found["listen"]["level"] == "warn" and "reaches anna in " in found["reach"]["text"]
    assert found["outside"]["text"] == f"open on this machine only: anna dialled 127.0.0.1:{port}"
    assert found["run"]["level"] == "ok" and "is whole" in found["run"]["text"]
    assert before == {path: path.stat().st_mtime_ns for path in bert.directory.rglob("*") if path.is_file()}
