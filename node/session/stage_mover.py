"""A move of this peer to another stage, from the request to the end of its session in the present one.

The peer announces the move by its heartbeats, and fetches the other stage's state while it trains on. Then it makes
sure that its own stage keeps a member that has the state, and ends its session after the round under way. Its process
begins another one in the other stage (`node.session.peer`). Whatever fails before that leaves everything as it was.

No move empties a stage. A mover leaves only if another member of the roster has answered a heartbeat that announced
the move, and has said itself that it stays. Of the last two peers of a stage that move at the same time, each hears of
the other's move before it has that answer: the one with the lower hash goes, once the other has given up.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Collection
from typing import TYPE_CHECKING

from node.membership.hello import STAYS, Heartbeat
from node.membership.membership import Membership
from node.membership.peer_record import PeerRecord
from node.membership.seats import Seats
from protocols.aio import loop_time
from protocols.base import Member, PeerId

if TYPE_CHECKING:
    from protocols.pipeline.balance import Placements

CONFIRM_SECONDS = 30.0
"""Longest time to wait for a member that stays, once the other stage's state is here."""
INTENT_SECONDS = 3.0
"""From the announcement of a move that no user asked for: by then the others' announcements are here."""
LOOK_SECONDS, PAUSE_SECONDS = 0.25, 60.0


class MoveRefused(ValueError):
    """The peer cannot move, or not any more. The message says why, for its user."""


def _moves(said: Heartbeat) -> bool:
    return any(each.moving != STAYS for each in said.placement)


class StageMover:
    """Moves a peer out of its stage, one move at a time. `problem` says why the last one came to nothing."""

    def __init__(
        self,
        me: Member,
        stage: int,
        *,
        seats: Seats,
        membership: Membership,
        roster: Callable[[], Collection[Member]],
        is_busy: Callable[[], str],
        fetch: Callable[[int], Awaitable[None]],
        leave: Callable[[int], None],
        say: Callable[[str], None],
    ) -> None:
        """`roster` is that of this peer's stage. `is_busy` says why the peer may not move now; empty if it may.

        `fetch` downloads a stage's state, or raises `MoveRefused`. `leave` ends the session in order to move.
        """
        self._me, self._stage, self._seats, self._membership = me, stage, seats, membership
        self._roster, self._is_busy, self._fetch, self._leave, self._say = roster, is_busy, fetch, leave, say
        self.target: int | None = None  # of the move under way
        self.phase = self.problem = ""
        self._still: Callable[[], bool] | None = None
        self._refill: Callable[[int], Awaitable[None]] | None = None
        self._asked = asyncio.Event()

    # -- what is asked for --------------------------------------------------------------------------------------------

    def request(self, target: int, still: Callable[[], bool] | None = None) -> str:
        """Begin a move; returns a line for the user. Raises `MoveRefused`, which changes nothing.

        `still` is of a move that no user asked for: whether it is still worth while, now that others know of it.
        """
        self._begin(target)
        self._still = still
        self.phase = f"the state of stage {target} is fetched; training continues meanwhile"
        return f"moving to stage {target}: its state is fetched first, and training continues meanwhile"

    def refill(self, target: int, prepare: Callable[[int], Awaitable[None]]) -> None:
        """Begin a move to a stage that has lost all its members. Raises `MoveRefused`, which changes nothing.

        Once another member of this peer's stage stays, `prepare` makes the new stage ready; it raises `MoveRefused`.
        """
        self._begin(target, prepare)
        self.phase = f"stage {target} has lost all its members, and begins again here; training continues meanwhile"

    def _begin(self, target: int, refill: Callable[[int], Awaitable[None]] | None = None) -> None:
        self._require(target, is_lost=refill is not None)
        if self.target is not None:
            raise MoveRefused(f"a move to stage {self.target} is under way: wait for its end")
        self.target, self.problem, self._still, self._refill = target, "", None, refill
        self._asked.set()

    def _require(self, target: int, is_lost: bool = False) -> None:
        """Raise `MoveRefused` if there is no such move now."""
        if not 0 <= target < self._seats.stages:
            raise MoveRefused(f"the run has the stages 0 to {self._seats.stages - 1}, and no stage {target}")
        if target == self._stage:
            raise MoveRefused(f"this peer is in stage {target} already")
        if why := self._is_busy():
            raise MoveRefused(why)
        has_live = any(each.stage == target for each in self._live())
        if not is_lost and (target not in self._seats.known or not has_live):
            raise MoveRefused(f"no peer of stage {target} is live, so its state cannot be fetched: wait for one")
        if not any(self._stays(each) for each in self._others()):
            raise MoveRefused(self._would_be_empty())

    def _would_be_empty(self) -> str:
        return f"stage {self._stage} would be empty: no other live member of its roster stays; wait until one joins"

    def _live(self) -> list[PeerRecord]:
        return [each for each in self._membership.contacts() if each.here]

    def _others(self) -> list[PeerRecord]:
        """The other live members of this stage's roster: they have its state."""
        members = set(self._roster())
        return [each for each in self._live() if each.member in members and each.peer != self._me.peer]

    def _stays(self, other: PeerRecord) -> bool:
        return not (other.said.leaving or _moves(other.said))

    @property
    def is_by_hand(self) -> bool:
        """Whether a user asked for the move under way."""
        return self._still is None and self._refill is None

    # -- the move -----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Carry out requests until a move has ended the session, or for ever."""
        while True:
            await self._asked.wait()
            self._asked.clear()
            assert self.target is not None
            self._say(f"moving to stage {self.target}: {self.phase}")
            try:
                await self._move(self.target)
                return
            except MoveRefused as error:
                self.problem = f"not moved to stage {self.target}: {error}"
                self._say(self.problem)
                self.target, self.phase = None, ""
                self._membership.announce_placement(moving=STAYS)

    async def _move(self, target: int) -> None:
        self._membership.announce_placement(moving=target)
        announced_at = loop_time()
        if self._still:
            await asyncio.sleep(INTENT_SECONDS)
        self._require_gain()
        if self._refill:
            await self._confirmed(announced_at)
            await self._refill(target)
            return self._leave(target)
        await self._fetch(target)
        self.phase = f"its state is here; another member of stage {self._stage} has yet to say that it stays"
        await self._confirmed(announced_at)
        self._require(target)
        self._require_gain()
        self._leave(target)

    def _require_gain(self) -> None:
        if self._still and not self._still():
            raise MoveRefused("another peer moves first, or the move gains too little now")

    async def _confirmed(self, announced_at: float) -> None:
        """Wait until another member stays, as it has said since it heard of this move."""
        until = loop_time() + CONFIRM_SECONDS
        while True:
            others = self._others()
            told = [each for each in others if each.answered_at > announced_at]
            if any(not (each.echoed.leaving or _moves(each.echoed)) for each in told):
                return
            movers = [each.peer for each in told if _moves(each.echoed) and not each.echoed.leaving]
            rivals = len(told) == len(others) and any(self._rank(peer) < self._rank(self._me.peer) for peer in movers)
            if rivals or loop_time() >= until:
                raise MoveRefused(self._would_be_empty())
            await asyncio.sleep(LOOK_SECONDS)

    def _rank(self, peer: str) -> bytes:
        return hashlib.sha256(f"{self._stage} {peer}".encode()).digest()


class Rebalancer:
    """Moves a peer to the stage that needs it most, by the rule of `protocols.pipeline.balance`.

    It looks once in a round, and not more often than each minute. If the plan that follows from its view begins with
    its own move, it announces that, and looks again once it has heard the others, and before it leaves: of two such
    moves from or to one stage one is given up. `view` is what this peer sees now; its round is the last decided one.
    """

    def __init__(
        self, me: PeerId, mover: StageMover, *, view: Callable[[], Placements], say: Callable[[str], None]
    ) -> None:
        self._me, self._mover, self._view, self._say = me, mover, view, say

    async def run(self) -> None:
        """Look for a move for ever. `StageMover.run` carries it out, and ends the session."""
        last = self._view().round
        while True:
            await asyncio.sleep(PAUSE_SECONDS)
            view = self._view()
            if view.round > last:
                last = view.round
                self.consider(view)

    def consider(self, view: Placements) -> None:
        """Ask for this peer's move, if the plan begins with it."""
        from protocols.pipeline.balance import plan_moves  # only runs with stages load its code

        plan = plan_moves(view)
        mine = next((each for each in plan.moves if each.peer == self._me), None)
        if mine is None:
            return
        try:
            self._mover.request(mine.target, self._still)
        except MoveRefused:
            return  # it pauses, leaves, or is the last member of its stage's roster: the others' plans go on without it
        gain = f"{plan.before:.3g} to {plan.after:.3g} microbatches/s"
        self._say(f"stage {mine.target} needs this peer more: the slowest stage is to come from {gain}")

    def _still(self) -> bool:
        from protocols.pipeline.balance import may_go_on

        return may_go_on(self._view(), self._me)
