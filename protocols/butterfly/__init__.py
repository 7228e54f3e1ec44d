"""Butterfly: a roster calls a round, averages and decides. The entry point is `protocols.butterfly.averager`."""
