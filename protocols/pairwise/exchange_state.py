"""What a peer knows of its exchanges of states: the one that it is in, whose state it is, what became of the others.

One at a time: nobody touches the state of a peer that is in an exchange but that exchange
(`protocols.pairwise.initiator`, `protocols.pairwise.responder`: its two ends).
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Protocol

from protocols.aio import Notifier
from protocols.base import Contribution, Deadline, Member, PeerId, PeerSilent, RoundKey
from protocols.codec import codec
from protocols.endpoint import ProtocolEndpoint
from protocols.pairwise.claimed_rounds import ClaimedRounds
from protocols.pairwise.peer_timeouts import PeerTimeouts
from protocols.pairwise.state_swap import ExchangeRequest, StateSwap, exchange_id
from protocols.vectors import VectorView


class StateOwner(Protocol):
    """Whose state is exchanged, for one round.

    Attributes:
        state: what others may average with; None: nothing, at the moment.
        deadline: of the round.
        held: of whom the state holds something.
        closing: whether this is the end of the run, and not a round.
    """

    closing: bool
    key: RoundKey
    deadline: Deadline
    state: VectorView | None
    held: dict[PeerId, Contribution]

    def count(self, peer: PeerId, chunks: int, name: str, share: float) -> None:
        """An exchange held: so much of the state is this peer's now."""

    def count_half(self, drift: float) -> None:
        """One that may have moved one end only, by this share of its norm."""


@dataclass(slots=True, eq=False)
class PairExchange:
    """An exchange that this peer is in.

    Attributes:
        ask: the question that began it, ours or the partner's.
        moving: one end may move, or has: it is not to be broken off any more.
        given_up: the asker has been told that we did not move, so we must not.
        settled: the asker knows that we have moved, by asking.
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
        """One end may have moved, and ours has not."""
        return self.moving and self.swap.moved is None


class ExchangeState:
    """Attributes:
    owner: of the round that this peer is in; None between two rounds.
    exchange: the one under way.
    half_exchanges: that were counted, in all.
    estimator: how far the others are.
    round: that this peer has come to the end of last.
    notifier: rings when an exchange has ended.
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
        """A round begins."""
        self.owner = owner
        for drift in self._untold:
            owner.count_half(drift)
        self._untold.clear()

    async def close(self) -> None:
        """It is over; what is under way breaks off, unless it cannot: then this waits until the state is at rest."""
        owner, self.owner = self.owner, None
        if owner:
            owner.state = None
        if self.exchange and self.exchange.moving:
            await self.exchange.done.wait()

    def begin(self, owner: StateOwner, ask: ExchangeRequest, partner: Member, deadline: Deadline) -> PairExchange:
        """Nobody else may touch the owner's state from now on, until `end`."""
        assert owner.state is not None and self.exchange is None
        swap = StateSwap(owner.state, self.codec, self._chunk_elements, self.host.compute)
        self.exchange = PairExchange(ask, partner, owner, swap, deadline, asyncio.get_running_loop().time())
        return self.exchange

    def end(self, exchange: PairExchange) -> None:
        """Our state is free, and what came of theirs is not needed any more."""
        if self.exchange is exchange:
            self.exchange = None
            exchange.swap.discard()
            exchange.done.set()
            self.notifier.notify()

    def check(self, exchange: PairExchange) -> None:
        """
        Raises:
            PeerSilent: our end may not move: the round was left meanwhile, or the asker told that we have not.
        """
        if self.owner is not exchange.owner:
            raise PeerSilent(exchange.partner.peer, "our round was left before the exchange was over")
        if exchange.given_up:
            raise PeerSilent(exchange.partner.peer, "the exchange was given up before we had everything")

    async def move(self, exchange: PairExchange) -> None:
        """Both have everything: our end moves, and it is counted, even if we are cancelled."""
        exchange.moving = True
        swap, partner = exchange.swap, exchange.partner.peer
        try:
            await swap.commit()
        finally:
            if swap.moved is not None:
                exchange.owner.count(partner, swap.chunks, exchange_id(partner, exchange.ask), 0.5)
        now = asyncio.get_running_loop().time()
        self.patience.took(partner, swap.size_bytes, now, now - exchange.began)

    def half(self, drift: float) -> None:
        """An exchange may have moved one end only."""
        self.half_exchanges += 1
        if self.owner:
            self.owner.count_half(drift)
        else:
            self._untold.append(drift)

    def failed(self, peer: PeerId, began: float, until: Deadline, why: str, slow: bool) -> None:
        """An exchange came to nothing; who cost us time is left alone for a while.

        Args:
            slow: it was under way; else there was no answer.
        """
        self.accounting.name(peer, f"no exchange: {why}")
        self.patience.failed(peer, began, asyncio.get_running_loop().time(), until, slow)

    def distrust(self, peer: PeerId) -> None:
        self.patience.distrust(peer, asyncio.get_running_loop().time())
