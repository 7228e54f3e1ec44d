"""The closing exchanges of a gossip or push-sum run: a few steps without training that bring all peers to the mean.

`protocols.pairwise.matching` pairs the peers of each step. A step is exact only if both partners have done all steps
before it. A peer therefore asks its partner which step it is at, and states its own step in the question. It waits
until the step's time is over for a partner that is behind, and not for one that is past the step or gone.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from protocols.aio import Notifier, loop_time
from protocols.base import BadPayload, Deadline, Member, PeerError, PeerGone, PeerId, Stream
from protocols.pairwise.shared_state import SharedStateSession
from protocols.pairwise.state_swap import ExchangeMessage, hear
from protocols.peers.timeouts import PeerTimeouts
from protocols.streams.endpoint import ProtocolEndpoint
from protocols.wire import register, uint

CLOSING = "starling/pairs/closing/1"
STEP_SECONDS = 5.0
"""Extra time for a step: peers do not notice together that all have reached the end, and timeouts delay the next."""
STEP_POLL_SECONDS = 0.5
"""Interval for asking a partner that is behind again. The partner also asks by itself once it gets there."""
BEFORE, BEYOND = 0, 63  # Steps count from 1. These two values mean that a peer has not started yet, or has finished.


@dataclass(frozen=True, slots=True)
class ClosingStep(ExchangeMessage):
    """The step that the sender is at; the answer gives the receiver's step."""

    step: int = uint(BEYOND)


register(69, (ClosingStep,))


class ClosingExchanges:
    """Serves `CLOSING`. This peer is in step `at`."""

    def __init__(self, endpoint: ProtocolEndpoint, timeouts: PeerTimeouts) -> None:
        self.at = BEFORE
        self._endpoint, self._members, self._timeouts = endpoint, endpoint.host.members, timeouts
        self._session: SharedStateSession | None = None
        self._number, self._asked = BEFORE, 0
        self._heard: dict[Member, int] = {}  # of live members
        self._notifier = Notifier()
        endpoint.serve(CLOSING, ClosingStep, self._serve)

    async def run(
        self,
        session: SharedStateSession,
        size_bytes: int,
        steps: Sequence[Sequence[PeerId]],
        act: Callable[[tuple[Member | None, ...], Deadline], Awaitable[None]],
    ) -> None:
        """Do each step until its time is over. A step passes time that it does not use on to the next.

        Each of `steps` moves `size_bytes`, and lists the peers that it needs; this peer's own id means no partner.
        `act` gets those of them that are live.
        """
        until = loop_time()
        self._session, self._heard, self.at = session, {}, BEFORE
        try:
            for self._number, needed in enumerate(steps, 1):
                if session.cut.is_set():
                    break
                live = {member.peer: member for member in self._members.live() if member != self._endpoint.me}
                there = tuple(live.get(peer) for peer in needed)
                waits = [self._timeouts.timeout_seconds(each.peer, size_bytes) for each in there if each]
                until += STEP_SECONDS + max(waits) if waits else 0.0
                await act(there, min(until, session.deadline))
        finally:
            self.at, self._session = BEYOND, None

    async def meets(self, partner: Member, until: Deadline) -> bool:
        """Enter the step and wait until the partner is at it, too. False: it is past the step, or not waited for."""
        session, self.at = self._session, self._number
        assert session is not None
        while loop_time() < until and not session.cut.is_set():
            if partner not in self._members.live() or self._timeouts.resting(partner.peer, loop_time()):
                return False
            said = await self._ask(session, partner, until)
            if said is None or said >= self.at:
                return said == self.at
            again = min(until, loop_time() + STEP_POLL_SECONDS)
            await self._notifier.reached(lambda: self._heard.get(partner, BEFORE) >= self.at, again)
        return False

    async def _ask(self, session: SharedStateSession, partner: Member, until: Deadline) -> int | None:
        self._asked += 1
        peer, question = partner.peer, ClosingStep(session.key, self._endpoint.me, self._asked, self.at)
        answer_by = min(until, loop_time() + self._timeouts.answer_seconds(peer))
        try:
            async with self._endpoint.open(peer, CLOSING, answer_by) as stream:
                await stream.send(question)
                return (await hear(stream, ClosingStep, question)).step
        except (PeerGone, BadPayload):
            return None
        except PeerError:
            return BEFORE

    async def _serve(self, stream: Stream, message: ClosingStep) -> None:
        if self._session:
            self._heard[message.sender] = message.step
            self._notifier.notify()
        await stream.send(ClosingStep(message.key, self._endpoint.me, message.sequence, self.at))
