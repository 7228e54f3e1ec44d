"""Runs the rounds of one peer in turn, and lets it catch up with rounds that were decided without it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from node.outer.activity import Activity
from node.outer.independent_loop import IndependentOuterLoop
from node.outer.replicated_loop import ReplicatedOuterLoop, RoundReport
from protocols.base import Outcome
from protocols.sync.chain_sync import ChainSync
from protocols.sync.independent_sync import IndependentStateSync

CATCH_UP_SECONDS = 120.0
"""Time to find out what was decided and to receive the first bytes. A transfer that makes progress may take longer."""
AGAIN_SECONDS, NEAR_ROUNDS = 1.0, 2
"""If catching up took longer and covered more rounds, the peer catches up again. The next pass is shorter, because
fewer rounds were decided during this one."""
MAX_PASSES = 16
"""Times in a row that a peer catches up. It then enters a round, in which it learns what is being decided."""
PAUSE_SECONDS = 1.0
"""Pause before the peer retries a round that ended without a decision: peers that are ahead need time, too."""


async def run_replicated_rounds(
    outer_loop: ReplicatedOuterLoop,
    sync: ChainSync,
    wall: Callable[[], float],
    should_continue: Callable[[], bool],
    set_state: Callable[[str, str], None] = lambda state, reason: None,
) -> AsyncIterator[RoundReport]:
    """Run rounds while `should_continue` says so; yields a report for each, and for each time that the peer caught up.

    The cost of an attempt to catch up that failed is in the report of the round that follows. `set_state` is called
    with what this peer does and why, if that is not a round.
    """
    loop = asyncio.get_running_loop()
    behind, passes = outer_loop.me not in outer_loop.chain.head.roster, 0
    while should_continue():
        if outer_loop.may_be_away:
            await outer_loop.stay_away(lambda: outer_loop.activity.wanted is not Activity.AWAY)
            behind = True
            continue
        tried = None
        if behind:
            set_state("syncing", "catching up with the other peers")
            began = loop.time()
            tried = await outer_loop.catch_up(sync, wall, began + CATCH_UP_SECONDS)
            if tried.outcome == Outcome.SUPERSEDED:
                passes += 1
                behind = passes < MAX_PASSES and _was_far(tried, loop.time() - began)
                yield tried
                continue  # the peer may have caught up with the end of the run
            if outer_loop.may_be_away:
                yield tried
                continue
            if not passes:
                await asyncio.sleep(PAUSE_SECONDS)
        passes = 0
        report = await outer_loop.run_round(wall)
        yield report.after(tried) if tried else report
        behind = report.outcome in (Outcome.UNDECIDED, Outcome.SUPERSEDED)
        sync.stranded = report.outcome == Outcome.UNDECIDED


async def run_independent_rounds(
    outer_loop: IndependentOuterLoop,
    state_sync: IndependentStateSync,
    wall: Callable[[], float],
    should_continue: Callable[[], bool],
    set_state: Callable[[str, str], None] = lambda state, reason: None,
) -> AsyncIterator[RoundReport]:
    """Run rounds with independent state. A joiner, or a peer that has drifted too far, fetches another peer's state.

    A drifted peer tries once a round and keeps averaging in between, which may also bring it back.
    """
    loop = asyncio.get_running_loop()
    tried: RoundReport | None = None
    while should_continue():
        if outer_loop.activity.pauses and not outer_loop.leaving:
            await outer_loop.stay_away(lambda: not outer_loop.activity.pauses)
            continue
        if outer_loop.seeks_state:
            set_state("syncing", "fetching a state from a peer that has one")
            report = await outer_loop.catch_up(state_sync, wall, loop.time() + CATCH_UP_SECONDS)
            report = report.after(tried) if tried else report
            tried = None if report.outcome == Outcome.SUPERSEDED else report
            if tried is None:
                yield report
                continue
        if outer_loop.lacks_state:
            await asyncio.sleep(PAUSE_SECONDS)
            continue
        report = await outer_loop.run_round(wall)
        yield report.after(tried) if tried else report
        tried = None


def _was_far(report: RoundReport, seconds: float) -> bool:
    return seconds >= AGAIN_SECONDS and (report.replayed_rounds > NEAR_ROUNDS or report.bytes_downloaded > 0)
