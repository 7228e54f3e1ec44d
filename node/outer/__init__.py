"""The outer loop of a peer: train, average, step, report, with an outer state of all members or of its own."""
