"""What people see of a peer and of a swarm, and the door by which they ask; logs."""
