"""A web page of one peer, on this machine only, and its metrics for Prometheus. Start with `server.py`."""
