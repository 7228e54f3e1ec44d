"""Where the majority is gone for long: those who are left go on by a FORK, if the run allows it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from protocols import record as records
from protocols.base import Head, Member
from protocols.desk import Desk
from protocols.plan import BUDGET_FLOOR_SECONDS
from protocols.record import Kind, Record
from protocols.seat import Seat

FORK_BUDGETS = 3
"""The majority has been gone for so many budgets of a round; for one, if the roster is of two."""
WATCH_SECONDS = 0.5


async def watch_majority(desk: Desk, seat: Seat) -> None:
    """Until the round is over, want a fork of all whom we reach when it is time, and none when the majority is back."""
    loop, poll = asyncio.get_running_loop(), seat.decision.poll
    since: float | None = None
    wanted: tuple[Member, ...] = ()
    while not seat.over() and loop.time() < seat.deadline:
        live = {*desk.host.members.live(), desk.me}
        here = tuple(sorted(member for member in poll.roster if member in live))
        if len(here) >= poll.quorum or not 0 < poll.fork_peers <= len(here):
            since, due = None, tuple[Member, ...]()
        else:
            since = loop.time() if since is None else since
            due = here if loop.time() - since >= _patience_seconds(seat) else ()
        if due != wanted:
            wanted = due
            seat.decision.fork(fork(seat.head, wanted) if wanted else b"")
        await seat.until(seat.over, min(seat.deadline, loop.time() + WATCH_SECONDS))


def _patience_seconds(seat: Seat) -> float:
    terms = seat.call.terms
    budget_seconds = terms.plan.budget_seconds if terms else BUDGET_FLOOR_SECONDS
    return budget_seconds * (1 if len(seat.head.roster) == 2 else FORK_BUDGETS)


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
