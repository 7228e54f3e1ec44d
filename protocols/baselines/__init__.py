"""The baselines that the other protocols are compared with. The entry point is `protocols.baselines.registry`."""
