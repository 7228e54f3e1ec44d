"""Bytes that must never change by accident. `python -m tests.golden.codecs` prints the present ones."""
