"""One round of a roster: called, averaged, led to its decision. `protocols.butterfly.averager` is the door."""
