"""The asker's end of exchanges of states."""

from __future__ import annotations

import asyncio
from enum import Enum, auto

from protocols.aio import run_with_helper, task_group
from protocols.base import BadPayload, Deadline, Member, PeerError, Stream
from protocols.pairwise.exchange_state import ExchangeState, PairExchange, StateOwner
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
    """What became of a question."""

    HELD = auto()
    BUSY = auto()
    WITHDRAWN = auto()  # another's came first
    FAILED = auto()


class ExchangeInitiator:
    """Asks one question at a time."""

    def __init__(self, pairing: ExchangeState) -> None:
        self._pairing = pairing
        self._open: tuple[ExchangeRequest, asyncio.Task[ExchangeOutcome]] | None = None  # not answered yet
        self._asked = 0

    def gives_way(self, other: ExchangeRequest) -> bool:
        """Whether another's question may be said yes to: ours, if one is unanswered, is taken back for it."""
        if self._open is None:
            return True
        ours, job = self._open
        if ours.rank() < other.rank():
            return False
        self._open = None
        job.cancel()
        return True

    async def ask(self, owner: StateOwner, partner: Member, until: Deadline) -> ExchangeOutcome:
        """Ask for an exchange, and have it; whatever fails is named. Nobody may be in one with us."""
        assert owner.state is not None
        self._asked += 1
        ask = ExchangeRequest(owner.key, self._pairing.me, self._asked, owner.state.size, self._pairing.codec.name)
        async with task_group() as group:
            job = group.create_task(self._ask(owner, ask, partner, until))
            self._open = ask, job
            try:
                await asyncio.wait([job])
            finally:
                self._open = None
        return ExchangeOutcome.WITHDRAWN if job.cancelled() else job.result()

    async def _ask(self, owner: StateOwner, ask: ExchangeRequest, partner: Member, until: Deadline) -> ExchangeOutcome:
        pairing, peer, began = self._pairing, partner.peer, asyncio.get_running_loop().time()
        answer_by = min(until, began + pairing.patience.answer_seconds(peer))
        exchange: PairExchange | None = None
        try:
            async with (
                asyncio.timeout_at(answer_by) as limit,
                pairing.host.transport.open(peer, EXCHANGE, until) as stream,
                pairing.ledger.counting(stream),
            ):
                await stream.send(ask)
                answer = await hear(stream, ExchangeReply, ask)
                pairing.tempo.hear(peer, answer.round)
                if not answer.accepted:
                    return ExchangeOutcome.BUSY
                limit.reschedule(None)  # from here on it is watched
                pairing.patience.answered(peer, asyncio.get_running_loop().time() - began)
                self._open, exchange = None, pairing.begin(owner, ask, partner, until)
                await run_with_helper(self._lead(exchange, stream), watch(pairing.host.members, partner, until))
                return ExchangeOutcome.HELD
        except (PeerError, BadPayload, TimeoutError) as error:
            if exchange and await self._held(exchange, error):
                return ExchangeOutcome.HELD
            if isinstance(error, BadPayload):
                pairing.distrust(peer)
            elif exchange is None and isinstance(error, TimeoutError) and answer_by == until:
                return ExchangeOutcome.BUSY  # it was our own time that was short
            else:
                why = error.why if isinstance(error, PeerError) else "it did not answer in time"
                slow = exchange is not None and exchange.swap.begun
                pairing.failed(peer, began, until if exchange else answer_by, why, slow)
            return ExchangeOutcome.FAILED
        finally:
            if exchange:
                if exchange.in_doubt:  # we are not to wait for an answer
                    pairing.half(exchange.swap.most)
                pairing.end(exchange)

    async def _lead(self, exchange: PairExchange, stream: Stream) -> None:
        """The initiator's part. Between its first `StateReceived` and the reply, the partner's outcome is unknown."""
        pairing, ask = self._pairing, exchange.ask
        await exchange.swap.transfer(stream)
        pairing.check(exchange)
        exchange.moving = True
        await stream.send(StateReceived(ask.key, pairing.me, ask.sequence))
        await hear(stream, StateReceived, ask)
        await pairing.move(exchange)
        await stream.send(StateReceived(ask.key, pairing.me, ask.sequence))

    async def _held(self, exchange: PairExchange, error: Exception) -> bool:
        """Whether an exchange that broke off has held; where that is in doubt, the partner is asked, once."""
        pairing, ask, peer = self._pairing, exchange.ask, exchange.partner.peer
        if not exchange.in_doubt:
            return exchange.swap.moved is not None  # then only our last word is lost
        deadline = asyncio.get_running_loop().time() + pairing.patience.answer_seconds(peer)
        try:
            if isinstance(error, BadPayload):
                raise error
            async with (
                pairing.host.transport.open(peer, EXCHANGE, deadline) as stream,
                pairing.ledger.counting(stream),
            ):
                await stream.send(OutcomeQuery(ask.key, pairing.me, ask.sequence))
                exchange.moving = (await hear(stream, OutcomeReply, ask)).moved
        except (PeerError, BadPayload):
            pairing.half(await exchange.swap.drift())
            exchange.moving = False
        if exchange.moving:
            await pairing.move(exchange)
        return exchange.moving
