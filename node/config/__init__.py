"""What people set: the run's configuration, this machine's, and the files that hold them."""
