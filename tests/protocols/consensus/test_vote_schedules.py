"""The vote under random scheduling, over many seeds, and planted bugs that this must catch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from protocols.base import Member
from protocols.consensus import messages as votes
from protocols.consensus.paxos import PaxosInstance
from protocols.consensus.record import Record
from protocols.consensus.vote_tally import Value
from tests.sim.invariants import Remembering
from tests.sim.scheduling import play

SEEDS = range(2000)
"""Of 50,000 by `python -m tests.sim.scheduling --seeds 0:50000`."""


def test_random_schedules_break_no_invariant() -> None:
    """The first seeds: `make sim` plays 20,000."""
    assert [f"seed {seed}: {error}" for seed, error in play(SEEDS[:250])] == []


class HalfAQuorum(Remembering):
    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.quorum = max(1, len(self.roster) // 2)


class CountsStrangers(Remembering):
    def counts(self, member: Member) -> bool:
        return member.peer in {each.peer for each in self.roster}


class CountsHeirs(Remembering):
    def counts(self, member: Member) -> bool:
        return super().counts(member) or self.is_successor(member)


class CountsAcrossBallots(Remembering):
    def voters(self, ballot: int, digest: bytes) -> tuple[Member, ...]:
        return tuple({voter: None for (_, named), cast in self._votes.items() if named == digest for voter in cast})


class ForksWithoutAll(Remembering):
    def decides(self, value: Value) -> bool:
        return super().decides(value) or (value.is_fork and bool(self.voters(value.ballot, value.digest)))


class AcceptsBelowItsPromise(PaxosInstance):
    def _on_propose(self, message: votes.Propose) -> None:
        promised, self._ballot_state.promised = self._ballot_state.promised, 0
        super()._on_propose(message)
        self._ballot_state.promised = max(promised, self._ballot_state.promised)


class PromiseForgetsAccepted(PaxosInstance):
    def _promise(self, fork: bool) -> votes.Promise:
        return replace(super()._promise(fork), accepted=0, record=b"")


class ForkForgetsAccepted(PaxosInstance):
    def _promise(self, fork: bool) -> votes.Promise:
        promise = super()._promise(fork)
        return replace(promise, accepted=0, record=b"") if fork else promise


class CoordinatorIgnoresAccepted(PaxosInstance):
    def _handle(self, message: votes.VoteMessage) -> None:
        forgotten = isinstance(message, votes.Promise)
        super()._handle(replace(message, accepted=0, record=b"") if forgotten else message)  # type: ignore[call-arg]


class CoordinatorTakesTheLowest(PaxosInstance):
    def _handle(self, message: votes.VoteMessage) -> None:
        if isinstance(message, votes.Promise) and message.record:
            message = replace(message, accepted=votes.MAX_BALLOT - message.accepted)
        super()._handle(message)


class AcceptsUnheld(PaxosInstance):
    def _missing(self, record: Record) -> tuple[bytes, ...]:
        return ()


@pytest.mark.parametrize(
    "planted, rules",
    [
        ({"tally": HalfAQuorum}, {"proof", "one child"}),
        ({"tally": CountsStrangers}, {"proof", "one child", "proposal"}),
        ({"tally": CountsHeirs}, {"proof", "one child", "proposal"}),
        ({"tally": CountsAcrossBallots}, {"proof", "one child"}),
        ({"tally": ForksWithoutAll}, {"fork"}),
        ({"vote": AcceptsBelowItsPromise}, {"one child", "proposal"}),
        ({"vote": PromiseForgetsAccepted}, {"one child", "proposal"}),
        ({"vote": ForkForgetsAccepted}, {"fork"}),
        ({"vote": CoordinatorIgnoresAccepted}, {"one child", "proposal"}),
        ({"vote": CoordinatorTakesTheLowest}, {"one child", "proposal"}),
        ({"vote": AcceptsUnheld}, {"held"}),
        ({"same_incarnation": True}, {"one child", "proposal"}),
    ],
    ids=lambda value: (
        getattr(next(iter(value.values())), "__name__", "same incarnation") if isinstance(value, dict) else ""
    ),
)
def test_planted_bug_is_caught(planted: dict[str, Any], rules: set[str]) -> None:
    caught = (error.rule for seed in SEEDS for _, error in play([seed], **planted))
    assert any(rule in rules for rule in caught)
