"""The vote by which a roster decides on one record (Paxos). Pure: no clock and no network."""
