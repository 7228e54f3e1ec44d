"""Standing where the others stand: who is where, snapshots, and the means since."""
