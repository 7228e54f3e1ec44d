"""What a peer says about itself: `report.py` (a line per round in rounds.jsonl), `status.py` (its status, as JSON)."""
