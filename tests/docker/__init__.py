"""The swarm of docker/compose.yaml, built, started, struck and judged: `__main__.py` first."""
