"""Peers in pairs: states exchanged, shares given away. Doors: `protocols.pairwise.gossip`,
`protocols.pairwise.push_sum`."""
