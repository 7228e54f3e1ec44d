"""What rounds that fail leave behind: nothing, once as many rounds have been decided as parts are kept for."""

from __future__ import annotations

import asyncio
import functools
import gc
from collections import Counter
from collections.abc import Awaitable, Callable

import pytest

from protocols.aio import loop_time
from protocols.allreduce.all_reduce import AllReduce, Reducer
from protocols.allreduce.parts import ReducedPart
from protocols.butterfly.round import Round
from protocols.butterfly.vote import RoundVote
from protocols.streams.endpoint import KEEP_MESSAGES
from protocols.sync.snapshot import Snapshot, _Lease
from tests.sim.host import SimCompute
from tests.sim.scenario_runner import ScenarioRunner, ScenarioSetup
from tests.support.long import long

KINDS = (ReducedPart, Reducer, AllReduce, Round, RoundVote, Snapshot)
PEERS = 4
SETTLING_ROUNDS = 10
"""More than parts, and decisions, are kept for."""
UNDECIDED = 6
ELEMENTS = 4000

Trouble = Callable[[ScenarioRunner], Awaitable[None]]


def tracker() -> Counter[str]:
    """What is alive, of all peers together: objects of each kind, and bytes of parts and of snapshots.

    Without snapshots that are lent to a joiner, until their time is over.
    """
    gc.collect()
    count: Counter[str] = Counter()
    objects = gc.get_objects()
    lent = {id(each.snapshot) for each in objects if type(each) is _Lease and each.until > loop_time()}
    for each in objects:
        if id(each) in lent:
            continue
        if type(each) in KINDS:
            count[type(each).__name__] += 1
        if type(each) is ReducedPart:
            count["bytes of parts"] += sum(len(chunk) for chunk in each._memory if chunk)
        elif type(each) is Snapshot:
            count["bytes of snapshots"] += 8 * each.index.elements
    return count


def waiting(swarm: ScenarioRunner) -> int:
    """The most messages that one peer keeps for another."""
    boxes = [box for peer in swarm.alive() for box in swarm.averager(peer)._post._outboxes.values()]
    return max((max(len(box.waiting), len(box.sent)) for box in boxes), default=0)


async def nothing(swarm: ScenarioRunner) -> None:
    """No trouble."""


async def undecided(swarm: ScenarioRunner) -> None:
    """No side has a majority, for many attempts."""
    half = swarm.peers[:2], swarm.peers[2:]
    swarm.cut(*half)
    await _attempts(swarm, 3)
    few = tracker()
    await _attempts(swarm, UNDECIDED)
    many = tracker()
    assert not many - few, f"from 3 attempts to {UNDECIDED} there came {dict(many - few)}"
    assert waiting(swarm) <= KEEP_MESSAGES
    swarm.heal(*half)


async def _attempts(swarm: ScenarioRunner, count: int) -> None:
    await swarm.until(lambda: all(swarm.outcomes(peer).count("undecided") >= count for peer in swarm.peers), 1e4)
    await asyncio.sleep(1.0)


async def skipped(swarm: ScenarioRunner) -> None:
    """All peers' computations hang for longer than a round may take."""
    for peer in swarm.peers:
        compute = swarm.replicas[peer]._compute
        assert isinstance(compute, SimCompute)
        compute._free_at = swarm.now + 40.0
    await swarm.until(lambda: all("skipped" in swarm.outcomes(peer) for peer in swarm.peers), 300.0, "a skipped round")


async def repaired(swarm: ScenarioRunner) -> None:
    """A reducer dies in the data phase, three times over, and comes back."""
    for _ in range(3):
        now = swarm.head("p0").key.round
        victim = next(peer for peer in swarm.peers if peer != swarm.coordinator("p0"))

        def reducing(victim: str = victim) -> bool:
            session = swarm.session(victim)
            return session is not None and session.exchange is not None and not session.exchange.parts

        def watch(peer: str, number: int, way: str, other: str, victim: str = victim, now: int = now) -> None:
            if peer == victim and swarm.head(victim).key.round == now and reducing():
                swarm.network.watch = None
                swarm.kill(victim)

        swarm.network.watch = watch
        await swarm.until(lambda victim=victim: victim not in swarm.alive(), 60.0, "a death")  # type: ignore[misc]
        await swarm.rounds(2)
        await swarm.revived(victim)
        await swarm.until(swarm.whole, 60.0, "a whole roster")


async def superseded(swarm: ScenarioRunner) -> None:
    """One goes on alone, and gives it up."""
    swarm.cut(["p0"], swarm.peers[1:])
    await swarm.until(lambda: swarm.outcomes("p0").count("alone") >= 3, 600.0, "rounds alone")
    swarm.heal(["p0"], swarm.peers[1:])
    await swarm.until(lambda: bool(swarm.caught_up("p0")), 60.0, "going over")


@functools.cache
def level(trouble: Trouble, fork_peers: int) -> tuple[Counter[str], set[str]]:
    """What is alive when the trouble is over and as many rounds are decided as anything is kept for; and what came of
    the rounds until then."""
    swarm = ScenarioRunner(ScenarioSetup(PEERS, fork_peers=fork_peers, elements=ELEMENTS, chunk_elements=500))

    async def story() -> Counter[str]:
        await swarm.rounds(4)
        await trouble(swarm)
        await swarm.until(swarm.whole, 60.0, "a whole roster")
        await swarm.rounds(SETTLING_ROUNDS)
        await asyncio.sleep(0.2)  # everybody trains
        assert waiting(swarm) <= 4, f"{waiting(swarm)} messages wait for one peer"
        return tracker()

    return swarm.play(story), {outcome for peer in swarm.peers for outcome in swarm.outcomes(peer)}


@pytest.mark.parametrize(
    ("trouble", "outcome", "fork_peers"),
    (
        (undecided, "undecided", 0),
        *long((repaired, "superseded", 0), (skipped, "skipped", 0), (superseded, "superseded", 1)),
    ),
)
def test_failed_rounds_leave_no_memory_behind(trouble: Trouble, outcome: str, fork_peers: int) -> None:
    calm, _ = level(nothing, fork_peers)
    after, outcomes = level(trouble, fork_peers)
    assert outcome in outcomes
    assert calm["ReducedPart"] >= PEERS * PEERS and calm["bytes of parts"] > 0, "nothing was counted"
    assert not after - calm, f"more than without trouble: {dict(after - calm)}, beside {dict(calm)}"
