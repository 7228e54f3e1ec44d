"""Gossip: pairs of peers move their whole states to their mean, without groups, barriers or votes.

In each round a peer asks one other peer (or a few: `protocols.pairwise.matching`) to exchange parameters and momentum.
The partner answers at once, even while it trains: it accepts, or is busy. This is randomised pairwise averaging (Boyd
et al. 2006) of states after an outer step, without waiting for the partner's work (AD-PSGD, Lian et al. 2018). All of
it costs a peer at most the time limit of one exchange (`protocols.peers.timeouts`), however many partners are slow.
"""

from __future__ import annotations

from collections.abc import Collection

from protocols.aio import loop_time
from protocols.base import Deadline, Host, Member, PeerId, Settings
from protocols.pairwise import matching
from protocols.pairwise.closing import ClosingExchanges
from protocols.pairwise.exchanges import ExchangeOutcome, ExchangingAverager
from protocols.pairwise.shared_state import SharedStateSession
from protocols.vectors.views import VectorView

OTHERS = 2  # how many other peers a peer asks before it pauses, if its partners are busy
TRIES = 3  # how often a partner that the schedule names is asked while it is busy
BUSY_PAUSE_SECONDS = 0.25
"""Least pause before asking a busy peer again; the most is twice this. Each request takes two round trips."""


class Gossip(ExchangingAverager):
    def __init__(self, host: Host, settings: Settings) -> None:
        super().__init__(host, settings, "gossip")
        self._steps = ClosingExchanges(self.endpoint, self.timeouts)

    async def mix(self, session: SharedStateSession, state: VectorView) -> None:
        """Ask each partner that the schedule names; if an exchange fails, ask others while time is left."""
        self.round = session.round
        size_bytes = self.codec.encoded_bytes(state.size)
        due, others = self._candidates(session)
        if not due:
            return
        until = min(session.deadline, loop_time() + self.timeouts.timeout_seconds(due[0].peer, size_bytes))
        tries = 0
        while loop_time() < until and ((due and tries < TRIES) or (others and not session.held)):
            if tries:
                await self._pause(session, until)
            tries += 1
            more = [each for each in others if each not in due]
            for partner in [*due, *self.rng.sample(more, min(OTHERS, len(more)))]:
                await self.at_rest()
                now, peer = loop_time(), partner.peer
                if session.held and (partner not in due or peer in session.held):
                    verdict = ExchangeOutcome.HELD  # another peer has asked us
                elif not session.has_time(self.timeouts.expected_seconds(peer, size_bytes), until):
                    verdict = ExchangeOutcome.FAILED  # the time left is too short for this one
                else:
                    its_own = now + self.timeouts.timeout_seconds(peer, size_bytes)
                    verdict = await self.ask(session, partner, min(until, its_own))
                if verdict in (ExchangeOutcome.HELD, ExchangeOutcome.FAILED):
                    due, others = ([each for each in group if each != partner] for group in (due, others))

    async def close(self, session: SharedStateSession, state: VectorView, here: Collection[PeerId]) -> None:
        """Exchange with one partner in each step. A failed exchange is not retried with another peer."""
        self.round = session.round
        everybody = sorted({*here, self.me.peer})
        place, size_bytes = everybody.index(self.me.peer), self.codec.encoded_bytes(state.size)
        steps = [(everybody[partner_of[place]],) for partner_of in matching.closing_pairs(len(everybody))]

        async def step(there: tuple[Member | None, ...], until: Deadline) -> None:
            (partner,) = there
            if partner and await self._steps.meets(partner, until):
                session.closing_exchanges += await self._exchange(session, partner, size_bytes, until)

        await self._steps.run(session, size_bytes, steps, step)

    async def _exchange(self, session: SharedStateSession, partner: Member, size_bytes: int, until: Deadline) -> bool:
        """Exchange with a partner that wants it too, whichever of the two asks."""
        peer, before = partner.peer, session.counted(partner.peer)
        while loop_time() < until and not session.cut.is_set():
            await self.at_rest()
            if session.counted(peer) > before:
                break
            its_own = loop_time() + self.timeouts.timeout_seconds(peer, size_bytes)
            verdict = await self.ask(session, partner, min(until, its_own))
            if verdict in (ExchangeOutcome.HELD, ExchangeOutcome.FAILED):
                break
            if verdict is ExchangeOutcome.BUSY:
                again = min(until, loop_time() + BUSY_PAUSE_SECONDS)
                await self.notifier.reached(lambda: session.counted(peer) > before, again)
        return session.counted(peer) > before

    async def _pause(self, session: SharedStateSession, until: Deadline) -> None:
        held, seconds = dict(session.held), self.rng.uniform(BUSY_PAUSE_SECONDS, 2 * BUSY_PAUSE_SECONDS)
        await self.notifier.reached(lambda: session.held != held, min(until, loop_time() + seconds))

    def _candidates(self, session: SharedStateSession) -> tuple[list[Member], list[Member]]:
        """The peers that the schedule names, and the others. Both exclude peers that recently cost us a timeout."""
        now, live = loop_time(), self.others()
        named = self.named(session, live)
        up = [member for member in live.values() if not self.timeouts.resting(member.peer, now)]
        due = [member for member in up if member.peer in named]
        others = [member for member in up if member.peer not in named]
        return due or self.rng.sample(others, min(1, len(others))), others
