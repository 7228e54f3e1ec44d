"""Streams by method: opened and served (`serving.py`), their bytes counted and kept within caps (`traffic.py`)."""
