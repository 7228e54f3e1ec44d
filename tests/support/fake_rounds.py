"""Made-up decided rounds: records with the votes of any members, for tests of chains and branches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from protocols import wire
from protocols.base import Head, Member
from protocols.consensus import record as records
from protocols.consensus.messages import Certificate, Signed
from protocols.consensus.record import Kind, Record
from protocols.consensus.vote_tally import VoteTally
from protocols.history.chain import Archive, Chain, DecidedRound, follow
from protocols.wire import ChunkSpan, PartDigest
from tests.sim.host import SimSigner

RUN = bytes(range(32))
SEED = 1
ROOT = b"0" * 32


def vote(head: Head, ballot: int, record: bytes, voter: Member) -> Signed:
    tally = VoteTally(head.key, head.roster, SimSigner(voter.peer, SEED))
    message = tally.message(ballot, records.lineage(record), voter)
    return Signed(voter, SimSigner(voter.peer, SEED).sign(message))


def certified(head: Head, record: Record, voters: Sequence[Member] | None = None, ballot: int = 0) -> Certificate:
    """The record with the votes of these members, by default of the whole roster (of a FORK: its own roster)."""
    by_default = record.roster if record.kind == Kind.FORK else head.roster
    data = records.encode(record)
    votes = tuple(vote(head, ballot, data, voter) for voter in (by_default if voters is None else voters))
    return Certificate(head.key, votes[0].voter if votes else Member("x"), ballot, data, votes)


def decided(
    head: Head,
    kind: Kind = Kind.MEAN,
    roster: tuple[Member, ...] | None = None,
    voters: Sequence[Member] | None = None,
    plan: bytes = b"d" * 32,
    root: bytes | None = None,
) -> DecidedRound:
    """A round decided after `head`. A MEAN has one part."""
    parts = (PartDigest(b"p" * 32, (ChunkSpan(1, 1),)),) if kind == Kind.MEAN else ()
    record = Record(
        head.key.lineage, root or head.state_root, head.key.round, kind, plan, parts, roster or head.roster,
        bounds=(0, 10) if parts else (),
    )  # fmt: skip
    return follow(head, certified(head, record, voters))


def line(head: Head, rounds: int, **changes: Any) -> list[DecidedRound]:
    links: list[DecidedRound] = []
    for _ in range(rounds):
        links.append(decided(links[-1].head if links else head, **changes))
    return links


def encoded(link: DecidedRound) -> bytes:
    return wire.encode(link.certificate)


ROSTER = (Member("anna"), Member("bert"))


def fresh(archive: Archive | None = None) -> Chain:
    return Chain(RUN, "run", ROSTER, ROOT, archive, fragments=3)


def grown(rounds: int, **changes: Any) -> Chain:
    chain = fresh()
    for link in line(chain.head, rounds, **changes):
        chain.extend(link.certificate)
    return chain


def lineages(chain: Chain) -> list[bytes]:
    return [records.genesis(RUN), *(records.lineage(each) for each in chain.records)]


def state(chain: Chain) -> tuple[Head, tuple[bytes, ...], tuple[bytes, ...]]:
    return chain.head, chain.records, chain.locator()
