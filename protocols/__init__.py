"""How peers agree. Knows nothing of processes, sockets, threads or time: see `protocols.base`."""
