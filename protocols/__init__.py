"""The protocols by which peers agree. They use no processes, sockets, threads or clocks: see `protocols.base`."""
