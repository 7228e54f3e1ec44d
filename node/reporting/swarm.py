"""The swarm as one peer sees it: who is there, what each does, how often it was counted, and on what it runs. Pure."""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from node.reporting.report import RoundReport
from node.reporting.status import MAX_NAME, STATES, PeerStatus, Status, printable, short
from protocols.registry import INDEPENDENT_PROTOCOLS

ROUNDS = 20  # Decided rounds over which it is counted how often each peer was in the mean
MAX_SAID = 80  # Characters of a reason, a version or a device that are shown
DECIDED = ("committed", "alone", "skipped", "fork")
_TRAINS = ("training", "averaging")
_RELEASE = re.compile(r"(\d{1,5}(?:\.\d{1,5}){1,3})(?:\+.*)?")


@dataclass(frozen=True, slots=True)
class SwarmRow:
    """A peer of the swarm. State, reason, speed, version and device are its own words, not older than ten minutes."""

    peer: str
    nickname: str
    me: bool  # the peer whose status this is
    live: bool
    left: bool  # not live because it left in good order
    member: bool  # as in `peers` of a status
    stage: int
    round: int  # from 0
    route: str  # as in `peers` of a status
    route_reason: str  # likewise
    # As `state` of a status; empty if it is not known. A pause is shown as waiting, and without a reason.
    state: str = ""
    reason: str = ""
    # In how many of `counted_of` rounds it was in the mean, by this peer's reports; null if they do not tell.
    counted: int | None = None
    tokens_per_second: float = math.nan  # null if it does not train now
    version: str = ""
    device: str = ""
    age_seconds: float | None = None  # since it said so; null if it said nothing in the last ten minutes


@dataclass(frozen=True, slots=True)
class SwarmStatus:
    """What `status --swarm` and the page's card show."""

    here: int  # live peers, this one included
    known: int  # all peers that are known, this one included
    tokens_per_second: float  # of all live peers that train (with stages: of those of this peer's stage), as they say
    counted_of: int  # decided rounds of which this peer has reports, the latest 20 at most
    asked: bool  # whether all live peers that are asked (64 at most) were asked in the last two turns
    unreadable: int  # answers that could not be read, since the peer started
    newer: str  # warning if most other live peers run a later version
    rows: tuple[SwarmRow, ...]  # this peer first, then the live ones


class CountedRounds:
    """Which peers were in the means of the latest decided rounds."""

    def __init__(self) -> None:
        self._rounds: deque[frozenset[str]] = deque(maxlen=ROUNDS)

    def add(self, report: RoundReport) -> None:
        if report.outcome in DECIDED:
            self._rounds.append(frozenset(report.peers))

    def __len__(self) -> int:
        return len(self._rounds)

    def of(self, peer: str) -> int:
        return sum(peer in each for each in self._rounds)


def swarm_status(
    mine: Status,
    answers: Mapping[str, tuple[Status, float]],
    counted: CountedRounds,
    *,
    asked: bool = False,
    unreadable: Mapping[str, int],
    update: str = "",
) -> SwarmStatus:
    """`answers`: peer -> what it said of itself, and how long ago. `unreadable`: peer -> number of answers that could
    not be read. `update` is how this peer's code is updated.
    """
    gossips = mine.protocol in INDEPENDENT_PROTOCOLS  # these do not report whether this peer itself was counted
    others = sorted(mine.peers, key=lambda each: (not each.live, each.left, each.stage, not each.member, each.peer))
    rows = [_own_row(mine, None if gossips else counted.of(mine.peer))]
    for each in others:
        tells = each.stage == mine.stage and not mine.clusters  # with clusters, of the own one only
        known = counted.of(each.peer) if tells else None
        rows.append(_row(each, known, answers.get(each.peer), each.peer in unreadable))
    live = [each for each in rows if each.live]
    return SwarmStatus(
        here=len(live),
        known=len(rows),
        tokens_per_second=_sum(each for each in live if each.stage == mine.stage),
        counted_of=len(counted),
        asked=asked,
        unreadable=sum(unreadable.values()),
        newer=newer_line(mine.version, [each.version for each in live[1:]], update),
        rows=tuple(rows),
    )


def _own_row(mine: Status, counted: int | None) -> SwarmRow:
    return SwarmRow(
        peer=mine.peer,
        nickname=mine.nickname,
        me=True,
        live=True,
        left=False,
        member=True,
        stage=mine.stage,
        round=mine.round,
        route="",
        route_reason="",
        state=mine.state,
        reason=mine.reason,
        counted=counted,
        tokens_per_second=_speed(mine),
        version=mine.version,
        device=mine.device,
        age_seconds=0.0,
    )


def _row(peer: PeerStatus, counted: int | None, answer: tuple[Status, float] | None, unreadable: bool) -> SwarmRow:
    said, age_seconds = answer if answer and peer.live else (None, None)
    silent = "what it says cannot be read" if unreadable else ""
    return SwarmRow(
        peer=peer.peer,
        nickname=peer.nickname,
        me=False,
        live=peer.live,
        left=peer.left,
        member=peer.member,
        stage=peer.stage,
        round=peer.round,
        route=peer.route,
        route_reason=peer.route_reason,
        state=said.state if said and said.state in STATES else "",
        reason=printable(said.reason, MAX_SAID) if said else silent,
        counted=counted,
        tokens_per_second=_speed(said) if said else math.nan,
        version=printable(said.version, MAX_SAID) if said else "",
        device=printable(said.device, MAX_SAID) if said else "",
        age_seconds=age_seconds,
    )


def _speed(status: Status) -> float:
    """Of a peer that trains: another one still has the speed of its last round."""
    return status.tokens_per_second if status.state in _TRAINS else math.nan


def _sum(rows: Iterable[SwarmRow]) -> float:
    return math.fsum(each.tokens_per_second for each in rows if each.tokens_per_second > 0)


def newer_line(mine: str, others: Sequence[str], update: str) -> str:
    """A warning if most of the other live peers, of these versions (empty if not known), run a later one than `mine`.

    Shows numbers only: a version is another peer's text.
    """
    own = release(mine)
    later = sorted(each for each in map(release, others) if own and each > own)
    if not own or 2 * len(later) <= len(others):
        return ""
    least = ".".join(map(str, later[0])) + (" or later" if later[-1] != later[0] else "")
    return f"{len(later)} of {len(others)} peers run {least}, this one {'.'.join(map(str, own))}: {update}"


def release(version: str) -> tuple[int, ...]:
    """The numbers of a released version, without what a build adds; empty for any other text."""
    found = _RELEASE.fullmatch(version)
    return tuple(map(int, found[1].split("."))) if found else ()


def state_words(row: SwarmRow) -> str:
    """What a peer does, in a few words."""
    if not row.live:
        return "left" if row.left else "lost"
    state = {"syncing": "catching up", "": "live"}.get(row.state, row.state)
    return f"{state}: {row.reason}" if row.reason else state


def name_of(row: SwarmRow) -> str:
    name = printable(row.nickname)[:MAX_NAME] or short(row.peer)
    return f"{name} (this peer)" if row.me else name
