"""One round of a peer that shares no anchor, with a session that follows a script."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import cast

import pytest
import torch

from node.outer import OuterSGD
from node.report import RoundReport
from node.rounds import labour
from node.rounds.course import OwnCourse
from node.rounds.loose import LooseReplica
from node.rounds.sketch import Sketch, sketch
from node.training.trainer import InlineTrainer, Step
from protocols.base import Contribution, Deadline, Head, Layout, Mean, Member, Outcome, PeerId, RoundKey, Vector, Work
from protocols.catchup.snapshot import Anonymous, Index, Room, Snapshot, Snapshots, room_bytes
from protocols.catchup.standing import Order, Standings
from protocols.post import Ledger
from tests.sim import loop as simloop
from tests.sim.host import SimClock, SimCompute

ME = Member("anna", 2)
KEY = RoundKey(b"r" * 32, "run", bytes(32), 0)
ELEMENTS, STEPS, STEP = 10, 4, 0.125
OUTER = OuterSGD(0.5, 0.5)  # sums of eighths stay exact
FROM_BERT = {"bert": Contribution(1, 1, ("bert/7",))}


class Slope:
    """A `Learner` that moves every element down by an eighth at each step."""

    def __init__(self) -> None:
        self.layout = Layout(((("slope", (ELEMENTS,)),),))
        self.vectors: tuple[Vector, ...] = (torch.ones(ELEMENTS),)
        self.step_size = STEP

    def step(self, round_number: int, step: int) -> Step:
        self.vectors[0].sub_(self.step_size)
        return Step(2.5, 100)

    def moments(self, make: bool = False) -> dict[str, torch.Tensor]:
        return {}

    def evaluate(self) -> float:
        return 0.0


@dataclass
class Script:
    """What becomes of one round.

    Attributes:
        meanwhile: what others do to the state while it is lent; returns of whom it holds something.
        average: what the others make of ours; None: nobody is there.
        rounds: by how many the others are ahead.
        hurried: they call the round after this peer's first step.
    """

    meanwhile: Callable[[Sequence[Vector]], Mapping[PeerId, Contribution]] = lambda state: {}
    average: Callable[[Sequence[Vector], Sequence[Vector]], object] | None = None
    rounds: int = 0
    hurried: bool = False


@dataclass
class Scripted:
    """An averager, and each of its sessions."""

    scripts: list[Script]
    me: Member = ME
    shares_anchor: bool = False
    heads: list[Head] = field(default_factory=list)
    works: list[Work] = field(default_factory=list)
    brought: list[list[Vector]] = field(default_factory=list)
    limits_seconds: list[float] = field(default_factory=list)

    @asynccontextmanager
    async def enter(self, head: Head, deadline: Deadline) -> AsyncIterator[Session]:
        loop = asyncio.get_running_loop()
        assert deadline > loop.time()
        self.limits_seconds.append(deadline - loop.time())
        self.heads.append(head)
        session = Session(self, self.scripts.pop(0), head.key.round)
        late = loop.call_at(deadline, session.cut.set)
        yield session
        late.cancel()


class Session:
    def __init__(self, averager: Scripted, script: Script, number: int) -> None:
        self.cut, self.round, self.group = asyncio.Event(), number + script.rounds, "g" * script.rounds
        self.half_exchanges, self.mass_drift = 2, 0.25
        self._averager, self._script = averager, script
        self._lent: Sequence[Vector] = ()

    def ready(self, work: Work) -> None:
        if work.complete or (self._script.hurried and work.tokens):
            self.cut.set()

    def awaited(self) -> tuple[PeerId, ...]:
        return ()

    def lend(self, state: Sequence[Vector]) -> None:
        self._lent = state

    async def take_back(self) -> Mapping[PeerId, Contribution]:
        assert self.cut.is_set(), "it is lent for as long as its peer trains"
        lent, self._lent = self._lent, ()
        return self._script.meanwhile(lent)

    async def mean(self, mine: Sequence[Vector], work: Work, into: Sequence[Vector]) -> Mean:
        self._averager.works.append(work)
        self._averager.brought.append([each.clone() for each in mine])
        if self._script.average is None:
            for each in into:
                each.fill_(math.nan)  # undefined
            return Mean(Outcome.SKIPPED)
        self._script.average(mine, into)
        return Mean(Outcome.COMMITTED, contributions={"cora": Contribution(1, 1, ("cora/1",))}, bytes_sent=7)


class Peer:
    """A replica, and what it is made of."""

    def __init__(self, *scripts: Script, snapshots: Snapshots | None = None) -> None:
        self.learner = Slope()
        self.trainer = InlineTrainer(self.learner, STEPS, 0.5)
        self.averager = Scripted(list(scripts))
        course, anchor = OwnCourse(ME, KEY), torch.ones(ELEMENTS)
        self.replica = LooseReplica(course, self.trainer, self.averager, OUTER, SimCompute(), anchor, snapshots)

    def play(self, rounds: int = 1) -> list[RoundReport]:
        async def main() -> list[RoundReport]:
            await self.replica.settle()
            return [await self.replica.run_round(SimClock().wall) for _ in range(rounds)]

        return simloop.run(main())


def stepped(rounds: int, start: float = 1.0) -> tuple[float, float]:
    """Parameters and momentum after so many rounds alone."""
    theta, velocity = torch.full((1,), start), torch.zeros(1)
    for _ in range(rounds):
        OUTER.step(theta, velocity, torch.full((1,), STEPS * STEP))
    return float(theta), float(velocity)


def holds(vector: Vector, value: float) -> bool:
    return bool((vector == value).all())


def half(mine: Sequence[Vector], into: Sequence[Vector]) -> None:
    """A partner that stands at zero."""
    for source, target in zip(mine, into, strict=True):
        torch.mul(source, 0.5, out=target)


def test_without_others_a_peer_goes_on_by_itself() -> None:
    peer = Peer(Script(), Script())
    first, second = peer.play(2)
    theta, velocity = stepped(2)
    assert holds(peer.replica.anchor, theta) and holds(peer.replica.velocity, velocity)
    assert [first.outcome, second.outcome] == ["skipped", "skipped"]
    assert holds(peer.learner.vectors[0], theta), "it trains on from there"
    assert (first.peers, first.spread, first.tokens) == ((), 0.0, 400)


def test_its_chain_is_that_of_its_own_states() -> None:
    peer = Peer(Script(), Script(average=half))
    first, second = peer.play(2)
    assert [first.round, second.round] == [0, 1]
    assert second.parent == first.lineage != first.parent
    assert second.lineage == peer.replica.key.lineage.hex() == peer.replica.state.root(2).hex()
    assert [head.roster for head in peer.averager.heads] == [(ME,), (ME,)]


def test_what_is_brought_is_the_state_after_its_own_step_and_what_comes_of_it_is_its_state() -> None:
    peer = Peer(Script(average=half))
    (report,) = peer.play()
    theta, velocity = stepped(1)
    brought = peer.averager.brought[0]
    assert holds(brought[0], theta) and holds(brought[1], velocity)
    assert holds(peer.replica.anchor, theta / 2) and holds(peer.replica.velocity, velocity / 2)
    assert holds(peer.learner.vectors[0], theta / 2)
    assert (report.outcome, report.peers, report.messages) == ("committed", ("cora",), ("cora/1",))
    assert (report.half_exchanges, report.mass_drift, report.bytes_sent) == (2, 0.25, 7)


def test_an_exchange_while_it_trains_loses_none_of_its_work() -> None:
    def meanwhile(state: Sequence[Vector]) -> Mapping[PeerId, Contribution]:
        state[0].add_(1.0)
        state[1].add_(0.25)
        return FROM_BERT

    peer = Peer(Script(meanwhile))
    (report,) = peer.play()
    theta, velocity = torch.full((1,), 2.0), torch.full((1,), 0.25)
    OUTER.step(theta, velocity, torch.full((1,), STEPS * STEP))  # the same work, from the state as it is now
    assert holds(peer.replica.anchor, float(theta)) and holds(peer.replica.velocity, float(velocity))
    assert (report.outcome, report.peers, report.messages) == ("committed", ("bert",), ("bert/7",))


def test_both_kinds_of_exchange_are_told() -> None:
    (report,) = Peer(Script(lambda state: FROM_BERT, half)).play()
    assert report.peers == ("cora", "bert") and report.messages == ("cora/1", "bert/7")
    assert {lineage for lineage, *_ in report.contributions.values()} == {""}, "what their states were is not known"


def test_it_jumps_to_the_round_in_which_the_others_are() -> None:
    peer = Peer(Script(average=half, rounds=3), Script())
    first, second = peer.play(2)
    assert (first.round, first.group, second.round) == (3, "ggg", 4)
    assert second.parent == first.lineage


@pytest.mark.parametrize("step_size", [math.nan, math.inf, 3e38])
def test_work_that_diverged_is_left_out(step_size: float) -> None:
    peer = Peer(Script())
    peer.learner.step_size = step_size
    (report,) = peer.play()
    assert holds(peer.replica.anchor, 1.0) and holds(peer.learner.vectors[0], 1.0)
    assert report.finite and "not finite" in report.blamed["anna"]
    assert peer.averager.works[0].tokens == 0


def test_a_mean_that_is_not_finite_is_not_taken() -> None:
    peer = Peer(Script(average=lambda mine, into: [each.fill_(math.inf) for each in into]))
    (report,) = peer.play()
    assert holds(peer.replica.anchor, stepped(1)[0])
    assert (report.outcome, report.messages) == ("skipped", ()) and "not finite" in report.blamed["anna"]
    assert report.half_exchanges == 2 + 1, "the others have moved"


def test_a_step_that_leads_nowhere_takes_back_what_came_in_while_it_trained() -> None:
    def meanwhile(state: Sequence[Vector]) -> Mapping[PeerId, Contribution]:
        state[0].fill_(-3.4e38)  # finite, and too large for one more step
        state[1].fill_(3.4e38)
        return FROM_BERT

    peer = Peer(Script(meanwhile))
    (report,) = peer.play()
    assert holds(peer.replica.anchor, 1.0)
    assert (report.outcome, report.messages) == ("skipped", ()) and "not finite" in report.blamed["anna"]
    assert report.half_exchanges == 2 + 1, "bert has moved"


def test_the_spread_is_told_by_the_sketches_of_those_who_are_here() -> None:
    peer, seen = Peer(Script()), []

    def compare(mine: Sketch) -> Mapping[PeerId, Sketch]:
        seen.append(mine)
        return {"bert": tuple(3 * each for each in mine)}

    peer.replica.compare = compare
    (report,) = peer.play()
    assert seen == [sketch(peer.replica.anchor, KEY.run)]
    assert report.spread == pytest.approx(0.5)


def test_who_leaves_hands_in_what_there_is() -> None:
    peer = Peer(Script(average=half))

    async def main() -> RoundReport:
        await peer.replica.settle()
        asyncio.get_running_loop().call_later(0.7, peer.replica.leave)
        return await peer.replica.run_round(SimClock().wall)

    report = simloop.run(main())
    assert peer.averager.works[0].leaving and report.tokens == 200


def test_snapshots_are_kept_by_its_own_rounds() -> None:
    snapshots = Snapshots(every_rounds=2)
    peer = Peer(Script(), Script(), snapshots=snapshots)
    _, second = peer.play(2)
    newest = snapshots.held()[0]
    assert (newest.round, newest.lineage.hex()) == (2, second.lineage)
    assert newest.index.state_root(2) == newest.lineage


def test_who_jumps_over_the_round_in_which_a_snapshot_is_due_keeps_one_behind_it() -> None:
    snapshots = Snapshots(every_rounds=5)
    peer = Peer(Script(average=half, rounds=2), Script(average=half, rounds=3), Script(), Script(), snapshots=snapshots)
    peer.play(4)
    assert [each.round for each in snapshots.held()] == [7, 0]


def test_it_starts_from_a_state_that_was_kept() -> None:
    snapshots = Snapshots(every_rounds=1)
    former = Peer(Script(average=half), snapshots=snapshots)
    (report,) = former.play()
    peer = Peer(Script())

    async def main() -> RoundReport:
        await peer.replica.start_from(snapshots.held()[0])
        await peer.replica.settle()
        return await peer.replica.run_round(SimClock().wall)

    again = simloop.run(main())
    assert (again.parent, again.round) == (report.lineage, 1)
    theta, _ = stepped(1)
    assert not holds(peer.replica.anchor, theta)


# -- how long a round may take ----------------------------------------------------------------------------------------


def test_a_round_that_others_cut_short_is_no_measure_of_a_whole_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else who joins at the end of a round is cut in each of its own, with no time left to mix, for ever."""
    monkeypatch.setattr(labour, "ROUND_LIMIT_FLOOR_SECONDS", 0.0)
    peer = Peer(Script(average=half, hurried=True), Script(average=half), Script(average=half))
    peer.play(3)
    first, second, third = peer.averager.limits_seconds
    assert pytest.approx(first) == second == labour.FIRST_ROUND_LIMIT_SECONDS
    assert third == pytest.approx(labour.ROUND_LIMIT_MULTIPLE * STEPS * 0.5, rel=0.01)


def test_who_was_cut_by_its_own_limit_has_longer_for_the_next_round() -> None:
    """Its machine has become slow: it would never mix again."""
    peer = Peer(*(Script() for _ in range(4)))
    peer.replica._limit_seconds = 1.5
    peer.play(4)
    assert peer.averager.limits_seconds == pytest.approx([1.5, 3.0, 6.0, 6.0])


# -- another's state --------------------------------------------------------------------------------------------------


class Torn(Anonymous):
    """Room on a disk that fails after the parameters."""

    def read(self, offset: int, into: memoryview) -> None:
        if offset:
            raise OSError(5, "Input/output error")
        super().read(offset, into)


class OneDonor:
    """`protocols.catchup.standing.Standings`, as far as a replica asks it."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.ledger, self._snapshot = Ledger(), snapshot

    async def fetch(self, order: Order, deadline: Deadline) -> Snapshot:
        return self._snapshot

    def take_bytes(self) -> int:
        return 0


def another(round_number: int, room: type[Anonymous] = Anonymous) -> Snapshot:
    """The state of somebody who stands at nine."""
    theta, velocity = torch.full((ELEMENTS,), 9.0), torch.full((ELEMENTS,), 1.0)
    index = Index.of(theta, velocity)
    held: Room = room(room_bytes(ELEMENTS))
    snapshot = Snapshot(index.state_root(round_number), round_number, index, held)
    snapshot.fill(theta, velocity)
    return snapshot


def fetched(peer: Peer, rounds: int, snapshot: Snapshot) -> RoundReport:
    """After so many rounds of its own, the peer fetches that."""

    async def main() -> RoundReport:
        await peer.replica.settle()
        for _ in range(rounds):
            await peer.replica.run_round(SimClock().wall)
        until = asyncio.get_running_loop().time() + 10.0
        return await peer.replica.catch_up(cast(Standings, OneDonor(snapshot)), SimClock().wall, until)

    return simloop.run(main())


def test_a_state_that_cannot_be_read_to_its_end_changes_nothing() -> None:
    peer = Peer(Script())
    report = fetched(peer, 1, another(7, Torn))
    theta, velocity = stepped(1)
    assert report.outcome == "undecided" and peer.replica.key.round == 1
    assert holds(peer.replica.anchor, theta) and holds(peer.replica.velocity, velocity)
    assert holds(peer.learner.vectors[0], theta)


def test_who_went_over_to_anothers_state_hands_out_its_own_no_more() -> None:
    """And does not go back to it when it is started again."""
    snapshots = Snapshots(every_rounds=1, keep=3)
    peer, donors = Peer(Script(), Script(), snapshots=snapshots), another(1)
    report = fetched(peer, 2, donors)
    assert report.outcome == "superseded" and holds(peer.replica.anchor, 9.0) and peer.replica.key.round == 2
    assert [each.lineage for each in snapshots.held()] == [peer.replica.key.lineage, donors.lineage]


def test_who_looks_for_a_state_has_none_for_others() -> None:
    replica = Peer().replica
    assert not replica.seeks_state
    replica.astray = True
    assert replica.seeks_state
    replica.astray, replica.lacks_state = False, True
    assert replica.seeks_state
