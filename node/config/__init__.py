"""Configuration: the run's, this machine's, and the files that hold them."""
