"""Where the majority is gone for long: those who are left go on by a FORK, if the run allows it.

Where nobody is left, as when a whole swarm was killed and started again, those who were in the roster in a former life
do (`protocols.consensus.vote_tally`): from a state that they hold, which may be older than what their former lives
decided last. Where members left one after the other, and the last of them is gone, former members do: a majority of a
roster that the last one has shrunk from.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from protocols.allreduce.plan import BUDGET_FLOOR_SECONDS
from protocols.base import Member
from protocols.butterfly.attempt import RoundAttempt
from protocols.consensus import record as records
from protocols.consensus.record import Kind

FORK_BUDGETS = 3
"""The majority has been gone for so many budgets of a round; for one, if the roster is of two."""
FORMER_BUDGETS = 2
"""Former members wait for so many: what a last member decided alone, and may lose, is little."""
COMPLETE_SECONDS = 5.0
"""Where all of the roster are here in later lives, nobody of it can come back; so long, for others who know more."""
WATCH_SECONDS = 0.5


async def watch_majority(attempt: RoundAttempt) -> None:
    """Until the round is over, want a fork with all members at hand when it is time, and none when the majority is
    back."""
    loop, driver = asyncio.get_running_loop(), attempt.driver
    wanted: tuple[Member, ...] = ()
    while not attempt.over() and loop.time() < attempt.deadline:
        left = _survivors(attempt) if driver.votes else _successors(attempt)
        alone_seconds = attempt.state.alone_seconds(loop.time(), driver.tally.may_fork(left))
        due = left if alone_seconds >= _patience_seconds(attempt, left) else ()
        if due != wanted:
            wanted = due
            driver.fork(records.encode(records.extend(attempt.head, Kind.FORK, wanted)) if wanted else b"")
        await attempt.until(attempt.over, min(attempt.deadline, loop.time() + WATCH_SECONDS))


def _live(attempt: RoundAttempt) -> set[Member]:
    return {*attempt.context.host.members.live(), attempt.context.me}


def _survivors(attempt: RoundAttempt) -> tuple[Member, ...]:
    """The members of the roster that are here; none if they are a majority."""
    tally, live = attempt.driver.tally, _live(attempt)
    here = tuple(sorted(member for member in tally.roster if member in live))
    return here if len(here) < tally.quorum else ()


def _successors(attempt: RoundAttempt) -> tuple[Member, ...]:
    """The peers without a vote that are here with this member's state and may fork with it; none if it may not fork.

    These are the successors of the whole roster, if all are here: none of its members can come back then. Else they are
    a majority of a former roster. Such a fork wins over whatever the missing members decide, so it does not come
    about while a member is here, whose round may just be a long one. Else they are the successors that are here.
    """
    me, tally, live = attempt.context.me, attempt.driver.tally, _live(attempt)
    waiting = [member for member in (me, *attempt.state.onlookers.values()) if member in live]
    successors = tuple(sorted(filter(tally.is_successor, waiting)))
    if len(successors) < len(tally.roster) and live.isdisjoint(tally.roster):
        many = tally.former_majority(waiting)
        if me in many:
            return many
    return successors if me in successors else ()


def _patience_seconds(attempt: RoundAttempt, left: Sequence[Member]) -> float:
    resolved, roster, driver = attempt.call.resolved, attempt.head.roster, attempt.driver
    if len(left) == len(roster) and all(map(driver.tally.is_successor, left)):
        return COMPLETE_SECONDS
    budget_seconds = resolved.plan.budget_seconds if resolved else BUDGET_FLOOR_SECONDS
    if len(left) > len(roster):  # no other peers outnumber the members
        return budget_seconds * FORMER_BUDGETS
    patience_seconds = budget_seconds * (1 if len(roster) == 2 else FORK_BUDGETS)
    # A member that is here may fork, and admit this peer: unless it stands elsewhere, or is one of too few.
    first = driver.forks_only and any(member in attempt.context.host.members.live() for member in roster)
    return (2 if first else 1) * patience_seconds
