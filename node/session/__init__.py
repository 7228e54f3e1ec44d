"""The lifetime of one peer: `peer.py` builds the parts, `peer_session.py` runs the rounds of one run with them."""
