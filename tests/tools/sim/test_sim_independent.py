"""The simulated world of peers that share no anchor: a stand-in gets through, and every bug planted in it is found."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocols import INDEPENDENT_PROTOCOLS, REPLICATED_PROTOCOLS
from protocols.base import (
    AveragingResult,
    Contribution,
    Host,
    IndependentAverager,
    LocalProgress,
    Outcome,
    PeerId,
    PeerSilent,
    Settings,
    Vector,
)
from protocols.control_channel import RoundAccounting
from protocols.moshpit.peer_tracker import PeerTracker
from protocols.pairwise.claimed_rounds import ClaimedRounds
from tests.sim import crashes, scheduling
from tests.sim import world as worlds
from tests.sim.__main__ import main as simulate
from tests.sim.independent_world import IndependentWorld
from tests.sim.message_fault import ROUND, enumerate_points, small, strike
from tests.sim.pairs import Pairs, PairSession
from tests.sim.scenario import Scenario
from tests.sim.world import Outcome as Played
from tests.sim.world import World, play
from tests.sim.worlds import world_of
from tests.support.checkers import Report, Violation


class PairWorld(IndependentWorld):
    """A world of stand-ins."""

    session: type[PairSession] = PairSession

    def averager(self, host: Host, settings: Settings) -> IndependentAverager:
        return Pairs(host, settings, self.session)


def played(
    fault: str = "none", seed: int = 0, session: type[PairSession] = PairSession, peers: int = 4, rounds: int = 4
) -> Played:
    world = type("Planted", (PairWorld,), {"session": session})
    return play(Scenario(peers=peers, rounds=rounds, seed=seed, fault=fault), world)


def found(outcome: Played) -> set[str]:
    return {violation.invariant for violation in outcome.violations}


# -- what gets through ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["none", "slow", "crash", "partition", "mixed"])
def test_mixing_peers_survive_every_fault_family(fault: str) -> None:
    outcome = played(fault, peers=4)
    assert outcome.violations == []
    assert 0 < outcome.rounds_did <= outcome.rounds_could


def test_same_seed_gives_the_same_trace() -> None:
    assert len({played("none", 3).trace.digest() for _ in range(2)}) == 1
    assert len({played("none", seed).trace.digest() for seed in range(2)}) == 2


SEEDS = st.integers(0, 2**63 - 1)


@settings(max_examples=25)
@given(protocol=st.sampled_from(sorted([*REPLICATED_PROTOCOLS, *INDEPENDENT_PROTOCOLS])), seed=SEEDS)
def test_any_63_bit_seed_plays_without_violation(protocol: str, seed: int) -> None:
    outcome = play(Scenario(protocol=protocol, peers=2, rounds=2, seed=seed, inner_steps=2), world_of(protocol))
    assert outcome.violations == []


@settings(max_examples=5)
@given(seed=SEEDS)
def test_every_command_accepts_any_63_bit_seed(seed: int) -> None:
    with redirect_stdout(io.StringIO()):
        assert simulate(["--protocol", "gossip", "--peers", "2", "--rounds", "1", "--seeds", str(seed)]) == 0
        assert crashes.main(["--protocol", "gossip", "--seed", str(seed), "--sample", "1"]) == 0
        assert scheduling.main(["--seeds", str(seed)]) == 0


def test_single_peer_continues_with_zero_spread() -> None:
    outcome = played("partition", peers=1)
    assert outcome.violations == [] and outcome.rounds_could == 0
    assert {report["spread"] for report in outcome.histories["p0"]} == {0.0}


def test_reported_spread_approximates_the_true_one() -> None:
    told, true = [], []

    class Measured(PairWorld):
        def reported(self, report: dict[str, object]) -> None:
            super().reported(report)
            if len(self.replicas) == 5 and report["round"]:
                told.append(report["spread"])
                true.append(self.spread())

    play(Scenario(peers=5, rounds=6, elements=2000), Measured)
    assert sum(told) == pytest.approx(sum(true), rel=0.2)


def test_each_protocol_has_its_simulation() -> None:
    assert world_of("butterfly") is World and world_of("gossip") is IndependentWorld


# -- what is found ----------------------------------------------------------------------------------------------------


class Deaf(PairSession):
    """Nobody is ever met."""

    async def average(self, mine: Sequence[Vector], work: LocalProgress, into: Sequence[Vector]) -> AveragingResult:
        return AveragingResult(Outcome.SKIPPED)


class Seldom(PairSession):
    """Meets others in its first round, and in no other."""

    async def average(self, mine: Sequence[Vector], work: LocalProgress, into: Sequence[Vector]) -> AveragingResult:
        return await super().average(mine, work, into) if self.round == 0 else AveragingResult(Outcome.SKIPPED)


class Hasty(PairSession):
    """Goes from its first round to the last one."""

    async def reclaim(self) -> Mapping[PeerId, Contribution]:
        self.round = max(self.round, 5)
        return await super().reclaim()


class Apart(PairSession):
    """States are exchanged, and nothing is made of them."""

    def mix(self, state: Sequence[Vector], data: bytearray) -> None:
        pass


class Twice(PairSession):
    """What came in is counted again, the next time."""

    def count(self, peer: PeerId, name: str) -> None:
        super().count(peer, name)
        super().count(peer, name)


class Grouped(PairSession):
    """Says that all pairs of a round are one group."""

    async def average(self, mine: Sequence[Vector], work: LocalProgress, into: Sequence[Vector]) -> AveragingResult:
        self.group = f"round {self.round}"
        return await super().average(mine, work, into)


class Back(PairSession):
    """Ends in a round that was long ago."""

    async def reclaim(self) -> Mapping[PeerId, Contribution]:
        self.round //= 2
        return await super().reclaim()


class Lingering(PairSession):
    """Leaves a task behind in each round."""

    async def reclaim(self) -> Mapping[PeerId, Contribution]:
        self.task = asyncio.get_running_loop().create_task(asyncio.sleep(1e4))
        return await super().reclaim()


@pytest.mark.parametrize(
    "session, fault, invariant",
    [
        (Deaf, "none", "progress"),
        (Seldom, "none", "progress"),
        (Hasty, "none", "progress"),
        (Apart, "partition", "spread"),
        (Twice, "none", "counted-once"),
        (Grouped, "none", "one-group"),
        (Back, "none", "never-back"),
        (Lingering, "none", "no-leak"),
        (Lingering, "crash", "no-leak"),
    ],
)
def test_planted_bug_is_found(
    session: type[PairSession], fault: str, invariant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worlds, "HEALED_SECONDS", 200.0)
    assert invariant in found(played(fault, session=session, rounds=6))


def test_peer_not_committing_after_healing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worlds, "HEALED_SECONDS", 60.0)
    assert found(played("partition", session=Deaf)) >= {"progress"}


# -- a fault at every message -----------------------------------------------------------------------------------------


def test_fault_at_every_message_of_a_round(capsys: pytest.CaptureFixture[str]) -> None:
    assert crashes.main(["--peers", "3"], PairWorld) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["points"] == told["messages"] > 20 and told["undecided"] == 0


class Endless(PairSession):
    """Waits for whoever does not answer."""

    async def _ask(self, partner: PeerId, mine: Sequence[Vector], into: Sequence[Vector]) -> str:
        try:
            return await super()._ask(partner, mine, into)
        except PeerSilent:
            await asyncio.sleep(1e4)
            raise


def test_bug_exposed_only_by_silence_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    world = type("Planted", (PairWorld,), {"session": Endless})
    assert crashes.main(["--peers", "2", "--kind", "silence", "--sample", "4"], world) == 1
    assert "goes-on" in capsys.readouterr().out


class Shy(PairSession):
    """Meets nobody once the round is over at whose messages faults happen."""

    async def average(self, mine: Sequence[Vector], work: LocalProgress, into: Sequence[Vector]) -> AveragingResult:
        return await super().average(mine, work, into) if self.round <= ROUND else AveragingResult(Outcome.SKIPPED)


@pytest.mark.parametrize("session, wrong", [(PairSession, set()), (Shy, {"goes-on"})])
def test_peer_continuing_alone_after_fault_is_found(session: type[PairSession], wrong: set[str]) -> None:
    point = enumerate_points(small(3), PairWorld)[0]
    verdict = strike(small(3), "stall", (point,), type("Planted", (PairWorld,), {"session": session}))
    assert {violation.invariant for violation in verdict.violations} == wrong


def test_points_are_from_the_second_round() -> None:
    points = enumerate_points(small(3), PairWorld)
    assert {point.peer for point in points} == {"p0", "p1", "p2"}
    assert all(point.number > 1 for point in points)


@pytest.mark.parametrize(
    "protocol, lie, seed",
    [
        ("gossip", "scaled", 0), ("gossip", "replayed", 1), ("gossip", "hanging", 3),
        ("gossip", "ahead", 4), ("moshpit", "scaled", 0), ("moshpit", "other-sender", 1),
        ("moshpit", "ahead", 14), ("push_sum", "weight", 0),
    ],
)  # fmt: skip
def test_honest_peers_survive_beside_a_liar(protocol: str, lie: str, seed: int) -> None:
    """All that is refused is named, and no clock is moved; what this judge finds, the next tests say."""
    scenario = Scenario(protocol=protocol, peers=4, rounds=4, seed=seed, fault="lies", lie=lie)
    outcome = play(scenario, CountingWorld)
    assert outcome.violations == [] and CountingWorld.lies and len(outcome.liars) == 1
    assert CountingWorld.apart < 0.11, "three that meet nobody are .14 apart"


class CountingWorld(IndependentWorld):
    """Knows how many lies were told, and how far the honest are apart in the end."""

    lies, apart = 0, 0.0

    def check(self, histories: dict[PeerId, list[Report]]) -> list[Violation]:
        CountingWorld.lies = sum(liar.lies for liar in self.told.values())
        CountingWorld.apart = self.spread()
        return super().check(histories)


def test_unblamed_lie_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RoundAccounting, "name", lambda self, peer, why: None)
    scenario = Scenario(protocol="gossip", peers=4, rounds=4, seed=0, fault="lies", lie="scaled")
    assert found(play(scenario, IndependentWorld)) == {"named"}


def test_round_clock_moved_by_one_liar_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ClaimedRounds, "round", lambda self, mine, others: max([mine, *self._said.values()]))
    scenario = Scenario(protocol="gossip", peers=4, rounds=4, seed=4, fault="lies", lie="ahead")
    assert "clock" in found(play(scenario, IndependentWorld))


def test_without_waiting_leading_peer_is_never_met_again(monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = Scenario(protocol="moshpit", peers=3, rounds=5, seed=11, fault="partition")
    assert play(scenario, IndependentWorld).violations == []
    monkeypatch.setattr(PeerTracker, "leads", lambda self, round: False)
    assert "progress" in found(play(scenario, IndependentWorld))


def test_slow_peer_ends_near_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = Scenario(protocol="gossip", peers=4, rounds=5, fault="slow")
    assert play(scenario, IndependentWorld).violations == []
    monkeypatch.setattr(ClaimedRounds, "round", lambda self, mine, others: mine)
    assert "spread" in found(play(scenario, IndependentWorld)), (
        "alone for as long as the others took together, many times"
    )


def test_protocols_not_resisting_lies_reject_lie_fault(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        simulate(["--protocol", "ring", "--faults", "lies"])
    assert "ring is not made to bear lies" in capsys.readouterr().err
