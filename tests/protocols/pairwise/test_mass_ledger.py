"""Push-sum's ledger: no fault of messages loses or creates mass, and it mixes as its matrix does."""

from __future__ import annotations

import random
from fractions import Fraction
from typing import Any

import pytest

from protocols.base import BadPayload, Member
from protocols.pairwise.mass_ledger import MAX_RECEIVERS, SHARE_WINDOW, MassLedger, Share


def ledger(index: int, incarnation: int = 0, weight: int = 1) -> MassLedger:
    """A peer's ledger, in numbers that add exactly."""
    return MassLedger(Member(f"p{index}", incarnation), Fraction(weight))  # type: ignore[arg-type]


def outstanding(sender: MassLedger, to: Member) -> list[Share]:
    return list(sender._outstanding.get(to, {}).values())


def take_back(sender: MassLedger, ended: Member) -> None:
    for share in outstanding(sender, ended):
        sender.answered(ended, share.sequence, counted=False)


class Swarm:
    """Peers, messages between them that arrive late, twice or never, and the mass that there should be."""

    def __init__(self, count: int, seed: int) -> None:
        self.rng = random.Random(seed)
        self.ledgers = {each.me: each for each in (ledger(index, weight=1 + index) for index in range(count))}
        self.dead: set[Member] = set()
        self.in_transit: list[tuple[str, Any]] = []
        self.counted: set[tuple[Member, Member, int]] = set()
        self.expected = self.total()

    def total(self) -> Fraction:
        here = [each.weight for each in self.ledgers.values()]
        away = [
            share.weight
            for sender in self.ledgers.values()
            for to in (*self.ledgers, *self.dead)
            for share in outstanding(sender, to)
            if to in self.dead or (share.sender, share.to, share.sequence) not in self.counted
        ]
        return sum((Fraction(weight) for weight in here + away), Fraction(0))

    def step(self) -> None:
        rng, sender = self.rng, self.rng.choice(list(self.ledgers.values()))
        to = rng.choice([*self.ledgers, *self.dead])
        act = rng.random()
        if act < 0.25:
            share = sender.give(to) if to not in self.dead or rng.random() < 0.3 else None
            self.send("share", share)
        elif act < 0.35:
            for share in outstanding(sender, to):
                self.send("share", share)
        elif act < 0.42:
            for share in outstanding(sender, to):
                self.send("recall", share)
        elif act < 0.424 and len(self.ledgers) > 2:
            self.die(sender)
        elif act < 0.5 and to in self.dead:
            take_back(sender, to)
        elif self.in_transit:
            self.arrive(*self.in_transit.pop(rng.randrange(len(self.in_transit))))

    def send(self, kind: str, what: Any) -> None:
        if what is not None:
            self.in_transit += [(kind, what)] * self.rng.choice((0, 1, 1, 1, 2))

    def die(self, dying: MassLedger) -> None:
        """What it holds is lost, and what it gave that never arrives; shares in transit may still arrive."""
        before = self.total()
        self.dead.add(dying.me)
        del self.ledgers[dying.me]
        self.expected -= before - self.total()

    def arrive(self, kind: str, what: Any) -> None:
        if kind in ("share", "recall"):
            receiver, name = self.ledgers.get(what.to), (what.sender, what.to, what.sequence)
            if receiver is None:
                return
            if kind == "recall":
                self.send("answer", (what, receiver.recalled(what.sender, what.sequence)))
                return
            before = receiver.weight
            if receiver.take(what):
                self.send("ack", what)
            if receiver.weight != before:
                assert name not in self.counted  # a message counts at most once at its receiver
                self.counted.add(name)
                if what.sender in self.dead:
                    self.expected += what.weight
        elif kind == "ack":
            self.settle(what, True)
        elif kind == "answer":
            self.settle(*what)

    def settle(self, share: Share, counted: bool) -> None:
        sender = self.ledgers.get(share.sender)
        if sender is None:
            return
        if counted and share.to in self.dead and share in outstanding(sender, share.to):  # it died with its receiver
            self.expected -= Fraction(share.weight)
        if counted and self.rng.random() < 0.5:
            sender.answered(share.to, share.sequence, counted=True)
        else:
            sender.answered(share.to, share.sequence, counted)


@pytest.mark.parametrize("seed", range(15))
def test_mass_is_conserved_exactly_under_faults(seed: int) -> None:
    swarm = Swarm(5, seed)
    for _ in range(600):
        swarm.step()
        assert swarm.total() == swarm.expected
    assert len(swarm.counted) > 10


def test_ledgers_hold_all_mass_once_settled() -> None:
    """Once every share is answered, the ledgers alone hold the mass."""
    swarm = Swarm(4, 99)
    for _ in range(300):
        swarm.step()
    for sender in swarm.ledgers.values():
        for dead in swarm.dead:
            take_back(sender, dead)
        for to, receiver in swarm.ledgers.items():
            for share in outstanding(sender, to):
                counted = receiver.recalled(sender.me, share.sequence)
                sender.answered(to, share.sequence, counted)
    assert sum(each.weight for each in swarm.ledgers.values()) == swarm.expected
    assert all(not outstanding(sender, to) for sender in swarm.ledgers.values() for to in swarm.ledgers)


def test_share_is_for_one_incarnation_of_its_receiver() -> None:
    sender, former, later = ledger(1), ledger(2), ledger(2, incarnation=1)
    share = sender.give(former.me)
    assert share is not None and not later.take(share) and later.weight == 1
    take_back(sender, former.me)
    assert sender.weight == 1
    sender.answered(former.me, share.sequence, counted=True)  # a late acknowledgement changes nothing
    assert sender.weight == 1


def test_unacknowledged_shares_are_bounded() -> None:
    sender, receiver = ledger(1), ledger(2)
    shares = [sender.give(receiver.me) for _ in range(SHARE_WINDOW + 5)]
    given = [share for share in shares if share is not None]
    assert len(given) == SHARE_WINDOW
    with pytest.raises(BadPayload, match="weight"):
        receiver.take(Share(sender.me, receiver.me, 0, -1.0))
    rich = ledger(3)
    rich.weight = Fraction(1 << 200)  # type: ignore[assignment]
    assert sum(rich.give(receiver.me) is not None for _ in range(SHARE_WINDOW + 5)) == SHARE_WINDOW
    assert rich.give(rich.me) is None


def test_missing_sequence_numbers_do_not_block() -> None:
    """A share that did not reach the receiver returns, and its number is not used again."""
    sender, receiver = ledger(1), ledger(2)
    sender.weight = Fraction(1 << 400)  # type: ignore[assignment]
    for number in range(3 * SHARE_WINDOW):
        share = sender.give(receiver.me)
        assert share is not None and share.sequence == number
        counted = number % 2 == 0 and receiver.take(share)
        sender.answered(receiver.me, number, counted)
    assert not receiver.recalled(sender.me, 3 * SHARE_WINDOW - 1) and receiver.recalled(sender.me, 3 * SHARE_WINDOW - 2)


def test_forgotten_receiver_still_counts_later_shares() -> None:
    """A peer gives to more incarnations than it remembers. It never gives a receiver the same number twice."""
    sender, receiver = ledger(1), ledger(2)
    sender.weight = Fraction(1 << 400)  # type: ignore[assignment]
    for index in range(3 * MAX_RECEIVERS):
        others = [Member(f"q{index}")] * (1 + index % 3)
        for to in (*others, *[receiver.me] * (index == 0)):
            share = sender.give(to)
            assert share is not None
            sender.answered(to, share.sequence, to == receiver.me and receiver.take(share))
    assert len(sender._next) <= MAX_RECEIVERS and not sender._outstanding and receiver.me not in sender._next
    before = receiver.weight
    again = sender.give(receiver.me)
    assert again is not None and receiver.take(again) and receiver.weight > before
    owing = [sender.give(Member(f"r{index}")) for index in range(2 * MAX_RECEIVERS)]
    assert len(sender._next) <= MAX_RECEIVERS + len(owing)
    assert all(share.to in sender._next for share in owing if share), "a receiver that owes an answer is not forgotten"
    assert all(share in outstanding(sender, share.to) for share in owing if share)
