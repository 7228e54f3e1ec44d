"""The receiving end of shares: a few arrive at once, and each is counted once, as soon as there is a state for it."""

from __future__ import annotations

from protocols.aio import loop_time, run_with_helper
from protocols.allreduce.parts import ReducedPart
from protocols.base import BadPayload, PeerId, PeerSilent, Stream
from protocols.pairwise.mass_ledger import Share
from protocols.pairwise.shared_state import SharedStateSession
from protocols.pairwise.shares import PUSH, PushShare, RecallShare, ShareStatus
from protocols.pairwise.state_receiver import StateReceiver
from protocols.pairwise.state_swap import watch
from protocols.pairwise.weighted_state import WeightedState
from protocols.peers.timeouts import CHEAP_SECONDS, PeerTimeouts
from protocols.vectors.views import VectorView

MAX_TAKING = 4
"""Peers whose shares are received at once, one share each; others are declined."""
MOST_SHARE = 64.0
"""Limit of a share's weight, as a multiple of a peer's initial weight. A peer that would exceed twice this accepts
no share, so that it never gives more than others accept.
"""


class ShareReceiver:
    """Serves `PUSH`."""

    def __init__(self, weighted: WeightedState, bandwidth: float) -> None:
        self._weighted = weighted
        self._timeouts = PeerTimeouts(bandwidth)  # timeouts from the lines in this direction
        self._taking: set[PeerId] = set()
        weighted.endpoint.serve(PUSH, PushShare, self._serve)
        weighted.endpoint.serve(PUSH, RecallShare, self._send_status)

    async def _serve(self, stream: Stream, give: PushShare) -> None:
        weighted, state, peer = self._weighted, self._weighted.state, stream.peer
        self._admit(give)
        if state is None or self._is_busy(peer) or weighted.masses.mass + give.weight > 2 * MOST_SHARE:
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
        """Answer whether a share has been counted; if not, it never will be."""
        counted = self._weighted.masses.recalled(share.sender, share.sequence)
        await stream.send(ShareStatus(share.key, self._weighted.me, share.sequence, counted))

    def _is_busy(self, peer: PeerId) -> bool:
        now = loop_time()
        return peer in self._taking or len(self._taking) >= MAX_TAKING or self._timeouts.resting(peer, now)

    def _admit(self, give: PushShare) -> None:
        """Check a share's header.

        Raises:
            BadPayload: another codec, or an impossible weight.
        """
        weighted = self._weighted
        if give.codec != weighted.codec.name:
            raise BadPayload(f"codec {give.codec!r} where the run uses {weighted.codec.name}")
        if give.weight > MOST_SHARE:
            raise BadPayload(f"a share of weight {give.weight:g}, more than {MOST_SHARE:g}")
        weighted.estimator.hear(give.sender.peer, give.key.round)

    async def _take(self, state: VectorView, give: PushShare, stream: Stream) -> bool:
        """Receive a share, and count it as soon as there is a state to count it in.

        Raises:
            BadPayload: it broke a rule.
            PeerSilent: the stream broke off, the sender was lost, or it took too long.
        """
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
            await run_with_helper(theirs.take(stream), watch(self._weighted.host.members, give.sender, deadline))
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
        counted = masses.take(Share(give.sender, give.to, give.sequence, 0.0, give.weight))
        if masses.weight == before:
            return counted  # recalled, or counted earlier
        part_of_us = give.weight / masses.weight
        try:
            await self._weighted.blend(state, part, part_of_us)
        finally:
            session.count(give.sender.peer, part.chunks, give.share_name, part_of_us)
        return counted
