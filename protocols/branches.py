"""Judging what others say was decided: certificates one by one, and which of two branches holds. Pure.

At the lineage where two branches part, the one whose first child carries more signatures of that lineage's roster wins
(docs/protocols.md); of two with the same number, the lower hash. A child that a quorum decided counts as one quorum,
and a FORK as its own roster, whatever votes a certificate happens to hold: two peers with different certificates of the
same records must come to the same answer. A FORK of heirs (`protocols.poll`), who have no such signatures, loses to any
other child. A longer branch wins over its own beginning.

One thing has to be kept from who has no child yet where a branch goes on with a FORK: any single member can make one.
While those whom the fork leaves out are enough to decide, it does not win over their waiting for each other; it does
for a peer that is `stranded`: undecided for so long that it might fork itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from protocols.base import BadPayload, Head, Member, Signer
from protocols.chain import UNSETTLED, Chain, Link, follow
from protocols.poll import Poll
from protocols.record import Kind, Record
from protocols.votes import Certificate


@dataclass(frozen=True, slots=True)
class Branch:
    """Judged rounds that beat what a chain holds.

    Attributes:
        ancestor: the head, on that chain, where they leave it.
        links: what follows there, oldest first; at least one.
    """

    ancestor: Head
    links: tuple[Link, ...]

    @property
    def head(self) -> Head:
        return self.links[-1].head


@dataclass(frozen=True, slots=True)
class Rules:
    """What decides in this run.

    Attributes:
        me: this peer, in this life.
        quorum: votes that decide, by the size of the roster; None: a majority.
        fork_peers: so many members at least may fork; 0: none may.
    """

    me: Member
    signer: Signer
    quorum: Callable[[int], int] | None = None
    fork_peers: int = 1

    def judge(self, head: Head, certificate: Certificate) -> Link:
        """What a certificate of the round after `head` leads to.

        Raises:
            BadPayload: it is not of that round, its record breaks the rules, or its votes are forged, a stranger's or
                too few.
        """
        if certificate.key != head.key:
            raise BadPayload(f"a certificate of round {certificate.key.round} that does not extend {_named(head)}")
        poll = self._poll(head)
        value = poll.value(certificate.ballot, certificate.record)
        if value is None:
            raise BadPayload(f"a record that may not extend {_named(head)}")
        if head.key.round == 0 and head.state_root not in (UNSETTLED, value.record.state_root):
            raise BadPayload("a first record that starts from another state than the run")
        for vote in certificate.votes:
            if not poll.counts(vote.voter) and not (value.is_fork and poll.inherits(vote.voter)):
                raise BadPayload(f"a vote of {vote.voter}, who has none after {_named(head)}")
            if not poll.add(value.ballot, value.digest, vote.voter, vote.signature):
                raise BadPayload(f"a forged vote of {vote.voter} after {_named(head)}")
        if not poll.decides(value):
            raise BadPayload(f"{len(certificate.votes)} votes after {_named(head)}, too few to decide")
        return follow(head, certificate)

    def verify(self, head: Head, certificates: Sequence[Certificate]) -> tuple[Link, ...]:
        """What certificates lead to that follow each other from `head`.

        Raises:
            BadPayload: as for `judge`.
        """
        links: list[Link] = []
        for certificate in certificates:
            links.append(self.judge(links[-1].head if links else head, certificate))
        return tuple(links)

    def beating(self, chain: Chain, ancestor: bytes, links: Sequence[Link], stranded: bool = False) -> Branch | None:
        """What of these rounds, judged from a lineage of the chain, is to be followed; None if they do not beat it."""
        head = chain.at(ancestor)
        links = tuple(links)
        while links and (ours := chain.child(links[0].certificate.key.lineage)) and ours.lineage == links[0].lineage:
            head, links = chain.at(ours.lineage), links[1:]
        if head is None or not links:
            return None
        ours = chain.child(head.key.lineage)
        if ours and self._rank(head, ours) < self._rank(head, links[0]):
            return None
        own = 1 if ours or stranded else 0  # where we hold another child, or have waited in vain, a FORK is not hasty
        links = links[:own] + self._before_hasty(links[0].head if own else head, links[own:])
        return Branch(head, links) if links else None

    def better(self, first: Branch, second: Branch) -> Branch:
        """Which of two branches that beat one chain wins."""
        if first.ancestor.key.round != second.ancestor.key.round:  # it beats the chain where the other still follows it
            return min(first, second, key=lambda branch: branch.ancestor.key.round)
        head = first.ancestor
        for mine, other in zip(first.links, second.links, strict=False):
            if mine.lineage != other.lineage:
                return first if self._rank(head, mine) < self._rank(head, other) else second
            head = mine.head
        return max(first, second, key=lambda branch: len(branch.links))

    def _rank(self, head: Head, child: Link) -> tuple[int, int, bytes]:
        """The lower wins; heirs' signatures count where there are none of members."""
        record, roster = child.record, set(head.roster)
        if record.kind != Kind.FORK:
            return -self._poll(head).quorum, 0, child.lineage
        members = len(roster.intersection(record.roster))
        return -members, members - len(record.roster), child.lineage

    def _before_hasty(self, head: Head, links: tuple[Link, ...]) -> tuple[Link, ...]:
        """These rounds up to the first FORK that we need not follow yet."""
        for place, link in enumerate(links):
            if self._hasty(head, link.record):
                return links[:place]
            head = link.head
        return links

    def _hasty(self, head: Head, record: Record) -> bool:
        """A FORK without us, of so few that the others, we among them, may still decide."""
        others = len(head.roster) - len(record.roster)
        left_out = self.me in head.roster and self.me not in record.roster
        return record.kind == Kind.FORK and left_out and others >= self._poll(head).quorum

    def _poll(self, head: Head) -> Poll:
        quorum = self.quorum(len(head.roster)) if self.quorum else None
        return Poll(head.key, head.roster, self.signer, quorum, self.fork_peers)


def _named(head: Head) -> str:
    return f"{head.key.lineage.hex()[:12]} at round {head.key.round}"
