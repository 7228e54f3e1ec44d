"""What one member knows about a round, besides the vote itself. Pure: the time comes in as an argument.

`ConsensusDriver` keeps one for each lineage, and it outlives the attempts at the round. Methods are named after events,
and only they change the state.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable

from protocols.base import Member, PeerId
from protocols.butterfly.resting import RestingMembers
from protocols.consensus.messages import Promise


class RoundState:
    """The ballot that this member leads, the parts that its vote waits for, and when it heard of other peers.

    Attributes:
        leading: the ballot that this member coordinates and may still choose a record for; None if there is none.
        promises: the members' promises for that ballot.
        wanted: digests of the parts that this member must hold before it can vote for `proposed`.
        proposed: the encoded record that `wanted` belongs to.
        heard: peer -> time at which this member last heard of it, in seconds.
        promised_at: time at which this member promised its present ballot; its coordinator then asks all for promises.
        leaving: members that have announced that they leave after this round. An announcement is final.
        resting: members that take no steps for now.
        onlookers: peer -> member that waits for the decision without being in the roster.
        phase_seconds: the expected length of the data phase.
    """

    def __init__(self, leading: int | None) -> None:
        """
        Args:
            leading: 0 if this member coordinates the first ballot, else None.
        """
        self.leading = leading
        self.promises: tuple[Promise, ...] = ()
        self.wanted: tuple[bytes, ...] = ()
        self.proposed = b""
        self.heard: dict[PeerId, float] = {}
        self.promised_at = 0.0
        self.leaving: set[PeerId] = set()
        self.resting = RestingMembers()
        self.onlookers: dict[PeerId, Member] = {}
        self.phase_seconds = 0.0
        self._promised = 0
        self._published = -1  # the last ballot in which this member sent a plan
        self._alone_since: float | None = None

    # -- this member coordinates --------------------------------------------------------------------------------------

    def ballot_won(self, ballot: int, promises: tuple[Promise, ...]) -> None:
        """Note that a quorum promised this ballot, and none of its members had accepted a record."""
        self.leading, self.promises = ballot, promises

    def plan_published(self, ballot: int) -> None:
        """Note that this member sent a plan to the roster."""
        self._published = ballot

    def record_chosen(self) -> None:
        """Note that this member proposed its record, so that the ballot leaves no further choice."""
        self.leading = None

    def ballot_promised(self, ballot: int, now: float) -> None:
        """Note which ballot this member has promised, so that it cannot choose in an earlier one."""
        if self._promised != ballot:
            self._promised, self.promised_at = ballot, now
        if self.leading != ballot:
            self.leading = None

    def attempt_restarted(self) -> bool:
        """Begin a new attempt. Returns whether this member gives up its ballot, because it had sent a plan in it.

        That plan belongs to an attempt that is over and binds no member, so the next coordinator takes over.
        """
        given_up = self.leading is not None and self.leading == self._published
        if given_up:
            self.leading = None
        return given_up

    # -- this member votes --------------------------------------------------------------------------------------------

    def parts_missing(self, record: bytes, digests: tuple[bytes, ...]) -> None:
        """Note that the vote for a record waits for these parts."""
        self.proposed, self.wanted = record, digests

    def fetch_begun(self) -> tuple[bytes, ...]:
        """Return the digests of the parts to fetch now, which are not wanted any more."""
        wanted, self.wanted = self.wanted, ()
        return wanted

    def fetch_failed(self, digests: tuple[bytes, ...]) -> None:
        """Note that these parts could not be fetched and are wanted again."""
        self.wanted = digests

    # -- other peers --------------------------------------------------------------------------------------------------

    def silent(self, peers: Iterable[PeerId], now: float, patience_seconds: float) -> list[PeerId]:
        """The peers that have been silent for `patience_seconds` and did not answer the present ballot's first message.

        Silence since that answer tells nothing: while members train, they send few offers, and those to few peers.
        """
        since = min(self.promised_at, now - patience_seconds)
        return [peer for peer in peers if self.heard.get(peer, -math.inf) < since]

    def peer_heard(self, peer: PeerId, now: float) -> None:
        """Note that a message or a stream of a peer came in."""
        self.heard[peer] = now

    def members_leave(self, peers: Collection[PeerId]) -> None:
        """Note that these members leave after this round."""
        self.leaving.update(peers)

    def onlooker_asked(self, member: Member) -> bool:
        """Note that a peer outside the roster asked for admission. Returns whether that is new."""
        news = self.onlookers.get(member.peer) != member
        self.onlookers[member.peer] = member
        return news

    def alone_seconds(self, now: float, alone: bool) -> float:
        """For how long the members at hand have been allowed to fork; 0.0 if they are not allowed now.

        Args:
            alone: whether they are allowed now.
        """
        if not alone:
            self._alone_since = None
        elif self._alone_since is None:
            self._alone_since = now
        return 0.0 if self._alone_since is None else now - self._alone_since

    def data_phase_planned(self, seconds: float) -> None:
        """Note the expected length of the data phase of a new plan."""
        self.phase_seconds = seconds
