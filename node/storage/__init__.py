"""A peer's files: checkpoints, certificates, its history, and buffers for large data."""
