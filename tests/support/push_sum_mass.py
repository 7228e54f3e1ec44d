"""The mass of push-sum over a whole swarm: weights, weighted sums, and whether both are as at the start."""

from __future__ import annotations

import torch

from tests.sim.gossip_harness import GossipHarness, flat


def weights(swarm: GossipHarness) -> list[float]:
    return [each.weighted.masses.weight for each in swarm.gossips]


def mass(swarm: GossipHarness) -> torch.Tensor:
    """Σ w·z over all peers."""
    return torch.stack([w * flat(state) for w, state in zip(weights(swarm), swarm.state, strict=True)]).sum(0)


def is_conserved(swarm: GossipHarness) -> bool:
    """No share is under way, and the mass is that of the start."""
    assert not any(each.share_sender.kept for each in swarm.gossips)
    off = float((mass(swarm) - torch.stack(swarm.first).sum(0)).abs().max())
    return abs(sum(weights(swarm)) - swarm.count) < 1e-12 and off < 1e-5 * swarm.count
