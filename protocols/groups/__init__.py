"""Small groups along the lines of a grid. `protocols.moshpit` is the door."""
