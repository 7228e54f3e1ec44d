"""Which stage a joiner gets: no stage ever has two first members, and no stranger gives or takes a seat."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable
from dataclasses import replace
from itertools import permutations
from types import SimpleNamespace
from typing import Any, cast

import pytest

from node.joining.stages import FOUNDER_SECONDS, INTENT_SECONDS, SEAT_SECONDS, UPDATE, StageAssigner
from node.membership.hello import (
    ANY_STAGE,
    NO_STAGE,
    UNPLACED,
    VERSION,
    Hello,
    StageRejected,
    StageReply,
    StageSeat,
    StageTeam,
    WantStage,
    WantStageBefore,
)
from node.membership.peer_record import NOTHING_SAID, PeerRecord
from node.membership.seats import Seats, seat_of, seats_of, seats_to_bytes
from node.outer.activity import Activity
from protocols.aio import loop_time
from protocols.base import BadPayload, Member, PeerGone, Transport
from tests.sim.host import SimSigner
from tests.support.simulated import on_virtual_time
from tests.support.variants import variants

FOUNDER = Member("founder")
STAGES = 3
MANIFEST: Any = SimpleNamespace(stages=(None,) * STAGES, costs=(1.0,) * STAGES, run_id=bytes(32).hex(), founder=FOUNDER)


def give(seats: Seats, stage: int, member: Member, by: StageSeat | None = None) -> StageSeat:
    """Make a member the first of a stage, as the founder or the member of another seat does."""
    seat = seats.make(stage, member, by)
    seats.add([seat])
    return seat


def greeting(name: str, stage: int, *seats: StageSeat) -> Hello:
    return Hello(VERSION, bytes(32), Member(name), 1, name, (), stage, seats, b"")


class Peers:
    """A membership of the peers that a test names, and the founder's disk."""

    def __init__(self, me: Member = FOUNDER) -> None:
        self.me, self.kept = me, b""
        self.seats = Seats(MANIFEST, SimSigner(me.peer, 0))
        if me == FOUNDER:
            give(self.seats, 0, FOUNDER)
        self.here: list[Any] = []
        self.has_begun = False
        membership: Any = SimpleNamespace(
            contacts=lambda: self.here,
            contact=lambda peer: next((each for each in self.here if each.peer == peer), None),
            live=lambda: (me, *(each.member for each in self.here if each.live)),
            stage_of=lambda peer: 0,
            pulse=lambda: NOTHING_SAID,
        )
        has_begun = lambda: self.has_begun  # noqa: E731
        transport = cast("Transport", self)  # of which it only opens streams
        self.assigner = StageAssigner(me, self.seats, membership, transport, keep=self.keep, has_begun=has_begun)

    def open(self, peer: str, method: str, deadline: float) -> Any:
        raise PeerGone(peer, "it sleeps")

    def meet(self, name: str, stage: int, rate: float = 0.0, seats: tuple[StageSeat, ...] = ()) -> None:
        said = replace(NOTHING_SAID, rate=rate)
        self.here.append(PeerRecord(name, hello=greeting(name, stage, *seats), said=said, live=True))

    async def keep(self, seats: Iterable[StageSeat]) -> None:
        await asyncio.sleep(0.1)
        self.kept = seats_to_bytes(seats)

    async def ask(self, name: str, wanted: int = ANY_STAGE, by: str = "") -> StageReply | StageRejected:
        return await self.assigner.assign(by or name, WantStage(VERSION, Member(name), wanted))

    async def stage(self, name: str, wanted: int = ANY_STAGE) -> int:
        answer = await self.ask(name, wanted)
        assert isinstance(answer, StageReply)
        return answer.stage


@on_virtual_time
async def test_each_stage_gets_one_first_member_and_its_seat_is_on_the_disk_first() -> None:
    """Four joiners at once; then the first of them asks again, and one wants a stage that has its first member."""
    founder = Peers()
    answers = await asyncio.gather(*(founder.ask(name) for name in "abcd"))
    seated = {seat.stage: seat.member.peer for seat in seats_of(founder.kept)}
    assert seated == {0: "founder", 1: "a", 2: "b"}
    for answer in answers:
        assert isinstance(answer, StageReply) and answer.stage in {each.stage for each in answer.seats}
    assert await founder.stage("a") == 1 and await founder.stage("e", wanted=2) == 2
    assert founder.seats.known[2].member.peer == "b"


@on_virtual_time
async def test_restarted_founder_gives_no_seat_at_first() -> None:
    """Others may have given that seat while it was away, and have had no time to tell it."""
    founder = Peers(replace(FOUNDER, incarnation=FOUNDER.incarnation + 1))
    give(founder.seats, 0, FOUNDER)
    assert isinstance(await founder.ask("a"), StageRejected) and not founder.kept
    await asyncio.sleep(FOUNDER_SECONDS)
    assert await founder.stage("a") == 1


@on_virtual_time
async def test_joiner_that_never_comes_loses_its_seat_to_the_next() -> None:
    """It lacked memory, or was a stranger. If it comes after all, with its old seat, it is refused, and told why."""
    founder, other = Peers(), Peers(Member("other"))
    assert await founder.stage("a") == 1 and await founder.stage("b") == 2
    answer = await founder.ask("a", wanted=2)
    assert isinstance(answer, StageReply) and answer.stage == 2, "it may help the first one of stage 2"
    first = founder.seats.known[1]
    founder.meet("b", 2, seats=(founder.seats.known[2],))
    assert await founder.stage("c", 1) == 1 and founder.seats.known[1] == first, "a has some time left"
    await asyncio.sleep(SEAT_SECONDS + 1.0)
    assert isinstance(await founder.ask("b", wanted=1), StageRejected), "one peer is the first of one stage"
    assert await founder.stage("c") == 1 and founder.seats.known[1].member == Member("c")
    assert founder.seats.known[2].member == Member("b")
    other.seats.add([first, founder.seats.known[1], first])
    for each in (founder, other):
        with pytest.raises(BadPayload, match="another one by now"):
            each.seats.judge(greeting("a", 1, first))


@on_virtual_time
async def test_no_seat_is_given_again_once_the_run_has_begun() -> None:
    """By this peer's rounds, or by the word of the seat's member. Until then nothing is lost."""
    for late in ("unheard", "heard", "used", "begun"):
        founder = Peers()
        seat = give(founder.seats, 1, Member("a"))
        if late == "heard":
            founder.seats.hear("b", (seat,))
            assert not founder.seats.is_final(seat), "not its member"
            founder.seats.hear("a", (seat,))
        if late == "used":
            founder.seats.add(Peers(Member("a")).seats.begun("a", (seat,)))
        founder.has_begun = late == "begun"
        await founder.ask("b", 2)
        await asyncio.sleep(SEAT_SECONDS + 1.0)
        assert await founder.stage("c", 1) == 1
        assert founder.seats.known[1].member == Member("c" if late == "unheard" else "a"), late


@on_virtual_time
async def test_first_member_of_the_lowest_stage_gives_seats_without_the_founder() -> None:
    """Not before the founder has been away for long, nor if a lower stage has a live first member."""
    here, there = Peers(Member("a")), Peers(Member("b"))
    founder = Seats(MANIFEST, SimSigner("founder", 0))
    seats = [give(founder, 0, FOUNDER), give(founder, 1, Member("a"))]
    here.seats.add(seats)
    there.seats.add([*seats, give(founder, 2, Member("b"))])
    there.meet("a", 1, seats=(seats[1],))
    answer = await here.ask("c")
    assert isinstance(answer, StageRejected) and "away" in answer.why
    assert there.assigner.needed() == ()
    await asyncio.sleep(FOUNDER_SECONDS + 1.0)
    assert await here.stage("c") == 2 and seats_of(here.kept)[0].member == Member("c"), "on the disk first"
    given = here.seats.line(2)
    assert given == (here.seats.known[2], seats[1])
    assert await here.stage("d") == 0 and here.seats.known[0].number == 1, "nothing was trained"
    assert isinstance(await there.ask("e", 0), StageRejected), "a is to give it, and cannot be reached"
    there.seats.judge(greeting("d", 0, *here.seats.line(0)))
    assert there.seats.known[0].member == Member("d")
    there.seats.add(given)
    assert there.seats.known[2].member == Member("b"), "of two with the same number, the one with the shorter line"


def test_greetings_without_the_own_stages_seat_are_refused() -> None:
    seats = Seats(MANIFEST, SimSigner("founder", 0))
    seat = give(seats, 1, Member("a"))
    for hello in (greeting("a", 2, seat), greeting("a", 1), greeting("a", 1, replace(seat, member=Member("x")))):
        with pytest.raises(BadPayload):
            seats.judge(hello)
    seats.judge(greeting("x", 1, seat))


@on_virtual_time
async def test_weakest_stage_gets_the_next_joiner() -> None:
    """By rates; a peer whose rate is not known counts as a usual one, as does one that was assigned just now."""
    founder = Peers()
    for name, stage, rate in (("a", 1, 8.0), ("b", 2, 2.0), ("c", 1, 2.0)):
        await founder.stage(name, stage)
        founder.meet(name, stage, rate)
    assert await founder.stage("d") == 0, "its only peer is a usual one, of 2; ties go to the lower stage"
    assert await founder.stage("e") == 2
    assert await founder.stage("f") == 0
    await asyncio.sleep(70.0)
    assert await founder.stage("g") == 0, "d, e and f never came"


@on_virtual_time
async def test_joiner_is_placed_by_who_works_and_where_they_go() -> None:
    founder = Peers()
    for name, stage in (("a", 1), ("b", 2), ("c", 0), ("d", 2)):
        await founder.stage(name, stage)
        founder.meet(name, stage, 2.0)
    await asyncio.sleep(70.0)
    assert await founder.stage("e") == 1
    await asyncio.sleep(70.0)
    said = founder.here[3].said
    founder.here[3].said = replace(said, idle=Activity.REST)
    founder.meet("f", 1, 2.0)
    assert await founder.stage("g") == 2, "d rests, and computes nothing for its stage"
    await asyncio.sleep(70.0)
    founder.here[3].hear(replace(said, placement=(replace(UNPLACED, moving=0),)), loop_time())
    founder.here[4].hear(replace(said, placement=(replace(UNPLACED, moving=2),)), loop_time())
    assert await founder.stage("h") == 1, "f is about to leave it"
    await asyncio.sleep(INTENT_SECONDS)
    founder.meet("i", 0, 2.0)
    founder.meet("j", 2, 2.0)
    assert await founder.stage("k") == 1, "f has not gone for so long that it counts in stage 1 again"


@on_virtual_time
async def test_joiner_of_a_large_run_is_placed_by_what_peers_say_of_their_stages() -> None:
    """The founder sees three peers of each stage. One of three may say what it likes."""
    founder = Peers()
    for stage, team in ((1, StageTeam(20, 60.0)), (2, StageTeam(40, 30.0))):
        await founder.stage(f"first of {stage}", stage)
        for number in range(3):
            founder.meet(f"{stage}/{number}", stage, 2.0)
            founder.here[-1].team, founder.here[-1].team_at = team, math.inf
    for number in range(32):
        founder.meet(f"0/{number}", 0, 2.0)
    founder.has_begun = True
    await asyncio.sleep(70.0)
    assert await founder.stage("a") == 2, "40 peers there compute less than 20 of stage 1"
    await asyncio.sleep(70.0)
    founder.here[3].team = StageTeam(64, 1e9)
    assert await founder.stage("b") == 2
    await asyncio.sleep(70.0)
    for each in founder.here[:3]:
        each.team_at = loop_time() - 20.0
    assert await founder.stage("c") == 1, "what its peers have said is old: the three that are seen count"


def signer(name: str) -> Seats:
    return Seats(MANIFEST, SimSigner(name, 0))


def test_seats_that_neither_founder_nor_first_member_has_signed_are_refused() -> None:
    """Also one that a first member has signed, without its own seat; and a line of more seats than stages."""
    founder, other = signer("founder"), signer("other")
    genuine = give(founder, 1, Member("a"))
    other.add([genuine])
    used = signer("a").begun("a", (genuine,))[0]
    delegated = signer("a").make(2, Member("b"), genuine)
    loop = signer("b").make(0, Member("c"), delegated)
    forged = [
        *variants(genuine),
        signer("mallory").make(2, Member("mallory")),
        signer("b").make(2, Member("b"), genuine),
    ]
    forged += [replace(genuine, used=b"x"), replace(used, used=signer("b").begun("b", (genuine,))[0].signature)]
    forged += [replace(delegated, by=bytes(32)), signer("c").make(1, Member("d"), loop)]
    for seat in forged:
        with pytest.raises(BadPayload, match="has signed"):
            other.add([seat])
    assert other.known == {1: genuine} and other.missing == (0, 2)
    with pytest.raises(BadPayload, match="has signed"):
        signer("x").add([delegated])
    longest = [genuine, delegated, loop, signer("c").make(1, Member("d"), loop)]
    with pytest.raises(BadPayload, match="has signed"):
        other.add(longest)
    other.add(reversed(longest[:3]))
    assert other.line(0) == (loop, delegated, genuine) and set(other.told()) == {genuine, delegated, loop}


def renumbered(name: str, seat: StageSeat, number: int) -> StageSeat:
    seat = replace(seat, number=number)
    return replace(seat, signature=SimSigner(name, 0).sign(signer(name)._signed(seat)))


def test_all_orders_of_seats_end_with_the_same_one() -> None:
    """The higher number counts, else the shorter line. Once a seat is used, no other one of its stage counts."""
    founder, a, b = signer("founder"), signer("a"), signer("b")
    first = give(founder, 1, Member("a"))
    second = a.make(0, Member("b"), first)
    x, y, z = founder.make(2, Member("x")), a.make(2, Member("y"), first), b.make(2, Member("z"), second)
    lines = [(x,), (y, first), (z, second, first)]
    higher = renumbered("b", z, 5), second, first
    for some, winner in ((lines, x), (lines[1:], y), ([*lines, higher], higher[0])):
        for order in permutations(some):
            seen = signer("seen")
            for line in order:
                seen.add(line)
            assert seen.known[2] == winner
    seen.add(signer("x").begun("x", (x,)))
    assert seen.known[2].member == Member("x") and not seen.counts(higher[0])
    seen.add([renumbered("a", y, 9)])
    seen.add(signer("z").begun("z", higher))
    assert seen.known[2].member == Member("x"), "it was used first, as far as this peer knows"


@on_virtual_time
async def test_joiners_of_an_older_protocol_are_told_to_update() -> None:
    founder = Peers()
    for request in (WantStageBefore(Member("a"), ANY_STAGE), WantStage(VERSION + 1, Member("a"), ANY_STAGE)):
        assert await founder.assigner.assign("a", request) == StageRejected(UPDATE)
    assert founder.seats.missing == (1, 2)


def test_seats_of_an_older_state_directory_are_the_founders() -> None:
    seats = signer("founder")
    seat = give(seats, 1, Member("a"))
    kept = seats_to_bytes([seat])
    assert b"by" not in kept and b"used" not in kept and seats_of(kept) == (seat,)


@on_virtual_time
async def test_only_live_peers_ask_for_others() -> None:
    founder = Peers()
    with pytest.raises(BadPayload, match="in the name of a"):
        await founder.ask("a", by="mallory")
    assert founder.seats.missing == (1, 2)
    founder.meet("relay", 0)
    assert isinstance(await founder.ask("a", by="relay"), StageReply)


@on_virtual_time
async def test_without_the_founder_others_answer_once_they_know_all_seats() -> None:
    founder, other = Peers(), Peers(Member("other"))
    answer = await other.ask("x")
    assert isinstance(answer, StageRejected) and "is away" in answer.why
    answer = await other.ask("x", wanted=3)
    assert answer == StageRejected("the run has the stages 0 to 2, and no stage 3")
    seats = [founder.seats.known[0], give(founder.seats, 1, Member("a")), give(founder.seats, 2, Member("b"))]
    for seat in seats:
        other.meet(seat.member.peer, seat.stage, 1.0, (seat,))
    answer = await other.ask("x")
    assert isinstance(answer, StageReply) and answer.stage == 1 and set(answer.seats) == set(seats)


@on_virtual_time
async def test_seats_are_told_to_strangers_without_effect() -> None:
    founder, other = Peers(), Peers(Member("other"))
    assert await other.ask("stranger", NO_STAGE) == StageReply(0, ()), "it is not passed on to the founder"
    assert await founder.ask("stranger", NO_STAGE) == StageReply(0, (founder.seats.known[0],))
    assert founder.seats.missing == (1, 2) and not founder.kept and not founder.assigner._reserved
    seats = [founder.seats.known[0], give(founder.seats, 1, Member("a")), give(founder.seats, 2, Member("b"))]
    other.seats.add(seats[:1])
    other.meet("a", 1, 1.0, (seats[1],))
    other.meet("mallory", 2, 1.0, (replace(seats[2], member=Member("mallory")),))
    other.meet("b", 2, 1.0, (seats[2],))
    assert await other.ask("stranger", NO_STAGE) == StageReply(0, tuple(seats))
    with pytest.raises(BadPayload, match="in the name of stranger"):
        await other.ask("stranger", NO_STAGE, by="another")


@pytest.mark.parametrize("data", (b"", b"{", b"[]", b'{"stage": 1}', b"\xff"))
def test_damaged_stage_is_none(data: bytes) -> None:
    assert seat_of(data) is None
