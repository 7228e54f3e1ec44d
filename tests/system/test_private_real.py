"""A private run of real peers: tickets, strangers at all of its methods, removal, and restarts."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest

from node.membership.hello import PASS_METHOD
from node.membership.invitations import Ticket, read_ticket
from node.membership.pass_exchange import PassRefused, Present, Redeem, Redeemed
from node.network.libp2p import LibP2PTransport
from node.runtime.identity import Identity, create, load, peer_id_of, public_key_of
from node.storage.pass_files import PassFiles
from protocols.base import NotAccepted, PeerError, PeerId
from tests.node.membership.test_pass_exchange import methods
from tests.support import warm
from tests.support.real_swarm import RealPeer, RealSwarm, paced, wait
from tests.support.transport_pool import new_loop
from tests.support.waiting import now

pytestmark = [pytest.mark.real, pytest.mark.timeout(400)]
RUN = paced(elements=20_000, step_seconds=0.05, inner_steps=4)

T = TypeVar("T")


def run(work: Callable[[Path], Coroutine[Any, Any, T]]) -> T:
    with tempfile.TemporaryDirectory(prefix="st") as directory, new_loop() as runner:
        return runner.run(work(Path(directory)))


def invited(peer: RealPeer, *options: str) -> str:
    ticket: str = json.loads(peer.command("invite", "--json", *options))["ticket"]
    return ticket


async def tries_all(stranger: LibP2PTransport, address: str, shown: Present) -> None:
    """Every method refuses the stranger, before it has presented itself and afterwards, and sends no byte."""
    peer = await stranger.connect(address, now() + 20)
    for _ in range(2):
        for method in methods():
            if method != PASS_METHOD:
                with pytest.raises(NotAccepted):
                    async with stranger.open(peer, method, now() + 20):
                        raise AssertionError(f"{method} accepts a stranger")
        async with stranger.open(peer, PASS_METHOD, now() + 20) as stream:
            await stream.send(shown)
            assert isinstance(await stream.receive(1 << 16), PassRefused)


def strangers_get_nothing(member: RealPeer, replayed: Present) -> None:
    async def work(directory: Path) -> None:
        async with LibP2PTransport(create(directory / "key"), runtime_directory=directory) as stranger:
            await tries_all(stranger, member.address, replayed)

    run(work)


def test_private_run_admits_the_invited_and_nobody_else(tmp_path: Path) -> None:
    with RealSwarm(tmp_path, RUN) as swarm:
        anna = swarm.found("anna", "--private")
        assert "private run starling (" in anna.said() and anna.status()["private"]
        bert = swarm.peer("bert")
        bert.environment = {"STARLING_TICKET": invited(anna)}
        bert.start()
        wait("bert is in the run", bert.meet, 60)
        assert ", founded by anna (…" in bert.said() and "who invited you: admitted" in bert.said()
        wait("they train together", lambda: len(anna.last()["peers"]) == 2, 60)
        assert f"bert (…{bert.id[-6:]}) was admitted with ticket 1" in anna.said()
        found = json.loads(anna.command("members", "--json"))
        assert {each["nickname"]: each["invited_by"] for each in found["members"]} == {"anna": "", "bert": anna.id}

        visited = json.loads(bert.command("status", "--json", "--bootstrap", anna.address))
        assert visited["nickname"] == "anna" and visited["private"], "with a pass that bert's key has signed"

        run_bytes = bytes.fromhex(anna.status()["run_id"])
        pass_of_bert = PassFiles(bert.directory).shown(run_bytes)
        assert pass_of_bert
        replayed = Present(run_bytes, pass_of_bert.links, bytes(32))
        strangers_get_nothing(anna, replayed)

        carl = swarm.peer("carl")
        assert carl.start("--bootstrap", anna.address).ends(60) == 2
        assert "this run is private: ask a member for a ticket (starling invite)" in carl.said()
        assert "this run is private" in carl.command("status", "--bootstrap", anna.address, code=2)
        export = ("export", "--out", str(tmp_path / "out"), "--bootstrap", anna.address)
        assert "a member, which " in carl.command(*export, code=2)
        done = warm.run("node", *export, seconds=30)
        assert done.returncode == 2 and "this run is private" in done.stderr and not (tmp_path / "out").exists()
        carl.environment = bert.environment
        assert carl.start().ends(60) == 2
        assert f"this peer is {load(carl.directory / 'identity.key').peer_id}; its identity stays in" in carl.said()
        assert f"this ticket was used by another peer (…{bert.id[-6:]})" in carl.said()
        assert not (carl.directory / "manifest.bin").exists()

        anna.command("revoke", "bert")
        assert bert.ends(30) == 2
        assert "this peer was removed from the run by anna on " in bert.said()
        anna.strike()
        anna.ends(10)
        anna.start()
        wait("anna is back", anna.meet, 60)
        strangers_get_nothing(anna, replayed)
        bert.environment = {}
        assert bert.start().ends(60) == 2
        wait("anna trains alone", lambda: anna.last()["peers"] == [anna.id], 60)


@pytest.mark.long
def test_ticket_of_three_uses_lets_three_of_twenty_in_across_kills(tmp_path: Path) -> None:
    with RealSwarm(tmp_path, RUN) as swarm:
        anna = swarm.found("anna", "--private")
        ticket = read_ticket(invited(anna, "--uses", "3"))

        async def work(directory: Path) -> set[PeerId]:
            keys = [create(directory / f"key{number}") for number in range(20)]
            admitted: set[PeerId] = set()
            at_once = asyncio.Semaphore(5)

            async def joins(key: Identity) -> None:
                async with at_once, LibP2PTransport(key, runtime_directory=directory) as transport:
                    if await redeemed(transport, key, ticket):
                        admitted.add(key.peer_id)

            async def kill() -> None:
                for after in (0, 2):
                    while len(admitted) < after:  # noqa: ASYNC110 - there is no event to wait for
                        await asyncio.sleep(0.05)
                    anna.strike()
                    await asyncio.to_thread(anna.ends, 10)
                    await asyncio.to_thread(anna.start)
                    await asyncio.to_thread(wait, "anna is back", anna.meet, 60.0)

            await asyncio.gather(kill(), *map(joins, keys))
            return admitted

        admitted = run(work)
        tickets = json.loads(anna.command("members", "--json"))["tickets"]
        assert len(admitted) == 3 and {*tickets[0]["used_by"]} == admitted and tickets[0]["left"] == 0


async def redeemed(transport: LibP2PTransport, key: Identity, ticket: Ticket) -> bool:
    """Whether the ticket's maker admits this peer, however often it has to be asked."""
    request = Redeem(ticket.run, ticket.key, ticket.redeem(public_key_of(key.peer_id)), key.peer_id[-6:])
    issuer = peer_id_of(ticket.issuer)
    while True:
        try:
            await transport.connect(ticket.addresses[0], now() + 10)
            async with transport.open(issuer, PASS_METHOD, now() + 10) as stream:
                await stream.send(request)
                return isinstance(await stream.receive(1 << 16), Redeemed)
        except PeerError:
            await asyncio.sleep(0.2)
