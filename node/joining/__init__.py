"""Joining: selecting the run, and joining, founding or resuming it. Begin with `run_selector.py`."""
