"""A state with a weight, which the senders and receivers of shares change in turn."""

from __future__ import annotations

import asyncio
import math
from functools import partial

from protocols.aio import Notifier
from protocols.allreduce.parts import ReducedPart
from protocols.base import Host, Settings
from protocols.codec import codec
from protocols.endpoint import ProtocolEndpoint
from protocols.pairwise.claimed_rounds import ClaimedRounds
from protocols.pairwise.mass_ledger import MassLedger
from protocols.pairwise.peer_timeouts import PeerTimeouts
from protocols.pairwise.shared_state import SharedStateSession
from protocols.pairwise.shares import merge_share
from protocols.pairwise.state_receiver import state_norm
from protocols.pairwise.state_swap import HEADER_LIMIT
from protocols.vectors import VectorView


class WeightedState:
    """A peer's state and its weight in push-sum.

    Attributes:
        masses: the weights of this peer and of its shares; its values are 0, because states are stored elsewhere.
        session: of the round that this peer is in; None between two rounds.
        turn: a lock that a task holds while it changes the state, and never while it waits for another peer.
        notifier: notifies when there is a state.
        estimator: estimates how far the other peers are.
    """

    def __init__(self, host: Host, settings: Settings) -> None:
        """Create the state.

        Raises:
            ValueError: unknown codec.
        """
        self.host, self.endpoint = host, ProtocolEndpoint(host, settings, HEADER_LIMIT)
        self.me, self.accounting = self.endpoint.me, self.endpoint.accounting
        self.codec, self.patience = codec(settings.codec), PeerTimeouts(settings.bandwidth)
        self.masses, self.estimator = MassLedger(self.me, 0.0), ClaimedRounds()
        self.session: SharedStateSession | None = None
        self.turn, self.notifier = asyncio.Lock(), Notifier()
        self._chunk_elements = settings.chunk_elements

    @property
    def state(self) -> VectorView | None:
        """The state that shares are split from and merged into; None while there is nothing to average."""
        return self.session.state if self.session else None

    def part(self, elements: int) -> ReducedPart:
        """Allocate an encoded state."""
        return ReducedPart(self.codec, 0, elements, self._chunk_elements)

    async def is_finite(self, state: VectorView) -> bool:
        """Whether the state is finite, so that it may be given away."""
        part = self.part(state.size)
        async with self.turn:
            return math.isfinite(await self.host.compute.run(partial(state_norm, state, part), 4 * state.size))

    async def blend(self, state: VectorView, part: ReducedPart, share: float) -> None:
        """Merge a received state with this weight. The caller holds `turn`."""
        await self.host.compute.run(partial(merge_share, state, part, share), 16 * state.size)
