"""The consensus alone under random scheduling: a chain of lineages, a few members and every fault, from one seed.

    python -m tests.sim.scheduling --seeds 0:50000      simulates and judges; a single seed prints its events

In the first phase messages are lost, repeated, reordered or cut one way, and timers expire at any time. Peers crash,
return as other members, and may believe that they still vote. Hosts wrongly believe peers gone, and fork. Then the
faults stop, virtual time runs, and all remaining members must decide in few ballots.
"""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from protocols.base import Member
from protocols.consensus import messages as votes
from protocols.consensus.paxos import PaxosInstance
from protocols.consensus.vote_tally import majority
from tests.sim.arguments import Parser, seeds
from tests.sim.invariants import InvariantBroken, Node, Remembering, Side
from tests.sim.process import prepare
from tests.sim.voting import DELAY, TIMEOUT, World

DEPTH = 3
"""The number of lineages of a chain that are voted on."""
MAX_EVENTS = 1_500
FORK_ATTEMPTS = 8
"""How often hosts ask successors to fork, once no member of the roster is left."""


class Schedule:
    """One run of one seed; `vote`, `tally` and `same_incarnation` are where a test plants its bugs."""

    def __init__(
        self,
        seed: int,
        vote: type[PaxosInstance] = PaxosInstance,
        tally: type[Remembering] = Remembering,
        same_incarnation: bool = False,
    ) -> None:
        self.rng = rng = random.Random(seed)
        self.same_incarnation = same_incarnation
        self.met: dict[bytes, int] = {}
        self.left: dict[bytes, list[Node]] = {}  # lineage without a live member -> the nodes that may fork
        depth = rng.choice((1, 1, DEPTH))
        size = rng.choice((1, 2, 3, 3, 3, 3, 3, 4, 5, 5))
        names = [f"p{index}" for index in range(size + rng.choice((0, 0, 1, 2)))]
        # Each seed draws its own odds: one mixture of faults finds what another hides.
        self.loss = {kind: rng.choice((0.0, 0.0, 0.0, 0.0, 0.1, 0.3, 0.8)) for kind in votes.MESSAGES}
        self.loss[votes.Certificate] = rng.choice((0.0, 0.9, 1.0))
        self.repeat = rng.choice((0.0, 0.1, 0.4))
        self.slow = {(one, other): rng.choice((0.0, 0.0, 0.0, 0.0, 0.9, 0.99)) for one in names for other in names}
        self.world = World(rng, names, size, depth, vote, tally)
        self.odds: dict[Callable[[], None], float] = {
            self.deliver: 30,
            self.ring: rng.choice((0.5, 1.5, 4)),
            self.fetch: rng.choice((0.5, 10)),
            self.choose: rng.choice((1, 10)),
            self.mistake: rng.choice((0.0, 0.5)),
            self.crash: rng.choice((0.0, 0.0, 0.3, 1)),
            self.restart: rng.choice((0.0, 1, 3)),
            self.cut: rng.choice((0.0, 0.5)),
            self.partition: rng.choice((0.0, 0.5, 2)),
            self.mend: rng.choice((0.2, 1)),
            self.split: rng.choice((0.0, 0.0, 0.0, 0.5)),
            self.rejoin: 0.1,
            self.inherit: rng.choice((0.0, 0.0, 0.0, 0.5)),
            self.lose_a_roster: rng.choice((0.0, 0.0, 0.0, 0.3)),
        }

    def run(self) -> None:
        actions, weights = list(self.odds), list(self.odds.values())
        for action in self.rng.choices(actions, weights, k=self.rng.choice((100, 200, 400))):
            action()
        self.heal()
        self.world.go_calmly(MAX_EVENTS)
        for lineage in list(self.world.lines):
            self.judge_progress(lineage)

    # -- faults -------------------------------------------------------------------------------------------------------

    def _sides(self, wanted: Callable[[Side], Any]) -> tuple[Node, Side] | None:
        found = [(n, side) for n in self.world.nodes.values() if n.alive for side in n.sides.values() if wanted(side)]
        return self.rng.choice(found) if found else None

    def deliver(self) -> None:
        if not self.world.flying:
            return
        index = self.rng.randrange(len(self.world.flying))
        flight, chance = self.world.flying[index], self.rng.random()
        if self.rng.random() < self.slow[flight[:2]]:
            return
        if chance >= self.repeat:
            self.world.flying[index] = self.world.flying[-1]
            self.world.flying.pop()
        if chance < 1 - self.loss[type(flight[2])]:
            self.world.land(*flight)

    def ring(self) -> None:
        if found := self._sides(lambda side: side.timer and not side.vote.decided):
            node, side = found
            assert side.timer
            self.world.expire(node, side, side.timer)

    def fetch(self) -> None:
        if found := self._sides(lambda side: side.wants):
            self.world.supply(*found)

    def choose(self) -> None:
        if found := self._sides(lambda side: side.choice):
            self.world.answer(*found)

    def mistake(self) -> None:
        """A host reports a peer as gone, rightly or wrongly."""
        if found := self._sides(lambda side: not side.vote.decided):
            node, side = found
            self.world.obey(node, side, side.vote.gone(self.rng.choice(list(self.world.nodes))))

    def crash(self) -> None:
        node = self.rng.choice(list(self.world.nodes.values()))
        if node.alive and sum(each.alive for each in self.world.nodes.values()) > 1:
            node.alive = False
            self.world.note(node, "crashes")

    def lose_a_roster(self) -> None:
        last = self.world.lines[list(self.world.lines)[-1]].roster
        nodes = [self.world.nodes[member.peer] for member in last]
        if 2 * len(nodes) < sum(node.alive for node in self.world.nodes.values()):
            for node in nodes:
                node.alive = False
                self.world.note(node, "crashes")

    def restart(self) -> None:
        """A dead peer returns as another member without state; it may wrongly believe that it still votes."""
        peer = self.rng.choice(list(self.world.nodes))
        old = self.world.nodes[peer]
        if old.alive:
            return
        node = self.world.nodes[peer] = Node(Member(peer, old.me.incarnation + (not self.same_incarnation)))
        self.world.note(node, "is back")
        for lineage, ghost in list(old.sides):
            if self.same_incarnation:
                self.world.enter(node, lineage)
            elif not ghost and old.me in self.world.lines[lineage].roster and self.rng.random() < 0.5:
                self.world.enter(node, lineage, ghost=old.me)

    def cut(self) -> None:
        one, other = self.rng.choice(list(self.world.nodes)), self.rng.choice(list(self.world.nodes))
        self.world.cuts[one, other] = None

    def partition(self) -> None:
        peers = list(self.world.nodes)
        inside = self.rng.sample(peers, self.rng.randint(1, len(peers)))
        self.world.cuts = {(a, b): None for a in peers for b in peers if a != b and not (a in inside and b in inside)}

    def mend(self) -> None:
        self.world.cuts.clear()

    def split(self) -> None:
        """Some hosts believe that the majority of their roster is gone, and fork."""
        if found := self._sides(lambda side: not side.ghost and not side.vote.decided and side.vote.tally.quorum > 1):
            node, side = found
            tally = side.vote.tally
            if not tally.counts(node.me):
                return
            others = [member for member in tally.roster if self.world.alive(member) and member != node.me]
            members = [node.me, *self.rng.sample(others, min(len(others), self.rng.randrange(tally.quorum - 1 or 1)))]
            for member in members:
                there = self.world.nodes[member.peer]
                mate = there.sides.get((tally.key.lineage, False))
                if mate and self.rng.random() < 0.9:
                    self.world.obey(there, mate, mate.vote.fork(self.world.fork_record(mate, members)))

    def inherit(self) -> None:
        """Hosts believe, rightly or not, that a whole roster is gone: some successors or former members fork."""
        lineages = [lineage for lineage in self.world.lines if self.world.fork_candidates(lineage)]
        if lineages:
            lineage = self.rng.choice(lineages)
            some = self.rng.choice((self.world.successors, self.world.fork_candidates))(lineage)
            if some:
                self.world.inherit(lineage, self.rng.sample(some, self.rng.randint(1, len(some))))

    def rejoin(self) -> None:
        if found := self._sides(lambda side: not side.vote.decided):
            self.world.obey(*found, found[1].vote.fork(b""))

    # -- healing ------------------------------------------------------------------------------------------------------

    def heal(self) -> None:
        self.world.calm = True
        self.world.cuts.clear()
        flying, self.world.flying = self.world.flying, []
        for node in [node for node in self.world.nodes.values() if node.alive]:
            self.world.note(node, "is there when the faults stop")
            for (lineage, ghost), side in list(node.sides.items()):
                self._meet(lineage, 0 if ghost else side.vote.ballot)
                if side.certificate:
                    for peer in self.world.nodes:
                        self.world.fly(node.me.peer, peer, replace(side.certificate, sender=node.me))
                else:
                    self._wake(node, side)
                    if not ghost and side.vote.tally.counts(node.me):
                        self.world.offer(node, lineage)
        for node in self.world.nodes.values():
            for _, message in node.parked:
                self.world.later(2 * DELAY, partial(self.world.catch_up, node, message.key.lineage))
                self._meet(message.key.lineage, message.ballot)
        for flight in flying:
            self._meet(flight[2].key.lineage, flight[2].ballot)
            self.world.fly(*flight)
        self._ask_successors_to_fork()

    def _ask_successors_to_fork(self) -> None:
        """Where no member of a roster is left, let the hosts of those that may fork ask for it."""
        for lineage, line in self.world.lines.items():
            if not (line.children or self.world.able(lineage)) and (some := self.world.fork_candidates(lineage)):
                self.left[lineage] = some
                for turn in range(FORK_ATTEMPTS):
                    self.world.later(turn * TIMEOUT, partial(self.world.inherit, lineage, some))

    def _meet(self, lineage: bytes, ballot: int) -> None:
        """Note a ballot that was known when the faults stopped."""
        self.met[lineage] = max(self.met.get(lineage, 0), ballot)

    def _wake(self, node: Node, side: Side) -> None:
        self.world.obey(node, side, side.vote.fork(b""))
        self.world.later(DELAY, lambda: self.world.answer(node, side))
        self.world.later(DELAY, lambda: self.world.supply(node, side))
        if timer := side.timer:
            self.world.later(self.rng.random() * TIMEOUT * timer[1], lambda: self.world.expire(node, side, timer))

    def judge_progress(self, lineage: bytes) -> None:
        """Check that able members have decided, within F + 1 ballots of those known when the faults stopped."""
        line, able = self.world.lines[lineage], self.world.able(lineage)
        for node in self.left.get(lineage, ()):
            side = node.sides.get((lineage, False))
            if not side or not side.vote.decided:
                raise InvariantBroken("progress", f"no member is left, and {node.me} does not fork with the others")
        sides = [self.world.nodes[member.peer].sides.get((lineage, False)) for member in able]
        if line.key.round >= self.world.depth or not any(sides):
            return
        accepted = [value.record.roster for value in line.accepted.values() if not value.is_fork]
        if any(set(roster).isdisjoint(able) for roster in accepted):
            return  # all members that the next roster keeps are gone
        majority_left = len(able) >= majority(len(line.roster))
        if not all(side and side.vote.decided for side in sides):
            raise InvariantBroken("progress", f"{len(able)} of {len(line.roster)} are there and do not decide")
        ballots = [side.vote.decided.ballot for side in sides if side and side.vote.decided]
        limit = self.met.get(lineage, -1) + len(line.roster) - len(able) + 1
        if majority_left and min(ballots, default=0) > limit:
            raise InvariantBroken("ballots", f"decided in ballot {min(ballots)}, after {limit}")


def play(chosen: Iterable[int], **planted: Any) -> list[tuple[int, InvariantBroken]]:
    """Run seeds; returns those in which an invariant broke, with the error."""
    broken = []
    for seed in chosen:
        try:
            Schedule(seed, **planted).run()
        except InvariantBroken as error:
            broken.append((seed, error))
    return broken


def main(arguments: list[str] | None = None) -> int:
    """Run the chosen seeds; the exit code is 1 if an invariant broke."""
    parser = Parser(prog="python -m tests.sim.scheduling", description="The vote under random faults.")
    parser.add_argument("--seeds", type=seeds, default=range(2000), help="one seed, or a range like 0:50000")
    chosen = parser.parse_args(arguments).seeds
    if len(chosen) == 1:
        _show(chosen[0])
    prepare()
    began = time.monotonic()
    broken = play(chosen)
    seconds = time.monotonic() - began
    for seed, error in broken[:20]:
        print(f"seed {seed}: {error}    (python -m tests.sim.scheduling --seeds {seed})")
    rules = dict(Counter(error.rule for _, error in broken))
    print(f"{len(chosen)} seeds, {len(broken)} broken {rules}; {seconds:.1f} s, ", end="")
    print(f"{60 * len(chosen) / seconds:.0f} seeds a minute")
    return bool(broken)


def _show(seed: int) -> None:
    """Print the events of one run, up to where an invariant breaks."""
    schedule = Schedule(seed)
    schedule.world.trace = trace = list[str]()
    try:
        with suppress(InvariantBroken):
            schedule.run()
    finally:
        print("\n".join(trace))


if __name__ == "__main__":
    sys.exit(main())
