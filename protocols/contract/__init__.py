"""The modules of the contract between protocols and the node. Import its names from `protocols.base`."""
