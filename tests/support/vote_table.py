"""The members of one vote, without a network: a test delivers their messages by name."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypeVar

from protocols.base import Member, PeerId, RoundKey
from protocols.consensus import messages as votes
from protocols.consensus import record as records
from protocols.consensus.paxos import PaxosInstance
from protocols.consensus.record import Kind, Record
from protocols.consensus.vote_tally import VoteTally
from protocols.wire import ChunkSpan, PartDigest, PartDone
from tests.sim.invariants import Seal

KEY = RoundKey(b"r" * 32, "all", b"l" * 32, 7)
PLAN = b"p" * 32
PART = PartDone(0, 0, PartDigest(b"1" * 32, (ChunkSpan(1, 3),)), b"")
Some = TypeVar("Some")


@dataclass
class Flight:
    sender: PeerId
    to: PeerId
    message: votes.VoteMessage


class Table:
    """Members of one vote, in the order in which they coordinate; messages wait until they are delivered by name."""

    def __init__(self, members: int = 3, fork_peers: int = 1) -> None:
        roster = [Member(f"m{index}") for index in range(members)]
        order = records.coordinators(KEY.lineage, roster)
        self.roster = tuple(roster)
        self.members = tuple(Member(peer) for peer in order)
        self.votes = {
            m.peer: PaxosInstance(m, VoteTally(KEY, self.roster, Seal(m.peer), fork_peers=fork_peers))
            for m in self.members
        }
        self.flying: list[Flight] = []
        self.said: list[tuple[PeerId, votes.Instruction]] = []

    def name(self, index: int) -> PeerId:
        return self.members[index].peer

    def vote(self, index: int) -> PaxosInstance:
        return self.votes[self.name(index)]

    def do(self, index: int, event: str, *arguments: Any) -> list[votes.Instruction]:
        out: list[votes.Instruction] = getattr(self.vote(index), event)(*arguments)
        for each in out:
            self.said.append((self.name(index), each))
            if isinstance(each, votes.Send):
                self.flying += [Flight(self.name(index), to, each.message) for to in each.to]
        return out

    def deliver(self, kind: type[votes.VoteMessage] | None = None, to: int | None = None, keep: bool = False) -> int:
        """Deliver all that flies, or one kind of it, or to one member, and what follows from it; how many."""
        count = 0
        while matching := [
            flight
            for flight in self.flying
            if (kind is None or isinstance(flight.message, kind)) and (to is None or flight.to == self.name(to))
        ]:
            self.flying = [flight for flight in self.flying if keep or flight not in matching]
            for flight in matching:
                if flight.to in self.votes:
                    self.do(self._index(flight.to), "receive", flight.sender, flight.message)
                    count += 1
            if keep or kind is not None:
                break
        return count

    def lose(self, *indices: int) -> None:
        names = {self.name(index) for index in indices} or set(self.votes)
        self.flying = [flight for flight in self.flying if not {flight.sender, flight.to} & names]

    def die(self, *indices: int) -> None:
        self.lose(*indices)
        for index in indices:
            del self.votes[self.name(index)]

    def heard(self, index: int, kind: type[Some]) -> list[Some]:
        return [each for peer, each in self.said if peer == self.name(index) and isinstance(each, kind)]

    def sent(self, kind: type[Some]) -> list[Some]:
        return [
            each.message for _, each in self.said if isinstance(each, votes.Send) and isinstance(each.message, kind)
        ]

    def decided(self) -> list[tuple[int, bytes] | None]:
        certificates = [self.votes[member.peer].decided for member in self.members if member.peer in self.votes]
        return [(each.ballot, each.record) if each else None for each in certificates]

    def record(self, kind: Kind = Kind.SKIP, *parts: PartDone, without: int = -1, **other: Any) -> bytes:
        roster = tuple(member for member in self.roster if without < 0 or member != self.members[without])
        made = Record(KEY.lineage, bytes(32), KEY.round, kind, PLAN, tuple(part.result for part in parts), roster)
        return records.encode(replace(made, **other))

    def fork(self, *indices: int) -> bytes:
        return self.record(Kind.FORK, plan=bytes(32), roster=tuple(sorted(self.members[index] for index in indices)))

    def hold(self, *indices: int) -> None:
        for index in indices:
            self.do(index, "report_parts", PLAN, (PART,))

    def _index(self, peer: PeerId) -> int:
        return next(index for index, member in enumerate(self.members) if member.peer == peer)
