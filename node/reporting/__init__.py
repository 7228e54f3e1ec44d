"""A peer's output as data: `report.py` (a line per round in rounds.jsonl), `status.py` (its status, as JSON)."""
