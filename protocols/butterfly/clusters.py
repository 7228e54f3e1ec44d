"""Which voter an associate attaches to: a cluster of at most 31 associates for each voter. Pure.

An associate stays with a lead for an epoch of 64 rounds. A hash ranks the voters for it, so that no voter can gather
associates of its choice. The hash's seed is the lineage with which the associate's epoch began, and is never one from
before the voters knew it: to a seed that is known, ids can be made to fit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence

from protocols.allreduce.clustered_messages import MAX_CLUSTER
from protocols.base import PeerId
from protocols.consensus.record import drawn

EPOCH_ROUNDS = 64
CLUSTER_ROOM = MAX_CLUSTER - 1
"""Associates of a voter."""
FIRST_CHOICES = 4
"""A voter with little room accepts only peers that have it among this many first voters of their order."""
LITTLE_ROOM = 8
MAX_RESTING = CLUSTER_ROOM // 4
"""Associates of a voter that rest or observe: they get the mean as the others do, and bring nothing."""


def epoch_start(peer: PeerId, round: int) -> int:
    """The round in which a peer's epoch began. Peers' epochs begin in different rounds: not all move at once."""
    return max(0, epoch_end(peer, round) - EPOCH_ROUNDS)


def epoch_end(peer: PeerId, round: int) -> int:
    """The round in which a peer's next epoch begins."""
    phase = int.from_bytes(hashlib.sha256(b"starling epoch" + peer.encode()).digest()[:2], "little") % EPOCH_ROUNDS
    return round + EPOCH_ROUNDS - (round - phase) % EPOCH_ROUNDS


def seed_round(peer: PeerId, round: int, known_since: int) -> int | None:
    """The round whose lineage ranks the voters for a peer; None if that is not decided yet: then it attaches later.

    `known_since`: the round in which the peer first met the voters.
    """
    seed = max(epoch_start(peer, round), known_since + 1)
    return seed if seed <= round else None


def lead_order(seed: bytes, peer: PeerId, voters: Collection[PeerId]) -> tuple[PeerId, ...]:
    """The voters in the order in which a peer prefers them. `seed`: the lineage of its `seed_round`."""
    return drawn(b"starling lead" + seed + peer.encode() + b"/", voters)


def next_leads(order: Sequence[PeerId], refused: Collection[PeerId]) -> tuple[PeerId, ...]:
    """The voters to ask next, after these have refused: the first two of the order at once, then one at a time."""
    first = tuple(voter for voter in order[:2] if voter not in refused)
    return first or tuple(voter for voter in order[2:] if voter not in refused)[:1]


def emptiest(fills: Mapping[PeerId, int], order: Sequence[PeerId]) -> PeerId:
    """Of the voters that would take a peer, the one with the fewest associates; of equal ones the first in order."""
    return min(fills, key=lambda voter: (fills[voter], order.index(voter)))


def takes(voter: PeerId, order: Sequence[PeerId], fill: int, resting: int | None = None) -> bool:
    """Whether a voter that has `fill` associates takes a peer with this order. `resting`: how many of them rest, if the
    peer would rest, too.
    """
    if fill >= CLUSTER_ROOM or (resting is not None and resting >= MAX_RESTING):
        return False
    return fill < CLUSTER_ROOM - LITTLE_ROOM or voter in order[:FIRST_CHOICES]
