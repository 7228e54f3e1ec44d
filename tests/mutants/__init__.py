"""Mutants: small faults put into the code on purpose, to see whether a test fails. Start with `__main__.py`."""
