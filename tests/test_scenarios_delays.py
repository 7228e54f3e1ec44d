"""What a fault costs the decision of a round: seconds from the fault, or more than without it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from protocols.base import PeerId
from protocols.deciding import Decision
from protocols.session import Session
from protocols.votes import Decided, Instruction
from tests.sim.staged import Cast, Stage

LATENCY_SECONDS = 0.05
ROUND_TRIP_SECONDS = 2 * LATENCY_SECONDS
COMPUTE_SECONDS = 0.01
"""What decoding, averaging and hashing such short vectors adds up to."""
ROUND = 3
"""In which it happens: by then all streams stand."""


@dataclass(slots=True)
class Decisions:
    """When each peer decided each round."""

    at: dict[tuple[PeerId, int], float] = field(default_factory=dict)

    def last(self, peers: list[PeerId], round_number: int) -> float:
        return max(self.at[peer, round_number] for peer in peers)


@pytest.fixture
def decisions(monkeypatch: pytest.MonkeyPatch) -> Decisions:
    seen, follow = Decisions(), Decision._follow

    def watching(self: Decision, instruction: Instruction) -> None:
        if isinstance(instruction, Decided):
            seen.at.setdefault((self._me.peer, self.head.key.round), asyncio.get_running_loop().time())
        follow(self, instruction)

    monkeypatch.setattr(Decision, "_follow", watching)
    return seen


def stage(peers: int = 4, **changes: object) -> Stage:
    return Stage(Cast(peers, fork_peers=0, latency_seconds=LATENCY_SECONDS, **changes))  # type: ignore[arg-type]


def delayed(
    swarm: Stage,
    decisions: Decisions,
    victim: Callable[[], PeerId],
    when: Callable[[Session, int], bool],
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


@pytest.mark.parametrize("peers", (3, 5, 8))
def test_a_coordinator_that_dies_with_all_parts_in_costs_two_round_trips(peers: int, decisions: Decisions) -> None:
    """Its death is seen after L; then Prepare, Promise, Propose and Accept take L each."""
    swarm = stage(peers)
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


@pytest.mark.parametrize("at", (1, 8, 20, 30, 40, 52, 57, 58, 59, 60))
def test_a_reducer_that_dies_in_the_data_phase_costs_four_round_trips(at: int, decisions: Decisions) -> None:
    """Its part is handed in again: death, new plan, stream there and back, chunks, mean, Propose, Accept.

    Also where it dies between sending its part to one member and to the next: who has the part hands in again, too.
    """
    swarm = stage()

    def victim() -> PeerId:
        return [peer for peer in swarm.peers if peer != swarm.coordinator("p0")][-1]

    seconds = delayed(swarm, decisions, victim, lambda _, count: count == at, swarm.kill)
    assert seconds, "it was decided before the reducer died"
    bound = LATENCY_SECONDS + 4 * ROUND_TRIP_SECONDS + COMPUTE_SECONDS
    assert seconds[0] <= bound, f"decided {seconds[0]:.3f} s after the death at message {at}, not {bound:.3f} s"
