"""The chain of decided rounds: what a peer keeps of it, proves of it, and judges of others'."""
