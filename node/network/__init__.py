"""libp2p and the DHT. No other package uses p2pd or hivemind."""
