"""Averaging side by side: hivemind, torchft, gloo, the floors of moving the bytes alone, and ours, in one run.

Open `__main__.py` first: what is measured, and how. `systems.py` lists the rows.
"""
