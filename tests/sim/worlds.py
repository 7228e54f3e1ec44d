"""Which world a protocol is played in."""

from __future__ import annotations

from protocols import INDEPENDENT_PROTOCOLS
from tests.sim.independent_world import IndependentWorld
from tests.sim.world import World


def world_of(protocol: str) -> type[World]:
    """The world of a protocol, by its name: whether its peers share an anchor decides what they do and what holds."""
    return IndependentWorld if protocol in INDEPENDENT_PROTOCOLS else World
