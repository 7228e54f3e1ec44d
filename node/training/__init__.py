"""Training: inner steps in a worker process."""
