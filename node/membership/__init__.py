"""Membership of a run: handshakes, heartbeats, failure detection, and the clocks and addresses of this machine."""
