"""Which live members are in which stage, and how far the run is: stage 0 is the clock of all rounds."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from statistics import median_low
from typing import Protocol

from protocols.base import Deadline, Member, Members, PeerId


class StageDirectory(Protocol):
    def stage_of(self, peer: PeerId) -> int | None:
        """None if it is not known."""

    def rounds_of(self, peer: PeerId) -> int:
        """Training rounds that have ended at a peer of stage 0: its inner steps, or the call of the round."""

    def rests(self, peer: PeerId) -> bool:
        """Whether a peer takes no steps for now: it drives and serves no microbatches."""


class StageMembers:
    """`protocols.base.Members` of one stage: the live members that are in it, and always this peer."""

    def __init__(self, members: Members, directory: StageDirectory, stage: int, me: Member) -> None:
        self._members, self._directory, self._stage, self._me = members, directory, stage, me
        self._found: tuple[Member, ...] = ()
        self._found_at: int | None = None  # the version of the members when these were found

    @property
    def version(self) -> int:
        return self._members.version

    def live(self) -> tuple[Member, ...]:
        """Asked for with each message, so the peers of the whole run are gone through once for each change."""
        if self._found_at != self._members.version:
            self._found_at = self._members.version
            self._found = tuple(
                member for member in self._members.live()
                if member == self._me or self._directory.stage_of(member.peer) == self._stage
            )  # fmt: skip
        return self._found

    def met(self) -> Collection[PeerId]:
        return [peer for peer in self._members.met() if self._directory.stage_of(peer) == self._stage]

    async def changed(self, since: int, deadline: Deadline) -> int:
        return await self._members.changed(since, deadline)

    async def answers(self, peer: PeerId, within_seconds: float) -> bool:
        return await self._members.answers(peer, within_seconds)


def lacks_majority(roster: Sequence[Member], live: Sequence[Member]) -> bool:
    """Whether at most half of a stage's roster is live: it decides no round until the others are back, or it forks."""
    return 2 * len({*roster} & {*live}) <= len(roster)


STUCK_SECONDS = 300.0  # longer than most rounds: a peer of stage 0 announces something once in a round


class StageClock:
    """The round that all stages are in: the lower median of what the live peers of stage 0 have completed. Never goes
    back.

    It leaves out peers that have announced nothing yet, and a minority that has stayed behind for `STUCK_SECONDS`.
    """

    def __init__(self, directory: StageDirectory) -> None:
        self._directory, self._rounds = directory, 0
        self._announced: dict[PeerId, tuple[int, float]] = {}  # peer: its rounds, and since when

    def rounds(self, drivers: Sequence[Member], now: float) -> int:
        said = {each.peer: self._directory.rounds_of(each.peer) for each in drivers}
        before = self._announced
        self._announced = {
            peer: before[peer] if peer in before and before[peer][0] == rounds else (rounds, now)
            for peer, rounds in said.items() if rounds
        }  # fmt: skip
        everyone = [rounds for rounds, _ in self._announced.values()]
        most = max(everyone, default=0)
        moving = [rounds for rounds, since in self._announced.values() if rounds == most or now - since < STUCK_SECONDS]
        counted = moving if 2 * len(moving) >= len(everyone) else everyone
        if counted:
            self._rounds = max(self._rounds, median_low(counted))
        return self._rounds


def by_stage(members: Sequence[Member], directory: StageDirectory, stages: int) -> Mapping[int, tuple[Member, ...]]:
    """The working members of each stage, empty stages included. A resting member does not count."""
    found: dict[int, list[Member]] = {stage: [] for stage in range(stages)}
    for member in members:
        stage = directory.stage_of(member.peer)
        if stage is not None and stage in found and not directory.rests(member.peer):
            found[stage].append(member)
    return {stage: tuple(each) for stage, each in found.items()}
