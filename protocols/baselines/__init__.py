"""What the baselines are made of. `protocols.baselines.registry` is the door."""
