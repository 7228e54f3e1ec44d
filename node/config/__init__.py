"""Configuration: of the run (`run_config.py`), of this machine (`peer_config.py`), and the files that hold them.

`peer_sources.py` reads a machine's settings from options, variables and files, and checks them together.
"""
