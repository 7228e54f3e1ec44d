"""When a FORK is due: how the members that are left go on if the majority has been gone for long and the run allows it.

If no member is left, as when a whole swarm was killed and restarted, the successors of the members may fork
(`protocols.consensus.vote_tally`). They start from a state that they hold, which may be older than the last decision of
the members. If members left one after the other and the last of them is gone, former members may fork: a majority of a
roster from which the last one has shrunk.
"""

from __future__ import annotations

from collections.abc import Sequence

from protocols.aio import loop_time
from protocols.allreduce.plan import BUDGET_FLOOR_SECONDS
from protocols.base import Member
from protocols.butterfly.attempt import RoundAttempt
from protocols.consensus import record as records
from protocols.consensus.record import Kind

FORK_BUDGETS = 3
"""Members fork when the majority has been gone for this many budgets of a round; for one, if the roster is of two."""
FORMER_BUDGETS = 2
"""Former members wait for this many budgets: what a last member decided alone, and may lose, is little."""
COMPLETE_SECONDS = 5.0
"""Wait if the successors of the whole roster are here: no member can come back, but another peer may know more."""
WATCH_SECONDS = 0.5


async def watch_majority(attempt: RoundAttempt) -> None:
    """Until the round is over: seek a fork with all members at hand when it is due; stop if the majority is back."""
    driver = attempt.driver
    wanted: tuple[Member, ...] = ()
    while not attempt.over() and loop_time() < attempt.deadline:
        left = _survivors(attempt) if driver.votes else _successors(attempt)
        alone_seconds = attempt.state.alone_seconds(loop_time(), driver.tally.may_fork(left))
        due = left if alone_seconds >= _patience_seconds(attempt, left) else ()
        if due != wanted:
            wanted = due
            driver.fork(records.encode(records.extend(attempt.head, Kind.FORK, wanted)) if wanted else b"")
        await attempt.until(attempt.over, min(attempt.deadline, loop_time() + WATCH_SECONDS))


def _live(attempt: RoundAttempt) -> set[Member]:
    return {*attempt.context.host.members.live(), attempt.context.me}


def _survivors(attempt: RoundAttempt) -> tuple[Member, ...]:
    """The members of the roster that are here; none if they are a majority."""
    tally, live = attempt.driver.tally, _live(attempt)
    here = tuple(sorted(member for member in tally.roster if member in live))
    return here if len(here) < tally.quorum else ()


def _successors(attempt: RoundAttempt) -> tuple[Member, ...]:
    """Peers without a vote that are here with this member's state and may fork with it; none if it may not fork.

    They are the first of these that applies:

    - the successors of the whole roster, if all are here, so that none of its members can come back;
    - a majority of a former roster, if no member is here. A member's round may just be a long one, and such a fork wins
      over all that the members decide;
    - the successors that are here.
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
    # A member that is here may fork and admit this peer, unless it is on another branch, or one of too few.
    first = driver.forks_only and any(member in attempt.context.host.members.live() for member in roster)
    return (2 if first else 1) * patience_seconds
