"""The direct data plane: bulk data over encrypted TCP connections, keyed over libp2p. Begin with `plane.py`."""
