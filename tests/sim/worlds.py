"""Which world a protocol is played in."""

from __future__ import annotations

from protocols.registry import INDEPENDENT_PROTOCOLS
from tests.sim.independent_world import IndependentWorld
from tests.sim.world import World


def world_of(protocol: str, stages: int = 1) -> type[World]:
    """The world of a protocol: whether its peers share an anchor, and each holds all of it, decides what must hold."""
    if stages > 1:
        from tests.sim.pipeline_world import PipelineWorld  # nothing else loads pipelines

        return PipelineWorld
    return IndependentWorld if protocol in INDEPENDENT_PROTOCOLS else World
