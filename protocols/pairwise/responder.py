"""The answering end of state exchanges. It accepts or declines at once, and counts no request twice."""

from __future__ import annotations

from protocols.aio import loop_time, peer_timeout, run_with_helper
from protocols.base import BadPayload, PeerError, Stream
from protocols.pairwise.exchange_state import ExchangeState, PairExchange
from protocols.pairwise.initiator import ExchangeInitiator
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
from protocols.peers.estimates import RecentDict
from protocols.peers.timeouts import CHEAP_SECONDS, MAX_PEERS, RequestDeduplicator

MAX_EXCHANGES_PER_PEER = 4
"""How often one peer may average with a lent state. Each time, half of the state becomes that peer's."""


class ExchangeResponder:
    """Serves `EXCHANGE`."""

    def __init__(self, exchanges: ExchangeState, initiator: ExchangeInitiator) -> None:
        self._exchanges, self._initiator = exchanges, initiator
        self._questions = RequestDeduplicator()
        self._moved: RecentDict[str, None] = RecentDict(MAX_PEERS)  # requests after which we have moved
        self._unconfirmed: dict[
            str, PairExchange
        ] = {}  # those where we do not know yet whether the asker has moved too
        exchanges.endpoint.serve(EXCHANGE, ExchangeRequest, self._serve)
        exchanges.endpoint.serve(EXCHANGE, OutcomeQuery, self._send_outcome)

    async def _serve(self, stream: Stream, ask: ExchangeRequest) -> None:
        exchanges = self._exchanges
        self._admit(ask)
        exchange = self._accept(ask, stream)
        if exchange is None:
            return await stream.send(self._answer(ask, False))
        try:
            await self._follow(exchange, stream)
        finally:
            exchanges.end(exchange)
        await self._confirm(exchange, stream)

    async def _send_outcome(self, stream: Stream, query: OutcomeQuery) -> None:
        await stream.send(OutcomeReply(query.key, self._exchanges.me, query.sequence, self._settle(query)))

    def _answer(self, ask: ExchangeRequest, accepted: bool) -> ExchangeReply:
        return ExchangeReply(ask.key, self._exchanges.me, ask.sequence, accepted, self._exchanges.round)

    def _admit(self, ask: ExchangeRequest) -> None:
        """Check a request.

        Raises:
            BadPayload: it names another codec, or was received before.
        """
        exchanges = self._exchanges
        self._questions.hear(ask.sender, ask.sequence, ask.key.round)
        if ask.codec != exchanges.codec.name:
            raise BadPayload(f"codec {ask.codec!r} where the run uses {exchanges.codec.name}")
        exchanges.estimator.hear(ask.sender.peer, ask.key.round)

    def _accept(self, ask: ExchangeRequest, stream: Stream) -> PairExchange | None:
        """Begin the exchange, unless we are busy or there is no time for it.

        Raises:
            BadPayload: the asker's state has another size.
        """
        exchanges, now = self._exchanges, loop_time()
        session, timeouts = exchanges.session, exchanges.timeouts
        if session is None or session.state is None or exchanges.exchange or timeouts.resting(stream.peer, now):
            return None
        if ask.key.fragment != session.key.fragment:
            return None
        if stream.peer in session.held and len(session.held[stream.peer].messages) >= MAX_EXCHANGES_PER_PEER:
            return None
        if session.closing and ask.elements != session.state.size:
            return None  # closing exchanges average whole states, rounds something else
        if ask.elements != session.state.size:
            raise BadPayload(f"a state of {ask.elements} elements; the run's have {session.state.size}")
        size_bytes = exchanges.codec.encoded_bytes(session.state.size)
        deadline = min(stream.deadline, session.deadline, now + timeouts.timeout_seconds(stream.peer, size_bytes))
        if now >= deadline or not self._initiator.gives_way(ask):
            return None
        return exchanges.begin(session, ask, ask.sender, deadline)

    async def _follow(self, exchange: PairExchange, stream: Stream) -> None:
        """Run the responder's side, until we have moved."""
        exchanges = self._exchanges
        try:
            watching = watch(exchanges.host.members, exchange.partner, exchange.deadline)
            await run_with_helper(self._receive(exchange, stream), watching)
            exchanges.check(exchange)
        except BadPayload:
            exchanges.distrust(stream.peer)
            raise
        except PeerError as error:
            costly = min(exchange.deadline, exchange.began + CHEAP_SECONDS)
            if exchange.swap.begun or loop_time() >= costly:  # else: withdrawn
                exchanges.failed(stream.peer, exchange.began, exchange.deadline, error.why, exchange.swap.begun)
            raise
        self._moved[exchange.ask.name] = None
        await exchanges.move(exchange)

    async def _receive(self, exchange: PairExchange, stream: Stream) -> None:
        await stream.send(self._answer(exchange.ask, True))
        await exchange.swap.transfer(stream)
        await hear(stream, StateReceived, exchange.ask)

    async def _confirm(self, exchange: PairExchange, stream: Stream) -> None:
        """Find out whether the asker has moved: it says so, or asks us. Our state is already free."""
        exchanges, ask = self._exchanges, exchange.ask
        seconds = exchanges.timeouts.answer_seconds(stream.peer)
        self._unconfirmed[ask.name] = exchange
        try:
            async with peer_timeout(seconds, stream.peer, "waiting for its last message"):
                await stream.send(StateReceived(ask.key, exchanges.me, ask.sequence))
                await hear(stream, StateReceived, ask)
        except (PeerError, BadPayload):
            if await exchanges.notifier.reached(lambda: exchange.settled, loop_time() + seconds):
                return
            exchanges.half(await exchange.swap.drift())
            raise
        finally:
            del self._unconfirmed[ask.name]

    def _settle(self, message: OutcomeQuery) -> bool:
        """Whether we have moved; if not, we never will."""
        exchange = self._exchanges.exchange
        if exchange and exchange.ask.name == message.name and not exchange.moving:
            exchange.given_up = True
        if message.name not in self._moved:
            return False
        for each in (exchange, self._unconfirmed.get(message.name)):
            if each and each.ask.name == message.name:
                each.settled = True
        self._exchanges.notifier.notify()
        return True
