"""The fault families of `--faults`; a seed draws the faults."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from protocols.base import PeerId
from tests.sim.faults import Cut, Faults, Message

Draw = Callable[[random.Random, Sequence[PeerId], float], Faults]
"""(seeded generator, peers, seconds in which faults begin) -> faults."""

MAX_MESSAGE = 600
"""Highest number of a message at which a fault is drawn; low numbers are more likely."""


def crash(rng: random.Random, peers: Sequence[PeerId], seconds: float) -> Faults:
    """A minority crashes, each peer at a random time or message, and restarts later or at the healing.

    Of two peers, one crashes; a single peer does not.
    """
    faults = Faults()
    if len(peers) == 1:
        return faults
    for peer in rng.sample(peers, rng.randint(1, max(1, (len(peers) - 1) // 2))):
        lasts = rng.choice((None, rng.uniform(0.5, 5.0), rng.uniform(5.0, 40.0)))
        if rng.random() < 0.5:
            faults = faults.crash(peer, at=rng.uniform(0.0, seconds), lasts=lasts)
        else:
            faults = faults.crash(peer, at_message=round(MAX_MESSAGE ** rng.random()), lasts=lasts)
    return faults


def silence(rng: random.Random, peers: Sequence[PeerId], seconds: float) -> Faults:
    """A minority is cut off from the others in both directions for a while, one to three times."""
    faults = Faults()
    for _ in range(rng.randint(1, 3)):
        mute = rng.sample(peers, rng.randint(1, max(1, (len(peers) - 1) // 2)))
        at = Message(rng.choice(mute), round(MAX_MESSAGE ** rng.random())) if rng.random() < 0.3 else None
        rest = tuple(peer for peer in peers if peer not in mute)
        moment = rng.uniform(0.0, seconds) if at is None else at
        faults = faults.also(Cut(tuple(sorted(mute)), rest, True, moment, rng.uniform(1.0, 0.5 * seconds)))
    return faults


def partition(rng: random.Random, peers: Sequence[PeerId], seconds: float) -> Faults:
    """All peers are split into two sides of any size; the partition heals, and another may follow."""
    faults, at = Faults(), rng.uniform(0.0, 0.5 * seconds)
    while at < seconds:
        mixed = rng.sample(peers, len(peers))
        side = rng.randint(1, max(1, len(peers) - 1))
        heal = at + rng.uniform(1.0, 0.6 * seconds)
        faults = faults.silence(mixed[:side], mixed[side:], at, heal)
        at = heal + rng.uniform(0.0, 0.5 * seconds)
    return faults


def one_way(rng: random.Random, peers: Sequence[PeerId], seconds: float) -> Faults:
    """Single links are blocked in one direction, some of them until the healing."""
    faults = Faults()
    for _ in range(rng.randint(1, len(peers))):
        source, target = _two(rng, peers)
        at = rng.uniform(0.0, seconds)
        faults = faults.silence_one_way(source, target, at, rng.choice((None, at + rng.uniform(1.0, seconds))))
    return faults


def stall(rng: random.Random, peers: Sequence[PeerId], seconds: float) -> Faults:
    """Links delay everything for a moment, mostly for less than the failure detector notices."""
    faults = Faults()
    for _ in range(rng.randint(2, 4 * len(peers))):
        source, target = _two(rng, peers)
        faults = faults.stall(source, target, rng.uniform(0.0, seconds), 10.0 ** rng.uniform(-1.0, 1.2))
    return faults


def reset(rng: random.Random, peers: Sequence[PeerId], seconds: float) -> Faults:
    faults = Faults()
    for _ in range(rng.randint(1, 3 * len(peers))):
        if rng.random() < 0.5:
            faults = faults.reset(rng.choice(peers), at=rng.uniform(0.0, seconds))
        else:
            faults = faults.reset(rng.choice(peers), at_message=round(MAX_MESSAGE ** rng.random()))
    return faults


def skew(rng: random.Random, peers: Sequence[PeerId], seconds: float) -> Faults:
    faults = Faults()
    for peer in peers:
        faults = faults.skew(peer, rng.choice((0.0, rng.uniform(-3.0, 3.0), rng.uniform(-1e4, 1e4))))
    return faults


def directory(rng: random.Random, peers: Sequence[PeerId], seconds: float) -> Faults:
    """The directory forgets, lags and lies while crashed peers restart and have to find the others."""
    shares = {"forget_share": rng.random(), "lag_seconds": rng.uniform(0.0, seconds), "lie_share": rng.random()}
    wrong = {name: value for name, value in shares.items() if rng.random() < 0.6}
    return crash(rng, peers, seconds).mislead(rng.uniform(0.0, 0.5 * seconds), seconds, **wrong)


def slower(rng: random.Random, peers: Sequence[PeerId], seconds: float) -> Faults:
    at = rng.uniform(0.0, seconds)
    return Faults().slow(rng.choice(peers), rng.choice((3.0, 10.0, 100.0)), at, at + rng.uniform(1.0, seconds))


def mixed(rng: random.Random, peers: Sequence[PeerId], seconds: float) -> Faults:
    faults = Faults()
    for draw in rng.sample((crash, silence, partition, one_way, stall, reset, skew, directory, slower), 4):
        if len(faults.events) < 2 or rng.random() < 0.5:
            faults += draw(rng, peers, seconds)
    return faults


def pausing(rng: random.Random, peers: Sequence[PeerId], seconds: float) -> Faults:
    """Peers rest or are away, from all of them to one, for moments or until the healing; some are killed meanwhile."""
    faults = Faults()
    for peer in rng.sample(peers, rng.randint(1, len(peers))):
        for _ in range(rng.randint(1, 3)):
            lasts = rng.choice((None, 10.0 ** rng.uniform(-1.0, 0.5), rng.uniform(0.0, 0.7 * seconds)))
            away = rng.random() < 0.5
            if rng.random() < 0.3:
                faults = faults.pause(peer, at_message=round(MAX_MESSAGE ** rng.random()), lasts=lasts, away=away)
            else:
                faults = faults.pause(peer, at=rng.uniform(0.0, seconds), lasts=lasts, away=away)
    return faults + crash(rng, peers, seconds) if rng.random() < 0.5 else faults


def chains(rng: random.Random, peers: Sequence[PeerId], seconds: float) -> Faults:
    """Neighbours in the list, which are of stages one after the other, cannot open streams to each other, some of them
    until the healing; some peers crash, some links stall, some streams are reset.
    """
    faults = Faults()
    for _ in range(rng.randint(1, len(peers))):
        index = rng.randrange(len(peers))
        pair = peers[index], peers[(index + 1) % len(peers)]
        if pair[0] != pair[1]:
            faults = faults.apart(*pair, rng.uniform(0.0, seconds), rng.choice((None, rng.uniform(0.1, seconds))))
    for draw in rng.sample((crash, stall, reset), rng.randint(0, 2)):
        faults += draw(rng, peers, seconds)
    return faults


def _two(rng: random.Random, peers: Sequence[PeerId]) -> tuple[PeerId, PeerId]:
    if len(peers) < 2:
        return peers[0], peers[0]
    source, target = rng.sample(peers, 2)
    return source, target


BREAKING: dict[str, Draw] = {
    "crash": crash,
    "silence": silence,
    "partition": partition,
    "one-way": one_way,
    "stall": stall,
    "reset": reset,
    "directory": directory,
    "mixed": mixed,
    "pausing": pausing,
    "chains": chains,
}
"""Families under which rounds may fail until all faults are healed."""

CALM = ("none", "lies", "slow")
"""Families under which, with replicated state, every round of every honest peer commits."""

FAULTS = (*CALM, "skew", *BREAKING)
"""`skew` has no effect as long as no protocol reads a wall clock."""
