"""The rounds of one peer, one after the other, and catching up wherever one was decided without it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from node.outer.independent_loop import IndependentOuterLoop
from node.outer.replicated_loop import ReplicatedOuterLoop, RoundReport
from protocols.base import Outcome
from protocols.sync.chain_sync import ChainSync
from protocols.sync.independent_sync import IndependentStateSync

CATCH_UP_SECONDS = 120.0
"""To find out what was decided, and until something comes in: what moves goes on."""
AGAIN_SECONDS, NEAR_ROUNDS = 1.0, 2
"""Who took longer to catch up, over more rounds, catches up again with what was decided meanwhile, which is less."""
MAX_PASSES = 16
"""So often in a row: then the others look no nearer, and a round may tell what is decided just now."""
PAUSE_SECONDS = 1.0
"""Before a round that ended without a decision is tried again: whoever is ahead needs a moment, too."""


async def run_replicated_rounds(
    outer_loop: ReplicatedOuterLoop,
    sync: ChainSync,
    wall: Callable[[], float],
    goes_on: Callable[[], bool],
    tell: Callable[[str, str], None] = lambda state, reason: None,
) -> AsyncIterator[RoundReport]:
    """Run rounds for as long as `goes_on` says; yields a report for each, and for each time that it caught up.

    What it cost to try, where that came to nothing, is in the report of the round that follows.

    Args:
        tell: told, in words, what this peer does and why, where it is not a round.
    """
    me = outer_loop.averager.me
    loop = asyncio.get_running_loop()
    behind, passes = me not in outer_loop.chain.head.roster, 0
    while goes_on():
        tried = None
        if behind:
            tell("syncing", "others may be ahead: asking them what was decided, and for the state")
            began = loop.time()
            tried = await outer_loop.catch_up(sync, wall, began + CATCH_UP_SECONDS)
            if tried.outcome == Outcome.SUPERSEDED:
                passes += 1
                behind = passes < MAX_PASSES and _was_far(tried, loop.time() - began)
                yield tried
                continue  # what it has caught up with may have been the end
            if not passes:
                await asyncio.sleep(PAUSE_SECONDS)
        passes = 0
        report = await outer_loop.run_round(me, wall)
        yield report.after(tried) if tried else report
        behind = report.outcome in (Outcome.UNDECIDED, Outcome.SUPERSEDED)
        sync.stranded = report.outcome == Outcome.UNDECIDED


async def run_independent_rounds(
    outer_loop: IndependentOuterLoop,
    state_sync: IndependentStateSync,
    wall: Callable[[], float],
    goes_on: Callable[[], bool],
    tell: Callable[[str, str], None] = lambda state, reason: None,
) -> AsyncIterator[RoundReport]:
    """The same where no anchor is shared: a newcomer, and who went astray, fetches another's state.

    Who went astray tries once after each round: mixing goes on meanwhile, and is the other cure.
    """
    loop = asyncio.get_running_loop()
    tried: RoundReport | None = None
    while goes_on():
        if outer_loop.seeks_state:
            tell("syncing", "fetching a state from a peer that has one")
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
    """Whether others may have decided several rounds while it caught up."""
    return seconds >= AGAIN_SECONDS and (report.replayed_rounds > NEAR_ROUNDS or report.bytes_downloaded > 0)
