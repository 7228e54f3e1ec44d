"""Bringing a peer to the state of the others: announcements, snapshots, and the means decided since."""
