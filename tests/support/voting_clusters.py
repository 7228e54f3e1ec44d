"""One round of clusters with its vote: voters that coordinate and decide, and associates that hold what they decide.

What comes before the plan and after the certificate is played by the test: which offers a lead has, when the round is
called, and that leads send the certificate on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import Any

import torch

from protocols.allreduce import clustered_plan as clustered
from protocols.allreduce.clustered_messages import ClusteredPlan, PlanOutline
from protocols.allreduce.parts import ReducedPart
from protocols.base import AveragingResult, Contribution, Head, LocalProgress, Member, Outcome, PeerId, Settings, Vector
from protocols.butterfly.averager import Butterfly
from protocols.butterfly.round import Round
from protocols.consensus.record import Record, coordinator, coordinators
from tests.sim.host import SimSigner
from tests.support.clustered_swarm import KEY, MAX_WEIGHT, NORM, ROOT, ClusteredSwarm

CALL_SECONDS = 0.5
ROUND_SECONDS = 120.0


class VotingClusters(ClusteredSwarm):
    """As `ClusteredSwarm`. The roster is full: an associate does not become a voter while all voters are there."""

    grace_seconds = 30.0

    def __init__(self, *sizes: int, elements: int = 300) -> None:
        super().__init__(*sizes, elements=elements)
        self.settings = Settings("fp32", (elements,), 50, clusters=True, max_weight=MAX_WEIGHT, voters=len(sizes))
        self.voters = [each[0] for each in self.clusters]
        self.head = Head(KEY, tuple(Member(voter) for voter in self.voters), ROOT, ROOT)
        self.order = coordinators(KEY.lineage, self.head.roster)
        self.averagers, self.rounds = dict[PeerId, Butterfly](), dict[PeerId, Round]()
        self.ended = dict[PeerId, float]()  # when each peer knew the outcome
        self.results, self.into = dict[PeerId, AveragingResult](), dict[PeerId, Vector]()
        self.standby = dict(zip(self.voters, self.voters[1:] + self.voters[:1], strict=True))  # lead -> its standby

    def signed(self, outline: PlanOutline) -> PlanOutline:
        """The outline of a plan, signed by the coordinator of its ballot."""
        signer = SimSigner(coordinator(KEY.lineage, self.head.roster, outline.ballot), self.seed)
        return replace(outline, signature=signer.sign(outline.signed(KEY)))

    # -- the round ----------------------------------------------------------------------------------------------------

    async def average(self, *beside: Coroutine[Any, Any, None]) -> None:
        """Play the round, and something beside it, until all peers that are alive have ended it."""
        self.offer()
        for name in self.names:
            self.averagers[name] = Butterfly(self.join(name), self.settings)
            if name in self.disguises:
                self.network.transports[name].disguise = self.disguises[name]
        others = asyncio.gather(*beside)
        await asyncio.wait([self.spawn(name, self._member(name)) for name in self.names])
        await others

    async def _member(self, name: PeerId) -> None:
        cluster = next(g for g, each in enumerate(self.clusters) if name in each)
        lead, tokens = self.voters[cluster], 0 if name in self.idle else 100
        self.into[name] = torch.full_like(self.vectors[name], torch.nan)
        async with self.averagers[name].enter(self.head, self.now + ROUND_SECONDS) as session:
            self.rounds[name] = session
            session.cluster.standby = lambda: [self.standby[lead]]
            if name in self.voters:
                self._lead(session, cluster)
            work = LocalProgress(tokens, 0.0, 1.0, NORM, complete=True, state_root=ROOT)
            self.results[name] = await session.average([self.vectors[name]], work, [self.into[name]])
            self.ended[name] = self.now
            if session.vote.certificate:
                if name in self.voters:
                    self._pass_certificate_on(session, name)
                await asyncio.sleep(1.0)  # in its next round a peer still serves this one

    def _lead(self, session: Round, cluster: int) -> None:
        mine = self.voters[cluster]
        followed = [each for each in self.clusters if self.standby[each[0]] == mine]
        session.cluster.keep(self.offered[cluster], self.offers[cluster])
        session.cluster.followers = lambda: [peer for each in followed for peer in each[1:]]

        def draw(ballot: int, without: Sequence[PeerId]) -> ClusteredPlan:
            clusters = [each for each in self.offered if each.lead.peer not in without]
            return clustered.make_clustered_plan(self.inputs(), clusters, CALL_SECONDS, ballot)

        async def due() -> bool:
            await asyncio.sleep(CALL_SECONDS)
            return True

        vars(session.call).update(draw=draw, due=due)

    def _pass_certificate_on(self, session: Round, voter: PeerId) -> None:
        """To the own cluster, and to those that this voter stands by."""
        if certificate := session.vote.certificate:
            for each in self.clusters:
                for peer in each[1:] if voter in (each[0], self.standby[each[0]]) else ():
                    session.post.send(peer, certificate)

    # -- what must hold -----------------------------------------------------------------------------------------------

    def chunks_in(self, record: Record) -> int:
        """How many chunks the mean has."""
        return sum(len(part.members) for part in self.parts_of(record, self.order[0]))

    def decided(self, names: Sequence[PeerId]) -> Record:
        """Check that these peers ended the round with one record and its mean, bit for bit, and return the record."""
        held = [self.rounds[name].vote.decided for name in names]
        record = held[0]
        assert record and all(each == record for each in held), dict(zip(names, held, strict=True))
        outcome = Outcome.COMMITTED if record.averaged else Outcome.SKIPPED
        ends = {name: self.results[name].outcome for name in names}
        assert ends == dict.fromkeys(names, outcome), ends
        if record.averaged:
            for name in names:
                assert torch.equal(self.into[name], self.into[names[0]]), f"{name} holds other bits"
            self._check_mean(record, names[0])
        return record

    def _check_mean(self, record: Record, name: PeerId) -> None:
        """The mean is that of the members that its masks name, and what peers report of their own work is so, too."""
        by_lead = dict(zip(self.voters, self.inner, strict=True))
        self.inner = [by_lead[lead] for lead in record.peers]
        chunks, counted, held = 0, dict.fromkeys(self.names, 0), [dict.fromkeys(each.peers, 0) for each in self.inner]
        for part in self.parts_of(record, name):
            chunks += part.chunks
            for index, members in enumerate(part.members):
                masks = clustered.member_masks(members)
                self.check_chunk(part, index, masks, self.into[name], counted)
                for counts, mask in zip(held, masks, strict=True):
                    for bit, peer in enumerate(counts):
                        counts[peer] += mask >> bit & 1
        for result in (result for result in self.results.values() if result.record == record):
            for counts, lead in zip(held, record.peers, strict=True):
                if lead in result.clusters:
                    assert result.clusters[lead] == Contribution(sum(counts.values()), chunks * len(counts))
                elif result.contributions:
                    due = {peer: Contribution(count, chunks) for peer, count in counts.items()}
                    assert result.contributions == due

    def parts_of(self, record: Record, name: PeerId) -> list[ReducedPart]:
        cache = self.averagers[name].part_cache
        parts = [cache.get(part.digest) for part in record.parts]
        return [part for part in parts if part]

    def counts(self, record: Record) -> dict[PeerId, int]:
        """In how many chunks of the mean each peer's work is."""
        cache = next(self.averagers[name].part_cache for name in self.voters if self.alive(name))
        counts = dict.fromkeys((name for each in self.clusters for name in each), 0)
        for digest in record.parts:
            part = cache.get(digest.digest)
            for members in part.members if part else ():
                for lead, mask in zip(record.peers, clustered.member_masks(members), strict=True):
                    for bit, offer in enumerate(self.offers[self.voters.index(lead)]):
                        peer = offer.member.peer
                        counts[peer] += mask >> bit & 1
        return counts
