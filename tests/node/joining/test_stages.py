"""Which stage a joiner gets: no stage ever has two first members, and no stranger gives or takes a seat."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from node.joining.stages import SEAT_SECONDS, Seats, StageAssigner, seat_of, seats_of, seats_to_bytes
from node.membership.hello import ANY_STAGE, NO_STAGE, Hello, StageRejected, StageReply, StageSeat, WantStage
from protocols.base import BadPayload, Member, PeerGone
from tests.sim.host import SimSigner
from tests.support.simulated import on_virtual_time
from tests.support.variants import variants

FOUNDER = Member("founder")
STAGES = 3
MANIFEST: Any = SimpleNamespace(stages=(None,) * STAGES, run_id=bytes(32).hex(), founder=FOUNDER)


def give(seats: Seats, stage: int, member: Member) -> StageSeat:
    """Make a member the first of a stage, as the founder does."""
    seat = seats.make(stage, member)
    seats.add([seat])
    return seat


def greeting(name: str, stage: int, *seats: StageSeat) -> Hello:
    return Hello(2, bytes(32), Member(name), 1, name, (), stage, seats, b"")


class Peers:
    """A membership of the peers that a test names, and the founder's disk."""

    def __init__(self, me: Member = FOUNDER) -> None:
        self.me, self.kept = me, b""
        self.seats = Seats(MANIFEST, SimSigner(me.peer, 0))
        if me == FOUNDER:
            give(self.seats, 0, FOUNDER)
        self.here: list[Any] = []
        membership: Any = SimpleNamespace(
            contacts=lambda: self.here, live=lambda: (me, *(each.member for each in self.here)), stage_of=lambda peer: 0
        )
        self.assigner = StageAssigner(me, MANIFEST, self.seats, membership, self, self.keep)  # type: ignore[arg-type]

    def open(self, peer: str, method: str, deadline: float) -> Any:
        raise PeerGone(peer, "it sleeps")

    def meet(self, name: str, stage: int, rate: float = 0.0, seats: tuple[StageSeat, ...] = ()) -> None:
        hello, said = SimpleNamespace(seats=seats), SimpleNamespace(rate=rate)
        self.here.append(
            SimpleNamespace(peer=name, member=Member(name), stage=stage, said=said, hello=hello, live=True)
        )

    async def keep(self, seats: Iterable[StageSeat]) -> None:
        await asyncio.sleep(0.1)
        self.kept = seats_to_bytes(seats)

    async def ask(self, name: str, wanted: int = ANY_STAGE, by: str = "") -> StageReply | StageRejected:
        return await self.assigner.assign(by or name, WantStage(Member(name), wanted))

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
async def test_joiner_that_never_comes_loses_its_seat_to_the_next() -> None:
    """It lacked memory, or was a stranger. If it comes after all, with its old seat, nobody greets it."""
    founder, other = Peers(), Peers(Member("other"))
    assert await founder.stage("a") == 1 and await founder.stage("b") == 2
    answer = await founder.ask("a", wanted=2)
    assert isinstance(answer, StageReply) and answer.stage == 2, "it may help the first one of stage 2"
    first = founder.seats.known[1]
    founder.seats.judge(greeting("b", 2, founder.seats.known[2]))
    assert await founder.stage("c", 1) == 1 and founder.seats.known[1] == first, "a has some time left"
    await asyncio.sleep(SEAT_SECONDS + 1.0)
    assert isinstance(await founder.ask("b", wanted=1), StageRejected), "one peer is the first of one stage"
    assert await founder.stage("c") == 1 and founder.seats.known[1].member == Member("c")
    assert founder.seats.known[2].member == Member("b")
    founder.seats.judge(greeting("c", 1, founder.seats.known[1]))
    other.seats.add([first, founder.seats.known[1], first])
    for each in (founder, other):
        with pytest.raises(BadPayload, match="another one by now"):
            each.seats.judge(greeting("a", 1, first))
    await asyncio.sleep(SEAT_SECONDS + 1.0)
    await founder.stage("d", 1)
    assert founder.seats.known[1].member == Member("c"), "it came, and may be away for long"


def test_greetings_without_the_own_stages_seat_are_refused() -> None:
    founder = Peers()
    seat = give(founder.seats, 1, Member("a"))
    for hello in (greeting("a", 2, seat), greeting("a", 1), greeting("a", 1, replace(seat, member=Member("x")))):
        with pytest.raises(BadPayload):
            founder.seats.judge(hello)
    founder.seats.judge(greeting("x", 1, seat))
    assert not founder.seats.came


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


def test_seats_that_the_founder_has_not_signed_are_refused() -> None:
    founder, other = Peers(), Peers(Member("other"))
    genuine = give(founder.seats, 1, Member("a"))
    other.seats.add([genuine])
    forged = (*variants(genuine), Peers(Member("mallory")).seats.make(2, Member("mallory")))
    for seat in forged:
        with pytest.raises(BadPayload, match="has not signed"):
            other.seats.add([seat])
    assert other.seats.known == {1: genuine} and other.seats.missing == (0, 2)


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
    assert isinstance(answer, StageRejected) and "founder is away" in answer.why
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
