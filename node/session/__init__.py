"""Composition root and lifetime of one peer: `peer.py` builds the parts, `peer_session.py` uses them in one run."""
