"""The baselines that the other protocols are compared with. Begin with `protocols.baselines.synchronous`."""
