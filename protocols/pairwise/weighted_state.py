"""A state with a weight, which the senders and receivers of shares change in turn."""

from __future__ import annotations

import asyncio
import math
from functools import partial

from protocols.allreduce.parts import ReducedPart
from protocols.base import Host, Settings
from protocols.pairwise.mass_ledger import MassLedger
from protocols.pairwise.shared_state import PairState
from protocols.pairwise.shares import merge_share
from protocols.pairwise.state_receiver import state_norm
from protocols.vectors.views import VectorView


class WeightedState(PairState):
    """A peer's state and its weight in push-sum.

    Attributes:
        masses: the weights of this peer and of its shares; its values are 0, because states are stored elsewhere.
        turn: a lock that a task holds while it changes the state, and never while it waits for another peer.
    """

    def __init__(self, host: Host, settings: Settings) -> None:
        super().__init__(host, settings)
        self.masses, self.turn = MassLedger(self.me, 0.0), asyncio.Lock()

    async def close(self) -> None:
        await super().close()
        await self.at_rest()

    async def at_rest(self) -> None:
        async with self.turn:
            pass

    async def is_finite(self, state: VectorView) -> bool:
        """Whether the state is finite, so that it may be given away."""
        part = self.part(state.size)
        async with self.turn:
            return math.isfinite(await self.host.compute.run(partial(state_norm, state, part), 4 * state.size))

    async def blend(self, state: VectorView, part: ReducedPart, share: float) -> None:
        """Merge a received state with this weight. The caller holds `turn`."""
        await self.host.compute.run(partial(merge_share, state, part, share), 16 * state.size)
