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


async def watch_majority(context: ButterflyContext, view: RoundView) -> None:
    """Until the round is over, want a fork of all whom we reach when it is time, and none when the majority is back."""
    loop, decision = asyncio.get_running_loop(), view.decision
    wanted: tuple[Member, ...] = ()
    while not view.over() and loop.time() < view.deadline:
        left = _survivors(context, view) if decision.votes else _successors(context, view)
        due: tuple[Member, ...] = ()
        if not decision.tally.may_fork(left):
            decision.left_since = None
        elif decision.left_since is None:
            decision.left_since = loop.time()
        elif loop.time() - decision.left_since >= _patience_seconds(context, view, left):
            due = left
        if due != wanted:
            wanted = due
            decision.fork(fork(view.head, wanted) if wanted else b"")
        await view.until(view.over, min(view.deadline, loop.time() + WATCH_SECONDS))


def _survivors(context: ButterflyContext, view: RoundView) -> tuple[Member, ...]:
    """The members that are here; nobody, if they are a majority."""
    tally, live = view.decision.tally, {*context.host.members.live(), context.me}
    here = tuple(sorted(member for member in tally.roster if member in live))
    return here if len(here) < tally.quorum else ()


def _successors(context: ButterflyContext, view: RoundView) -> tuple[Member, ...]:
    """Who is here with our state and may fork with us, where we have no vote; nobody, if we may not.

    Heirs of all of the roster, since nobody of it can come back. Else a majority of a former roster, which wins over
    whatever those who are missing decide: so not while a member is here, whose round may just be a long one. Else the
    heirs that are here.
    """
    tally, live = view.decision.tally, {*context.host.members.live(), context.me}
    waiting = [member for member in (context.me, *view.decision.onlookers.values()) if member in live]
    heirs = tuple(sorted(filter(tally.is_successor, waiting)))
    if len(heirs) < len(tally.roster) and live.isdisjoint(tally.roster):
        many = tally.former_majority(waiting)
        if context.me in many:
            return many
    return heirs if context.me in heirs else ()


def _patience_seconds(context: ButterflyContext, view: RoundView, left: Sequence[Member]) -> float:
    resolved, roster, tally = view.call.resolved, view.head.roster, view.decision.tally
    if len(left) == len(roster) and all(map(tally.is_successor, left)):
        return COMPLETE_SECONDS
    budget_seconds = resolved.plan.budget_seconds if resolved else BUDGET_FLOOR_SECONDS
    if len(left) > len(roster):  # no others outnumber the members
        return budget_seconds * FORMER_BUDGETS
    patience_seconds = budget_seconds * (1 if len(roster) == 2 else FORK_BUDGETS)
    # A member that is here may fork, and admit us: unless it stands elsewhere, or is one of too few.
    first = view.decision.forks_only and any(member in context.host.members.live() for member in roster)
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
