"""Gossip: pairs of peers move their whole states to their mean, without groups, barriers or votes.

In each round a peer asks one other peer (or a few: `protocols.pairwise.matching`) to exchange parameters and momentum.
The partner answers at once, even while it trains: it accepts, or is busy. This is randomised pairwise averaging (Boyd
et al. 2006) of states after an outer step, without waiting for the partner's work (AD-PSGD, Lian et al. 2018). All of
it costs a peer at most the time limit of one exchange (`protocols.peers.timeouts`), however many partners are slow.

A peer is in at most one exchange at a time, and only that one may touch its state. No request counts twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass, field
from enum import Enum, auto

from protocols.aio import loop_time, peer_timeout, raise_when_gone, run_with_helper, task_group
from protocols.base import BadPayload, Deadline, Host, Member, PeerError, PeerId, PeerSilent, Settings, Stream
from protocols.pairwise import matching
from protocols.pairwise.closing import ClosingExchanges
from protocols.pairwise.shared_state import PairwiseAverager, SharedStateSession
from protocols.pairwise.state_swap import (
    EXCHANGE,
    ExchangeReply,
    ExchangeRequest,
    OutcomeQuery,
    OutcomeReply,
    StateReceived,
    StateSwap,
    hear,
)
from protocols.peers.estimates import RecentDict
from protocols.peers.timeouts import CHEAP_SECONDS, MAX_PEERS, RequestDeduplicator
from protocols.vectors.views import VectorView

OTHERS = 2  # how many other peers a peer asks before it pauses, if its partners are busy
TRIES = 3  # how often a partner that the schedule names is asked while it is busy
BUSY_PAUSE_SECONDS = 0.25
"""Least pause before asking a busy peer again; the most is twice this. Each request takes two round trips."""
MAX_EXCHANGES_PER_PEER = 4
"""How often one peer may average with a lent state. Each time, half of the state becomes that peer's."""


class ExchangeOutcome(Enum):
    HELD = auto()
    BUSY = auto()
    WITHDRAWN = auto()  # another peer's request came first
    FAILED = auto()


@dataclass(slots=True, eq=False)
class PairExchange:
    ask: ExchangeRequest  # the request that began it, ours or the partner's
    partner: Member
    session: SharedStateSession
    swap: StateSwap
    deadline: Deadline
    began: float
    moving: bool = False  # one end may move, or has moved, so the exchange must not be aborted any more
    given_up: bool = False  # we answered the asker that we have not moved, so we must not move any more
    settled: bool = False  # the asker knows that we moved, because it asked
    done: asyncio.Event = field(default_factory=asyncio.Event)  # our state is free again

    @property
    def in_doubt(self) -> bool:
        """Whether the partner may have moved while we have not."""
        return self.moving and self.swap.moved is None


class Gossip(PairwiseAverager):
    """A peer whose states are averaged by exchanges: `exchange` is the current one."""

    def __init__(self, host: Host, settings: Settings) -> None:
        super().__init__(host, settings, "gossip")
        self.round = 0  # the last round that this peer completed
        self.exchange: PairExchange | None = None
        self._asked = 0
        self._open: tuple[ExchangeRequest, asyncio.Task[ExchangeOutcome]] | None = None  # ours, not answered yet
        self._questions = RequestDeduplicator()
        self._moved: RecentDict[str, None] = RecentDict(MAX_PEERS)  # requests after which we have moved
        self._unconfirmed: dict[str, PairExchange] = {}  # of these: we do not know yet whether the asker moved, too
        self.endpoint.serve(EXCHANGE, ExchangeRequest, self._serve)
        self.endpoint.serve(EXCHANGE, OutcomeQuery, self._send_outcome)
        self._steps = ClosingExchanges(self.endpoint, self.timeouts)

    async def mix(self, session: SharedStateSession, state: VectorView) -> None:
        """Ask each partner that the schedule names; if an exchange fails, ask others while time is left."""
        self.round = session.round
        size_bytes = self.codec.encoded_bytes(state.size)
        due, others = self._candidates(session)
        if not due:
            return
        until = min(session.deadline, loop_time() + self.timeouts.timeout_seconds(due[0].peer, size_bytes))
        tries = 0
        while loop_time() < until and ((due and tries < TRIES) or (others and not session.held)):
            if tries:
                await self._pause(session, until)
            tries += 1
            more = [each for each in others if each not in due]
            for partner in [*due, *self.rng.sample(more, min(OTHERS, len(more)))]:
                await self.at_rest()
                now, peer = loop_time(), partner.peer
                if session.held and (partner not in due or peer in session.held):
                    verdict = ExchangeOutcome.HELD  # another peer has asked us
                elif not session.has_time(self.timeouts.expected_seconds(peer, size_bytes), until):
                    verdict = ExchangeOutcome.FAILED  # the time left is too short for this one
                else:
                    its_own = now + self.timeouts.timeout_seconds(peer, size_bytes)
                    verdict = await self.ask(session, partner, min(until, its_own))
                if verdict in (ExchangeOutcome.HELD, ExchangeOutcome.FAILED):
                    due, others = ([each for each in group if each != partner] for group in (due, others))

    async def close(self, session: SharedStateSession, state: VectorView, here: Collection[PeerId]) -> None:
        """Exchange with one partner in each step. A failed exchange is not retried with another peer."""
        self.round = session.round
        everybody = sorted({*here, self.me.peer})
        place, size_bytes = everybody.index(self.me.peer), self.codec.encoded_bytes(state.size)
        steps = [(everybody[partner_of[place]],) for partner_of in matching.closing_pairs(len(everybody))]

        async def step(there: tuple[Member | None, ...], until: Deadline) -> None:
            (partner,) = there
            if partner and await self._steps.meets(partner, until):
                session.closing_exchanges += await self._exchange(session, partner, size_bytes, until)

        await self._steps.run(session, size_bytes, steps, step)

    async def _exchange(self, session: SharedStateSession, partner: Member, size_bytes: int, until: Deadline) -> bool:
        """Exchange with a partner that wants it too, whichever of the two asks."""
        peer, before = partner.peer, session.counted(partner.peer)
        while loop_time() < until and not session.cut.is_set():
            await self.at_rest()
            if session.counted(peer) > before:
                break
            its_own = loop_time() + self.timeouts.timeout_seconds(peer, size_bytes)
            verdict = await self.ask(session, partner, min(until, its_own))
            if verdict in (ExchangeOutcome.HELD, ExchangeOutcome.FAILED):
                break
            if verdict is ExchangeOutcome.BUSY:
                again = min(until, loop_time() + BUSY_PAUSE_SECONDS)
                await self.notifier.reached(lambda: session.counted(peer) > before, again)
        return session.counted(peer) > before

    async def _pause(self, session: SharedStateSession, until: Deadline) -> None:
        held, seconds = dict(session.held), self.rng.uniform(BUSY_PAUSE_SECONDS, 2 * BUSY_PAUSE_SECONDS)
        await self.notifier.reached(lambda: session.held != held, min(until, loop_time() + seconds))

    def _candidates(self, session: SharedStateSession) -> tuple[list[Member], list[Member]]:
        """The peers that the schedule names, and the others. Both exclude peers that recently cost us a timeout."""
        now, live = loop_time(), self.others()
        named = self.named(session, live)
        up = [member for member in live.values() if not self.timeouts.resting(member.peer, now)]
        due = [member for member in up if member.peer in named]
        others = [member for member in up if member.peer not in named]
        return due or self.rng.sample(others, min(1, len(others))), others

    # -- an exchange ---------------------------------------------------------------------------------------------------

    async def close_round(self) -> None:
        """End the round. Abort the current exchange, or wait until the state is at rest if it must not be aborted."""
        await super().close_round()
        if self.exchange and self.exchange.moving:
            await self.exchange.done.wait()

    async def at_rest(self) -> None:
        while exchange := self.exchange:
            await exchange.done.wait()

    def begin(
        self, session: SharedStateSession, ask: ExchangeRequest, partner: Member, deadline: Deadline
    ) -> PairExchange:
        """Begin an exchange. Until `_end`, nothing else may touch the session's state."""
        assert session.state is not None and self.exchange is None
        swap = StateSwap(session.state, self.part(session.state.size), self.host.compute)
        self.exchange = PairExchange(ask, partner, session, swap, deadline, loop_time())
        self.partners = (partner.peer,)
        return self.exchange

    def _end(self, exchange: PairExchange) -> None:
        if self.exchange is exchange:
            self.exchange, self.partners = None, ()
            exchange.swap.discard()
            exchange.done.set()
            self.notifier.notify()

    def _check_may_move(self, exchange: PairExchange) -> None:
        if self.session is not exchange.session:
            raise PeerSilent(exchange.partner.peer, "our round was left before the exchange was over")
        if exchange.given_up:
            raise PeerSilent(exchange.partner.peer, "the exchange was given up before we had everything")

    async def _move(self, exchange: PairExchange) -> None:
        """Move our end and count the exchange, even if we are cancelled. Both ends have received everything."""
        exchange.moving = True
        swap, partner = exchange.swap, exchange.partner.peer
        try:
            await swap.commit()
        finally:
            if swap.moved is not None:
                name = exchange.ask.name if partner == exchange.ask.sender.peer else f"{exchange.ask.name} by {partner}"
                exchange.session.count(partner, swap.chunks, name, 0.5)
        now = loop_time()
        self.timeouts.took(partner, swap.size_bytes, now, now - exchange.began)

    def _failed(self, peer: PeerId, began: float, until: Deadline, why: str, slow: bool) -> None:
        self.accounting.name(peer, f"no exchange: {why}")
        self.timeouts.failed(peer, began, loop_time(), until, slow)

    # -- asking -------------------------------------------------------------------------------------------------------

    async def ask(self, session: SharedStateSession, partner: Member, until: Deadline) -> ExchangeOutcome:
        """Ask for an exchange and carry it out. Errors are reported. This peer must not be in another exchange."""
        assert session.state is not None
        self._asked += 1
        ask = ExchangeRequest(session.key, self.me, self._asked, session.state.size, self.codec.name)
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
        peer, began = partner.peer, loop_time()
        answer_by = min(until, began + self.timeouts.answer_seconds(peer))
        exchange: PairExchange | None = None
        try:
            async with asyncio.timeout_at(answer_by) as limit, self.endpoint.open(peer, EXCHANGE, until) as stream:
                await stream.send(ask)
                answer = await hear(stream, ExchangeReply, ask)
                self.estimator.hear(peer, answer.round)
                if not answer.accepted:
                    return ExchangeOutcome.BUSY
                limit.reschedule(None)  # from here on the exchange is watched
                self.timeouts.answered(peer, loop_time() - began)
                self._open, exchange = None, self.begin(session, ask, partner, until)
                await run_with_helper(self._lead(exchange, stream), raise_when_gone(self.host.members, partner, until))
                return ExchangeOutcome.HELD
        except (PeerError, BadPayload, TimeoutError) as error:
            if exchange and await self._held(exchange, error):
                return ExchangeOutcome.HELD
            if isinstance(error, BadPayload):
                self.timeouts.distrust(peer, loop_time())
            elif exchange is None and isinstance(error, TimeoutError) and answer_by == until:
                return ExchangeOutcome.BUSY  # our own time was too short
            else:
                why = error.why if isinstance(error, PeerError) else "it did not answer in time"
                slow = exchange is not None and exchange.swap.begun
                self._failed(peer, began, until if exchange else answer_by, why, slow)
            return ExchangeOutcome.FAILED
        finally:
            if exchange:
                if exchange.in_doubt:  # we must not wait for an answer
                    self.count_half(exchange.swap.most)
                self._end(exchange)

    async def _lead(self, exchange: PairExchange, stream: Stream) -> None:
        ask = exchange.ask
        await exchange.swap.transfer(stream)
        self._check_may_move(exchange)
        exchange.moving = True
        await stream.send(StateReceived(ask.key, self.me, ask.sequence))
        await hear(stream, StateReceived, ask)
        await self._move(exchange)
        await stream.send(StateReceived(ask.key, self.me, ask.sequence))

    async def _held(self, exchange: PairExchange, error: Exception) -> bool:
        """Whether a broken-off exchange took effect. If that is in doubt, ask the partner once."""
        ask, peer = exchange.ask, exchange.partner.peer
        if not exchange.in_doubt:
            return exchange.swap.moved is not None  # then only our last message is lost
        deadline = loop_time() + self.timeouts.answer_seconds(peer)
        try:
            if isinstance(error, BadPayload):
                raise error
            async with self.endpoint.open(peer, EXCHANGE, deadline) as stream:
                await stream.send(OutcomeQuery(ask.key, self.me, ask.sequence))
                exchange.moving = (await hear(stream, OutcomeReply, ask)).moved
        except (PeerError, BadPayload):
            self.count_half(await exchange.swap.drift())
            exchange.moving = False
        if exchange.moving:
            await self._move(exchange)
        return exchange.moving

    # -- answering ----------------------------------------------------------------------------------------------------

    async def _serve(self, stream: Stream, ask: ExchangeRequest) -> None:
        self._questions.hear(ask.sender, ask.sequence, ask.key.round)
        if ask.codec != self.codec.name:
            raise BadPayload(f"codec {ask.codec!r} where the run uses {self.codec.name}")
        self.estimator.hear(ask.sender.peer, ask.key.round)
        exchange = self._accept(ask, stream)
        if exchange is None:
            return await stream.send(self._answer(ask, False))
        try:
            await self._follow(exchange, stream)
        finally:
            self._end(exchange)
        await self._confirm(exchange, stream)

    def _answer(self, ask: ExchangeRequest, accepted: bool) -> ExchangeReply:
        return ExchangeReply(ask.key, self.me, ask.sequence, accepted, self.round)

    def _accept(self, ask: ExchangeRequest, stream: Stream) -> PairExchange | None:
        session, now, peer = self.session, loop_time(), stream.peer
        if session is None or session.state is None or self.exchange or self.timeouts.resting(peer, now):
            return None
        if ask.key.fragment != session.key.fragment or session.counted(peer) >= MAX_EXCHANGES_PER_PEER:
            return None
        if ask.elements != session.state.size:
            if session.closing:
                return None  # closing exchanges average whole states, rounds something else
            raise BadPayload(f"a state of {ask.elements} elements; the run's have {session.state.size}")
        size_bytes = self.codec.encoded_bytes(session.state.size)
        deadline = min(stream.deadline, session.deadline, now + self.timeouts.timeout_seconds(peer, size_bytes))
        if now >= deadline or not self._gives_way(ask):
            return None
        return self.begin(session, ask, ask.sender, deadline)

    def _gives_way(self, other: ExchangeRequest) -> bool:
        """Whether another peer's request may be accepted. Our own unanswered request, if any, is withdrawn for it."""
        if self._open is None:
            return True
        ours, job = self._open
        if ours.rank() < other.rank():
            return False
        self._open = None
        job.cancel()
        return True

    async def _follow(self, exchange: PairExchange, stream: Stream) -> None:
        try:
            watching = raise_when_gone(self.host.members, exchange.partner, exchange.deadline)
            await run_with_helper(self._receive(exchange, stream), watching)
            self._check_may_move(exchange)
        except BadPayload:
            self.timeouts.distrust(stream.peer, loop_time())
            raise
        except PeerError as error:
            costly = min(exchange.deadline, exchange.began + CHEAP_SECONDS)
            if exchange.swap.begun or loop_time() >= costly:  # else: withdrawn
                self._failed(stream.peer, exchange.began, exchange.deadline, error.why, exchange.swap.begun)
            raise
        self._moved[exchange.ask.name] = None
        await self._move(exchange)

    async def _receive(self, exchange: PairExchange, stream: Stream) -> None:
        await stream.send(self._answer(exchange.ask, True))
        await exchange.swap.transfer(stream)
        await hear(stream, StateReceived, exchange.ask)

    async def _confirm(self, exchange: PairExchange, stream: Stream) -> None:
        """Find out whether the asker has moved: it says so, or asks us. Our state is already free."""
        ask, seconds = exchange.ask, self.timeouts.answer_seconds(stream.peer)
        self._unconfirmed[ask.name] = exchange
        try:
            async with peer_timeout(seconds, stream.peer, "waiting for its last message"):
                await stream.send(StateReceived(ask.key, self.me, ask.sequence))
                await hear(stream, StateReceived, ask)
        except (PeerError, BadPayload):
            if await self.notifier.reached(lambda: exchange.settled, loop_time() + seconds):
                return
            self.count_half(await exchange.swap.drift())
            raise
        finally:
            del self._unconfirmed[ask.name]

    async def _send_outcome(self, stream: Stream, query: OutcomeQuery) -> None:
        await stream.send(OutcomeReply(query.key, self.me, query.sequence, self._settle(query)))

    def _settle(self, message: OutcomeQuery) -> bool:
        """Whether we have moved; if not, we never will."""
        exchange = self.exchange
        if exchange and exchange.ask.name == message.name and not exchange.moving:
            exchange.given_up = True
        if message.name not in self._moved:
            return False
        for each in (exchange, self._unconfirmed.get(message.name)):
            if each and each.ask.name == message.name:
                each.settled = True
        self.notifier.notify()
        return True
