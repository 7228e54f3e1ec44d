"""The vote alone under random scheduling: a chain of lineages, a few members, every fault, all from one seed.

    python -m tests.sim.scheduling --seeds 0:50000      plays and judges; a single seed prints what happened

First the faults: messages are lost, repeated, reordered, cut one way; timers run out whenever they like; peers crash,
come back as other members, and may believe that they vote still; hosts are wrong about who is gone, and fork. Then the
faults stop, virtual time runs, and everybody who is left must decide in few ballots.
"""

from __future__ import annotations

import heapq
import itertools
import random
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from protocols import record as records
from protocols import votes
from protocols.ballot import Vote
from protocols.base import Member, PeerId, RoundKey
from protocols.poll import Poll, Value, majority
from protocols.record import Kind, Record
from protocols.wire import Part, PartDone, Run
from tests.sim.arguments import Parser, seeds

DEPTH = 3
"""Lineages of a chain that are voted on."""
DELAY = 1.0
TIMEOUT = 12.0
"""What a ballot needs: ask, prepare, promise, choose, propose, fetch, accept."""
MAX_FLYING = 120
MAX_PARKED = 40
MAX_EVENTS = 1_500
NOTHING = bytes(32)


class Broken(AssertionError):
    """A rule that a run broke, named by `rule`."""

    def __init__(self, rule: str, what: str) -> None:
        super().__init__(f"{rule}: {what}")
        self.rule = rule


@dataclass(frozen=True, slots=True)
class Seal:
    """Stands in for signatures: names the signer, fits one message."""

    peer: PeerId

    def sign(self, message: bytes) -> bytes:
        return self.peer.encode() + zlib.crc32(message).to_bytes(4, "big")

    def verify(self, peer: PeerId, message: bytes, signature: bytes) -> bool:
        return signature == peer.encode() + zlib.crc32(message).to_bytes(4, "big")


class Remembering(Poll):
    """Reads each record once for the whole run: that is what it costs most."""

    read: dict[bytes, Value | None]

    def value(self, ballot: int, data: bytes) -> Value | None:
        if data not in self.read:
            self.read[data] = super().value(0, data)
        value = self.read[data]
        return value and Value(ballot, value.data, value.digest, value.record)


@dataclass(slots=True)
class Side:
    """A node's part in the vote on one lineage. A ghost votes by a roster of its own, in which it believes to be."""

    vote: Vote
    ghost: bool = False
    forked: bool = False
    certificate: votes.Certificate | None = None
    timer: tuple[int, int] | None = None
    choice: tuple[int, tuple[votes.Promise, ...]] | None = None
    wants: tuple[bytes, ...] = ()
    held: dict[bytes, PartDone] = field(default_factory=dict)
    voted: list[Value | None] = field(default_factory=lambda: [None, None])


@dataclass(slots=True)
class Node:
    """A peer in its present life."""

    me: Member
    alive: bool = True
    sides: dict[tuple[bytes, bool], Side] = field(default_factory=dict)
    parked: list[tuple[PeerId, votes.Message]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Line:
    """What is true of a lineage: who votes, where it stands, what was accepted and decided."""

    key: RoundKey
    roster: tuple[Member, ...]
    parent: bytes = NOTHING
    is_fork: bool = False
    accepted: dict[tuple[Member, int], Value] = field(default_factory=dict)
    proposed: dict[int, bytes] = field(default_factory=dict)
    chosen: dict[bytes, int] = field(default_factory=dict)
    children: dict[bytes, Value] = field(default_factory=dict)
    read: dict[bytes, Value | None] = field(default_factory=dict)


class World:
    """One run of one seed; `vote`, `poll` and `same_incarnation` are where a test plants its bugs.

    Raises:
        Broken: from `run`, when a rule does not hold.
    """

    def __init__(
        self,
        seed: int,
        vote: type[Vote] = Vote,
        poll: type[Remembering] = Remembering,
        same_incarnation: bool = False,
    ) -> None:
        self.rng = rng = random.Random(seed)
        self.vote, self.poll, self.same_incarnation = vote, poll, same_incarnation
        self.trace: list[str] | None = None
        self.calm, self.now, self.events, self.records = False, 0.0, 0, 0
        self.flying: list[tuple[PeerId, PeerId, votes.Message]] = []
        self.cuts: dict[tuple[PeerId, PeerId], None] = {}
        self.agenda: list[tuple[float, int, Callable[[], None]]] = []
        self.met: dict[bytes, int] = {}
        self.numbers = itertools.count()
        self.depth = rng.choice((1, 1, DEPTH))
        size = rng.choice((1, 2, 3, 3, 3, 3, 3, 4, 5, 5))
        names = [f"p{index}" for index in range(size + rng.choice((0, 0, 1, 2)))]
        self.nodes = {name: Node(Member(name)) for name in names}
        # Each seed has odds of its own: what one mixture of faults hides, another finds.
        self.loss = {kind: rng.choice((0.0, 0.0, 0.0, 0.0, 0.1, 0.3, 0.8)) for kind in votes.MESSAGES}
        self.loss[votes.Certificate] = rng.choice((0.0, 0.9, 1.0))
        self.repeat = rng.choice((0.0, 0.1, 0.4))
        self.slow = {(one, other): rng.choice((0.0, 0.0, 0.0, 0.0, 0.9, 0.99)) for one in names for other in names}
        genesis = rng.randbytes(32)
        self.lines = {genesis: Line(self._key(genesis, 0), tuple(Member(name) for name in names[:size]))}
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
        }
        for member in self.lines[genesis].roster:
            self.enter(self.nodes[member.peer], genesis)

    def run(self) -> None:
        """Break, then heal and demand progress."""
        actions, weights = list(self.odds), list(self.odds.values())
        for action in self.rng.choices(actions, weights, k=self.rng.choice((100, 200, 400))):
            action()
        self.heal()
        while self.agenda and self.events < MAX_EVENTS:
            self.now, _, action = heapq.heappop(self.agenda)
            action()
        for lineage in list(self.lines):
            self.judge_progress(lineage)

    def _key(self, lineage: bytes, depth: int) -> RoundKey:
        return RoundKey(NOTHING, "vote", lineage, depth)

    # -- hosts --------------------------------------------------------------------------------------------------------

    def enter(self, node: Node, lineage: bytes, ghost: Member | None = None) -> Side:
        """Take part in a lineage: vote, look on, or as a ghost that was `ghost` in its last life."""
        line, at = self.lines[lineage], (lineage, ghost is not None)
        if at in node.sides:
            return node.sides[at]
        roster = tuple(node.me if member == ghost else member for member in line.roster)
        poll = self.poll(line.key, roster, Seal(node.me.peer))
        poll.read = {} if ghost else line.read
        side = node.sides[at] = Side(self.vote(node.me, poll), ghost is not None)
        if poll.counts(node.me):
            if poll.coordinator(0) == node.me.peer:
                side.choice = (0, ())
                self._later(DELAY, lambda: self.answer(node, side))
            self.obey(node, side, side.vote.progress())
        parked, node.parked = node.parked, []
        for sender, message in parked:
            self.receive(node, sender, message)
        return side

    def receive(self, node: Node, sender: PeerId, message: votes.Message) -> None:
        """A message reaches a node; one from ahead is parked, and its sender asked for the certificates in between."""
        lineage, line = message.key.lineage, self.lines[message.key.lineage]
        if message.key.round >= self.depth:
            return
        if (lineage, False) not in node.sides:
            if isinstance(message, votes.Certificate):
                self.enter(node, lineage)
            elif node.me in line.roster and len(node.parked) < MAX_PARKED:
                node.parked.append((sender, message))
                self._later(2 * DELAY, lambda: self.catch_up(node, lineage))
                for (behind, ghost), side in list(node.sides.items()):
                    if not side.vote.decided and not ghost:
                        self._fly(node.me.peer, sender, votes.Ask(self.lines[behind].key, node.me, 0, ()))
        for ghost in (False, True):
            if side := node.sides.get((lineage, ghost)):
                self.obey(node, side, side.vote.receive(sender, message))

    def catch_up(self, node: Node, lineage: bytes) -> None:
        """Fetch the certificates that lead to a lineage, from whom we heard of it."""
        if node.alive and not self.left(node, lineage):
            self.enter(node, lineage)

    def left(self, node: Node, lineage: bytes) -> bool:
        """Whether a node went another way than this fork's: that is for healing to mend, not for the vote."""
        line = self.lines[lineage]
        parent = node.sides.get((line.parent, False))
        if not line.is_fork or (lineage, False) in node.sides or not parent or not parent.vote.decided:
            return False
        return records.lineage(parent.vote.decided.record) != lineage

    def obey(self, node: Node, side: Side, instructions: Iterable[votes.Instruction]) -> None:
        """Do what a vote says, and judge it."""
        self.events += 1
        if not side.ghost:
            self.judge_votes(node, side)
        for each in instructions:
            self._note(node, f"{'as a ghost ' * side.ghost}{_short(each)}" if self.trace is not None else "")
            if isinstance(each, votes.Send):
                if isinstance(each.message, votes.Propose) and not side.ghost:
                    self.judge_proposal(self.lines[each.message.key.lineage], each.message)
                for to in each.to:
                    self._fly(node.me.peer, to, each.message)
            else:
                self.serve(node, side, each)

    def serve(self, node: Node, side: Side, each: votes.Instruction) -> None:
        if isinstance(each, votes.SetTimer):
            side.timer = timer = (each.ballot, each.factor)
            self._later(TIMEOUT * each.factor, lambda: self.expire(node, side, timer))
        elif isinstance(each, votes.Choose):
            side.choice = (each.ballot, each.promises)
            self._later(DELAY, lambda: self.answer(node, side))
        elif isinstance(each, votes.Fetch):
            side.wants = each.parts
            self._later(2 * DELAY, lambda: self.supply(node, side))
        elif isinstance(each, votes.Decided):
            self.decided(node, side, each.certificate)
        elif isinstance(each, votes.Rival) and not side.ghost:
            self.switch(node, side, each.certificate)

    def switch(self, node: Node, side: Side, certificate: votes.Certificate) -> None:
        """Healing: a majority's child wins over a fork, and who has learnt it passes it on."""
        value = self.learn(certificate)
        if value.is_fork or (side.certificate and side.certificate.record == certificate.record):
            return
        side.certificate = certificate
        for peer in self.nodes:
            self._fly(node.me.peer, peer, replace(certificate, sender=node.me))
        self.go_on(node, value)

    def decided(self, node: Node, side: Side, certificate: votes.Certificate) -> None:
        """A member has decided."""
        side.timer = side.choice = None
        if side.ghost:
            return
        value = self.learn(certificate)
        side.forked, side.certificate = value.is_fork, certificate
        self.go_on(node, value)

    def learn(self, certificate: votes.Certificate) -> Value:
        """What a certificate says becomes known to the judges."""
        key = certificate.key
        value = self.judge_child(key.lineage, certificate)
        if value.digest not in self.lines:
            child = self._key(value.digest, key.round + 1)
            self.lines[value.digest] = Line(child, value.record.roster, key.lineage, value.is_fork)
        return value

    def go_on(self, node: Node, value: Value) -> None:
        """To the next lineage, if its roster says so."""
        if node.me in value.record.roster and value.record.round + 1 < self.depth:
            self.enter(node, value.digest)

    def expire(self, node: Node, side: Side, timer: tuple[int, int]) -> None:
        """A timer runs out, if it is still that timer. Without a majority it is time to fork."""
        if side.timer is not timer or not node.alive:
            return
        if self.calm and not side.ghost and node.me in side.vote.poll.roster:
            lineage = side.vote.poll.key.lineage
            left = self.able(lineage)
            mates = [self.nodes[member.peer].sides.get((lineage, False)) for member in left]
            if len(left) < side.vote.poll.quorum and not any(mate and mate.vote.decided for mate in mates):
                self.obey(node, side, side.vote.fork(self.fork_record(side, left)))
        if side.timer is timer:
            self.obey(node, side, side.vote.timeout(timer[0]))

    def answer(self, node: Node, side: Side) -> None:
        """The host's choice of a record for the ballot that its member coordinates."""
        if side.choice is None or not node.alive:
            return
        (ballot, promises), side.choice = side.choice, None
        poll, rng = side.vote.poll, self.rng
        held = [part for promise in promises for part in promise.held]
        kind, parts = (Kind.MEAN if rng.random() < 0.7 else Kind.SKIP), list[PartDone]()
        if kind == Kind.MEAN:
            repair = bool(held) and rng.random() < 0.5
            parts = [rng.choice(held)] if repair else [self.reduce(node, side) for _ in range(rng.choice((1, 1, 2)))]
        self.records += 1
        plan = self.records.to_bytes(32, "big")
        roster = self.next_roster(poll.roster)
        record = Record(poll.key.lineage, NOTHING, poll.key.round, kind, plan, tuple(p.result for p in parts), roster)
        self.obey(node, side, side.vote.chosen(ballot, records.encode(record)))

    def reduce(self, node: Node, side: Side) -> PartDone:
        """A new part. Whoever proposes it holds it, or knows a live source; others may hold it, too."""
        self.records += 1
        part = PartDone(0, 0, Part(self.records.to_bytes(32, "little"), (Run(1, 1),)), b"")
        others = [each for each in self.nodes.values() if each.alive and each is not node]
        holders = [each for each in others if self.rng.random() < 0.4]
        if self.calm or side.ghost or not holders or self.rng.random() < 0.7:
            holders.append(node)
        for each in holders:
            self.hold(each, side.vote.poll.key.lineage, part)
        return part

    def hold(self, node: Node, lineage: bytes, part: PartDone) -> None:
        for ghost in (False, True):
            if side := node.sides.get((lineage, ghost)):
                side.held[part.result.digest] = part
                self.obey(node, side, side.vote.holds(NOTHING, tuple(side.held.values())))

    def supply(self, node: Node, side: Side) -> None:
        """Fetch the parts that a vote waits for from any live node that can be reached both ways."""
        lineage, me = side.vote.poll.key.lineage, node.me.peer
        if not node.alive or side.vote.decided:
            return
        for digest in side.wants:
            for peer, source in self.nodes.items():
                held = source.sides.get((lineage, False))
                open_ways = (me, peer) not in self.cuts and (peer, me) not in self.cuts
                if held and digest in held.held and source.alive and open_ways and digest not in side.held:
                    self.hold(node, lineage, held.held[digest])
        if set(side.wants) <= set(side.held):
            side.wants = ()
        elif side.wants:
            self._later(2 * DELAY, lambda: self.supply(node, side), limit=200)

    def next_roster(self, roster: tuple[Member, ...]) -> tuple[Member, ...]:
        """Most of those who live stay, some newcomers are admitted."""
        rng = self.rng
        chances = {member: 0.95 if self._lives(member) else 0.5 for member in roster}
        stay = [member for member, chance in chances.items() if rng.random() < chance] or [rng.choice(roster)]
        others = rng.sample(roster, len(roster))  # as many as decide stay, at least
        stay += [member for member in others if member not in stay][: max(0, len(roster) // 2 + 1 - len(stay))]
        peers = {member.peer for member in stay}
        new = [node.me for node in self.nodes.values() if node.alive and node.me.peer not in peers]
        new = [member for member in new if member not in roster and rng.random() < 0.6]
        return tuple(sorted((*stay, *new[: max(1, len(roster) // 2)])))

    def fork_record(self, side: Side, members: Iterable[Member]) -> bytes:
        key, roster = side.vote.poll.key, tuple(sorted(members))
        return records.encode(Record(key.lineage, NOTHING, key.round, Kind.FORK, NOTHING, (), roster))

    # -- faults -------------------------------------------------------------------------------------------------------

    def _lives(self, member: Member) -> bool:
        node = self.nodes[member.peer]
        return node.alive and node.me == member

    def _fly(self, sender: PeerId, to: PeerId, message: votes.Message) -> None:
        if self.calm:
            self._later(self.rng.uniform(DELAY / 2, DELAY), lambda: self._land(sender, to, message))
        elif len(self.flying) < MAX_FLYING:
            self.flying.append((sender, to, message))

    def _land(self, sender: PeerId, to: PeerId, message: votes.Message) -> None:
        if (node := self.nodes[to]).alive and (sender, to) not in self.cuts:
            self.receive(node, sender, message)

    def _later(self, seconds: float, action: Callable[[], None], limit: float = 1e9) -> None:
        if self.calm and self.now < limit:
            heapq.heappush(self.agenda, (self.now + seconds, next(self.numbers), action))

    def _sides(self, wanted: Callable[[Side], Any]) -> tuple[Node, Side] | None:
        found = [(n, side) for n in self.nodes.values() if n.alive for side in n.sides.values() if wanted(side)]
        return self.rng.choice(found) if found else None

    def deliver(self) -> None:
        if not self.flying:
            return
        index = self.rng.randrange(len(self.flying))
        flight, chance = self.flying[index], self.rng.random()
        if self.rng.random() < self.slow[flight[:2]]:
            return
        if chance >= self.repeat:
            self.flying[index] = self.flying[-1]
            self.flying.pop()
        if chance < 1 - self.loss[type(flight[2])]:
            self._land(*flight)

    def ring(self) -> None:
        if found := self._sides(lambda side: side.timer and not side.vote.decided):
            node, side = found
            assert side.timer
            self.expire(node, side, side.timer)

    def fetch(self) -> None:
        if found := self._sides(lambda side: side.wants):
            self.supply(*found)

    def choose(self) -> None:
        if found := self._sides(lambda side: side.choice):
            self.answer(*found)

    def mistake(self) -> None:
        """A host says that a peer is gone, be it right or wrong."""
        if found := self._sides(lambda side: not side.vote.decided):
            node, side = found
            self.obey(node, side, side.vote.gone(self.rng.choice(list(self.nodes))))

    def crash(self) -> None:
        node = self.rng.choice(list(self.nodes.values()))
        if node.alive and sum(each.alive for each in self.nodes.values()) > 1:
            node.alive = False
            self._note(node, "crashes")

    def restart(self) -> None:
        """A dead peer is back: another member, that has forgotten all, and may not know that it does not vote."""
        peer = self.rng.choice(list(self.nodes))
        old = self.nodes[peer]
        if old.alive:
            return
        node = self.nodes[peer] = Node(Member(peer, old.me.incarnation + (not self.same_incarnation)))
        self._note(node, "is back")
        for lineage, ghost in list(old.sides):
            if self.same_incarnation:
                self.enter(node, lineage)
            elif not ghost and old.me in self.lines[lineage].roster and self.rng.random() < 0.5:
                self.enter(node, lineage, ghost=old.me)

    def cut(self) -> None:
        one, other = self.rng.choice(list(self.nodes)), self.rng.choice(list(self.nodes))
        self.cuts[one, other] = None

    def partition(self) -> None:
        """One group reaches each other, and nobody else does anybody."""
        peers = list(self.nodes)
        inside = self.rng.sample(peers, self.rng.randint(1, len(peers)))
        self.cuts = {(a, b): None for a in peers for b in peers if a != b and not (a in inside and b in inside)}

    def mend(self) -> None:
        self.cuts.clear()

    def split(self) -> None:
        """Some hosts believe that the majority is gone."""
        if found := self._sides(lambda side: not side.ghost and not side.vote.decided and side.vote.poll.quorum > 1):
            node, side = found
            poll = side.vote.poll
            if not poll.counts(node.me):
                return
            others = [member for member in poll.roster if self._lives(member) and member != node.me]
            members = [node.me, *self.rng.sample(others, min(len(others), self.rng.randrange(poll.quorum - 1 or 1)))]
            for member in members:
                mate = self.nodes[member.peer].sides.get((poll.key.lineage, False))
                if mate and self.rng.random() < 0.9:
                    self.obey(self.nodes[member.peer], mate, mate.vote.fork(self.fork_record(mate, members)))

    def rejoin(self) -> None:
        if found := self._sides(lambda side: not side.vote.decided):
            self.obey(*found, found[1].vote.fork(b""))

    def _note(self, node: Node, what: str) -> None:
        if self.trace is not None:
            self.trace.append(f"{self.now:7.1f} {node.me.peer}/{node.me.incarnation} {what}")

    def heal(self) -> None:
        """The faults stop. Hosts see each other again, and each sends the certificates that it has."""
        self.calm = True
        self.cuts.clear()
        flying, self.flying = self.flying, []
        for node in [node for node in self.nodes.values() if node.alive]:
            self._note(node, "is there when the faults stop")
            for (lineage, ghost), side in list(node.sides.items()):
                self.met[lineage] = max(self.met.get(lineage, 0), 0 if ghost else side.vote.ballot)
                if side.certificate:
                    for peer in self.nodes:
                        self._fly(node.me.peer, peer, replace(side.certificate, sender=node.me))
                else:
                    self._wake(node, side)
        for node in self.nodes.values():
            for _, message in node.parked:
                self._later(2 * DELAY, lambda at=(node, message.key.lineage): self.catch_up(*at))
                self.met[message.key.lineage] = max(self.met.get(message.key.lineage, 0), message.ballot)
        for flight in flying:
            lineage = flight[2].key.lineage
            self.met[lineage] = max(self.met.get(lineage, 0), flight[2].ballot)
            self._fly(*flight)

    def _wake(self, node: Node, side: Side) -> None:
        self.obey(node, side, side.vote.fork(b""))
        self._later(DELAY, lambda: self.answer(node, side))
        self._later(DELAY, lambda: self.supply(node, side))
        if timer := side.timer:
            self._later(self.rng.random() * TIMEOUT * timer[1], lambda: self.expire(node, side, timer))

    # -- judging ------------------------------------------------------------------------------------------------------

    def judge_votes(self, node: Node, side: Side) -> None:
        """A vote is cast only for what is held; a majority of them chooses, whether anybody has noticed or not."""
        line = self.lines[side.vote.poll.key.lineage]
        for index, value in enumerate((side.vote.accepted, side.vote.forked)):
            if value is None or value is side.voted[index]:
                continue
            side.voted[index] = value
            if not all(part.digest in side.held for part in value.record.parts):
                raise Broken("held", f"{node.me} voted in ballot {value.ballot} for parts that it does not hold")
            line.accepted[node.me, value.ballot] = value
            if not value.is_fork:
                self.judge_choice(line, value)

    def judge_choice(self, line: Line, value: Value) -> None:
        """At most one record is ever chosen, and none but it is proposed in a higher ballot."""
        cast = [line.accepted.get((member, value.ballot)) for member in line.roster]
        if sum(each is not None and each.digest == value.digest for each in cast) < majority(len(line.roster)):
            return
        line.chosen.setdefault(value.digest, value.ballot)
        if len(line.chosen) > 1:
            raise Broken("one child", f"two were chosen, in ballots {sorted(line.chosen.values())}")
        self.judge_proposals(line)

    def judge_proposal(self, line: Line, message: votes.Propose) -> None:
        value = records.decode(message.record)
        digest = records.lineage(message.record)
        if line.proposed.setdefault(message.ballot, digest) != digest:
            raise Broken("proposal", f"two in ballot {message.ballot}")
        if value.kind == Kind.FORK:
            del line.proposed[message.ballot]
        self.judge_proposals(line)

    def judge_proposals(self, line: Line) -> None:
        for chosen, lowest in line.chosen.items():
            for ballot, digest in line.proposed.items():
                if ballot > lowest and digest != chosen:
                    raise Broken("proposal", f"another in ballot {ballot} than was chosen in {lowest}")

    def judge_child(self, lineage: bytes, certificate: votes.Certificate) -> Value:
        """At most one child, but for forks; each certificate is proof to everybody."""
        line = self.lines[lineage]
        digest = records.lineage(certificate.record)
        value = Value(certificate.ballot, certificate.record, digest, records.decode(certificate.record))
        line.children.setdefault(digest, value)
        if len([child for child in line.children.values() if not child.is_fork]) > 1:
            raise Broken("one child", f"two were decided, the second in ballot {value.ballot}")
        voters = {vote.voter for vote in certificate.votes}
        for voter in voters:
            cast = line.accepted.get((voter, value.ballot))
            if voter not in line.roster or cast is None or cast.digest != digest:
                raise Broken("proof", f"a certificate with a vote of {voter}, who cast none")
        if value.is_fork:
            self.judge_fork(line, value, voters)
        elif len(voters) < majority(len(line.roster)):
            raise Broken("proof", f"{len(voters)} of {len(line.roster)} decided")
        return value

    def judge_fork(self, line: Line, fork: Value, voters: set[Member]) -> None:
        """A fork: all of its roster, fewer than a majority; it takes over what the last of them accepted before it."""
        members = fork.record.roster
        if voters != set(members) or len(members) >= majority(len(line.roster)):
            raise Broken("fork", f"{len(voters)} voted for a fork of {len(members)} from {len(line.roster)}")
        before = [v for (voter, ballot), v in line.accepted.items() if voter in voters and ballot < fork.ballot]
        newest = max(before, key=lambda value: value.ballot, default=fork)
        if (newest.record.plan, newest.record.parts) != (fork.record.plan, fork.record.parts):
            raise Broken("fork", f"it forgets what was accepted in ballot {newest.ballot}")

    def able(self, lineage: bytes) -> list[Member]:
        """Members that live and can still vote in a lineage: all but those whom a fork led elsewhere."""
        able = []
        for member in self.lines[lineage].roster:
            if self.left(self.nodes[member.peer], lineage):
                continue
            side = self.nodes[member.peer].sides.get((lineage, False)) if self._lives(member) else None
            if self._lives(member) and not (side and side.forked):
                able.append(member)
        return able

    def judge_progress(self, lineage: bytes) -> None:
        """Those who are able have decided: within F + 1 ballots above those that were known when the faults stopped."""
        line, able = self.lines[lineage], self.able(lineage)
        sides = [self.nodes[member.peer].sides.get((lineage, False)) for member in able]
        if line.key.round >= self.depth or not any(sides):
            return
        majority_left = len(able) >= majority(len(line.roster))
        if not all(side and side.vote.decided for side in sides):
            raise Broken("progress", f"{len(able)} of {len(line.roster)} are there and do not decide")
        ballots = [side.vote.decided.ballot for side in sides if side and side.vote.decided]
        limit = self.met.get(lineage, -1) + len(line.roster) - len(able) + 1
        if majority_left and min(ballots, default=0) > limit:
            raise Broken("ballots", f"decided in ballot {min(ballots)}, after {limit}")


def _short(value: object) -> str:
    if isinstance(value, votes.Send):
        return f"-> {' '.join(value.to)}: {_short(value.message)}"
    if isinstance(value, votes.Message):
        names = [name for name in ("ballot", "accepted", "fork") if getattr(value, name, ())]
        data = getattr(value, "record", b"")
        digest = getattr(value, "digest", records.lineage(data) if data else b"")
        said = " ".join(f"{name}={getattr(value, name)}" for name in names)
        return f"[{value.key.lineage.hex()[:4]}] {type(value).__name__} {said} {digest.hex()[:6]}"
    return f"{type(value).__name__} {getattr(value, 'ballot', '')}"


def play(chosen: Iterable[int], **planted: Any) -> list[tuple[int, Broken]]:
    """Play seeds; those in which a rule broke, and which."""
    broken = []
    for seed in chosen:
        try:
            World(seed, **planted).run()
        except Broken as error:
            broken.append((seed, error))
    return broken


def main(arguments: list[str] | None = None) -> int:
    """Exit 1 if a rule broke."""
    parser = Parser(prog="python -m tests.sim.scheduling", description="The vote under random faults.")
    parser.add_argument("--seeds", type=seeds, default=range(2000), help="one seed, or a range like 0:50000")
    chosen = parser.parse_args(arguments).seeds
    if len(chosen) == 1:
        _show(chosen[0])
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
    """Print what happens in one run, up to where a rule breaks."""
    world = World(seed)
    world.trace = []
    try:
        with suppress(Broken):
            world.run()
    finally:
        print("\n".join(world.trace))


if __name__ == "__main__":
    sys.exit(main())
