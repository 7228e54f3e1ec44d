"""libp2p and the DHT: the only rooms that touch p2pd and hivemind."""
