"""Where the majority is gone for long: those who are left go on by a FORK, if the run allows it.

Where nobody is left, as when a whole swarm was killed and started again, those who were in the roster in a former life
do (`protocols.consensus.vote_tally`): from a state that they hold, which may be older than what their former lives
decided last. Where members left one after the other, and the last of them is gone, former members do: a majority of a
roster that the last one has shrunk from.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from protocols.allreduce.plan import BUDGET_FLOOR_SECONDS
from protocols.base import Head, Member
from protocols.butterfly.context import ButterflyContext
from protocols.butterfly.round_view import RoundView
from protocols.consensus import record as records
from protocols.consensus.record import Kind, Record

FORK_BUDGETS = 3
"""The majority has been gone for so many budgets of a round; for one, if the roster is of two."""
FORMER_BUDGETS = 2
"""Former members wait for so many: what a last member decided alone, and may lose, is little."""
COMPLETE_SECONDS = 5.0
"""Where all of the roster are here in later lives, nobody of it can come back; so long, for others who know more."""
WATCH_SECONDS = 0.5


async def watch_majority(desk: ButterflyContext, seat: RoundView) -> None:
    """Until the round is over, want a fork of all whom we reach when it is time, and none when the majority is back."""
    loop, decision = asyncio.get_running_loop(), seat.decision
    wanted: tuple[Member, ...] = ()
    while not seat.over() and loop.time() < seat.deadline:
        left = _survivors(desk, seat) if decision.votes else _successors(desk, seat)
        due: tuple[Member, ...] = ()
        if not decision.poll.may_fork(left):
            decision.left_since = None
        elif decision.left_since is None:
            decision.left_since = loop.time()
        elif loop.time() - decision.left_since >= _patience_seconds(desk, seat, left):
            due = left
        if due != wanted:
            wanted = due
            decision.fork(fork(seat.head, wanted) if wanted else b"")
        await seat.until(seat.over, min(seat.deadline, loop.time() + WATCH_SECONDS))


def _survivors(desk: ButterflyContext, seat: RoundView) -> tuple[Member, ...]:
    """The members that are here; nobody, if they are a majority."""
    poll, live = seat.decision.poll, {*desk.host.members.live(), desk.me}
    here = tuple(sorted(member for member in poll.roster if member in live))
    return here if len(here) < poll.quorum else ()


def _successors(desk: ButterflyContext, seat: RoundView) -> tuple[Member, ...]:
    """Who is here with our state and may fork with us, where we have no vote; nobody, if we may not.

    Heirs of all of the roster, since nobody of it can come back. Else a majority of a former roster, which wins over
    whatever those who are missing decide: so not while a member is here, whose round may just be a long one. Else the
    heirs that are here.
    """
    poll, live = seat.decision.poll, {*desk.host.members.live(), desk.me}
    waiting = [member for member in (desk.me, *seat.decision.onlookers.values()) if member in live]
    heirs = tuple(sorted(filter(poll.is_successor, waiting)))
    if len(heirs) < len(poll.roster) and live.isdisjoint(poll.roster):
        many = poll.former_majority(waiting)
        if desk.me in many:
            return many
    return heirs if desk.me in heirs else ()


def _patience_seconds(desk: ButterflyContext, seat: RoundView, left: Sequence[Member]) -> float:
    terms, roster, poll = seat.call.terms, seat.head.roster, seat.decision.poll
    if len(left) == len(roster) and all(map(poll.is_successor, left)):
        return COMPLETE_SECONDS
    budget_seconds = terms.plan.budget_seconds if terms else BUDGET_FLOOR_SECONDS
    if len(left) > len(roster):  # no others outnumber the members
        return budget_seconds * FORMER_BUDGETS
    patience_seconds = budget_seconds * (1 if len(roster) == 2 else FORK_BUDGETS)
    # A member that is here may fork, and admit us: unless it stands elsewhere, or is one of too few.
    first = seat.decision.forks_only and any(member in desk.host.members.live() for member in roster)
    return (2 if first else 1) * patience_seconds


def fork(head: Head, members: Iterable[Member]) -> bytes:
    """The record by which these members go on without the others."""
    return records.encode(
        Record(
            parent=head.key.lineage,
            state_root=head.state_root,
            round=head.key.round,
            kind=Kind.FORK,
            plan=bytes(32),
            parts=(),
            roster=tuple(sorted(members)),
            complaints=head.complaints,
        )
    )
