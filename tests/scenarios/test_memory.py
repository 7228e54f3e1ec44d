"""What rounds that fail leave behind: nothing, once as many rounds have been decided as parts are kept for."""

from __future__ import annotations

import asyncio
import functools
import gc
from collections import Counter
from collections.abc import Awaitable, Callable

import pytest

from protocols.allreduce.all_reduce import AllReduce
from protocols.allreduce.parts import ReducedPart
from protocols.allreduce.reducer import Reducer
from protocols.butterfly.consensus_driver import ConsensusDriver
from protocols.butterfly.session import ButterflySession
from protocols.control_channel import KEEP_MESSAGES
from protocols.sync.snapshot import Snapshot
from tests.sim.host import SimCompute
from tests.sim.scenario_runner import ScenarioRunner, ScenarioSetup

KINDS = (ReducedPart, Reducer, AllReduce, ButterflySession, ConsensusDriver, Snapshot)
PEERS = 4
SETTLING_ROUNDS = 10
"""More than parts, and decisions, are kept for."""
UNDECIDED = 20
ELEMENTS = 4000

Trouble = Callable[[ScenarioRunner], Awaitable[None]]


def tracker() -> Counter[str]:
    """What is alive, of all peers together: objects of each kind, and bytes of parts and of snapshots."""
    gc.collect()
    count: Counter[str] = Counter()
    for each in gc.get_objects():
        if type(each) in KINDS:
            count[type(each).__name__] += 1
        if type(each) is ReducedPart:
            count["bytes of parts"] += each._memory.nbytes
        elif type(each) is Snapshot:
            count["bytes of snapshots"] += 8 * each.index.elements
    return count


def waiting(stage: ScenarioRunner) -> int:
    """The most messages that one peer keeps for another."""
    lines = [line for peer in stage.alive() for line in stage.averager(peer)._post._lines.values()]
    return max((max(len(line.waiting), len(line.sent)) for line in lines), default=0)


async def nothing(stage: ScenarioRunner) -> None:
    """No trouble."""


async def undecided(stage: ScenarioRunner) -> None:
    """Nobody has a majority, for many attempts."""
    half = stage.peers[:2], stage.peers[2:]
    stage.cut(*half)
    await _attempts(stage, 3)
    few = tracker()
    await _attempts(stage, UNDECIDED)
    many = tracker()
    assert not many - few, f"from 3 attempts to {UNDECIDED} there came {dict(many - few)}"
    assert waiting(stage) <= KEEP_MESSAGES
    stage.heal(*half)


async def _attempts(stage: ScenarioRunner, count: int) -> None:
    await stage.until(lambda: all(stage.outcomes(peer).count("undecided") >= count for peer in stage.peers), 1e4)
    await asyncio.sleep(1.0)


async def skipped(stage: ScenarioRunner) -> None:
    """Nobody gets anything computed for longer than a round may take."""
    for peer in stage.peers:
        compute = stage.replicas[peer]._compute
        assert isinstance(compute, SimCompute)
        compute._free_at = stage.now + 40.0
    await stage.until(lambda: all("skipped" in stage.outcomes(peer) for peer in stage.peers), 300.0, "a skipped round")


async def repaired(stage: ScenarioRunner) -> None:
    """A reducer dies in the data phase, three times over, and comes back."""
    for _ in range(3):
        now = stage.head("p0").key.round
        victim = next(peer for peer in stage.peers if peer != stage.coordinator("p0"))

        def reducing(victim: str = victim) -> bool:
            session = stage.session(victim)
            return session is not None and session.attempt.exchange is not None and not session.attempt.exchange.parts

        def watch(peer: str, number: int, way: str, other: str, victim: str = victim, now: int = now) -> None:
            if peer == victim and stage.head(victim).key.round == now and reducing():
                stage.network.watch = None
                stage.kill(victim)

        stage.network.watch = watch
        await stage.until(lambda victim=victim: victim not in stage.alive(), 60.0, "a death")  # type: ignore[misc]
        await stage.rounds(2)
        stage.revive(victim)
        await asyncio.sleep(0.0)
        await stage.until(stage.whole, 60.0, "a whole roster")


async def superseded(stage: ScenarioRunner) -> None:
    """One goes on alone, and gives it up."""
    stage.cut(["p0"], stage.peers[1:])
    await stage.until(lambda: stage.outcomes("p0").count("alone") >= 5, 600.0, "rounds alone")
    stage.heal(["p0"], stage.peers[1:])
    await stage.until(lambda: bool(stage.caught_up("p0")), 60.0, "going over")


@functools.cache
def level(trouble: Trouble, fork_peers: int) -> tuple[Counter[str], set[str]]:
    """What is alive when the trouble is over and as many rounds are decided as anything is kept for; and what came of
    the rounds until then."""
    stage = ScenarioRunner(ScenarioSetup(PEERS, fork_peers=fork_peers, elements=ELEMENTS, chunk_elements=500))

    async def story() -> Counter[str]:
        await stage.rounds(4)
        await trouble(stage)
        await stage.until(stage.whole, 60.0, "a whole roster")
        await stage.rounds(SETTLING_ROUNDS)
        await asyncio.sleep(0.2)  # everybody trains
        assert waiting(stage) <= 4, f"{waiting(stage)} messages wait for one peer"
        return tracker()

    return stage.play(story), {outcome for peer in stage.peers for outcome in stage.outcomes(peer)}


@pytest.mark.parametrize(
    ("trouble", "outcome", "fork_peers"),
    ((undecided, "undecided", 0), (skipped, "skipped", 0), (repaired, "superseded", 0), (superseded, "superseded", 1)),
)
def test_failed_rounds_leave_no_memory_behind(trouble: Trouble, outcome: str, fork_peers: int) -> None:
    calm, _ = level(nothing, fork_peers)
    after, outcomes = level(trouble, fork_peers)
    assert outcome in outcomes
    assert calm["ReducedPart"] >= PEERS * PEERS and calm["bytes of parts"] > 0, "nothing was counted"
    assert not after - calm, f"more than without trouble: {dict(after - calm)}, beside {dict(calm)}"
