"""Butterfly all-reduce for a roster with one shared anchor: call, scatter, reduce, gather, vote.

Each attempt at a round has a session (`protocols.butterfly.session`). Each lineage has one decision
(`protocols.butterfly.consensus_driver`), which outlives its sessions, so a peer that comes late to an old round learns
what was decided. This module keeps what stays from round to round, and passes each stream to its round.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from protocols import wire
from protocols.aio import task_group
from protocols.allreduce.all_reduce import DATA, BandwidthClaim
from protocols.allreduce.parts import PartFormat
from protocols.base import BadPayload, Deadline, Head, Host, PeerId, PeerSilent, RoundKey, Settings, Stream
from protocols.butterfly.consensus_driver import ConsensusDriver
from protocols.butterfly.context import ButterflyContext
from protocols.butterfly.part_cache import PartCache
from protocols.butterfly.resting import Resting
from protocols.butterfly.session import ButterflySession
from protocols.consensus import record as records
from protocols.consensus.messages import MESSAGES, StartBallot, VoteMessage
from protocols.registry import ROBUST_RULES, require_known
from protocols.streams.control_channel import ControlChannel
from protocols.streams.endpoint import ProtocolEndpoint, SessionTable
from protocols.vectors.codec import codec

CONTROL = "starling/butterfly/control/1"
RoundMessage = wire.Ready | Resting | wire.Plan | wire.AdmissionRequest | VoteMessage
ROUND_MESSAGES: tuple[type[RoundMessage], ...] = (wire.Ready, Resting, wire.Plan, wire.AdmissionRequest, *MESSAGES)
FORGOTTEN_LIMIT = 1 << 16
PARKED_LIMIT = 16
"""Messages kept of one peer that is a round ahead, until this peer gets there."""
MEMORY_ROUNDS = 4
"""Rounds whose parts wait in memory, at most, for a disk that is slow or full."""


class Butterfly:
    """The butterfly averager (`protocols.base.Averager`).

    Attributes:
        part_cache: the reduced parts of the last rounds.
    """

    def __init__(
        self,
        host: Host,
        settings: Settings,
        part_cache: PartCache | None = None,
        on_ahead: Callable[[PeerId], None] = lambda peer: None,
    ) -> None:
        """
        Args:
            part_cache: holds the reduced parts; None for a cache in memory.
            on_ahead: called with a peer that is rounds ahead of this one, or on another branch.
        """
        self.settings, self._endpoint = settings, ProtocolEndpoint(host, settings)
        self.me, self.accounting = self._endpoint.me, self._endpoint.accounting
        require_known("robust rule", settings.robust, ROBUST_RULES)
        self._claim = BandwidthClaim(settings)
        self.part_cache, self._on_ahead = part_cache or PartCache(host), on_ahead
        self._post = ControlChannel(host, CONTROL, self.accounting)
        part_format = PartFormat.of(settings, codec(settings.codec), self.part_cache.pool)
        self._context = ButterflyContext(
            host, settings, part_format, self.me, self.accounting, self._post, self.part_cache
        )
        self._decisions: dict[bytes, ConsensusDriver] = {}
        # Lineages whose promises were dropped. If this peer comes back to one, on another branch, it only observes.
        self._forgotten: dict[bytes, None] = {}
        # The last round's session stays: a member that was slow to contribute fetches the reduced parts from it.
        self._sessions = SessionTable[bytes, ButterflySession]()
        self._session: ButterflySession | None = None
        self._parked = defaultdict[PeerId, deque[RoundMessage]](lambda: deque(maxlen=PARKED_LIMIT))
        self._endpoint.listen(CONTROL, ROUND_MESSAGES, self._take)
        self._endpoint.serve(DATA, wire.Contribute, self._on_data)

    @asynccontextmanager
    async def enter(self, head: Head, deadline: Deadline) -> AsyncIterator[ButterflySession]:
        lineage = head.key.lineage
        if lineage not in self._decisions:
            may_vote = lineage not in self._forgotten
            self._decisions[lineage] = ConsensusDriver(self._context, head, may_vote, self._on_ahead)
        session = ButterflySession(self._context, head, self._decisions[lineage], self._claim.renewed(), deadline)
        self._forget(head.key)
        self._session = session
        self._endpoint.bind(head.key)
        self._post.on_gone = session.gone
        everybody = {member.peer for member in (*head.roster, *self._endpoint.host.members.live())}
        try:
            async with task_group() as group, self._post.run(group, deadline, everybody):
                background = [group.create_task(session.live()), group.create_task(self.part_cache.save())]
                self._sessions.open(lineage, session)
                self._unpark()
                try:
                    yield session
                finally:
                    for each in background:
                        each.cancel()
                    if session.in_time is not None:
                        self._claim.observe(session.in_time)
        finally:
            session.close()
            if certificate := session.decision.certificate:
                record = records.decode(certificate.record)
                self.part_cache.decided(lineage, {part.digest for part in record.parts})

    def supersede(self) -> None:
        """End the round under way as superseded, because a better branch is known."""
        if self._session:
            self._session.supersede()

    def _forget(self, key: RoundKey) -> None:
        """Drop all but the last rounds' decisions and parts, and the last round's session."""
        oldest = key.round - self.settings.keep_rounds
        for lineage, each in list(self._decisions.items()):
            if each.head.key.round < oldest:
                del self._decisions[lineage]
                self._forgotten[lineage] = None
        while len(self._forgotten) > FORGOTTEN_LIMIT:
            del self._forgotten[next(iter(self._forgotten))]
        # The last round's session still serves its parts. Parts of an undecided round stay, since this member may have
        # voted for them.
        age = {
            lineage: key.round - each.head.key.round if each.certificate else 0
            for lineage, each in self._decisions.items()
        }
        most = MEMORY_ROUNDS if self.part_cache.past else self.settings.keep_rounds
        self.part_cache.keep(
            [lineage for lineage, rounds in age.items() if rounds <= most],
            [lineage for lineage, rounds in age.items() if rounds <= 1],
        )
        kept = [each.head.key for each in self._sessions.values()]
        for session in self._sessions.close(each.lineage for each in kept if each.round != key.round - 1):
            session.discard()

    # -- control ------------------------------------------------------------------------------------------------------

    def _take(self, peer: PeerId, message: RoundMessage) -> None:
        """Pass a message to the round that it is about.

        Raises:
            BadPayload: the message breaks a rule of that round.
        """
        session = self._session
        if session is None:
            return self._parked[peer].append(message)
        key, here = message.key, session.head.key
        if key == here:
            session.take(peer, message)
        elif key.lineage in self._decisions:
            self._on_past(peer, message, self._decisions[key.lineage])
        elif key.round == here.round + 1:
            self._parked[peer].append(message)
            self._post.send(peer, StartBallot(here, self.me, session.decision.vote.ballot, ()))
        else:
            self._on_ahead(peer)

    def _on_past(self, peer: PeerId, message: RoundMessage, decision: ConsensusDriver) -> None:
        """Answer a message about a round that is over here with the round's certificate."""
        if isinstance(message, VoteMessage):
            decision.receive(peer, message)
        elif decision.certificate:
            self._post.send(peer, decision.certificate)

    def _unpark(self) -> None:
        parked = [(peer, message) for peer, messages in self._parked.items() for message in messages]
        self._parked.clear()
        for peer, message in parked:
            self._endpoint.deliver(CONTROL, peer, message)

    # -- data ---------------------------------------------------------------------------------------------------------

    async def _on_data(self, stream: Stream, opening: wire.Contribute) -> None:
        """Serve a data stream in the session of its round. If the sender is one round ahead, wait for that session.

        Raises:
            BadPayload: the stream is of another lineage, or of a round that no peer can be in.
            PeerSilent: this peer did not enter that round in time, or the round is over.
        """
        key, here = opening.key, self._session.head.key if self._session else None
        if here and (key.round > here.round + 1 or (key.round == here.round and key != here)):
            raise BadPayload(f"a contribution to another lineage, round {key.round}")
        if here and key.round < here.round and not self._sessions.get(key.lineage):
            if key.lineage not in self._decisions:
                raise BadPayload(f"a stale contribution to round {key.round}")
            raise PeerSilent(stream.peer, f"round {key.round} is over")
        session = await self._sessions.wait_for(key.lineage, stream, lambda: self._is_past(key))
        if session is None:
            raise PeerSilent(stream.peer, f"round {key.round} is over")
        await session.serve(stream.peer, stream, opening)

    def _is_past(self, key: RoundKey) -> bool:
        return self._session is not None and key.round < self._session.head.key.round
