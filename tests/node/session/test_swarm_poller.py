"""How a peer asks the others for their status: only for a reader, one at a time, and at a bounded cost."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial

from node.joining.bootstrap import BootstrapServer, RunInfo, ask_summary
from node.membership.hello import BOOTSTRAP_METHOD, MAX_STATUS_BYTES, StatusReply
from node.reporting.status import PeerStatus, Status, to_json
from node.session.swarm_poller import ASK_SECONDS, INTEREST_SECONDS, KEPT_SECONDS, MAX_ASKED, SwarmPoller
from protocols import wire
from protocols.base import Deadline, PeerId, Stream
from tests.sim.network import SimNetwork
from tests.sim.trace import Trace
from tests.support.simulated import on_virtual_time
from tests.support.status_examples import STATUS
from tests.support.waiting import now

CROWD = tuple(PeerStatus(f"12D3KooW{number:044d}", f"bob-{number}", True, True, 4, "") for number in range(31))


class Swarm:
    """A poller whose peers answer as `answer` says, in a tenth of a second."""

    def __init__(self, peers: int) -> None:
        self.live = [f"p{number}" for number in range(peers)]
        self.asked: list[tuple[float, PeerId]] = []
        self.said: list[str] = []
        self.at_once = self.most_at_once = 0
        self.status = replace(STATUS, peers=tuple(PeerStatus(each, "", True, True, 4, "") for each in self.live))
        self.poller = SwarmPoller(lambda: self.status, self.said.append, "update it")

    async def answer(self, peer: PeerId) -> Status:
        await asyncio.sleep(0.1)
        return replace(STATUS, peer=peer, state="training", version="0.3.0")

    async def ask(self, peer: PeerId, deadline: Deadline) -> Status:
        self.asked.append((now(), peer))
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            return await self.answer(peer)
        finally:
            self.at_once -= 1

    async def look(self, seconds: float) -> None:
        """Look at the swarm, as a page does each second."""
        for _ in range(round(seconds)):
            self.poller.want()
            await asyncio.sleep(1.0)

    @contextmanager
    def running(self) -> Iterator[None]:
        task = asyncio.create_task(self.poller.run(self.ask, lambda: self.live))
        try:
            yield
        finally:
            task.cancel()


@on_virtual_time
async def test_peers_are_asked_in_turn_while_a_reader_looks() -> None:
    swarm = Swarm(MAX_ASKED + 6)
    with swarm.running():
        await asyncio.sleep(100.0)
        assert not swarm.asked, "no reader looks"
        await swarm.look(3 * MAX_ASKED)
        assert swarm.most_at_once == 1 and {peer for _, peer in swarm.asked} == set(swarm.live[:MAX_ASKED])
        for peer in swarm.live[:MAX_ASKED]:
            times = [at for at, each in swarm.asked if each == peer]
            assert len(times) == 3 and all(b - a >= MAX_ASKED for a, b in itertools.pairwise(times))
        asked, left = len(swarm.asked), now()
        await asyncio.sleep(2 * MAX_ASKED)
        late = [at for at, _ in swarm.asked[asked:] if at > left + INTEREST_SECONDS]
        assert not late, "the reader has gone"
        view = swarm.poller.view()
        assert view.rows[1].state == "training" and (view.here, view.known) == (71, 71)
        await asyncio.sleep(KEPT_SECONDS)
        assert {each.state for each in swarm.poller.view().rows[1:]} == {""}, "too old"


@on_virtual_time
async def test_hung_peer_costs_its_time_only() -> None:
    class Hung(Swarm):
        async def answer(self, peer: PeerId) -> Status:
            await asyncio.sleep(1e6 if peer == "p0" else 0.1)
            return await super().answer(peer)

    swarm = Hung(3)
    with swarm.running():
        await swarm.look(1.0)
        assert not swarm.poller.view().asked
        await swarm.look(ASK_SECONDS + 2.0)
        view = swarm.poller.view()
    assert view.asked and [each.state for each in view.rows] == ["waiting", "", "training", "training"]
    assert not swarm.said


@on_virtual_time
async def test_later_version_of_most_peers_is_said_once() -> None:
    swarm = Swarm(4)
    swarm.status = replace(swarm.status, version="0.2.0+checkout")
    swarm.live.pop()
    with swarm.running():
        await swarm.look(60.0)
    assert len(swarm.asked) == 3 * 4, "each of three in each turn"
    assert swarm.said == ["3 of 4 peers run 0.3.0, this one 0.2.0: update it"]


@on_virtual_time
async def test_junk_costs_one_line_and_one_request() -> None:
    """From a real server that sends 64 KiB of it, beside one that answers."""
    network, said = SimNetwork(Trace()), list[str]()
    me, good, bad = (network.join(name) for name in ("me", "good", "bad"))
    whole = replace(STATUS, peers=CROWD, state="averaging", waiting_for=("x" * 32,) * 31)
    BootstrapServer(good, RunInfo(b"", b""), lambda: asdict(whole))
    sent: list[object] = []

    async def junk(peer: PeerId, stream: Stream) -> None:
        sent.append(await stream.receive(wire.MAX_HEADER_BYTES))
        await stream.send(StatusReply(MAX_STATUS_BYTES), b"\x1b" * MAX_STATUS_BYTES)

    bad.serve(BOOTSTRAP_METHOD, junk)
    peers = (PeerStatus("good", "anna", True, True, 4, ""), PeerStatus("bad", "b\x1bert", True, True, 4, ""))
    poller = SwarmPoller(lambda: replace(STATUS, peers=peers), said.append)
    polling = asyncio.create_task(poller.run(partial(ask_summary, me), lambda: ["bad", "good"]))
    for _ in range(400):
        poller.want()
        await asyncio.sleep(1.0)
    assert len(said) == len(sent) == 1 and "b ert (bad) cannot be read" in said[0], said
    view = poller.view()
    assert [(each.peer, each.state, each.reason) for each in view.rows[1:]] == [
        ("bad", "", "what it says cannot be read"),
        ("good", "averaging", "for the others"),
    ]
    assert view.unreadable == 1 and view.asked
    summary = await ask_summary(me, "good", now() + 5.0)
    assert not summary.peers and not summary.addresses and len(json.dumps(to_json(summary))) < 2000
    polling.cancel()
