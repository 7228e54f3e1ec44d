"""A peer's side of a private run: tickets that it makes and redeems, members that it names, and removals."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest

from node.config.manifest import Manifest, seal
from node.membership.hello import BOOTSTRAP_METHOD, HELLO
from node.membership.invitations import Ticket, read_ticket
from node.runtime.identity import public_key_of
from node.session.fatal import FatalPeerError
from node.session.private_run import NARROW, OPEN, PrivateMembership, visitors_access
from node.storage.statedir import StateDir, StateError
from protocols.base import Member, PeerGone, PeerId, Stream
from tests.node.config.test_manifest import MANIFEST
from tests.support.memory_transport import MemoryNetwork, MemoryTransport
from tests.support.waiting import now

AT = "/ip4/203.0.113.5/tcp/4001/p2p/"
NOW, WEEK = 1_800_000_000.0, 7 * 86400.0

T = TypeVar("T")


class Inline:
    async def run(self, work: Callable[[], T], cost_bytes: int) -> T:
        return work()


class Machine:
    """One peer's directory, and its process, which may be started again."""

    def __init__(self, network: MemoryNetwork, directory: Path, name: str) -> None:
        self.network, self.name, self.said = network, name, list[str]()
        self.state, self.wall = StateDir.open(directory / name), NOW
        self.me = self.state.identity.peer_id
        self.start()

    def start(self) -> None:
        clock: Any = SimpleNamespace(wall=lambda: self.wall)
        self.private = PrivateMembership(self.state, Inline(), clock, self.name, self.said.append)
        self.private.exchange.on_barred = lambda revocation: self.said.append(self.private.removed_line(revocation))
        self.transport = MemoryTransport(self.network, self.me)
        exchange = self.private.exchange
        exchange.expel, exchange.served = self.transport.expel, self.transport.serving.served
        exchange.serve(self.transport)
        self.transport.restrict(exchange)

        async def answer(peer: PeerId, stream: Stream) -> None:
            pass

        self.transport.serve(BOOTSTRAP_METHOD, answer)

    def knows(self, *others: Machine) -> None:
        made: list[Any] = [
            SimpleNamespace(peer=each.me, live=True, hello=SimpleNamespace(nickname=each.name)) for each in others
        ]
        self.private.contacts = lambda: made

    async def join(self, ticket: Ticket, manifest: Manifest) -> None:
        async def connect(address: str, deadline: float) -> PeerId:
            return address.rpartition("/p2p/")[2]

        self.private.prepare(ticket, None, False)
        await self.private.redeem(ticket, self.transport, connect)
        self.private.enter(manifest)

    async def invites(self, *, uses: int = 1, peer: str = "", at: str = AT) -> Ticket:
        answer = await self.private.invite(uses, WEEK, peer, (f"{at}{self.me}",))
        return read_ticket(str(answer["ticket"]))

    async def reaches(self, other: Machine) -> bool:
        try:
            async with self.transport.open(other.me, BOOTSTRAP_METHOD, now() + 5):
                return True
        except PeerGone:
            return False


class Machines:
    def __init__(self, directory: Path) -> None:
        self.network = MemoryNetwork()
        self.anna, self.bert, self.carl, self.dora = (
            Machine(self.network, directory, name) for name in ("anna", "bert", "carl", "dora")
        )
        self.manifest = self.run()
        self.anna.private.enter(self.manifest)

    def run(self, **changes: Any) -> Manifest:
        config = replace(MANIFEST.config, **({"admission": "invited"} | changes))
        return replace(MANIFEST, config=config, founder=Member(self.anna.me, 1))


@pytest.fixture
async def machines(tmp_path: Path) -> AsyncIterator[Machines]:
    made = Machines(tmp_path)
    yield made
    for each in made.network.transports.values():
        await each.serving.close()


async def test_invited_peer_is_a_member_also_after_restarts_of_both(machines: Machines) -> None:
    anna, bert = machines.anna, machines.bert
    await bert.join(await anna.invites(), machines.manifest)
    assert f"bert (…{bert.me[-6:]}) was admitted with ticket 1" in anna.said
    assert bert.said[-1].endswith(f"founded by anna (…{anna.me[-6:]}), who invited you: admitted")
    for each in (anna, bert):
        each.start()
        each.private.prepare(None, machines.manifest, False)
    assert await bert.reaches(anna) and await anna.reaches(bert)
    bert.private.enter(machines.manifest)
    modes = [(bert.state.path / "pass.bin").stat().st_mode, (anna.state.path / "invites.json").stat().st_mode]
    assert [mode & 0o777 for mode in modes] == [0o600, 0o600]


async def test_guest_of_a_guest_is_admitted_and_goes_with_its_inviter(machines: Machines) -> None:
    anna, bert, carl = machines.anna, machines.bert, machines.carl
    await bert.join(await anna.invites(), machines.manifest)
    await carl.join(await bert.invites(), machines.manifest)
    assert f"founded by …{anna.me[-6:]}; bert (…{bert.me[-6:]}) invited you: admitted" in carl.said[-1]
    assert await carl.reaches(anna)
    anna.knows(bert, carl)
    await anna.private.revoke("bert")
    assert not await carl.reaches(anna) and "through whom this peer was invited, was removed" in carl.said[-1]
    assert not await bert.reaches(anna) and "this peer was removed from the run by" in bert.said[-1]
    await carl.join(await anna.invites(), machines.manifest)
    assert await carl.reaches(anna), "it was invited again, by another peer"
    anna.start()
    anna.private.prepare(None, machines.manifest, False)
    assert await carl.reaches(anna) and not await bert.reaches(anna)


async def test_ticket_for_one_peer_needs_no_issuer_and_serves_no_other(machines: Machines) -> None:
    anna, bert, carl, dora = machines.anna, machines.bert, machines.carl, machines.dora
    await bert.join(await anna.invites(), machines.manifest)
    ticket = await anna.invites(peer=carl.me)
    del machines.network.transports[anna.me]
    await carl.join(ticket, machines.manifest)
    assert await carl.reaches(bert)
    with pytest.raises(FatalPeerError, match="does not admit this peer"):
        await dora.join(ticket, machines.manifest)


async def test_ticket_of_three_uses_admits_three_of_twenty_across_two_restarts(
    machines: Machines, tmp_path: Path
) -> None:
    """The issuer's process ends at once, wherever it is: after it has counted a use, before the joiner hears of it."""
    anna = machines.anna
    ticket = await anna.invites(uses=3)
    joiners = [Machine(machines.network, tmp_path, f"joiner-{number}") for number in range(20)]
    admitted: set[PeerId] = set()

    async def joins(joiner: Machine) -> None:
        with suppress(FatalPeerError):
            await joiner.join(ticket, machines.manifest)
            admitted.add(joiner.me)

    async def dies() -> None:
        for _ in range(2):
            await asyncio.sleep(0)
            await anna.transport.serving.close()
            anna.start()
            await asyncio.sleep(0.01)
            anna.private.enter(machines.manifest)

    await asyncio.gather(*map(joins, joiners), dies())
    found: Any = anna.private.members({}, {})["tickets"]
    assert len(admitted) == 3 and {*found[0]["used_by"]} == admitted and found[0]["left"] == 0


async def test_visitor_of_a_member_reads_the_status_and_is_no_member(machines: Machines, tmp_path: Path) -> None:
    anna, bert = machines.anna, machines.bert
    await bert.join(await anna.invites(), machines.manifest)
    await anna.private.revoke(machines.carl.me)
    clock: Any = SimpleNamespace(wall=lambda: NOW)
    for member in (anna, bert):
        visitor = Machine(machines.network, tmp_path, f"visitor-of-{member.name}")
        with pytest.raises(FatalPeerError, match="is not of a private run"):
            visitors_access(visitor.state.path, visitor.me, clock)
        (member.state.path / "manifest.bin").write_bytes(seal(machines.manifest, anna.state.identity))
        access = visitors_access(member.state.path, visitor.me, clock)
        access._transport = visitor.transport
        visitor.transport.restrict(access)
        assert await visitor.reaches(anna)
        assert access.has_removed(machines.carl.me) is (member is anna), "the removals that the directory holds"
        with pytest.raises(PeerGone):
            async with visitor.transport.open(anna.me, HELLO, now() + 5):
                pass
    bert.state.path.joinpath("pass.bin").unlink()
    with pytest.raises(FatalPeerError, match="holds no pass to its run"):
        visitors_access(bert.state.path, visitor.me, clock)


async def test_used_voided_and_own_tickets_are_refused(machines: Machines) -> None:
    anna, bert, carl = machines.anna, machines.bert, machines.carl
    ticket = await anna.invites()
    await bert.join(ticket, machines.manifest)
    with pytest.raises(FatalPeerError, match=rf"was used by another peer \(…{bert.me[-6:]}\)"):
        await carl.join(ticket, machines.manifest)
    second = await anna.invites(uses=2)
    assert await anna.private.revoke("2") == "ticket 2 cannot be used any more; who has used it stays"
    with pytest.raises(FatalPeerError, match="this ticket was revoked"):
        await carl.join(second, machines.manifest)
    third = await anna.invites()
    anna.wall += WEEK + 1
    with pytest.raises(FatalPeerError, match="has expired"):
        await carl.join(third, machines.manifest)
    with pytest.raises(FatalPeerError, match="has made this ticket itself"):
        await anna.join(third, machines.manifest)
    assert [each["left"] for each in anna.private.members({}, {})["tickets"]] == [0, 0, 0]  # type: ignore[attr-defined]


async def test_pass_of_a_false_founder_does_not_lead_into_the_run(machines: Machines) -> None:
    """The run id is known, and who has made the ticket calls itself the founder."""
    liar, bert = machines.dora, machines.bert
    liar.private.enter(replace(machines.manifest, founder=Member(liar.me, 1)))
    ticket = await liar.invites()
    with pytest.raises(FatalPeerError, match="does not admit"):
        await bert.join(ticket, machines.manifest)


async def test_invite_says_why_it_makes_no_ticket(machines: Machines) -> None:
    anna, bert = machines.anna, machines.bert
    with pytest.raises(ValueError, match="is starting"):
        await bert.invites()
    narrow = await anna.private.invite(1, WEEK, "", ("/ip4/192.168.1.5/tcp/1/p2p/" + anna.me,))
    assert narrow["warning"] == NARROW and narrow["ticket"]
    with pytest.raises(ValueError, match="no member bert is known here: give the whole id of a new peer"):
        await anna.invites(peer="bert")
    with pytest.raises(ValueError, match="the id of this peer itself"):
        await anna.invites(peer=anna.me)
    anna.knows(bert)
    for name in ("bert", f"…{bert.me[-6:]}"):
        assert (await anna.invites(peer=name)).shown.links[-1].subject == public_key_of(bert.me)
    founders = machines.run(inviters="founder")
    anna.private.enter(founders)
    await bert.join(await anna.invites(), founders)
    with pytest.raises(ValueError, match="in this run only the founder invites: ask …"):
        await bert.invites()
    bert.private.enter(replace(machines.manifest, config=replace(machines.manifest.config, admission=None)))
    with pytest.raises(ValueError, match=OPEN):
        await bert.invites()
    assert bert.private.exchange.serves("anybody", BOOTSTRAP_METHOD)


async def test_revoke_names_whom_it_cannot_remove(machines: Machines) -> None:
    anna, bert, carl, dora = machines.anna, machines.bert, machines.carl, machines.dora
    await bert.join(await anna.invites(), machines.manifest)
    carl.name = "bert"
    anna.knows(bert, carl)
    for who, line in (
        ("eve", "no member eve is known here"),
        ("bert", "2 members are called bert: give an id from starling members"),
        (anna.me, "this peer cannot remove itself"),
        ("anna", "this peer cannot remove itself"),
        ("", "no member '' is known here"),
    ):
        with pytest.raises(ValueError, match=line):
            await anna.private.revoke(who)
    bert.knows(anna, dora)
    with pytest.raises(ValueError, match="the founder of a run cannot be removed"):
        await bert.private.revoke("anna")
    with pytest.raises(ValueError, match=r"only a peer that dora .* came through can remove it"):
        await bert.private.revoke("dora")
    await anna.private.revoke(f"…{bert.me[-6:]}")
    assert not await bert.reaches(anna)


async def test_damaged_account_of_tickets_is_an_error(machines: Machines) -> None:
    """Were it taken for an empty one, used tickets would work again."""
    await machines.anna.invites()
    (machines.anna.state.path / "invites.json").write_text(json.dumps({"run": "zz"}))
    machines.anna.start()
    with pytest.raises(StateError, match=r"invites\.json is damaged"):
        machines.anna.private.enter(machines.manifest)


async def test_peer_without_a_pass_does_not_enter(machines: Machines) -> None:
    with pytest.raises(FatalPeerError, match="this run is private: ask a member for a ticket"):
        machines.bert.private.enter(machines.manifest)
    assert public_key_of(machines.bert.me) != public_key_of(machines.anna.me)
