"""State sync: brings a peer to the state of the others by announcements, snapshots, and the means decided since."""
