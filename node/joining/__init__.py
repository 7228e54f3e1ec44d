"""The way into a run: which one it is, whether it may be entered, founded or gone on with."""
