"""Host services without knowledge of training: clock, compute threads, child processes, identity, locks, metrics."""
