"""What the contract is made of. `protocols.base` is the door: it has every name."""
