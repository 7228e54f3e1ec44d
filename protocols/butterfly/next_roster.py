"""Who is in the roster that the record of a round names: the members that stay, and peers that asked for admission."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from protocols.base import BadPayload, Member, PeerId
from protocols.butterfly.attempt import Attempt
from protocols.consensus import record as records
from protocols.consensus.vote_tally import max_admitted, min_retained


class NextRoster:
    def __init__(self, attempt: Attempt, voters: int) -> None:
        """`voters`: members of a full roster."""
        self.candidates: dict[PeerId, Member] = {}  # they ask for admission, and hold the state
        self._me, self._head, self._vote = attempt.me, attempt.head, attempt.vote
        self._members, self._voters, self._least_members = attempt.host.members, voters, attempt.settings.least_members

    def ask(self, peer: PeerId, member: Member, state_root: bytes) -> None:
        """Take a peer's request for admission. Raises BadPayload if it names another one, or has another state."""
        if member.peer != peer:
            raise BadPayload(f"asks for the admission of {member.peer}")
        if state_root != self._head.state_root:
            raise BadPayload("asks for admission with another state")
        self.candidates[peer] = member

    def drawn(self, mute: Collection[PeerId] = ()) -> tuple[Member, ...]:
        """Live members that stay, and candidates. Evicts `mute` members, if enough others are here."""
        quorum, size = self._vote.tally.quorum, len(self._head.roster)
        here = [member for member in self.here() if member == self._me or member.peer not in mute]
        staying = [member for member in self._or_all(here) if member.peer not in self._vote.leaving]
        # if all leave, keep enough members that each quorum has one of them
        staying = staying or here[: min_retained(size, quorum)]
        taken = {member.peer for member in staying}
        live = set(self._members.live())
        asking = {peer: each for peer, each in self.candidates.items() if each in live and peer not in taken}
        drawn = records.drawn(self._head.key.lineage, asking)  # so no id can be made up to come first
        limit = min(max_admitted(size), self._voters - len(staying))
        return tuple(sorted((*staying, *(asking[peer] for peer in drawn[:limit]))))

    def changes(self, has_work: Callable[[PeerId], bool]) -> bool:
        """Whether a record would change the roster. While all rest, members with work do not leave before it counts."""
        now, then = set(self._head.roster), set(self.drawn())
        if len(now) == 1 and len(then) < self._least_members():
            return False
        return now != then and not (then < now and all(has_work(member.peer) for member in now - then))

    def present(self) -> Sequence[Member]:
        """The members that a call waits for: those that are here."""
        return self._or_all(self.here())

    def here(self) -> list[Member]:
        """This member and the live ones of the roster, and peers whose only broken link is to it: it cannot judge
        them.
        """
        ends = [(each.first, each.second) for each in self._head.complaints]
        beyond = {
            second if first == self._me.peer else first for first, second in ends if self._me.peer in (first, second)
        }
        unknown = {peer for peer in beyond if sum(peer in pair for pair in ends) == 1}
        live = set(self._members.live())
        return [each for each in self._head.roster if each == self._me or each in live or each.peer in unknown]

    def _or_all(self, here: Sequence[Member]) -> Sequence[Member]:
        """These members; the whole roster if they are too few to decide, since this member may be the one cut off."""
        return here if len(here) >= self._vote.tally.quorum else self._head.roster
