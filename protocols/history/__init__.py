"""The chain of decided rounds: how a peer stores it, verifies it, and chooses between branches."""
