"""Push-sum between peers: each round a peer gives a share of its state away, one way, and waits for no other peer.

A run selects this protocol by name; gossip does not fall back to it. Shares carry weights, and all peers of a run must
count them. Push-sum suits lines that are much faster in one direction, and peers that should not pause for others:
giving costs one upload, taking costs one download, and neither waits for the other. The cost is slower mixing.
Information flows one way, so two shares bring two peers as close as one exchange does. A peer that is given nothing
learns nothing in that round.

A link that carries nothing at all in one direction carries no stream either. Then a peer gives to others, and takes
back what it gave: it keeps each share, encoded, until the receiver says that it has counted it. A share without an
answer is recalled in later rounds. If its receiver is in another incarnation, the share returns to the sender. If the
receiver has not been seen for two minutes, the share returns too, and may then count twice; this is reported, as half
exchanges are.

A state stands for x / w; the weights are in `protocols.pairwise.mass_ledger.MassLedger`. Peers send x / w with the
weight of the share. A peer's own step moves x / w, so it counts by the peer's weight at that moment, which is 1 on
average. Besides the state, memory holds at most two kept shares and four incoming ones, each an encoded state.

Sources: Kempe et al. 2003; Assran et al. 2019 (SGP).
"""

from __future__ import annotations

from collections.abc import Collection

from protocols.aio import loop_time
from protocols.base import Deadline, Host, Member, PeerId, Settings
from protocols.pairwise import matching
from protocols.pairwise.closing import STEP_POLL_SECONDS, ClosingExchanges
from protocols.pairwise.share_receiver import ShareReceiver
from protocols.pairwise.share_sender import MAX_KEPT, ShareSender
from protocols.pairwise.shared_state import PairwiseAverager, SharedStateSession
from protocols.pairwise.weighted_state import WeightedState
from protocols.vectors.views import VectorView


class PushSum(PairwiseAverager):
    """`protocols.base.ClosingAverager` for push-sum.

    Attributes:
        weighted: this peer's state and its weight.
        share_sender: sends its shares.
    """

    def __init__(self, host: Host, settings: Settings) -> None:
        """Create the averager.

        Raises:
            ValueError: unknown schedule or codec.
        """
        self.weighted = WeightedState(host, settings)
        super().__init__(self.weighted, settings.schedule, host.rng("push-sum"))
        self.share_sender = ShareSender(self.weighted)
        ShareReceiver(self.weighted, settings.upload_bandwidth())
        self._steps = ClosingExchanges(self.weighted.endpoint, self.weighted.timeouts)

    async def mix(self, session: SharedStateSession, state: VectorView) -> None:
        """Settle earlier shares, then give one to each peer that the schedule names; give declined shares to others.

        Giving takes at most the time limit of one share: a slow or dead peer is not waited for twice.
        """
        await self.share_sender.reclaim(session)
        timeouts = self.weighted.timeouts
        size_bytes = self.weighted.codec.encoded_bytes(state.size)
        live = self.others()
        named = self.named(session, live)
        others = self.rng.sample(sorted(set(live) - set(named)), len(live) - len(named))
        due = len(named)
        awake = [peer for peer in (*named, *others) if not timeouts.resting(peer, loop_time())]
        if not awake or not await self.weighted.is_finite(state):
            return
        until = min(session.deadline, loop_time() + timeouts.timeout_seconds(awake[0], size_bytes))
        for peer in awake:
            if not due or len(self.share_sender.kept) >= MAX_KEPT or loop_time() >= until:
                break
            if session.has_time(timeouts.expected_seconds(peer, size_bytes), until):
                its_own = loop_time() + timeouts.timeout_seconds(peer, size_bytes)
                due -= await self.share_sender.give(session, live[peer], min(until, its_own))

    async def close(self, session: SharedStateSession, state: VectorView, here: Collection[PeerId]) -> None:
        """In each step, give half of the mass to the peer one distance ahead, and wait for a share from as far
        behind.
        """
        everybody = sorted({*here, self.me.peer})
        place, count = everybody.index(self.me.peer), len(everybody)
        size_bytes = self.weighted.codec.encoded_bytes(state.size)
        steps = [
            (everybody[(place + hop) % count], everybody[(place - hop) % count])
            for hop in matching.closing_hops(count)
        ]  # fmt: skip

        async def step(there: tuple[Member | None, ...], until: Deadline) -> None:
            to, giver = there
            before = session.counted(giver.peer) if giver else 0
            if to and len(self.share_sender.kept) < MAX_KEPT:
                await self.share_sender.give(session, to, until, lambda: self._steps.meets(to, until))
            if giver:
                session.closing_exchanges += await self._is_given(session, giver, before, until)

        if not session.cut.is_set():
            await self.share_sender.reclaim(session)
        if await self.weighted.is_finite(state):
            await self._steps.run(session, size_bytes, steps, step)
        if not session.cut.is_set():
            await self.share_sender.reclaim(session)

    async def _is_given(self, session: SharedStateSession, giver: Member, before: int, until: Deadline) -> bool:
        """Wait for a share from a peer that is at our step too; return whether it is counted."""
        while session.counted(giver.peer) == before and await self._steps.meets(giver, until):
            again = min(until, loop_time() + STEP_POLL_SECONDS)
            await session.notifier.reached(lambda: session.counted(giver.peer) > before, again)
        return session.counted(giver.peer) > before
