"""Who is of the roster: who restarts is another member, newcomers come a few at a time, the silent are evicted."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import suppress
from dataclasses import replace

import pytest

from protocols.allreduce.all_reduce import AllReduce
from protocols.allreduce.plan import ResolvedPlan
from protocols.base import Member, PeerError, PeerId, StaticMembers
from protocols.butterfly.averager import CONTROL
from protocols.butterfly.coordinator import RoundCoordinator
from protocols.consensus import record as records
from protocols.consensus.messages import Accept
from protocols.consensus.record import Kind, Record
from protocols.history.chain import DecidedRound
from tests.sim.host import sim_host
from tests.sim.scenario_runner import ScenarioRunner, ScenarioSetup
from tests.support.long import diagonal, long
from tests.support.simulated import simulated

WHOLE_SECONDS = 30.0


def contributed(links: tuple[DecidedRound, ...], peer: PeerId) -> list[int]:
    """Rounds whose mean holds this peer's work."""
    return [link.record.round for link in links if peer in link.record.peers]


@diagonal("peers, dead_seconds", (3, 5), (0.2, 3.0))
@simulated(lambda peers: ScenarioRunner(ScenarioSetup(peers, fork_peers=0)))
async def test_restarted_peer_rejoins_as_new_member(swarm: ScenarioRunner, peers: int, dead_seconds: float) -> None:
    """The peer catches up, is admitted by a record and contributes again, while the others do not wait for it."""
    await swarm.rounds(4)
    parent = swarm.head("p0").key.lineage
    swarm.kill("p2")
    await asyncio.sleep(dead_seconds)
    await swarm.revived("p2")
    born = swarm.now
    seconds = await swarm.until(swarm.whole, WHOLE_SECONDS, "admission")
    await swarm.rounds(3)
    links = swarm.chain("p0").since(parent)
    rosters = [{member.incarnation for member in link.record.roster if member.peer == "p2"} for link in links]
    assert all(len(incarnations) <= 1 for incarnations in rosters), "two incarnations of one peer vote"
    first = rosters.index({1})
    assert set().union(*rosters[first:]) == {1}, "the old incarnation votes again"
    assert seconds <= 5.0, f"admitted {seconds:.1f} s after its start"
    counted = contributed(links[first + 1 :], "p2")
    assert len(counted) >= 2, f"admitted in round {links[first].record.round}, brings work in {counted}"
    others = [each for peer in swarm.peers if peer != "p2" for each in swarm.reports(peer, born)]
    assert {each["outcome"] for each in others} == {"committed"}
    assert {each["incarnation"] for each in swarm.reports("p2", born)} == {1}


@simulated(ScenarioRunner, ScenarioSetup(4, fork_peers=0))
async def test_former_incarnation_has_no_vote(swarm: ScenarioRunner) -> None:
    """A vote of the former incarnation is refused and blamed, before and after the admission of the next one."""

    async def vote() -> None:
        """Vote in the name of p2's first incarnation, from its second."""
        key = swarm.head("p0").key
        host = sim_host(swarm.network, swarm.network.transports["p2"], swarm.scenario.seed, {})
        with suppress(PeerError):
            async with host.transport.open("p0", CONTROL, swarm.now + 1.0) as stream:
                await stream.send(Accept(key, Member("p2", 0), 0, bytes(32), bytes(32)))
                await stream.receive(64)

    await swarm.rounds(3)
    swarm.kill("p2")
    await swarm.rounds(2)
    await swarm.revived("p2")
    await swarm.until(swarm.whole, WHOLE_SECONDS, "admission")
    await swarm.rounds(1)
    voted = swarm.now
    await vote()
    await swarm.rounds(2)
    named = [each["blamed"]["p2"] for each in swarm.reports("p0", voted) if "p2" in each["blamed"]]
    assert named and "of another incarnation" in named[0], f"p0 named p2: {named}"


@pytest.mark.parametrize(("founders", "newcomers"), ((1, 4), (4, 4), *long((2, 4))))
@simulated(
    lambda founders, newcomers: ScenarioRunner(ScenarioSetup(founders + newcomers, founders=founders, fork_peers=0))
)
async def test_newcomers_are_admitted_a_few_at_a_time(swarm: ScenarioRunner, founders: int, newcomers: int) -> None:
    """At most half as many as there are, so that they are never the majority that decides on the rest; or four."""
    await swarm.rounds(3)
    head = swarm.head("p0")
    assert len(head.roster) == founders
    await swarm.begun(*swarm.peers[founders:])
    seconds = await swarm.until(swarm.whole, WHOLE_SECONDS, "a whole roster")
    await swarm.rounds(2)
    links = swarm.chain("p0").since(head.key.lineage)
    sizes = [founders, *(len(link.record.roster) for link in links)]
    steps = [(before, after - before) for before, after in itertools.pairwise(sizes) if after != before]
    assert all(0 < came <= max(1, before // 2, 4 - before) for before, came in steps), f"rosters of {sizes}"
    assert len(steps) >= 2, f"rosters of {sizes}"
    first = next(link.record for link in links if len(link.record.roster) > founders)
    came = {member.peer for member in first.roster} - {*swarm.peers[:founders]}
    drawn = records.drawn(first.parent, swarm.peers[founders:])
    assert came == {*drawn[: len(came)]}, "an id that was made up to be the lowest does not come first"
    assert sizes[-1] == founders + newcomers, f"rosters of {sizes} in {seconds:.1f} s"
    assert set(links[-1].record.peers) == set(swarm.peers)


@simulated(ScenarioRunner, ScenarioSetup(3))
async def test_isolated_proposer_does_not_evict_the_majority(
    swarm: ScenarioRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proposer holds a whole mean, and no member is left to vote on it. In time it forks, with that mean."""
    draft, left, drafted = RoundCoordinator._outcome, list[PeerId](), list[Record]()

    def bereft(self: RoundCoordinator, resolved: ResolvedPlan, exchange: AllReduce) -> Record:
        if not left and resolved.plan.key.round == 2:
            left.append(self._me.peer)
            for peer in swarm.peers:
                if peer not in left:
                    swarm.kill(peer)
            members = StaticMembers([self._me])  # and it knows at once
            self._round.host = replace(self._round.host, members=members)
            drafted.append(draft(self, resolved, exchange))
            return drafted[0]
        return draft(self, resolved, exchange)

    monkeypatch.setattr(RoundCoordinator, "_outcome", bereft)
    await swarm.until(lambda: bool(left), 60.0)
    began = swarm.now
    await swarm.rounds(2)
    assert swarm.outcomes(left[0], began)[:2] == ["fork", "alone"]
    assert drafted[0].roster == swarm.roster
    fork = swarm.chain(left[0]).since(drafted[0].parent)[0].record
    assert (fork.kind, fork.parts) == (Kind.FORK, drafted[0].parts)


@pytest.mark.parametrize("peers", (3, *long(5)))
@simulated(lambda peers: ScenarioRunner(ScenarioSetup(peers, fork_peers=0)))
async def test_silent_member_is_evicted_and_readmitted(swarm: ScenarioRunner, peers: int) -> None:
    *rest, mute = swarm.peers
    await swarm.rounds(4)
    parent = swarm.head("p0").key.lineage
    swarm.silence(mute)
    gone_seconds = await swarm.until(
        lambda: all(len(swarm.head(peer).roster) == peers - 1 for peer in rest), WHOLE_SECONDS, "eviction"
    )
    await swarm.rounds(3, rest)
    swarm.heal([mute], rest)
    back_seconds = await swarm.until(swarm.whole, WHOLE_SECONDS, "admission")
    await swarm.rounds(3)
    links = swarm.chain("p0").since(parent)
    here = [any(member.peer == mute for member in link.record.roster) for link in links]
    out, back = here.index(False), len(here) - here[::-1].index(False)
    assert not any(here[out:back]) and all(here[back:]), f"of the roster: {here}"
    assert gone_seconds <= 10.0, f"evicted after {gone_seconds:.1f} s"
    assert back_seconds <= 15.0, f"back after {back_seconds:.1f} s"
    assert not contributed(links[out + 1 : back], mute)
    assert len(contributed(links[back + 1 :], mute)) >= 2
