"""What a fault costs the decision of a round: seconds from the fault, or more than without it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from protocols.base import PeerId
from protocols.butterfly.round import Round
from protocols.butterfly.vote import RoundVote
from protocols.consensus.messages import Decided, Instruction
from protocols.consensus.record import Kind, decode
from tests.sim import contact
from tests.sim.scenario_runner import ScenarioRunner, ScenarioSetup
from tests.support.long import diagonal, long

LATENCY_SECONDS = 0.05
ROUND_TRIP_SECONDS = 2 * LATENCY_SECONDS
COMPUTE_SECONDS = 0.01
"""What decoding, averaging and hashing such short vectors adds up to."""
ROUND = 3
"""In which it happens: by then all streams stand."""


@dataclass(slots=True)
class Decisions:
    """When each peer decided each round, and what."""

    at: dict[tuple[PeerId, int], float] = field(default_factory=dict)
    kinds: dict[tuple[PeerId, int], Kind] = field(default_factory=dict)

    def last(self, peers: list[PeerId], round_number: int) -> float:
        return max(self.at[peer, round_number] for peer in peers)


@pytest.fixture
def decisions(monkeypatch: pytest.MonkeyPatch) -> Decisions:
    seen, follow = Decisions(), RoundVote._follow

    def watching(self: RoundVote, instruction: Instruction) -> None:
        if isinstance(instruction, Decided):
            who = (self.paxos.me.peer, self.head.key.round)
            seen.at.setdefault(who, asyncio.get_running_loop().time())
            seen.kinds[who] = Kind(decode(instruction.certificate.record).kind)
        follow(self, instruction)

    monkeypatch.setattr(RoundVote, "_follow", watching)
    return seen


def delayed_swarm(peers: int = 4, **changes: Any) -> ScenarioRunner:
    return ScenarioRunner(ScenarioSetup(peers, fork_peers=0, latency_seconds=LATENCY_SECONDS, **changes))


def delayed(
    swarm: ScenarioRunner,
    decisions: Decisions,
    victim: Callable[[], PeerId],
    when: Callable[[Round, int], bool],
    strike: Callable[[PeerId], None],
) -> tuple[float, float] | None:
    """Strike one peer at the first of its messages in round `ROUND` for which `when` (its session, messages since its
    data phase began) says so. Seconds until the last of the others has decided, from the strike and from the call;
    None: it came too late, or not at all."""

    async def story() -> tuple[float, float] | None:
        await swarm.rounds(ROUND)
        who, struck, began = victim(), list[float](), list[float]()

        def watch(peer: PeerId, number: int, way: str, other: PeerId) -> None:
            session = swarm.session(who)
            if struck or peer != who or session is None or session.head.key.round != ROUND or not session.exchange:
                return
            began.append(swarm.now)
            if when(session, len(began)):
                struck.append(swarm.now)
                strike(who)

        swarm.network.watch = watch
        others = [peer for peer in swarm.peers if peer != who]
        await swarm.until(lambda: all((peer, ROUND) in decisions.at for peer in others), 300.0, "a decision")
        swarm.network.watch = None
        last = decisions.last(others, ROUND)
        return (last - struck[0], last - began[0]) if struck and struck[0] < last else None

    return swarm.play(story)


# -- who dies ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("peers", (3, 5, *long(8)))
def test_coordinator_death_before_proposal_costs_two_round_trips(peers: int, decisions: Decisions) -> None:
    """Its death is seen after L; then Prepare, Promise, Propose and Accept take L each."""
    swarm = delayed_swarm(peers)
    seconds = delayed(
        swarm,
        decisions,
        lambda: swarm.coordinator("p0"),
        lambda session, _: session.exchange is not None and session.exchange.complete,
        swarm.kill,
    )
    assert seconds, "it was decided before the coordinator died"
    bound = LATENCY_SECONDS + 2 * ROUND_TRIP_SECONDS + COMPUTE_SECONDS
    assert seconds[0] <= bound, f"{peers} peers: decided {seconds[0]:.3f} s after the death, not {bound:.3f} s"


@pytest.mark.parametrize("at", (1, 30, 58, *long(20, 40, 57, 60)))
def test_reducer_death_costs_four_round_trips(at: int, decisions: Decisions) -> None:
    """Its part is handed in again: death, new plan, stream there and back, chunks, mean, Propose, Accept.

    Also where it dies between sending its part to one member and to the next: who has the part hands in again, too.
    """
    swarm = delayed_swarm()

    def victim() -> PeerId:
        return [peer for peer in swarm.peers if peer != swarm.coordinator("p0")][-1]

    seconds = delayed(swarm, decisions, victim, lambda _, count: count == at, swarm.kill)
    assert seconds, "it was decided before the reducer died"
    bound = LATENCY_SECONDS + 4 * ROUND_TRIP_SECONDS + COMPUTE_SECONDS
    assert seconds[0] <= bound, f"decided {seconds[0]:.3f} s after the death at message {at}, not {bound:.3f} s"


# -- who falls silent -------------------------------------------------------------------------------------------------


def silenced(peers: int, coordinating: bool | None, after_seconds: float, decisions: Decisions) -> tuple[float, float]:
    """Silence one peer after its offer is complete; returns when the last other peer decided, and the T_b of the round.

    Args:
        coordinating: whether the silent peer is the coordinator; None: no peer falls silent.
        after_seconds: from the complete offer to the silence.
    """
    swarm = delayed_swarm(peers)

    async def story() -> tuple[float, float]:
        await swarm.rounds(ROUND)
        first = swarm.coordinator("p0")
        who = first if coordinating else [peer for peer in swarm.peers if peer != first][-1]

        def offered() -> bool:
            session = swarm.session(who)
            sent = session.call._announced if session and session.head.key.round == ROUND else None
            return sent is not None and sent.complete

        await swarm.until(offered, 60.0, "a complete offer")
        await asyncio.sleep(after_seconds)
        if coordinating is not None:
            swarm.silence(who)
        others = [peer for peer in swarm.peers if peer != who]
        patience_seconds = 0.0
        while not all((peer, ROUND) in decisions.at for peer in others):
            for peer in others:
                vote = swarm.vote(peer)
                if vote and vote.head.key.round == ROUND:
                    patience_seconds = max(patience_seconds, vote.patience_seconds)
            await asyncio.sleep(LATENCY_SECONDS)
        return decisions.last(others, ROUND), patience_seconds

    decided = swarm.play(story)
    decisions.at.clear()
    return decided


@pytest.fixture
def unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but the vote's own timers tells that a peer is silent."""
    monkeypatch.setattr(contact, "LIVENESS_SECONDS", 1e4)


@pytest.mark.usefixtures("unseen")
@diagonal("peers, coordinating", (3, 5), (False, True))
def test_silent_member_costs_one_ballot_timeout(peers: int, coordinating: bool, decisions: Decisions) -> None:
    """From just after its complete offer: T_b until it is given up, as a contributor and as a reducer at once, or until
    the next one coordinates; then a few round trips."""
    undisturbed, _ = silenced(peers, None, 0.0, decisions)
    decided, patience_seconds = silenced(peers, coordinating, 1.2 * LATENCY_SECONDS, decisions)
    delay, bound = decided - undisturbed, patience_seconds + 4 * ROUND_TRIP_SECONDS
    words = f"{peers} peers, coordinating: {coordinating}: {delay:.2f} s more, T_b {patience_seconds:.2f} s"
    assert 0.9 * patience_seconds <= delay <= bound, words


@pytest.mark.usefixtures("unseen")
@pytest.mark.parametrize("at", (1, 30, *long(20, 57)))
@pytest.mark.parametrize("coordinating", (False, True))
def test_stalled_peer_costs_no_round_despite_slow_opening(at: int, coordinating: bool, decisions: Decisions) -> None:
    """They are opened once, when a process starts and its machine is busy: that may not make patience outlast the
    budget, so that the round is skipped while all that is needed to repair it is there."""
    swarm = delayed_swarm()

    def victim() -> PeerId:
        for peer in swarm.peers:
            swarm.averager(peer)._post.round_trip_seconds.update(dict.fromkeys(swarm.peers, 5.0))
        first = swarm.coordinator("p0")
        return first if coordinating else [peer for peer in swarm.peers if peer != first][-1]

    assert delayed(swarm, decisions, victim, lambda _, count: count == at, swarm.silence), "it came too late"
    kinds = {peer: kind for (peer, number), kind in decisions.kinds.items() if number == ROUND}
    assert len(kinds) >= 3
    assert set(kinds.values()) == {Kind.MEAN}, kinds


# -- a link that carries nothing one way ------------------------------------------------------------------------------


@pytest.mark.parametrize(("source", "target"), (("p0", "p1"), *long(("p1", "p0"), ("p3", "p1"))))
def test_one_way_link_failure_costs_one_repair(source: str, target: str) -> None:
    """All peers commit every round with the same bits, although the link stays broken.

    One round waits for the missing chunks, and its record notes the link fault. Afterwards both peers contribute by
    other links, no peer waits, and neither is evicted.
    """
    swarm, pair = delayed_swarm(), (min(source, target), max(source, target))
    bystander = next(peer for peer in swarm.peers if peer not in pair)

    async def story() -> tuple[float, int]:
        await swarm.rounds(2)
        began, parent = swarm.now, swarm.head(bystander).key.lineage
        swarm.network.block(source, target)
        await swarm.until(lambda: bool(swarm.head(bystander).complaints), 60.0, "a complaint")
        await swarm.rounds(8)
        links = [link for link in swarm.chain(bystander).since(parent) if link.record.complaints]
        for link in links:
            assert [(each.first, each.second) for each in link.record.complaints] == [pair]
            assert {member.peer for member in link.record.roster} == set(swarm.peers)
        return began, links[0].record.round

    began, complained = swarm.play(story)
    for peer in swarm.peers:
        reports = swarm.reports(peer, began)
        assert {each["outcome"] for each in reports} == {"committed"}
        slow = {each["round"]: round(each["seconds_average"], 2) for each in reports if each["seconds_average"] > 1.0}
        counted_in = {each["round"] for each in reports if peer in each["peers"]}
        # An end of the link stays out of the rounds that the other end calls, and fetches what was decided.
        waited = slow if peer not in pair else [each for each in slow if each >= complained and each in counted_in]
        assert set(waited) <= {complained}, f"{peer} waited in rounds {slow}; complained in {complained}"
    later = [each for each in swarm.reports(bystander, began) if each["round"] > complained]
    assert len(later) >= 6
    for peer in pair:  # in the rounds that the other end calls, it may stay out
        counted = sum(peer in each["peers"] for each in later)
        assert counted >= len(later) / 2, f"{peer} counts in {counted} of {len(later)} rounds"
