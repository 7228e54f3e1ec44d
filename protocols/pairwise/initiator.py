"""The asking end of state exchanges."""

from __future__ import annotations

import asyncio
from enum import Enum, auto

from protocols.aio import loop_time, run_with_helper, task_group
from protocols.base import BadPayload, Deadline, Member, PeerError, Stream
from protocols.pairwise.exchange_state import ExchangeState, PairExchange
from protocols.pairwise.shared_state import SharedStateSession
from protocols.pairwise.state_swap import (
    EXCHANGE,
    ExchangeReply,
    ExchangeRequest,
    OutcomeQuery,
    OutcomeReply,
    StateReceived,
    hear,
    watch,
)


class ExchangeOutcome(Enum):
    """The result of a request."""

    HELD = auto()
    BUSY = auto()
    WITHDRAWN = auto()  # another peer's request came first
    FAILED = auto()


class ExchangeInitiator:
    """Sends one request at a time."""

    def __init__(self, exchanges: ExchangeState) -> None:
        self._exchanges = exchanges
        self._open: tuple[ExchangeRequest, asyncio.Task[ExchangeOutcome]] | None = None  # not answered yet
        self._asked = 0

    def gives_way(self, other: ExchangeRequest) -> bool:
        """Whether another peer's request may be accepted. Our own unanswered request, if any, is withdrawn for it."""
        if self._open is None:
            return True
        ours, job = self._open
        if ours.rank() < other.rank():
            return False
        self._open = None
        job.cancel()
        return True

    async def ask(self, session: SharedStateSession, partner: Member, until: Deadline) -> ExchangeOutcome:
        """Ask for an exchange and carry it out. Errors are reported. This peer must not be in another exchange."""
        assert session.state is not None
        self._asked += 1
        ask = ExchangeRequest(
            session.key, self._exchanges.me, self._asked, session.state.size, self._exchanges.codec.name
        )
        async with task_group() as group:
            job = group.create_task(self._ask(session, ask, partner, until))
            self._open = ask, job
            try:
                await asyncio.wait([job])
            finally:
                self._open = None
        return ExchangeOutcome.WITHDRAWN if job.cancelled() else job.result()

    async def _ask(
        self, session: SharedStateSession, ask: ExchangeRequest, partner: Member, until: Deadline
    ) -> ExchangeOutcome:
        exchanges, peer, began = self._exchanges, partner.peer, loop_time()
        answer_by = min(until, began + exchanges.timeouts.answer_seconds(peer))
        exchange: PairExchange | None = None
        try:
            async with asyncio.timeout_at(answer_by) as limit, exchanges.endpoint.open(peer, EXCHANGE, until) as stream:
                await stream.send(ask)
                answer = await hear(stream, ExchangeReply, ask)
                exchanges.estimator.hear(peer, answer.round)
                if not answer.accepted:
                    return ExchangeOutcome.BUSY
                limit.reschedule(None)  # from here on the exchange is watched
                exchanges.timeouts.answered(peer, loop_time() - began)
                self._open, exchange = None, exchanges.begin(session, ask, partner, until)
                await run_with_helper(self._lead(exchange, stream), watch(exchanges.host.members, partner, until))
                return ExchangeOutcome.HELD
        except (PeerError, BadPayload, TimeoutError) as error:
            if exchange and await self._held(exchange, error):
                return ExchangeOutcome.HELD
            if isinstance(error, BadPayload):
                exchanges.distrust(peer)
            elif exchange is None and isinstance(error, TimeoutError) and answer_by == until:
                return ExchangeOutcome.BUSY  # our own time was too short
            else:
                why = error.why if isinstance(error, PeerError) else "it did not answer in time"
                slow = exchange is not None and exchange.swap.begun
                exchanges.failed(peer, began, until if exchange else answer_by, why, slow)
            return ExchangeOutcome.FAILED
        finally:
            if exchange:
                if exchange.in_doubt:  # we must not wait for an answer
                    exchanges.half(exchange.swap.most)
                exchanges.end(exchange)

    async def _lead(self, exchange: PairExchange, stream: Stream) -> None:
        """Run the initiator's side. Between its first `StateReceived` and the reply, the partner's outcome is
        unknown.
        """
        exchanges, ask = self._exchanges, exchange.ask
        await exchange.swap.transfer(stream)
        exchanges.check(exchange)
        exchange.moving = True
        await stream.send(StateReceived(ask.key, exchanges.me, ask.sequence))
        await hear(stream, StateReceived, ask)
        await exchanges.move(exchange)
        await stream.send(StateReceived(ask.key, exchanges.me, ask.sequence))

    async def _held(self, exchange: PairExchange, error: Exception) -> bool:
        """Whether a broken-off exchange took effect. If that is in doubt, ask the partner once."""
        exchanges, ask, peer = self._exchanges, exchange.ask, exchange.partner.peer
        if not exchange.in_doubt:
            return exchange.swap.moved is not None  # then only our last message is lost
        deadline = loop_time() + exchanges.timeouts.answer_seconds(peer)
        try:
            if isinstance(error, BadPayload):
                raise error
            async with exchanges.endpoint.open(peer, EXCHANGE, deadline) as stream:
                await stream.send(OutcomeQuery(ask.key, exchanges.me, ask.sequence))
                exchange.moving = (await hear(stream, OutcomeReply, ask)).moved
        except (PeerError, BadPayload):
            exchanges.half(await exchange.swap.drift())
            exchange.moving = False
        if exchange.moving:
            await exchanges.move(exchange)
        return exchange.moving
