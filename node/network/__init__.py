"""libp2p and the DHT. No other package uses p2pd or hivemind. Begin with `libp2p.py`, then `dht.py`."""
