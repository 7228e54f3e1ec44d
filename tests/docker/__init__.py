"""The test of the swarm of docker/compose.yaml; start reading at `__main__.py`."""
