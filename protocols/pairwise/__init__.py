"""Averaging between pairs of peers. Entry points: `protocols.pairwise.gossip`, `protocols.pairwise.push_sum`."""
