"""Membership of a run: handshakes, heartbeats, failure detection, this machine's clock. Begin with `membership.py`."""
