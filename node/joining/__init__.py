"""Joining: selecting the run, and joining, founding or resuming it."""
