"""Peers in pairs: states exchanged, shares given away. Doors: `protocols.gossip`, `protocols.pushing`."""
