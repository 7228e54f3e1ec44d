"""Swarms of push-sum, and whether they have kept their mass."""

from __future__ import annotations

from typing import Any

import torch

from protocols.pairwise.push_sum import PushSum
from tests.sim.gossip_harness import GossipHarness, flat


def push_sum_swarm(count: int, **options: Any) -> GossipHarness:
    return GossipHarness(count, protocol=PushSum, **options)


def weights(swarm: GossipHarness) -> list[float]:
    return [each.weighted.masses.weight for each in swarm.gossips]


def is_conserved(swarm: GossipHarness) -> bool:
    """Whether no share is in transit, and Σw and Σw·z over all peers are what they were at the start."""
    assert not any(each.share_sender.kept for each in swarm.gossips)
    mass = torch.stack([w * flat(state) for w, state in zip(weights(swarm), swarm.state, strict=True)]).sum(0)
    error = float((mass - torch.stack(swarm.first).sum(0)).abs().max())
    return abs(sum(weights(swarm)) - swarm.count) < 1e-12 and error < 1e-5 * swarm.count
