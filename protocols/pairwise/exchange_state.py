"""A peer's state exchanges: the current one, and the results of earlier ones.

A peer is in at most one exchange at a time. During an exchange, only that exchange may touch the peer's state
(`protocols.pairwise.initiator` and `protocols.pairwise.responder` are its two ends).
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from protocols.aio import loop_time
from protocols.base import Deadline, Host, Member, PeerId, PeerSilent, Settings
from protocols.pairwise.shared_state import PairState, SharedStateSession
from protocols.pairwise.state_swap import ExchangeRequest, StateSwap, exchange_id


@dataclass(slots=True, eq=False)
class PairExchange:
    """An exchange that this peer is in.

    Attributes:
        ask: the request that began it, ours or the partner's.
        moving: one end may move, or has moved, so the exchange must not be aborted any more.
        given_up: we answered the asker that we have not moved, so we must not move any more.
        settled: the asker knows that we moved, because it asked.
        done: our state is free again.
    """

    ask: ExchangeRequest
    partner: Member
    session: SharedStateSession
    swap: StateSwap
    deadline: Deadline
    began: float
    moving: bool = False
    given_up: bool = False
    settled: bool = False
    done: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def in_doubt(self) -> bool:
        """Whether the partner may have moved while we have not."""
        return self.moving and self.swap.moved is None


class ExchangeState(PairState):
    """The exchanges of one peer.

    Attributes:
        exchange: the current one.
        round: the last round that this peer completed.
    """

    def __init__(self, host: Host, settings: Settings) -> None:
        super().__init__(host, settings)
        self.round = 0
        self.exchange: PairExchange | None = None
        self._unreported_drifts: list[float] = []  # drifts of half exchanges that ended between two rounds

    def open(self, session: SharedStateSession) -> None:
        super().open(session)
        for drift in self._unreported_drifts:
            session.count_half(drift)
        self._unreported_drifts.clear()

    async def close(self) -> None:
        """End the round. Abort the current exchange, or wait until the state is at rest if it must not be aborted."""
        await super().close()
        if self.exchange and self.exchange.moving:
            await self.exchange.done.wait()

    async def at_rest(self) -> None:
        while exchange := self.exchange:
            await exchange.done.wait()

    def begin(
        self, session: SharedStateSession, ask: ExchangeRequest, partner: Member, deadline: Deadline
    ) -> PairExchange:
        """Begin an exchange. Until `end`, nothing else may touch the session's state."""
        assert session.state is not None and self.exchange is None
        swap = StateSwap(session.state, self.part(session.state.size), self.host.compute)
        self.exchange = PairExchange(ask, partner, session, swap, deadline, loop_time())
        self.partners = (partner.peer,)
        return self.exchange

    def end(self, exchange: PairExchange) -> None:
        """End the exchange: our state is free, and the partner's received state is no longer needed."""
        if self.exchange is exchange:
            self.exchange, self.partners = None, ()
            exchange.swap.discard()
            exchange.done.set()
            self.notifier.notify()

    def check(self, exchange: PairExchange) -> None:
        """Check that our end may still move.

        Raises:
            PeerSilent: the round ended meanwhile, or we answered the asker that we have not moved.
        """
        if self.session is not exchange.session:
            raise PeerSilent(exchange.partner.peer, "our round was left before the exchange was over")
        if exchange.given_up:
            raise PeerSilent(exchange.partner.peer, "the exchange was given up before we had everything")

    async def move(self, exchange: PairExchange) -> None:
        """Move our end and count the exchange, even if we are cancelled. Both ends have received everything."""
        exchange.moving = True
        swap, partner = exchange.swap, exchange.partner.peer
        try:
            await swap.commit()
        finally:
            if swap.moved is not None:
                exchange.session.count(partner, swap.chunks, exchange_id(partner, exchange.ask), 0.5)
        now = loop_time()
        self.timeouts.took(partner, swap.size_bytes, now, now - exchange.began)

    def half(self, drift: float) -> None:
        """Count an exchange that may have moved one end only."""
        self.half_exchanges += 1
        if self.session:
            self.session.count_half(drift)
        else:
            self._unreported_drifts.append(drift)

    def failed(self, peer: PeerId, began: float, until: Deadline, why: str, slow: bool) -> None:
        """Record a failed exchange. A peer that cost us time is avoided for a while.

        Args:
            slow: the exchange was in progress; False: there was no answer.
        """
        self.accounting.name(peer, f"no exchange: {why}")
        self.timeouts.failed(peer, began, loop_time(), until, slow)

    def distrust(self, peer: PeerId) -> None:
        self.timeouts.distrust(peer, loop_time())
