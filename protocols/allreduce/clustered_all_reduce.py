"""The data phase of a clustered round at one peer: as a member and an aggregator of its cluster and, at a voter, as the
reducer of its parts.

A member sends each part to its cluster's aggregator, and gets the mean of all from it. If the aggregator is lost, the
members ask the next one in an order that all of them know: it fetches the part from the reducer, once for all. A voter
asks the reducer itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from protocols.aio import loop_time, run_with_helper, task_group
from protocols.allreduce import clustered_plan
from protocols.allreduce.aggregator import Aggregator, PartialReducer, Relay
from protocols.allreduce.all_reduce import DATA, AllReduce, contribute
from protocols.allreduce.clustered_messages import (
    ContributePartial,
    MemberOffer,
    member_offers,
    whole_offers,
)
from protocols.allreduce.clustered_plan import ResolvedClusters, RoundPlan
from protocols.allreduce.parts import DataPhase, ReducedPart
from protocols.allreduce.plan import ResolvedPlan
from protocols.base import BadPayload, Deadline, PeerError, PeerGone, PeerId, PeerSilent, Stream
from protocols.streams.endpoint import RoundAccounting
from protocols.wire import Contribute

TRIES = 3  # streams to one relay of a part: each repair of a reducer ends one
UNTOLD_SECONDS = 1.0  # besides half of the data phase: how long a cluster that has lost its lead has to come


class _Replaced(PeerSilent):
    """Another peer is to send the part: this one did nothing wrong."""


class ClusteredAllReduce(AllReduce):
    """As `AllReduce`, with `DataPhase.clusters`. `assign` takes versions of the plan of all clusters."""

    def __init__(
        self,
        task: DataPhase,
        accounting: RoundAccounting,
        on_change: Callable[[ReducedPart | None], None],
        method: str = DATA,
    ) -> None:
        super().__init__(task, accounting, on_change, method)
        assert task.clusters
        self.clusters: ResolvedClusters = task.clusters
        self._me, self._lead = task.host.me, self.clusters.peers[task.cluster]
        self._offers = member_offers(task.resolved.plan.offers)
        self._partials: dict[int, PartialReducer] = {}  # of the parts that this voter reduces
        self._aggregators: dict[int, Aggregator] = {}
        self._relays: dict[int, Relay] = {}  # an aggregator's, too
        self._known: dict[int, ResolvedPlan] = {task.cluster: task.resolved}  # clusters whose offers are checked
        self._left: set[int] = set()  # parts that no member of the cluster could send
        self._mute: dict[PeerId, str] = {}  # leads of clusters from which nothing came: maybe they got no plan
        self._checking = asyncio.Lock()
        self._group: asyncio.TaskGroup | None = None

    async def run(self) -> None:
        """Contribute, aggregate and reduce until the deadline, including parts that get another reducer meanwhile."""
        async with task_group() as group:
            self._group = group
            for part in range(len(self.clusters.plan.reducers)):
                low, high = self.clusters.part(part)
                if low == high:
                    self.take(part, self._empty(part))
                elif self.task.resolved.reducer(part) == self._me:
                    self._aggregators[part] = aggregator = Aggregator(self.task, part)
                    for peer, why in self._lost.items():
                        aggregator.lose(peer, why)
                    group.create_task(self._aggregate(aggregator))
                    self._begin_relay(part, aggregator.relay)
                else:
                    group.create_task(self._exchange(part))
            while loop_time() < self.task.deadline:
                clusters = self.clusters
                for part in range(len(clusters.plan.reducers)):
                    self._begin_reducer(group, part)
                self._notifier.notify()
                await self._notifier.reached(lambda: clusters is not self.clusters, self.task.deadline)  # noqa: B023

    def _empty(self, part: int) -> ReducedPart:
        held = self.task.part(part)
        held.seal([])
        return held

    def assign(self, resolved: RoundPlan) -> None:
        assert isinstance(resolved, ResolvedClusters)
        if resolved is not self.clusters:
            silent = max(self.task.silent, loop_time() + self.task.patience_seconds)
            self.clusters, self.task = resolved, replace(self.task, clusters=resolved, silent=silent)
            self._notifier.notify()

    def lose(self, peer: PeerId, why: str) -> None:
        if peer in self.clusters.peers and peer not in self._lost:
            cut_at = self.task.silent - self.task.patience_seconds
            patience_seconds = UNTOLD_SECONDS + self.task.resolved.phase_seconds / 2
            until = loop_time() if peer in self.clusters.lone else max(loop_time(), cut_at) + patience_seconds
            asyncio.get_running_loop().call_at(until, self._lose_untold, peer)
        self._lost.setdefault(peer, why)
        for aggregator in self._aggregators.values():
            aggregator.lose(peer, why)
        for reducer in self._partials.values():
            reducer.lose_aggregator(peer, why)
        self._notifier.notify()

    def _lose_untold(self, lead: PeerId) -> None:
        """Wait no longer for a cluster that did not come: its lead may have been lost before it passed the plan on."""
        if self.clusters.peers.index(lead) not in self._known:
            self._mute[lead] = "silent: it has lost its lead"
            for reducer in self._partials.values():
                reducer.lose(lead, self._mute[lead])

    def take(self, part: int, held: ReducedPart) -> None:
        super().take(part, held)
        self._notifier.notify()

    def pass_on(self, part: int, held: ReducedPart) -> None:
        """Give members of the cluster that wait for a part at this peer what it has fetched."""
        if part in self.parts or held.done is None:
            return
        with suppress(BadPayload):  # the statement of its reducer is not verified yet
            self.task.check_part(part, held, held.done)
            self.adopt(part, held)
            if relay := self._relays.get(part):
                relay.follow(held, relay.notifier)

    def discard(self) -> None:
        super().discard()
        self._partials.clear()
        self._aggregators.clear()
        self._relays.clear()

    # -- as a voter: parts reduced here -------------------------------------------------------------------------------

    def _begin_reducer(self, group: asyncio.TaskGroup, part: int) -> None:
        """Begin to reduce a part, or cease to, as the latest plan says."""
        reduces, (low, high) = self.clusters.reducer(part) == self._me, self.clusters.part(part)
        if low == high or reduces == (part in self._jobs):
            return
        self.restarted.add(part)
        if not reduces:
            self._jobs.pop(part)[1].cancel()
            del self._partials[part]
            if part in self._left and part not in self.parts and part not in self._relays:
                self._begin_relay(part, Relay(self.task, part))
            return
        self.failed.pop(part, None)
        self._partials[part] = reducer = PartialReducer(self.task, part, self.parts.get(part))
        for cluster, members in self._known.items():
            self._introduce(reducer, cluster, members)
        for lead, why in self._mute.items():
            reducer.lose(lead, why)
        self._jobs[part] = (self._me, group.create_task(self._average(reducer)))

    def _introduce(
        self, reducer: PartialReducer, cluster: int, members: ResolvedPlan, by: PeerId | None = None
    ) -> None:
        reducer.know(cluster, members)
        for peer, why in self._lost.items():
            if peer != by:
                reducer.lose_aggregator(peer, why)

    async def _average(self, reducer: PartialReducer) -> None:
        held = await reducer.run()
        for lead, why in {**reducer.dropped, **reducer.outliers}.items():
            if sender := reducer.sender(lead):
                self._accounting.name(sender, why)
            elif why.startswith("silent"):
                self._mute[lead] = why
        self.take(reducer.index, held)

    # -- as an aggregator or a relay ----------------------------------------------------------------------------------

    async def _aggregate(self, aggregator: Aggregator) -> None:
        await aggregator.aggregate()
        for peer, why in {**aggregator.dropped, **aggregator.outliers}.items():
            self._accounting.name(peer, why)

    def _begin_relay(self, part: int, relay: Relay) -> None:
        assert self._group
        self._relays[part] = relay
        if part not in self._aggregators:  # this peer also gets the part from the aggregator, or tried to
            self.restarted.add(part)
        self._group.create_task(self._relay(part, relay))

    async def _relay(self, part: int, relay: Relay) -> None:
        """Get the mean of a part from its reducer, and again from the next one if a later plan names another."""
        first = True
        while loop_time() < self.task.deadline:
            reducer = self.clusters.reducer(part)
            if not first:
                self.restarted.add(part)
                relay.task = self.task
                relay.follow(self.task.part(part), relay.notifier)
            first = False
            await self._follow(part, relay, reducer)

            def has_another(reducer: PeerId = reducer) -> bool:
                return self.clusters.reducer(part) != reducer

            await self._notifier.reached(has_another, self.task.deadline)

    async def _follow(self, part: int, relay: Relay, reducer: PeerId) -> None:
        """Get the mean from this reducer, on a second stream if the first one breaks off."""
        if reducer == self._me:
            return await self._follow_own(part, relay)
        for again in (False, True):
            if again:
                self.restarted.add(part)
            try:
                fetching = self._fetch(part, relay, reducer)
                return self.take(part, await run_with_helper(fetching, self._until_reassigned(part, reducer)))
            except (BadPayload, _Replaced):
                break
            except PeerError as error:
                if self._lost_reducer(reducer, error) or reducer in self._lost:
                    break
        self.failed[part] = reducer
        self._on_change(None)

    async def _follow_own(self, part: int, relay: Relay) -> None:
        """Pass on what this peer reduces itself, and give it the partials of its cluster."""
        if not await self._notifier.reached(lambda: part in self._partials, self.task.deadline):
            return
        reducer = self._partials[part]
        relay.follow(reducer.part, reducer.notifier)
        if aggregator := self._aggregators.get(part):
            with suppress(_Replaced):
                taking = reducer.take_from(self.task.cluster, aggregator)
                await run_with_helper(taking, self._until_reassigned(part, self._me))

    async def _fetch(self, part: int, relay: Relay, reducer: PeerId) -> ReducedPart:
        aggregator, task = self._aggregators.get(part), self.task
        opening = ContributePartial(
            key=task.key,
            plan=task.resolved.digest,
            part=part,
            codec=task.format.codec.name,
            cluster=task.cluster,
            offers=self._offers,
            relays=aggregator is None,
        )
        async with self._opened(reducer, task) as stream, self._accounting.counting(stream):
            return await relay.fetch(stream, opening, aggregator)

    async def _until_reassigned(self, part: int, reducer: PeerId) -> None:
        def is_over() -> bool:
            return reducer in self._lost or self.clusters.reducer(part) != reducer

        await self._notifier.reached(is_over, self.task.deadline)
        if reducer in self._lost:
            raise PeerSilent(reducer, self._lost[reducer])
        raise _Replaced(reducer, "another peer reduces the part")

    # -- as a member --------------------------------------------------------------------------------------------------

    async def _exchange(self, part: int) -> None:
        """Send this member's contribution to the part's aggregator, and get the mean from it or from the next one."""
        order = clustered_plan.relays(self.task.resolved, self._lead, part)
        sent = False
        for peer in order:
            if part in self.parts and sent:
                return
            if peer == self._me or (self._me == self._lead and sent):
                break
            if peer not in self._lost and await self._ask(part, peer, sent):
                return
            sent = True
        self._left.add(part)
        if part not in self._relays and self.clusters.reducer(part) != self._me:
            self.failed[part] = order[0]
            self._on_change(None)
            self._begin_relay(part, Relay(self.task, part))

    async def _ask(self, part: int, peer: PeerId, again: bool) -> bool:
        """Get a part from a member of the cluster; whether that succeeds. The first one is sent this contribution."""
        began = loop_time()
        for left in reversed(range(TRIES)):
            try:
                asking = self._contribute_through(part, peer, again)
                self.take(part, await run_with_helper(asking, self._until_lost(peer, began)))
                return True
            except (BadPayload, _Replaced):
                return False
            except PeerError as error:  # maybe the part is reduced again: the stream ends then, and the peer is well
                if isinstance(error, PeerGone) or peer in self._lost or not left:
                    self._accounting.name(peer, f"lost as an aggregator: {error.why}")
                    return False
            again = True
            self.restarted.add(part)
        return False

    async def _contribute_through(self, part: int, peer: PeerId, again: bool) -> ReducedPart:
        async with self._opened(peer, self.task) as stream, self._accounting.counting(stream):
            return await contribute(self.task, part, stream, again)

    def _overdue(self, began: float) -> Deadline:
        """When a part that was asked for is overdue: long after other parts came in, which should take as long.

        The lead waits half as long. It needs all parts to vote, before their reducers are taken for lost.
        """
        if not self.finished:
            return self.task.deadline
        seconds = 2 * self.task.resolved.phase_seconds + self.task.patience_seconds
        late = max(began, self.finished) + (seconds / 2 if self._me == self._lead else seconds)
        return min(self.task.deadline, late)

    async def _until_lost(self, peer: PeerId, began: float) -> None:
        while peer not in self._lost and loop_time() < self._overdue(began):
            finished = self.finished
            await self._notifier.reached(
                lambda: peer in self._lost or self.finished != finished,  # noqa: B023 - awaited here
                self._overdue(began),
            )
        if peer in self._lost:
            raise PeerSilent(peer, self._lost[peer])
        raise _Replaced(peer, "the part is overdue, and another peer is asked for it")

    # -- serving ------------------------------------------------------------------------------------------------------

    async def serve(self, peer: PeerId, stream: Stream, opening: Contribute | ContributePartial) -> None:
        """Serve a member of the cluster: as the part's aggregator, or in place of one that is lost."""
        if isinstance(opening, ContributePartial):
            return await self._serve_cluster(peer, stream, opening)
        part = opening.part
        if part >= len(self.clusters.plan.reducers):
            raise BadPayload("no part of the plan")
        if (
            peer not in self.task.resolved.peers
        ):  # maybe this peer moved, and its other lead has not told it the plan yet
            raise PeerSilent(peer, "it is not in this peer's cluster")
        self._check_codec(opening.codec)
        deadline = min(stream.deadline, self.task.deadline)
        if not await self._notifier.reached(lambda: self._group is not None, deadline):
            raise PeerSilent(peer, "the data phase ended first")
        if aggregator := self._aggregators.get(part):
            return await aggregator.serve(peer, stream)
        if (held := self.parts.get(part)) and held.done:
            return await Relay(self.task, part, held).give(stream)
        if part not in self._relays:
            self._begin_relay(part, Relay(self.task, part))
        await self._relays[part].give(stream)

    async def _serve_cluster(self, peer: PeerId, stream: Stream, opening: ContributePartial) -> None:
        """Serve another cluster's aggregator, or a member in place of one that is lost."""
        if opening.cluster >= len(self.clusters.peers) or opening.part >= len(self.clusters.plan.reducers):
            raise BadPayload("no cluster or no part of the plan")
        if not self.clusters.offered:
            raise BadPayload("the work of a cluster, sent to a peer that is not a voter")
        self._check_codec(opening.codec)
        members = await self._checked(opening.cluster, opening.offers, peer)
        if peer not in members.peers:
            raise BadPayload("not a member of the cluster")
        deadline = min(stream.deadline, self.task.deadline)
        if not await self._notifier.reached(lambda: opening.part in self._partials, deadline):
            raise PeerSilent(peer, f"part {opening.part} is not reduced here")
        await self._partials[opening.part].serve_cluster(opening.cluster, stream, opening.relays)

    async def _checked(self, cluster: int, members_offers: Sequence[MemberOffer], by: PeerId) -> ResolvedPlan:
        """What follows from the offers of a cluster, which are checked once. Raises BadPayload.

        `by` sent them: it is there, although it may have left this peer's view before.
        """
        async with self._checking:
            if cluster not in self._known:
                clusters, signer = self.clusters, self.task.host.signer
                offered = clusters.offered[cluster]
                offers = whole_offers(offered, members_offers)
                check = partial(clustered_plan.check_offers, clusters.inputs, offered, offers, signer.verify)
                await self.task.host.compute.run(check, 0)
                members = clustered_plan.resolve_cluster(clusters, cluster, offers)
                self._known[cluster] = members
                self._mute.pop(clusters.peers[cluster], None)
                for reducer in self._partials.values():
                    self._introduce(reducer, cluster, members, by)
        return self._known[cluster]
