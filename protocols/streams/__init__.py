"""Streams between peers: framing, chunks, small messages, and the endpoint that admits streams (start there)."""
