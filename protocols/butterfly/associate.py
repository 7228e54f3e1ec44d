"""An attempt at a round, as far as a peer without a vote goes through it in another way than a voter.

It gets the plan and the decision from its lead. If that one is lost or late, it gets the plan from its mates, and asks
other voters what was decided. In a run without clusters it asks the voters from the start, as it does without a lead.
"""

from __future__ import annotations

from dataclasses import replace

from protocols import wire
from protocols.aio import loop_time, task_group
from protocols.allreduce import plan as planning
from protocols.allreduce.clustered_messages import ClusterPlan, ClusterVersion
from protocols.base import BadPayload, Deadline, PeerId
from protocols.butterfly.attempt import Attempt
from protocols.butterfly.call import INFORMED, RoundStart
from protocols.butterfly.vote import mean_record
from protocols.consensus import record as records
from protocols.consensus.messages import Certificate, MeanDecided

LOOK_SECONDS = 0.5  # how often an associate looks whether its lead still tells it what is decided
VOTE_SECONDS = 0.5  # after the data phase until it asks another voter than its lead what was decided
RECORD_SECONDS = 0.25
"""Time without data until an associate that was told the votes for a mean, and does not hold that, asks for the
record."""


class AssociateRound:
    def __init__(self, attempt: Attempt, call: RoundStart, voters: int) -> None:
        """`voters`: members of a full roster."""
        self._attempt, self._head, self._me, self._vote = attempt, attempt.head, attempt.me, attempt.vote
        self._call, self._cluster, self._voters, self._began = call, call.cluster, voters, loop_time()
        self._told: tuple[bytes, Certificate] | None = None  # digest of a record, and votes for it
        self._from_mates: dict[PeerId, ClusterPlan] = {}  # they wait until this peer loses sight of its lead

    async def live(self) -> None:
        async with task_group() as group:
            group.create_task(self._ask_unless_told())
            group.create_task(self._conclude_when_told())

    # -- the plan -----------------------------------------------------------------------------------------------------

    def take(self, peer: PeerId, message: ClusterPlan | ClusterVersion | MeanDecided) -> None:
        """Take what a lead tells its cluster, or a mate in its place. Raises BadPayload, also at a voter."""
        if isinstance(message, MeanDecided):
            self._on_mean_decided(peer, message)
        elif isinstance(message, ClusterPlan) and peer != message.lead:
            self._on_plan_of_mate(peer, message)
        else:
            self._call.on_lead(peer, message)

    def on_gone(self) -> None:
        """A peer is gone. If that is the lead, pass its plan on, or take it from a mate."""
        self.share_plan()
        self._take_from_mates()

    def share_plan(self) -> None:
        """Pass the plan of a lead that is lost on to members of the cluster of which nothing was heard."""
        is_lost = self._cluster.lead not in self._attempt.live_peers()
        if is_lost and self._me not in self._head.roster and not self._attempt.over():
            self._cluster.share({peer for peer, at in self._vote.heard.items() if at >= self._began})

    def _on_plan_of_mate(self, peer: PeerId, message: ClusterPlan) -> None:
        """Keep a plan from another member of the cluster until the lead is lost. Raises BadPayload if it is of none."""
        if self._me in self._head.roster:
            raise BadPayload("a plan for a cluster, sent to a voter by another peer than its lead")
        if self._call.resolved is None and self._cluster.take(peer, message):
            self._from_mates[peer] = message
            self._take_from_mates()

    def _take_from_mates(self) -> None:
        """Take the first plan of a lead that is lost, unless it has told this peer one itself."""
        for peer, message in [*self._from_mates.items()]:
            if message.lead in self._attempt.live_peers():
                continue
            del self._from_mates[peer]
            try:
                if self._call.resolved is None:
                    self._call.on_lead(peer, message)
            except BadPayload as error:
                self._attempt.accounting.name(peer, f"refused: {error}")

    # -- the decision -------------------------------------------------------------------------------------------------

    async def _ask_unless_told(self) -> None:
        """Ask to be admitted and told what is decided, unless a lead tells it: then when that one is lost or late.

        A lead that is stopped is lost after seconds. So the voter that stands by is asked before, by a peer that has
        the whole mean.
        """
        has_asked = False
        while self._call.is_told() and not self._attempt.over() and (now := loop_time()) < self._told_by():
            if not has_asked and now >= self._lead_due():
                has_asked = True
                for standby in sorted({*self._cluster.standby()} - {self._cluster.lead}):
                    self.request_admission(standby)
            dues = self._told_by(), self._lead_due(), min(self._attempt.deadline, now + LOOK_SECONDS)
            await self._attempt.until(self._attempt.over, min(due for due in dues if due > now))
        if not self._attempt.over():
            self._ask_admission()

    def _lead_due(self) -> Deadline:
        """When the certificate is due from the lead: the vote takes a part of the time of the data.

        At once if a part was taken from that lead, which has not reduced it: it may be stopped.
        """
        exchange = self._attempt.exchange
        if exchange is None or not exchange.complete:
            return self._attempt.deadline
        if self._cluster.lead_is_replaced:
            return exchange.finished
        return exchange.finished + VOTE_SECONDS + self._vote.phase_seconds / 2

    def _told_by(self) -> Deadline:
        if (resolved := self._call.resolved) is None:
            return self._attempt.deadline
        return self._call.cut_at + resolved.plan.budget_seconds + self._vote.patience_seconds

    async def _conclude_when_told(self) -> None:
        """Take the votes that the lead sends, for the record of the mean that this peer holds.

        It may hold the mean only later than a majority of the voters. While no more data comes, or if the record
        changes the roster or complaints, it asks the lead for the record.
        """

        def is_ready() -> bool:
            return self._attempt.over() or self._expected_record() is not None

        while await self._attempt.until(lambda: self._told is not None or self._attempt.over()) and self._told:
            (digest, votes), self._told = self._told, None
            while not is_ready() and loop_time() < (until := self._moves_until()):
                await self._attempt.until(is_ready, until)
            record = self._expected_record()
            if record is not None and records.lineage(record) == digest:
                self._vote.receive(votes.sender.peer, replace(votes, record=record))
            elif not self._attempt.over():
                self.request_admission(votes.sender.peer)

    def _moves_until(self) -> Deadline:
        exchange = self._attempt.exchange
        return min(self._attempt.deadline, exchange.moved + RECORD_SECONDS) if exchange else 0.0

    def _on_mean_decided(self, peer: PeerId, message: MeanDecided) -> None:
        sender = next((member for member in self._head.roster if member.peer == peer), None)
        if sender is None or self._me in self._head.roster:
            raise BadPayload("votes from a peer that is not a voter, or sent to one")
        self._told = message.digest, self._vote.tally.whole(message, sender)
        self._attempt.changed.notify()

    def _expected_record(self) -> bytes | None:
        """The record of the mean that this peer holds, if nothing else changes by it."""
        resolved, head, exchange = self._call.resolved, self._head, self._attempt.exchange
        if resolved is None or exchange is None or not exchange.complete:
            return None
        if exchange.task.resolved.digest != resolved.digest:
            return None
        results = tuple(part.result for _, part in sorted(exchange.parts.items()) if part.result)
        complaints = planning.complaints(head.key.round, (), (), head.complaints)
        return records.encode(mean_record(head, resolved, results, head.roster, complaints))

    def _ask_admission(self) -> None:
        """Ask the roster for admission, and former members too, since this member may have to fork with them.

        While the roster is full, ask the coordinators of the first two ballots: they also send the certificate. In a
        large run this peer sees few voters, and others would refuse it: then these are the first two that it sees.
        """
        tally, live = self._vote.tally, self._attempt.host.members.live()
        former = [member.peer for member in live if self._vote.forks_only and tally.was_member(member)]
        asked = records.coordinators(self._head.key.lineage, self._head.roster)
        if len(asked) >= self._voters and not self._vote.forks_only:
            here = {member.peer for member in live}
            asked = tuple(peer for peer in asked if peer in here)[:INFORMED] or asked[:INFORMED]
        for peer in dict.fromkeys((*asked, *former)):
            self.request_admission(peer)

    def request_admission(self, peer: PeerId) -> None:
        if peer != self._me.peer:
            self._attempt.post.send(peer, wire.AdmissionRequest(self._head.key, self._me, self._head.state_root))
