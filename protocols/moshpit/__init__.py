"""Small groups along the lines of a grid. `protocols.moshpit.averager` is the door."""
