"""Streams by method: their opening and serving, and the bytes that they move, counted and kept within caps."""
