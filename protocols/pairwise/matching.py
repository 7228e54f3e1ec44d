"""Which peers a peer asks in its n-th exchange, and how a round of such exchanges mixes the values. No I/O.

A schedule is a function of (members, me, round, seed) alone: peers that know the same members compute the same pairs.
Where lists or rounds differ, a partner is as good as drawn at random; that only slows down mixing.

    random                 pairs drawn afresh each round, as a matching: both ends name each other
    ring                   the next peer in the ring; the previous one asks this peer
    exponential            the peers 1, 2, 4, … places ahead: log2 N exchanges a round (static exponential graph)
    one-peer-exponential   one of these, at another distance each round (Assran et al. 2019; Ying et al. 2021)
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache

import torch

from protocols.base import PeerId
from protocols.registry import SCHEDULES, require_known


def select_partners(
    schedule: str, members: Sequence[PeerId], me: PeerId, round_number: int, seed: str
) -> tuple[PeerId, ...]:
    """The peers that `me` asks in that round, in order. `seed` is the same for all peers of a run."""
    everybody = sorted({*members, me})
    if len(everybody) == 1:
        return ()
    place, count = everybody.index(me), len(everybody)
    if require_known("schedule", schedule, SCHEDULES) == "random":
        return (everybody[_drawn_partner(tuple(everybody), place, round_number, seed)],)
    return tuple(everybody[(place + hop) % count] for hop in hops_ahead(schedule, count, round_number))


def contraction(mixing: torch.Tensor) -> float:
    """ρ = ‖W − J‖, the largest share of the distance to the mean that one round leaves."""
    count = len(mixing)
    return float(torch.linalg.matrix_norm(mixing - torch.full_like(mixing, 1 / count), 2))


def hops(count: int) -> tuple[int, ...]:
    return tuple(1 << power for power in range((count - 1).bit_length()))


# -- the end of a run -------------------------------------------------------------------------------------------------

CLOSING_DRAWS = 32
CLOSING_SEARCH = 64
"""Up to this many peers, the best-mixing of `CLOSING_DRAWS` drawn sequences of pairs is used; above, the first one."""


@lru_cache(maxsize=4)
def closing_hops(count: int) -> tuple[int, ...]:
    """How many places ahead a peer gives in each of ⌈log₂ n⌉ + 1 steps: 1, 2, 4, …, and a last one.

    For a power of two, the last step repeats the first, the one that late peers miss. For other numbers it is the one
    that leaves the smallest deviations: at most 0.13.
    """
    every = hops(count)
    if count & (count - 1) == 0:
        return (*every, *every[:1])
    spread = torch.zeros(count, dtype=torch.float64)
    spread[0] = 1.0
    for hop in every:
        spread = (spread + spread.roll(hop)) / 2
    # For a circulant matrix, the norm besides the mean is the largest magnitude of its Fourier transform.
    left = [float(torch.fft.fft(spread + spread.roll(hop)).abs()[1:].max()) for hop in range(1, count)]
    return (*every, 1 + left.index(min(left)))


@lru_cache(maxsize=4)
def closing_pairs(count: int) -> tuple[tuple[int, ...], ...]:
    """The partner of each index in each of ⌈log₂ n⌉ + 1 steps. An index that is its own partner has none.

    For a power of two (index xor 1, 2, 4, …), all peers then hold the mean; the steps commute, and the last repeats the
    first. For other numbers up to 64, 0.13 to 0.36 of the deviations remain at most.
    """
    if count & (count - 1) == 0:
        return tuple(tuple(index ^ hop for index in range(count)) for hop in closing_hops(count))
    draws = CLOSING_DRAWS if count <= CLOSING_SEARCH else 1
    return min((_drawn_steps(count, draw) for draw in range(draws)), key=lambda steps: contraction(stepped(steps)))


def stepped(steps: Sequence[Sequence[int]]) -> torch.Tensor:
    """The mixing matrix, float64 (n, n), of consecutive steps in which every peer takes the mean with its partner."""
    product = torch.eye(len(steps[0]), dtype=torch.float64)
    for partner_of in steps:
        product = (product + product[list(partner_of)]) / 2
    return product


def _drawn_steps(count: int, draw: int) -> tuple[tuple[int, ...], ...]:
    names, steps = tuple(map(str, range(count))), []
    for step in range(len(closing_hops(count))):
        order, partner_of = matched_order(names, step, f"closing/{draw}"), list(range(count))
        for one, other in zip(order[::2], order[1::2], strict=False):
            partner_of[one], partner_of[other] = other, one
        steps.append(tuple(partner_of))
    return tuple(steps)


# -- the schedules ----------------------------------------------------------------------------------------------------


@lru_cache(maxsize=4)
def matched_order(members: tuple[PeerId, ...], round_number: int, seed: str) -> tuple[int, ...]:
    """Indices in a drawn order: each two consecutive ones are partners. Cached: it takes milliseconds."""

    def drawn(index: int) -> bytes:  # by member: with one more, mostly the same neighbours are found
        return hashlib.sha256(f"{seed}/{round_number}/{members[index]}".encode()).digest()

    return tuple(sorted(range(len(members)), key=drawn))


def _drawn_partner(members: tuple[PeerId, ...], me: int, round_number: int, seed: str) -> int:
    order = matched_order(members, round_number, seed)
    place = order.index(me)
    if place ^ 1 < len(order):
        return order[place ^ 1]
    drawn = hashlib.sha256(f"{seed}/{round_number}/{members[me]}/odd".encode()).digest()
    return order[int.from_bytes(drawn[:8], "big") % place]  # the peer left over asks one that has a partner


def hops_ahead(schedule: str, count: int, round_number: int) -> tuple[int, ...]:
    if schedule == "ring":
        return (1,)
    every = hops(count)
    return every if schedule == "exponential" else every[round_number % max(1, len(every)) :][:1]
