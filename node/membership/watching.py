"""Which peers a peer watches: a choice by role and by lot. No I/O, no clock.

Up to `MAX_WATCHED` peers, each watches all others. In a larger run a peer watches those that its role names, and some
others by lot, so that the run stays connected, as in HyParView (Leitão et al. 2007). Each peer draws by a secret of its
own: no id can be made to fit the draw, and a peer that joins or leaves changes one place of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from protocols.base import PeerId
from protocols.wire import MAX_ROSTER

MAX_WATCHED = 96
ALL_AGAIN = 3 / 4
"""A peer that has begun to choose watches all again only below this share of `MAX_WATCHED`: each change costs dials."""
VOTERS_WATCHED = 4
"""By a peer outside the roster: enough that one of them is there, and each voter is watched by few."""
OTHERS_WATCHED = 16
STAGE_WATCHED = 8
"""Of the drivers, and of each stage beside the own one."""
DRIVEN_WATCHED, FAR_WATCHED = 44, 29
"""Of all stages that a driver drives; of all further stages of another peer. At least one of each."""


@dataclass(frozen=True, slots=True)
class Known:
    """A peer that has greeted this one, or that its role names. A doubtful one was not reached, or has no room."""

    peer: PeerId
    stage: int | None = None
    is_voter: bool = False  # of that stage; not known in a run without stages
    is_doubtful: bool = False


@dataclass(frozen=True, slots=True)
class Group:
    """Peers that matter to a role in the same way, and how many of them to watch."""

    peers: tuple[PeerId, ...]
    most: int


@dataclass(frozen=True, slots=True)
class Role:
    """The peers that a role has to watch, the most important first, and how many of all others besides."""

    groups: tuple[Group, ...] = ()
    others: int = MAX_WATCHED


class Lot:
    """An order of peers that follows from a secret: a smaller value comes first."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._drawn: dict[PeerId, bytes] = {}

    def __call__(self, peer: PeerId) -> bytes:
        if peer not in self._drawn:
            self._drawn[peer] = hashlib.sha256(self._secret + peer.encode()).digest()
        return self._drawn[peer]

    def forget(self, peer: PeerId) -> None:
        self._drawn.pop(peer, None)


def choose(
    role: Role, known: Sequence[Known], lot: Callable[[PeerId], bytes], chose: bool = False
) -> frozenset[PeerId] | None:
    """The peers to watch; None for all, also those that were never met. `chose`: whether it was not all before."""
    if sum(not each.is_doubtful for each in known) <= MAX_WATCHED * (ALL_AGAIN if chose else 1):
        return None
    order = [each.peer for each in sorted(known, key=lambda each: (each.is_doubtful, lot(each.peer)))]
    chosen: dict[PeerId, None] = {}
    for group in (*role.groups, Group(tuple(order), role.others)):
        wanted, free = frozenset(group.peers) - chosen.keys(), MAX_WATCHED - len(chosen)
        chosen.update(dict.fromkeys([peer for peer in order if peer in wanted][: min(group.most, free)]))
    return frozenset(chosen)


# -- roles ------------------------------------------------------------------------------------------------------------


def roster_role(me: PeerId, roster: Collection[PeerId], ties: Collection[PeerId] = ()) -> Role:
    """A voter watches its whole roster, another peer a few voters. Both watch the peers of their `ties`: in a run with
    clusters, those through which their work counts, or whose work counts through them.
    """
    most = MAX_ROSTER if me in roster else max(1, VOTERS_WATCHED - len({*ties} & {*roster}))
    return Role((Group(tuple(ties), len(ties)), Group(tuple(roster), most)), OTHERS_WATCHED)


def stage_role(voters: Role, stage: int, stages: int, firsts: Collection[PeerId], known: Iterable[Known]) -> Role:
    """That of a peer which watches `voters` of its own stage, and the `firsts` to whom stages were given.

    Besides, a driver (stage 0) watches peers of each stage, which it drives. Another peer watches drivers, the stages
    beside its own, and voters of the other stages, since it has to notice if they lose all of them.
    """
    members: dict[int, list[Known]] = {}
    for each in known:
        if each.stage is not None:
            members.setdefault(each.stage, []).append(each)
    groups = []
    for other in sorted(members.keys() - {stage}, key=lambda other: (other != 0, abs(other - stage))):
        near = other == 0 or abs(other - stage) == 1
        most = max(1, DRIVEN_WATCHED // (stages - 1) if stage == 0 else FAR_WATCHED // stages)
        able = members[other] if near or stage == 0 else [each for each in members[other] if each.is_voter]
        peers = tuple(each.peer for each in able or members[other])
        groups.append(Group(peers, STAGE_WATCHED if near and stage else most))
    return Role((*voters.groups, Group(tuple(firsts), stages), *groups), voters.others)
