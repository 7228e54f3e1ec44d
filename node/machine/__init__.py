"""When this machine should pause: readings of its sensors, and rules over them. Start with `rules.py`."""
