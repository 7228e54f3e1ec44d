"""What the baselines are made of. `protocols.baselines` is the door."""
