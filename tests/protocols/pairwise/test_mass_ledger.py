"""Push-sum's book: mass is neither lost nor made, whatever becomes of messages; and it mixes as its matrix does."""

from __future__ import annotations

import random
from fractions import Fraction
from typing import Any

import pytest
import torch

from protocols.base import BadPayload, Member
from protocols.pairwise import mass_ledger as pushsum
from protocols.pairwise.mass_ledger import SHARE_WINDOW, MassLedger, Share
from protocols.pairwise.matching import mixing_matrix, select_partners


def masses(index: int, life: int = 0) -> MassLedger[Any]:
    """A peer whose value is its number, in numbers that add exactly."""
    return MassLedger(Member(f"p{index}", life), Fraction(index), Fraction(1))  # type: ignore[arg-type]


class Swarm:
    """Peers, messages between them that come late, twice or never, and an account of what there should be."""

    def __init__(self, count: int, seed: int) -> None:
        self.rng = random.Random(seed)
        self.books = {each.me: each for each in (masses(index) for index in range(count))}
        self.dead: set[Member] = set()
        self.flying: list[tuple[str, Any]] = []
        self.counted: set[tuple[Member, Member, int]] = set()
        self.expected = self.total()

    def total(self) -> tuple[Fraction, Fraction]:
        here = [(each.value, each.weight) for each in self.books.values()]
        away = [
            (share.value, share.weight)
            for giver in self.books.values()
            for to in (*self.books, *self.dead)
            for share in giver.outstanding(to)
            if to in self.dead or (share.sender, share.to, share.sequence) not in self.counted
        ]
        return sum((x for x, _ in here + away), Fraction(0)), sum((w for _, w in here + away), Fraction(0))

    def step(self) -> None:
        rng, giver = self.rng, self.rng.choice(list(self.books.values()))
        to = rng.choice([*self.books, *self.dead])
        act = rng.random()
        if act < 0.25:
            share = giver.give(to) if to not in self.dead or rng.random() < 0.3 else None
            self.send("share", share)
        elif act < 0.35:
            for share in giver.outstanding(to):
                self.send("share", share)
        elif act < 0.42:
            for share in giver.outstanding(to):
                self.send("recall", share)
        elif act < 0.424 and len(self.books) > 2:
            self.die(giver)
        elif act < 0.5 and to in self.dead:
            giver.buried(to)
        elif self.flying:
            self.arrive(*self.flying.pop(rng.randrange(len(self.flying))))

    def send(self, kind: str, what: Any) -> None:
        if what is not None:
            self.flying += [(kind, what)] * self.rng.choice((0, 1, 1, 1, 2))

    def die(self, dying: MassLedger[Any]) -> None:
        """What it holds goes with it, and what it had given that nobody will hear of; what still flies may arrive."""
        x, w = self.total()
        self.dead.add(dying.me)
        del self.books[dying.me]
        left = self.total()
        self.expected = (self.expected[0] - (x - left[0]), self.expected[1] - (w - left[1]))

    def arrive(self, kind: str, what: Any) -> None:
        if kind in ("share", "recall"):
            taker, name = self.books.get(what.to), (what.sender, what.to, what.sequence)
            if taker is None:
                return
            if kind == "recall":
                self.send("answer", (what, taker.recalled(what.sender, what.sequence)))
                return
            before = taker.weight
            if taker.take(what):
                self.send("ack", what)
            if taker.weight != before:
                assert name not in self.counted  # a message counts at most once at its receiver
                self.counted.add(name)
                if what.sender in self.dead:
                    self.expected = (self.expected[0] + what.value, self.expected[1] + what.weight)
        elif kind == "ack":
            self.settle(what, True)
        elif kind == "answer":
            self.settle(*what)

    def settle(self, share: Share[Any], counted: bool) -> None:
        giver = self.books.get(share.sender)
        if giver is None:
            return
        if counted and share.to in self.dead and share in giver.outstanding(share.to):  # it died with its receiver
            self.expected = (self.expected[0] - share.value, self.expected[1] - share.weight)
        if counted and self.rng.random() < 0.5:
            giver.acknowledged(share.to, share.sequence)
        else:
            giver.answered(share.to, share.sequence, counted)


@pytest.mark.parametrize("seed", range(15))
def test_mass_is_conserved_exactly_under_faults(seed: int) -> None:
    swarm = Swarm(5, seed)
    for _ in range(600):
        swarm.step()
        assert swarm.total() == swarm.expected
    assert len(swarm.counted) > 10


def test_ledgers_hold_all_mass_once_settled() -> None:
    """No loss at the end: all shares are acknowledged, and the books alone hold the mass."""
    swarm = Swarm(4, 99)
    for _ in range(300):
        swarm.step()
    for giver in swarm.books.values():
        for dead in swarm.dead:
            giver.buried(dead)
        for to, taker in swarm.books.items():
            for share in giver.outstanding(to):
                counted = taker.recalled(giver.me, share.sequence)
                giver.answered(to, share.sequence, counted)
    assert sum(each.weight for each in swarm.books.values()) == swarm.expected[1]
    assert all(not giver.outstanding(to) for giver in swarm.books.values() for to in swarm.books)


@pytest.mark.parametrize("count", (8, 6))
def test_lockstep_exponential_matches_its_matrix(count: int) -> None:
    names = [f"p{index}" for index in range(count)]
    values = torch.randn(count, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    books = {name: MassLedger(Member(name), row.clone()) for name, row in zip(names, values, strict=True)}
    expected = values
    for round_number in range(3):
        shares: list[Share[torch.Tensor]] = []
        for name in names:
            (to,) = select_partners("one-peer-exponential", names, name, round_number, "")
            share = books[name].give(Member(to))
            assert share is not None
            shares.append(share)
        for share in shares:
            assert books[share.to.peer].take(share)
            books[share.sender.peer].acknowledged(share.to, share.sequence)
        expected = mixing_matrix("one-peer-exponential", names, round_number, "").T @ expected
    found = torch.stack([books[name].mean for name in names])
    assert float((found - expected).abs().max()) < 1e-10
    exact = float((found - values.mean(0)).abs().max()) < 1e-10
    assert exact == (count == 8)


def test_column_stochastic_graph_still_finds_the_mean() -> None:
    """Weights are what plain averaging lacks: here somebody is given more often than others."""
    rng, count = random.Random(5), 6
    books = [
        MassLedger(Member(f"p{index}"), torch.tensor([float(index)], dtype=torch.float64)) for index in range(count)
    ]
    for _ in range(600):
        giver = rng.randrange(count)
        share = books[giver].give(books[rng.choice([i for i in (0, 0, 0, 1, 2, 3, 4, 5) if i != giver])].me)
        if share and rng.random() < 0.7:  # else it is lost, and sent again below
            books[int(share.to.peer[1:])].take(share)
        for to in books:
            for again in books[giver].outstanding(to.me):
                if rng.random() < 0.5:
                    to.take(again)
                    books[giver].acknowledged(to.me, again.sequence)
    assert sum(each.weight for each in books) < count  # some of it is under way
    assert all(abs(float(each.mean) - 2.5) < 1e-6 for each in books)


def test_recalled_share_is_never_counted() -> None:
    giver, taker = masses(1), masses(2)
    share = giver.give(taker.me)
    assert share is not None and not taker.recalled(giver.me, share.sequence)
    giver.answered(taker.me, share.sequence, counted=False)
    assert not taker.take(share)  # it comes late
    assert (giver.value, giver.weight, taker.value) == (1, 1, 2)


def test_share_is_for_one_incarnation_of_its_receiver() -> None:
    giver, former, later = masses(1), masses(2), masses(2, life=1)
    share = giver.give(former.me)
    assert share is not None and not later.take(share) and later.weight == 1
    giver.buried(former.me)
    assert giver.weight == 1
    giver.acknowledged(former.me, share.sequence)  # an acknowledgement that comes after all changes nothing
    assert giver.weight == 1


def test_unacknowledged_shares_are_bounded() -> None:
    giver, taker = masses(1), masses(2)
    shares = [giver.give(taker.me) for _ in range(SHARE_WINDOW + 5)]
    given = [share for share in shares if share is not None]
    assert len(given) == SHARE_WINDOW
    with pytest.raises(BadPayload, match="weight"):
        taker.take(Share(giver.me, taker.me, 0, Fraction(1), -1.0))
    rich = masses(3)
    rich.weight = Fraction(1 << 200)  # type: ignore[assignment]
    assert sum(rich.give(taker.me) is not None for _ in range(SHARE_WINDOW + 5)) == SHARE_WINDOW
    assert rich.give(rich.me) is None


def test_missing_sequence_numbers_do_not_block() -> None:
    """A giver that could not reach us has its share home, and its number is not used again."""
    giver, taker = masses(1), masses(2)
    giver.weight = Fraction(1 << 400)  # type: ignore[assignment]
    for number in range(3 * SHARE_WINDOW):
        share = giver.give(taker.me)
        assert share is not None and share.sequence == number
        counted = number % 2 == 0 and taker.take(share)
        giver.answered(taker.me, number, counted)
    assert not taker.recalled(giver.me, 3 * SHARE_WINDOW - 1) and taker.recalled(giver.me, 3 * SHARE_WINDOW - 2)


def test_forgotten_receiver_still_counts_later_shares() -> None:
    """In a long life a peer gives to more lives than it can know of; numbers are not used again where they may be."""
    giver, taker = masses(1), masses(2)
    giver.weight = Fraction(1 << 400)  # type: ignore[assignment]
    for index in range(3 * pushsum.MAX_RECEIVERS):
        others = [Member(f"q{index}")] * (1 + index % 3)
        for to in (*others, *[taker.me] * (index == 0)):
            share = giver.give(to)
            assert share is not None
            giver.answered(to, share.sequence, to == taker.me and taker.take(share))
    assert len(giver._next) <= pushsum.MAX_RECEIVERS and not giver._outstanding and taker.me not in giver._next
    before = taker.weight
    again = giver.give(taker.me)
    assert again is not None and taker.take(again) and taker.weight > before
    owing = [giver.give(Member(f"r{index}")) for index in range(2 * pushsum.MAX_RECEIVERS)]
    assert len(giver._next) <= pushsum.MAX_RECEIVERS + len(owing)
    assert all(share.to in giver._next for share in owing if share), "who owes an answer is not forgotten"
    assert all(share in giver.outstanding(share.to) for share in owing if share)
