"""Simulated hosts of the consensus: nodes that vote on a chain of lineages and exchange messages."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from protocols.base import Member, PeerId, RoundKey
from protocols.consensus import messages as votes
from protocols.consensus import record as records
from protocols.consensus.paxos import PaxosInstance
from protocols.consensus.record import Kind, Record
from protocols.consensus.vote_tally import Value, majority, max_admitted, min_retained
from protocols.wire import ChunkSpan, PartDigest, PartDone
from tests.sim import invariants as judging
from tests.sim.invariants import NOTHING, Node, Remembering, Seal, Side, VoteChecker, short

DELAY = 1.0
TIMEOUT = 12.0
"""What a ballot needs: start, prepare, promise, choose, propose, fetch, accept."""
MAX_FLYING = 120
LEAVE_CHANCE = 0.2
MAX_PARKED = 40


class FirstOffer(votes.VoteMessage):
    """Tells the other members of a roster that the sender is in its round."""


class World:
    """The nodes, and the messages between them; a test plants bugs by other `vote` and `tally` classes."""

    def __init__(
        self,
        rng: random.Random,
        names: Sequence[PeerId],
        members: int,
        depth: int,
        vote: type[PaxosInstance],
        tally: type[Remembering],
    ) -> None:
        self.rng, self.depth, self.vote, self.tally = rng, depth, vote, tally
        self.trace: list[str] | None = None
        self.calm, self.now, self.events = False, 0.0, 0
        self.flying: list[tuple[PeerId, PeerId, votes.VoteMessage]] = []
        self.cuts: dict[tuple[PeerId, PeerId], None] = {}
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers, self._records = itertools.count(), 0
        self.nodes = {name: Node(Member(name)) for name in names}
        genesis = rng.randbytes(32)
        self.lines = {genesis: VoteChecker(self._key(genesis, 0), tuple(Member(name) for name in names[:members]))}
        for member in self.lines[genesis].roster:
            self.enter(self.nodes[member.peer], genesis)

    def _key(self, lineage: bytes, depth: int) -> RoundKey:
        return RoundKey(NOTHING, "vote", lineage, depth)

    def go_calmly(self, limit_events: int) -> None:
        """Run until no action is due, or `limit_events` is reached."""
        while self._agenda and self.events < limit_events:
            self.now, _, action = heapq.heappop(self._agenda)
            action()

    # -- hosts --------------------------------------------------------------------------------------------------------

    def enter(self, node: Node, lineage: bytes, ghost: Member | None = None) -> Side:
        """Enter a lineage as voter or observer, or as a ghost, whose former incarnation was the member `ghost`."""
        line, at = self.lines[lineage], (lineage, ghost is not None)
        if at in node.sides:
            return node.sides[at]
        roster = tuple(node.me if member == ghost else member for member in line.roster)
        tally = self.tally(line.key, roster, Seal(node.me.peer), former=line.former)
        tally.read = {} if ghost else line.read
        side = node.sides[at] = Side(self.vote(node.me, tally), ghost is not None)
        if tally.counts(node.me):
            if tally.coordinator(0) == node.me.peer:
                side.choice = (0, ())
                self.later(DELAY, lambda: self.answer(node, side))
            self.obey(node, side, side.vote.progress())
            if not ghost:
                self.offer(node, lineage)
        parked, node.parked = node.parked, []
        for sender, message in parked:
            self.receive(node, sender, message)
        return side

    def offer(self, node: Node, lineage: bytes) -> None:
        """Once the faults stop, those that miss a certificate hear of the next round in any case."""
        line = self.lines[lineage]
        for member in line.roster if self.calm else ():
            self.fly(node.me.peer, member.peer, FirstOffer(line.key, node.me, 0))

    def receive(self, node: Node, sender: PeerId, message: votes.VoteMessage) -> None:
        """A node receives a message; one of a later lineage is parked, and its sender asked for certificates."""
        lineage, line = message.key.lineage, self.lines[message.key.lineage]
        if message.key.round >= self.depth:
            return
        if (lineage, False) not in node.sides:
            if isinstance(message, votes.Certificate):
                self.enter(node, lineage)
            elif node.me in line.roster and len(node.parked) < MAX_PARKED:
                node.parked.append((sender, message))
                self.later(2 * DELAY, lambda: self.catch_up(node, lineage))
                for (behind, ghost), side in list(node.sides.items()):
                    if not side.vote.decided and not ghost:
                        self.fly(node.me.peer, sender, votes.StartBallot(self.lines[behind].key, node.me, 0, ()))
        for ghost in () if isinstance(message, FirstOffer) else (False, True):
            if mine := node.sides.get((lineage, ghost)):
                self.obey(node, mine, mine.vote.receive(sender, message))

    def catch_up(self, node: Node, lineage: bytes) -> None:
        """Enter a lineage, as after fetching the certificates that lead to it."""
        if node.alive and not self.left(node, lineage):
            self.enter(node, lineage)

    def left(self, node: Node, lineage: bytes) -> bool:
        """Whether a node decided another child than this fork, which only fork choice can undo."""
        line = self.lines[lineage]
        parent = node.sides.get((line.parent, False))
        if not line.is_fork or (lineage, False) in node.sides or not parent or not parent.vote.decided:
            return False
        return records.lineage(parent.vote.decided.record) != lineage

    def obey(self, node: Node, side: Side, instructions: Iterable[votes.Instruction]) -> None:
        """Carry out instructions, and check the invariants."""
        self.events += 1
        if not side.ghost:
            judging.judge_votes(self.lines[side.vote.tally.key.lineage], node.me, side)
        for each in instructions:
            self.note(node, f"{'as a ghost ' * side.ghost}{short(each)}" if self.trace is not None else "")
            if isinstance(each, votes.Send):
                if isinstance(each.message, votes.Propose) and not side.ghost:
                    judging.judge_proposal(self.lines[each.message.key.lineage], each.message)
                for to in each.to:
                    self.fly(node.me.peer, to, each.message)
            else:
                self.serve(node, side, each)

    def serve(self, node: Node, side: Side, each: votes.Instruction) -> None:
        if isinstance(each, votes.SetTimer):
            side.timer = timer = (each.ballot, each.factor)
            self.later(TIMEOUT * each.factor, lambda: self.expire(node, side, timer))
        elif isinstance(each, votes.ProposalNeeded):
            side.choice = (each.ballot, each.promises)
            self.later(DELAY, lambda: self.answer(node, side))
        elif isinstance(each, votes.Fetch):
            side.wants = each.parts
            self.later(2 * DELAY, lambda: self.supply(node, side))
        elif isinstance(each, votes.Decided):
            self.decided(node, side, each.certificate)
        elif isinstance(each, votes.ConflictingCertificate) and not side.ghost:
            self.switch(node, side, each.certificate)

    def switch(self, node: Node, side: Side, certificate: votes.Certificate) -> None:
        """Replace a fork by a majority's child, and pass that certificate on."""
        value = self.learn(certificate)
        if value.is_fork or (side.certificate and side.certificate.record == certificate.record):
            return
        side.certificate = certificate
        for peer in self.nodes:
            self.fly(node.me.peer, peer, replace(certificate, sender=node.me))
        self.go_on(node, value)

    def decided(self, node: Node, side: Side, certificate: votes.Certificate) -> None:
        side.timer = side.choice = None
        if side.ghost:
            return
        value = self.learn(certificate)
        side.forked, side.certificate = value.is_fork, certificate
        self.go_on(node, value)

    def learn(self, certificate: votes.Certificate) -> Value:
        key = certificate.key
        value = judging.judge_child(self.lines[key.lineage], certificate)
        if value.digest not in self.lines:
            child = self._key(value.digest, key.round + 1)
            line, roster = self.lines[key.lineage], value.record.roster
            larger = [each for each in (line.roster, *line.former) if len(each) > len(roster)]
            former = [each for at, each in enumerate(larger) if all(len(each) > len(after) for after in larger[:at])]
            self.lines[value.digest] = VoteChecker(child, roster, tuple(former), key.lineage, value.is_fork)
        return value

    def go_on(self, node: Node, value: Value) -> None:
        """Enter the next lineage, if the node is in its roster."""
        if node.me in value.record.roster and value.record.round + 1 < self.depth:
            self.enter(node, value.digest)

    def expire(self, node: Node, side: Side, timer: tuple[int, int]) -> None:
        """A timer expires, unless it was replaced; without a majority the host forks."""
        if side.timer is not timer or not node.alive:
            return
        if self.calm and not side.ghost and node.me in side.vote.tally.roster:
            lineage = side.vote.tally.key.lineage
            left = self.able(lineage)
            mates = [self.nodes[member.peer].sides.get((lineage, False)) for member in left]
            if len(left) < side.vote.tally.quorum and not any(mate and mate.vote.decided for mate in mates):
                self.obey(node, side, side.vote.fork(self.fork_record(side, left)))
        if side.timer is timer:
            self.obey(node, side, side.vote.timeout(timer[0]))

    def answer(self, node: Node, side: Side) -> None:
        if side.choice is None or not node.alive:
            return
        (ballot, promises), side.choice = side.choice, None
        tally, rng = side.vote.tally, self.rng
        held = [part for promise in promises for part in promise.held]
        kind, parts = (Kind.MEAN if rng.random() < 0.7 else Kind.SKIP), list[PartDone]()
        if kind == Kind.MEAN:
            repair = bool(held) and rng.random() < 0.5
            parts = [rng.choice(held)] if repair else [self.reduce(node, side) for _ in range(rng.choice((1, 1, 2)))]
        self._records += 1
        plan = self._records.to_bytes(32, "big")
        roster = self.next_roster(tally.roster)
        record = Record(tally.key.lineage, NOTHING, tally.key.round, kind, plan, tuple(p.result for p in parts), roster)
        self.obey(node, side, side.vote.chosen(ballot, records.encode(record)))

    def reduce(self, node: Node, side: Side) -> PartDone:
        """Make a new part that the proposer or another live node holds; further nodes may hold it, too."""
        self._records += 1
        part = PartDone(0, 0, PartDigest(self._records.to_bytes(32, "little"), (ChunkSpan(1, 1),)), b"")
        others = [each for each in self.nodes.values() if each.alive and each is not node]
        holders = [each for each in others if self.rng.random() < 0.4]
        if self.calm or side.ghost or not holders or self.rng.random() < 0.7:
            holders.append(node)
        for each in holders:
            self.hold(each, side.vote.tally.key.lineage, part)
        return part

    def hold(self, node: Node, lineage: bytes, part: PartDone) -> None:
        for ghost in (False, True):
            if side := node.sides.get((lineage, ghost)):
                side.held[part.result.digest] = part
                self.obey(node, side, side.vote.report_parts(NOTHING, tuple(side.held.values())))

    def supply(self, node: Node, side: Side) -> None:
        """Fetch the parts that a node waits for from any live node that it can reach in both directions."""
        lineage, me = side.vote.tally.key.lineage, node.me.peer
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
            self.later(2 * DELAY, lambda: self.supply(node, side), limit=200)

    def next_roster(self, roster: tuple[Member, ...]) -> tuple[Member, ...]:
        """Draw a roster: most live members stay, some others are admitted, and sometimes many leave."""
        rng, least = self.rng, min_retained(len(roster), majority(len(roster)))
        chances = {member: 0.95 if self.alive(member) else 0.5 for member in roster}
        if rng.random() < LEAVE_CHANCE:
            chances, least = dict.fromkeys(roster, 0.3), 1
        session = [member for member, chance in chances.items() if rng.random() < chance] or [rng.choice(roster)]
        others = rng.sample(roster, len(roster))
        session += [member for member in others if member not in session][: max(0, least - len(session))]
        peers = {member.peer for member in session}
        new = [node.me for node in self.nodes.values() if node.alive and node.me.peer not in peers]
        new = [member for member in new if member not in roster and rng.random() < 0.6]
        return tuple(sorted((*session, *new[: max_admitted(len(roster))])))

    def fork_record(self, side: Side, members: Iterable[Member]) -> bytes:
        key, roster = side.vote.tally.key, tuple(sorted(members))
        return records.encode(Record(key.lineage, NOTHING, key.round, Kind.FORK, NOTHING, (), roster))

    def successors(self, lineage: bytes) -> list[Node]:
        """Live nodes of which a former incarnation was in a lineage's roster."""
        line = self.lines[lineage]
        if line.key.round >= self.depth:
            return []
        incarnations = {member.peer: member.incarnation for member in line.roster}
        alive = [node for node in self.nodes.values() if node.alive]
        return [node for node in alive if incarnations.get(node.me.peer, node.me.incarnation) < node.me.incarnation]

    def fork_candidates(self, lineage: bytes) -> list[Node]:
        """Live nodes without a vote that may fork: most of a former roster if they are there, else the successors."""
        line = self.lines[lineage]
        if line.key.round >= self.depth:
            return []
        successors, voters = self.successors(lineage), {member.peer for member in line.roster}
        for former in line.former:
            incarnations = {member.peer: member.incarnation for member in former if member.peer not in voters}
            there = [
                node for node in self.nodes.values()
                if node.alive and node.me.incarnation >= incarnations.get(node.me.peer, 1 << 30)
            ]  # fmt: skip
            there += [node for node in successors if node.me.peer in {member.peer for member in former}]
            if 2 * len(there) > len(former) and len(there) > len(line.roster):
                return there
        return successors

    def inherit(self, lineage: bytes, successors: Sequence[Node]) -> None:
        for node in successors:
            side, members = self.enter(node, lineage), [each.me for each in successors]
            if node.alive and not side.vote.decided and side.vote.tally.may_fork(members):
                self.obey(node, side, side.vote.fork(self.fork_record(side, members)))

    # -- nodes and messages -------------------------------------------------------------------------------------------

    def alive(self, member: Member) -> bool:
        node = self.nodes[member.peer]
        return node.alive and node.me == member

    def able(self, lineage: bytes) -> list[Member]:
        """Live members that can still vote in a lineage, without those that went on with a fork."""
        sides = {each: self.nodes[each.peer].sides.get((lineage, False)) for each in self.lines[lineage].roster}
        there = [each for each, side in sides.items() if self.alive(each) and not (side and side.forked)]
        return [each for each in there if not self.left(self.nodes[each.peer], lineage)]

    def fly(self, sender: PeerId, to: PeerId, message: votes.VoteMessage) -> None:
        if self.calm:
            self.later(self.rng.uniform(DELAY / 2, DELAY), lambda: self.land(sender, to, message))
        elif len(self.flying) < MAX_FLYING:
            self.flying.append((sender, to, message))

    def land(self, sender: PeerId, to: PeerId, message: votes.VoteMessage) -> None:
        if (node := self.nodes[to]).alive and (sender, to) not in self.cuts:
            self.receive(node, sender, message)

    def later(self, seconds: float, action: Callable[[], None], limit: float = 1e9) -> None:
        if self.calm and self.now < limit:
            heapq.heappush(self._agenda, (self.now + seconds, next(self._numbers), action))

    def note(self, node: Node, what: str) -> None:
        if self.trace is not None:
            self.trace.append(f"{self.now:7.1f} {node.me.peer}/{node.me.incarnation} {what}")
