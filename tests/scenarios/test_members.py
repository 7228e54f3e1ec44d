"""Who is of the roster: who restarts is another member, newcomers come a few at a time, the silent are evicted."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import suppress
from dataclasses import replace

import pytest

from protocols.allreduce.all_reduce import AllReduce
from protocols.allreduce.plan import ResolvedPlan
from protocols.base import Member, PeerError, PeerId
from protocols.butterfly.averager import CONTROL
from protocols.butterfly.coordinator import RoundCoordinator
from protocols.consensus.messages import Accept
from protocols.consensus.record import Kind, Record
from protocols.history.chain import DecidedRound
from protocols.static_members import StaticMembers
from tests.sim.host import sim_host
from tests.sim.scenario_runner import ScenarioRunner, ScenarioSetup

WHOLE_SECONDS = 30.0


def contributed(links: tuple[DecidedRound, ...], peer: PeerId) -> list[int]:
    """Rounds whose mean holds this peer's work."""
    return [link.record.round for link in links if peer in link.record.peers]


@pytest.mark.parametrize("dead_seconds", (0.2, 3.0))
@pytest.mark.parametrize("peers", (3, 5))
def test_restarted_peer_rejoins_as_new_member(peers: int, dead_seconds: float) -> None:
    """It catches up, knocks, is admitted by a record, and brings work again; nobody is kept waiting for it."""
    stage = ScenarioRunner(ScenarioSetup(peers, fork_peers=0))

    async def story() -> tuple[tuple[DecidedRound, ...], float, float]:
        await stage.rounds(4)
        parent = stage.head("p0").key.lineage
        stage.kill("p2")
        await asyncio.sleep(dead_seconds)
        stage.revive("p2")
        await asyncio.sleep(0.0)
        born = stage.now
        seconds = await stage.until(stage.whole, WHOLE_SECONDS, "admission")
        await stage.rounds(3)
        return stage.chain("p0").since(parent), seconds, born

    links, seconds, born = stage.play(story)
    rosters = [{member.incarnation for member in link.record.roster if member.peer == "p2"} for link in links]
    assert all(len(lives) <= 1 for lives in rosters), "two lives of one peer vote"
    first = rosters.index({1})
    assert set().union(*rosters[first:]) == {1}, "the old life votes again"
    assert seconds <= 5.0, f"admitted {seconds:.1f} s after its start"
    counted = contributed(links[first + 1 :], "p2")
    assert len(counted) >= 2, f"admitted in round {links[first].record.round}, brings work in {counted}"
    others = [each for peer in stage.peers if peer != "p2" for each in stage.told(peer, born)]
    assert {each["outcome"] for each in others} == {"committed"}
    assert {each["incarnation"] for each in stage.told("p2", born)} == {1}


def test_former_incarnation_has_no_vote() -> None:
    """Whoever says something in its name is refused and named, before its next life is admitted and after."""
    stage = ScenarioRunner(ScenarioSetup(4, fork_peers=0))

    async def vote() -> None:
        """In the name of p2's first life, by its second."""
        key = stage.head("p0").key
        host = sim_host(stage.network, stage.network.transports["p2"], stage.scenario.seed, {})
        with suppress(PeerError):
            async with host.transport.open("p0", CONTROL, stage.now + 1.0) as stream:
                await stream.send(Accept(key, Member("p2", 0), 0, bytes(32), bytes(32)))
                await stream.receive(64)

    async def story() -> float:
        await stage.rounds(3)
        stage.kill("p2")
        await stage.rounds(2)
        stage.revive("p2")
        await asyncio.sleep(0.0)
        await stage.until(stage.whole, WHOLE_SECONDS, "admission")
        await stage.rounds(1)
        voted = stage.now
        await vote()
        await stage.rounds(2)
        return voted

    voted = stage.play(story)
    named = [each["blamed"]["p2"] for each in stage.told("p0", voted) if "p2" in each["blamed"]]
    assert named and "of another incarnation" in named[0], f"p0 named p2: {named}"


@pytest.mark.parametrize(("founders", "newcomers"), ((1, 4), (2, 4), (4, 4)))
def test_newcomers_are_admitted_a_few_at_a_time(founders: int, newcomers: int) -> None:
    """At most half as many as there are, so that they are never the majority that decides on the rest; or four."""
    stage = ScenarioRunner(ScenarioSetup(founders + newcomers, founders=founders, fork_peers=0))

    async def story() -> tuple[tuple[DecidedRound, ...], float]:
        await stage.rounds(3)
        head = stage.head("p0")
        assert len(head.roster) == founders
        for peer in stage.peers[founders:]:
            stage.begin(peer)
        await asyncio.sleep(0.0)
        seconds = await stage.until(stage.whole, WHOLE_SECONDS, "a whole roster")
        await stage.rounds(2)
        return stage.chain("p0").since(head.key.lineage), seconds

    links, seconds = stage.play(story)
    sizes = [founders, *(len(link.record.roster) for link in links)]
    steps = [(before, after - before) for before, after in itertools.pairwise(sizes) if after != before]
    assert all(0 < came <= max(1, before // 2, 4 - before) for before, came in steps), f"rosters of {sizes}"
    assert len(steps) >= 2, f"rosters of {sizes}"
    assert sizes[-1] == founders + newcomers, f"rosters of {sizes} in {seconds:.1f} s"
    assert set(links[-1].record.peers) == set(stage.peers)


def test_isolated_proposer_does_not_evict_the_majority(monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds a whole mean, and nobody is left to vote on it: in time it forks, with that mean."""
    stage = ScenarioRunner(ScenarioSetup(3))
    draft, left, drafted = RoundCoordinator._outcome, list[PeerId](), list[Record]()

    def bereft(self: RoundCoordinator, resolved: ResolvedPlan, exchange: AllReduce) -> Record:
        if not left and resolved.plan.key.round == 2:
            left.append(self._me.peer)
            for peer in stage.peers:
                if peer not in left:
                    stage.kill(peer)
            host = replace(self._context.host, members=StaticMembers([self._me]))  # and it knows at once
            self._context = replace(self._context, host=host)
            drafted.append(draft(self, resolved, exchange))
            return drafted[0]
        return draft(self, resolved, exchange)

    async def story() -> list[str]:
        monkeypatch.setattr(RoundCoordinator, "_outcome", bereft)
        await stage.until(lambda: bool(left), 60.0)
        began = stage.now
        await stage.rounds(2)
        return stage.outcomes(left[0], began)

    assert stage.play(story)[:2] == ["fork", "alone"]
    assert drafted[0].roster == stage.roster
    fork = stage.chain(left[0]).since(drafted[0].parent)[0].record
    assert (fork.kind, fork.parts) == (Kind.FORK, drafted[0].parts)


@pytest.mark.parametrize("peers", (3, 5))
def test_silent_member_is_evicted_and_readmitted(peers: int) -> None:
    stage = ScenarioRunner(ScenarioSetup(peers, fork_peers=0))
    mute = stage.peers[-1]
    rest = stage.peers[:-1]

    async def story() -> tuple[tuple[DecidedRound, ...], float, float]:
        await stage.rounds(4)
        parent = stage.head("p0").key.lineage
        stage.silence(mute)
        gone_seconds = await stage.until(
            lambda: all(len(stage.head(peer).roster) == peers - 1 for peer in rest), WHOLE_SECONDS, "eviction"
        )
        await stage.rounds(3, rest)
        stage.heal([mute], rest)
        back_seconds = await stage.until(stage.whole, WHOLE_SECONDS, "admission")
        await stage.rounds(3)
        return stage.chain("p0").since(parent), gone_seconds, back_seconds

    links, gone_seconds, back_seconds = stage.play(story)
    here = [any(member.peer == mute for member in link.record.roster) for link in links]
    out, back = here.index(False), len(here) - here[::-1].index(False)
    assert not any(here[out:back]) and all(here[back:]), f"of the roster: {here}"
    assert gone_seconds <= 10.0, f"evicted after {gone_seconds:.1f} s"
    assert back_seconds <= 15.0, f"back after {back_seconds:.1f} s"
    assert not contributed(links[out + 1 : back], mute)
    assert len(contributed(links[back + 1 :], mute)) >= 2
