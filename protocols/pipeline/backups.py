"""Backups of a stage's outer state: who has them, and who starts the stage again if all its members are lost. Pure.

A stage's holders are the two live peers of other stages with the least hash of (run, stage, peer) that have room. No
peer says how much room it has. One that is due and has no backup after `PASS_SECONDS` is passed over for the next one.

If a stage has had no live member for `LOST_SECONDS`, a holder of its newest backup goes there. Most of the live peers
of other stages have to endorse that; of many peers, those of the least hash.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence

from protocols.base import PeerId
from protocols.pipeline.balance import KEPT_REPLICAS, PlacedPeer, Placements

HOLDERS = 2
RENEW_ROUNDS = 5
PASS_SECONDS = 60.0
LOST_SECONDS = 120.0
AGREE_SECONDS = LOST_SECONDS / 2  # for which an endorser must have seen no member: views differ
TURN_SECONDS = 45.0  # until the next peer in the order proposes itself


def order(view: Placements, stage: int) -> list[PlacedPeer]:
    """The peers that may hold a backup of a stage, those that are due first."""

    def rank(peer: PeerId) -> bytes:
        return hashlib.sha256(b"starling backup" + view.run + repr((stage, peer)).encode()).digest()

    outside = [each for each in view.peers if each.works and stage not in (each.stage, each.moving)]
    return sorted(outside, key=lambda each: rank(each.peer))


def has(peer: PlacedPeer, stage: int) -> bool:
    return bool(peer.holds >> stage & 1)


def ahead(view: Placements, stage: int, me: PeerId) -> list[PlacedPeer] | None:
    """The peers that go before this one; None if this one may hold none, as one that rests."""
    found = order(view, stage)
    return next((found[:place] for place, each in enumerate(found) if each.peer == me), None)


def is_covered(stage: int, before: Sequence[PlacedPeer]) -> bool:
    """Whether enough peers that go `before` this one have the backup."""
    return sum(has(each, stage) for each in before) >= HOLDERS


def is_due(before: Sequence[PlacedPeer], waited_seconds: float) -> bool:
    """Whether it is this peer's turn to make a backup that was not covered for so long."""
    return waited_seconds >= PASS_SECONDS * max(0, len(before) - HOLDERS + 1)


def fits(stage: int, held: Collection[int], sizes: Sequence[int], limit_bytes: float) -> bool:
    """Whether a backup fits beside those that are held: each as it is, and the largest a second time, to renew it."""
    stages = {*held, stage}
    return sum(sizes[each] for each in stages) + max(sizes[each] for each in stages) <= limit_bytes


def is_old(held: Mapping[int, int], stage: int, trained: int) -> bool:
    """Whether a backup has to be renewed, or made. `held`: training rounds in each backup that this peer has."""
    return stage not in held or trained - held[stage] >= RENEW_ROUNDS


def missing(view: Placements, stage: int) -> int:
    """How many holders a stage lacks."""
    return HOLDERS - min(HOLDERS, sum(has(each, stage) for each in order(view, stage)))


# -- a stage that is lost ---------------------------------------------------------------------------------------------


def _rank(run: bytes, stage: int, number: int, peer: PeerId) -> bytes:
    return hashlib.sha256(b"starling refill" + run + repr((stage, number, peer)).encode()).digest()


def electors(run: bytes, stage: int, number: int, peers: Iterable[PeerId], most: int) -> list[PeerId]:
    """Those of the peers outside a stage that are asked to endorse its seat of this number."""
    return sorted(peers, key=lambda peer: _rank(run, stage, number, peer))[:most]


def is_majority(endorsers: Collection[PeerId], asked: Collection[PeerId]) -> bool:
    return 2 * len({*endorsers} & {*asked}) > len(asked)


def proposers(view: Placements, stage: int, number: int, held: Mapping[PeerId, int]) -> list[PeerId]:
    """The peers that may take the seat of this number, in the order of their turns.

    `held`: training rounds in the backup of each holder. The newest goes first; of several, one whose stage keeps
    enough replicas. A peer does not go if its user has chosen its stage, or if it would leave that without a replica.
    """
    replicas = view.replicas()
    able = [
        each for each in view.peers
        if each.peer in held and each.works and not each.pinned and each.moving in (None, stage)
        and replicas[each.stage] > 1
    ]  # fmt: skip

    def turn(peer: PeerId, place: int) -> tuple[int, bool, bytes]:
        return -held[peer], replicas[place] <= KEPT_REPLICAS, _rank(view.run, stage, number, peer)

    return [each.peer for each in sorted(able, key=lambda each: turn(each.peer, each.stage))]
