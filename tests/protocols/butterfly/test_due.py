"""When a round is called, for any mixture of members that work, rest, leave or are gone: neither early nor never."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from protocols.allreduce import plan as planning
from protocols.base import Member
from protocols.butterfly.attempt import Attempt
from protocols.butterfly.call import LOOK_SECONDS, RoundStart
from protocols.butterfly.resting import RestingMembers
from protocols.history.chain import genesis
from protocols.streams.endpoint import RoundAccounting
from protocols.wire import Offer
from tests.sim import loop as simloop
from tests.sim.averaging import RUN

LIMIT_SECONDS = 1000.0
SIGNER: Any = SimpleNamespace(sign=lambda message: b"", verify=lambda *_: True)
POST: Any = SimpleNamespace(send=lambda *_: None)


@dataclass(frozen=True)
class Conduct:
    """What a member does in the round.

    Attributes:
        done: when its inner steps are complete; None: never.
        leaves: whether its offers say that it leaves, from the first one on.
        tokens: of its first offer.
    """

    done: int | None
    rests: bool = False
    gone: bool = False
    leaves: bool = False
    tokens: int = 1

    @property
    def works(self) -> bool:
        return not self.rests and not self.gone


def called_at(conducts: Sequence[Conduct], roster_changes: bool, lags: float = 0.0) -> float | None:
    """When the first of these members, which may coordinate, calls the round; None: never. A peer lags until `lags`."""

    async def main() -> float | None:
        roster = tuple(Member(f"p{index}") for index in range(len(conducts)))
        head, resting, loop = genesis(RUN, "run", roster, bytes(32)), RestingMembers(), asyncio.get_running_loop()
        host, settings = SimpleNamespace(signer=SIGNER), SimpleNamespace(clusters=False, elements=(64,))
        endpoint: Any = SimpleNamespace(me=roster[0], host=host, settings=settings, accounting=RoundAccounting())
        vote: Any = SimpleNamespace(resting=resting)
        call = RoundStart(
            Attempt(endpoint, POST, head, vote, LIMIT_SECONDS),
            planning.PlanInputs(head.key, 64, 4.0),
            bandwidth=1e6,
            present=lambda: [member for member, each in zip(roster, conducts, strict=True) if not each.gone],
            roster_changes=lambda: roster_changes,
            lagging=lambda: ("joiner",) if loop.time() < lags else (),
        )
        for member, each in zip(roster, conducts, strict=True):
            if each.rests:
                resting.state(head.key, member, True, SIGNER)
            first = Offer(member, each.tokens, 1.0, 0.0, False, each.leaves, 1e6, bytes(32), b"")
            call.on_ready(member.peer, first)
            if each.done is not None:
                loop.call_at(each.done, call.on_ready, member.peer, replace(first, tokens=9, complete=True))
        due = await call.due()
        call.close(None)
        return loop.time() if due else None

    return simloop.run(main())


def promised(conducts: Sequence[Conduct], roster_changes: bool) -> float | None:
    """What docs/protocols.md says: as if only the members that work were in the roster."""
    workers = [each for each in conducts if each.works]
    done = sorted(each.done for each in workers if each.done is not None)
    moments = [float(each.done) for each in workers if each.leaves and each.done is not None]
    for known in range(1, len(done) + 1):
        if (after := planning.call_after(done[:known], len(workers))) is not None:
            moments.append(max(after, done[known - 1]))
    if not workers and roster_changes:
        moments.append(0.0)
    elif not workers and len(conducts) > 1 and all(each.leaves for each in conducts):  # what they have done must count
        moments += [0.0 if each.tokens else float(each.done or 0) for each in conducts if each.tokens or each.done]
    return min(moments, default=None)


DONE = st.none() | st.integers(2, 99)  # after LEAVER_SECONDS
MEMBERS = st.builds(Conduct, DONE, st.booleans(), st.booleans(), st.booleans(), st.integers(0, 1))
ME = st.builds(Conduct, DONE, st.booleans(), st.just(False), st.booleans(), st.integers(0, 1))


@settings(max_examples=150)
@example(Conduct(None, rests=True, leaves=True, tokens=0), [Conduct(None, rests=True, leaves=True, tokens=0)], False)
@given(me=ME, others=st.lists(MEMBERS, max_size=8), roster_changes=st.booleans())
def test_round_is_called_as_if_only_workers_counted(me: Conduct, others: list[Conduct], roster_changes: bool) -> None:
    expected = promised([me, *others], roster_changes)
    assert called_at([me, *others], roster_changes) == (None if expected is None else pytest.approx(expected))


@settings(max_examples=50)
@given(me=ME, others=st.lists(MEMBERS, max_size=4), lags=st.integers(1, 200))
def test_call_waits_for_lagging_peer_unless_member_leaves(me: Conduct, others: list[Conduct], lags: int) -> None:
    conducts = [me, *others]
    due = promised(conducts, False)
    leaves = [each.done for each in conducts if each.works and each.leaves and each.done is not None]
    if due is not None and any(each.works for each in conducts):
        due = max(due, min([float(lags), *leaves]))
    assert called_at(conducts, False, lags) == (None if due is None else pytest.approx(due, abs=LOOK_SECONDS))
