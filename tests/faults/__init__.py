"""Faults in real processes: peers killed at named points of a round, and whatever else a machine may do to them."""
