"""Verification of certificates, and the fork-choice rule: which of two branches wins. No I/O.

Where two branches part, the one whose first child carries more signatures of the roster wins (docs/protocols.md); of
two with the same number, the lower hash. A child that a quorum decided counts as one quorum, and a FORK as its own
roster, whatever votes a certificate holds: peers with different certificates of the same records must come to the same
answer. A FORK of successors may be larger than a quorum, and still loses to a child that a quorum decided. A longer
branch wins over its own prefix.

A FORK of former members outnumbers the whole roster that it replaces. Against another child, the branch with the larger
roster wins; if both are equal, the other child wins. So a peer that left last and comes back does not undo what all
others have trained since, nor a few peers that start apart from the others a branch that has grown without them.

All this holds between two branches on which rosters after that point have a member that was not removed from the run
for good, and between two on which none has. Of two others, the one with such members wins: removed peers alone could
continue the other one. So rounds that removed peers decided among themselves count only against their like.

A peer without a child of its own at that lineage does not follow a FORK while the members that it leaves out are enough
to decide, since a single member can make one. If it is `stranded`, undecided for so long that it might fork itself, it
follows.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from protocols.base import BadPayload, Head, Member, PeerId, Signer
from protocols.consensus.messages import Certificate
from protocols.consensus.record import Kind, Record
from protocols.consensus.vote_tally import VoteTally
from protocols.history.chain import UNSETTLED, Chain, DecidedRound, follow
from protocols.history.round_log import RoundLog
from protocols.wire import MAX_ROSTER

Rosters: TypeAlias = Sequence[tuple[Member, ...]]


@dataclass(frozen=True, slots=True)
class Branch:
    """Verified rounds that win over those of a chain: the chain's head where they leave it, and at least one round."""

    ancestor: Head
    links: Sequence[DecidedRound]

    @property
    def head(self) -> Head:
        return self.links[-1].head


@dataclass(frozen=True, slots=True)
class ForkChoice:
    """The rules of a run for certificates and branches. `removed` is as in `Host`, `voters` as in `Settings`, and the
    rest as in `VoteTally`.
    """

    me: Member
    signer: Signer
    quorum: Callable[[int], int] | None = None
    fork_peers: int = 1
    removed: Callable[[PeerId], bool] = lambda peer: False
    voters: int = MAX_ROSTER

    def judge(self, head: Head, certificate: Certificate) -> DecidedRound:
        """Verify a certificate of the round after `head`, and return the round; raises BadPayload."""
        if certificate.key != head.key:
            raise BadPayload(f"a certificate of round {certificate.key.round} that does not extend {_named(head)}")
        tally = self._tally(head)
        value = tally.value(certificate.ballot, certificate.record)
        if value is None:
            raise BadPayload(f"a record that may not extend {_named(head)}")
        if head.key.round == 0 and head.state_root not in (UNSETTLED, value.record.state_root):
            raise BadPayload("a first record that starts from another state than the run")
        for vote in certificate.votes:
            if not tally.counts(vote.voter) and not (value.is_fork and tally.forks_only(vote.voter)):
                raise BadPayload(f"a vote of {vote.voter}, which has no vote after {_named(head)}")
            if not tally.add(value.ballot, value.digest, vote.voter, vote.signature):
                raise BadPayload(f"a forged vote of {vote.voter} after {_named(head)}")
        if not tally.decides(value):
            raise BadPayload(f"{len(certificate.votes)} votes after {_named(head)}, too few to decide")
        return follow(head, certificate, value.record)

    def verify(self, head: Head, certificates: Sequence[Certificate]) -> tuple[DecidedRound, ...]:
        links: list[DecidedRound] = []
        for certificate in certificates:
            links.append(self.judge(links[-1].head if links else head, certificate))
        return tuple(links)

    def beating(
        self, chain: Chain, ancestor: bytes, links: Sequence[DecidedRound], stranded: bool = False
    ) -> Branch | None:
        """The part of these verified rounds, which begin at the chain's lineage `ancestor`, that the chain should
        switch to; None if the chain wins.
        """
        links = links if isinstance(links, RoundLog) else tuple(links)
        shared = bisect_left(range(len(links)), True, key=lambda place: links[place].lineage not in chain)
        head = chain.at(links[shared - 1].lineage if shared else ancestor)
        if head is None or shared == len(links):
            return None
        ours, first = chain.child(head.key.lineage), links[shared]
        if ours:
            rosters = _rosters(links, shared), chain.rosters_after(head.key.lineage)
            if not self._wins(head, (first, ours), rosters):
                return None
        own = 1 if ours or stranded else 0  # with another child here, or after waiting in vain, follow the FORK
        end = self._first_hasty(head, links, shared, shared + own)
        if end == shared:
            return None
        return Branch(head, links if (shared, end) == (0, len(links)) else links[shared:end])

    def better(self, first: Branch, second: Branch) -> Branch:
        """The winner of two branches that both win over one chain."""
        if first.ancestor.key.round != second.ancestor.key.round:  # it wins where the other still follows the chain
            removed = [self._are_removed(_rosters(each.links, 0)) for each in (first, second)]
            if removed[0] != removed[1]:
                return second if removed[0] else first
            return min(first, second, key=lambda branch: branch.ancestor.key.round)
        head = first.ancestor
        mine, others = first.links, second.links
        both = range(min(len(mine), len(others)))
        parted = bisect_left(both, True, key=lambda place: mine[place].lineage != others[place].lineage)
        if parted < len(both):
            head = mine[parted - 1].head if parted else first.ancestor
            rosters = _rosters(mine, parted), _rosters(others, parted)
            return first if self._wins(head, (mine[parted], others[parted]), rosters) else second
        return max(first, second, key=lambda branch: len(branch.links))

    def depends_on_growth(self, chain: Chain, ancestor: bytes, links: Sequence[DecidedRound]) -> bool:
        """Whether these rounds, which do not win over the chain, may win together with the rounds after them."""
        shared = bisect_left(range(len(links)), True, key=lambda place: links[place].lineage not in chain)
        head = chain.at(links[shared - 1].lineage if shared else ancestor)
        ours = chain.child(head.key.lineage) if head else None
        if head is None or ours is None or shared == len(links):
            return False
        if self._are_removed(_rosters(links, shared)):
            return True
        return self._of_former(head, ours) != self._of_former(head, links[shared])

    def _wins(self, head: Head, children: tuple[DecidedRound, DecidedRound], rosters: tuple[Rosters, Rosters]) -> bool:
        """Whether the branch of the first child wins; `rosters` of both branches after `head`."""
        removed = tuple(map(self._are_removed, rosters))
        if removed[0] != removed[1]:
            return removed[1]
        former = tuple(self._of_former(head, child) for child in children)
        if former[0] == former[1]:
            return _rank(head, children[0]) < _rank(head, children[1])
        sizes = map(self._largest, rosters)
        one, other = (size if fork else max(size, len(head.roster)) for fork, size in zip(former, sizes, strict=True))
        return one > other if former[0] else one >= other

    def _first_hasty(self, head: Head, links: Sequence[DecidedRound], start: int, since: int) -> int:
        """Place of the first FORK from `since` on not to follow yet; `head` is the one before `start`."""
        for place in _forks(links):
            if place >= since:
                before = links[place - 1].head if place > start else head
                if self._hasty(before, links[place].record):
                    return place
        return len(links)

    def _hasty(self, head: Head, record: Record) -> bool:
        """Whether a FORK leaves out this peer and so many others that they may still decide without it."""
        others = len(head.roster) - len(record.roster)
        left_out = self.me in head.roster and self.me not in record.roster
        return record.kind == Kind.FORK and left_out and others >= self._tally(head).quorum

    def _tally(self, head: Head) -> VoteTally:
        tally = VoteTally(head.key, head.roster, self.signer, self.quorum, self.fork_peers, head.former)
        tally.removed, tally.most_voters = self.removed, self.voters
        return tally

    def _of_former(self, head: Head, child: DecidedRound) -> bool:
        """Whether a child is a FORK of former members because of their number, whether or not members were removed."""
        peers = {member.peer for member in head.roster}
        record = child.record
        outside = record.kind == Kind.FORK and any(member.peer not in peers for member in record.roster)
        return outside and self._tally(head).is_former_majority(record.roster)

    def _are_removed(self, rosters: Rosters) -> bool:
        """Whether all members of all these rosters were removed; not if none is remembered."""
        return bool(rosters) and not any(map(self._has_members, reversed(rosters)))

    def _largest(self, rosters: Rosters) -> int:
        """Size of the largest roster that has a member."""
        return max((len(each) for each in rosters if self._has_members(each)), default=0)

    def _has_members(self, roster: tuple[Member, ...]) -> bool:
        return not all(self.removed(member.peer) for member in roster)


def _rank(head: Head, child: DecidedRound) -> tuple[int, int, bytes]:
    """Sort key of a child; the lower wins. A FORK loses to any other child. Of two FORKs the larger wins; of two equal
    ones, the one of members alone.
    """
    record = child.record
    if record.kind != Kind.FORK:
        return -1 - len(head.roster), 0, child.lineage
    return -len(record.roster), int(not set(record.roster) <= set(head.roster)), child.lineage


def _rosters(links: Sequence[DecidedRound], start: int) -> Rosters:
    """The rosters after the rounds from `start` on."""
    if isinstance(links, RoundLog):
        return links.rosters_after(start, len(links))
    return [link.head.roster for link in links[start:]]


def _forks(links: Sequence[DecidedRound]) -> Iterable[int]:
    if isinstance(links, RoundLog):
        return links.forks
    return (place for place, link in enumerate(links) if link.record.kind == Kind.FORK)


def _named(head: Head) -> str:
    return f"{head.key.lineage.hex()[:12]} at round {head.key.round}"
