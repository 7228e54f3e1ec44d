"""Inner steps in a process of their own."""
