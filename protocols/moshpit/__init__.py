"""Small groups along the lines of a grid. The entry point is `protocols.moshpit.averager`."""
