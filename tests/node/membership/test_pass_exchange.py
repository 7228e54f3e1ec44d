"""The check before every handler: members are served by all, strangers and removed members by none."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from node.membership.admission import PEER, VISITOR, Pass, PrivateRun, Revocation, issue_link, revoke
from node.membership.hello import BOOTSTRAP_METHOD, HELLO, PASS_METHOD
from node.membership.pass_exchange import (
    PRIVATE,
    VISITORS_METHODS,
    NotAdmitted,
    PassExchange,
    PassRefused,
    Present,
)
from node.runtime.identity import Identity, create, public_key_of
from protocols import wire
from protocols.aio import loop_time
from protocols.base import BadPayload, NotAccepted, PeerError, PeerGone, PeerId, PeerSilent, Stream
from tests.support.memory_transport import MemoryNetwork, MemoryTransport
from tests.support.paths import REPOSITORY
from tests.support.waiting import until

RUN, NOW = bytes(range(32)), 1_800_000_000
DATA = wire.Availability(True)


def methods() -> list[str]:
    """All names of methods in the code."""
    texts = [path.read_text() for top in ("node", "protocols") for path in (REPOSITORY / top).rglob("*.py")]
    return sorted({name for text in texts for name in re.findall(r'"(starling/[a-z0-9/-]+/\d+)"', text)})


def soon() -> float:
    return loop_time() + 5.0


class Someone:
    """A peer with a pass, who serves every method by sending a byte of data."""

    def __init__(self, network: MemoryNetwork, identity: Identity) -> None:
        self.identity, self.me = identity, identity.peer_id
        self.key = public_key_of(self.me)
        self.transport = MemoryTransport(network, self.me)
        self.now = float(NOW)
        self.exchange = PassExchange(self.me, lambda: self.now)
        self.saved: list[bytes] = []
        self.barred: list[Revocation] = []
        self.exchange.keep, self.exchange.on_barred = self._keep, self.barred.append
        self.exchange.expel, self.exchange.served = self.transport.expel, self.transport.serving.served
        self.exchange.serve(self.transport)
        self.transport.restrict(self.exchange)
        for method in methods():
            if method != PASS_METHOD:
                self.transport.serve(method, self._answer)

    async def _keep(self, encoded: bytes) -> None:
        self.saved.append(encoded)

    async def _answer(self, peer: PeerId, stream: Stream) -> None:
        await stream.send(DATA)
        await stream.receive(64)

    def link(self, subject: Someone, depth: int = 0, kind: int = PEER, until: int = 0, run: bytes = RUN) -> Any:
        return issue_link(
            self.identity.sign, subject.key, issuer=self.key, run=run, kind=kind, serial=bytes(16), depth=depth,
            not_after=until,
        )  # fmt: skip

    def enter(self, founder: Someone, shown: Pass, run: bytes = RUN) -> None:
        self.exchange.enter(PrivateRun(run, founder.key), lambda: shown)

    def revokes(self, subject: Someone) -> Revocation:
        return revoke(self.identity.sign, self.key, subject.key, run=RUN, time=NOW)

    async def gets(self, other: Someone, method: str) -> bool:
        """Whether this one gets data from the other."""
        try:
            async with self.transport.open(other.me, method, soon()) as stream:
                return await stream.receive(64) == DATA
        except PeerGone:
            return False


class Swarm:
    """A founder, two members that it invited, and others."""

    def __init__(self, directory: Path) -> None:
        self.network = MemoryNetwork()
        make = lambda name: Someone(self.network, create(directory / name))  # noqa: E731
        self.anna, self.bert, self.carl, self.eve, self.fred = map(make, ("anna", "bert", "carl", "eve", "fred"))
        self.of_bert = Pass((self.anna.link(self.bert, 3),))
        self.of_carl = Pass((*self.of_bert.links, self.bert.link(self.carl, 2)))
        self.anna.enter(self.anna, Pass(()))
        self.bert.enter(self.anna, self.of_bert)
        self.carl.enter(self.anna, self.of_carl)
        self.members = (self.anna, self.bert, self.carl)

    async def end(self) -> None:
        for each in self.network.transports.values():
            await each.serving.close()


@pytest.fixture
async def swarm(tmp_path: Path) -> Any:
    made = Swarm(tmp_path)
    yield made
    await made.end()


async def test_members_are_served_by_every_method_in_both_directions(swarm: Swarm) -> None:
    assert {HELLO, BOOTSTRAP_METHOD, PASS_METHOD, "starling/direct/1", "starling/sync/1"} <= {*methods()}
    for method in methods():
        if method != PASS_METHOD:
            assert await swarm.carl.gets(swarm.anna, method) and await swarm.anna.gets(swarm.carl, method)


def passes_of_strangers(swarm: Swarm) -> dict[str, tuple[Someone, Pass]]:
    anna, bert, eve, fred = swarm.anna, swarm.bert, swarm.eve, swarm.fred
    return {
        "none": (eve, Pass(())),
        "replayed": (eve, swarm.of_bert),
        "expired": (eve, Pass((anna.link(eve, 3, until=NOW - 1),))),
        "expired visitor": (eve, Pass((*swarm.of_bert.links, bert.link(eve, kind=VISITOR, until=NOW - 1)))),
        "foreign run": (eve, Pass((anna.link(eve, 3, run=bytes(32)),))),
        "foreign founder": (eve, Pass((eve.link(fred, 3), fred.link(eve, 2)))),
        "invited by a stranger": (eve, Pass((*swarm.of_bert.links, fred.link(eve, 2)))),
        "revoked": (fred, Pass((anna.link(fred, 3),))),
        "guest of a revoked peer": (eve, Pass((anna.link(fred, 3), fred.link(eve, 2)))),
    }


CASES = (
    *("none", "replayed", "expired", "expired visitor", "foreign run", "foreign founder"),
    *("invited by a stranger", "revoked", "guest of a revoked peer"),
)


@pytest.mark.parametrize("case", CASES)
async def test_stranger_gets_no_byte_by_any_method(swarm: Swarm, case: str) -> None:
    """Neither before it has shown its pass nor afterwards, whoever of the two opens the streams."""
    await swarm.anna.exchange.revoke(swarm.anna.revokes(swarm.fred))
    stranger, shown = passes_of_strangers(swarm)[case]
    stranger.exchange.open()
    for _ in range(2):
        for method in methods():
            if method != PASS_METHOD:
                with pytest.raises(NotAccepted, match="sent 0 bytes"):
                    await stranger.transport.ask(swarm.anna.me, method)
        async with stranger.transport.open(swarm.anna.me, PASS_METHOD, soon()) as stream:
            await stream.send(Present(RUN, shown.links, bytes(32)))
            assert isinstance(await stream.receive(1 << 16), PassRefused)
    stranger.enter(swarm.anna, shown)
    for method in methods():
        if method != PASS_METHOD:
            assert not await stranger.gets(swarm.anna, method) and not await swarm.anna.gets(stranger, method)
    assert swarm.anna.transport.serving.refused[stranger.me, "not admitted to the run"] >= 2 * len(methods()) - 2


async def test_joiner_without_a_pass_learns_that_the_run_is_private(swarm: Swarm) -> None:
    joiner, busy = swarm.eve, swarm.fred
    joiner.exchange.open()
    with pytest.raises(NotAdmitted) as refused:
        async with joiner.transport.open(swarm.anna.me, BOOTSTRAP_METHOD, soon()):
            pass
    assert refused.value.why == PRIVATE
    busy.exchange.open()
    busy.transport.serving._handlers.clear()
    with pytest.raises(NotAccepted):  # of an open run, which says nothing of passes
        async with joiner.transport.open(busy.me, BOOTSTRAP_METHOD, soon()):
            pass


async def test_busy_member_does_not_make_another_one_leave(swarm: Swarm) -> None:
    """It is asked again, and both stay admitted."""
    assert await swarm.bert.gets(swarm.anna, "starling/sync/1")
    swarm.anna.transport.serving._handlers.pop(BOOTSTRAP_METHOD)
    with pytest.raises(NotAccepted):
        async with swarm.bert.transport.open(swarm.anna.me, BOOTSTRAP_METHOD, soon()):
            pass
    assert swarm.anna.exchange.pass_of(swarm.bert.me) == swarm.of_bert


async def test_peer_that_has_no_pass_yet_serves_nobody(swarm: Swarm) -> None:
    swarm.eve.exchange.close()
    for method in methods():
        if method != PASS_METHOD:
            assert not await swarm.anna.gets(swarm.eve, method) and not await swarm.eve.gets(swarm.anna, method)


async def test_member_of_a_private_run_can_ask_which_open_run_another_is_in(swarm: Swarm) -> None:
    swarm.eve.exchange.open()
    assert await swarm.bert.gets(swarm.eve, BOOTSTRAP_METHOD)
    assert not await swarm.bert.gets(swarm.eve, "starling/sync/1")


async def test_visitor_is_served_by_three_methods_until_its_pass_expires(swarm: Swarm) -> None:
    visitor = swarm.eve
    visitor.enter(swarm.anna, Pass((*swarm.of_bert.links, swarm.bert.link(visitor, kind=VISITOR, until=NOW + 600))))
    served = {method for method in methods() if method != PASS_METHOD and await visitor.gets(swarm.anna, method)}
    assert served == VISITORS_METHODS == {BOOTSTRAP_METHOD, "starling/sync/1", "starling/blobs/1"}
    swarm.anna.now += 601
    assert not any([await visitor.gets(swarm.anna, method) for method in served])


async def test_peer_that_was_forgotten_presents_itself_again(swarm: Swarm) -> None:
    assert await swarm.bert.gets(swarm.anna, "starling/sync/1")
    swarm.anna.exchange._admitted.clear()  # as after a restart
    assert await swarm.bert.gets(swarm.anna, "starling/sync/1")


async def held(one: Someone, other: Someone, ended: list[str]) -> asyncio.Task[None]:
    """A stream that stays open, until one of the two ends it."""
    is_open = asyncio.Event()

    async def hold() -> None:
        with suppress(PeerSilent):
            async with one.transport.open(other.me, "starling/butterfly/control/1", soon() + 60) as stream:
                await stream.receive(64)
                is_open.set()
                await stream.receive(64)
        ended.append(one.me)

    task = asyncio.create_task(hold())
    await is_open.wait()
    return task


def spread(some: Sequence[Someone]) -> list[asyncio.Task[None]]:
    """Let them tell each other of revocations, each of which is live to the others."""

    def live(me: PeerId) -> Callable[[], Collection[PeerId]]:
        return lambda: [each.me for each in some if each.me != me]

    return [asyncio.create_task(each.exchange.spread(live(each.me))) for each in some]


async def test_revoked_peers_streams_end_at_all_connected_within_two_seconds(swarm: Swarm) -> None:
    guest = swarm.carl  # bert's guest: it goes with him
    for one in swarm.members:
        for other in swarm.members:
            if one is not other:
                assert await one.gets(other, "starling/sync/1")
    dora = swarm.fred
    dora.enter(swarm.anna, Pass((swarm.anna.link(dora, 3),)))
    ended: list[str] = []
    tasks = [await held(one, other, ended) for one in (swarm.bert, guest) for other in (swarm.anna, dora)]
    tasks += [await held(dora, swarm.bert, ended), await held(dora, swarm.anna, [])]
    loops = spread((swarm.anna, dora, swarm.bert, guest))
    began = loop_time()
    await swarm.anna.exchange.revoke(swarm.anna.revokes(swarm.bert))
    await until(lambda: len(ended) == 5)
    assert loop_time() - began < 2.0
    assert not tasks[-1].done() and dora.saved and swarm.anna.saved
    for gone in (swarm.bert, guest):
        for member in (swarm.anna, dora):
            assert not await gone.gets(member, "starling/sync/1") and not await member.gets(gone, HELLO)
        assert gone.barred[0].subject == swarm.bert.key
    for task in (*tasks, *loops):
        task.cancel()
    await asyncio.gather(*tasks, *loops, return_exceptions=True)


async def test_only_removals_by_the_founder_are_for_good(swarm: Swarm) -> None:
    """The others may come back with a pass from another member, so peers must not count them as gone."""
    anna, bert, carl = swarm.members
    await bert.exchange.revoke(bert.revokes(carl))
    assert bert.exchange.why_not(carl.me, swarm.of_carl) and not bert.exchange.has_removed(carl.me)
    again = Pass((anna.link(carl, 3),))
    assert not bert.exchange.why_not(carl.me, again)
    await bert.exchange.revoke(anna.revokes(bert))
    assert bert.exchange.has_removed(bert.me) and not bert.exchange.has_removed(carl.me), "his guest"
    await bert.exchange.revoke(anna.revokes(carl))
    assert bert.exchange.has_removed(carl.me) and bert.exchange.why_not(carl.me, again)
    assert not bert.exchange.has_removed("no id"), "rosters come from others"


async def test_revocations_are_caught_up_on_when_two_sides_meet(swarm: Swarm) -> None:
    anna, dora, bert = swarm.anna, swarm.fred, swarm.bert
    dora.enter(anna, Pass((anna.link(dora, 3),)))
    assert await dora.gets(anna, HELLO) and await bert.gets(dora, HELLO)
    swarm.network.cut.add(frozenset((anna.me, dora.me)))
    loops = spread((anna, dora))
    await anna.exchange.revoke(anna.revokes(bert))
    await asyncio.sleep(0.1)
    assert await bert.gets(dora, HELLO), "dora has not heard of it"
    swarm.network.cut.clear()
    began = loop_time()
    await until(lambda: dora.exchange.revoked.digest == anna.exchange.revoked.digest)
    assert loop_time() - began < 2.0
    assert not await bert.gets(dora, HELLO)
    for task in loops:
        task.cancel()
    await asyncio.gather(*loops, return_exceptions=True)


async def test_greeting_alone_makes_the_revocations_of_both_the_same(swarm: Swarm) -> None:
    assert await swarm.carl.gets(swarm.anna, "starling/sync/1")
    await swarm.anna.exchange.revoke(swarm.anna.revokes(swarm.eve))
    await swarm.carl.exchange.revoke(swarm.bert.revokes(swarm.fred))
    await swarm.carl.gets(swarm.anna, "starling/sync/1")
    assert swarm.carl.exchange.revoked.digest != swarm.anna.exchange.revoked.digest
    await swarm.carl.gets(swarm.anna, HELLO)
    assert swarm.carl.exchange.revoked.digest == swarm.anna.exchange.revoked.digest


async def test_clocks_that_differ_lose_no_member(swarm: Swarm) -> None:
    swarm.anna.now, swarm.bert.now = NOW - 600.0, NOW + 600.0
    assert await swarm.bert.gets(swarm.anna, HELLO) and await swarm.anna.gets(swarm.bert, HELLO)


async def test_only_a_genuine_revocation_makes_a_peer_leave(swarm: Swarm) -> None:
    """A peer that refuses another may lie about why."""
    liar = swarm.eve
    liar.exchange.open()
    forged = revoke(liar.identity.sign, swarm.anna.key, swarm.bert.key, run=RUN, time=NOW)
    own = liar.revokes(swarm.bert)
    for lie in (forged, own):

        async def refuse(peer: PeerId, stream: Stream, lie: Revocation = lie) -> None:
            await stream.receive(1 << 16)
            await stream.send(PassRefused("you are out", (lie,)))

        liar.transport.serving._handlers[PASS_METHOD] = refuse
        liar.exchange.is_closed = True
        with suppress(PeerError, BadPayload):
            await swarm.bert.gets(liar, HELLO)
    assert not swarm.bert.barred and swarm.bert.exchange.revoked.digest == swarm.anna.exchange.revoked.digest
