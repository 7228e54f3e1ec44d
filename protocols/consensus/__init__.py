"""How a roster decides on one record: the vote, a pure machine without clock or voice."""
