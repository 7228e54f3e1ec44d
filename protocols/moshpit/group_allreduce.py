"""The data phase of one Moshpit group: the all-reduce of butterfly, without a vote.

If a part's reducer is lost, a member asks the other members for that part, which counts only with its own reducer's
signature. So all members that have all parts hold the same bits. A member that lacks one keeps its own state.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from protocols import wire
from protocols.aio import Notifier, loop_time, task_group
from protocols.allreduce.all_reduce import AllReduce, Reducer, contribute
from protocols.allreduce.parts import DataPhase, ReducedPart
from protocols.allreduce.plan import ResolvedPlan
from protocols.base import BadPayload, Contribution, Deadline, PeerError, PeerId, PeerSilent, RoundKey, Stream
from protocols.moshpit.grid import seeded_order
from protocols.moshpit.matchmaker import WEIGHT_SCALE
from protocols.moshpit.state import MoshpitState
from protocols.vectors.views import VectorView, norm

DATA = "starling/moshpit/data/1"
PART = "starling/moshpit/part/1"


@dataclass(frozen=True, slots=True)
class GroupResult:
    """The result of a completed group.

    `weight` is each member's weight from now on: the mean of their weights, reduced by what is missing from the mean.
    If `incomplete`, a member's state is missing from some chunks, so the total weight has shrunk.
    """

    contributions: Mapping[PeerId, Contribution]
    weights: Mapping[PeerId, float]
    weight: float
    incomplete: bool


class GroupAllReduce:
    """One peer's data phase in a called group. It still serves the other members after `run` has returned.

    All members that complete the group hold the same bits, under the same `name`.
    """

    def __init__(
        self,
        moshpit: MoshpitState,
        key: RoundKey,
        resolved: ResolvedPlan,
        source: VectorView,
        target: VectorView,
        deadline: Deadline,
    ) -> None:
        """Members out of sight are lost from the start. `source`, this peer's state, must not change until `run`
        returns.

        `target` takes the mean; it is undefined unless `run` returns a result.
        """
        self.key, self.resolved, self.name = key, resolved, resolved.digest.hex()
        self._moshpit, self._deadline, self._over, self._notifier = moshpit, deadline, False, Notifier()
        self._gone: set[PeerId] = set()
        self._parts = range(len(resolved.plan.reducers))
        now, budget_seconds = loop_time(), resolved.plan.budget_seconds
        self._patience_seconds = 2 * moshpit.answer_seconds + resolved.phase_seconds
        task = DataPhase(
            key=key,
            resolved=resolved,
            host=moshpit.host,
            mine=source,
            into=target,
            format=moshpit.format,
            silent=now + self._patience_seconds,
            patience_seconds=self._patience_seconds,
            deadline=min(deadline, now + budget_seconds),
            progress=lambda: None,
        )
        self._exchange = AllReduce(task, moshpit.accounting, lambda part: self._notifier.notify(), DATA)
        for peer in resolved.peers:
            if peer not in moshpit.tracker.sight and peer != moshpit.me.peer:
                self.lose(peer)

    def missing(self) -> tuple[PeerId, ...]:
        """The reducers whose parts this peer does not have yet."""
        return tuple(dict.fromkeys(self.resolved.reducer(part) for part in self._parts if not self._held(part)))

    def _held(self, part: int) -> ReducedPart | None:
        """The part, if this peer has it with the signature of its own reducer."""
        held = self._exchange.parts.get(part)
        return held if held and held.done and held.done.reducer == self.resolved.plan.reducers[part] else None

    def lose(self, peer: PeerId, why: str = "gone") -> None:
        """Expect no more data from a peer: neither its state nor the part that it reduces."""
        self._gone.add(peer)
        self._exchange.lose(peer, why)

    @property
    def in_time(self) -> bool | None:
        """Whether all parts arrived within the budget; None if a part is missing for another reason than time."""
        return self._exchange.in_time

    async def run(self) -> GroupResult | None:
        """Average with the group. Returns None if this peer cannot get all parts."""
        exchange = self._exchange
        try:
            async with task_group() as group:
                running = group.create_task(exchange.run())
                while self._expects_more():
                    again = min(exchange.task.deadline, loop_time() + self._moshpit.answer_seconds)
                    await self._notifier.reached(lambda: all(self._known(part) for part in self._parts), again)
                running.cancel()  # nothing may write to the target any more
        finally:
            self._over = True  # two members that lack the same part must not wait for each other
            self._notifier.notify()
        self._remember()
        for part in self._parts:
            if not self._held(part):
                self._name_reducer(part)
                if not await self._fetch_part(part):
                    return None
        return self._result()

    def _remember(self) -> None:
        """Record which members delivered their state and their part.

        If none of them did, this peer was probably cut off or slow itself, so none is recorded as unreliable.
        """
        tracker, withheld = self._moshpit.tracker, self._exchange.withheld.union(self.missing())
        others = [offer.member for offer in self.resolved.plan.offers if offer.member != self._moshpit.me]
        for member in others:
            if member.peer not in withheld:
                tracker.delivered(member)
            elif not {each.peer for each in others} <= withheld:
                tracker.withheld(member, self.key.round)

    def _name_reducer(self, part: int) -> None:
        reducer, given = self.resolved.reducer(part), part in self._exchange.parts
        if reducer != self._moshpit.me.peer:
            why = "it sent a part that it did not make" if given else "its part did not arrive"
            self._moshpit.accounting.name(reducer, f"lost as a reducer: {why}")

    def _known(self, part: int) -> bool:
        return part in self._exchange.parts or part in self._exchange.failed

    def _expects_more(self) -> bool:
        """Whether to wait for more parts.

        A member that counts as dead may still be sending, because heartbeats are late on a busy line.
        """
        now, exchange = loop_time(), self._exchange
        moving = now < exchange.moved + self._moshpit.answer_seconds
        possible = any(
            not self._known(part) and (moving or self.resolved.reducer(part) not in self._gone) for part in self._parts
        )
        return possible and now < exchange.task.deadline

    async def _fetch_part(self, part: int) -> bool:
        """Get a part from another member that has it with its reducer's signature. The part's digest is not known."""
        moshpit, exchange = self._moshpit, self._exchange
        for peer in seeded_order(self.resolved.digest, self.resolved.peers):
            if peer in (moshpit.me.peer, self.resolved.reducer(part)) or peer not in moshpit.tracker.sight:
                continue
            deadline = min(self._deadline, loop_time() + self._patience_seconds)
            try:
                async with (
                    moshpit.host.transport.open(peer, PART, deadline) as stream,
                    moshpit.accounting.counting(stream),
                ):
                    held = await contribute(exchange.task, part, stream, again=True)
                    if held.done is None or held.done.reducer != self.resolved.plan.reducers[part]:
                        raise BadPayload("sent a part that its reducer did not make")
                    exchange.adopt(part, held)
                    return True
            except (BadPayload, PeerError):
                continue  # `counting` has named the member if it broke a rule
        return False

    def _result(self) -> GroupResult | None:
        resolved, held = self.resolved, self._exchange.parts
        bringing = sum(1 << bit for bit, weight in enumerate(resolved.weights) if weight)
        for part, each in held.items():
            if not all(mask & bringing for mask in each.masks):
                why = "refused: its part has chunks without any contribution"
                self._moshpit.accounting.name(resolved.reducer(part), why)
                return None
        chunks = sum(each.chunks for each in held.values())
        weights = {peer: weight / WEIGHT_SCALE for peer, weight in zip(resolved.peers, resolved.weights, strict=True)}
        counted = {peer: _counted(bit, held) for bit, peer in enumerate(resolved.peers) if weights[peer]}
        total = math.fsum(weights[peer] * count / chunks for peer, count in counted.items()) if chunks else 0.0
        return GroupResult(
            contributions={
                peer: Contribution(count, chunks, (f"{self.name}/{peer}",)) for peer, count in counted.items() if count
            },
            weights=weights,
            weight=total / len(resolved.peers),
            incomplete=any(count < chunks for count in counted.values()),
        )

    # -- serving other members ----------------------------------------------------------------------------------------

    async def serve(self, peer: PeerId, stream: Stream, opening: wire.Contribute) -> None:
        try:
            await self._exchange.serve(peer, stream, opening)
        except BadPayload as error:
            self._exchange.lose(peer, f"refused: {error}")
            raise

    async def serve_part(self, peer: PeerId, stream: Stream, opening: wire.Contribute) -> None:
        """Send a member another reducer's part, as soon as this peer has it."""
        if opening.part not in self._parts:
            raise BadPayload(f"part {opening.part} of {len(self._parts)}")
        await self._notifier.reached(lambda: self._over or self._known(opening.part), stream.deadline)
        held = self._held(opening.part)
        if held is None or held.done is None or not held.done.signature:
            raise PeerSilent(peer, f"asked for part {opening.part}, which this peer does not have")
        await Reducer(self._exchange.task, opening.part, held).serve(peer, stream)

    def discard(self) -> None:
        """Forget the group's parts: no new stream may ask for them."""
        self._exchange.discard()

    # -- afterwards ---------------------------------------------------------------------------------------------------

    def moved(self, source: VectorView, target: VectorView) -> float:
        """‖target − source‖ / ‖source‖ over the parts that this peer has; 0 if source is 0."""
        squares, whole = 0.0, 0.0
        for held in self._exchange.parts.values():
            for _, low, high, (scratch, apart) in held.pieces(2):
                before = source.read(low, high, scratch)
                whole += norm([before]) ** 2
                apart.copy_(before)
                squares += norm([apart.sub_(target.read(low, high, scratch))]) ** 2
        return math.sqrt(squares / whole) if whole else 0.0


def _counted(bit: int, held: Mapping[int, ReducedPart]) -> int:
    """The number of chunks that contain a member's contribution."""
    return sum(mask >> bit & 1 for each in held.values() for mask in each.masks)


def counted(results: Sequence[GroupResult]) -> dict[PeerId, Contribution]:
    found: dict[PeerId, Contribution] = {}
    for result in results:
        for peer, new in result.contributions.items():
            old = found.get(peer, Contribution(0, 0))
            found[peer] = Contribution(
                old.chunks_counted + new.chunks_counted, old.chunks + new.chunks, old.messages + new.messages
            )
    return found
