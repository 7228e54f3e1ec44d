"""What a peer knows of its state exchanges: the current one, the owner of the state, and the results of earlier ones.

A peer is in at most one exchange at a time. During an exchange, only that exchange may touch the peer's state
(`protocols.pairwise.initiator` and `protocols.pairwise.responder` are its two ends).
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Protocol

from protocols.aio import Notifier, loop_time
from protocols.base import Contribution, Deadline, Member, PeerId, PeerSilent, RoundKey
from protocols.codec import codec
from protocols.endpoint import ProtocolEndpoint
from protocols.pairwise.claimed_rounds import ClaimedRounds
from protocols.pairwise.peer_timeouts import PeerTimeouts
from protocols.pairwise.state_swap import ExchangeRequest, StateSwap, exchange_id
from protocols.vectors import VectorView


class StateOwner(Protocol):
    """The owner of the exchanged state, for one round.

    Attributes:
        state: what other peers may average with; None while there is nothing to average.
        deadline: of the round.
        held: the peers whose values are part of the state.
        closing: whether these are the closing exchanges of the run rather than a round.
    """

    closing: bool
    key: RoundKey
    deadline: Deadline
    state: VectorView | None
    held: dict[PeerId, Contribution]

    def count(self, peer: PeerId, chunks: int, name: str, share: float) -> None:
        """Count a completed exchange: this share of the state now comes from this peer."""

    def count_half(self, drift: float) -> None:
        """Count an exchange that may have moved one end only, by this share of the state's norm."""


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
    owner: StateOwner
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


class ExchangeState:
    """The exchanges of one peer.

    Attributes:
        owner: of the round that this peer is in; None between two rounds.
        exchange: the current one.
        half_exchanges: how many have been counted in total.
        estimator: estimates how far the other peers are.
        round: the last round that this peer completed.
        notifier: notifies when an exchange has ended.
    """

    def __init__(self, endpoint: ProtocolEndpoint) -> None:
        settings = endpoint.settings
        self.endpoint, self.codec = endpoint, codec(settings.codec)
        self.host, self.me, self.accounting = endpoint.host, endpoint.me, endpoint.accounting
        self.patience, self.notifier = PeerTimeouts(settings.bandwidth), Notifier()
        self.half_exchanges = 0
        self.estimator, self.round = ClaimedRounds(), 0
        self.owner: StateOwner | None = None
        self.exchange: PairExchange | None = None
        self._chunk_elements = settings.chunk_elements
        self._untold: list[float] = []  # drifts of half exchanges that ended between two rounds

    def open(self, owner: StateOwner) -> None:
        """Begin a round."""
        self.owner = owner
        for drift in self._untold:
            owner.count_half(drift)
        self._untold.clear()

    async def close(self) -> None:
        """End the round. Abort the current exchange, or wait until the state is at rest if it must not be aborted."""
        owner, self.owner = self.owner, None
        if owner:
            owner.state = None
        if self.exchange and self.exchange.moving:
            await self.exchange.done.wait()

    def begin(self, owner: StateOwner, ask: ExchangeRequest, partner: Member, deadline: Deadline) -> PairExchange:
        """Begin an exchange. Until `end`, nothing else may touch the owner's state."""
        assert owner.state is not None and self.exchange is None
        swap = StateSwap(owner.state, self.codec, self._chunk_elements, self.host.compute)
        self.exchange = PairExchange(ask, partner, owner, swap, deadline, loop_time())
        return self.exchange

    def end(self, exchange: PairExchange) -> None:
        """End the exchange: our state is free, and the partner's received state is no longer needed."""
        if self.exchange is exchange:
            self.exchange = None
            exchange.swap.discard()
            exchange.done.set()
            self.notifier.notify()

    def check(self, exchange: PairExchange) -> None:
        """Check that our end may still move.

        Raises:
            PeerSilent: the round ended meanwhile, or we answered the asker that we have not moved.
        """
        if self.owner is not exchange.owner:
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
                exchange.owner.count(partner, swap.chunks, exchange_id(partner, exchange.ask), 0.5)
        now = loop_time()
        self.patience.took(partner, swap.size_bytes, now, now - exchange.began)

    def half(self, drift: float) -> None:
        """Count an exchange that may have moved one end only."""
        self.half_exchanges += 1
        if self.owner:
            self.owner.count_half(drift)
        else:
            self._untold.append(drift)

    def failed(self, peer: PeerId, began: float, until: Deadline, why: str, slow: bool) -> None:
        """Record a failed exchange. A peer that cost us time is avoided for a while.

        Args:
            slow: the exchange was in progress; False: there was no answer.
        """
        self.accounting.name(peer, f"no exchange: {why}")
        self.patience.failed(peer, began, loop_time(), until, slow)

    def distrust(self, peer: PeerId) -> None:
        self.patience.distrust(peer, loop_time())
