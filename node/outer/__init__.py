"""Outer rounds of one peer, with and without a shared anchor, and catching up."""
