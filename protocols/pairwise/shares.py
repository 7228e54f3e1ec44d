"""Shares of a state, which travel one way: their frames, what giving and taking them does to a state, and the
receiver.
"""

# ruff: noqa: RUF009 - a field's bound is its default

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass
from functools import partial

import torch

from protocols.aio import loop_time, raise_when_gone, run_with_helper
from protocols.allreduce.parts import ReducedPart
from protocols.base import BadPayload, Host, Member, PeerId, PeerSilent, Settings, Stream
from protocols.pairwise.mass_ledger import MassLedger, Share
from protocols.pairwise.shared_state import PairwiseAverager, SharedStateSession
from protocols.pairwise.state_swap import ExchangeMessage, StateReceiver, state_norm
from protocols.peers.timeouts import CHEAP_SECONDS, PeerTimeouts
from protocols.vectors.views import VectorView
from protocols.wire import flag, one, real, register, text, uint

PUSH = "starling/push-sum/share/1"
MAX_TAKING = 4  # peers whose shares are received at once, one share each; others are declined
MOST_SHARE = 64.0
"""Limit of a share's weight, as a multiple of a peer's initial weight. A peer that would exceed twice this accepts
no share, so that it never gives more than others accept."""


@dataclass(frozen=True, slots=True)
class PushShare(ExchangeMessage):
    """A share for one incarnation of the receiver; its chunks follow. `sequence` counts the shares given to it."""

    to: Member = one(Member)
    weight: float = real(1e-280, 1e9)
    elements: int = uint(1 << 48)
    codec: str = text(16)


@dataclass(frozen=True, slots=True)
class RecallShare(ExchangeMessage):
    """Asks whether that share has been counted. If not, the receiver must not count it any more."""

    to: Member = one(Member)


@dataclass(frozen=True, slots=True)
class ShareStatus(ExchangeMessage):
    """Whether the share is counted; if not, it never will be."""

    counted: bool = flag()


register(72, (PushShare, RecallShare, ShareStatus))


def split_share(state: VectorView, part: ReducedPart) -> None:
    """Encode `state` into `part`, then correct `state` so that the mean of what leaves and what stays is as before."""
    for index, low, high, (scratch, sent) in part.pieces(2):
        mine = state.read(low, high, scratch)
        part.codec.encode(mine, part.chunk(index))
        part.codec.decode(part.chunk(index), sent)
        state.write(low, torch.sub(mine, sent, out=sent).add_(mine))


class WeightedAverager(PairwiseAverager):
    """A peer's state, and in `masses` its weights. No task waits for another peer while it holds `turn`."""

    def __init__(self, host: Host, settings: Settings, purpose: str) -> None:
        super().__init__(host, settings, purpose)
        self.masses, self.turn = MassLedger(self.me), asyncio.Lock()

    async def close_round(self) -> None:
        await super().close_round()
        await self.at_rest()

    async def at_rest(self) -> None:
        async with self.turn:
            pass

    async def is_finite(self, state: VectorView) -> bool:
        part = self.part(state.size)
        async with self.turn:
            return math.isfinite(await self.host.compute.run(partial(state_norm, state, part), 4 * state.size))

    async def blend(self, state: VectorView, part: ReducedPart, share: float) -> None:
        """Average an encoded state into `state`, with this weight, between 0 and 1. The caller holds `turn`."""

        def merge() -> None:
            for index, low, high, (scratch, theirs) in part.pieces(2):
                part.codec.decode(part.chunk(index), theirs)
                mine = state.read(low, high, scratch)
                state.write(low, theirs.mul_(share).add_(torch.mul(mine, 1 - share)))

        await self.host.compute.run(merge, 16 * state.size)


class ShareReceiver:
    def __init__(self, weighted: WeightedAverager, bandwidth: float) -> None:
        self._weighted = weighted
        self._timeouts = PeerTimeouts(bandwidth)  # of the links in this direction
        self._taking: set[PeerId] = set()
        weighted.endpoint.serve(PUSH, PushShare, self._serve)
        weighted.endpoint.serve(PUSH, RecallShare, self._send_status)

    async def _serve(self, stream: Stream, give: PushShare) -> None:
        weighted, state, peer = self._weighted, self._weighted.state, stream.peer
        if give.codec != weighted.codec.name:
            raise BadPayload(f"codec {give.codec!r} where the run uses {weighted.codec.name}")
        if give.weight > MOST_SHARE:
            raise BadPayload(f"a share of weight {give.weight:g}, more than {MOST_SHARE:g}")
        weighted.estimator.hear(give.sender.peer, give.key.round)
        busy = peer in self._taking or len(self._taking) >= MAX_TAKING or self._timeouts.resting(peer, loop_time())
        if state is None or busy or weighted.masses.mass + give.weight > 2 * MOST_SHARE:
            return await self._send_status(stream, give)
        self._taking.add(peer)
        try:
            counted = await self._take(state, give, stream)
        except BadPayload:  # a share given to this sender would be lost to us as well
            for timeouts in (self._timeouts, weighted.timeouts):
                timeouts.distrust(peer, loop_time())
            raise
        finally:
            self._taking.remove(peer)
        await stream.send(ShareStatus(give.key, weighted.me, give.sequence, counted))

    async def _send_status(self, stream: Stream, share: PushShare | RecallShare) -> None:
        counted = self._weighted.masses.recalled(share.sender, share.sequence)
        await stream.send(ShareStatus(share.key, self._weighted.me, share.sequence, counted))

    async def _take(self, state: VectorView, give: PushShare, stream: Stream) -> bool:
        weighted = self._weighted
        if give.elements != state.size:
            raise BadPayload(f"a state of {give.elements} elements; the run's have {state.size}")
        theirs = StateReceiver(weighted.part(state.size), weighted.host.compute)
        async with weighted.turn:
            await theirs.measure(stream, state)
        await self._receive(theirs, give, stream)
        while True:
            try:
                await weighted.notifier.until(lambda: weighted.state is not None, stream.deadline)
            except TimeoutError:
                raise PeerSilent(stream.peer, "no state to count it in") from None
            async with weighted.turn:
                if weighted.session and weighted.session.state:
                    return await self._count(weighted.session, weighted.session.state, give, theirs.part)

    async def _receive(self, theirs: StateReceiver, give: PushShare, stream: Stream) -> None:
        timeouts, peer = self._timeouts, stream.peer
        began, size_bytes = loop_time(), theirs.part.size_bytes
        deadline = min(stream.deadline, began + timeouts.timeout_seconds(peer, size_bytes))
        try:
            await run_with_helper(
                theirs.take(stream), raise_when_gone(self._weighted.host.members, give.sender, deadline)
            )
        except PeerSilent as error:
            now = loop_time()
            if now >= min(deadline, began + CHEAP_SECONDS):
                self._weighted.accounting.name(peer, f"no share: {error.why}")
            timeouts.failed(peer, began, now, deadline, theirs.begun)
            raise
        timeouts.took(peer, size_bytes, loop_time(), loop_time() - began)

    async def _count(self, session: SharedStateSession, state: VectorView, give: PushShare, part: ReducedPart) -> bool:
        masses = self._weighted.masses
        before = masses.weight
        counted = masses.take(Share(give.sender, give.to, give.sequence, give.weight))
        if masses.weight == before:
            return counted  # recalled, or counted earlier
        part_of_us = give.weight / masses.weight
        try:
            await self._weighted.blend(state, part, part_of_us)
        finally:
            name = f"{give.name} to {give.to.peer}.{give.to.incarnation}"  # never used twice
            session.count(give.sender.peer, part.chunks, name, part_of_us)
        return counted
