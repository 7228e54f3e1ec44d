"""Asks the live peers for their status, one after the other, while a page is visible or `status --swarm` runs."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

from node.reporting.status import Status, printable, short
from node.reporting.swarm import CountedRounds, SwarmStatus, swarm_status
from node.runtime.bounded import count
from protocols.aio import Notifier, loop_time
from protocols.base import BadPayload, Deadline, PeerError, PeerId
from protocols.peers.estimates import RecentDict

ASK_SECONDS = 5.0
TURN_SECONDS, PEER_SECONDS = 15.0, 1.0
"""Least time between two questions to one peer: a turn, or a second for each peer that is asked, if that is longer."""
KEPT_SECONDS = 600.0  # for which an answer is shown, and a peer whose answer cannot be read is not asked again
INTEREST_SECONDS = 5.0  # for which a reader's interest lasts
LOOK_SECONDS = 1.0
MAX_ASKED = 64
MAX_KEPT = 256

Ask = Callable[[PeerId, Deadline], Awaitable[Status]]


class SwarmPoller:
    """Does nothing before `run`. A peer without a reader asks nobody."""

    def __init__(self, status: Callable[[], Status], say: Callable[[str], None], update: str = "") -> None:
        """`status` is this peer's own, `update` how its code is updated."""
        self.counted = CountedRounds()
        self.unreadable: Counter[PeerId] = Counter()  # answers that could not be read, by peer
        self._status, self._say, self._update = status, say, update
        self._answers: RecentDict[PeerId, tuple[Status, float]] = RecentDict(MAX_KEPT)
        self._asked: RecentDict[PeerId, float] = RecentDict(MAX_KEPT)
        self._due: RecentDict[PeerId, float] = RecentDict(MAX_KEPT)  # when a peer may be asked again
        self._wanted_until, self._newer = -math.inf, ""
        self._peers: Callable[[], Sequence[PeerId]] = tuple
        self._changed = Notifier()

    def want(self) -> None:
        """Note that a reader looks now."""
        self._wanted_until = loop_time() + INTEREST_SECONDS
        self._changed.notify()

    def view(self, mine: Status | None = None) -> SwarmStatus:
        """The swarm as it is known now. `mine` is this peer's status, if the caller has it."""
        now = loop_time()
        return swarm_status(
            mine or self._status(),
            {peer: (said, now - at) for peer, (said, at) in self._answers.items() if now - at <= KEPT_SECONDS},
            self.counted,
            asked=all(now - self._asked.get(peer, -math.inf) <= self._fresh_seconds(peer) for peer in self._peers()),
            unreadable=self.unreadable,
            update=self._update,
        )

    def _fresh_seconds(self, peer: PeerId) -> float:
        return KEPT_SECONDS if peer in self.unreadable else 2 * self._turn_seconds()

    def _turn_seconds(self) -> float:
        return max(TURN_SECONDS, PEER_SECONDS * len(self._peers()))

    async def run(self, ask: Ask, live: Callable[[], Sequence[PeerId]]) -> None:
        """Ask for ever. `live` returns the other live peers; those beyond the first `MAX_ASKED` are not asked."""
        self._peers = lambda: live()[:MAX_ASKED]
        warned = -math.inf
        while True:
            await self._changed.until(self._is_wanted, math.inf)
            due = [peer for peer in self._peers() if loop_time() >= self._due.get(peer, -math.inf)]
            for peer in due:
                if self._is_wanted():
                    await self._ask(peer, ask)
            if due and loop_time() >= warned + TURN_SECONDS:
                warned = loop_time()
                self._warn()
            await asyncio.sleep(LOOK_SECONDS)

    def _is_wanted(self) -> bool:
        return loop_time() < self._wanted_until

    async def _ask(self, peer: PeerId, ask: Ask) -> None:
        self._due[peer] = loop_time() + self._turn_seconds()
        try:
            async with asyncio.timeout(ASK_SECONDS):
                said = await ask(peer, loop_time() + ASK_SECONDS)
            self._answers[peer] = said, loop_time()
        except BadPayload as error:
            self._due[peer] = loop_time() + KEPT_SECONDS
            if count(self.unreadable, peer, MAX_KEPT):
                name = next((each.nickname for each in self._status().peers if each.peer == peer), "")
                who, why = f"{printable(name)} ({short(peer)})".lstrip(), printable(str(error), 200)
                self._say(f"the status of {who} cannot be read ({why}): it is asked again after ten minutes")
        except (PeerError, TimeoutError):
            pass  # its last answer is shown until it is too old; whether the peer is live, heartbeats say
        self._asked[peer] = loop_time()

    def _warn(self) -> None:
        """Say once that most peers run a later version."""
        newer = self.view().newer
        if newer and newer != self._newer:
            self._say(newer)
        self._newer = newer or self._newer
