"""Whether a driver carries each activation between the stages, a star, or replicas pass it on, a chain. Pure.

A chain sends (2S - 3) times less from the driver, and needs fewer trips; a star needs no connections between replicas.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from protocols.base import Member
from protocols.peers.estimates import ewma
from protocols.pipeline.settings import PAIR_SECONDS, PipelineSettings

FULL_SHARE = 0.6  # of the driver's upload, that a star may fill
TRIPS_SHARE = 0.25  # of a microbatch's computing time, that the trips may take which a chain saves
STAYS_SHARE = 0.8  # of both, below which a chain becomes a star again
GAIN = 0.2


class Chains(StrEnum):
    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class Load:
    """What a driver has measured. 0: not known."""

    rate: float = 0.0  # microbatches/s that it has driven lately
    upload: float = 0.0  # bytes/s of its line
    trip_seconds: float = 0.0  # one way, to a replica
    computing_seconds: float = 0.0  # of a microbatch, in all stages


@dataclass(frozen=True, slots=True)
class Way:
    is_chain: bool
    why: str  # empty: there is no choice yet

    @property
    def line(self) -> str:
        """For the user."""
        if self.is_chain:
            return f"stages pass activations on to each other, in a chain: {self.why}"
        return f"this peer carries the activations between the stages, in a star: {self.why}"


def chosen_way(settings: PipelineSettings, chains: Chains, load: Load, is_chain: bool = False) -> Way:
    """With two stages there is nothing to pass on, and until something is measured there is no choice: a star.

    `is_chain` is the way so far: it stays as it is where little speaks for either.
    """
    stays = STAYS_SHARE if is_chain else 1.0
    if settings.stages == 2:
        return Way(False, "")
    if chains is not Chains.AUTO:
        return Way(chains is Chains.ALWAYS, "")
    share = load.rate * settings.upload_bytes(is_chain=False) / load.upload if load.upload else 0.0
    if share > stays * FULL_SHARE:
        return Way(True, f"a star would fill {min(share, 1):.0%} of its upload of {load.upload / 1e6:.3g} MB/s")
    saved = 2 * (settings.stages - 2) * load.trip_seconds
    if load.computing_seconds and saved > stays * TRIPS_SHARE * load.computing_seconds:
        what = f"that saves {saved:.2g} s of trips where a microbatch computes for {load.computing_seconds:.2g} s"
        return Way(True, what)
    if not load.upload and not load.computing_seconds:
        return Way(False, "")
    return Way(False, "its upload and the trips between peers have room for that")


class LoadMeter:
    """Measures a driver's load while it drives. The caller passes the time."""

    def __init__(self) -> None:
        self.trip_seconds = 0.0
        self._rate, self._done, self._began = 0.0, 0, math.nan

    @property
    def rate(self) -> float:
        """Microbatches/s, a moving average over the times in which it drove."""
        return self._rate

    def begin(self, now: float) -> None:
        self._done, self._began = 0, now

    def done(self) -> None:
        self._done += 1

    def end(self, now: float) -> None:
        if self._done and now > self._began:
            rate = self._done / (now - self._began)
            self._rate = ewma(self._rate, rate, GAIN) if self._rate else rate

    def opened(self, seconds: float) -> None:
        """Opening a stream took so long, which is a trip there and back."""
        self.trip_seconds = ewma(self.trip_seconds, seconds / 2, GAIN) if self.trip_seconds else seconds / 2


class BrokenPairs:
    """Replicas that a driver cannot chain for now: pairs that cannot connect, and those that serve no chains."""

    def __init__(self) -> None:
        self._until: dict[tuple[Member, Member], float] = {}

    def add(self, first: Member, second: Member, now: float) -> None:
        self._until = {pair: until for pair, until in self._until.items() if until > now}
        self._until[first, second] = now + PAIR_SECONDS

    def has(self, first: Member, second: Member, now: float) -> bool:
        return self._until.get((first, second), -math.inf) > now
